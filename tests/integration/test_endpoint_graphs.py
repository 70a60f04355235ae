"""Graphs on a real manager with real workers, of which some are killed."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from farcall_common.graphs import Input
from farcall_common.task_options import TaskOptions
from farcall_common.wire import TaskState
from farcall_endpoint.contracts import agent_manager
from tests.support.endpoint.fake_agent import FakeAgent, StageCall, connected_agent
from tests.waiting import wait_until

MIB = 2**20
WORKERS = 2


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeAgent]:
    with connected_agent(tmp_path_factory.mktemp("m"), slots=WORKERS) as agent:
        yield agent


@pytest.fixture
def small(tmp_path: Path) -> Iterator[FakeAgent]:
    """A manager with little room for values: 1 MiB in memory and 8 MiB on disk."""
    with connected_agent(tmp_path, "--graph-memory", str(MIB), "--graph-disk", str(8 * MIB), slots=WORKERS) as agent:
        yield agent


def files_of_values(agent: FakeAgent) -> int:
    """Open files that a manager has for values of 1 MiB or more. The ledgers of workers are smaller, and stay open."""
    count = 0
    for path in Path(f"/proc/{agent.manager.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed just now
            count += path.stat().st_size >= MIB
    return count


def ended(agent: FakeAgent, task_id: str) -> agent_manager.Finished:
    agent.listen(lambda: task_id in agent.finished)
    return agent.finished[task_id]


def states(finished: agent_manager.Finished) -> list[str]:
    assert finished.details is not None
    return [each["state"] for each in finished.details["stages"]]


def numbers(count: int) -> list[int]:
    return list(range(count))


def double(value: int) -> int:
    return 2 * value


def add(*values: int) -> int:
    return sum(values)


def total(values: list[int]) -> int:
    return sum(values)


def test_a_chain(agent: FakeAgent) -> None:
    print_it: Callable[[int], int] = printed
    agent.run_graph(
        "chain",
        StageCall(double, (3,)),
        StageCall(print_it, (None,), (Input(0, (0,)),)),
        StageCall(double, (None,), (Input(1, (0,)),)),
    )
    assert agent.value("chain") == 12
    assert states(agent.finished["chain"]) == ["done"] * 3
    assert agent.tails["chain"] == b"--- stage printed, attempt 1\ngot 6\n"


def printed(value: int) -> int:
    print("got", value)
    return value


def test_a_fan_out_to_a_thousand_calls_and_a_fan_in(agent: FakeAgent) -> None:
    agent.run_graph(
        "fan",
        StageCall(numbers, (1000,)),
        StageCall(double, (None,), (Input(0, (0,), each=True),)),
        StageCall(total, (None,), (Input(1, (0,)),)),
    )
    assert agent.value("fan") == 999_000
    [_, calls, _] = agent.finished["fan"].details["stages"]  # type: ignore[index]
    assert (calls["calls"], calls["ended"], len(calls["workers"])) == (1000, 1000, WORKERS)


def test_a_map_of_a_map_is_a_list(agent: FakeAgent) -> None:
    agent.run_graph(
        "maps",
        StageCall(numbers, (5,)),
        StageCall(double, (None,), (Input(0, (0,), each=True),)),
        StageCall(add, (None, None), (Input(1, (0,), each=True), Input(0, (1,), each=True))),
    )
    assert agent.value("maps") == [0, 3, 6, 9, 12]


def test_a_map_over_nothing_is_empty(agent: FakeAgent) -> None:
    agent.run_graph("none", StageCall(numbers, (0,)), StageCall(double, (None,), (Input(0, (0,), each=True),)))
    assert agent.value("none") == []


def test_a_list_of_stages(agent: FakeAgent) -> None:
    agent.run_graph(
        "list", StageCall(double, (1,)), StageCall(double, (2,)), StageCall(None, (), (Input(0, (0,)), Input(1, (1,))))
    )
    assert agent.value("list") == [2, 4]


def test_ten_thousand_stages(agent: FakeAgent) -> None:
    width, layers = 100, 100
    calls = [StageCall(double, (number,)) for number in range(width)]
    for layer in range(1, layers):
        above = (layer - 1) * width
        calls += [
            StageCall(add, (None, None), (Input(above + each, (0,)), Input(above + (each + 1) % width, (1,))))
            for each in range(width)
        ]
    last = len(calls) - width
    calls.append(StageCall(add, (None,) * width, tuple(Input(last + each, (each,)) for each in range(width))))
    agent.run_graph("layers", *calls)
    assert agent.value("layers") == 2 ** (layers - 1) * 2 * sum(range(width))


def wait_for(path: str, value: int) -> int:
    import time
    from pathlib import Path

    Path(path, f"began-{value}").touch()
    while value and not Path(path, "go").exists():
        time.sleep(0.01)
    return value


def test_a_fan_in_does_not_wait_for_stragglers(agent: FakeAgent, tmp_path: Path) -> None:
    agent.run_graph(
        "some",
        StageCall(wait_for, (str(tmp_path), 0)),
        StageCall(wait_for, (str(tmp_path), 1)),
        StageCall(total, ([None, None],), (Input(0, (0, 0)), Input(1, (0, 1))), needs=1),
    )
    assert agent.value("some") == 0
    assert states(agent.finished["some"]) == ["done", "skipped", "done"]


def test_output_of_a_call_that_runs_is_read(agent: FakeAgent, tmp_path: Path) -> None:
    agent.run_graph(
        "shown", StageCall(printed, (1,)), StageCall(print_and_wait, (str(tmp_path), None), (Input(0, (1,)),))
    )
    expected = b"--- stage printed, attempt 1\ngot 1\n--- stage print_and_wait, attempt 1\nwaiting\n"
    agent.listen(lambda: agent.read_output("shown")["shown"].stdout == expected)
    assert agent.read_output("shown", at=len(expected) - 4)["shown"].stdout == b"ing\n"
    (tmp_path / "go").touch()
    agent.value("shown")
    assert agent.tails["shown"].startswith(expected)


def print_and_wait(path: str, value: int) -> int:
    import time
    from pathlib import Path

    print("waiting", flush=True)
    while not Path(path, "go").exists():
        time.sleep(0.01)
    return value


def die_once(path: str, value: int) -> int:
    import os
    import signal
    from pathlib import Path

    marker = Path(path, f"died-{value}")
    with Path(path, "runs").open("a") as runs:
        runs.write(f"{value}\n")
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return value + 1


def dying(path: Path, *, idempotent: bool = True) -> list[StageCall]:
    chosen = TaskOptions(idempotent=idempotent)
    return [
        StageCall(die_once, (str(path), 0), options=chosen),
        StageCall(die_once, (str(path), None), (Input(0, (1,)),), options=chosen),
        StageCall(die_once, (str(path), None), (Input(1, (1,)),), options=chosen),
    ]


def test_a_worker_that_is_killed_in_each_stage(agent: FakeAgent, tmp_path: Path) -> None:
    agent.run_graph("killed", *dying(tmp_path))
    assert agent.value("killed") == 3
    assert (tmp_path / "runs").read_text().split() == ["0", "0", "1", "1", "2", "2"]
    assert not [died for progress in agent.progress for died in progress.died]


def test_a_stage_that_may_not_run_twice(agent: FakeAgent, tmp_path: Path) -> None:
    agent.run_graph("once", *dying(tmp_path, idempotent=False))
    finished = ended(agent, "once")
    assert finished.state is TaskState.FAILED
    assert finished.error is not None
    assert finished.error["code"] == "WORKER_DIED"
    assert finished.error["message"].startswith("stage 0 (die_once): ")
    assert (tmp_path / "runs").read_text().split() == ["0"]


def test_a_graph_that_is_cancelled_in_the_middle(agent: FakeAgent, tmp_path: Path) -> None:
    agent.run_graph(
        "cancelled",
        StageCall(numbers, (50,)),
        StageCall(wait_for, (str(tmp_path), None), (Input(0, (1,), each=True),)),
        StageCall(total, (None,), (Input(1, (0,)),)),
    )
    wait_until(lambda: len(list(tmp_path.glob("began-*"))) >= WORKERS, "calls")
    agent.say(agent_manager.CancelTasks(("cancelled",)))
    assert ended(agent, "cancelled").state is TaskState.CANCELLED
    began = len(list(tmp_path.glob("began-*")))
    agent.run_graph("next", StageCall(double, (1,)))
    assert agent.value("next") == 2
    assert len(list(tmp_path.glob("began-*"))) == began


def unserialisable() -> object:
    return (each for each in range(3))


def test_a_value_that_cannot_be_given_to_another_stage(agent: FakeAgent) -> None:
    agent.run_graph("lock", StageCall(unserialisable), StageCall(total, (None,), (Input(0, (0,)),)))
    error = ended(agent, "lock").error
    assert error is not None
    assert error["code"] == "RESULT_NOT_SERIALIZABLE"
    assert error["message"].startswith("stage 0 (unserialisable): ")


def some_bytes(mib: int, fill: int = 1) -> bytes:
    return bytes([fill]) * (mib * 2**20)


def length(*values: bytes) -> int:
    return sum(map(len, values))


def test_large_values_are_gone_with_their_readers(agent: FakeAgent) -> None:
    agent.run_graph("large", StageCall(some_bytes, (10,)), StageCall(length, (None,), (Input(0, (0,)),)))
    assert agent.value("large") == 10 * MIB
    wait_until(lambda: files_of_values(agent) == 0, "files of values")


def parts_of(count: int) -> list[bytes]:
    return [bytes(MIB) for _ in range(count)]


def test_values_beyond_their_room_in_memory_are_on_disk(small: FakeAgent) -> None:
    small.run_graph(
        "spread",
        StageCall(parts_of, (5,)),
        StageCall(length, (None,), (Input(0, (0,), each=True),)),
        StageCall(total, (None,), (Input(1, (0,)),)),
    )
    assert small.value("spread") == 5 * MIB
    for number in range(3):  # what one graph occupied, the next one has again
        name = f"chain-{number}"
        small.run_graph(name, StageCall(some_bytes, (6,)), StageCall(length, (None,), (Input(0, (0,)),)))
        assert small.value(name) == 6 * MIB
    wait_until(lambda: files_of_values(small) == 0, "files of values")


def test_a_value_for_which_there_is_no_room(small: FakeAgent) -> None:
    small.run_graph("too much", StageCall(some_bytes, (9,)), StageCall(length, (None,), (Input(0, (0,)),)))
    error = ended(small, "too much").error
    assert error is not None
    assert error["code"] == "VALUE_TOO_LARGE"


def test_nothing_is_left_of_the_values_of_a_manager_that_is_killed(tmp_path: Path) -> None:
    with connected_agent(tmp_path, "--graph-memory", str(MIB), slots=WORKERS) as agent:
        agent.run_graph(
            "kept",
            StageCall(some_bytes, (4,)),
            StageCall(wait_for, (str(tmp_path), 1)),
            StageCall(length, (None, None), (Input(0, (0,)), Input(1, (1,)))),
        )
        agent.listen(lambda: any(each.stages[0].state == "done" for report in agent.progress for each in report.graphs))
        family = agent.family()
        agent.manager.send_signal(signal.SIGKILL)
        psutil.wait_procs(family)
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size >= MIB]
