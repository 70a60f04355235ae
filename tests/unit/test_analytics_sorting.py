"""Sort of Parquet files by tasks: equal to DuckDB's, whatever the rows are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farcall_analytics import jobs, sorting
from farcall_analytics.parquet import Input, InputProblem, find_input, read_share, write_table
from farcall_analytics.passing import Way
from farcall_analytics.sorting import Keys
from farcall_common.objects.blocks import open_blocks

BY_A: Keys = [("a", "ascending")]


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def files(directory: Path, table: pa.Table, *, count: int = 3, group_rows: int = 100) -> Input:
    directory.mkdir(exist_ok=True)
    step = math.ceil(max(1, table.num_rows) / count)
    for number in range(count):
        pq.write_table(table.slice(number * step, step), directory / f"{number}.parquet", row_group_size=group_rows)
    return find_input([str(directory / f"{number}.parquet") for number in range(count)], share_bytes=2000)


def sort(
    executor: jobs.Executor, source: Input, keys: Keys, tmp_path: Path, *, partitions: int = 4, **way: Any
) -> list[pa.Table]:
    storage = f"file://{tmp_path}/blocks"
    paths = jobs.sort(executor, source, keys, str(tmp_path / "out"), Way(storage, **way), partitions=partitions)
    with open_blocks(storage) as blocks:
        assert list(blocks.names("")) == [], "nothing is left in the storage"
    return [pq.read_table(path) for path in paths]


def random_rows(count: int, *, seed: int = 1, different: int = 10**9) -> pa.Table:
    query = f"""
        select (hash(i + {seed}) % {different})::bigint as a, (hash(i * 7) % 10)::int as b, 'row ' || i as c
        from range({count}) t(i)
    """
    return duckdb.connect().execute(query).to_arrow_table()


@pytest.mark.parametrize("combines", [True, False])
@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
@pytest.mark.parametrize(
    "keys",
    [BY_A, [("a", "descending")], [("b", "ascending"), ("a", "descending")], [("c", "ascending")]],
    ids=["a", "a descending", "b, a", "text"],
)
def test_rows_are_those_of_the_oracle(
    executor: ThreadPoolExecutor, tmp_path: Path, keys: Keys, codec: str, combines: bool
) -> None:
    rows = random_rows(3000)
    found = sort(executor, files(tmp_path / "in", rows), keys, tmp_path, combines=combines, codec=codec)
    order = ", ".join(f"{name} {'desc' if order == 'descending' else 'asc'} nulls last" for name, order in keys)
    assert pa.concat_tables(found).equals(duckdb.sql(f"select * from rows order by {order}").to_arrow_table())
    assert len(found) == 4
    assert max(each.num_rows for each in found) < 1.5 * 3000 / 4


def test_a_key_of_half_of_the_rows_is_spread_over_the_partitions(executor: ThreadPoolExecutor, tmp_path: Path) -> None:
    rows = random_rows(4000, different=1000)
    half = rows.set_column(0, "a", pa.array([500 if n % 2 else a for n, a in enumerate(rows["a"].to_pylist())]))
    found = sort(executor, files(tmp_path / "in", half), BY_A, tmp_path, partitions=8)
    assert [row for each in found for row in each["a"].to_pylist()] == sorted(half["a"].to_pylist())
    assert sorted(row for each in found for row in each["c"].to_pylist()) == sorted(half["c"].to_pylist())
    assert max(each.num_rows for each in found) < 1.5 * 4000 / 8


@pytest.mark.parametrize("kept", [0, 1, 5])
def test_few_rows_and_none_make_empty_partitions(executor: ThreadPoolExecutor, tmp_path: Path, kept: int) -> None:
    found = sort(executor, files(tmp_path / "in", random_rows(kept)), BY_A, tmp_path)
    assert [each.schema.names for each in found] == [["a", "b", "c"]] * 4
    assert sum(each.num_rows for each in found) == kept


def test_nulls_come_last_in_both_directions(executor: ThreadPoolExecutor, tmp_path: Path) -> None:
    table = pa.table({"a": pa.array([3, None, 1, None, 2] * 20, pa.int64()), "nested": [{"x": [1, 2]}] * 100})
    for name, order in (("up", "ascending"), ("down", "descending")):
        (tmp_path / name).mkdir()
        found = pa.concat_tables(sort(executor, files(tmp_path / name, table), [("a", order)], tmp_path / name))
        known = sorted([1, 2, 3] * 20, reverse=order == "descending")
        assert found["a"].to_pylist() == known + [None] * 40
        assert found["nested"].to_pylist() == [{"x": [1, 2]}] * 100


class Flaky:
    """Runs each call of a function twice, as a retry and a speculative copy do, and the one or the other counts."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._count = 0

    def submit(self, fn: Any, /, *args: Any) -> Future[Any]:
        self._count += 1
        if fn is not sorting.partition:
            return self._pool.submit(fn, *args)
        own = list(args)
        own[6] = "another"  # attempt
        both = [self._pool.submit(fn, *args), self._pool.submit(fn, *own)]
        return both[self._count % 2]


