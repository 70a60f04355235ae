"""Jobs: the stages of an operator as calls of an executor, one after the other.

The executor is one of Farcall, or any with ``submit`` and futures. What a job has put into the storage is deleted at
its end, however it ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Final, Protocol, TypeVar, get_args

from farcall_analytics import hashing, sorting
from farcall_analytics.exchange import Written
from farcall_analytics.hashing import AggregateName, Aggregates, JoinKind, Partitioned
from farcall_analytics.parquet import Input
from farcall_analytics.passing import Way
from farcall_analytics.sorting import Keys
from farcall_common.objects.blocks import open_blocks

T = TypeVar("T")

_SAMPLED_ROWS: Final = 100
"""Of each share, for each partition."""


class Executor(Protocol):
    """What runs the tasks."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Start a call."""


def sort(
    executor: Executor,
    source: Input,
    keys: Keys,
    output: str,
    way: Way,
    *,
    partitions: int,
    seed: int = 0,
) -> list[str]:
    """Sort files into so many others, whose rows are sorted within each and from one to the next; their paths.

    :param keys: see :data:`~farcall_analytics.sorting.Keys`.
    :param output: a directory, or a prefix in a bucket, for files ``part-00000.parquet`` and so on.
    :param way: how rows go from task to task.
    :raises ValueError: for a key that is no column, or another order.
    :raises RuntimeError: if rows were lost or doubled.
    """
    _check_columns(source, [name for name, _ in keys])
    for name, order in keys:
        if order not in ("ascending", "descending"):
            raise ValueError(f"{name}: expected ascending or descending, got {order!r}")
    paths = _paths(output, partitions)
    with _of_job(way) as own:
        shares = list(enumerate(source.shares))
        count = _SAMPLED_ROWS * partitions
        samples = _run(executor, sorting.sample, [(share, keys, count, seed + task) for task, share in shares])
        bounds = sorting.splitters(samples, keys, partitions)
        calls = [(share, keys, bounds, partitions, own, task, uuid.uuid4().hex, seed + task) for task, share in shares]
        written = _run(executor, sorting.partition, calls)
        rows = sum(_run(executor, sorting.combine, [(written, n, keys, own, path) for n, path in enumerate(paths)]))
    if rows != source.rows:
        raise RuntimeError(f"{rows} rows were written, and {source.rows} read")
    return paths


def group(
    executor: Executor,
    source: Input,
    keys: Sequence[str],
    aggregates: Aggregates,
    output: str,
    way: Way,
    *,
    partitions: int,
) -> list[str]:
    """Group the rows of files; the paths of as many new ones as there are partitions, with each group in one of them.

    The parameters are those of :func:`sort`.

    :raises ValueError: for a key or a column that is not there, and without keys or aggregates.
    """
    if not keys or not aggregates:
        raise ValueError("a group needs keys and aggregates")
    for each in aggregates.values():
        if each.function not in get_args(AggregateName) or (each.column is None and each.function != "count"):
            raise ValueError(f"{each.function} of {each.column} is no aggregate")
    _check_columns(source, [*keys, *(each.column for each in aggregates.values() if each.column is not None)])
    paths = _paths(output, partitions)
    with _of_job(way) as own:
        calls = [
            (share, keys, aggregates, partitions, own, task, uuid.uuid4().hex)
            for task, share in enumerate(source.shares)
        ]
        written = _written(_run(executor, hashing.partition_groups, calls))
        _run(executor, hashing.combine_groups, [(written, n, keys, aggregates, own, p) for n, p in enumerate(paths)])
    return paths


def join(
    executor: Executor,
    left: Input,
    right: Input,
    keys: Sequence[str],
    output: str,
    way: Way,
    *,
    partitions: int,
    kind: JoinKind = "inner",
) -> list[str]:
    """Join two inputs by columns that both have; the paths of the new files.

    The parameters are those of :func:`sort`.

    :raises ValueError: for a key that one side does not have or that has another type there, for other columns that
        both have, and without keys.
    """
    if not keys or kind not in get_args(JoinKind):
        raise ValueError(f"a join needs keys, and a kind among {', '.join(get_args(JoinKind))}")
    for side in (left, right):
        _check_columns(side, keys)
    for name in keys:
        types = [str(side.schema.field(name).type) for side in (left, right)]
        if types[0] != types[1]:
            raise ValueError(f"{name} is {types[0]} on the left side, and {types[1]} on the right one")
    both = set(left.schema.names) & set(right.schema.names) - set(keys)
    if both and kind not in ("semi", "anti"):
        raise ValueError(f"both sides have {', '.join(sorted(both))}, which is no key: rename one of them")
    paths = _paths(output, partitions)
    with _of_job(way) as own:
        calls = [
            (share, keys, partitions, own, f"{name}{task}", uuid.uuid4().hex)
            for name, side in (("l", left), ("r", right))
            for task, share in enumerate(side.shares)
        ]
        written = _written(_run(executor, hashing.partition_rows, calls))
        sides = written[: len(left.shares)], written[len(left.shares) :]
        _run(executor, hashing.combine_join, [(*sides, n, keys, kind, own, path) for n, path in enumerate(paths)])
    return paths


def _paths(output: str, partitions: int) -> list[str]:
    if partitions < 1:
        raise ValueError(f"partitions: expected 1 or more, got {partitions}")
    return [f"{output.rstrip('/')}/part-{number:05d}.parquet" for number in range(partitions)]


def _check_columns(source: Input, names: Sequence[str]) -> None:
    for name in names:
        if name not in source.schema.names:
            raise ValueError(f"{name} is no column; there are {', '.join(source.schema.names)}")


def _written(partitioned: Sequence[Partitioned]) -> list[Written]:
    """:raises RuntimeError: if rows with the same keys can be in several partitions."""
    versions = {each.version for each in partitioned}
    if len(versions) > 1:
        raise RuntimeError(f"workers have different versions of DuckDB: {', '.join(sorted(versions))}")
    return [each.written for each in partitioned]


@contextlib.contextmanager
def _of_job(way: Way) -> Iterator[Way]:
    """With names for a job of its own, of which nothing is left."""
    own = dataclasses.replace(way, job=f"farcall-{uuid.uuid4().hex}")
    try:
        yield own
    finally:
        with open_blocks(own.url) as blocks:
            blocks.delete_below(f"{own.job}/")


def _run(executor: Executor, function: Callable[..., T], calls: Sequence[tuple[Any, ...]]) -> list[T]:
    """The results of a stage, in order. If one fails, the others are cancelled and awaited: they write no more."""
    futures: list[Future[T]] = [executor.submit(function, *arguments) for arguments in calls]
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future.done():
                future.result()  # the error of the one that has failed
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
