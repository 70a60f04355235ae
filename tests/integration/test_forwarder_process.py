"""The forwarder as a process: start, drain, crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from farcall_common import wire
from farcall_common.errors import Fenced, QueueDataLost
from farcall_common.store import StoreSettings, open_stores
from farcall_common.store.model import LeasedTask
from farcall_common.store.settings import Stores
from farcall_common.wire import TaskState
from tests.integration.forwarder_peers import (
    Agent,
    Cloud,
    RunningForwarder,
    real_environment,
    until,
)
from tests.integration.store_servers import Valkey
from tests.support.stores import FakeQueue, fake_stores
from tests.waiting import WAIT_S


class ForwarderProcess:
    """``python -m farcall_forwarder``."""

    def __init__(self, environ: dict[str, str], directory: Path, *arguments: str) -> None:
        ready_file = directory / f"ready-{wire.new_id()}.json"
        command = [
            sys.executable,
            "-m",
            "farcall_forwarder",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--health-port",
            "0",
        ]
        self.log = directory / f"{ready_file.stem}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--ready-file", str(ready_file), *arguments],
                env=os.environ | environ,
                stderr=log,
            )
        until(lambda: ready_file.exists() or self.process.poll() is not None, "the forwarder is ready")
        assert self.process.poll() is None, self.log.read_text()
        ready = json.loads(ready_file.read_text())
        self.address = ready["address"]
        self.server_key = ready["server_key"]
        self.health_url = ready["health_url"]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)


@pytest.fixture
def environ(request: pytest.FixtureRequest) -> dict[str, str]:
    return real_environment(request) | {"FARCALL_FORWARDER_LEASE_S": "3", "FARCALL_FORWARDER_DRAIN_S": "2"}


@pytest.fixture
def stores(environ: dict[str, str]) -> Iterator[Stores]:
    opened = open_stores(StoreSettings.from_environment(environ))
    yield opened
    opened.close()


@pytest.fixture
def start(environ: dict[str, str], tmp_path: Path) -> Iterator[Callable[[], ForwarderProcess]]:
    """Starts forwarders; kills those that still run at the end."""
    started: list[ForwarderProcess] = []

    def start_one() -> ForwarderProcess:
        started.append(ForwarderProcess(environ, tmp_path))
        return started[-1]

    yield start_one
    for forwarder in started:
        forwarder.process.kill()
        forwarder.process.wait()


def log_lines(forwarder: ForwarderProcess) -> Sequence[dict[str, object]]:
    return [json.loads(line) for line in forwarder.log.read_text().splitlines()]


def test_a_process_serves_drains_and_exits_with_0(stores: Stores, start: Callable[[], ForwarderProcess]) -> None:
    cloud = Cloud(stores)
    endpoint_id = cloud.add_endpoint()
    forwarder = start()
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.greet(credit=10)
        task_ids = cloud.submit_new(endpoint_id, 10, payload=b"a secret payload")
        agent.serve(10)
        forwarder.process.send_signal(signal.SIGTERM)
        agent.hear(wire.Redirect)
        agent.say(wire.Goodbye())
        assert forwarder.process.wait(WAIT_S) == 0
    cloud.until_all(task_ids, TaskState.SUCCESS)
    assert not stores.queue.forwarders()
    messages = [line["message"] for line in log_lines(forwarder)]
    assert {"ready", "agent connected", "ended"} <= set(messages)
    text = forwarder.log.read_text()
    assert "a secret payload" not in text
    assert agent.ticket[:20] not in text


def test_a_drain_ends_without_the_queue(valkey: Valkey, stores: Stores, start: Callable[[], ForwarderProcess]) -> None:
    forwarder = start()
    valkey.kill()
    try:
        assert forwarder.end() == 0
    finally:
        valkey.start()


def test_two_killed_forwarders_lose_nothing(stores: Stores, start: Callable[[], ForwarderProcess]) -> None:
    cloud = Cloud(stores)
    endpoint_id = cloud.add_endpoint()
    task_ids = cloud.submit_new(endpoint_id, 600)
    with Agent(cloud, endpoint_id, forwarder := start()) as agent:
        for kills in range(3):
            if kills:
                forwarder.end(signal.SIGKILL)
                forwarder = start()
                agent.connect(forwarder)
                agent.received = []
            agent.greet()
            if unfinished := list(agent.spool.values()):
                agent.finish(unfinished)
            agent.say(wire.Credit(tasks=100))
            if kills < 2:
                agent.take(50)  # none of them is reported before the forwarder dies
        deadline = time.monotonic() + 2 * WAIT_S
        while cloud.states(task_ids) != {TaskState.SUCCESS}:
            assert time.monotonic() < deadline, "tasks are left"
            agent._receive(0.2)
            if agent.received:
                agent.finish(agent.received)
                agent.say(wire.Credit(tasks=len(agent.received)))
                agent.received = []


@pytest.mark.parametrize(
    ("missing", "arguments"), [("FARCALL_DATABASE_URL", ()), ("FARCALL_TICKET_KEY", ()), ("", ("--port", "x"))]
)
def test_a_wrong_setting_ends_the_process_with_a_message(missing: str, arguments: tuple[str, ...]) -> None:
    environ = {
        "FARCALL_DATABASE_URL": "postgresql://unused@127.0.0.1:1/none",
        "FARCALL_QUEUE_URL": "redis://127.0.0.1:1/0",
        "FARCALL_BLOB_BUCKET": "bucket",
        "FARCALL_TICKET_KEY": "x" * 32,
    }
    environ.pop(missing, None)
    path = {name: value for name, value in os.environ.items() if not name.startswith("FARCALL_")}
    command = [sys.executable, "-m", "farcall_forwarder", *arguments]
    ended = subprocess.run(command, env=path | environ, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode == 2
    assert "CONFIGURATION" in ended.stderr
    assert missing in ended.stderr


# -- bugs --------------------------------------------------------------------------------------------------------------


class BrokenQueue(FakeQueue):
    """A queue with a bug that affects one endpoint."""

    broken_at = ""

    def lease(
        self, wanted: Mapping[str, tuple[int, int, int]], *, lease_s: float
    ) -> Mapping[str, Sequence[LeasedTask] | Fenced | QueueDataLost]:
        if self.broken_at in wanted:
            raise ZeroDivisionError("a bug in a step")
        return super().lease(wanted, lease_s=lease_s)


class DeafQueue(FakeQueue):
    """A queue whose subscriptions have a bug."""

    def listen(self, forwarder_id: str) -> NoReturn:
        raise ZeroDivisionError("a bug in a thread")


def test_a_bug_in_a_step_ends_the_session_of_its_endpoint_and_no_other() -> None:
    queue = BrokenQueue()
    stores = fake_stores(queue=queue)
    cloud = Cloud(stores)
    forwarder = RunningForwarder(stores)
    queue.broken_at, other = cloud.add_endpoint(), cloud.add_endpoint()
    with Agent(cloud, other, forwarder) as served, Agent(cloud, queue.broken_at, forwarder) as agent:
        served.greet(credit=1)
        agent.greet(credit=1)
        agent.hear(wire.Redirect)
        task_ids = cloud.submit_new(other, 1)
        assert [spec.task_id for spec in served.take(1)] == task_ids
    forwarder.kill()


def test_a_bug_in_the_wake_up_thread_ends_the_forwarder() -> None:
    forwarder = RunningForwarder(fake_stores(queue=DeafQueue()))
    forwarder.join()
    assert isinstance(forwarder.error, BaseExceptionGroup)
    assert forwarder.error.subgroup(ZeroDivisionError)
