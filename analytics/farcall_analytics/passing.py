"""Exchange of tables between the tasks of a job: as Arrow streams, through a storage of blocks."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import re
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.ipc

from farcall_analytics.exchange import Written, divided, read_combined, read_pairs, write_combined, write_pairs
from farcall_common.errors import ConfigurationError, ObjectGone, StoreFull, StoreUnavailable
from farcall_common.objects.blocks import Part
from farcall_common.objects.node_blocks import is_on_nodes, open_storage
from farcall_common.payload import Piece

CODECS: Final = ("none", "lz4", "zstd")
_TRIES: Final = 10
_RUN: Final = re.compile(r"[0-9a-f]{32}")
_RUNNING: Final = "running"
"""A block that each job has in its first storage while it runs: the name of the run."""


@dataclasses.dataclass(frozen=True)
class Way:
    """How the tasks of a job pass their data on.

    :param url: of the storage, which all tasks reach; see :func:`~farcall_common.objects.blocks.open_blocks`.
    :param combines: whether a task writes one block for all others.
    :param codec: of blocks: ``none``, ``lz4`` or ``zstd``.
    :param job: what all names begin with: that of the job, and that of its run.
    :raises ValueError: for a codec that is none of these, and for memory that tasks do not share.
    """

    url: str = dataclasses.field(repr=False)  # it may have a password
    combines: bool = True
    codec: str = "none"
    job: str = ""

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise ValueError(f"codec: expected {', '.join(CODECS)}, got {self.codec!r}")
        if self.url == "memory:":
            raise ValueError("memory: is not shared between tasks; use a directory, a bucket or a Valkey")


def begin_job(ways: Sequence[Way]) -> tuple[Way, ...]:
    """Begin a run of a job, or continue its run from an earlier program. From now on tasks may write.

    Return the storages with the name of the run after the name of the job, so that blocks of other runs do not count.

    :raises ConfigurationError: if the storage has something else under the name of the job.
    """
    own = uuid.uuid4().hex
    name = f"{ways[0].job}/{_RUNNING}"
    with open_storage(ways[0].url) as blocks:
        for _ in range(_TRIES):
            if blocks.create(name, [own.encode()]):
                break
            with contextlib.suppress(ObjectGone):  # that run has just ended
                own = bytes(blocks.read(Part(name))).decode(errors="replace")
                break
        else:
            own = ""
    if not _RUN.fullmatch(own):
        raise ConfigurationError(
            f"{name} in the storage was not written by a job.", hint="Delete it, or rename the job."
        )
    return tuple(dataclasses.replace(way, job=f"{way.job}/{own}") for way in ways)


def end_job(ways: Sequence[Way], output: str) -> None:
    """Delete the blocks of all tasks. Tasks that still run will delete their own later blocks."""
    root = ways[0].job.partition("/")[0]
    with open_storage(ways[0].url) as blocks:
        blocks.delete([f"{root}/{_RUNNING}"])
        if output and _owner(ways, output) == _run_of(ways):
            blocks.delete([_output_name(output)])
    delete_blocks([dataclasses.replace(way, job=root) for way in ways], "")


def take_output(ways: Sequence[Way], output: str) -> None:
    """Reserve a directory: no other job, and no earlier one that was killed, writes files there from now on."""
    with open_storage(ways[0].url) as blocks:
        blocks.delete([_output_name(output)])
        blocks.create(_output_name(output), [_run_of(ways).encode()])


def check_output(ways: Sequence[Way], output: str) -> None:
    """:raises ObjectGone: if the job has ended, or another one writes into the directory."""
    if _owner(ways, output) != _run_of(ways):
        raise ObjectGone("The job has ended, or another one writes to the same output.", hint="Take another output.")


def _owner(ways: Sequence[Way], output: str) -> str:
    with open_storage(ways[0].url) as blocks, contextlib.suppress(ObjectGone):
        return bytes(blocks.read(Part(_output_name(output)))).decode()
    return ""


def _output_name(output: str) -> str:
    return f"farcall-outputs/{hashlib.sha256(output.encode()).hexdigest()}"


def _run_of(ways: Sequence[Way]) -> str:
    return ways[0].job.rpartition("/")[2]


def delete_blocks(ways: Sequence[Way], prefix: str) -> None:
    """Delete the blocks of a job below a prefix, but for those that tasks alone reach. A memory that does not answer
    deletes them itself."""
    for number, way in enumerate(ways):
        if is_on_nodes(way.url):
            continue
        with contextlib.suppress(*([StoreUnavailable] if number else [])), open_storage(way.url) as blocks:
            blocks.delete_below(f"{way.job}/{prefix}")


def check_running(ways: Sequence[Way]) -> None:
    """:raises ObjectGone: if the run has ended."""
    root = ways[0].job.partition("/")[0]
    with open_storage(ways[0].url) as blocks, contextlib.suppress(ObjectGone):
        if bytes(blocks.read(Part(f"{root}/{_RUNNING}"))).decode() == _run_of(ways):
            return
    raise ObjectGone(
        f"{root}: it has ended, in this program or another one with its name, or a worker does not see the storage.",
        hint="Take a storage that the program and all workers reach: a bucket, or a directory that they share.",
    )


def write_tables(ways: Sequence[Way], to: int, task: str, tables: Sequence[pa.Table], *, per_block: int = 1) -> Written:
    """Write the tables of a task, one for each partition.

    :param ways: the storages of the job; ``to``: which of them. If that one has no room, or does not answer, the first
        one.
    :param task: differs from that of each other task of the job.
    :param per_block: partitions in a block, where a storage has a block for each partition.
    :raises ObjectGone: if the job has ended; nothing is left then.
    """
    pieces = [to_pieces(each, ways[to].codec) for each in tables]
    return write_pieces(ways, to, task, pieces, per_block=per_block)


def write_pieces(
    ways: Sequence[Way],
    to: int,
    task: str,
    pieces: Sequence[Sequence[Piece]],
    *,
    first: int = 0,
    per_block: int = 1,
) -> Written:
    """Write the partitions of a task, from the number ``first`` on; see :func:`write_tables`."""
    try:
        found = _write_to(ways, to, task, pieces, per_block=per_block)
    except (StoreFull, StoreUnavailable):
        if not to:
            raise
        to = 0
        found = _write_to(ways, to, task, pieces, per_block=per_block)
    return msgspec.structs.replace(found, first=first, storage=to)


def _write_to(ways: Sequence[Way], to: int, task: str, pieces: Sequence[Sequence[Piece]], *, per_block: int) -> Written:
    way = ways[to]
    name = f"{way.job}/{task}"
    # of this run, not of the call: an executor may run a call twice, with rows in another order
    attempt = uuid.uuid4().hex
    with open_storage(way.url) as blocks:
        if way.combines:
            found = write_combined(blocks, name, pieces)
        else:
            found = write_pairs(blocks, name, attempt, pieces, per_block=per_block)
        try:
            check_running(ways)
        except ObjectGone:
            if way.combines:
                blocks.delete([name])
            else:
                blocks.delete_below(f"{name}/")
            raise
        return msgspec.structs.replace(found, name=blocks.full_name(found.name))


def find_written(ways: Sequence[Way], to: int, task: str, partitions: int, *, first: int = 0) -> Written | None:
    """Find the committed partitions of a task, in the storage ``to`` or the first one; None if there are none."""
    for number in sorted({0, to}):
        way = ways[number]
        name = f"{way.job}/{task}"
        lost = (ObjectGone, StoreUnavailable) if number else (ObjectGone,)
        with open_storage(way.url) as blocks, contextlib.suppress(*lost):
            found = read_combined(blocks, name, partitions) if way.combines else read_pairs(blocks, name)
            return msgspec.structs.replace(found, name=blocks.full_name(found.name), first=first, storage=number)
    return None


def read_tables(ways: Sequence[Way], written: Sequence[Written], partition: int) -> list[pa.Table]:
    """A partition, as each task has written it."""
    [pieces] = read_pieces(ways, written, partition, partition + 1)
    return [table for each in pieces for table in from_streams(each)]


def read_pieces(ways: Sequence[Way], written: Sequence[Written], first: int, last: int) -> list[list[memoryview]]:
    """The partitions from ``first`` on and before ``last``, each as bytes of every task that has some of it. Those that
    follow one another in a block are read at once.

    :raises ObjectGone: if a block is not there any more, or is damaged, or a storage beside the first one does not
        answer.
    """
    found: list[dict[int, memoryview]] = [{} for _ in range(first, last)]
    for number, way in enumerate(ways):
        wanted = [
            (place, start, part, sizes, checks)
            for place, each in enumerate(written)
            if each.storage == number
            for start, part, sizes, checks in _parts_within(each, first, last)
        ]
        if not wanted:
            continue
        try:
            with open_storage(way.url) as blocks:
                parts = blocks.read_all(part for _, _, part, _, _ in wanted)
        except StoreUnavailable as error:
            if not number:
                raise
            raise ObjectGone(f"{error} What it had is lost.") from error
        for (place, start, part, sizes, checks), data in zip(wanted, parts, strict=True):
            for partition, piece in enumerate(divided(part, data, sizes, checks), start - first):
                found[partition][place] = piece
    return [[pieces[place] for place in sorted(pieces)] for pieces in found]


def _parts_within(written: Written, first: int, last: int) -> Iterator[tuple[int, Part, list[int], bytes]]:
    """Find what a task has written of some partitions: the number of the first one in each part, the part, sizes and
    checksums."""
    start, end = max(first, written.first), min(last, written.first + len(written.offsets) - 1)
    for part, sizes, checks in written.parts(start, end):
        yield start, part, sizes, checks
        start += len(sizes)


def to_stream(table: pa.Table, codec: str = "none") -> bytes:
    """A table as an Arrow stream."""
    return b"".join(to_pieces(table, codec))


def to_pieces(table: pa.Table, codec: str = "none") -> Sequence[Piece]:
    """The pieces of an Arrow stream; columns that are not compressed are the memory of the table."""
    options = pa.ipc.IpcWriteOptions(compression=None if codec == "none" else codec)
    sink = _Pieces()
    with pa.ipc.new_stream(pa.PythonFile(sink, "w"), table.schema, options=options) as stream:
        stream.write_table(table)
    return sink.pieces


class _Pieces(io.RawIOBase):
    """A file that keeps what is written to it, without a copy."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self._size = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        self.pieces.append(data if isinstance(data, bytes) else memoryview(data))
        self._size += len(data)
        return len(data)


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
