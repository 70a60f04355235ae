"""Exchange through the memory of nodes, on real workers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import farcall_analytics as fa
from farcall_analytics import jobs
from farcall_analytics.exchange import Written
from farcall_analytics.tasks import Done, Regroup, Task, regroup_task, run_task
from farcall_common.errors import ConfigurationError, ObjectGone
from farcall_common.objects.block_files import file_name
from farcall_common.objects.blocks import open_blocks
from farcall_common.objects.node_blocks import NodeBlocks, node_of
from farcall_common.running import current
from farcall_endpoint import Engine
from farcall_endpoint.config.providers import SlurmProviderConfig
from tests.support.analytics_data import BIG_DATA_JOIN, big_data, files, oracle, ordered, random_rows
from tests.support.scheduler import install_scheduler
from tests.waiting import wait_until


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
    directory = current().node_memory().directory
    assert directory is not None
    return sorted(each.name for each in directory.glob("*"))


def lose_memory() -> None:
    directory = current().node_memory().directory
    assert directory is not None
    shutil.rmtree(directory)


def lose_node() -> None:
    os.kill(os.getppid(), signal.SIGKILL)


class WatchedExecutor:
    """Notes what tasks return.

    :param loses: run as a task before the first one that reads what others have put into memory.
    """

    def __init__(self, engine: Engine, *, loses: Callable[[], None] | None = None) -> None:
        self._engine = engine
        self._loses = loses
        self.futures: list[Future[Done]] = []

    def submit(self, fn: Any, /, *args: Any) -> Future[Any]:
        if self._loses and reads_memory(args[0]):
            loses, self._loses = self._loses, None
            self._engine.options(max_attempts=1).submit(loses).exception()
        future = self._engine.submit(fn, *args)
        if fn is run_task or fn is regroup_task:
            self.futures.append(future)
        return future

    def nodes(self) -> set[str]:
        return {node_of(each.name) for each in self.written()}

    def storages(self) -> set[int]:
        return {each.storage for each in self.written()}

    def written(self) -> list[Written]:
        done = [each.result() for each in self.futures if not each.cancelled() and each.exception() is None]
        return [each.written for each in done if each.written is not None]


def reads_memory(task: Any) -> bool:
    if isinstance(task, Regroup):
        return any(each.storage == 1 for each in task.written)
    return isinstance(task, Task) and any(each.storage == 1 for rows in task.rows for each in rows.written)


def sorted_rows(options: dict[str, Any], directory: Path, rows: pa.Table) -> tuple[Any, pa.Table]:
    source = fa.read_parquet(files(directory / "in", rows), **options)
    outcome = source.sort("a").write_parquet(str(directory / "out"))
    return outcome, pa.concat_tables([pq.read_table(path) for path in outcome.paths])


@pytest.mark.parametrize("room", ["", "node:60000"])
def test_what_a_node_has_written_is_merged_in_the_storage(options: dict[str, Any], tmp_path: Path, room: str) -> None:
    watched = WatchedExecutor(options["executor"])
    own = {**options, "executor": watched, "method": "merged", "fast_storage": room}
    rows = random_rows(5_000)
    outcome, found = sorted_rows({**own, "partitions": 9}, tmp_path, rows)
    assert found["a"].to_pylist() == oracle("select a from t order by a nulls last", t=rows)["a"].to_pylist()
    assert ordered(found) == ordered(rows)
    merged = [each for each in watched.written() if len(each.offsets) == 4]
    assert [each.storage for each in merged] == [0, 0, 0], "a block for each three of nine partitions"
    in_memory = [each for each in watched.written() if each.storage == 1]
    assert 1 < len(in_memory) < outcome.stages[0].tasks if room else len(in_memory) == outcome.stages[0].tasks


def test_a_merge_whose_blocks_are_lost_is_repeated(options: dict[str, Any], tmp_path: Path) -> None:
    rows = random_rows(5_000)
    own = {**options, "executor": WatchedExecutor(options["executor"], loses=lose_memory), "method": "merged"}
    outcome, found = sorted_rows(own, tmp_path, rows)
    assert ordered(found) == ordered(rows)
    assert [each.repeats for each in outcome.stages] == [1, 0]


class KilledExecutor:
    """Its program is killed in front of the second task that merges, and other rows are lost."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._first: Future[Any] | None = None

    def submit(self, fn: Any, /, *args: Any) -> Future[Any]:
        if fn is not regroup_task:
            return self._engine.submit(fn, *args)
        if self._first is not None:
            self._first.result()
            self._engine.submit(lose_memory).result()
            raise KeyboardInterrupt
        self._first = self._engine.submit(fn, *args)
        return self._first


