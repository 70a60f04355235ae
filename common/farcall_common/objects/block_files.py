"""Files of blocks: one of each block, in a directory in the memory of a node. Tasks of a submitter write there, and
managers read there for tasks on other nodes, so no link is followed, and no name of a block leads elsewhere.

Where tasks of another submitter can write to a file whose name they learn, blocks are sealed: each chunk is behind an
HMAC of the block's name, the chunk's place and its bytes. Tasks of the submitter and managers alone have the key. Only
a copy of a chunk is checked and used: the file may change at any time.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import stat
import struct
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from farcall_common.errors import ObjectDamaged

if TYPE_CHECKING:
    from farcall_common.payload import Piece

DIRECTORY: Final = "blocks"
"""In that of a submitter in the memory of a node."""
DRAFT: Final = ".draft-"
_BLOCK: Final = "b-"
_CHUNK_BYTES: Final = 64 * 1024
"""Bytes of a chunk of a sealed block. The last chunk may be shorter."""
_SEAL_BYTES: Final = 16
_PLACE: Final = struct.Struct("<Q?")
"""Number of a chunk, and whether it is the last one."""
_READ_BYTES: Final = 2**18
_KEPT_S: Final = 86_400.0
"""Age from which a leftover block is deleted, by a writer without room, or at the end of the next job."""
_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def file_name(name: str) -> str:
    """Return the name of a block's file."""
    return _BLOCK + urllib.parse.quote(name, safe="")


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[int]:
    """A directory of blocks.

    :raises FileNotFoundError: if there is none.
    :raises OSError: if it is something else, such as a link.
    """
    descriptor = os.open(directory, _OPEN_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_block(directory: int, name: str) -> int:
    """A descriptor of a block.

    :raises FileNotFoundError: if there is none.
    :raises OSError: if it is something else, such as a link.
    """
    descriptor = os.open(file_name(name), _READ, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "expected the regular file of a block", name)
    return descriptor


def stored(pieces: Sequence[Piece], *, name: str, key: bytes) -> Iterator[Piece]:
    """Yield the content of a block's file. With a key, the block is sealed."""
    if not key:
        yield from pieces
        return
    own = _own_key(key, name)
    last = _last_chunk(sum(map(len, pieces)))
    for number, data in enumerate(_chunks(pieces)):
        yield _seal(own, number, data, is_last=number == last)
        yield data


def size_of(descriptor: int, *, key: bytes) -> int:
    """Bytes of a block, without its seals."""
    size = os.fstat(descriptor).st_size
    if not key:
        return size
    full, rest = divmod(size, _SEAL_BYTES + _CHUNK_BYTES)
    return full * _CHUNK_BYTES + max(0, rest - _SEAL_BYTES)


def read(descriptor: int, start: int, end: int, *, name: str, key: bytes) -> Iterator[bytes | memoryview]:
    """Yield copies of the bytes ``start`` to ``end`` of a block. With a key, their seals have been checked.

    :raises ObjectDamaged: if a seal does not fit.
    :raises OSError: if the file has become shorter.
    """
    if not key:
        while start < end:
            piece = os.pread(descriptor, min(_READ_BYTES, end - start), start)
            if not piece:
                raise OSError(errno.EIO, "a block has lost bytes", name)
            yield piece
            start += len(piece)
        return
    own = _own_key(key, name)
    last = _last_chunk(size_of(descriptor, key=key))
    for number in range(start // _CHUNK_BYTES, _last_chunk(end) + 1):
        found = memoryview(os.pread(descriptor, _SEAL_BYTES + _CHUNK_BYTES, number * (_SEAL_BYTES + _CHUNK_BYTES)))
        data = found[_SEAL_BYTES:]
        if not hmac.compare_digest(found[:_SEAL_BYTES], _seal(own, number, data, is_last=number == last)):
            raise ObjectDamaged(
                f"Block {name} was changed after it was written: its seal does not fit.",
                hint="Run the job again. Another user of the endpoint may have changed the memory of its node.",
            )
        first = number * _CHUNK_BYTES
        yield data[max(0, start - first) : end - first]


def _chunks(pieces: Sequence[Piece]) -> Iterator[bytes]:
    """Yield the pieces in chunks; an empty one if there are no bytes."""
    chunk: list[memoryview] = []
    room = _CHUNK_BYTES
    for piece in pieces:
        rest = memoryview(piece).cast("B")
        while rest:
            if not room:
                yield b"".join(chunk)
                chunk, room = [], _CHUNK_BYTES
            chunk.append(rest[:room])
            rest = rest[len(chunk[-1]) :]
            room -= len(chunk[-1])
    yield b"".join(chunk)


def _last_chunk(size: int) -> int:
    return max(0, size - 1) // _CHUNK_BYTES


def _own_key(key: bytes, name: str) -> bytes:
    return hmac.digest(key, name.encode(errors="surrogatepass"), "sha256")


def _seal(own: bytes, number: int, data: bytes | memoryview, *, is_last: bool) -> bytes:
    return hmac.digest(own, b"".join((_PLACE.pack(number, is_last), data)), "sha256")[:_SEAL_BYTES]


def names(directory: int, prefix: str) -> Iterator[str]:
    """The names of blocks below a prefix."""
    for each in os.listdir(directory):
        name = urllib.parse.unquote(each.removeprefix(_BLOCK))
        if each.startswith(_BLOCK) and name.startswith(prefix):
            yield name


def used_bytes(directory: int) -> int:
    """Return the size of all files together."""
    return sum(state.st_size for _, state in _files(directory))


def delete(directory: int, name: str) -> None:
    """Delete a block, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(file_name(name), dir_fd=directory)


def delete_below(directory: int, prefix: str) -> None:
    """Delete the blocks below a prefix, and what killed programs left a day ago."""
    for name in names(directory, prefix):
        delete(directory, name)
    delete_old(directory)


def delete_old(directory: int) -> None:
    """Delete what was written a day ago."""
    before = time.time() - _KEPT_S
    for name, state in _files(directory):
        if state.st_mtime < before:
            with contextlib.suppress(OSError):  # another task has deleted it, or it is none of ours
                os.unlink(name, dir_fd=directory)


def _files(directory: int) -> Iterator[tuple[str, os.stat_result]]:
    for name in os.listdir(directory):
        with contextlib.suppress(FileNotFoundError):
            yield name, os.stat(name, dir_fd=directory, follow_symlinks=False)
