"""How the tasks of a job pass tables on: as Arrow streams, through a storage of blocks."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.ipc

from farcall_analytics.exchange import Written, read_combined, read_pairs, write_combined, write_pairs
from farcall_analytics.shaper import open_storage
from farcall_common.errors import ObjectGone, StoreFull
from farcall_common.payload import Piece

_CODECS: Final = ("none", "lz4", "zstd")


@dataclasses.dataclass(frozen=True)
class Way:
    """How the tasks of a job pass their data on.

    :param url: of the storage, which all tasks reach; see :func:`~farcall_common.objects.blocks.open_blocks`.
    :param combines: whether a task writes one block for all others.
    :param codec: of blocks: ``none``, ``lz4`` or ``zstd``.
    :param job: what all names begin with; each job has its own.
    :raises ValueError: for a codec that is none of these, and for memory that tasks do not share.
    """

    url: str = dataclasses.field(repr=False)  # it may have a password
    combines: bool = True
    codec: str = "none"
    job: str = ""

    def __post_init__(self) -> None:
        if self.codec not in _CODECS:
            raise ValueError(f"codec: expected {', '.join(_CODECS)}, got {self.codec!r}")
        if self.url == "memory:":
            raise ValueError("memory: is not shared between tasks; use a directory, a bucket or a Valkey")


def write_tables(ways: Sequence[Way], to: int, task: str, attempt: str, tables: Sequence[pa.Table]) -> Written:
    """Write the tables of a task, one for each partition.

    :param ways: the storages of the job; ``to``: which of them. If that one has no room, the first one.
    :param task: differs from that of each other task of the job.
    :param attempt: differs from that of each other attempt.
    """
    pieces = [[to_stream(each, ways[to].codec)] for each in tables]
    try:
        return write_pieces(ways, to, task, attempt, pieces)
    except StoreFull:
        if not to:
            raise
        return write_pieces(ways, 0, task, attempt, pieces)


def write_pieces(
    ways: Sequence[Way], to: int, task: str, attempt: str, pieces: Sequence[Sequence[Piece]], *, first: int = 0
) -> Written:
    """Write the partitions of a task, from the number ``first`` on."""
    way = ways[to]
    name = f"{way.job}/{task}"
    with open_storage(way.url) as blocks:
        found = write_combined(blocks, name, pieces) if way.combines else write_pairs(blocks, name, attempt, pieces)
        full_name = blocks.full_name(found.name)
    return msgspec.structs.replace(found, name=full_name, first=first, storage=to)


def find_written(ways: Sequence[Way], task: str, partitions: int, *, first: int = 0) -> Written | None:
    """What a task has committed, in whichever storage; None if nothing."""
    for number, way in enumerate(ways):
        name = f"{way.job}/{task}"
        with open_storage(way.url) as blocks, contextlib.suppress(ObjectGone):
            found = read_combined(blocks, name, partitions) if way.combines else read_pairs(blocks, name)
            return msgspec.structs.replace(found, name=blocks.full_name(found.name), first=first, storage=number)
    return None


def read_tables(ways: Sequence[Way], written: Sequence[Written], partition: int) -> list[pa.Table]:
    """A partition, as each task has written it."""
    return [table for each in read_pieces(ways, written, partition) for table in from_streams(each)]


def read_pieces(ways: Sequence[Way], written: Sequence[Written], partition: int) -> list[memoryview]:
    """A partition, as bytes of each task that has some of it.

    :raises ObjectGone: if a block is not there any more.
    """
    those = [each for each in written if each.has(partition)]
    found: dict[str, memoryview] = {}
    for number, way in enumerate(ways):
        own = [each for each in those if each.storage == number]
        if own:
            with open_storage(way.url) as blocks:
                parts = blocks.read_all(each.part(partition) for each in own)
            found |= {each.name: part for each, part in zip(own, parts, strict=True)}
    return [found[each.name] for each in those]


def to_stream(table: pa.Table, codec: str = "none") -> bytes:
    """A table as an Arrow stream."""
    options = pa.ipc.IpcWriteOptions(compression=None if codec == "none" else codec)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema, options=options) as stream:
        stream.write_table(table)
    return sink.getvalue()


def from_stream(data: Any) -> pa.Table:
    """The table in an Arrow stream."""
    return pa.concat_tables(from_streams(data))


def from_streams(data: Any) -> list[pa.Table]:
    """The tables in Arrow streams that follow one another."""
    source = pa.BufferReader(pa.py_buffer(data))
    found = []
    while source.tell() < source.size():
        with pa.ipc.open_stream(source) as stream:
            found.append(stream.read_all())
    return found
