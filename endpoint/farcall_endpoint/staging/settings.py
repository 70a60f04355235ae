"""Settings of a transfer process, as its agent gives them to it."""

from __future__ import annotations

from typing import Literal

import msgspec

from farcall_endpoint.staging.movers.globus_journal import GlobusSettings


class Storage(msgspec.Struct, frozen=True, kw_only=True):
    """A storage of the configuration: the beginning of its URLs, options, and the submitters that it is open to (``*``:
    all), for reading or also for writing."""

    url: str
    options: dict[str, str] = {}
    submitters: tuple[str, ...] | Literal["*"] = ()
    write: bool = False

    def has(self, url: str) -> bool:
        """Whether a URL is below this one."""
        return url == self.url or url.startswith(self.url.rstrip("/") + "/")

    def is_open_to(self, submitter: str, *, write: bool) -> bool:
        """Whether tasks of a submitter may use it; the owner's always may."""
        if not submitter:
            return True
        return (self.write or not write) and (self.submitters == "*" or submitter in self.submitters)


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a transfer process needs to know.

    :param directory: of the cache.
    :param working_dir: of tasks.
    :param cache_bytes: budget of the cache; None: its default.
    :param is_restricted: whether tasks of the owner have no more rights than those of others.
    :param globus: None: the endpoint has no collection.
    """

    directory: str
    working_dir: str
    cache_bytes: int | None = None
    storages: tuple[Storage, ...] = ()
    is_restricted: bool = False
    globus: GlobusSettings | None = None
