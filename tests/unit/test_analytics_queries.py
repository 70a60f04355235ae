"""Queries in stages: equal to DuckDB's answers, whatever the rows are, and whatever happens to attempts."""

from __future__ import annotations

import contextlib
import io
import math
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import farcall_analytics as fa
from farcall_analytics import jobs, tasks
from farcall_common.errors import ConfigurationError, ObjectGone, StoreFull, StoreUnavailable
from farcall_common.objects.blocks import Blocks, Part, open_blocks
from farcall_common.payload import Piece
from tests.support.analytics_data import files, oracle, ordered, random_rows
from tests.support.blocks import WrappedBlocks
from tests.waiting import WAIT_S


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def options(executor: ThreadPoolExecutor, tmp_path: Path) -> Iterator[dict[str, Any]]:
    storage = f"file://{tmp_path}/blocks"
    yield {"executor": executor, "storage": storage, "share_bytes": 2000, "partitions": 4}
    with open_blocks(storage) as blocks:
        assert list(blocks.names("")) == [], "nothing is left in the storage"


# -- sort --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["combined", "slow"])
@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
@pytest.mark.parametrize(
    ("keys", "descending"), [(["a"], [False]), (["a"], [True]), (["b", "a"], [False, True]), (["c"], [False])]
)
def test_sorted_rows_are_those_of_the_oracle(
    options: dict[str, Any], tmp_path: Path, keys: list[str], descending: list[bool], codec: str, method: str
) -> None:
    rows = random_rows(3000)
    source = fa.read_parquet(files(tmp_path / "in", rows), codec=codec, method=method, **options)
    outcome = source.sort(*keys, descending=descending).write_parquet(str(tmp_path / "out"))
    found = [pq.read_table(path) for path in outcome.paths]
    order = ", ".join(
        f"{key} {'desc' if down else 'asc'} nulls last" for key, down in zip(keys, descending, strict=True)
    )
    assert pa.concat_tables(found).equals(oracle(f"select * from t order by {order}", t=rows))
    assert len(found) == 4
    assert max(each.num_rows for each in found) < 1.5 * 3000 / 4
    assert outcome.rows == 3000


def test_a_key_of_half_of_the_rows_is_spread_over_the_partitions(options: dict[str, Any], tmp_path: Path) -> None:
    rows = random_rows(4000, different=1000)
    half = rows.set_column(0, "a", pa.array([500 if n % 2 else a for n, a in enumerate(rows["a"].to_pylist())]))
    source = fa.read_parquet(files(tmp_path / "in", half), **{**options, "partitions": 8})
    found = [pq.read_table(path) for path in source.sort("a").write_parquet(str(tmp_path / "out")).paths]
    assert [row for each in found for row in each["a"].to_pylist()] == sorted(half["a"].to_pylist())
    assert sorted(row for each in found for row in each["c"].to_pylist()) == sorted(half["c"].to_pylist())
    assert max(each.num_rows for each in found) < 1.5 * 4000 / 8


def test_nulls_and_not_a_number_are_ordered_as_the_oracle_orders_them(options: dict[str, Any], tmp_path: Path) -> None:
    values = [3.0, None, math.nan, -0.0, 0.0, -math.inf, math.inf, 1.5] * 20
    rows = pa.table({"a": pa.array(values, pa.float64()), "nested": [{"x": [1, 2]}] * 160})
    source = fa.read_parquet(files(tmp_path / "in", rows), **options)
    for descending in (False, True):
        found = source.sort("a", descending=descending).to_arrow()
        expected = oracle(f"select * from t order by a {'desc' if descending else 'asc'} nulls last", t=rows)
        texts = [[str(each).replace("-0.0", "0.0") for each in table["a"].to_pylist()] for table in (found, expected)]
        assert texts[0] == texts[1]
        assert found["nested"].to_pylist() == rows["nested"].to_pylist()


@pytest.mark.parametrize("kept", [0, 1, 5])
def test_few_rows_and_none_make_empty_files(options: dict[str, Any], tmp_path: Path, kept: int) -> None:
    source = fa.read_parquet(files(tmp_path / "in", random_rows(kept)), **options)
    outcome = source.sort("a").write_parquet(str(tmp_path / "out"))
    found = [pq.read_table(path) for path in outcome.paths]
    assert [each.schema.names for each in found] == [["a", "b", "c"]] * 4
    assert outcome.rows == sum(each.num_rows for each in found) == kept
    assert source.filter(fa.col("a") < 0).group_by("b").agg(n=fa.count()).to_arrow().num_rows == 0
    assert source.agg(n=fa.count(), s=fa.sum("a")).to_arrow().to_pylist()[0]["n"] == kept


# -- group, join and others --------------------------------------------------------------------------------------------

AGGREGATES = "count(*) n, count(x) m, sum(x) s, min(x) lo, max(c) hi, avg(x) mean, avg(d) mean_d, sum(d) sum_d"


def measured(rows: int, *, groups: int) -> pa.Table:
    return oracle(
        f"""
        select (case when hash(i) % 11 = 0 then null else hash(i) % {groups} end)::bigint as g, 'k' || (i % 3) as h,
            case when i % 7 = 0 then null else i / 4 end as x, 'row ' || i as c, (i / 8)::decimal(12, 2) as d
        from range({rows}) t(i)
        """
    )


@pytest.mark.parametrize("keys", ["", "g", "h", "g, h"])
@pytest.mark.parametrize("groups", [1, 20, 10_000])
def test_groups_are_those_of_the_oracle(options: dict[str, Any], tmp_path: Path, keys: str, groups: int) -> None:
    rows = measured(2000, groups=groups)
    tables = {"t": files(tmp_path / "in", rows)}
    for more in ("", ", count(distinct c) distinct_c, stddev(x) spread"):
        query = f"select {keys}{', ' if keys else ''}{AGGREGATES}{more} from t{' group by ' if keys else ''}{keys}"
        found = fa.sql(query, tables=tables, **options).to_arrow()
        assert ordered(found) == ordered(oracle(query, t=rows))


@pytest.mark.parametrize("kind", ["inner", "left", "right", "full", "semi", "anti"])
@pytest.mark.parametrize("broadcast_bytes", [0, 10**9])
def test_joins_are_those_of_the_oracle(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, broadcast_bytes: int
) -> None:
    monkeypatch.setattr(fa.stages, "BROADCAST_BYTES", broadcast_bytes)
    left = random_rows(600, different=100)
    right = random_rows(90, seed=5, different=150).select(["a", "c"]).rename_columns(["a", "d"])
    left = pa.concat_tables([left, pa.table({"a": [None], "b": [None], "c": ["null"]}, schema=left.schema)])
    right = pa.concat_tables([right, pa.table({"a": [None], "d": ["null"]}, schema=right.schema)])
    sides = [fa.read_parquet(files(tmp_path / name, each), **options) for name, each in (("l", left), ("r", right))]
    joined = sides[0].join(sides[1], on="a", how=kind)
    expected = oracle(f"select * from l {kind} join r using (a)", l=left, r=right)
    found = joined.to_arrow().select(expected.column_names)
    assert ordered(found) == ordered(expected)
    assert (len(joined.stages().stages) == 2) == (broadcast_bytes > 0 and kind != "full")