def test_a_continued_merge_does_not_mix_rows_of_two_programs(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(2_000)
    query = "select a, random() r from t order by r"  # the same task has other rows in each program
    tables = {"t": files(tmp_path / "in", rows)}
    own = {**options, "method": "merged", "partitions": 9}
    killed = fa.sql(query, tables=tables, **{**own, "executor": KilledExecutor(options["executor"])})
    with monkeypatch.context() as patched:
        patched.setattr(jobs._Job, "_delete", lambda _: None)
        with pytest.raises(KeyboardInterrupt):
            killed.write_parquet(str(tmp_path / "out"), job="nightly")
    outcome = fa.sql(query, tables=tables, **own).write_parquet(str(tmp_path / "out"), job="nightly")
    found = pa.concat_tables([pq.read_table(path) for path in outcome.paths])
    assert ordered(found.select(["a"])) == ordered(rows.select(["a"]))
    assert found["r"].to_pylist() == sorted(found["r"].to_pylist())


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
    own = {**options, "executor": WatchedExecutor(options["executor"], loses=lose_memory)}
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


# -- several nodes -----------------------------------------------------------------------------------------------------


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine with two nodes, which know nothing of each other's memory."""
    monkeypatch.setenv("PATH", f"{install_scheduler(tmp_path / 'tools')}:{os.environ['PATH']}")
    provider = SlurmProviderConfig(init_blocks=2, min_blocks=2, max_blocks=2)
    with Engine(max_workers=1, provider=provider, address="127.0.0.1", prefetch=0) as engine:
        engine.wait_ready(workers=2)
        roots = {path for _, path, _ in on_both(engine, tmp_path / "at first")}
        yield engine
    assert len(roots) == 2
    wait_until(lambda: not any(Path(each).exists() for each in roots), "nothing is left in memory")


def own_options(engine: Engine, tmp_path: Path, loses: Callable[[], None] | None = None) -> dict[str, Any]:
    watched = WatchedExecutor(engine, loses=loses)
    storage = f"file://{tmp_path}/blocks"
    own = {"executor": watched, "storage": storage, "method": "direct", "share_bytes": 20_000, "partitions": 6}
    return {**own, "copies_after": None}  # with a copy of its first task, a node that is slow to begin gets no other


def on_both(engine: Engine, directory: Path) -> list[tuple[str, str, list[str]]]:
    """What :func:`meet` returns on each of two nodes."""
    directory.mkdir()
    return [each.result() for each in [engine.submit(meet, str(directory)) for _ in range(2)]]


def meet(directory: str) -> tuple[str, str, list[str]]:
    """The address of the node, the directory of all submitters, and what is in that of this one; once a task runs on
    each of two nodes."""
    Path(directory, str(os.getpid())).touch()
    ends_at = time.monotonic() + 60
    while len(list(Path(directory).iterdir())) < 2:
        if time.monotonic() > ends_at:
            raise TimeoutError("there is one node only")
        time.sleep(0.01)
    memory = current().node_memory()
    assert memory.directory is not None
    return memory.address(), str(memory.directory.parents[1]), left_in_memory()


def test_tasks_read_what_is_in_the_memory_of_another_node(two_nodes: Engine, tmp_path: Path) -> None:
    own = own_options(two_nodes, tmp_path)
    rows = random_rows(20_000)
    _, found = sorted_rows(own, tmp_path, rows)
    assert ordered(found) == ordered(rows)
    assert found["a"].to_pylist() == oracle("select a from t order by a nulls last", t=rows)["a"].to_pylist()
    assert own["executor"].storages() == {1}
    assert len(own["executor"].nodes()) == 2
    at_end = on_both(two_nodes, tmp_path / "at the end")
    assert {address for address, _, _ in at_end} == own["executor"].nodes()
    assert [left for _, _, left in at_end] == [[], []]


def test_a_node_that_is_lost_between_two_stages_has_its_tasks_done_again(two_nodes: Engine, tmp_path: Path) -> None:
    rows = random_rows(5_000)
    outcome, found = sorted_rows(own_options(two_nodes, tmp_path, lose_node), tmp_path, rows)
    assert ordered(found) == ordered(rows)
    assert outcome.stages[0].repeats >= 1
    assert [left for _, _, left in on_both(two_nodes, tmp_path / "at the end")] == [[], []]


def attack(other: str, secret: str) -> list[str]:
    """What a task gets for addresses that no manager has made, and for names that lead elsewhere."""
    memory = current().node_memory()
    with socket.create_server(("127.0.0.1", 0)) as own:
        forged = f"127.0.0.1:{own.getsockname()[1]}"
        address, _, proof = other.rpartition(":")
        names = [f"../../../..{secret}", secret, "..", "x" * 1000]
        requests = [(f"{forged}:{proof}", "a"), (forged, "a"), (address, "a"), ("", "a"), (other, "a")]
        found = []
        for node, name in [*requests, *((node, name) for node in ("", other) for name in names)]:
            try:
                found.append(bytes(memory.fetch(node, [(name, 0, 6)])[0]).decode())
            except ObjectGone:
                found.append("gone")
        own.settimeout(0.1)
        with contextlib.suppress(TimeoutError):
            own.accept()
            found.append("connected")
    return found


def write_and_link(directory: str, secret: str) -> str:
    address, _, _ = meet(directory)
    memory = current().node_memory()
    assert memory.directory is not None
    NodeBlocks(memory).create("job/a", [b"123456789"])
    (memory.directory / file_name("job/link")).symlink_to(secret)
    return address


def read_link(directory: str, other: list[str]) -> list[str]:
    meet(directory)
    memory = current().node_memory()
    found = []
    for address in other:
        for name in ("job/a", "job/link"):
            try:
                found.append(bytes(memory.fetch(address, [(name, 0, 6)])[0]).decode())
            except ObjectGone:
                found.append("gone")
        memory.delete_below(address, "job/")
        with pytest.raises(ObjectGone):
            memory.fetch(address, [("job/a", 0, 6)])
    return found


def test_no_request_for_blocks_reads_a_file_or_connects_to_another_address(two_nodes: Engine, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    secret = str(tmp_path / "secret")
    nodes = [two_nodes.submit(write_and_link, str(tmp_path / "first"), secret) for _ in range(2)]
    addresses = [each.result() for each in nodes]
    assert len(set(addresses)) == 2
    for address in addresses:
        assert set(two_nodes.submit(attack, address, secret).result()) == {"gone"}
    readers = [two_nodes.submit(read_link, str(tmp_path / "second"), [each]) for each in addresses]
    assert [each.result() for each in readers] == [["123456", "gone"]] * 2
