"""Calls of graphs and of running tasks on several managers: an agent, two managers and their workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farcall_common import wire
from farcall_common.graphs import Graph, Input, Stage, pack_graph
from farcall_common.task_options import TaskOptions
from farcall_common.wire import TaskState
from tests.support.endpoint import EndpointProcess, running_endpoint
from tests.support.scheduler import install_scheduler
from tests.waiting import wait_until

MIB = 2**20
TWO = {"provider": {"type": "LocalProvider", "init_blocks": 2, "min_blocks": 2, "max_blocks": 2}}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndpointProcess]:
    with running_endpoint(tmp_path_factory.mktemp("home"), workers=1, engine=TWO) as endpoint:
        wait_until(lambda: len(endpoint.workers()) == 2)
        yield endpoint


def fan_out(endpoint: EndpointProcess, count: int, *args: object, options: TaskOptions | None = None) -> bytes:
    """The first function makes elements, the second one is called with each of them, and these arguments."""
    pack = endpoint.cloud.serializer.pack_call
    stages = (Stage(0, "elements"), Stage(1, "each", (Input(0, (0,), each=True),), 0, options))
    return pack_graph(Graph(stages, (pack([count]), pack([None, *args])), 1))


def numbers(count: int) -> list[int]:
    """So many elements."""
    return list(range(count))


def manager_of(number: int, path: str, others: int) -> int:
    """The process id of the manager. The first calls last until calls of so many managers have begun."""
    import os
    import time
    from pathlib import Path

    manager = os.getppid()
    Path(path, str(manager)).touch()
    while len(list(Path(path).iterdir())) < others:
        time.sleep(0.005)
    return manager


def test_a_fan_out_runs_on_both_managers(endpoint: EndpointProcess, tmp_path: Path) -> None:
    task_id = endpoint.cloud.submit_graph([numbers, manager_of], fan_out(endpoint, 200, str(tmp_path), 2))
    ended = endpoint.cloud.end(task_id)
    assert ended.state is TaskState.SUCCESS, ended.error
    managers: Any = ended.value
    assert len(managers) == 200
    assert set(managers) == {each.pid for each in endpoint.managers()}
    [_, calls] = ended.spec.details["stages"]
    assert (calls["state"], calls["calls"], calls["ended"], calls.get("retries", 0)) == ("done", 200, 200, 0)
    assert len(calls["workers"]) == 2
    assert calls["node"]


def wait_for(path: str) -> str:
    """Run until a file is there."""
    import time
    from pathlib import Path

    while not Path(path).exists():
        time.sleep(0.005)
    return "long"


def short() -> str:
    return "short"


def test_tasks_behind_a_long_one_move_to_the_other_manager(endpoint: EndpointProcess, tmp_path: Path) -> None:
    cloud, gate = endpoint.cloud, tmp_path / "gate"
    try:
        for _ in range(5):  # at last, managers know that tasks are short, and get some ahead
            before = [cloud.submit(short) for _ in range(20)]
            assert [cloud.end(each).value for each in before] == ["short"] * 20
        long = cloud.submit(wait_for, str(gate))
        after = [cloud.submit(short) for _ in range(40)]
        assert [cloud.end(each).value for each in after] == ["short"] * 40
    finally:
        gate.touch()
    assert cloud.end(long).value == "long"


def driver(path: str, count: int) -> list[int]:
    """Call a function many times, which waits until two managers run it."""
    from farcall_common.running import current

    def manager(path: str) -> int:
        import os
        import time
        from pathlib import Path

        Path(path, str(os.getppid())).touch()
        while len(list(Path(path).iterdir())) < 2:
            time.sleep(0.005)
        return os.getppid()

    futures = [current().submit(manager, path) for _ in range(count)]
    return [each.result() for each in futures]


def test_calls_of_a_running_task_run_on_both_managers(endpoint: EndpointProcess, tmp_path: Path) -> None:
    ended = endpoint.cloud.end(endpoint.cloud.submit(driver, str(tmp_path), 20))
    assert ended.state is TaskState.SUCCESS, ended.error
    managers: Any = ended.value
    assert set(managers) == {each.pid for each in endpoint.managers()}
    [calls] = ended.spec.details["stages"]
    assert (calls["state"], calls["calls"], calls["ended"]) == ("done", 20, 20)


def tree(depth: int) -> int:
    """Call itself, each call twice, and at last call short functions over and over, until it is cancelled."""
    from farcall_common.running import current

    if depth < 0:
        return 1
    while True:
        for each in [current().submit(tree, depth - 1) for _ in range(2)]:
            each.result()


def test_single_tasks_of_others_do_not_wait_for_the_end_of_a_task_whose_calls_make_calls(tmp_path: Path) -> None:
    with running_endpoint(tmp_path, workers=1, engine={**TWO, "isolation": "process"}) as endpoint:
        wait_until(lambda: len(endpoint.workers()) == 2)
        cloud = endpoint.cloud
        task_id = cloud.submit(tree, 2)
        wait_until(lambda: any(each.task_id == task_id and each.state == "running" for each in cloud.transitions))
        for _ in range(4):
            assert cloud.end(cloud.submit(short, submitter=wire.new_id())).value == "short"
        cloud.cancel(task_id)
        assert cloud.end(task_id).state is TaskState.CANCELLED


def large(number: int, path: str, size: int) -> bytes:
    """A large value, made when two managers have begun to make some."""
    import os
    import time
    from pathlib import Path

    Path(path, str(os.getppid())).touch()
    while len(list(Path(path).iterdir())) < 2:
        time.sleep(0.005)
    return bytes([number]) * size


def check(values: list[bytes], size: int) -> list[int]:
    """The numbers that the values were made of."""
    assert all(value == value[:1] * size for value in values)
    return [value[0] for value in values]


def large_values(endpoint: EndpointProcess, path: Path) -> str:
    """Submit a graph that makes eight large values and checks them."""
    pack = endpoint.cloud.serializer.pack_call
    stages = (
        Stage(0, "numbers"),
        Stage(1, "large", (Input(0, (0,), each=True),)),
        Stage(2, "check", (Input(1, (0,)),)),
    )
    calls = (pack([8]), pack([None, str(path), MIB]), pack([None, MIB]))
    return endpoint.cloud.submit_graph([numbers, large, check], pack_graph(Graph(stages, calls, 2)))


def test_large_values_come_back_and_are_inputs(endpoint: EndpointProcess, tmp_path: Path) -> None:
    ended = endpoint.cloud.end(large_values(endpoint, tmp_path))
    assert (ended.state, ended.value) == (TaskState.SUCCESS, list(range(8)))


def raising(number: int, path: str) -> int:
    """Print, and raise, when two managers have begun."""
    import os
    import time
    from pathlib import Path

    Path(path, str(os.getppid())).touch()
    while len(list(Path(path).iterdir())) < 2:
        time.sleep(0.005)
    print("printed", number)
    if number == 1:
        raise ValueError("element 1")
    return number


def test_an_error_and_what_was_printed_come_back(endpoint: EndpointProcess, tmp_path: Path) -> None:
    ended = endpoint.cloud.end(endpoint.cloud.submit_graph([numbers, raising], fan_out(endpoint, 2, str(tmp_path))))
    assert ended.state is TaskState.FAILED
    assert "stage 1 (each), element 1" in ended.error["message"]
    assert "ValueError" in ended.error["traceback"]


def hold(number: int, path: str) -> int:
    """Say that it runs, by its number and its manager, and wait to be let go. What is made again is not held."""
    import os
    import time
    from pathlib import Path

    with Path(path, "log").open("a") as log:
        log.write(f"{number} {os.getppid()}\n")
    while not Path(path, "go").exists():
        time.sleep(0.005)
    return os.getppid()


def held(path: Path) -> list[list[str]]:
    """The numbers and managers of calls that have begun."""
    log = path / "log"
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def test_calls_elsewhere_end_with_their_graph(endpoint: EndpointProcess, tmp_path: Path) -> None:
    task_id = endpoint.cloud.submit_graph([numbers, hold], fan_out(endpoint, 2, str(tmp_path)))
    wait_until(lambda: len(held(tmp_path)) == 2)
    assert {int(manager) for _, manager in held(tmp_path)} == {each.pid for each in endpoint.managers()}
    endpoint.cloud.cancel(task_id)
    assert endpoint.cloud.end(task_id).state is TaskState.CANCELLED
    tasks = endpoint.cloud.submit_many(pow, [(2, 3), (3, 2)])  # both workers are there for others
    assert [each.value for each in endpoint.cloud.ends(tasks)] == [8, 9]


def work(number: int, path: str) -> None:
    """Write down for how many seconds it has run, for ever."""
    import time
    from pathlib import Path

    began = time.monotonic()
    while True:
        Path(path, f"{number}.new").write_text(str(time.monotonic() - began))
        Path(path, f"{number}.new").rename(Path(path, f"{number}.seconds"))
        time.sleep(0.01)


def leave(path: str, how: str) -> None:
    """Make calls that run for a second, one of them on another node, and end without waiting for them."""
    import os
    import time
    from pathlib import Path

    from farcall import current

    def work(number: int) -> None:
        import time
        from pathlib import Path

        began = time.monotonic()
        while True:
            Path(path, f"{number}.new").write_text(str(time.monotonic() - began))
            Path(path, f"{number}.new").rename(Path(path, f"{number}.seconds"))
            time.sleep(0.01)

    calls = [current().submit(work, number) for number in range(2)]
    seen = Path(path)
    while sum(float(each.read_text()) > 1.0 for each in seen.glob("*.seconds")) < 1:
        time.sleep(0.01)
    if how == "exit":
        os._exit(3)
    if how == "drop":
        for each in calls:
            each.cancel()


def seconds(path: Path) -> list[float]:
    """For how many seconds the calls have run."""
    return [float(each.read_text()) for each in path.glob("*.seconds")]


def test_what_stopped_calls_have_used_counts_for_their_graph(endpoint: EndpointProcess, tmp_path: Path) -> None:
    task_id = endpoint.cloud.submit_graph([numbers, work], fan_out(endpoint, 2, str(tmp_path)))
    wait_until(lambda: len(seconds(tmp_path)) == 2 and min(seconds(tmp_path)) > 1.0)
    used_s = sum(seconds(tmp_path))
    endpoint.cloud.cancel(task_id)
    details = endpoint.cloud.end(task_id).spec.details
    assert details["stage_calls"] == 3
    assert details["stage_run_s"] > 0.9 * used_s


@pytest.mark.parametrize("how", ["return", "drop", "exit"])
def test_what_stopped_calls_have_used_counts_for_the_task_that_has_made_them(
    endpoint: EndpointProcess, tmp_path: Path, how: str
) -> None:
    ended = endpoint.cloud.end(endpoint.cloud.submit(leave, str(tmp_path), how, max_attempts=1))
    assert ended.state is (TaskState.FAILED if how == "exit" else TaskState.SUCCESS)
    assert ended.spec.details["stage_calls"] == 1
    assert ended.spec.details["stage_run_s"] > 1.9, "its own and that of its call"


@pytest.mark.parametrize("once", [False, True])
def test_the_death_of_a_manager_is_the_death_of_its_calls(tmp_path: Path, once: bool) -> None:
    with running_endpoint(tmp_path / "home", workers=1, engine=TWO) as endpoint:
        wait_until(lambda: len(endpoint.workers()) == 2)
        options = TaskOptions(idempotent=False) if once else None
        task_id = endpoint.cloud.submit_graph([numbers, hold], fan_out(endpoint, 2, str(tmp_path), options=options))
        wait_until(lambda: len(held(tmp_path)) == 2)
        home = other = 0
        for number, manager in held(tmp_path):  # the last element leaves
            home, other = (int(manager), other) if number == "0" else (home, int(manager))
        os.kill(other, signal.SIGKILL)
        (tmp_path / "go").touch()
        ended = endpoint.cloud.end(task_id)
        runs = [number for number, _ in held(tmp_path)]
        if once:
            assert (ended.state, runs.count("1")) == (TaskState.FAILED, 1)
            assert ended.error["code"] == "WORKER_DIED"
        else:
            assert (ended.state, runs.count("1")) == (TaskState.SUCCESS, 2)
            managers: Any = ended.value
            assert managers[0] == home
            [_, calls] = ended.spec.details["stages"]
            assert calls["retries"] == 1


def test_a_graph_whose_manager_dies_runs_again_and_its_calls_elsewhere_end(tmp_path: Path) -> None:
    with running_endpoint(tmp_path / "home", workers=1, engine=TWO) as endpoint:
        wait_until(lambda: len(endpoint.workers()) == 2)
        task_id = endpoint.cloud.submit_graph([numbers, hold], fan_out(endpoint, 2, str(tmp_path)))
        wait_until(lambda: len(held(tmp_path)) == 2)
        [home] = [int(manager) for number, manager in held(tmp_path) if number == "0"]
        os.kill(home, signal.SIGKILL)
        wait_until(lambda: len(held(tmp_path)) > 2)  # the other worker was free for it
        (tmp_path / "go").touch()
        ended = endpoint.cloud.end(task_id)
        assert ended.state is TaskState.SUCCESS, ended.error
        managers: Any = ended.value
        assert home not in managers


def test_calls_between_managers_that_are_reached_over_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{install_scheduler(tmp_path / 'tools')}:{os.environ['PATH']}")
    provider = {"type": "SlurmProvider", "init_blocks": 2, "min_blocks": 2, "max_blocks": 2}
    engine = {"provider": provider, "address": "127.0.0.1"}
    calls = tmp_path / "calls"
    calls.mkdir()
    with running_endpoint(tmp_path / "home", workers=1, engine=engine) as endpoint:
        ended = endpoint.cloud.end(large_values(endpoint, calls))
        assert (ended.state, ended.value) == (TaskState.SUCCESS, list(range(8)))
