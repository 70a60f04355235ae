"""Group and join of Parquet files by tasks: equal to DuckDB's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farcall_analytics import hashing, jobs
from farcall_analytics.exchange import Written
from farcall_analytics.hashing import Aggregate, Partitioned
from farcall_analytics.parquet import Input
from farcall_analytics.passing import Way
from tests.unit.test_analytics_sorting import files, random_rows

AGGREGATES = {
    "n": Aggregate("count"),
    "known": Aggregate("count", "v"),
    "total": Aggregate("sum", "v"),
    "least": Aggregate("min", "c"),
    "most": Aggregate("max", "v"),
    "mean": Aggregate("mean", "v"),
}
ORACLE = 'count(*) as n, count(v) as known, sum(v) as total, min(c) as least, max(v) as most, avg(v) as "mean"'


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def rows_of(paths: Sequence[str]) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in paths])


def ordered(table: pa.Table) -> list[dict[str, Any]]:
    return sorted(table.to_pylist(), key=lambda row: [(value is None, value) for value in row.values()])


def measured(count: int, *, groups: int) -> pa.Table:
    rows = random_rows(count, different=groups)
    values = [None if n % 7 == 0 else (n * 37) % 1000 for n in range(count)]
    keys = [None if n % 11 == 0 else f"key {a}" for n, a in enumerate(rows["a"].to_pylist())]
    return rows.append_column("v", pa.array(values, pa.int64())).append_column('k "1"', pa.array(keys, pa.string()))


@pytest.mark.parametrize("combines", [True, False])
@pytest.mark.parametrize("keys", [["b"], ['k "1"', "b"]], ids=["one key", "two keys"])
@pytest.mark.parametrize("groups", [3, 1500])
def test_groups_are_those_of_the_oracle(
    executor: ThreadPoolExecutor, tmp_path: Path, keys: list[str], combines: bool, groups: int
) -> None:
    rows = measured(2000, groups=groups)
    way = Way(f"file://{tmp_path}/blocks", combines)
    source = files(tmp_path / "in", rows)
    paths = jobs.group(executor, source, keys, AGGREGATES, str(tmp_path / "out"), way, partitions=5)
    names = ", ".join(map(hashing.quoted, keys))
    found = rows_of(paths)
    expected = duckdb.sql(f"select {names}, {ORACLE} from rows group by {names}").to_arrow_table()
    assert ordered(found) == ordered(expected)
    assert found.schema.names == [*keys, *AGGREGATES]


@pytest.mark.parametrize("kind", ["inner", "left", "right", "full", "semi", "anti"])
def test_joins_are_those_of_the_oracle(executor: ThreadPoolExecutor, tmp_path: Path, kind: hashing.JoinKind) -> None:
    left = random_rows(600, different=100).select(["a", "b", "c"])
    right = random_rows(90, seed=5, different=150).select(["a", "c"]).rename_columns(["a", "d"])
    way = Way(f"file://{tmp_path}/blocks")
    sides = files(tmp_path / "l", left), files(tmp_path / "r", right)
    paths = jobs.join(executor, *sides, ["a"], str(tmp_path / "out"), way, partitions=4, kind=kind)
    with duckdb.connect() as connection:
        connection.register("l", left)
        connection.register("r", right)
        expected = connection.execute(f"select * from l {kind} join r using (a)").to_arrow_table()
    assert ordered(rows_of(paths)) == ordered(expected)


def test_what_cannot_be_grouped_or_joined_is_refused(executor: ThreadPoolExecutor, tmp_path: Path) -> None:
    one = files(tmp_path / "one", pa.table({"a": [1], "b": [1]}))
    other = files(tmp_path / "other", pa.table({"a": ["x"], "b": [1]}))

    def group(keys: list[str], aggregates: hashing.Aggregates) -> None:
        jobs.group(executor, one, keys, aggregates, "out", Way("file:///none"), partitions=1)

    def join(left: Input, right: Input, keys: list[str]) -> None:
        jobs.join(executor, left, right, keys, "out", Way("file:///none"), partitions=1)

    with pytest.raises(ValueError, match="needs keys and aggregates"):
        group([], {"n": Aggregate("count")})
    for wrong in (Aggregate("sum"), Aggregate("x); drop table rows; --", "a")):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="is no aggregate"):
            group(["a"], {"n": wrong})
    with pytest.raises(ValueError, match="x is no column; there are a, b"):
        group(["a"], {"n": Aggregate("sum", "x")})
    with pytest.raises(ValueError, match="needs keys"):
        join(one, other, [])
    with pytest.raises(ValueError, match="a is int64 on the left side, and string on the right one"):
        join(one, other, ["a"])
    with pytest.raises(ValueError, match="both sides have a, which is no key"):
        join(one, other, ["b"])


def test_workers_with_another_hash_end_the_job() -> None:
    with pytest.raises(RuntimeError, match=r"different versions of DuckDB: 1\.5, 1\.6"):
        jobs._written([Partitioned(Written("a"), "1.6"), Partitioned(Written("b"), "1.5")])
