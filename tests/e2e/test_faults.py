"""Fault tolerance: parts are killed while tasks run; no task is lost, none hangs."""

from __future__ import annotations

import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path

import psutil
import pytest

import farcall
from farcall_common.errors import TaskLost, TaskUnknown, Unavailable
from farcall_common.wire import TaskState
from farcall_local.deployment import Deployment
from farcall_local.endpoint import LocalEndpoint
from farcall_local.tier import LocalTier
from tests.waiting import WAIT_S, wait_until


def square(number: int) -> int:
    return number * number


def slow_square(number: int) -> int:
    time.sleep(0.02)
    return number * number


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def expect_squares(futures: Sequence[farcall.ComputeFuture[int]]) -> None:
    """Every future is done in time and right."""
    _, open_ = wait(futures, timeout=WAIT_S)
    assert not open_, f"{len(open_)} of {len(futures)} tasks hang"
    assert [future.result() for future in futures] == [number * number for number in range(len(futures))]


def test_an_offline_endpoint_receives_its_tasks_when_it_reconnects(
    client: farcall.Client, own_endpoint: Callable[..., LocalEndpoint]
) -> None:
    endpoint = own_endpoint()
    endpoint.stop()
    with farcall.Executor(endpoint.endpoint_id, client=client) as executor:
        futures = [executor.submit(square, number) for number in range(20)]
        first = futures[0]
        wait_until(lambda: state_of(client, first.task_id) in (TaskState.RECEIVED, TaskState.WAITING_FOR_EP))
        assert client.get_endpoint_status(endpoint.endpoint_id)["status"] == "offline"
        assert not first.done()
        endpoint.start()
        expect_squares(futures)


def test_a_second_agent_with_the_same_id_is_refused(
    client: farcall.Client, own_endpoint: Callable[..., LocalEndpoint], cloud: Deployment, tmp_path: Path
) -> None:
    endpoint = own_endpoint()
    twin = LocalEndpoint(endpoint.name, home=tmp_path / "twin", environment=cloud.environment("ada"))
    shutil.copytree(endpoint.directory, twin.directory, ignore=shutil.ignore_patterns("daemon.pid", "*.sock", "spool*"))
    try:
        with pytest.raises(Unavailable, match="ENDPOINT_IN_USE"):
            twin.start()
    finally:
        twin.kill()
    with farcall.Executor(endpoint.endpoint_id, client=client) as executor:
        assert executor.submit(square, 7).result(WAIT_S) == 49


@pytest.mark.parametrize("role", ["worker", "manager"])
def test_a_killed_worker_or_manager(
    client: farcall.Client, own_endpoint: Callable[..., LocalEndpoint], role: str
) -> None:
    endpoint = own_endpoint()
    with farcall.Executor(endpoint.endpoint_id, client=client, max_attempts=10) as executor:
        futures = [executor.submit(slow_square, number) for number in range(200)]
        for _ in range(2):
            wait_until(lambda: any(future.done() for future in futures))
            for process in endpoint.wait_for(role)[:1]:
                kill(process)
        expect_squares(futures)


def test_a_killed_agent(client: farcall.Client, own_endpoint: Callable[..., LocalEndpoint]) -> None:
    endpoint = own_endpoint()
    with farcall.Executor(endpoint.endpoint_id, client=client, max_attempts=10) as executor:
        futures = [executor.submit(slow_square, number) for number in range(200)]
        wait_until(lambda: any(future.done() for future in futures))
        agent = endpoint.agent()
        assert agent is not None
        below = agent.children(recursive=True)
        kill(agent)
        _, alive = psutil.wait_procs(below, timeout=WAIT_S)
        assert not alive, "managers and workers outlived their agent"
        endpoint.start()
        expect_squares(futures)


def test_a_task_that_must_not_run_twice_ends_as_lost(
    client: farcall.Client, own_endpoint: Callable[..., LocalEndpoint]
) -> None:
    endpoint = own_endpoint()
    with farcall.Executor(endpoint.endpoint_id, client=client, idempotent=False) as executor:
        future = executor.submit(sleep, 600)
        wait_until(lambda: state_of(client, future.task_id) is TaskState.RUNNING)
        for process in endpoint.wait_for("manager"):
            kill(process)
        error = future.exception(WAIT_S)
        assert isinstance(error, TaskLost), repr(error)
        assert error.record.hint


@pytest.mark.parametrize(
    "name", ["api", pytest.param("forwarder", marks=pytest.mark.smoke), "valkey", "postgres", "blobs"]
)
def test_a_killed_part_of_the_cloud(
    client: farcall.Client, endpoint: LocalEndpoint, local_tier: LocalTier, name: str
) -> None:
    with farcall.Executor(endpoint.endpoint_id, client=client, max_attempts=10) as executor:
        futures = [executor.submit(slow_square, number) for number in range(300)]
        wait_until(lambda: any(future.done() for future in futures))
        killed = local_tier.kill(name)
        futures += [executor.submit(slow_square, number) for number in range(300, 400)]
        assert local_tier.wait_up(name, other_than=killed, within_s=WAIT_S) != killed
        expect_squares(futures)


@pytest.mark.timeout(1500)
def test_parts_killed_at_random_moments(client: farcall.Client, endpoint: LocalEndpoint, local_tier: LocalTier) -> None:
    """All at once: the cloud's processes and the workers die again and again while tasks are submitted and run."""
    draw = random.Random(4)
    stop = threading.Event()

    def break_things() -> None:
        while not stop.wait(draw.uniform(0.2, 0.8)):
            victim = draw.choice(["api", "forwarder", "valkey", "worker", "manager"])
            if victim in ("worker", "manager"):
                for process in list(endpoint.processes(victim))[:1]:
                    kill(process)
            elif (pid := local_tier.pid(victim)) is not None:
                kill(psutil.Process(pid)) if psutil.pid_exists(pid) else None

    with farcall.Executor(endpoint.endpoint_id, client=client, max_attempts=50) as executor:
        breaker = threading.Thread(target=break_things, name="breaker")
        breaker.start()
        try:
            futures = []
            for number in range(500):
                futures.append(executor.submit(slow_square, number))
                stop.wait(0.01)
        finally:
            stop.set()
            breaker.join()
        expect_squares(futures)


def test_a_wiped_queue_with_a_thousand_tasks(
    client: farcall.Client, endpoint: LocalEndpoint, local_tier: LocalTier
) -> None:
    with farcall.Executor(endpoint.endpoint_id, client=client, max_attempts=10) as executor:
        futures = [executor.submit(slow_square, number) for number in range(1_000)]
        wait_until(lambda: sum(future.done() for future in futures) > 50)
        local_tier.wipe_queue()
        wait_until(lambda: sum(future.done() for future in futures) > 300)
        local_tier.wipe_queue()
        expect_squares(futures)


def state_of(client: farcall.Client, task_id: str) -> TaskState | None:
    """The state of a task; None while the API does not know it yet: an executor submits in the background."""
    try:
        return client.get_task(task_id).state
    except TaskUnknown:
        return None


def kill(process: psutil.Process) -> None:
    """kill -9; a process that is gone already is fine."""
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return
