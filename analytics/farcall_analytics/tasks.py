"""Tasks: what workers run. Each reads its part of the input, runs a fragment, and divides or writes what comes out."""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final, NamedTuple

import pyarrow as pa

from farcall_analytics import engine
from farcall_analytics.exchange import Written
from farcall_analytics.parquet import Share, read_share, write_table
from farcall_analytics.passing import (
    Way,
    check_output,
    find_written,
    from_stream,
    read_pieces,
    read_tables,
    to_stream,
    write_pieces,
    write_tables,
)
from farcall_analytics.stages import Exchange
from farcall_common.objects.node_blocks import open_storage

_AVOIDED_S: Final = 0.2
"""Seconds for which a task occupies a worker that it must not run on, so that its next attempt gets another one."""


class Unsuitable(Exception):
    """A task cannot run in a place: a node, with the directory that DataFusion uses there.

    :param reason: why the task failed there; None: it had to avoid the place, and did not begin.
    """

    def __init__(self, place: str, reason: Exception | None) -> None:
        super().__init__(place, reason)
        self.place = place
        self.reason = reason


class Rows(NamedTuple):
    """Rows that a task reads for one table of its fragment.

    :param share: share of a file, or None; ``columns``: its columns to read. ``sampled``: columns that a sample reads,
        while others are null; empty: all columns.
    :param written: output of tasks of an earlier stage; ``partition``: the partition to read.
    :param keys, directions: sort order of the rows, as in an exchange.
    """

    name: str
    share: Share | None = None
    columns: tuple[str, ...] = ()
    written: tuple[Written, ...] = ()
    partition: int = 0
    keys: tuple[int, ...] = ()
    directions: tuple[str, ...] = ()
    sampled: tuple[str, ...] = ()


class Task(NamedTuple):
    """A task.

    :param name: differs from that of each other task of the job.
    :param fragment: a Substrait plan; ``schema``: of its rows.
    :param exchange: how rows are divided, into so many ``partitions``, with ``per_block`` of them in a block where a
        storage has more than one block of a task.
    :param ways: the storages of the job; ``to``: that to which rows go.
    :param bounds: of ranges, as an Arrow stream.
    :param output: a file to which rows are written instead of the storage, with this ``compression``.
    :param may_be_done: whether an earlier attempt may have committed.
    :param sampled: how many rows of it a sample takes.
    :param avoided: places where it has failed for lack of memory or disk.
    """

    name: str
    seed: int
    fragment: bytes
    schema: pa.Schema
    rows: tuple[Rows, ...]
    exchange: Exchange | None
    ways: tuple[Way, ...]
    to: int = 0
    partitions: int = 1
    per_block: int = 1
    bounds: bytes = b""
    output: str = ""
    compression: str = "snappy"
    memory: int | None = None
    may_be_done: bool = False
    sampled: int = 0
    avoided: frozenset[str] = frozenset()


class Chain(NamedTuple):
    """Tasks that one call runs, one after the other. ``name``: that of the first one. Other fields are those of
    :class:`Task`."""

    name: str
    tasks: tuple[Task, ...]
    may_be_done: bool = False
    avoided: frozenset[str] = frozenset()


class Regroup(NamedTuple):
    """A task that puts what some tasks have written into one block, for some partitions.

    :param written: by these tasks.
    :param first, last: its partitions are those from ``first`` on, and before ``last``.

    Other fields are those of :class:`Task`.
    """

    name: str
    written: tuple[Written, ...]
    first: int
    last: int
    ways: tuple[Way, ...]
    may_be_done: bool = False
    avoided: frozenset[str] = frozenset()
    to: int = 0


class Done(NamedTuple):
    """Result of a task. ``size``: bytes that it has written, or bytes of its rows in memory; durations are seconds.
    ``reused``: whether an earlier attempt did the work. ``sample``: sample of its keys, as an Arrow stream.
    ``raw_size``: bytes of its rows in memory. ``chain``: results of the tasks of a chain."""

    written: Written | None
    rows: int
    size: int
    read_s: float = 0.0
    computed_s: float = 0.0
    written_s: float = 0.0
    reused: bool = False
    sample: bytes = b""
    raw_size: int = 0
    chain: tuple[Done, ...] = ()

    @property
    def busy_s(self) -> float:
        """Seconds of all work."""
        return self.read_s + self.computed_s + self.written_s


def _in_place(function: Callable[[Any], Done]) -> Callable[[Any], Done]:
    """A function that raises :class:`Unsuitable` where its task must not run, or lacks memory or disk."""

    @functools.wraps(function)
    def run(task: Task | Chain | Regroup) -> Done:
        engine.require_threads()
        place = f"{socket.gethostname()}:{os.environ.get('TMPDIR', '')}"
        if place in task.avoided:
            time.sleep(_AVOIDED_S)
            raise Unsuitable(place, None)
        try:
            return function(task)
        except (OSError, MemoryError) as error:
            raise Unsuitable(place, error) from error

    return run


class _Read(NamedTuple):
    """The tables of a task, or what an earlier attempt has done."""

    tables: Mapping[str, pa.Table]
    seconds: float
    done: Done | None = None


class _Computed(NamedTuple):
    """The rows of a task, by partition. ``raw_size``: bytes of all of them."""

    parts: Sequence[pa.Table]
    rows: int
    raw_size: int


