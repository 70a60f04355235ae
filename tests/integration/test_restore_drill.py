"""Restore drill: everything is lost but an older snapshot of the database and the endpoints' own disks.

``docs/operations/backup.md`` has the same drill for AWS. A snapshot is taken of a database at work, as RDS does; later
the cloud tier is killed with ``kill -9``, its database and queue are lost, and the snapshot takes their place. So the
new database is behind what really happened, and the endpoints know more than it does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import farcall
from farcall_common.errors import TaskFailed, TaskLost, TaskUnknown, Unavailable
from farcall_common.wire import TaskState
from farcall_local.control import stop, wipe
from farcall_local.endpoint import LocalEndpoint
from farcall_local.postgres_files import PostgresInstall, database_home, give_to
from farcall_local.tier import LocalTier
from tests.waiting import WAIT_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def count(folder: str, name: str) -> str:
    """Leave a line for each run, and say the name."""
    with open(f"{folder}/{name}.runs", "a") as runs:  # noqa: PTH123 - it travels without this module's imports
        runs.write("run\n")
    return name


def wait_for_gate(folder: str, name: str) -> str:
    """As ``count``, and then wait until its gate is open."""
    import pathlib
    import time

    with open(f"{folder}/{name}.runs", "a") as runs:  # noqa: PTH123
        runs.write("run\n")
    give_up_at = time.monotonic() + 500
    while not pathlib.Path(folder, f"{name}.gate").exists() and time.monotonic() < give_up_at:
        time.sleep(0.05)
    return name


def fail(folder: str, name: str) -> None:
    count(folder, name)
    raise ValueError("as it should")


class Drill:
    """A cloud tier that can be lost and restored, and what happened on its endpoints, which is not lost."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._directory = folder / "tier"
        self._snapshot = folder / "snapshot"
        self._stack = stack
        self.home = folder / "home"
        self.runs = folder / "runs"
        self.runs.mkdir()
        self.start()

    def start(self) -> None:
        self.tier = LocalTier(self._directory, users=("ada",))
        self.tier.__enter__()
        self.client = farcall.Client(self.tier.api_url, self.tier.token)

    def end(self) -> None:
        self.client.close()
        self.tier.__exit__(None, None, None)

    def endpoint(self, name: str) -> LocalEndpoint:
        made = LocalEndpoint(name, home=self.home, environment=self.tier.environment())
        made.configure()
        config = yaml.safe_load((made.directory / "config.yaml").read_text())
        config["engine"]["max_workers_per_node"] = 8
        (made.directory / "config.yaml").write_text(yaml.safe_dump(config))
        return self._stack.enter_context(made)

    def take_snapshot(self) -> None:
        """A copy of the running database, open transactions and all."""
        binary = PostgresInstall.find().binary("pg_basebackup")
        where: list[str | Path] = ["-d", self.tier.state.database_url, "-D", self._snapshot]
        command = [binary, *where, "--checkpoint=fast", "--wal-method=stream"]
        subprocess.run(command, check=True, timeout=WAIT_S, capture_output=True)

    def lose_everything(self) -> None:
        """kill -9 of every part, the database's disk is gone, and the queue was in memory only."""
        self.client.close()
        supervisor = self.tier.state.supervisor_pid
        os.kill(supervisor, signal.SIGKILL)  # and the kernel ends its children
        self.tier.__exit__(None, None, None)
        install = PostgresInstall.find()
        data = database_home(self._directory, install) / "data"
        wait_until(lambda: not _runs_in(data), "PostgreSQL has ended")
        shutil.rmtree(data)

    def restore(self) -> None:
        """Begin with the snapshot, under the old address."""
        install = PostgresInstall.find()
        data = database_home(self._directory, install) / "data"
        shutil.copytree(self._snapshot, data)
        for path in (data, *data.rglob("*")):
            give_to(install.account, path)
        data.chmod(0o700)
        self.start()

    def submit(self, endpoint: LocalEndpoint, function: Callable[..., Any], name: str, **options: Any) -> str:
        batch = self.client.create_batch(**options)
        task_id = batch.add(self.client.register_function(function), (str(self.runs), name))
        self.client.batch_run(endpoint.endpoint_id, batch)
        return task_id

    def open_gates(self, *names: str) -> None:
        for name in names:
            (self.runs / f"{name}.gate").touch()

    def times_run(self, name: str) -> int:
        path = self.runs / f"{name}.runs"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def state(self, task_id: str) -> TaskState | None:
        try:
            return self.client.get_task(task_id).state
        except TaskFailed:
            return TaskState.FAILED

    def noted(self, what: str) -> bool:
        lines = self.tier.log_path("forwarder").read_text().splitlines()
        return any(what in json.loads(line)["message"] for line in lines)


