"""Blocks: immutable bytes under names, by which the tasks of an exchange pass data to one another.

A name is created once: of several attempts of a task, one succeeds, and the others learn that they came second. So a
retry, or a copy that was started because the first one was slow, neither doubles nor changes anything. Names are paths
with ``/``; all of an exchange begin with the same part, by which they are deleted.
"""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
import shutil
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from farcall_common.errors import ConfigurationError, ObjectGone
from farcall_common.objects.s3 import bucket_errors, open_bucket
from farcall_common.objects.valkey import SCHEMES, checked, open_client, server_errors
from farcall_common.payload import Piece

if TYPE_CHECKING:
    from obstore.store import LocalStore, MemoryStore, S3Store

_FORMS: Final = "s3://BUCKET/PREFIX, file:///SHARED/DIRECTORY, or valkey://:PASSWORD@HOST:PORT/0"
_AT_A_TIME: Final = 8
"""Reads of one task that go on at the same time."""
_PREFIX: Final = "farcall:block:"
_STEP: Final = 500
_KEPT_S: Final = 86_400
"""After so long Valkey deletes what was not deleted."""


class Part(NamedTuple):
    """Bytes ``start`` to ``end`` of a block; all from ``start`` on if ``end`` is None."""

    name: str
    start: int = 0
    end: int | None = None


