"""Tasks that write to their worker's sockets what no worker writes: the manager ends the worker, and continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.endpoint.fake_agent import FakeAgent, connected_agent


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    with connected_agent(tmp_path) as agent:
        yield agent


def seven() -> int:
    return 7


def say_without_end() -> None:
    import gc
    import os

    from farcall_endpoint.contracts.manager_worker import Channel, Waits

    [channel] = [each for each in gc.get_objects() if isinstance(each, Channel)]
    for _ in range(2):
        os.fork()  # together they write faster than one process reads
    while True:
        channel.send(Waits("a"))


def never_read_answers() -> None:
    import gc
    import itertools

    from farcall_endpoint.contracts.manager_worker import Call, Calls, Channel

    [channel] = [each for each in gc.get_objects() if isinstance(each, Channel)]
    for number in itertools.count(0, 1000):
        channel.send(Calls("a", tuple(Call(number + each, "unknown", 0) for each in range(1000))))


@pytest.mark.parametrize("hostile", [say_without_end, never_read_answers])
def test_a_task_that_fills_its_manager_ends(agent: FakeAgent, hostile: Callable[[], None]) -> None:
    agent.run("a", hostile)
    agent.listen(lambda: any(each.died for each in agent.progress))
    agent.run("good", seven)
    assert agent.value("good") == 7
