"""How the tasks of a job pass tables on: as Arrow streams, through a storage of blocks."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.ipc

from farcall_analytics.exchange import Written, read, write_combined, write_pairs
from farcall_common.objects.blocks import open_blocks

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

    url: str
    combines: bool = True
    codec: str = "none"
    job: str = ""

    def __post_init__(self) -> None:
        if self.codec not in _CODECS:
            raise ValueError(f"codec: expected {', '.join(_CODECS)}, got {self.codec!r}")
        if self.url == "memory:":
            raise ValueError("memory: is not shared between tasks; use a directory, a bucket or a Valkey")


def write_tables(way: Way, task: int | str, attempt: str, tables: Sequence[pa.Table]) -> Written:
    """Write the tables of a task, one for each partition.

    :param task: differs from that of each other task of the job.
    :param attempt: differs from that of each other attempt.
    """
    pieces = [[to_stream(each, way.codec)] for each in tables]
    name = f"{way.job}/{task}"
    with open_blocks(way.url) as blocks:
        return write_combined(blocks, name, pieces) if way.combines else write_pairs(blocks, name, attempt, pieces)


def read_tables(way: Way, written: Sequence[Written], partition: int) -> list[pa.Table]:
    """A partition, as each task has written it."""
    with open_blocks(way.url) as blocks:
        return [from_stream(each) for each in read(blocks, written, partition)]


def to_stream(table: pa.Table, codec: str = "none") -> bytes:
    """A table as an Arrow stream."""
    options = pa.ipc.IpcWriteOptions(compression=None if codec == "none" else codec)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema, options=options) as stream:
        stream.write_table(table)
    return sink.getvalue()


def from_stream(data: Any) -> pa.Table:
    """The table in an Arrow stream."""
    with pa.ipc.open_stream(pa.py_buffer(data)) as stream:
        return stream.read_all()
