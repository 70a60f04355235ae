"""Graphs and functions that call others, in an engine: large ones, deep ones, forgotten and cancelled calls."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import psutil
import pytest

from farcall_common.errors import TaskError
from farcall_endpoint import Engine, Graph
from tests.waiting import WAIT_S, wait_until

WORKERS = 2


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(max_workers=WORKERS) as started:
        started.wait_ready()
        yield started


def increment(number: int) -> int:
    return number + 1


def numbers(count: int) -> list[int]:
    return list(range(count))


def paths(path: str, count: int) -> list[str]:
    return [path] * count


def siblings(_: Any = None) -> int:
    """How many processes the manager of this worker has started, and that have not ended."""
    manager = Path(f"/proc/{os.getppid()}/task")
    return sum(len((thread / "children").read_text().split()) for thread in manager.iterdir())


def wait_for_ever(_: Any, directory: str) -> None:
    """Leave this worker's process id in the directory, and wait."""
    (Path(directory) / str(os.getpid())).touch()
    while True:
        time.sleep(0.01)


def most_siblings(calls: int) -> int:
    from farcall import current

    return max(current().map(siblings, range(calls)))


def nested(depth: int) -> int:
    from farcall import current

    return siblings() if depth == 0 else current().call(nested, depth - 1)


def forget(directory: str) -> int:
    """Return while a call waits."""
    from farcall import current

    call = current().submit(wait_for_ever, None, directory)
    while not (found := list(Path(directory).iterdir())):
        time.sleep(0.01)
    assert not call.done()
    return int(found[0].name)


def killed_once(before: str, path: str) -> int:
    """Kill this worker before it does something, the first time."""
    from farcall import current

    def die_before(what: str) -> None:
        if what == before and not Path(path).exists():
            Path(path).touch()
            os.kill(os.getpid(), 9)

    die_before("starts")
    first = current().submit(increment, -1)
    die_before("calls")
    values = current().map(increment, range(9))
    die_before("waits")
    return first.result() + sum(values)


def workers_in(directory: Path) -> list[int]:
    return [int(path.name) for path in directory.iterdir()]


def wait_until_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "the end of the workers")


def test_a_hundred_thousand_stages(engine: Engine) -> None:
    graph = Graph()
    stage = graph.call(increment, 0)
    for _ in range(99_999):
        stage = graph.call(increment, stage)
    with pytest.raises(ValueError, match="at most 100,000 stages"):
        graph.call(increment, stage)
    assert engine.submit(graph, stage).result(WAIT_S) == 100_000


@pytest.mark.parametrize("spread", [False, True])
def test_maps_behind_maps_end_no_worker(engine: Engine, spread: bool) -> None:
    graph = Graph(spread=spread)
    values = graph.call(lambda: list(range(300)))
    for _ in range(24):
        values = graph.map(increment, values)
    future = engine.submit(graph, values)
    assert future.result(WAIT_S) == list(range(24, 324))
    assert not any(stage.retries for stage in future.stages)


def test_what_a_stage_cannot_give_to_others(engine: Engine) -> None:
    graph = Graph()
    letters = graph.options(name="make").call(lambda: (each for each in "ab"))
    error = engine.submit(graph, graph.call(sum, letters)).exception(WAIT_S)
    assert isinstance(error, TaskError)
    assert "stage 0 (make)" in str(error)
    assert "generator" in str(error)


def test_drivers_nested_ten_deep_on_two_workers(engine: Engine) -> None:
    at_rest = engine.submit(siblings).result(WAIT_S)
    drivers = [engine.submit(nested, 10) for _ in range(10)]
    assert max(driver.result(WAIT_S) for driver in drivers) <= at_rest + 10


def test_many_drivers_on_two_workers() -> None:
    with Engine(max_workers=WORKERS) as fresh:
        fresh.wait_ready()
        at_rest = fresh.submit(siblings).result(WAIT_S)
        drivers = [fresh.submit(most_siblings, 10) for _ in range(500)]
        assert max(driver.result(WAIT_S) for driver in drivers) <= at_rest + 1


def test_a_driver_that_forgets_its_calls(engine: Engine, tmp_path: Path) -> None:
    child = engine.submit(forget, str(tmp_path)).result(WAIT_S)
    wait_until_gone([child])
    assert engine.submit(increment, 1).result(WAIT_S) == 2


