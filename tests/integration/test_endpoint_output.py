"""Output of tasks at a real manager: read while they run, and never that of another task."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.endpoint.fake_agent import FakeAgent, connected_agent


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    with connected_agent(tmp_path) as agent:
        yield agent


def say(text: str, until: str) -> None:
    import sys
    import time
    from pathlib import Path

    print(text)
    print("!", file=sys.stderr)
    while not Path(until).exists():
        time.sleep(0.01)


def repeat(text: str) -> None:
    for _ in range(20):
        print(text)


def dies(text: str) -> None:
    import os

    print(text)
    os._exit(1)


def test_output_of_a_running_task_is_read_and_its_end_comes_with_the_result(agent: FakeAgent, tmp_path: Path) -> None:
    for task_id in ("a", "b"):
        agent.run(task_id, say, f"of {task_id}", str(tmp_path / f"end-{task_id}"), output_bytes=3)
    agent.run("off", say, "secret", str(tmp_path / "end-off"), output_bytes=0)
    agent.listen(lambda: agent.read_output("a")["a"].stdout)
    read = agent.read_output("a", "b", "off", "unknown")
    assert (read["a"].stdout, read["a"].stderr, read["a"].is_running) == (b"of a\n", b"!\n", True)
    assert [read[each].is_running for each in ("b", "off", "unknown")] == [False] * 3
    assert agent.read_output("a", at=3, max_bytes=1)["a"].stdout == b"a"
    assert agent.read_output("a", at=2**53)["a"].stdout == b""
    (tmp_path / "end-a").touch()
    agent.listen(lambda: agent.read_output("b")["b"].stdout)
    assert agent.read_output("a", "b")["b"].stdout == b"of b\n"
    assert agent.tails["a"] == b" a\n!\n"
    printed = agent.finished["a"].printed
    assert printed is not None
    assert (printed.stdout_tail, printed.stdout_end, printed.stderr_end) == (3, 5, 2)
    (tmp_path / "end-b").touch()
    agent.listen(lambda: agent.read_output("off")["off"].is_running)
    assert agent.read_output("off")["off"].is_kept is False
    (tmp_path / "end-off").touch()
    agent.listen(lambda: "off" in agent.finished)
    assert agent.finished["off"].printed is None


def test_output_of_another_task_is_never_shown(agent: FakeAgent) -> None:
    """Reads hit every moment between two tasks of one packet."""
    ids = [f"task-{number}" for number in range(200)]
    for task_id in ids:
        agent.run(task_id, repeat, task_id)
    while len(agent.finished) < len(ids):
        for task_id, read in agent.read_output(*ids).items():
            assert (f"{task_id}\n".encode() * 20).startswith(read.stdout)
    assert all(agent.tails[task_id].decode() == f"{task_id}\n" * 20 for task_id in ids)


def test_output_of_a_task_that_killed_its_worker_is_reported(agent: FakeAgent) -> None:
    agent.run("a", dies, "farewell")
    agent.listen(lambda: any(each.died for each in agent.progress))
    [died] = next(each.died for each in agent.progress if each.died)
    assert (died.output, died.printed and died.printed.stdout_end) == (b"farewell\n", 9)


def test_forged_lengths_of_output_end_the_worker(agent: FakeAgent) -> None:
    agent.run("a", forge)
    agent.listen(lambda: any(each.died for each in agent.progress))


def forge() -> None:
    import gc

    from farcall_endpoint.contracts.manager_worker import Channel, Done
    from farcall_endpoint.contracts.output import Printed

    [channel] = [each for each in gc.get_objects() if isinstance(each, Channel)]
    channel.send(Done("a", 0.0, 0.0, None, None, Printed(1000, 0, 1000, 0)), (b"short",))
    while True:
        pass
