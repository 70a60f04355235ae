"""Access to storage: which mover may move a file for a submitter, and with whose credentials.

Tasks of the endpoint's owner use the credentials of the endpoint's process. Tasks of others, and all tasks of an
endpoint that runs certain functions only, reach the storages of the configuration that are open to them, and public
``https://`` addresses without credentials.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
import urllib.parse
from collections.abc import Callable
from typing import Final

from farcall_common.file_arguments import shown
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.files.movers import BatchMover, MoveError, Mover
from farcall_endpoint.files.movers.objects import ObjectMover, open_stores
from farcall_endpoint.files.movers.web import WebMover
from farcall_endpoint.files.settings import Storage, TransferSettings

_WEB: Final = ("http", "https")


class Access:
    """Finds the mover of a file.

    :param settings: the storages, and whether the owner has rights of their own.
    :param unlink: removes a file of an open directory that may be a link to a copy.
    """

    def __init__(self, settings: TransferSettings, *, unlink: Callable[[int, str], None]) -> None:
        self._is_restricted = settings.is_restricted
        self._globus = settings.globus
        self._unlink = unlink
        self._lock = threading.Lock()
        self._batch_mover: BatchMover | None = None
        # The longest, which says most, comes first.
        self._storages = sorted(settings.storages, key=lambda each: -len(each.url))
        self._stores = functools.cache(lambda index: open_stores({} if index < 0 else self._storages[index].options))
        self._web_mover = functools.lru_cache(maxsize=64)(
            lambda submitter: WebMover(may_reach=functools.partial(self.may_reach, submitter))
        )

    def check(self, submitter: str, url: str, *, write: bool) -> Storage | None:
        """The storage of the configuration that has a file and is open to a submitter; empty: the owner. None if there
        is none, and it may be reached without.

        :raises MoveError: if it may not.
        """
        storage = self._storage(submitter, url, write=write)
        if storage is None and not self._is_owner(submitter) and url.partition("://")[0] not in _WEB:
            raise MoveError(outcomes.file_denied(shown(url), "its storage is not open to the task's submitter"))
        return storage

    def mover(self, submitter: str, url: str, *, write: bool) -> Mover:
        """What moves a file for a submitter.

        :raises MoveError: if the submitter may not use its storage.
        """
        storage = self.check(submitter, url, write=write)
        if url.partition("://")[0] in _WEB:
            return self._web_mover(submitter)
        return ObjectMover(self._stores(-1 if storage is None else self._storages.index(storage)), submitter)

    def batch_mover(self, submitter: str, url: str, *, write: bool) -> BatchMover:
        """The same for the URLs of :data:`~farcall_endpoint.files.movers.BATCH_SCHEMES`."""
        if self._globus is None:
            raise MoveError(outcomes.file_unsupported(shown(url), "it has no Globus collection (files.globus)"))
        self.check(submitter, url, write=write)
        with self._lock:
            if self._batch_mover is None:
                if importlib.util.find_spec("globus_sdk") is None:
                    reason = "globus-sdk is not installed there (pip install 'farcall-endpoint[globus]')"
                    raise MoveError(outcomes.file_unsupported(shown(url), reason))
                # Here, because it is an extra, and takes a while to load.
                from farcall_endpoint.files.movers.globus import GlobusMover

                self._batch_mover = GlobusMover.of(self._globus, environ=os.environ, unlink=self._unlink)
            return self._batch_mover

    def may_reach(self, submitter: str, url: str) -> bool:
        """Whether a submitter may reach a web address wherever it is. Others must be ``https`` and public."""
        return self._is_owner(submitter) or self._storage(submitter, url, write=False) is not None

    def _is_owner(self, submitter: str) -> bool:
        return not submitter and not self._is_restricted

    def _storage(self, submitter: str, url: str, *, write: bool) -> Storage | None:
        """The storage with the longest URL."""
        url = normalized(url)
        if not url:
            return None
        for storage in self._storages:
            if storage.has(url) and storage.is_open_to(submitter, write=write):
                return storage
        return None


def normalized(url: str) -> str:
    """A URL as those of storages are compared: of the web with its host in lower case, without a query. Empty if a
    server may regard it as another one: with dots as a component of its path, also before parameters (``..;a=b``), or
    with a user name."""
    scheme, _, rest = url.partition("://")
    if scheme in _WEB:  # elsewhere both characters are parts of keys
        rest = rest.partition("?")[0].partition("#")[0]
    host, _, path = rest.partition("/")
    unquoted = _unquoted(path)
    components = [each.partition(";")[0] for each in unquoted.split("/")]
    if "@" in host or "\\" in url or "\\" in unquoted or "." in components or ".." in components:
        return ""
    return f"{scheme}://{host.lower() if scheme in _WEB else host}/{path}"


def _unquoted(path: str) -> str:
    """A path without percent signs, however often it was quoted."""
    while (unquoted := urllib.parse.unquote(path)) != path:
        path = unquoted
    return path