def test_a_graph_is_cancelled_while_it_fans_out(engine: Engine, tmp_path: Path) -> None:
    graph = Graph()
    calls = graph.map(wait_for_ever, graph.call(numbers, 1_000), graph.call(paths, str(tmp_path), 1_000))
    future = engine.submit(graph, calls)
    wait_until(lambda: len(workers_in(tmp_path)) == WORKERS, "a call in each worker")
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result(WAIT_S)
    wait_until_gone(workers_in(tmp_path))
    assert engine.submit(increment, 1).result(WAIT_S) == 2
    assert len(workers_in(tmp_path)) == WORKERS


@pytest.mark.parametrize("before", ["starts", "calls", "waits"])
def test_a_driver_is_killed_at_any_moment(engine: Engine, tmp_path: Path, before: str) -> None:
    assert engine.submit(killed_once, before, str(tmp_path / "killed")).result(WAIT_S) == 45
    assert (tmp_path / "killed").exists()


def test_the_memory_of_values_that_stay_in_their_worker_is_used_again() -> None:
    def make(size: int, number: int) -> Any:
        import numpy as np

        return np.full(size, number, np.uint8)

    def arenas(value: Any, size: int, number: int) -> set[str]:
        from pathlib import Path

        assert value.size == size
        assert value[0] == number == value[-1]
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "farcall-arena" in line}

    size, made = 10 * 2**20, set[str]()
    with Engine(max_workers=1) as engine:
        for number in range(20):
            graph = Graph()
            target = graph.call(arenas, graph.call(make, size, number), size, number)
            found: set[str] = engine.submit(graph, target).result(WAIT_S)
            made |= found
    assert 1 <= len(made) <= 4


def fit(steps: int, go_on: str) -> int:
    from farcall import current

    current().progress(1, steps, "loading")
    while not Path(go_on).exists():
        time.sleep(0.01)
    for step in range(steps + 1):
        current().progress(step, steps, "fitting")
    return steps


def test_a_future_of_an_engine_has_the_progress_of_its_task(engine: Engine, tmp_path: Path) -> None:
    future = engine.submit(fit, 5000, str(tmp_path / "go"))
    try:
        wait_until(lambda: future.progress is not None)
        assert future.progress is not None
        assert (future.progress.done, future.progress.total, future.progress.text) == (1, 5000, "loading")
        assert abs(future.progress.at - time.time()) < WAIT_S
    finally:
        (tmp_path / "go").touch()
    assert future.result(WAIT_S) == 5000
    assert str(future.progress) == "5000 of 5000 (100 %): fitting"
    silent = engine.submit(increment, 1)
    assert silent.result(WAIT_S) == 2
    assert silent.progress is None


def say_once(go_on: str) -> int:
    from farcall import current

    if Path(go_on).exists():
        return 1
    current().progress(1, 2, "first run")
    while not Path(go_on).exists():
        time.sleep(0.01)
    raise ValueError("again")


def crash(steps: int) -> None:
    from farcall import current

    for step in range(steps):
        current().progress(step, steps, f"step {step}")
    os.kill(os.getpid(), signal.SIGKILL)


def test_progress_is_that_of_the_last_run(tmp_path: Path) -> None:
    with Engine(1, retries=1, retry_delay_s=0.0, max_attempts=1) as engine:
        future = engine.submit(say_once, str(tmp_path / "go"))
        try:
            wait_until(lambda: future.progress is not None)
        finally:
            (tmp_path / "go").touch()
        assert future.result(WAIT_S) == 1
        assert future.progress is None
        crashed = engine.submit(crash, 5)
        assert isinstance(crashed.exception(WAIT_S), TaskError)
        assert str(crashed.progress) == "4 of 5 (80 %): step 4"


def drive(steps: int) -> list[int]:
    from farcall import current

    current().progress(1, 2, "calling")
    found = list(current().map(say, range(steps)))
    current().progress(2, 2)
    return found


def say(number: int) -> int:
    from farcall import current

    current().progress(number, 1000, "nested")
    return number


def test_of_nested_calls_and_stages_nothing_is_shown(engine: Engine) -> None:
    future = engine.submit(drive, 20)
    assert future.result(WAIT_S) == list(range(20))
    assert str(future.progress) == "2 of 2 (100 %)"
    graph = Graph()
    of_graph = engine.submit(graph, graph.map(say, graph.call(numbers, 3)))
    assert of_graph.result(WAIT_S) == [0, 1, 2]
    assert of_graph.progress is None