def _runs_in(data: Path) -> bool:
    return any(
        str(data) in process.info["cmdline"] for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"]
    )


@pytest.fixture
def drill(tmp_path: Path) -> Iterator[Drill]:
    with ExitStack() as stack:
        made = Drill(tmp_path, stack)
        stack.callback(wipe, tmp_path / "tier")
        stack.callback(stop, tmp_path / "tier")
        stack.callback(lambda: made.end())
        yield made


def test_a_restored_cloud_tier_recovers_the_tasks_of_its_endpoints(drill: Drill) -> None:
    here, away = drill.endpoint("here"), drill.endpoint("away")
    away.stop()

    # What the snapshot knows: ended tasks of each kind, waiting ones, and some that run.
    ended = drill.submit(here, count, "ended")
    assert drill.client.get_result(ended, wait_s=WAIT_S) == "ended"
    failed = drill.submit(here, fail, "failed")
    wait_until(lambda: drill.state(failed) is TaskState.FAILED, "a task fails")
    cancelled = drill.submit(away, count, "cancelled")
    assert drill.client.cancel(cancelled)["outcome"] == "cancelled"
    waiting = [drill.submit(away, count, f"waiting-{number}") for number in range(20)]
    running, again = (drill.submit(here, wait_for_gate, name) for name in ("running", "again"))
    once, lost = (drill.submit(here, wait_for_gate, name, idempotent=False) for name in ("once", "lost"))
    held = {"running": running, "again": again, "once": once, "lost": lost}
    wait_until(lambda: all(drill.times_run(name) == 1 for name in held), "they run")
    wait_until(lambda: all(drill.state(each) is TaskState.RUNNING for each in held.values()), "the database knows it")
    drill.take_snapshot()

    # What it does not know: ends, tasks and an endpoint that came later.
    drill.open_gates("again", "lost")
    assert [drill.client.get_result(each, wait_s=WAIT_S) for each in (again, lost)] == ["again", "lost"]
    later = drill.submit(here, count, "later")
    assert drill.client.get_result(later, wait_s=WAIT_S) == "later"
    unknown = drill.submit(here, wait_for_gate, "unknown")
    wait_until(lambda: drill.times_run("unknown") == 1, "it runs")
    unregistered = drill.endpoint("unregistered")
    agent = here.agent()
    assert agent is not None

    drill.lose_everything()
    drill.open_gates("running", "once", "unknown")
    drill.restore()

    # Ended tasks are as they were.
    assert drill.client.get_result(ended) == "ended"
    assert drill.state(failed) is TaskState.FAILED
    assert drill.state(cancelled) is TaskState.CANCELLED
    # The endpoint carries on with what it holds: each ran once, and the results arrive.
    assert drill.client.get_result(once, wait_s=WAIT_S) == "once"
    assert drill.client.get_result(running, wait_s=WAIT_S) == "running"
    assert here.agent() == agent
    # Results that the snapshot did not have: what may run again does, what may not ends as lost.
    assert drill.client.get_result(again, wait_s=WAIT_S) == "again"
    with pytest.raises(TaskLost):
        drill.client.get_result(lost, wait_s=WAIT_S)
    # Waiting tasks are queued again and run when their endpoint comes.
    away.start()
    names = [f"waiting-{number}" for number in range(20)]
    assert [drill.client.get_result(task_id, wait_s=WAIT_S) for task_id in waiting] == names
    runs = dict.fromkeys([*names, "ended", "failed", "running", "once", "lost", "later", "unknown"], 1)
    assert {name: drill.times_run(name) for name in runs} == runs
    assert (drill.times_run("again"), drill.times_run("cancelled")) == (2, 0)
    # Tasks that came later are unknown, which is logged; new ones run.
    for task_id in (later, unknown):
        with pytest.raises(TaskUnknown):
            drill.client.get_result(task_id)
    wait_until(lambda: drill.noted("drops tasks that the database does not have"), "the log tells of dropped tasks")
    fresh = drill.submit(here, count, "fresh")
    assert drill.client.get_result(fresh, wait_s=WAIT_S) == "fresh"

    # An endpoint that the snapshot does not know says so, and how to go on.
    wait_until(lambda: unregistered.agent() is None, "the agent of an unknown endpoint ends")
    assert "restored from before it was registered. (Move endpoint.json out" in unregistered.log_path.read_text()
    with pytest.raises(Unavailable, match="ENDPOINT_UNKNOWN"):
        unregistered.start()
    former = unregistered.endpoint_id
    (unregistered.directory / "endpoint.json").unlink()
    unregistered.start()
    assert unregistered.endpoint_id != former
    first = drill.submit(unregistered, count, "first")
    assert drill.client.get_result(first, wait_s=WAIT_S) == "first"
