"""Analytics on real workers that die, hang, have no room or come late: rows are right, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import farcall_analytics as fa
from farcall_common.objects.blocks import open_blocks
from farcall_endpoint import Engine
from farcall_endpoint.config.providers import LocalProviderConfig
from tests.support.analytics_data import files, oracle, ordered, random_rows
from tests.support.templates import fork_worker, running_template
from tests.waiting import WAIT_S, wait_until

ROOT = Path(__file__).parents[2]


class Around:
    """Runs each task in a function of a test, in a worker; it gets ``args`` before the function of the task."""

    def __init__(self, executor: Engine, around: Callable[..., Any], *args: Any) -> None:
        self._executor = executor
        self._around = around
        self._args = args

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        return self._executor.submit(self._around, *self._args, fn, *args)


@pytest.fixture
def options(tmp_path: Path) -> Iterator[dict[str, Any]]:
    storage = f"file://{tmp_path}/blocks"
    yield {"storage": storage, "share_bytes": 2000, "partitions": 4}
    with open_blocks(storage) as blocks:  # a task that runs again after its manager was given up deletes its own
        wait_until(lambda: not list(blocks.names("")))


@pytest.fixture
def nodes() -> Iterator[Engine]:
    """Two managers with a worker each."""
    provider = LocalProviderConfig(min_blocks=2, max_blocks=2)
    with Engine(max_workers=1, provider=provider) as engine:
        engine.wait_ready(workers=2)
        yield engine


def is_first(mark: str) -> bool:
    """Whether this is the first call with a file, which then has the id of this process."""
    try:
        with open(mark, "x") as file:  # noqa: PTH123
            return bool(file.write(str(os.getpid())))
    except FileExistsError:
        return False


# -- workers that die or hang ------------------------------------------------------------------------------------------


def signalled(end: str, mark: str, number: int, fn: Callable[..., Any], task: Any) -> Any:
    """Run a task; the first worker that would create a block whose name has a certain end gets a signal before that."""
    from unittest import mock

    from farcall_common.objects import blocks

    create = blocks.ObjectBlocks.create

    def signalling(self: Any, name: str, pieces: Any) -> bool:
        if name.endswith(end) and is_first(mark):
            os.kill(os.getpid(), number)
        return create(self, name, pieces)

    with mock.patch.object(blocks.ObjectBlocks, "create", signalling):
        return fn(task)


@pytest.mark.parametrize("end", ["/2", "/committed"])
def test_a_worker_that_is_killed_before_it_commits_neither_doubles_nor_loses_rows(
    nodes: Engine, options: dict[str, Any], tmp_path: Path, end: str
) -> None:
    """Rows are in another partition in each attempt: blocks of two attempts together would not have each row once."""
    mark = tmp_path / "mark"
    executor = Around(nodes, signalled, end, str(mark), signal.SIGKILL)
    tables = {"t": files(tmp_path / "in", random_rows(2000))}
    found = fa.sql(
        "select a, random() r from t order by r", tables=tables, executor=executor, method="slow", **options
    ).to_arrow()
    assert sorted(found["a"].to_pylist()) == sorted(random_rows(2000)["a"].to_pylist())
    assert found["r"].to_pylist() == sorted(found["r"].to_pylist())
    assert not psutil.pid_exists(int(mark.read_text()))


@pytest.mark.parametrize(("method", "end"), [("slow", "/0-0-1/committed"), ("combined", "/0-0-1")])
def test_a_node_that_hangs_until_the_job_is_over_leaves_nothing(
    nodes: Engine, options: dict[str, Any], tmp_path: Path, method: str, end: str
) -> None:
    table = random_rows(2000)
    mark = tmp_path / "mark"
    executor = Around(nodes, hung, end, str(mark))
    options |= {"method": method, "copies_after": 0.1}  # the node may have more tasks than this one
    source = fa.read_parquet(files(tmp_path / "in", table), executor=executor, **options)
    try:
        outcome = source.sort("a").write_parquet(str(tmp_path / "out"))
    finally:
        worker = psutil.Process(int(mark.read_text()))
        manager = worker.parent()
        assert manager is not None
        is_stopped = worker.status() == psutil.STATUS_STOPPED
        worker.resume()
        wait_until(Path(f"{mark}.over").exists)
        manager.resume()
    assert is_stopped
    assert pa.concat_tables([pq.read_table(path) for path in outcome.paths])["a"].to_pylist() == sorted(
        table["a"].to_pylist()
    )
    assert outcome.stages[0].copies >= 1


def hung(end: str, mark: str, fn: Callable[..., Any], task: Any) -> Any:
    """Run a task; the node of the first worker that would create a block whose name has a certain end stops before."""
    from unittest import mock

    from farcall_common.objects import blocks

    create = blocks.ObjectBlocks.create
    is_own = False

    def stopping(self: Any, name: str, pieces: Any) -> bool:
        nonlocal is_own
        if name.endswith(end) and is_first(mark):
            is_own = True
            os.kill(os.getppid(), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
        return create(self, name, pieces)

    try:
        with mock.patch.object(blocks.ObjectBlocks, "create", stopping):
            return fn(task)
    finally:
        if is_own:
            is_first(f"{mark}.over")


# -- workers without room ----------------------------------------------------------------------------------------------


@pytest.fixture(params=["full", "gone"])
def bad_directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Where nothing has room: on a tiny file system, or on one that is not there any more."""
    path = tmp_path / "spilled"
    if request.param == "gone":
        yield path
        return
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def logged(mark: str, log: str, bad: str, fn: Callable[..., Any], task: Any) -> Any:
    """Run a task; the first worker has a bad local disk. What came of it goes to a log."""
    import json
    from unittest import mock

    from farcall_analytics.tasks import Unsuitable

    is_bad = is_first(mark) or Path(mark).read_text() == str(os.getpid())
    ended = "done"
    try:
        with mock.patch.dict(os.environ, {"TMPDIR": bad} if is_bad else {}):
            return fn(task)
    except Unsuitable as error:
        ended = "avoided" if error.reason is None else "failed"
        raise
    finally:
        with open(log, "a") as file:  # noqa: PTH123
            file.write(json.dumps([task.name, is_bad, ended]) + "\n")


