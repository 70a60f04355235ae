"""Blocks: immutable bytes under names, by which the tasks of an exchange pass data to one another.

A name is created once: of several attempts of a task, one succeeds, and the others learn that they came second. So a
retry, or a copy that was started because the first one was slow, neither doubles nor changes anything. Names are paths
with ``/``; all of an exchange begin with the same part, by which they are deleted.
"""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
import hashlib
import importlib
import shutil
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeVar

from farcall_common.errors import ConfigurationError, ObjectGone
from farcall_common.objects.pace import MOST, pace_of
from farcall_common.objects.s3 import bucket_errors, open_bucket
from farcall_common.objects.valkey import SCHEMES, checked, open_client, server_errors
from farcall_common.payload import Piece

if TYPE_CHECKING:
    from obstore.store import LocalStore, MemoryStore, S3Store

T = TypeVar("T")

_FORMS: Final = "s3://BUCKET/PREFIX, file:///SHARED/DIRECTORY, or valkey://:PASSWORD@HOST:PORT/0"
_PREFIX: Final = "farcall:block:"
_STEP: Final = 500
_PAGE: Final = 1_000
"""Names that a bucket gives for a request."""
_PREFIXES: Final = "?prefixes="
_MOST_PREFIXES: Final = 256
_STALL_S: Final = 30.0
_KEPT_S: Final = 86_400
"""After so long Valkey deletes what was not deleted."""


class Part(NamedTuple):
    """Bytes ``start`` to ``end`` of a block; all from ``start`` on if ``end`` is None."""

    name: str
    start: int = 0
    end: int | None = None


class Blocks(abc.ABC):
    """A storage of blocks. May be used from any thread."""

    @abc.abstractmethod
    def create(self, name: str, pieces: Sequence[Piece]) -> bool:
        """Write a block; False if there is one of this name already, which stays as it is.

        :raises StoreFull: if there is no room.
        :raises StoreDenied, StoreUnavailable: if the storage refuses it, or does not answer.
        """

    def create_all(self, blocks: Sequence[tuple[str, Sequence[Piece]]]) -> None:
        """Write blocks, some of them at the same time. Those that are there stay as they are."""
        with concurrent.futures.ThreadPoolExecutor(MOST) as writers:
            list(writers.map(lambda block: self.create(*block), blocks))

    @abc.abstractmethod
    def read(self, part: Part) -> memoryview:
        """A part of a block.

        :raises ObjectGone: if there is no such block, or it is shorter.
        """

    def read_all(self, parts: Iterable[Part]) -> list[memoryview]:
        """Parts in their order, some of them read at the same time."""
        with concurrent.futures.ThreadPoolExecutor(MOST) as readers:
            return list(readers.map(self.read, parts))

    def full_name(self, name: str) -> str:
        """The name under which others read a block that was created here."""
        return name

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
    """Open the storage at an address. A scheme with a dot names a module, whose ``open_storage`` opens the address.

    :raises ConfigurationError: if no storage has such an address.
    """
    scheme, _, rest = url.partition(":")
    if scheme in ("s3", "file", "memory"):
        address, prefixes = split_prefixes(url)
        blocks = ObjectBlocks(address)
        return blocks if prefixes == 1 else SpreadBlocks(blocks, prefixes)
    if scheme in SCHEMES and rest.startswith("//"):
        return ValkeyBlocks(url)
    if (opener := _opener_of(scheme)) is not None:
        return opener(url)
    raise ConfigurationError(f"Unknown storage of blocks {scheme}:.", hint=f"Write {_FORMS}.")


def _opener_of(module: str) -> Callable[[str], Blocks] | None:
    """The function ``open_storage`` of a module in a package; None if there is no such module or function."""
    if "." not in module or not all(part.isidentifier() for part in module.split(".")):
        return None
    try:
        return getattr(importlib.import_module(module), "open_storage", None)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # another module, which this one imports
            raise
        return None


def split_prefixes(url: str) -> tuple[str, int]:
    """An address without ``?prefixes=N``, and that number; 1 if it has none.

    :raises ConfigurationError: if it is no such number.
    """
    if not url.startswith(("s3:", "file:")):
        return url, 1
    address, option, number = url.partition(_PREFIXES)
    if url.startswith("s3:") and "?" in address:
        raise ConfigurationError(f"{url} has an option that is not known.", hint="The only one is ?prefixes=16.")
    if not option:
        return url, 1
    if not (number.isascii() and number.isdecimal() and 1 <= int(number) <= _MOST_PREFIXES):
        raise ConfigurationError(
            f"{url}: prefixes is not a number from 1 to {_MOST_PREFIXES}.", hint="Write ?prefixes=16, for instance."
        )
    return address, int(number)