QUERIES = {
    "limit": "select a, c from t order by a, c limit 7 offset 3",
    "limit of a group": "select b, count(*) n from t group by b order by n desc, b limit 3",
    "distinct": "select distinct b from t",
    "distinct and a group": "select b, count(distinct a % 5) n from t group by b having count(*) > 10",
    "rollup": "select b, a % 3 m, count(*) n from t group by rollup (b, a % 3)",
    "window": "select c, row_number() over (partition by b order by a, c) n, count(*) over (partition by b) m from t",
    "window of all": "select c, rank() over (order by b) n from t",
    "union": "select b from t where a % 2 = 0 union all select b from r",
    "union without columns": "select count(*) n from (select * from t union all select * from t)",
    "intersection": "select b from t intersect select b from r",
    "difference": "select b from t except select b from r where b < 5",
    "scalar subquery": "select c from t where a > (select avg(a) from r) and b = (select max(b) from t)",
    "correlated": "select c from t where a = (select max(a) from t t2 where t2.b = t.b)",
    "exists": "select c from t where exists (select 1 from r where r.b = t.b and r.a < t.a)",
    "mark": "select c from t where b = 1 or exists (select 1 from r where r.b = t.b + 1)",
    "keys that are no columns": "select t.c, r.a from t join r on t.a % 50 = r.a % 50 and t.b < r.b",
    "no equal keys": "select t.c, r.a from t join r on t.a < r.a and r.b = 3 and t.b = 4",
    "cross": "select count(*) n from t, r",
    "values": "select t.c, v.x from t join (values (1, 'x'), (2, 'y')) v(k, x) on t.b = v.k",
    "common tables": "with g as (select b, sum(a) s from t group by b) select g1.b from g g1, g g2 where g1.s < g2.s",
    "no table": "select 1 + 1 as two",
    "names of columns on both sides of an outer join": """
        select x.b p, y.g q from t x right join (select b g from r group by b) y on x.b = y.g and x.a % 9 = y.g
        where coalesce(x.b, 0) > 1
    """,
    "equal, and not distinct": """
        select x.a, y.c from t x left join r y
        on nullif(x.b, 3) + 1 = nullif(y.b, 4) and nullif(x.a, 3) is not distinct from nullif(y.a, 3)
    """,
    "a word of plans": "select b from t where c = 'null_aware'",
}


