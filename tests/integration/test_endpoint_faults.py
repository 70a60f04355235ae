"""Processes of an endpoint are killed, its cloud goes away: nothing is lost, and nothing runs twice that must not."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from farcall_common.wire import Redirect, TaskRef, TaskState
from tests.support.endpoint import EndpointProcess, running_endpoint, wait_gone
from tests.waiting import wait_until


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[EndpointProcess]:
    with running_endpoint(tmp_path) as endpoint:
        yield endpoint


def note_and_sleep(path: str, number: int, seconds: float) -> int:
    import os
    import time

    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{number}:{os.getpid()}\n".encode())
    os.close(descriptor)
    time.sleep(seconds)
    return number


def note_and_wait(path: str, number: int, release: str) -> int:
    """Note the start, and go on when there is a file ``release``."""
    import os
    import pathlib
    import time

    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{number}\n".encode())
    os.close(descriptor)
    while not pathlib.Path(release).exists():
        time.sleep(0.01)
    return number


def runs(path: Path) -> collections.Counter[int]:
    """How often each task was started."""
    lines = path.read_text().split() if path.exists() else []
    return collections.Counter(int(line.partition(":")[0]) for line in lines)


def pid_of(path: Path, number: int) -> int:
    """The worker of a task that was started."""
    [pid] = [
        int(pid) for task, _, pid in (line.partition(":") for line in path.read_text().split()) if task == f"{number}"
    ]
    return pid


def a_worker(endpoint: EndpointProcess) -> None:
    random.choice(endpoint.workers()).kill()


def the_manager(endpoint: EndpointProcess) -> None:
    endpoint.managers()[0].kill()


def the_agent(endpoint: EndpointProcess) -> None:
    endpoint.kill_agent()
    endpoint.start()


def the_forwarder(endpoint: EndpointProcess) -> None:
    endpoint.cloud.offline()
    endpoint.cloud.online()


@pytest.mark.parametrize("kill", [a_worker, the_manager, the_agent, the_forwarder])
def test_nothing_is_lost_when_something_is_killed(
    endpoint: EndpointProcess, kill: Callable[[EndpointProcess], None], tmp_path: Path
) -> None:
    cloud, log = endpoint.cloud, tmp_path / "runs"
    ids = cloud.submit_many(note_and_sleep, [(str(log), number, 0.002) for number in range(1500)], max_attempts=10)
    for share in (100, 500, 900):
        cloud.wait_for(lambda share=share: len(cloud.results) >= share)  # type: ignore[misc]
        kill(endpoint)
    ends = cloud.ends(ids)
    assert [end.value for end in ends] == list(range(1500))
    assert set(runs(log)) == set(range(1500))


@pytest.mark.parametrize("kill", [None, the_manager, the_agent], ids=["a worker", "the manager", "the agent"])
def test_non_idempotent_tasks_do_not_run_twice(
    endpoint: EndpointProcess, kill: Callable[[EndpointProcess], None] | None, tmp_path: Path
) -> None:
    cloud, log = endpoint.cloud, tmp_path / "runs"
    killed = (10, 30)
    calls = [(str(log), number, 600.0 if number in killed else 0.01) for number in range(60)]
    ids = cloud.submit_many(note_and_sleep, calls, idempotent=False, max_attempts=3)
    for number in killed:
        wait_until(lambda number=number: number in runs(log))  # type: ignore[misc]
        if kill is None:
            psutil.Process(pid_of(log, number)).kill()
        else:
            kill(endpoint)
    ends = cloud.ends(ids)
    assert max(runs(log).values()) == 1
    bad = [end for end in ends if end.state is not TaskState.SUCCESS]
    assert 2 <= len(bad) <= (2 if kill is None else 4), "only what ran at the moment, one for each worker and kill"
    for end in bad:
        assert end.error["code"] in ("TASK_LOST", "WORKER_DIED")
        assert end.state is (TaskState.LOST if end.error["code"] == "TASK_LOST" else TaskState.FAILED)


def test_a_task_that_was_not_started_is_not_lost_with_the_agent(endpoint: EndpointProcess, tmp_path: Path) -> None:
    log, release = tmp_path / "runs", tmp_path / "release"
    calls = [(str(log), number, str(release)) for number in range(6)]
    ids = endpoint.cloud.submit_many(note_and_wait, calls, idempotent=False)
    endpoint.cloud.wait_for(lambda: len(endpoint.cloud.accepted) == 6)
    wait_until(lambda: len(runs(log)) == 2)
    endpoint.kill_agent()
    release.touch()
    endpoint.start()
    ends = endpoint.cloud.ends(ids)
    assert collections.Counter(end.state for end in ends) == {TaskState.LOST: 2, TaskState.SUCCESS: 4}
    assert max(runs(log).values()) == 1


def test_a_task_that_kills_its_manager_fails_and_other_tasks_finish(endpoint: EndpointProcess) -> None:
    def kill_parent() -> None:
        import os
        import signal
        import time

        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(10)

    cloud = endpoint.cloud
    poison = cloud.submit(kill_parent, max_attempts=2)
    neighbours = cloud.submit_many(abs, [(-number,) for number in range(100)])
    end = cloud.end(poison)
    assert end.error["code"] == "WORKER_DIED"
    assert [end.value for end in cloud.ends(neighbours)] == list(range(100))


def test_results_are_sent_again_until_they_are_recorded(endpoint: EndpointProcess) -> None:
    cloud = endpoint.cloud
    cloud.recording = False
    ids = cloud.submit_many(abs, [(-number,) for number in range(10)])
    large = cloud.submit("x".__mul__, 100_000)
    cloud.ends([*ids, large])
    the_forwarder(endpoint)
    cloud.wait_for(lambda: len(cloud.results) == 22)
    endpoint.kill_agent()
    cloud.recording = True
    endpoint.start()
    assert {held.task_id for held in cloud.hellos[-1].held if held.finished} == {*ids, large}
    cloud.wait_for(lambda: len(cloud.results) == 33)
    assert collections.Counter(spec.task_id for spec in cloud.results) == dict.fromkeys([*ids, large], 3)
    wait_until(lambda: endpoint.stop() == 0)
    endpoint.start()
    assert cloud.hellos[-1].held == ()


def test_the_hello_names_spool_and_instance(endpoint: EndpointProcess) -> None:
    endpoint.kill_agent()
    endpoint.start()
    first, second = endpoint.cloud.hellos
    assert first.spool_id == second.spool_id
    assert first.instance_id != second.instance_id
    assert first.capabilities.python_version


def test_tasks_that_the_cloud_discards_are_stopped(endpoint: EndpointProcess, tmp_path: Path) -> None:
    cloud, log = endpoint.cloud, tmp_path / "runs"
    forgotten = cloud.submit(note_and_sleep, str(log), 1, 60.0)
    wait_until(log.exists)
    cloud.forget = (TaskRef(task_id=forgotten, attempt=1),)
    pids = {process.pid for process in endpoint.workers()}
    the_forwarder(endpoint)
    wait_until(lambda: len(pids & {process.pid for process in endpoint.workers()}) == 1)
    assert cloud.end(cloud.submit(abs, -3)).value == 3
    assert forgotten not in {spec.task_id for spec in cloud.results}


def test_an_endpoint_waits_for_its_cloud_and_continues_without_it(tmp_path: Path) -> None:
    with running_endpoint(tmp_path, start=False) as endpoint:
        cloud, log, release = endpoint.cloud, tmp_path / "runs", tmp_path / "release"
        cloud.offline()
        endpoint.start(connected=False)
        ids = cloud.submit_many(note_and_wait, [(str(log), number, str(release)) for number in range(4)])
        cloud.online()
        cloud.wait_for(lambda: len(cloud.accepted) == 4)
        cloud.offline()
        release.touch()
        wait_until(lambda: len(runs(log)) == 4)
        assert not cloud.results
        cloud.online()
        assert [end.value for end in cloud.ends(ids)] == [0, 1, 2, 3]
        assert set(runs(log).values()) == {1}


def test_an_agent_disconnects_from_a_silent_forwarder(tmp_path: Path) -> None:
    with running_endpoint(tmp_path, start=False) as endpoint:
        cloud = endpoint.cloud
        cloud.heartbeat_s = 0.2

        def is_left() -> bool:
            if cloud._session is not None:
                cloud._session.heartbeat_s = 1000  # it says nothing by itself
            return len(cloud.hellos) >= 2 and bool(cloud.reports)

        endpoint.start(connected=False)
        cloud.wait_for(is_left)
        assert cloud.reports[-1].managers <= 1, "heartbeats carry numbers"


def test_an_agent_sends_goodbye_to_a_draining_forwarder(endpoint: EndpointProcess) -> None:
    endpoint.cloud.send(Redirect(reason="a new version", retry_after_s=0.1))
    endpoint.cloud.wait_for(lambda: len(endpoint.cloud.hellos) == 2)
    assert len(endpoint.cloud.goodbyes) == 1
    assert endpoint.cloud.end(endpoint.cloud.submit(abs, -3)).value == 3


def test_an_unknown_key_is_registered_again(tmp_path: Path) -> None:
    with running_endpoint(tmp_path, start=False) as endpoint:
        endpoint.cloud.admit_keys = False
        endpoint.start(connected=False)
        wait_until(lambda: sum("connect" in request for request in endpoint.cloud.http.requests) >= 2)
        assert "does not know this key" in endpoint.log()
        endpoint.cloud.admit_keys = True
        endpoint.cloud.wait_connected()


def test_a_final_refusal_ends_the_agent_with_its_reason(tmp_path: Path) -> None:
    with running_endpoint(tmp_path, start=False) as endpoint:
        endpoint.cloud.refusal = {
            "code": "ENDPOINT_TAKEN_OVER",
            "message": "another agent with another spool has taken over",
            "fault": "caller",
        }
        endpoint.start(connected=False)
        assert endpoint.wait() not in (0, None)
        assert "another agent with another spool has taken over" in endpoint.log()


def test_a_bad_ticket_is_renewed_once(tmp_path: Path) -> None:
    with running_endpoint(tmp_path, start=False) as endpoint:
        endpoint.cloud.refusal = {"code": "TICKET_INVALID", "message": "expired", "fault": "peer"}
        endpoint.start(connected=False)
        assert endpoint.wait() != 0
        assert len(endpoint.cloud.hellos) == 2
        assert sum("connect" in request for request in endpoint.cloud.http.requests) == 2


def test_the_api_may_fail_for_a_while(tmp_path: Path) -> None:
    with running_endpoint(tmp_path) as endpoint:
        endpoint.stop()
        endpoint.cloud.http.failing = 502
        endpoint.start(connected=False)
        wait_until(lambda: "HTTP 502" in endpoint.log())
        endpoint.cloud.http.failing = None
        endpoint.cloud.wait_connected()


def test_a_token_that_is_not_accepted_ends_the_agent(tmp_path: Path) -> None:
    with running_endpoint(tmp_path, start=False) as endpoint:
        endpoint.cloud.http.failing = 401
        endpoint.start(connected=False)
        assert endpoint.wait() == 77


def test_a_stop_leaves_unfinished_tasks_in_the_spool_and_no_process(endpoint: EndpointProcess, tmp_path: Path) -> None:
    cloud, log = endpoint.cloud, tmp_path / "runs"
    soon, late = tmp_path / "soon", tmp_path / "late"
    quick = cloud.submit(note_and_wait, str(log), 0, str(soon))
    slow = cloud.submit(note_and_wait, str(log), 1, str(late), max_attempts=1)
    wait_until(lambda: len(runs(log)) == 2)
    waiting = cloud.submit(note_and_wait, str(log), 2, str(late))
    cloud.wait_for(lambda: waiting in cloud.accepted)
    family = endpoint.family()
    assert endpoint.agent is not None
    endpoint.agent.terminate()
    wait_until(lambda: "running tasks get 5 s to finish" in endpoint.log())
    soon.touch()
    assert endpoint.wait() == 0
    wait_gone(family)
    assert cloud.end(quick).value == 0, "running tasks get their grace"
    assert set(runs(log)) == {0, 1}
    assert len(cloud.goodbyes) == 1
    late.touch()
    endpoint.start()
    assert [end.value for end in cloud.ends([slow, waiting])] == [1, 2]
    assert runs(log) == {0: 1, 1: 2, 2: 1}, "an orderly stop does not count as an attempt"


def test_killing_the_process_reaper_changes_nothing(endpoint: EndpointProcess) -> None:
    wait_until(lambda: len(endpoint.workers()) == 2)
    [reaper] = [process for process in endpoint.family() if "process_reaper.py" in " ".join(process.cmdline())]
    reaper.kill()
    a_worker(endpoint)
    assert endpoint.cloud.ends(endpoint.cloud.submit_many(abs, [(-1,)] * 10))[0].value == 1
    a_worker(endpoint)
    wait_until(lambda: len(endpoint.workers()) == 2)
    assert endpoint.cloud.end(endpoint.cloud.submit(abs, -1)).value == 1


def test_children_of_a_task_do_not_outlive_a_killed_manager(endpoint: EndpointProcess, tmp_path: Path) -> None:
    def spawn(path: str) -> None:
        import pathlib
        import subprocess
        import time

        child = subprocess.Popen(["sleep", "1000"])
        pathlib.Path(path).write_text(str(child.pid))
        time.sleep(1000)

    path = tmp_path / "pid"
    endpoint.cloud.submit(spawn, str(path), max_attempts=1)
    wait_until(lambda: path.exists() and path.read_text())
    child = psutil.Process(int(path.read_text()))
    the_manager(endpoint)
    wait_gone([child])
