"""Progress of running tasks, through the whole system: what a function says, and what its submitter sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import farcall
from farcall_common.errors import TaskFailed
from farcall_local.deployment import Deployment
from farcall_local.endpoint import LocalEndpoint
from tests.waiting import WAIT_S, wait_until


def simulate(path: str) -> int:
    """Say something, wait for the file, and say more than is shown."""
    from farcall import current

    current().progress(3, 10, "wait\x1b[1m\ning")
    while not Path(path).exists():
        time.sleep(0.01)
    for step in range(10_001):
        current().progress(step, 10_000, "simulating")
    return 1


def fail() -> None:
    from farcall import current

    current().progress(1, 2)
    current().progress(1.5, 2)
    raise ValueError("no")


def quiet() -> int:
    return 2


@pytest.mark.smoke
def test_the_submitter_sees_the_progress_of_a_task_that_runs_and_has_ended(
    cloud: Deployment, client: farcall.Client, executor: farcall.Executor, tmp_path: Path
) -> None:
    file = tmp_path / "go"
    try:
        future = executor.submit(simulate, str(file))
        wait_until(lambda: future.progress is not None)
        seen = future.progress
        assert seen is not None
        assert (seen.done, seen.total, seen.text) == (3, 10, "wait [1m ing")
        assert abs(seen.at - time.time()) < WAIT_S
        assert "; progress: 3 of 10 (30 %): wait [1m ing (as of " in str(future.why())
        watch = watched(cloud, tmp_path, future.task_id)
        assert watch.stdout is not None
        assert json.loads(watch.stdout.readline())["progress"]["text"] == "wait [1m ing"
    finally:
        file.touch()
    assert future.result(WAIT_S) == 1
    last = future.progress
    assert last is not None
    assert str(last) == "10000 of 10000 (100 %): simulating"
    assert client.get_batch_result([future.task_id])[future.task_id].progress == last
    lines = [json.loads(line) for line in watch.communicate(timeout=WAIT_S)[0].splitlines()]
    assert lines[-1]["status"] == "success"
    assert lines[-1]["progress"]["done"] == 10_000
    assert watch.returncode == 0


def test_a_task_that_failed_has_its_last_progress_and_a_quiet_one_has_none(executor: farcall.Executor) -> None:
    failed, silent = executor.submit(fail), executor.submit(quiet)
    assert isinstance(failed.exception(WAIT_S), TaskFailed)
    assert failed.progress is not None
    assert (failed.progress.done, failed.progress.total) == (1.5, 2)
    assert silent.result(WAIT_S) == 2
    assert silent.progress is None


def test_of_a_sealed_call_only_its_submitter_reads_the_text(
    cloud: Deployment, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path / "user"))  # it remembers the endpoint's key
    file = tmp_path / "go"
    sealing = LocalEndpoint("sealing", home=tmp_path_factory.mktemp("sealing"), environment=cloud.environment("ada"))
    sealing.configure()
    config = sealing.directory / "config.yaml"
    config.write_text(config.read_text() + "\nsealed: required\n")
    with (
        sealing,
        farcall.Client(cloud.api_url, cloud.tokens["ada"], sealed="required") as client,
        farcall.Executor(sealing.endpoint_id, client=client) as executor,
    ):
        try:
            future = executor.submit(simulate, str(file))
            wait_until(lambda: future.progress is not None)
            seen = future.progress
            assert seen is not None
            assert (seen.done, seen.total, seen.text) == (3, 10, "")
        finally:
            file.touch()
        assert future.result(WAIT_S) == 1
        assert future.progress is not None
        assert future.progress.text == "simulating"
        with watched(cloud, tmp_path, future.task_id) as watch:
            shown = json.loads(watch.communicate(timeout=WAIT_S)[0])
        assert shown["progress"]["done"] == 10_000
        assert "text" not in shown["progress"]


def watched(cloud: Deployment, tmp_path: Path, task_id: str) -> subprocess.Popen[str]:
    """``farcall tasks watch`` with a pipe."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FARCALL_")}
    environ |= {"FARCALL_HOME": str(tmp_path / "home")}
    environ |= {"FARCALL_API_URL": cloud.api_url, "FARCALL_TOKEN": cloud.tokens["ada"]}
    command = [sys.executable, "-c", "from farcall.cli import main; main()", "tasks", "watch", task_id, "--json"]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