class Blocks(abc.ABC):
    """A storage of blocks. May be used from any thread.

    ``can_take``: whether :meth:`take` works.
    """

    can_take: bool = False

    @abc.abstractmethod
    def create(self, name: str, pieces: Sequence[Piece]) -> bool:
        """Write a block; False if there is one of this name already, which stays as it is.

        :raises StoreFull: if there is no room.
        :raises StoreDenied, StoreUnavailable: if the storage refuses it, or does not answer.
        """

    @abc.abstractmethod
    def read(self, part: Part) -> memoryview:
        """A part of a block.

        :raises ObjectGone: if there is no such block, or it is shorter.
        """

    def read_all(self, parts: Iterable[Part]) -> list[memoryview]:
        """Parts in their order, some of them read at the same time."""
        with concurrent.futures.ThreadPoolExecutor(_AT_A_TIME) as readers:
            return list(readers.map(self.read, parts))

    def full_name(self, name: str) -> str:
        """The name under which others read a block that was created here."""
        return name

    def take(self, name: str) -> memoryview | None:
        """Read a block and delete it, in one step; None if there is none (any more).

        :raises NotImplementedError: if the storage cannot do that.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def names(self, prefix: str) -> Iterator[str]:
        """The names below a prefix."""

    @abc.abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Delete blocks, if they are there."""

    def delete_below(self, prefix: str) -> None:
        """Delete all blocks below a prefix."""
        found: list[str] = []
        for name in self.names(prefix):
            found.append(name)
            if len(found) >= _STEP:
                self.delete(found)
                found = []
        self.delete(found)

    @abc.abstractmethod
    def close(self) -> None:
        """Close connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_blocks(url: str) -> Blocks:
    """The storage at an address.

    :raises ConfigurationError: if it cannot be one.
    """
    scheme, _, rest = url.partition(":")
    if scheme in ("s3", "file", "memory"):
        return ObjectBlocks(url)
    if scheme in SCHEMES and rest.startswith("//"):
        return ValkeyBlocks(url)
    raise ConfigurationError(f"{scheme}: is no storage of blocks.", hint=f"Write {_FORMS}.")


class ObjectBlocks(Blocks):
    """Blocks in a bucket of S3, in a directory that all nodes share, or in this object alone (``memory:``)."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_directory = url.startswith("file:")
        self._store = _open_store(url)

    def create(self, name: str, pieces: Sequence[Piece]) -> bool:
        from obstore.exceptions import AlreadyExistsError

        with bucket_errors(self._url):
            try:
                self._store.put(name, b"".join(pieces), mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    def read(self, part: Part) -> memoryview:
        if part.end is not None and part.end <= part.start:
            return memoryview(b"")
        with bucket_errors(self._url):
            try:
                if part.end is None and not part.start:
                    return memoryview(self._store.get(part.name).bytes())
                end = self._store.head(part.name)["size"] if part.end is None else part.end
                found = memoryview(self._store.get_range(part.name, start=part.start, end=end))
            except FileNotFoundError:
                raise _gone(part) from None
        return _whole(found, part)

    def names(self, prefix: str) -> Iterator[str]:
        with bucket_errors(self._url):
            for page in self._store.list(prefix):
                yield from (each["path"] for each in page)

    def delete(self, names: Sequence[str]) -> None:
        with bucket_errors(self._url):
            if not self._is_directory:
                self._store.delete(list(names))
                return
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    self._store.delete(name)

    def delete_below(self, prefix: str) -> None:
        super().delete_below(prefix)  # refuses names that lead elsewhere
        if self._is_directory and prefix.strip("/"):  # what is left: directories, and drafts of killed writers
            shutil.rmtree(_directory(self._url) / prefix.strip("/"), ignore_errors=True)

    def close(self) -> None:
        """Do nothing: obstore closes its connections."""


class ValkeyBlocks(Blocks):
    """Blocks in the memory of a Valkey."""

    can_take = True

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        self._url = url
        self._client = open_client(url, timeout_s=timeout_s)

    def create(self, name: str, pieces: Sequence[Piece]) -> bool:
        with server_errors(self._url):
            return bool(self._client.set(_PREFIX + name, checked(pieces), nx=True, ex=_KEPT_S))

    def read(self, part: Part) -> memoryview:
        if part.end is not None and part.end <= part.start:
            return memoryview(b"")
        found: Any
        with server_errors(self._url):
            if part.end is None:
                found = self._client.get(_PREFIX + part.name)
            else:
                found = self._client.getrange(_PREFIX + part.name, part.start, part.end - 1)
        if found is None:
            raise _gone(part)
        return memoryview(found)[part.start :] if part.end is None else _whole(memoryview(found), part)

    def take(self, name: str) -> memoryview | None:
        with server_errors(self._url):
            found: Any = self._client.getdel(_PREFIX + name)
        return None if found is None else memoryview(found)

    def names(self, prefix: str) -> Iterator[str]:
        with server_errors(self._url):
            for key in self._client.scan_iter(match=f"{_PREFIX}{_escaped(prefix)}*", count=_STEP):
                yield key.decode().removeprefix(_PREFIX)

    def delete(self, names: Sequence[str]) -> None:
        if names:
            with server_errors(self._url):
                self._client.unlink(*(_PREFIX + name for name in names))

    def close(self) -> None:
        self._client.close()


def _open_store(url: str) -> S3Store | LocalStore | MemoryStore:
    if url.startswith("s3:"):
        return open_bucket(url)
    try:
        from obstore.store import LocalStore, MemoryStore
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "Blocks in files need the package obstore.", hint="Run `pip install 'farcall[s3]'` where this runs."
        ) from error
    if url == "memory:":
        return MemoryStore()
    if not url.startswith("file:///"):
        raise ConfigurationError(f"{url} is not the address of a directory.", hint="Write file:///SHARED/DIRECTORY.")
    directory = _directory(url)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return LocalStore(directory)


def _directory(url: str) -> Path:
    return Path(urllib.parse.unquote(url.removeprefix("file://")))


def _whole(found: memoryview, part: Part) -> memoryview:
    """:raises ObjectGone: if it is shorter than it should be."""
    if part.end is not None and len(found) != part.end - part.start:
        raise _gone(part)
    return found


def _gone(part: Part) -> ObjectGone:
    where = f"from {part.start} on" if part.end is None else f"{part.start} to {part.end}"
    return ObjectGone(f"There is no block {part.name} with the bytes {where}.")


def _escaped(prefix: str) -> str:
    """A prefix in a pattern of Valkey."""
    return "".join(f"\\{letter}" if letter in "*?[]^\\-" else letter for letter in prefix)
