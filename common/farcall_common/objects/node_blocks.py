"""Blocks in the memory of nodes: a task writes into a directory in the memory of its node. Tasks of the same node map
what is there, those of other nodes get it by way of the managers.

A block is a file, written under another name and then linked: a link to a name that exists fails, so that a block is
created once on a node. Two attempts of a task on two nodes may both create theirs; the name under which a block is
read says on which node it is.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import errno
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from farcall_common import running
from farcall_common.errors import ConfigurationError, ObjectGone, StoreFull, StoreUnavailable
from farcall_common.objects import block_files
from farcall_common.objects.blocks import Blocks, Part, open_blocks
from farcall_common.objects.directory import file_errors
from farcall_common.payload import Piece
from farcall_common.running import NodeMemory, Range

SCHEME: Final = "node:"
_SEPARATOR: Final = "//"
"""Between a node and a name."""
AT_A_TIME: Final = 4
"""Requests of one task that are under way."""
MOST_PARTS: Final = 56
"""Parts of a request: as many as its bytes permit, with names of a usual length. An answer may have a file for
each."""
MOST_BYTES: Final = 64 * 2**20
"""Bytes of a request: the manager has them in memory until they are sent. A larger part takes several requests."""
_RESERVED_PART: Final = 8
"""One of so many parts of the memory, and of its file system, stays free."""
_MAPPED_BYTES: Final = 256 * 1024
"""Below this size a copy takes less time than a mapping."""
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class OneNode:
    """The memory of a node that has no others.

    :param directory: None: there is none.
    """

    key = b""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory

    def address(self) -> str:
        """See :class:`~farcall_common.running.NodeMemory`."""
        return ""

    def fetch(self, node: str, parts: Sequence[Range]) -> list[memoryview]:  # noqa: ARG002 - there are no others
        """See :class:`~farcall_common.running.NodeMemory`."""
        raise _gone(Part(*parts[0]))

    def delete_below(self, node: str, prefix: str) -> None:
        """See :class:`~farcall_common.running.NodeMemory`."""


def is_on_nodes(url: str) -> bool:
    """Whether an address is that of the memory of nodes, which tasks alone reach."""
    return url.startswith(SCHEME)


def name_on_node(node: str, name: str) -> str:
    """The name of a block for tasks of all nodes.

    :param node: its address; empty: this node, or all if they share their memory.
    """
    return f"{node}{_SEPARATOR}{name}" if node else name


def node_of(name: str) -> str:
    """The node of a block with such a name."""
    return name.rpartition(_SEPARATOR)[0]


def open_storage(url: str) -> Blocks:
    """Open the memory of nodes, or another storage; see :func:`~farcall_common.objects.blocks.open_blocks`."""
    return open_node_blocks(url) if is_on_nodes(url) else open_blocks(url)


def open_node_blocks(url: str) -> NodeBlocks:
    """Open the storage ``node:`` or ``node:BYTES``: BYTES limits all jobs of a submitter together, on each node.

    :raises ConfigurationError: if that is no such address, or no task of Farcall runs here.
    """
    most = url.removeprefix(SCHEME)
    if most and not most.isdecimal():
        raise ConfigurationError(f"Invalid storage of blocks {url}.", hint="Write node: or node:BYTES.")
    try:
        memory = running.current().node_memory()
    except ConfigurationError as error:
        raise ConfigurationError(
            "The memory of nodes is for tasks of Farcall, and none runs here.",
            hint="Use an Executor or an Engine of Farcall, or another method of exchange.",
        ) from error
    return NodeBlocks(memory, most_bytes=int(most) if most else None)


class NodeBlocks(Blocks):
    """Blocks in the memory of nodes.

    A name without a node is one of this node. Those of other nodes are read in parts that have an end, and deleted
    below a prefix.

    :param most_bytes: of all blocks on this node; None: as many as leave an eighth of the memory free.
    """

    def __init__(self, memory: NodeMemory, *, most_bytes: int | None = None) -> None:
        self._memory = memory
        self._directory = memory.directory
        self._most_bytes = most_bytes
        self._own_address: str | None = None

    def create(self, name: str, pieces: Sequence[Piece]) -> bool:
        directory = self._directory
        if directory is None:
            raise StoreFull("This node has no memory for blocks.")
        try:
            self._address()
        except StoreUnavailable as error:
            raise StoreFull(error.record.message) from error
        with _errors(name):
            with contextlib.suppress(FileExistsError):
                directory.mkdir(mode=0o700)
            with block_files.opened(directory) as descriptor:
                return self._create(descriptor, name, pieces)

    def read(self, part: Part) -> memoryview:
        return self.read_all([part])[0]

    def read_all(self, parts: Iterable[Part]) -> list[memoryview]:
        wanted = list(parts)
        found: dict[int, memoryview] = {}
        elsewhere: dict[str, list[int]] = collections.defaultdict(list)
        for number, part in enumerate(wanted):
            here = self._read_here(part)
            if here is None:
                elsewhere[node_of(part.name)].append(number)
            else:
                found[number] = here
        steps = [(node, step) for node, numbers in elsewhere.items() for step in _steps(numbers, wanted)]
        if steps:
            with concurrent.futures.ThreadPoolExecutor(min(len(steps), AT_A_TIME)) as readers:
                for each in readers.map(lambda step: self._fetch(step[0], step[1], wanted), steps):
                    found |= each
        return [found[number] for number in range(len(wanted))]

    def full_name(self, name: str) -> str:
        return name_on_node(self._address(), name)

    def names(self, prefix: str) -> Iterator[str]:
        if self._directory is not None:
            with _errors(prefix), contextlib.suppress(FileNotFoundError), block_files.opened(self._directory) as found:
                yield from block_files.names(found, prefix)

    def delete(self, names: Sequence[str]) -> None:
        if self._directory is not None:
            with (
                _errors("blocks"),
                contextlib.suppress(FileNotFoundError),
                block_files.opened(self._directory) as found,
            ):
                for name in names:
                    block_files.delete(found, name)

    def delete_below(self, prefix: str) -> None:
        """Delete all blocks below a prefix, and what killed programs left a day ago."""
        node, _, own = prefix.rpartition(_SEPARATOR)
        if node and node != self._address():
            self._memory.delete_below(node, own)
        elif self._directory is not None:
            with _errors(prefix), contextlib.suppress(FileNotFoundError), block_files.opened(self._directory) as found:
                block_files.delete_below(found, own)

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def _address(self) -> str:
        if self._own_address is None:
            self._own_address = self._memory.address()
        return self._own_address

    def _create(self, directory: int, name: str, pieces: Sequence[Piece]) -> bool:
        file = block_files.file_name(name)
        if os.access(file, os.F_OK, dir_fd=directory, follow_symlinks=False):
            return False
        self._check_room(directory, sum(map(len, pieces)))
        draft = f"{block_files.DRAFT}{os.urandom(16).hex()}"
        try:
            content = block_files.stored(pieces, name=name, key=self._memory.key)
            _write(os.open(draft, _CREATE, 0o600, dir_fd=directory), content)
            os.link(draft, file, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
        except FileExistsError:
            return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft, dir_fd=directory)
        return True

    def _check_room(self, directory: int, size: int) -> None:
        """:raises StoreFull: if there is no room for so many bytes."""
        if self._room(directory) < size:
            block_files.delete_old(directory)
            if (room := self._room(directory)) < size:
                raise StoreFull(f"A block of {size:,} bytes has no room in {max(0, room):,} of this node's memory.")

    def _room(self, directory: int) -> int:
        state = os.fstatvfs(directory)
        room = (state.f_bavail - state.f_blocks // _RESERVED_PART) * state.f_frsize
        node = _node_bytes()
        room = min(room, node["MemAvailable"] - node["MemTotal"] // _RESERVED_PART)
        if self._most_bytes is not None:
            room = min(room, self._most_bytes - block_files.used_bytes(directory))
        return room

    def _read_here(self, part: Part) -> memoryview | None:
        """A part of a block in this directory; None if it is on another node, or cannot be seen here."""
        if part.end is not None and part.end <= part.start:
            return memoryview(b"")
        node, _, name = part.name.rpartition(_SEPARATOR)
        if self._directory is None or (node and node != self._address()):
            return None
        with _errors(name), contextlib.suppress(FileNotFoundError), block_files.opened(self._directory) as directory:
            descriptor = block_files.open_block(directory, name)
            try:
                key = self._memory.key
                size = block_files.size_of(descriptor, key=key)
                end = size if part.end is None else part.end
                if max(part.start, end) > size:
                    raise _gone(part)
                return _read(descriptor, part.start, end, name=name, key=key)
            finally:
                os.close(descriptor)
        return None

    def _fetch(self, node: str, numbers: Sequence[int], wanted: Sequence[Part]) -> dict[int, memoryview]:
        """These of the wanted parts, by their numbers."""
        ends = [wanted[number].end for number in numbers]
        if None in ends:
            raise _gone(wanted[numbers[ends.index(None)]])
        own = [Part(node_name(wanted[number].name), *wanted[number][1:]) for number in numbers]
        if len(own) == 1 and _size(own[0]) > MOST_BYTES:
            return {numbers[0]: self._fetch_large(node, own[0])}
        return dict(zip(numbers, self._memory.fetch(node, own), strict=True))

    def _fetch_large(self, node: str, part: Part) -> memoryview:
        """A part of more bytes than a request has."""
        found = memoryview(mmap.mmap(-1, _size(part)))
        for at in range(0, len(found), MOST_BYTES):
            end = min(len(found), at + MOST_BYTES)
            [found[at:end]] = self._memory.fetch(node, [(part.name, part.start + at, part.start + end)])
        return found.toreadonly()


def node_name(name: str) -> str:
    """The name that a block has on its node."""
    return name.rpartition(_SEPARATOR)[2]


def _size(part: Part) -> int:
    return (part.end or 0) - part.start


def _steps(numbers: Sequence[int], wanted: Sequence[Part]) -> Iterator[list[int]]:
    """Numbers of parts for requests of limited size."""
    step: list[int] = []
    size = 0
    for number in numbers:
        part = wanted[number]
        own = _size(part)
        if step and (len(step) == MOST_PARTS or size + own > MOST_BYTES):
            yield step
            step, size = [], 0
        step.append(number)
        size += own
    if step:
        yield step


def _write(descriptor: int, pieces: Iterable[Piece]) -> None:
    try:
        for piece in pieces:
            left = memoryview(piece).cast("B")
            while left:
                left = left[os.write(descriptor, left) :]
    finally:
        os.close(descriptor)


def _read(descriptor: int, start: int, end: int, *, name: str, key: bytes) -> memoryview:
    """Bytes of a block: mapped if there are many and the block has no seals, else a copy."""
    if end - start >= _MAPPED_BYTES and not key:
        first = start - start % mmap.ALLOCATIONGRANULARITY
        try:
            found = mmap.mmap(descriptor, end - first, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ, offset=first)
            return memoryview(found)[start - first :]
        except OSError as error:
            if error.errno != errno.EMFILE:  # a mapping has a descriptor; a copy needs none
                raise
    copy = memoryview(mmap.mmap(-1, end - start) if end - start >= _MAPPED_BYTES else bytearray(end - start))
    at = 0
    for piece in block_files.read(descriptor, start, end, name=name, key=key):
        copy[at : at + len(piece)] = piece
        at += len(piece)
    return copy.toreadonly()


def _node_bytes() -> dict[str, int]:
    """Memory of the node, by the names of the kernel."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {name.rstrip(":"): int(number) * 1024 for name, number, *_ in lines}


def _gone(part: Part) -> ObjectGone:
    return ObjectGone(f"There is no block {part.name} with the bytes {part.start} to {part.end} on its node.")


def _errors(name: str) -> contextlib.AbstractContextManager[None]:
    return file_errors(f"{name}, in the memory of this node")