@pytest.mark.parametrize("combines", [True, False])
def test_attempts_neither_double_nor_lose_rows(executor: ThreadPoolExecutor, tmp_path: Path, combines: bool) -> None:
    table = random_rows(2000)
    source = files(tmp_path / "in", table)
    way = Way(f"file://{tmp_path}/blocks", combines)
    paths = jobs.sort(Flaky(executor), source, BY_A, str(tmp_path / "out"), way, partitions=5)
    found = pa.concat_tables([pq.read_table(path) for path in paths])
    assert sorted(found["c"].to_pylist()) == sorted(table["c"].to_pylist())


def test_a_stage_that_fails_ends_the_job_and_leaves_nothing(executor: ThreadPoolExecutor, tmp_path: Path) -> None:
    source = files(tmp_path / "in", random_rows(1000))
    Path(source.shares[-1].path).write_bytes(b"damaged")
    with pytest.raises(InputProblem, match=r"2\.parquet"):
        sort(executor, source, BY_A, tmp_path)
    with open_blocks(f"file://{tmp_path}/blocks") as blocks:
        assert list(blocks.names("")) == []
    with pytest.raises(ValueError, match="x is no column; there are a, b, c"):
        sort(executor, source, [("x", "ascending")], tmp_path)
    with pytest.raises(ValueError, match="a: expected ascending or descending, got 'desc'"):
        sort(executor, source, [("a", "desc")], tmp_path)
    with pytest.raises(ValueError, match="partitions: expected 1 or more, got 0"):
        sort(executor, source, BY_A, tmp_path, partitions=0)
    with pytest.raises(ValueError, match="codec: expected none, lz4, zstd, got 'gzip'"):
        sort(executor, source, BY_A, tmp_path, codec="gzip")
    with pytest.raises(ValueError, match="is not shared between tasks"):
        Way("memory:")


# -- files -------------------------------------------------------------------------------------------------------------


def test_shares_have_all_row_groups_once(tmp_path: Path) -> None:
    source = files(tmp_path / "in", random_rows(3000))
    assert source.rows == 3000
    assert len(source.shares) > 10
    read = pa.concat_tables([read_share(each) for each in source.shares])
    assert read.equals(random_rows(3000).replace_schema_metadata(None))
    assert source.size == sum(each.size for each in source.shares) > 0


def test_files_that_are_not_one_table_are_refused_with_the_reason(tmp_path: Path) -> None:
    def path(name: str, table: pa.Table) -> str:
        pq.write_table(table, tmp_path / name)
        return str(tmp_path / name)

    first = path("first", pa.table({"a": [1], "b": ["x"]}))
    for other, reason in (
        (path("fewer", pa.table({"a": [1]})), "fewer: other columns than in .*first: without b"),
        (path("more", pa.table({"a": [1], "b": ["x"], "c": [1]})), "with c"),
        (path("type", pa.table({"a": [1.5], "b": ["x"]})), "a is double, not int64"),
        (path("order", pa.table({"b": ["x"], "a": [1]})), "in another order"),
        (str(tmp_path / "none"), "none: "),
    ):
        with pytest.raises(InputProblem, match=reason):
            find_input([first, other], share_bytes=1000)
    with pytest.raises(InputProblem, match="there are no files"):
        find_input([], share_bytes=1000)


def test_a_file_is_written_whole_and_replaces_an_earlier_one(tmp_path: Path) -> None:
    for table in (random_rows(10), random_rows(20)):
        write_table(str(tmp_path / "x.parquet"), table)
        assert pq.read_table(tmp_path / "x.parquet").equals(table)
    assert [each.name for each in tmp_path.iterdir()] == ["x.parquet"]


def test_attempts_that_write_a_file_at_the_same_time_do_not_meet(executor: ThreadPoolExecutor, tmp_path: Path) -> None:
    tables = [random_rows(count) for count in (100, 20_000)]
    path = tmp_path / "new" / "x.parquet"
    list(executor.map(write_table, [str(path)] * 20, tables * 10))
    assert any(pq.read_table(path).equals(table) for table in tables)
    assert [each.name for each in path.parent.iterdir()] == ["x.parquet"]
