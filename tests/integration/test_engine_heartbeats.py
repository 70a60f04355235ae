"""Who says nothing for too long is given up, on either side, and never wedges the other."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from farcall_common.wire import TaskState
from farcall_endpoint.contracts import agent_manager
from tests.support.endpoint import EndpointProcess, FakeAgent, running_endpoint, wait_gone
from tests.waiting import WAIT_S, wait_until

# -- a manager, and an agent that falls silent -------------------------------------------------------------------------


@contextlib.contextmanager
def agent_of(directory: Path, *options: str, here: bool = False) -> Iterator[FakeAgent]:
    agent = FakeAgent(directory, *options, here=here)
    try:
        agent.listen(lambda: agent.progress and agent.progress[-1].idle_workers == 1, pinging=True)
        yield agent
    finally:
        agent.close()


def sleep(seconds: float) -> None:
    import time

    time.sleep(seconds)


def test_a_manager_without_messages_from_its_agent_ends_with_its_workers(tmp_path: Path) -> None:
    with agent_of(tmp_path, "--heartbeat-threshold", "2.5") as agent:
        agent.run("t", sleep, 1000.0)
        agent.listen(lambda: any(progress.started for progress in agent.progress), pinging=True)
        family, since = agent.family(), time.monotonic()
        agent.manager.wait(WAIT_S)
        assert time.monotonic() - since > 0.5
        wait_gone(family)


def test_pings_keep_a_manager(tmp_path: Path) -> None:
    with agent_of(tmp_path, "--heartbeat-threshold", "2.5") as agent:
        heard = len(agent.progress)
        agent.listen(lambda: len(agent.progress) >= heard + 4, pinging=True)  # it says something once a second
        agent.run("t", abs, -1)
        agent.listen(lambda: agent.finished)
        assert agent.finished["t"].state is TaskState.SUCCESS


def test_a_manager_of_the_same_machine_needs_no_pings(tmp_path: Path) -> None:
    with agent_of(tmp_path, "--heartbeat-threshold", "0.5", here=True) as agent:
        heard = len(agent.progress)
        agent.listen(lambda: len(agent.progress) >= heard + 3)
        assert agent.manager.poll() is None


def test_a_resumed_manager_reads_messages_before_it_decides(tmp_path: Path) -> None:
    with agent_of(tmp_path, "--heartbeat-threshold", "2.5") as agent:
        process = psutil.Process(agent.manager.pid)
        process.suspend()
        with contextlib.suppress(TimeoutError):
            agent.listen(lambda: False, timeout_s=5.5)
        process.resume()
        agent.run("t", abs, -1)
        agent.listen(lambda: agent.finished)


def test_a_dropped_manager_ends_when_it_resumes(tmp_path: Path) -> None:
    with agent_of(tmp_path) as agent:
        agent.run("t", sleep, 1000.0)
        agent.listen(lambda: any(progress.started for progress in agent.progress))
        family, process = agent.family(), psutil.Process(agent.manager.pid)
        process.suspend()
        agent.say(agent_manager.Stop(0.0))
        process.resume()
        agent.manager.wait(WAIT_S)
        wait_gone(family)


HANGS_ONCE = """
import os, pathlib, sys, time
if "farcall_endpoint.worker" in sys.orig_argv:
    try:
        pathlib.Path(__file__).with_name("pid").open("x").write(str(os.getpid()))
    except FileExistsError:
        pass
    else:
        time.sleep(1000)
"""


def test_a_worker_that_hangs_while_it_starts_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANGS_ONCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    agent = FakeAgent(tmp_path, "--start-limit", "2")
    try:
        agent.listen(lambda: agent.progress and agent.progress[-1].problem)
        assert "did not start" in agent.progress[-1].problem
        agent.listen(lambda: agent.progress[-1].idle_workers == 1)
        with contextlib.suppress(psutil.NoSuchProcess):
            wait_gone([psutil.Process(int((tmp_path / "pid").read_text()))])
        assert agent.progress[-1].problem == ""
    finally:
        agent.close()


# -- an agent, and a manager that falls silent -------------------------------------------------------------------------


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[EndpointProcess]:
    with running_endpoint(tmp_path, engine={"heartbeat_period": 0.3, "heartbeat_threshold": 3.0}) as endpoint:
        wait_until(lambda: len(endpoint.workers()) == 2)
        yield endpoint


def test_tasks_of_a_stopped_manager_run_on_another(endpoint: EndpointProcess, tmp_path: Path) -> None:
    cloud = endpoint.cloud
    again = cloud.submit_many(sleep, [(0.5,)] * 4)
    once = cloud.submit(sleep, 0.5, idempotent=False)
    [manager] = endpoint.managers()
    family = [manager, *manager.children(recursive=True)]
    manager.suspend()
    ends = cloud.ends([*again, once])
    assert {end.state for end in ends[:4]} == {TaskState.SUCCESS}
    assert ends[4].state in (TaskState.SUCCESS, TaskState.LOST)
    manager_now = endpoint.managers()
    assert manager.pid not in {process.pid for process in manager_now}
    wait_gone(family)


def test_a_stopped_manager_that_resumes_in_time_continues(endpoint: EndpointProcess) -> None:
    cloud = endpoint.cloud
    tasks = cloud.submit_many(sleep, [(0.3,)] * 4, idempotent=False)
    cloud.wait_for(lambda: len(cloud.accepted) == 4)
    [manager] = endpoint.managers()
    manager.suspend()
    with contextlib.suppress(TimeoutError):
        cloud.wait_for(lambda: False, timeout_s=1.0)
    manager.resume()
    assert {end.state for end in cloud.ends(tasks)} == {TaskState.SUCCESS}
    assert [process.pid for process in endpoint.managers()] == [manager.pid]


def test_managers_run_while_their_agent_is_stopped_and_deliver_when_it_resumes(
    endpoint: EndpointProcess, tmp_path: Path
) -> None:
    def note(path: str) -> None:
        import os

        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, b".")
        os.close(descriptor)

    cloud, log = endpoint.cloud, tmp_path / "runs"
    [manager] = endpoint.managers()
    assert endpoint.agent is not None
    agent = psutil.Process(endpoint.agent.pid)
    first = cloud.submit_many(sleep, [(1.0,)] * 2, idempotent=False)
    wait_until(lambda: endpoint.directory.read_status().get("idle_workers") == 0)
    agent.suspend()
    try:
        more = cloud.submit_many(note, [(str(log),)] * 10, idempotent=False)
        with contextlib.suppress(TimeoutError):
            cloud.wait_for(lambda: False, timeout_s=6.5)  # more than twice the limit
    finally:
        agent.resume()
    assert {end.state for end in cloud.ends([*first, *more])} == {TaskState.SUCCESS}
    assert len(log.read_text()) == 10
    assert [process.pid for process in endpoint.managers()] == [manager.pid], "no manager was dropped"
