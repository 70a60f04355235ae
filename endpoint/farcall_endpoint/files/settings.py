"""Settings of a transfer process, as its agent gives them to it."""

from __future__ import annotations

from typing import Literal

import msgspec

from farcall_common.credentials import expanded
from farcall_endpoint.config.schema import Config
from farcall_endpoint.services.directory import EndpointDirectory


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


class GlobusSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for Globus in a transfer process.

    :param collection: the UUID of the endpoint's own collection.
    :param path, directory: one directory, as the collection names it and as this machine does.
    :param login_file: the endpoint's login at Globus.
    :param endpoint_name: the local name of the endpoint, for the commands in hints.
    :param journal: the directory of the journal.
    :param limit_s: seconds without progress after which a transfer is cancelled.
    """

    collection: str
    path: str
    directory: str
    login_file: str
    endpoint_name: str
    journal: str
    limit_s: float = 300.0

    @classmethod
    def of_config(cls, config: Config, endpoint: EndpointDirectory) -> GlobusSettings | None:
        """The settings of an endpoint; None if it has no collection."""
        section = config.files.globus
        if section is None:
            return None
        directory = expanded(section.directory)
        return cls(
            collection=section.collection.lower(),
            path=section.path or str(directory),
            directory=str(directory),
            login_file=str(endpoint.globus_login_file),
            endpoint_name=endpoint.name,
            journal=str(endpoint.path / "globus"),
            limit_s=config.files.transfer_limit,
        )


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a transfer process.

    :param directory: directory of the cache.
    :param working_dir: working directory of tasks.
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
