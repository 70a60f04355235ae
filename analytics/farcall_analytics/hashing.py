"""Group and join: the functions that tasks run, on DuckDB. Rows go to partitions by a hash of their keys.

Aggregates are computed in two steps: each task groups its own rows first, so that little is exchanged where there are
few groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from farcall_analytics.exchange import Written
from farcall_analytics.parquet import Share, read_share, write_table
from farcall_analytics.passing import Way, read_tables, write_tables

_SELECT: Final = "select {} from rows group by {}"
_JOIN: Final = "select * from l {} join r using ({})"
_NUMBERS: Final = "select (hash({}) % {})::integer as number from rows"

AggregateName = Literal["sum", "count", "min", "max", "mean"]
JoinKind = Literal["inner", "left", "right", "full", "semi", "anti"]


class Aggregate(NamedTuple):
    """What is computed of a column in each group. ``count`` counts what is not null; without a column, rows."""

    function: AggregateName
    column: str | None = None


Aggregates = Mapping[str, Aggregate]
"""By the names of the new columns."""


class Partitioned(NamedTuple):
    """What a task has written. ``version``: of the DuckDB whose hash it used; all tasks of a job must have the same."""

    written: Written
    version: str


def partition_groups(
    share: Share, keys: Sequence[str], aggregates: Aggregates, partitions: int, way: Way, task: int, attempt: str
) -> Partitioned:
    """Group the rows of a share, and write each group to the partition of its keys."""
    needed = {*keys, *(each.column for each in aggregates.values() if each.column is not None)}
    rows = read_share(share, sorted(needed))
    selected = ", ".join([*map(quoted, keys), *itertools.chain.from_iterable(map(_first_step, aggregates.items()))])
    grouped = _run(_SELECT.format(selected, ", ".join(map(quoted, keys))), rows=rows)
    return _write(grouped, keys, partitions, way, task, attempt)


def combine_groups(
    written: Sequence[Written], number: int, keys: Sequence[str], aggregates: Aggregates, way: Way, output: str
) -> int:
    """Put the groups of one partition together, write them to a file, and return their number."""
    rows = pa.concat_tables(read_tables(way, written, number))
    selected = ", ".join([*map(quoted, keys), *map(_second_step, aggregates.items())])
    grouped = _run(_SELECT.format(selected, ", ".join(map(quoted, keys))), rows=rows)
    write_table(output, grouped)
    return len(grouped)


def partition_rows(
    share: Share, keys: Sequence[str], partitions: int, way: Way, task: int | str, attempt: str
) -> Partitioned:
    """Write the rows of a share to the partitions of their keys."""
    return _write(read_share(share), keys, partitions, way, task, attempt)


def combine_join(
    left: Sequence[Written],
    right: Sequence[Written],
    number: int,
    keys: Sequence[str],
    kind: JoinKind,
    way: Way,
    output: str,
) -> int:
    """Join one partition, write it to a file, and return its number of rows. Columns of the right side that are no keys
    come behind those of the left one."""
    joined = _run(
        _JOIN.format(kind, ", ".join(map(quoted, keys))),
        l=pa.concat_tables(read_tables(way, left, number)),
        r=pa.concat_tables(read_tables(way, right, number)),
    )
    write_table(output, joined)
    return len(joined)


def quoted(name: str) -> str:
    """A name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def _run(query: str, **tables: pa.Table) -> pa.Table:
    """The result of a query on Arrow tables, in one thread: a worker has its own processors."""
    with duckdb.connect(config={"threads": 1}) as connection:
        for name, table in tables.items():
            connection.register(name, table)
        return connection.execute(query).to_arrow_table()


def _write(
    rows: pa.Table, keys: Sequence[str], partitions: int, way: Way, task: int | str, attempt: str
) -> Partitioned:
    numbers = _run(_NUMBERS.format(", ".join(map(quoted, keys)), partitions), rows=rows)["number"].combine_chunks()
    ordered = rows.take(pc.sort_indices(numbers))
    counts = dict(zip(*map(pa.Array.to_pylist, pc.value_counts(numbers).flatten()), strict=True))
    ends = itertools.accumulate((counts.get(number, 0) for number in range(partitions)), initial=0)
    tables = [ordered.slice(start, end - start) for start, end in itertools.pairwise(ends)]
    return Partitioned(write_tables(way, task, attempt, tables), duckdb.__version__)


def _first_step(named: tuple[str, Aggregate]) -> list[str]:
    name, (function, column) = named
    of = "*" if column is None else quoted(column)
    if function == "mean":
        return [f"sum({of}) as {quoted(name)}", f"count({of}) as {quoted(f'farcall count {name}')}"]
    return [f"{function}({of}) as {quoted(name)}"]


def _second_step(named: tuple[str, Aggregate]) -> str:
    name, (function, _) = named
    own = quoted(name)
    if function == "mean":
        return f"sum({own}) / sum({quoted(f'farcall count {name}')}) as {own}"
    if function == "count":
        return f"sum({own})::bigint as {own}"
    return f"{function}({own}) as {own}"
