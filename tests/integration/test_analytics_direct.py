"""Exchange through the memory of nodes, on real workers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import farcall_analytics as fa
from farcall_analytics.tasks import Done, Task, run_task
from farcall_common.errors import ConfigurationError
from farcall_common.objects.blocks import open_blocks
from farcall_common.running import current
from farcall_endpoint import Engine
from tests.support.analytics_data import BIG_DATA_JOIN, big_data, files, oracle, ordered, random_rows


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(max_workers=3) as engine:
        yield engine


@pytest.fixture
def options(engine: Engine, tmp_path: Path) -> Iterator[dict[str, Any]]:
    storage = f"file://{tmp_path}/blocks"
    yield {"executor": engine, "storage": storage, "method": "direct", "share_bytes": 20_000, "partitions": 3}
    with open_blocks(storage) as blocks:
        assert list(blocks.names("")) == []
    assert engine.submit(left_in_memory).result() == []


def left_in_memory() -> list[str]:
    directory = current().memory_dir
    assert directory is not None
    return sorted(each.name for each in directory.glob("blocks/*"))


def lose_memory() -> None:
    directory = current().memory_dir
    assert directory is not None
    shutil.rmtree(directory / "blocks")


class WatchedExecutor:
    """Notes what tasks return. Before the first task that reads what others have put into memory, that is lost."""

    def __init__(self, engine: Engine, *, loses: bool = False) -> None:
        self._engine = engine
        self._loses = loses
        self.futures: list[Future[Done]] = []

    def submit(self, fn: Any, /, *args: Any) -> Future[Any]:
        if self._loses and fn is run_task and reads_memory(args[0]):
            self._loses = False
            self._engine.submit(lose_memory).result()
        future = self._engine.submit(fn, *args)
        if fn is run_task:
            self.futures.append(future)
        return future

    def storages(self) -> set[int]:
        done = [each.result() for each in self.futures if not each.cancelled() and each.exception() is None]
        return {each.written.storage for each in done if each.written is not None}


def reads_memory(task: Task) -> bool:
    return any(each.storage == 1 for rows in task.rows for each in rows.written)


def sorted_rows(options: dict[str, Any], directory: Path, rows: pa.Table) -> tuple[Any, pa.Table]:
    source = fa.read_parquet(files(directory / "in", rows), **options)
    outcome = source.sort("a").write_parquet(str(directory / "out"))
    return outcome, pa.concat_tables([pq.read_table(path) for path in outcome.paths])


def test_rows_that_go_through_memory_are_those_of_the_oracle(options: dict[str, Any], tmp_path: Path) -> None:
    watched = WatchedExecutor(options["executor"])
    own = {**options, "executor": watched}
    rows = random_rows(5_000)
    _, found = sorted_rows(own, tmp_path, rows)
    assert ordered(found) == ordered(rows)
    assert found["a"].to_pylist() == oracle("select a from t order by a nulls last", t=rows)["a"].to_pylist()
    assert watched.storages() == {1}
    tables = big_data(tmp_path / "big")
    by_name = {name: pq.read_table(Path(pattern).parent) for name, pattern in tables.items()}
    query = BIG_DATA_JOIN.format(until="1983-01-01")
    answer = fa.sql(query, tables=tables, **own).to_arrow()
    assert ordered(answer) == ordered(oracle(query, **by_name))
    assert answer.num_rows


def test_what_has_no_room_in_memory_goes_to_the_first_storage(options: dict[str, Any], tmp_path: Path) -> None:
    watched = WatchedExecutor(options["executor"])
    rows = random_rows(5_000)
    _, found = sorted_rows({**options, "executor": watched, "fast_storage": "node:60000"}, tmp_path, rows)
    assert ordered(found) == ordered(rows)
    assert watched.storages() == {0, 1}


def test_a_stage_whose_blocks_are_lost_is_repeated(options: dict[str, Any], tmp_path: Path) -> None:
    rows = random_rows(5_000)
    own = {**options, "executor": WatchedExecutor(options["executor"], loses=True)}
    outcome, found = sorted_rows(own, tmp_path, rows)
    assert ordered(found) == ordered(rows)
    assert [each.repeats for each in outcome.stages] == [1, 0]


def test_a_query_that_fails_leaves_nothing_in_memory(options: dict[str, Any], tmp_path: Path) -> None:
    tables = {"t": files(tmp_path / "in", random_rows(5_000))}
    with pytest.raises(fa.QueryProblem):
        fa.sql(
            "select sum(1 / (n - n)) from (select b, count(*) n from t group by b)", tables=tables, **options
        ).to_arrow()


def test_other_executors_and_other_storages_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    path = files(tmp_path / "in", random_rows(500))
    with ThreadPoolExecutor(1) as pool, pytest.raises(ConfigurationError, match="for tasks of Farcall"):
        fa.read_parquet(path, **{**options, "executor": pool}).sort("a").to_arrow()
    for changes in ({"method": "fast"}, {"fast_storage": options["storage"]}, {"storage": "node:"}):
        with pytest.raises(ConfigurationError, match="node: is the fast_storage"):
            fa.read_parquet(path, **{**options, "fast_storage": "node:", **changes})