def test_a_task_whose_worker_has_a_full_disk_runs_elsewhere(
    nodes: Engine, options: dict[str, Any], tmp_path: Path, bad_directory: Path
) -> None:
    table = random_rows(100_000)
    log = tmp_path / "log"
    executor = Around(nodes, logged, str(tmp_path / "mark"), str(log), str(bad_directory))
    found = fa.sql(
        "select b, count(*) n, sum(length(c)) l from (select b, c, count(*) from t group by b, c) group by b",
        tables={"t": files(tmp_path / "in", table)},
        executor=executor,
        task_memory=1_000_000,
        retries=1,
        **{**options, "share_bytes": 1_000_000, "partitions": 4},
    ).to_arrow()
    assert ordered(found) == ordered(oracle("select b, count(*) n, sum(length(c)) l from t group by b", t=table))
    runs = [json.loads(line) for line in log.read_text().splitlines()]
    failed = [name for name, _, ended in runs if ended == "failed"]
    assert failed
    assert len(failed) == len(set(failed)), "none has failed there twice"
    assert all([name, False, "done"] in runs for name in failed)


# -- workers that come late --------------------------------------------------------------------------------------------


def meeting(log: str, fn: Callable[..., Any], task: Any) -> Any:
    """Run a task when tasks have begun on two nodes."""
    import time

    with open(log, "a") as file:  # noqa: PTH123
        file.write(f"{os.getppid()}\n")
    deadline = time.monotonic() + WAIT_S
    while len(set(Path(log).read_text().split())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return fn(task)


def test_a_node_that_joins_in_the_middle_of_a_stage_gets_tasks_of_it(options: dict[str, Any], tmp_path: Path) -> None:
    table = random_rows(2000)
    log = tmp_path / "log"
    with Engine(max_workers=1, provider=LocalProviderConfig(max_blocks=2)) as engine:
        engine.wait_ready(workers=1)
        assert engine.stats().managers == 1
        source = fa.read_parquet(
            files(tmp_path / "in", table), executor=Around(engine, meeting, str(log)), copies_after=None, **options
        )
        outcome = source.group_by("b").agg(n=fa.count()).write_parquet(str(tmp_path / "out"))
    assert sum(each.tasks for each in outcome.stages) == len(log.read_text().split())
    found = pa.concat_tables([pq.read_table(path) for path in outcome.paths])
    assert ordered(found) == ordered(oracle("select b, count(*) n from t group by b", t=table))
    assert len(set(log.read_text().split()[: outcome.stages[0].tasks])) == 2


# -- workers that are forks --------------------------------------------------------------------------------------------


def sort_here(storage: str) -> bool:
    """Whether a job gives what it should, with threads of this process as its workers, and files on the disk."""
    from concurrent.futures import ThreadPoolExecutor

    import pyarrow as pa

    import farcall_analytics as fa

    table = pa.table({"a": [number * 7919 % 100_003 for number in range(100_000)]})
    with ThreadPoolExecutor(2) as pool:
        query = fa.sql(
            "select a, count(*) n from t group by a order by a",
            tables={"t": table},
            executor=pool,
            storage=storage,
            partitions=3,
            task_memory=1_500_000,
        )
        return bool(query.to_arrow()["a"].to_pylist() == sorted(table["a"].to_pylist()))


def test_a_job_works_in_forks_of_a_template_that_has_loaded_its_libraries(tmp_path: Path) -> None:
    modules = ["pyarrow.compute", "pyarrow.parquet", "datafusion", "obstore", "farcall_analytics", "polars"]
    places = [str(Path(pa.__file__).parents[1]), str(Path(fa.__file__).parents[1])]
    with running_template(modules=modules, places=places, spares=1) as template:
        workers = [fork_worker(template).ready() for _ in range(3)]
        for _ in range(2):
            for worker in workers:
                worker.send(sort_here, f"file://{tmp_path}/blocks")
            assert [worker.result() for worker in workers] == [True] * 3
        for worker in workers:
            worker.end()
        assert list(template.imports.skipped) == ["polars"]


FORKING = """
    import multiprocessing
    import pyarrow as pa
    import sys
    from concurrent.futures import ProcessPoolExecutor

    import farcall_analytics as fa

    if __name__ == "__main__":
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(sys.argv[1])) as pool:
            t = fa.from_arrow({"a": [3, 1, 2]}, executor=pool, storage=sys.argv[2], partitions=2)
            print(t.sort("a").to_arrow()["a"].to_pylist())
"""


@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_forks_of_a_program_that_has_used_threads_are_refused_and_other_processes_work(
    tmp_path: Path, start: str
) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(FORKING))
    command = [sys.executable, "-W", "ignore", str(script), start, f"file://{tmp_path}/blocks"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    if start == "fork":
        assert "ConfigurationError" in ended.stderr
        assert "get_context('forkserver')" in ended.stderr
    else:
        assert ended.stdout == "[1, 2, 3]\n", ended.stderr
    assert not list(tmp_path.glob("blocks/*"))


# -- programs that are stopped -----------------------------------------------------------------------------------------

HELD = """
    import json
    import pathlib
    import sys
    import time

    import farcall_analytics as fa
    from farcall_endpoint import Engine

    def held(directory, fn, task):
        log = pathlib.Path(directory, "log")
        log.touch()
        if fn.__name__ == "run_task" and len(log.read_text()) >= 8:
            pathlib.Path(directory, "half").touch()
            while not pathlib.Path(directory, "continue").exists():
                time.sleep(0.01)
        done = fn(task)
        if fn.__name__ == "run_task":
            with log.open("a") as file:
                file.write("x")
        return done

    class Held:
        def __init__(self, engine, directory):
            self.engine, self.directory = engine, directory

        def submit(self, fn, task):
            return self.engine.submit(held, self.directory, fn, task)

    if __name__ == "__main__":
        directory = sys.argv[1]
        with Engine(max_workers=2) as engine:
            options = {"executor": Held(engine, directory), "storage": f"file://{directory}/blocks", "partitions": 4}
            source = fa.read_parquet(f"{directory}/in/*.parquet", share_bytes=2000, copies_after=None, **options)
            outcome = source.sort("a").write_parquet(f"{directory}/out", job="nightly")
        print(json.dumps([outcome.paths, outcome.stages[0].reused]))
"""


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts a program with a job that stops in the middle, until there is a file ``continue``."""
    files(tmp_path / "in", random_rows(2000))
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(HELD))
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, str(script), str(tmp_path)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


def test_a_program_that_is_interrupted_leaves_nothing(
    held: Callable[[], subprocess.Popen[str]], tmp_path: Path
) -> None:
    program = held()
    wait_until((tmp_path / "half").exists)
    with open_blocks(f"file://{tmp_path}/blocks") as blocks:
        assert sum("/0-0-" in name for name in blocks.names("")) >= 8
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=WAIT_S)
        assert "KeyboardInterrupt" in said
        assert list(blocks.names("")) == []
    assert not list(tmp_path.glob("out/*"))


def test_a_program_that_was_killed_continues_when_it_is_started_again(
    held: Callable[[], subprocess.Popen[str]], tmp_path: Path
) -> None:
    program = held()
    wait_until((tmp_path / "half").exists)
    processes = psutil.Process(program.pid).children(recursive=True)
    program.kill()
    psutil.wait_procs(processes, timeout=WAIT_S)
    (tmp_path / "continue").touch()
    said, errors = held().communicate(timeout=WAIT_S)
    assert said, errors
    paths, reused = json.loads(said)
    found = pa.concat_tables([pq.read_table(path) for path in paths])
    assert found["a"].to_pylist() == sorted(random_rows(2000)["a"].to_pylist())
    assert reused >= 8
    with open_blocks(f"file://{tmp_path}/blocks") as blocks:
        assert list(blocks.names("")) == []


# -- data that is larger than memory -----------------------------------------------------------------------------------


def measured(log: str, fn: Callable[..., Any], task: Any) -> Any:
    """Run a task, and log the memory of its worker: before, and the most that it ever had. Bytes."""
    import json
    import re

    def kilobytes(name: str) -> int:
        return int(re.findall(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[0])

    before = kilobytes("VmRSS")
    try:
        return fn(task)
    finally:
        with open(log, "a") as file:  # noqa: PTH123
            file.write(json.dumps([os.getpid(), before * 1024, kilobytes("VmHWM") * 1024]) + "\n")


def sort_in_little_memory(directory: Path, *, rows: int, workers: int, worker_bytes: int) -> tuple[int, list[int]]:
    """Sort rows of 64 bytes, with workers that may have so many bytes of memory each beyond what they have before
    their first task.

    Returns the bytes of the rows, and the most memory that each worker has had for its tasks.
    """
    path, log = directory / "in", directory / "memory"
    path.mkdir()
    for number in range(files_ := 4):
        query = f"""
            select hash(i) a, hash(i + 1) b, md5(i::text)[:24] c, hash(i + 2) d, hash(i + 3) e
            from range({number * rows // files_}, {(number + 1) * rows // files_}) t(i)
        """
        pq.write_table(oracle(query), path / f"{number}.parquet", row_group_size=10_000, compression="none")
    with Engine(max_workers=workers, memory_bytes=worker_bytes + 2**30) as engine:
        storage = f"file://{directory}/blocks"
        first = fa.from_arrow({"a": [2, 1]}, executor=engine, storage=storage, partitions=2)
        first.sort("a").to_arrow()  # imports what tasks need
        source = fa.read_parquet(
            f"{path}/*.parquet",
            executor=Around(engine, measured, str(log)),
            storage=storage,
            share_bytes=worker_bytes // 24,
            partitions=rows * 64 * 24 // worker_bytes,
            task_memory=worker_bytes // 4,
        )
        outcome = source.sort("a").write_parquet(str(directory / "out"))
    last = -1
    count = 0
    for each in outcome.paths:
        keys = pq.read_table(each, columns=["a"])["a"].to_numpy()
        assert keys[0] > last
        assert (keys[1:] >= keys[:-1]).all()
        last, count = int(keys[-1]), count + len(keys)
    assert count == rows
    seen: dict[int, list[tuple[int, int]]] = {}
    for pid, before, most in map(json.loads, log.read_text().splitlines()):
        seen.setdefault(pid, []).append((before, most))
    return rows * 64, [max(most for _, most in each) - each[0][0] for each in seen.values()]


@pytest.mark.slow
def test_a_sort_of_four_times_the_memory_of_all_workers_stays_within_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARROW_DEFAULT_MEMORY_POOL", "system")  # gives back what it does not use, as the docs say
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    size, taken = sort_in_little_memory(tmp_path, rows=4_000_000, workers=1, worker_bytes=64_000_000)
    assert size >= 4 * 64_000_000
    assert max(taken) < 64_000_000, taken