@_in_place
def run_task(task: Task) -> Done:
    """Run a task; what an earlier attempt has committed counts, if there is one."""
    read = _read_all(task)
    if read.done is not None:
        return read.done
    started = time.monotonic()
    computed = _compute(task, read.tables)
    return _write(task, computed, read.seconds, time.monotonic() - started)


@_in_place
def run_chain(chain: Chain) -> Done:
    """Run tasks one after the other: while one computes, the next one reads, and the one before it writes."""
    started = time.monotonic()
    tasks = [each._replace(may_be_done=each.may_be_done or chain.may_be_done) for each in chain.tasks]
    done: list[Future[Done]] = []
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
        ahead = reader.submit(_read_all, tasks[0])
        for number, task in enumerate(tasks):
            read = ahead.result()
            if number + 1 < len(tasks):
                ahead = reader.submit(_read_all, tasks[number + 1])
            if read.done is not None:
                done.append(writer.submit(lambda found=read.done: found))  # type: ignore[misc]
                continue
            begun = time.monotonic()
            computed = _compute(task, read.tables)
            wait(done)  # no more than three tasks have rows in memory
            done.append(writer.submit(_write, task, computed, read.seconds, time.monotonic() - begun))
        found = tuple(each.result() for each in done)
    return Done(None, 0, 0, computed_s=time.monotonic() - started, chain=found)


def _read_all(task: Task) -> _Read:
    if task.may_be_done and not task.output:
        found = find_written(task.ways, task.to, task.name, task.partitions)
        if found is not None:
            return _Read({}, 0.0, Done(found, 0, found.size, reused=True))
    started = time.monotonic()
    tables = {each.name: _read(task, each) for each in task.rows}
    return _Read(tables, time.monotonic() - started)


def _compute(task: Task, tables: Mapping[str, pa.Table]) -> _Computed:
    table = engine.run(task.fragment, _in_order(task, tables), task.schema, memory=task.memory)
    return _Computed([table] if task.output else _divide(task, table), table.num_rows, table.nbytes)


def _write(task: Task, computed: _Computed, read_s: float, computed_s: float) -> Done:
    started = time.monotonic()
    written = None
    if task.output:
        check_output(task.ways, task.output.rpartition("/")[0])
        write_table(task.output, *computed.parts, compression=task.compression)
    else:
        written = write_tables(task.ways, task.to, task.name, computed.parts, per_block=task.per_block)
    size = computed.raw_size if written is None else written.size
    seconds = time.monotonic() - started
    return Done(written, computed.rows, size, read_s, computed_s, seconds, raw_size=computed.raw_size)


@_in_place
def regroup_task(task: Regroup) -> Done:
    """Put the bytes of each partition together; they are not decoded."""
    count = task.last - task.first
    if task.may_be_done:
        found = find_written(task.ways, task.to, task.name, count, first=task.first)
        if found is not None:
            return Done(found, 0, found.size, reused=True)
    started = time.monotonic()
    pieces = read_pieces(task.ways, task.written, task.first, task.last)
    read_at = time.monotonic()
    written = write_pieces(task.ways, task.to, task.name, pieces, first=task.first)
    return Done(written, 0, written.size, read_at - started, 0.0, time.monotonic() - read_at)


@_in_place
def sample_task(task: Task) -> Done:
    """The keys of some rows of a task at random. Of files it reads a few row groups only."""
    assert task.exchange is not None
    keys = task.exchange.keys
    started = time.monotonic()
    tables = {each.name: _read(task, each, is_sample=True) for each in task.rows}
    read_at = time.monotonic()
    found = engine.run(task.fragment, _in_order(task, tables), task.schema, memory=task.memory, only=keys)
    chosen = engine.sample(found, range(len(keys)), task.sampled, task.seed)
    return Done(None, 0, 0, read_at - started, time.monotonic() - read_at, sample=to_stream(chosen))


def delete_task(url: str, prefixes: Sequence[str]) -> None:
    """Delete blocks where tasks alone can."""
    with open_storage(url) as blocks:
        for prefix in prefixes:
            blocks.delete_below(prefix)


def _divide(task: Task, table: pa.Table) -> Sequence[pa.Table]:
    exchange = task.exchange
    if exchange is None:
        return [table]
    if exchange.kind == "range" and task.partitions > 1:
        bounds = from_stream(task.bounds)
        parts = engine.divide_by_range(table, exchange.keys, exchange.directions, bounds, task.partitions, task.seed)
    else:
        keys = exchange.keys if exchange.kind == "hash" else ()
        parts = engine.divide_by_hash(table, keys, task.partitions)
    return [each.select(range(exchange.width)) for each in parts]


def _read(task: Task, rows: Rows, *, is_sample: bool = False) -> pa.Table:
    if rows.share is not None:
        if is_sample:
            return read_share(rows.share.sampled(), rows.columns, only=rows.sampled or None)
        return read_share(rows.share, rows.columns)
    return pa.concat_tables(read_tables(task.ways, rows.written, rows.partition))


def _in_order(task: Task, tables: Mapping[str, pa.Table]) -> Mapping[str, pa.Table]:
    """The tables of a task, sorted if they have keys."""
    return {
        each.name: engine.sort(tables[each.name], each.keys, each.directions) if each.keys else tables[each.name]
        for each in task.rows
    }