def prefix_number(name: str, prefixes: int) -> int:
    """Below which of so many prefixes a block is: the same one in each process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) % prefixes


class ObjectBlocks(Blocks):
    """Blocks in a bucket of S3, in a directory that all nodes share, or in this object alone (``memory:``).

    Requests to a bucket have a :class:`~farcall_common.objects.pace.Pace`, the same one for all that this process has
    in that bucket. It makes them again, and obstore does not: it would hide refusals from the pace.

    :param stall_s: after which a read of a bucket that gets no byte is made again.
    """

    def __init__(self, url: str, *, stall_s: float = _STALL_S) -> None:
        self._url = url
        self._is_directory = url.startswith("file:")
        self._pace = pace_of(f"s3://{urllib.parse.urlsplit(url).netloc}") if url.startswith("s3:") else None
        self._store: S3Store | LocalStore | MemoryStore
        self._writer: S3Store | LocalStore | MemoryStore
        if self._pace is None:
            self._store = self._writer = _open_store(url)
        else:
            self._store = open_bucket(url, retries=0, stall_s=stall_s)
            self._writer = open_bucket(url, retries=0)

    def create(self, name: str, pieces: Sequence[Piece]) -> bool:
        from obstore.exceptions import AlreadyExistsError

        data = b"".join(pieces)

        def request() -> bool:
            try:
                self._writer.put(name, data, mode="create", use_multipart=False)
            except AlreadyExistsError as error:
                if "ConditionalRequestConflict" in str(error):
                    raise  # another attempt creates it at the same time: which one succeeds is not known yet
                return False
            return True

        return self._request(request)

    def read(self, part: Part) -> memoryview:
        if part.end is not None and part.end <= part.start:
            return memoryview(b"")

        def request() -> memoryview:
            try:
                if part.end is None and not part.start:
                    return memoryview(self._store.get(part.name).bytes())
                end = self._store.head(part.name)["size"] if part.end is None else part.end
                return memoryview(self._store.get_range(part.name, start=part.start, end=end))
            except FileNotFoundError:
                raise _gone(part) from None

        return _whole(self._request(request), part)

    def names(self, prefix: str) -> Iterator[str]:
        if self._pace is None:
            with bucket_errors(self._url):
                for page in self._store.list(prefix):
                    yield from (each["path"] for each in page)
            return
        found = self._page(prefix, None)
        yield from found
        while len(found) == _PAGE:
            found = self._page(prefix, found[-1])
            yield from found

    def delete(self, names: Sequence[str]) -> None:
        if not self._is_directory:
            self._request(lambda: self._store.delete(list(names)))
            return
        with bucket_errors(self._url):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    self._store.delete(name)

    def delete_below(self, prefix: str) -> None:
        super().delete_below(prefix)  # refuses names that lead elsewhere
        if self._is_directory and prefix.strip("/"):  # what is left: directories, and drafts of killed writers
            shutil.rmtree(_directory(self._url) / prefix.strip("/"), ignore_errors=True)

    def close(self) -> None:
        """Do nothing: obstore closes its connections."""

    def _page(self, prefix: str, after: str | None) -> list[str]:
        """The next names of a bucket, which are in order: each page is a request that can be made again."""

        def request() -> list[str]:
            pages = self._store.list(prefix, offset=after, chunk_size=_PAGE)
            return [each["path"] for each in next(iter(pages), ())]

        return self._request(request)

    def _request(self, request: Callable[[], T]) -> T:
        def checked_request() -> T:
            with bucket_errors(self._url):
                return request()

        return checked_request() if self._pace is None else self._pace.run(checked_request)


class SpreadBlocks(Blocks):
    """Blocks of a storage, spread over prefixes by a hash of their names: a bucket limits the requests for each prefix.

    :param prefixes: how many; they are hexadecimal numbers with as many digits as the last one, behind a 0, as names of
        jobs begin with a letter.
    """

    def __init__(self, blocks: Blocks, prefixes: int) -> None:
        self._blocks = blocks
        self._prefixes = prefixes
        self._digits = len(f"{prefixes - 1:x}")

    def create(self, name: str, pieces: Sequence[Piece]) -> bool:
        return self._blocks.create(self._path(name), pieces)

    def read(self, part: Part) -> memoryview:
        return self._blocks.read(part._replace(name=self._path(part.name)))

    def names(self, prefix: str) -> Iterator[str]:
        for folder in self._folders():
            yield from (each.removeprefix(folder) for each in self._blocks.names(folder + prefix))

    def delete(self, names: Sequence[str]) -> None:
        self._blocks.delete([self._path(name) for name in names])

    def delete_below(self, prefix: str) -> None:
        with concurrent.futures.ThreadPoolExecutor(MOST) as deleters:
            list(deleters.map(lambda folder: self._blocks.delete_below(folder + prefix), self._folders()))

    def close(self) -> None:
        self._blocks.close()

    def _path(self, name: str) -> str:
        return self._folder(prefix_number(name, self._prefixes)) + name

    def _folders(self) -> Iterator[str]:
        return map(self._folder, range(self._prefixes))

    def _folder(self, number: int) -> str:
        return f"0{number:0{self._digits}x}/"


class ValkeyBlocks(Blocks):
    """Blocks in the memory of a Valkey."""

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

    def names(self, prefix: str) -> Iterator[str]:
        with server_errors(self._url):
            for key in self._client.scan_iter(match=f"{_PREFIX}{_escaped(prefix)}*", count=_STEP):
                yield key.decode().removeprefix(_PREFIX)

    def delete(self, names: Sequence[str]) -> None:
        # One command for each: a cluster, such as ElastiCache Serverless, takes none for keys of several slots.
        with server_errors(self._url), self._client.pipeline(transaction=False) as together:
            for name in names:
                together.unlink(_PREFIX + name)
            together.execute()

    def close(self) -> None:
        self._client.close()


def _open_store(url: str) -> LocalStore | MemoryStore:
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