@pytest.mark.parametrize("name", QUERIES)
def test_other_queries_are_those_of_the_oracle(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    t, r = random_rows(500, different=300), random_rows(60, seed=9, different=300)
    tables = {"t": files(tmp_path / "t", t), "r": r}
    for broadcast_bytes in (0, 10**9):
        monkeypatch.setattr(fa.stages, "BROADCAST_BYTES", broadcast_bytes)
        found = fa.sql(QUERIES[name], tables=tables, **options).to_arrow()
        assert ordered(found) == ordered(oracle(QUERIES[name], t=t, r=r))


@pytest.mark.parametrize("how", ["inner", "left", "right", "full", "semi", "anti"])
def test_a_dataset_is_joined_with_itself_by_keys_of_any_name(options: dict[str, Any], how: Any) -> None:
    table = pa.table({"The Key.1": [1, 2, 2, None], "number": [1, 2, 3, 4], 'a"b': ["x", "y", "z", None]})
    own = fa.from_arrow(table, **options)
    other = own.filter(fa.col("number") > 1).select("The Key.1", more=fa.col("number"))
    found = own.join(other, on="The Key.1", how=how).to_arrow()
    right = 'select "The Key.1", number as more from t where number > 1'
    expected = oracle(f'select * from t {how} join ({right}) r using ("The Key.1")', t=table)
    assert found.column_names == expected.column_names
    assert ordered(found) == ordered(expected)


def test_keys_have_any_type(options: dict[str, Any]) -> None:
    numbers = [1, 2, None, 1, 3, 2, 1]
    for of in (
        *(pa.uint8(), pa.uint64(), pa.int8(), pa.float32(), pa.time32("s"), pa.time64("us"), pa.duration("s")),
        *(pa.timestamp("us"), pa.timestamp("s", "Europe/Berlin"), pa.date32(), pa.bool_(), pa.decimal128(22, 2)),
        *(pa.string(), pa.large_string(), pa.string_view(), pa.binary()),
    ):
        texts = pa.array(numbers).cast(pa.string()) if of == pa.binary() else pa.array(numbers)
        keys = texts.cast(pa.int32() if of in (pa.time32("s"), pa.date32()) else texts.type).cast(of, safe=False)
        source = fa.from_arrow(pa.table({"k": keys, "n": range(7)}), **options)
        counts = source.group_by("k").agg(n=fa.count()).to_arrow()
        assert sorted(counts["n"].to_pylist()) == ([1, 6] if of == pa.bool_() else [1, 1, 2, 3]), of
        joined = source.join(source.select("k", m=fa.col("n")), on="k", how="full").to_arrow()
        assert joined.num_rows == (38 if of == pa.bool_() else 9 + 4 + 1 + 2), of
    ranks = "select w, count(*) n from (select rank() over (partition by n % 2 order by n) w from t) group by w"
    assert sorted(fa.sql(ranks, tables={"t": source}, **options).to_arrow()["n"].to_pylist()) == [1, 2, 2, 2]


def test_columns_behind_structs_stay_where_they_are(options: dict[str, Any]) -> None:
    inner = [{"b": 9, "x": [{"a": 1}]}] * 4
    table = pa.table({"k": inner, "a": [1, 2, 3, 4], "b": [10, 20, 30, 40]})
    source = fa.from_arrow(table, **options)
    assert source.to_arrow().to_pylist() == table.to_pylist()
    assert source.agg(a=fa.sum("a"), b=fa.sum("b")).to_arrow().to_pylist() == [{"a": 10, "b": 100}]
    assert source.sort("a", descending=True).to_arrow().to_pylist() == table.to_pylist()[::-1]


def test_what_a_file_contains_is_that_of_one_version(options: dict[str, Any], tmp_path: Path) -> None:
    source = fa.read_parquet(files(tmp_path / "in", random_rows(100)), **options)
    files(tmp_path / "in", random_rows(100, seed=2))
    with pytest.raises(fa.InputProblem, match="it has changed meanwhile"):
        source.to_arrow()


@pytest.mark.parametrize("output", ["in", "in/", "in/../in", "."])
def test_a_job_does_not_write_where_it_reads(options: dict[str, Any], tmp_path: Path, output: str) -> None:
    source = fa.read_parquet(files(tmp_path / "in", random_rows(100)), **options)
    before = sorted(tmp_path.rglob("*.parquet"))
    with pytest.raises(fa.QueryProblem, match=r"0\.parquet, which is read, is in the output directory"):
        source.sort("a").write_parquet(f"{tmp_path}/{output}")
    assert sorted(tmp_path.rglob("*.parquet")) == before


def test_files_of_an_earlier_job_do_not_stay(options: dict[str, Any], tmp_path: Path) -> None:
    source = files(tmp_path / "in", random_rows(100))
    for partitions in (5, 2):
        fa.read_parquet(source, **{**options, "partitions": partitions}).sort("a").write_parquet(str(tmp_path / "out"))
        (tmp_path / "out" / "mine.parquet").touch()
    names = sorted(each.name for each in (tmp_path / "out").iterdir())
    assert names == ["mine.parquet", "part-00000.parquet", "part-00001.parquet"]


def test_data_frames_come_in_and_go_out(options: dict[str, Any]) -> None:
    table = random_rows(50)
    relation = duckdb.connect().from_arrow(table)
    for given in (table, table.to_pandas(), polars.from_arrow(table), relation, table.to_reader()):
        found = fa.from_arrow(given, **options).filter(fa.col("b") > 4).sort("a", "c")
        expected = oracle("select * from t where b > 4 order by a, c", t=table)
        assert found.to_arrow().to_pylist() == expected.to_pylist()
        assert found.to_pandas().equals(expected.to_pandas())
        assert found.to_polars().equals(polars.DataFrame(expected))


# -- attempts ----------------------------------------------------------------------------------------------------------


class TwiceExecutor:
    """Runs each task twice, as a retry and a copy of a slow task do, and the one or the other counts."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._count = 0

    def submit(self, fn: Any, /, *args: Any) -> Future[Any]:
        self._count += 1
        if fn is not tasks.run_task:
            return self._pool.submit(fn, *args)
        both = [self._pool.submit(fn, each) for each in (args[0], args[0]._replace(seed=5))]
        return both[self._count % 2]


@pytest.mark.parametrize("method", ["combined", "slow"])
def test_attempts_neither_double_nor_lose_rows(executor: ThreadPoolExecutor, tmp_path: Path, method: str) -> None:
    table = random_rows(2000)
    own: Any = {"executor": TwiceExecutor(executor), "storage": f"file://{tmp_path}/blocks", "share_bytes": 2000}
    source = fa.read_parquet(files(tmp_path / "in", table), partitions=5, method=method, **own)
    found = source.sort("a").to_arrow()
    assert ordered(found) == ordered(table)
    groups = source.group_by("b").agg(n=fa.count()).to_arrow()
    assert ordered(groups) == ordered(oracle("select b, count(*) n from t group by b", t=table))


class FailingExecutor:
    """Fails the first attempt of each third task, after it has committed or before it begins."""

    def __init__(self, pool: ThreadPoolExecutor, *, commits: bool) -> None:
        self._pool = pool
        self._commits = commits
        self._seen: set[str] = set()
        self.failed = 0

    def submit(self, fn: Any, /, *args: Any) -> Future[Any]:
        return self._pool.submit(self._run, fn, *args)

    def _run(self, fn: Any, /, *args: Any) -> Any:
        key = f"{fn.__name__} {args[0].name}"
        if key in self._seen:
            return fn(*args)
        self._seen.add(key)
        if len(self._seen) % 3:
            return fn(*args)
        self.failed += 1
        if self._commits:
            fn(*args)
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("commits", [True, False])
def test_tasks_that_fail_are_tried_again(
    executor: ThreadPoolExecutor, options: dict[str, Any], tmp_path: Path, commits: bool
) -> None:
    table = random_rows(2000)
    failing = FailingExecutor(executor, commits=commits)
    source = fa.read_parquet(files(tmp_path / "in", table), **{**options, "executor": failing})
    outcome = source.sort("a").write_parquet(str(tmp_path / "out"))
    found = pa.concat_tables([pq.read_table(path) for path in outcome.paths])
    assert ordered(found) == ordered(table)
    assert failing.failed == sum(each.retries for each in outcome.stages) > 3


@pytest.fixture(scope="module")
def memory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield f"file://{directory}"


METHODS: dict[str, dict[str, Any]] = {
    "slow": {},
    "combined": {},
    "two-level": {},
    "fast": {"fast_storage": True},
    "hybrid": {"fast_storage": True, "fast_bytes": 4_000},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_each_method_of_exchange_gives_the_same_rows(
    options: dict[str, Any], tmp_path: Path, memory: str, method: str, codec: str
) -> None:
    table = random_rows(3000, different=500)
    own: Any = {key: memory if key == "fast_storage" else value for key, value in METHODS[method].items()}
    source = fa.read_parquet(
        files(tmp_path / "in", table), **{**options, "partitions": 7}, method=method, codec=codec, **own
    )
    outcome = source.sort("a", "c").write_parquet(str(tmp_path / "out"))
    found = pa.concat_tables([pq.read_table(path) for path in outcome.paths])
    assert found.equals(oracle("select * from t order by a, c", t=table))
    groups = source.group_by("a").agg(n=fa.count(), last=fa.max("c")).to_arrow()
    assert ordered(groups) == ordered(oracle("select a, count(*) n, max(c) from t group by a", t=table))
    with open_blocks(memory) as blocks:
        assert list(blocks.names("")) == []


class PeakBlocks(WrappedBlocks):
    """Notes the most bytes that blocks of tasks had at a time in a memory."""

    lock = threading.Lock()
    sizes: ClassVar[dict[str, int]] = {}
    most = 0

    def create(self, name: str, pieces: Sequence[Piece]) -> bool:
        with self.lock:
            self.sizes[name] = 0 if name.endswith("committed") else sum(map(len, pieces))
            type(self).most = max(self.most, sum(self.sizes.values()))
        return super().create(name, pieces)

    def delete_below(self, prefix: str) -> None:
        super().delete_below(prefix)
        with self.lock:
            for name in [each for each in self.sizes if each.startswith(prefix)]:
                del self.sizes[name]


@pytest.mark.parametrize("fails", [True, False])
def test_rounds_at_the_same_time_give_the_same_rows_within_the_memory(
    options: dict[str, Any], tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    table = random_rows(3000, different=500)
    fast_bytes = 60_000.0
    peaks: dict[bool, int] = {}
    for pipelined in (False, True):
        monkeypatch.setattr(PeakBlocks, "sizes", {})
        monkeypatch.setattr(PeakBlocks, "most", 0)
        monkeypatch.setattr(
            "farcall_analytics.passing.open_storage",
            lambda url: PeakBlocks(open_blocks(url)) if url == memory else open_blocks(url),
        )
        own: Any = {**options, "partitions": 7, "method": "hybrid", "fast_storage": memory, "codec": "none"}
        own |= {"executor": FailingExecutor(options["executor"], commits=True)} if fails else {}
        source = fa.read_parquet(
            files(tmp_path / "in", table), **own, fast_bytes=fast_bytes, pipelined=pipelined, tasks_per_call=1
        )
        seen: dict[str, list[tuple[int, int]]] = {}

        def progress(name: str, done: int, of: int, seen: dict[str, list[tuple[int, int]]] = seen) -> None:
            seen.setdefault(name, []).append((done, of))

        outcome = source.sort("a", "c").write_parquet(str(tmp_path / f"out-{pipelined}"), progress=progress)
        assert all(counts == sorted(counts) and counts[-1][0] == counts[-1][1] for counts in seen.values())
        found = pa.concat_tables([pq.read_table(path) for path in outcome.paths])
        assert found.equals(oracle("select * from t order by a, c", t=table))
        assert fails or outcome.stages[0].rows == 3000
        [step] = [each.step for each in outcome.plan.stages if each.step]
        assert (step.pipelined, step.rounds > 1) == (pipelined, True)
        peaks[pipelined] = PeakBlocks.most
        assert f"hybrid{', pipelined' if pipelined else ''}" in outcome.plan.explain()
    assert 0 < peaks[True] <= 1.5 * peaks[False], "not twice the memory"


def test_a_round_that_is_lost_beside_another_one_is_made_once_more(
    options: dict[str, Any], tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forgetful, "lost", set())
    monkeypatch.setattr("farcall_analytics.passing.open_storage", lambda url: Forgetful(open_blocks(url), "0-3/"))
    table = random_rows(2000, different=500)
    own: Any = {"method": "hybrid", "fast_storage": memory, "fast_bytes": 10_000.0, "pipelined": True}
    source = fa.read_parquet(files(tmp_path / "in", table), **options, **own)
    found = source.group_by("a").agg(n=fa.count()).to_arrow()
    assert ordered(found) == ordered(oracle("select a, count(*) n from t group by a", t=table))
    assert Forgetful.lost


@pytest.mark.parametrize("pipelined", [True, False])
def test_rounds_begin_again_when_what_they_read_is_lost(
    options: dict[str, Any], tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch, pipelined: bool
) -> None:
    """The second exchange reads what the first one has left in the storage, of which a part is lost."""
    monkeypatch.setattr(Forgetful, "lost", set())
    monkeypatch.setattr(
        "farcall_analytics.passing.open_storage",
        lambda url: Forgetful(open_blocks(url), "/0-0-r[01]-0-") if url != memory else open_blocks(url),
    )
    table = random_rows(2000, different=500)
    own: Any = {"method": "hybrid", "fast_storage": memory, "fast_bytes": 10_000.0, "pipelined": pipelined}
    source = fa.read_parquet(files(tmp_path / "in", table), **options, **own)
    found = source.group_by("a").agg(n=fa.count()).sort("n", "a").to_arrow()
    assert found.equals(oracle("select a, count(*) n from t group by a order by n, a", t=table))
    assert Forgetful.lost


@pytest.mark.parametrize("method", ["combined", "slow", "two-level"])
@pytest.mark.parametrize("commits", [True, False])
def test_tasks_that_follow_one_another_in_a_call_give_the_same_rows(
    executor: ThreadPoolExecutor, options: dict[str, Any], tmp_path: Path, method: str, commits: bool
) -> None:
    table = random_rows(3000, different=500)
    failing = FailingExecutor(executor, commits=commits)
    own: Any = {**options, "executor": failing, "partitions": 7, "method": method, "tasks_per_call": 3}
    source = fa.read_parquet(files(tmp_path / "in", table), **own)
    outcome = source.sort("a", "c").write_parquet(str(tmp_path / "out"))
    found = pa.concat_tables([pq.read_table(path) for path in outcome.paths])
    assert found.equals(oracle("select * from t order by a, c", t=table))
    assert failing.failed == sum(each.retries for each in outcome.stages) > 1


class CountingExecutor:
    """Counts the tasks and the blocks that each reads."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self.reads: list[int] = []

    def submit(self, fn: Any, /, *args: Any) -> Future[Any]:
        for each in getattr(args[0], "tasks", [args[0]]):
            blocks = [each.written] if fn is tasks.regroup_task else [rows.written for rows in each.rows]
            self.reads.append(max(map(len, blocks)))
        return self._pool.submit(fn, *args)


TREES: dict[str, str] = {
    "aggregates": "select count(*) n, sum(a) s, avg(b) m, min(c) low, max(c) high from t",
    "aggregates of no rows": "select count(*) n, sum(a) s, max(c) high from t where a < 0",
    "first rows": "select a, c from t order by a, c limit 7 offset 2",
    "a small side of a join": "select t.c, s.b from t join (select a, b from t where b < 3) s on t.a = s.a",
    "a number for all": "select c from t where a > (select avg(a) from t)",
    "an existence": "select c from t where exists (select 1 from t s where s.b = 11) or a < 100",
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("has_memory", [True, False])
def test_what_one_task_or_all_tasks_read_is_put_together_by_a_tree(
    executor: ThreadPoolExecutor,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    memory: str,
    name: str,
    has_memory: bool,
) -> None:
    monkeypatch.setattr(jobs, "FAN_IN", 3)
    counting = CountingExecutor(executor)
    own: dict[str, Any] = {**options, "executor": counting, **({"fast_storage": memory} if has_memory else {})}
    table = random_rows(2000, different=700)
    found = fa.sql(TREES[name], tables={"t": files(tmp_path / "in", table, count=11)}, **own).to_arrow()
    assert ordered(found) == ordered(oracle(TREES[name], t=table))
    assert max(counting.reads) <= 3
    with open_blocks(memory) as blocks:
        assert list(blocks.names("")) == []


def test_rows_without_columns_are_counted_behind_many_tasks(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "FAN_IN", 3)
    tables = {"t": files(tmp_path / "in", random_rows(2000), count=11)}
    counted = fa.sql("select count(*) n from (select * from t limit 7)", tables=tables, **options)
    assert counted.to_arrow().to_pylist() == [{"n": 7}]
    assert fa.sql("select 5 x from t limit 7", tables=tables, **options).to_arrow().to_pylist() == [{"x": 5}] * 7


@pytest.mark.parametrize("fan_in", [3, 64])
@pytest.mark.parametrize("name", ["a small side of a join", "aggregates"])
def test_what_a_tree_has_lost_is_made_once_more_without_the_memory(
    options: dict[str, Any], tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch, fan_in: int, name: str
) -> None:
    monkeypatch.setattr(jobs, "FAN_IN", fan_in)
    monkeypatch.setattr(Forgetful, "lost", set())
    pattern = f"^{memory}" if name == "a small side of a join" else "/0-0-3$"
    monkeypatch.setattr("farcall_analytics.passing.open_storage", lambda url: Forgetful(open_blocks(url), pattern, url))
    table = random_rows(2000, different=700)
    own: Any = {**options, "fast_storage": memory}
    found = fa.sql(TREES[name], tables={"t": files(tmp_path / "in", table, count=11)}, **own)
    assert ordered(found.to_arrow()) == ordered(oracle(TREES[name], t=table))
    assert Forgetful.lost


class KilledExecutor:
    """Its program is killed in front of the second one of some tasks, once the first one has ended."""

    def __init__(self, pool: ThreadPoolExecutor, function: Any = tasks.regroup_task, name: str = "") -> None:
        self._pool = pool
        self._function = function
        self._name = name
        self._first: Future[Any] | None = None
        self._lock = threading.Lock()

    def submit(self, fn: Any, /, *args: Any) -> Future[Any]:
        if fn is not self._function or not args[0].name.startswith(self._name):
            return self._pool.submit(fn, *args)
        with self._lock:
            if self._first is not None:
                self._first.result()
                raise KeyboardInterrupt
            self._first = self._pool.submit(fn, *args)
            return self._first


@pytest.mark.parametrize("pipelined", [True, False])
def test_tasks_do_not_count_that_have_read_what_another_program_has_put_together(
    options: dict[str, Any], tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch, pipelined: bool
) -> None:
    groups = "select r, count(*) c from (select a, random() r from t) group by r"
    query = f"select count(*) n, sum(c) m from ({groups})"  # each row is a group, whose task differs in each program
    tables = {"t": files(tmp_path / "in", random_rows(2000), count=6)}
    own: Any = {**options, "method": "hybrid", "fast_storage": memory, "fast_bytes": 10_000.0, "pipelined": pipelined}
    pool = options["executor"]
    for killed in (KilledExecutor(pool), KilledExecutor(pool, tasks.run_task, "1-")):
        with monkeypatch.context() as patched:
            patched.setattr(jobs._Job, "_delete", lambda _: None)
            dataset = fa.sql(query, tables=tables, **{**own, "executor": killed})
            with pytest.raises(KeyboardInterrupt):
                dataset.write_parquet(str(tmp_path / "out"), job="nightly")
    outcome = fa.sql(query, tables=tables, **own).write_parquet(str(tmp_path / "out"), job="nightly")
    found = pa.concat_tables([pq.read_table(path) for path in outcome.paths])
    assert found.to_pylist() == [{"n": 2000, "m": 2000}]
    with open_blocks(memory) as blocks:
        assert list(blocks.names("")) == []


class FlushingExecutor:
    """Its memory is lost once, when two rounds have written into it."""

    def __init__(self, pool: ThreadPoolExecutor, memory: str) -> None:
        self._pool = pool
        self._memory = memory
        self._rounds: set[str] = set()
        self._lock = threading.Lock()
        self.flushed = False

    def submit(self, fn: Any, /, *args: Any) -> Future[Any]:
        if fn is tasks.regroup_task:
            with self._lock:
                self._rounds.add(args[0].name.rpartition("-")[0])
                if len(self._rounds) > 1 and not self.flushed:
                    self.flushed = True
                    with open_blocks(self._memory) as blocks:
                        blocks.delete(list(blocks.names("")))
        return self._pool.submit(fn, *args)


def test_rounds_and_what_all_tasks_read_may_be_lost_together(
    executor: ThreadPoolExecutor, options: dict[str, Any], tmp_path: Path, memory: str
) -> None:
    large, small = random_rows(2000, different=500), random_rows(50, seed=3, different=500)
    tables = {"t": files(tmp_path / "t", large), "s": files(tmp_path / "s", small)}
    query = "select g.a, g.n, s.c from (select a, count(*) n from t group by a) g join s on g.a = s.a"
    flushing = FlushingExecutor(executor, memory)
    own: Any = {"method": "hybrid", "fast_storage": memory, "fast_bytes": 10_000.0, "pipelined": True}
    found = fa.sql(query, tables=tables, **{**options, **own, "executor": flushing}).to_arrow()
    assert ordered(found) == ordered(oracle(query, t=large, s=small))
    assert flushing.flushed


@pytest.mark.parametrize("method", ["hybrid", "two-level"])
def test_a_continued_job_does_not_mix_rows_of_two_programs(
    executor: ThreadPoolExecutor, options: dict[str, Any], tmp_path: Path, memory: str, method: str
) -> None:
    table = random_rows(2000)
    query = "select a, random() r from t order by r"  # the same task has other rows in each program
    tables = {"t": files(tmp_path / "in", table, count=6)}
    own: Any = {**options, "method": method, "partitions": 9}
    own |= {"fast_storage": memory, "fast_bytes": 1e9} if method == "hybrid" else {}
    killed = fa.sql(query, tables=tables, **{**own, "executor": KilledExecutor(executor)})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jobs._Job, "_delete", lambda _: None)
        with pytest.raises(KeyboardInterrupt):
            killed.write_parquet(str(tmp_path / "out"), job="nightly")
    with open_blocks(memory) as blocks:
        blocks.delete_below("nightly/")
    outcome = fa.sql(query, tables=tables, **own).write_parquet(str(tmp_path / "out"), job="nightly")
    found = pa.concat_tables([pq.read_table(path) for path in outcome.paths])
    assert ordered(found.select(["a"])) == ordered(table.select(["a"]))
    assert found["r"].to_pylist() == sorted(found["r"].to_pylist())


def test_the_first_rows_without_an_order_are_those_of_the_first_tasks(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = random_rows(2000)
    source = fa.read_parquet(files(tmp_path / "in", table, count=11), **options)
    monkeypatch.setattr(jobs, "FAN_IN", 3)
    assert source.limit(5, offset=3).to_arrow().equals(table.slice(3, 5))


class FailsOnce:
    """Fails each task of a call of several ones once: the first that has not failed."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._seen: set[str] = set()

    def submit(self, fn: Any, /, *args: Any) -> Future[Any]:
        return self._pool.submit(self._run, fn, *args)

    def _run(self, fn: Any, /, *args: Any) -> Any:
        names = {each.name for each in getattr(args[0], "tasks", ())} - self._seen
        if names:
            self._seen.add(min(names))
            raise RuntimeError("it may be there again")
        return fn(*args)


def test_tasks_of_a_call_have_their_attempts_each(
    executor: ThreadPoolExecutor, options: dict[str, Any], tmp_path: Path
) -> None:
    table = random_rows(3000)
    seen: list[tuple[int, int]] = []
    own: Any = {**options, "executor": FailsOnce(executor), "tasks_per_call": 8}
    outcome = (
        fa.read_parquet(files(tmp_path / "in", table), **own)
        .sort("a")
        .write_parquet(str(tmp_path / "out"), progress=lambda _, done, of: seen.append((done, of)))
    )
    assert ordered(pa.concat_tables([pq.read_table(path) for path in outcome.paths])) == ordered(table)
    assert outcome.stages[0].retries >= outcome.stages[0].tasks > 8
    assert all(done <= of for done, of in seen)


class Forgetful(WrappedBlocks):
    """A memory that has lost two blocks of tasks, once. ``place``: what all its names begin with for the pattern."""

    lost: ClassVar[set[str]] = set()

    def __init__(self, blocks: Blocks, pattern: str, place: str = "") -> None:
        super().__init__(blocks)
        self._pattern = pattern
        self._place = place

    def read(self, part: Part) -> memoryview:
        if re.search(self._pattern, self._place + part.name) and "committed" not in part.name and len(self.lost) < 2:
            self.lost.add(part.name)
            raise ObjectGone(f"{part.name} was evicted")
        return super().read(part)


@pytest.mark.parametrize("method", ["combined", "fast", "hybrid"])
def test_what_a_memory_has_lost_is_made_once_more(
    options: dict[str, Any], tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    pattern = "/0-0-3$" if method == "combined" else "0-3/"
    monkeypatch.setattr(Forgetful, "lost", set())
    monkeypatch.setattr("farcall_analytics.passing.open_storage", lambda url: Forgetful(open_blocks(url), pattern))
    table = random_rows(2000, different=500)
    own: Any = {} if method == "combined" else {"fast_storage": memory, "fast_bytes": 10_000.0}
    source = fa.read_parquet(files(tmp_path / "in", table), **options, method=method, **own)
    outcome = source.group_by("a").agg(n=fa.count()).write_parquet(str(tmp_path / "out"))
    found = pa.concat_tables([pq.read_table(path) for path in outcome.paths])
    assert ordered(found) == ordered(oracle("select a, count(*) n from t group by a", t=table))
    assert Forgetful.lost
    assert sum(each.repeats for each in outcome.stages) >= 1


class Damaged(WrappedBlocks):
    """A storage that damages two blocks of tasks for good. ``most``: how many it damages at most."""

    chosen: ClassVar[list[str]] = []

    def __init__(self, blocks: Blocks, kind: str, pattern: str, most: int = 2) -> None:
        super().__init__(blocks)
        self._kind = kind
        self._pattern = pattern
        self._most = most

    def read(self, part: Part) -> memoryview:
        names = self.chosen
        if part.name not in names:
            if not re.search(self._pattern, part.name) or "committed" in part.name or len(names) >= self._most:
                return super().read(part)
            names.append(part.name)
        if self._kind == "delete":
            raise ObjectGone(f"There is no block {part.name}.")
        if self._kind == "swap" and len(names) > 1:
            return super().read(part._replace(name=names[names.index(part.name) - 1]))
        content = bytearray(super().read(part))
        if self._kind == "cut":
            return memoryview(content[:-8])
        if content:
            content[len(content) // 2] ^= 255
        return memoryview(content)


@pytest.mark.parametrize("kind", ["flip", "cut", "swap", "delete"])
@pytest.mark.parametrize(("method", "pattern"), [("combined", "/0-0-[37]$"), ("slow", "0-0-[37]/"), ("slow", "/1-0-")])
def test_damaged_blocks_are_made_once_more(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, method: str, pattern: str
) -> None:
    monkeypatch.setattr(Damaged, "chosen", [])
    monkeypatch.setattr("farcall_analytics.passing.open_storage", lambda url: Damaged(open_blocks(url), kind, pattern))
    table = random_rows(2000, different=500)
    source = fa.read_parquet(files(tmp_path / "in", table), **options, method=method)
    outcome = source.group_by("a").agg(n=fa.count())._run()
    assert outcome.table is not None
    assert ordered(outcome.table) == ordered(oracle("select a, count(*) n from t group by a", t=table))
    assert len(Damaged.chosen) == 2
    assert sum(each.repeats for each in outcome.stages) >= 1


def test_blocks_that_are_always_damaged_are_named(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Damaged, "chosen", [])
    monkeypatch.setattr(
        "farcall_analytics.passing.open_storage", lambda url: Damaged(open_blocks(url), "flip", "/0-", 10**6)
    )
    source = fa.read_parquet(files(tmp_path / "in", random_rows(2000)), **options)
    with pytest.raises(ObjectGone, match=r"The block .*/0-2-\S* is damaged"):
        source.group_by("a").agg(n=fa.count()).to_arrow()


class FullBlocks(WrappedBlocks):
    """A memory that has room for twenty blocks."""

    created: ClassVar[set[str]] = set()

    def create(self, name: str, pieces: Sequence[Piece]) -> bool:
        self.created.add(name)
        if len(self.created) > 20:
            raise StoreFull("there is no room")
        return super().create(name, pieces)


@pytest.mark.parametrize("method", ["fast", "hybrid"])
def test_what_has_no_room_in_the_memory_goes_to_the_other_storage(
    options: dict[str, Any], tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(FullBlocks, "created", set())

    def open_full(url: str) -> Blocks:
        return FullBlocks(open_blocks(url)) if url == memory else open_blocks(url)

    monkeypatch.setattr("farcall_analytics.passing.open_storage", open_full)
    table = random_rows(2000, different=500)
    own: Any = {"fast_storage": memory, "fast_bytes": 10_000.0}
    source = fa.read_parquet(files(tmp_path / "in", table), **options, method=method, **own)
    assert ordered(source.sort("a").to_arrow()) == ordered(table)
    assert len(FullBlocks.created) > 20


class StoppedBlocks(WrappedBlocks):
    """A memory that answers no more once it has created twenty blocks."""

    created: ClassVar[int] = 0

    def create(self, name: str, pieces: Sequence[Piece]) -> bool:
        self._check()
        StoppedBlocks.created += 1
        return super().create(name, pieces)

    def read(self, part: Part) -> memoryview:
        self._check()
        return super().read(part)

    def names(self, prefix: str) -> Iterator[str]:
        self._check()
        return super().names(prefix)

    def _check(self) -> None:
        if self.created >= 20:
            raise StoreUnavailable("it was stopped")


@pytest.mark.parametrize("method", ["fast", "hybrid"])
def test_a_job_whose_memory_stops_continues_through_the_other_storage(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(StoppedBlocks, "created", 0)
    memory = f"file://{tmp_path}/memory"

    def open_stopped(url: str) -> Blocks:
        return StoppedBlocks(open_blocks(url)) if url == memory else open_blocks(url)

    monkeypatch.setattr("farcall_analytics.passing.open_storage", open_stopped)
    monkeypatch.setattr("farcall_analytics.jobs.open_storage", open_stopped)
    table = random_rows(2000, different=500)
    own: Any = {"fast_storage": memory, "fast_bytes": 10_000.0}
    source = fa.read_parquet(files(tmp_path / "in", table), **options, method=method, **own)
    assert ordered(source.sort("a").to_arrow()) == ordered(table)
    assert StoppedBlocks.created == 20


class SlowExecutor:
    """The first attempt of one task waits until it may continue."""

    def __init__(self, pool: ThreadPoolExecutor, slow: str) -> None:
        self._pool = pool
        self._slow = slow
        self._is_first = True
        self.may_continue = threading.Event()

    def submit(self, fn: Any, /, *args: Any) -> Future[Any]:
        if args[0].name != self._slow or fn is not tasks.run_task or not self._is_first:
            return self._pool.submit(fn, *args)
        self._is_first = False
        return self._pool.submit(self._wait, fn, *args)

    def _wait(self, fn: Any, /, *args: Any) -> Any:
        assert self.may_continue.wait(WAIT_S)
        return fn(*args)


def test_a_task_that_hangs_gets_a_copy_which_counts(
    executor: ThreadPoolExecutor, options: dict[str, Any], tmp_path: Path
) -> None:
    table = random_rows(2000)
    slow = SlowExecutor(executor, "0-0-3")
    source = fa.read_parquet(files(tmp_path / "in", table), **{**options, "executor": slow})

    def progress(name: str, done: int, tasks_: int) -> None:
        if (name, done) == ("stage 2 of 2", tasks_):
            slow.may_continue.set()  # the whole job was done without it

    outcome = source.sort("a").write_parquet(str(tmp_path / "out"), progress=progress)
    found = pa.concat_tables([pq.read_table(path) for path in outcome.paths])
    assert ordered(found) == ordered(table)
    assert sum(each.copies for each in outcome.stages) == 1


def test_a_terminal_shows_a_bar_for_each_stage(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    source = fa.read_parquet(files(tmp_path / "in", random_rows(100)), **options)
    source.sort("a").to_arrow()
    assert isinstance(sys.stderr, Terminal)
    assert "stage 2 of 2" in sys.stderr.getvalue()


class BareExecutor:
    """Workers without this package."""

    def __init__(self) -> None:
        self.calls = 0

    def submit(self, _: Any, /, *__: Any) -> Future[Any]:
        self.calls += 1
        future: Future[Any] = Future()
        future.set_exception(ModuleNotFoundError("No module named 'farcall_analytics'"))
        return future


def test_workers_without_the_package_are_told_apart(options: dict[str, Any], tmp_path: Path) -> None:
    bare = BareExecutor()
    source = fa.read_parquet(
        files(tmp_path / "in", random_rows(10), count=1), **{**options, "executor": bare, "partitions": 1}
    )
    with pytest.raises(ConfigurationError, match="pip install farcall-analytics"):
        source.sort("a").to_arrow()
    assert bare.calls == 1, "nothing is tried again"


class StoppingExecutor:
    """A program that is stopped at its n-th task."""

    def __init__(self, pool: ThreadPoolExecutor, stop_at: int) -> None:
        self._pool = pool
        self._left = stop_at
        self.runs = 0

    def submit(self, fn: Any, /, *args: Any) -> Future[Any]:
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt
        self.runs += 1
        return self._pool.submit(fn, *args)


@pytest.mark.parametrize("stop_at", [1, 5, 15, 25])
def test_a_job_that_is_stopped_leaves_nothing(
    executor: ThreadPoolExecutor, options: dict[str, Any], tmp_path: Path, stop_at: int
) -> None:
    stopping = StoppingExecutor(executor, stop_at)
    source = fa.read_parquet(files(tmp_path / "in", random_rows(2000)), **{**options, "executor": stopping})
    with pytest.raises(KeyboardInterrupt):
        source.sort("a").write_parquet(str(tmp_path / "out"))
    assert not list(tmp_path.glob("out/*.draft*"))


@contextlib.contextmanager
def kill(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The program is killed, and deletes nothing."""
    with monkeypatch.context() as patch:
        patch.setattr("farcall_common.objects.blocks.ObjectBlocks.delete_below", lambda *_: None)
        patch.setattr("farcall_common.objects.blocks.ObjectBlocks.delete", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.parametrize("stop_at", [8, 28, 33])
def test_a_job_that_was_killed_is_continued_by_its_name(
    executor: ThreadPoolExecutor,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop_at: int,
) -> None:
    table = random_rows(2000, different=50)
    tables = {"t": files(tmp_path / "in", table), "r": random_rows(20, seed=3, different=50)}
    query = "select t.b, count(*) n, sum(t.a)::bigint s from t join r using (a) group by t.b order by s"

    def job(own: Any) -> fa.Dataset:
        return fa.sql(query, tables=tables, **{**options, "executor": own})

    with kill(monkeypatch):
        job(StoppingExecutor(executor, stop_at)).write_parquet(str(tmp_path / "out"), job="nightly")
    with pytest.raises(ConfigurationError, match="nightly was begun with another query"):
        job(executor).limit(3).write_parquet(str(tmp_path / "out"), job="nightly")
    with kill(
        monkeypatch
    ):  # what is refused deletes nothing of the other one; a job that is continued can be killed, too
        job(StoppingExecutor(executor, 4)).write_parquet(str(tmp_path / "out"), job="nightly")
    done = job(executor).write_parquet(str(tmp_path / "out"), job="nightly")
    found = pa.concat_tables([pq.read_table(path) for path in done.paths])
    assert found.to_pylist() == oracle(query, t=table, r=tables["r"]).to_pylist()
    assert sum(each.reused for each in done.stages) >= stop_at - 12


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_is_wrong_is_refused_before_anything_runs(options: dict[str, Any], tmp_path: Path) -> None:
    t = fa.from_arrow(random_rows(10), **options)
    for build, reason in (
        (lambda: t.join(t, on="a"), "both sides have b, c, outside the keys"),
        (lambda: t.join(t, on="x"), "unknown column x. Expected one of: a, b, c"),
        (lambda: t.group_by("x"), "unknown column x"),
        (lambda: t.sort("x"), "unknown column x"),
        (lambda: t.sort(), "a sort needs keys"),
        (lambda: t.sort("a", "b", descending=[True]), "for all keys or for each of 2"),
        (lambda: t.limit(-1), "expected whole numbers from 0 on"),
        (lambda: t.group_by("a").agg(), "agg needs aggregates"),
        (lambda: t.group_by("a").agg(a=fa.sum("b")), "a: a key has that name"),
        (lambda: t.write_parquet(""), "output: expected a directory"),
        (lambda: fa.from_arrow(pa.table([[1], [2]], names=["a", "a"]), **options), "the name a"),
        (lambda: fa.from_arrow(pa.table({}), **options), "there are no columns"),
        (lambda: fa.sql("create table q as select 1 a", tables={}, **options), "DDL not supported"),
        (lambda: t.filter(fa.col("x") > 1), "No field named x"),
        (lambda: fa.sql("select x from t", tables={"t": t}, **options), "No field named x"),
        (lambda: fa.sql("selec", tables={"t": t}, **options), "Expected: an SQL statement"),
        (lambda: fa.sql("select a, a from t", tables={"t": t}, **options).stages(), "unique expression names"),
        (lambda: fa.sql("select * from t t1, t t2", tables={"t": t}, **options).stages(), "the name a, b, c"),
        (
            lambda: fa.sql("select a from t where a not in (select b from t)", tables={"t": t}, **options).stages(),
            "write NOT EXISTS",
        ),
    ):
        with pytest.raises(fa.QueryProblem, match=reason):
            build()


@pytest.mark.parametrize(("of", "other"), [("int64", "int32"), ("int16", "int32"), ("int64", "float64")])
@pytest.mark.parametrize("kind", ["exists", "not exists"])
def test_equal_keys_of_other_types_meet(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, of: str, other: str, kind: str
) -> None:
    """DataFusion loses the type that a union gives a column."""
    monkeypatch.setattr("farcall_analytics.stages.BROADCAST_BYTES", -1)
    tables = {"c": pa.table({"x": pa.array(range(40), of)}), "d": pa.table({"k": pa.array(range(20, 70), other)})}
    query = f"""
        select x from (select k as x from d union all select x from c) q
        where {kind} (select 1 from d where x = k and k < 60)
    """
    found = fa.sql(query, tables=tables, **options).to_arrow()
    assert ordered(found) == ordered(oracle(query, **tables))


def test_keys_that_cannot_have_the_same_hash_are_refused(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farcall_analytics.stages.BROADCAST_BYTES", -1)
    types = pa.decimal128(12, 2), pa.decimal128(10, 1)
    tables = {name: pa.table({name: pa.array([1, 2], of)}) for name, of in zip(("c", "d"), types, strict=True)}
    query = (
        "select x from (select d as x from d union all select c from c) q where exists (select 1 from d where x = d)"
    )
    with pytest.raises(fa.QueryProblem, match=r"a join of decimal128\(12, 2\) with decimal128\(10, 1\).*cast one"):
        fa.sql(query, tables=tables, **options).to_arrow()


def test_equal_nulls_that_datafusion_forgets_are_refused(options: dict[str, Any]) -> None:
    tables = {"l": pa.table({"b": [True, None]}), "r": pa.table({"k": [1, 2], "c": [True, None]})}
    join = "select * from l join r on b is not distinct from c"
    assert fa.sql(join, tables=tables, **options).to_arrow().num_rows == 2
    with pytest.raises(fa.QueryProblem, match="beside a subquery is not supported: write a = b OR"):
        fa.sql(f"{join} where k > (select min(k) from r)", tables=tables, **options).to_arrow()


def test_rounds_of_nothing_are_none(options: dict[str, Any], memory: str) -> None:
    source = fa.from_arrow(random_rows(0), method="hybrid", fast_storage=memory, **{**options, "partitions": None})
    assert source.sort("a").to_arrow().num_rows == 0


def test_categories_are_values(options: dict[str, Any]) -> None:
    frame = polars.DataFrame({"a": ["x", "y", "x"]}, schema={"a": polars.Categorical})
    found = fa.from_arrow(frame, **options).group_by("a").agg(n=fa.count()).sort("a").to_arrow()
    assert found.to_pylist() == [{"a": "x", "n": 2}, {"a": "y", "n": 1}]


def test_relative_paths_are_those_of_the_program(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files(tmp_path / "in", random_rows(10))
    monkeypatch.chdir(tmp_path)
    source = fa.read_parquet("in/*.parquet", **options)
    outcome = source.write_parquet("out")
    assert all(path.startswith(f"{tmp_path}/out/") for path in outcome.paths)
    for path in (tmp_path / "in").iterdir():
        path.unlink()
    with pytest.raises(fa.InputProblem, match="all workers must reach it"):
        source.to_arrow()


SAMPLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "a column": ("select * from t order by a", ("a",)),
    "an expression": ("select c from t order by a + b", ("a", "b")),
    "a filter": ("select a, c from t where b > 3 order by a desc", ("a", "b")),
    "an own column": ("select a, b * 2 as twice from t where b > 3 order by twice", ("b",)),
    "a group": ("select a, sum(b) s from t group by a order by s", ()),
    "no column": ("select a from t order by random()", ()),
    "beside a quotient": ("select a, 100 / case when b >= 0 then 1 else 0 end as q from t order by a", ("a",)),
    "beside a cast": ("select a, cast(coalesce(substr(c, 5), 'none') as bigint) as n from t order by a", ("a",)),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_reads_the_columns_that_keys_depend_on(options: dict[str, Any], tmp_path: Path, name: str) -> None:
    query, columns = SAMPLES[name]
    table = random_rows(2000, different=50)
    dataset = fa.sql(query, tables={"t": files(tmp_path / "in", table)}, **options)
    [ranged] = [each for each in dataset.stages().stages if each.exchange and each.exchange.kind == "range"]
    assert [each.sampled for each in ranged.sources] == [columns]
    found = dataset.to_arrow()
    if name == "no column":
        assert ordered(found) == ordered(table.select(["a"]))
    else:
        assert ordered(found) == ordered(oracle(query, t=table))
        key = {"an expression": None, "an own column": "twice", "a group": "s"}.get(name, "a")
        keys = found[key].to_pylist() if key else []
        assert keys == sorted(keys, reverse="desc" in query)


def test_files_without_rows_or_with_values_inside_values_are_sorted(options: dict[str, Any], tmp_path: Path) -> None:
    inner = pa.struct([pa.field("x", pa.int64(), nullable=False)])
    table = pa.table({"a": [2, 1], "s": pa.array([{"x": 1}, {"x": 2}], inner)})
    pq.write_table(table, tmp_path / "0.parquet")
    with pq.ParquetWriter(tmp_path / "1.parquet", table.schema):
        pass  # no row groups
    found = fa.read_parquet(f"{tmp_path}/*.parquet", **options).sort("a").to_arrow()
    assert found.to_pylist() == [{"a": 1, "s": {"x": 2}}, {"a": 2, "s": {"x": 1}}]
    empty = fa.read_parquet(str(tmp_path / "1.parquet"), **options).sort("a").to_arrow()
    assert empty.num_rows == 0


def test_a_sample_reads_columns_that_may_not_be_null(options: dict[str, Any], tmp_path: Path) -> None:
    schema = pa.schema([pa.field("a", pa.int64()), pa.field("b", pa.int64(), nullable=False), ("c", pa.string())])
    table = pa.table({"a": [3, 1, 2], "b": [1, 2, 3], "c": ["x", "y", "z"]}, schema=schema)
    pq.write_table(table, tmp_path / "t.parquet")
    dataset = fa.read_parquet(str(tmp_path / "t.parquet"), **options).sort("a")
    assert dataset.stages().stages[0].sources[0].sampled == ("a", "b")
    assert dataset.to_arrow()["a"].to_pylist() == [1, 2, 3]


def test_a_union_has_the_columns_of_the_first_by_their_names(options: dict[str, Any]) -> None:
    one = fa.from_arrow({"a": [1], "b": ["x"]}, **options)
    other = fa.from_arrow({"b": ["y"], "a": [2]}, **options)
    assert sorted(one.union(other).to_arrow().to_pylist(), key=str) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    with pytest.raises(fa.QueryProblem, match="b, c: a column of one side only"):
        one.union(fa.from_arrow({"a": [1], "c": ["x"]}, **options))


@pytest.mark.parametrize("query", ["explain select * from t", "explain analyze select * from t", "describe t"])
def test_what_is_no_query_is_refused(options: dict[str, Any], query: str) -> None:
    with pytest.raises(fa.QueryProblem, match="expected a query: leave out EXPLAIN or DESCRIBE"):
        fa.sql(query, tables={"t": {"a": [1]}}, **options)


def test_usual_mistakes_are_named(options: dict[str, Any]) -> None:
    ds = fa.from_arrow({"a": [2, 1], "b": [1, 1]}, **options)
    assert ds.sort(["b", "a"]).to_arrow()["a"].to_pylist() == [1, 2]
    assert ds.group_by(["a", "b"]).agg(n=fa.count()).to_arrow().num_rows == 2
    mistakes: list[tuple[Callable[[], Any], str]] = [
        (lambda: ds.agg(r="sum"), "r: expected an expression such as fa.sum"),  # type: ignore[arg-type]
        (lambda: ds.select(r="a"), "r: expected an expression"),  # type: ignore[arg-type]
        (lambda: ds.join(ds, on="a", how="outer"), "how: expected inner, left, right"),  # type: ignore[arg-type]
        (lambda: ds.join({"a": [1]}, on="a"), "join: expected a dataset"),  # type: ignore[arg-type]
        (lambda: fa.from_arrow("file.parquet", **options), "lists by name, got str"),
    ]
    for make, reason in mistakes:
        with pytest.raises(fa.QueryProblem, match=reason):
            make()
    with pytest.raises(ConfigurationError, match="executor: expected an executor, got 'here'"):
        fa.from_arrow({"a": [1]}, executor="here", storage="file:///none")  # type: ignore[arg-type]


def test_settings_that_cannot_be_are_refused(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = random_rows(10)
    monkeypatch.delenv("FARCALL_ANALYTICS_STORAGE", raising=False)
    with pytest.raises(ConfigurationError, match="No storage is set"):
        fa.from_arrow(table, executor=options["executor"]).to_arrow()
    with pytest.raises(ValueError, match="is not shared between tasks"):
        fa.from_arrow(table, executor=options["executor"], storage="memory:").to_arrow()
    settings: list[tuple[Any, str]] = [
        ({"method": "fastest"}, "unknown method of exchange 'fastest'"),
        ({"method": "fast"}, "fast needs memory"),
        ({"codec": "gzip"}, "codec: unknown value 'gzip'"),
        ({"objective": "best"}, "objective: unknown value 'best'"),
        ({"deadline_s": -1.0}, "deadline_s: expected a number above 0"),
    ]
    for wrong, reason in settings:
        with pytest.raises(ConfigurationError, match=reason):
            fa.from_arrow(table, **wrong, **options).to_arrow()
    with pytest.raises(ConfigurationError, match="Unknown setting partition"):
        fa.from_arrow(table, partition=3, **options)
    for job in ("", "/", "..", "team/x", "a b", "-x"):
        with pytest.raises(ConfigurationError, match="Invalid job name"):
            fa.from_arrow(table, **options).write_parquet(str(tmp_path / "out"), job=job)
    for name, value in (
        ("retries", -1),
        ("copies_after", 2.0),
        ("pipelined", "no"),
        ("share_bytes", 0),
        ("partitions", 0),
        ("partitions", 1.5),
        ("partition_bytes", -1),
        ("task_memory", "much"),
        ("task_memory", 1),
    ):
        with pytest.raises(ConfigurationError, match=name):
            fa.from_arrow(table, **{**options, name: value}).to_arrow()
    secret = "valkey://:secret@host:1/0"
    assert "secret" not in repr(fa.Settings(secret, secret)) + repr(fa.Settings(secret, secret).ways("job"))
    with pytest.raises(fa.InputProblem) as error:
        fa.read_parquet("s3://me:secret@bucket/none.parquet?endpoint_override=127.0.0.1:1", **options)
    assert "secret" not in str(error.value)
    with pytest.raises(fa.InputProblem, match=r"is a directory: write .*/\*\.parquet"):
        fa.read_parquet(tmp_path, **options)
    with pytest.raises(fa.InputProblem, match="there are no such files"):
        fa.read_parquet(str(tmp_path / "none*.parquet"), **options)


def test_windows_and_groups_that_are_larger_than_the_memory_of_a_task_use_the_disk(
    options: dict[str, Any], tmp_path: Path
) -> None:
    tables = {"t": random_rows(100_000)}
    own = {**options, "partitions": 1, "task_memory": 2_000_000}
    for query in ("select a, row_number() over (order by c) n from t", "select c, count(*) n from t group by c"):
        assert ordered(fa.sql(query, tables=tables, **own).to_arrow()) == ordered(oracle(query, **tables))


def test_a_damaged_file_ends_the_job_and_leaves_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    source = fa.read_parquet(files(tmp_path / "in", random_rows(1000)), **options)
    (tmp_path / "in" / "2.parquet").write_bytes(b"damaged")
    with pytest.raises(fa.InputProblem, match=r"2\.parquet"):
        source.sort("a").to_arrow()


def test_an_error_of_a_query_ends_the_job_with_its_reason(options: dict[str, Any], tmp_path: Path) -> None:
    tables = {"t": files(tmp_path / "in", random_rows(1000))}
    with pytest.raises(fa.QueryProblem, match="Divide by zero"):
        fa.sql("select b, sum(1 / (b - b)) s from t group by b", tables=tables, **options).to_arrow()
