"""At most once: a task with idempotent=False starts once, also after a power cut and with an old copy of the spool."""

from __future__ import annotations

import collections
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path

import psutil
import pytest

import farcall
from farcall_common.errors import TaskLost, Unavailable
from farcall_local.deployment import Deployment
from farcall_local.endpoint import LocalEndpoint
from tests.waiting import WAIT_S

TASKS = 40


def note_start(path: str, number: int) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{number}\n".encode())
    os.close(descriptor)
    time.sleep(0.1)
    return number


def starts(log: Path) -> collections.Counter[str]:
    """How often each task has started."""
    return collections.Counter(log.read_text().split() if log.exists() else ())


def wait_for_starts(log: Path, count: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while starts(log).total() < count:
        assert time.monotonic() < deadline, f"{starts(log).total()} of {count} tasks have started"
        time.sleep(0.01)


def kill_all(endpoint: LocalEndpoint) -> None:
    """Kill -9 of the agent and of all below it."""
    agent = endpoint.agent()
    assert agent is not None
    processes = [agent, *agent.children(recursive=True)]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # what its parent ended first
            process.kill()
    _, alive = psutil.wait_procs(processes, timeout=WAIT_S)
    assert not alive


def start_again(endpoint: LocalEndpoint) -> bool:
    """Start the endpoint, with an empty spool if the cloud refuses its spool as an old copy; returns whether it did."""
    try:
        endpoint.start()
    except Unavailable as error:
        if "SPOOL_OUTDATED" not in str(error) or "--new-spool" not in str(error):
            raise
        endpoint.command("start", endpoint.name, "--detach", "--new-spool")
        return True
    return False


def expect_ends(futures: Sequence[farcall.ComputeFuture[int]], log: Path) -> collections.Counter[str]:
    """Every task has one end: a result, or that it is lost. No task has started twice."""
    _, open_ = wait(futures, timeout=WAIT_S)
    assert not open_, f"{len(open_)} of {len(futures)} tasks hang"
    errors = [future.exception() for future in futures]
    assert all(error is None or isinstance(error, TaskLost) for error in errors), errors
    twice = {number: count for number, count in starts(log).items() if count > 1}
    assert not twice, f"started more than once: {twice}"
    return collections.Counter("success" if error is None else "lost" for error in errors)


def test_a_power_cut_starts_nothing_twice(
    client: farcall.Client, own_endpoint: Callable[..., LocalEndpoint], tmp_path: Path
) -> None:
    """The last third of what was not yet written into the database is gone, even if the disk promised to keep it."""
    endpoint, log = own_endpoint(), tmp_path / "starts"
    with farcall.Executor(endpoint.endpoint_id, client=client, idempotent=False) as executor:
        futures = [executor.submit(note_start, str(log), number) for number in range(TASKS)]
        wait_for_starts(log, 10)
        kill_all(endpoint)
        wal = endpoint.directory / "spool.sqlite3-wal"
        os.truncate(wal, wal.stat().st_size * 2 // 3)
        start_again(endpoint)
        expect_ends(futures, log)


def test_a_restored_backup_of_the_spool_is_refused(
    client: farcall.Client, own_endpoint: Callable[..., LocalEndpoint], tmp_path: Path
) -> None:
    endpoint, log = own_endpoint(), tmp_path / "starts"
    spool = ("spool.sqlite3", "spool.sqlite3-wal")
    with farcall.Executor(endpoint.endpoint_id, client=client, idempotent=False) as executor:
        futures = [executor.submit(note_start, str(log), number) for number in range(TASKS)]
        wait_for_starts(log, 4)
        kill_all(endpoint)
        backup = tmp_path / "backup"
        backup.mkdir()
        for name in spool:
            shutil.copy(endpoint.directory / name, backup)
        endpoint.start()
        wait_for_starts(log, 12)
        kill_all(endpoint)
        for name in spool:
            shutil.copy(backup / name, endpoint.directory)
        assert start_again(endpoint), "the cloud took an old copy for the spool"
        assert expect_ends(futures, log)["success"] >= 4
        assert executor.submit(note_start, str(log), TASKS).result(WAIT_S) == TASKS


def test_a_copied_directory_is_refused_and_the_original_keeps_running(
    client: farcall.Client, own_endpoint: Callable[..., LocalEndpoint], cloud: Deployment, tmp_path: Path
) -> None:
    endpoint, log = own_endpoint(), tmp_path / "starts"
    twin = LocalEndpoint(endpoint.name, home=tmp_path / "twin", environment=cloud.environment("ada"))
    with farcall.Executor(endpoint.endpoint_id, client=client, idempotent=False) as executor:
        futures = [executor.submit(note_start, str(log), number) for number in range(TASKS)]
        wait_for_starts(log, 4)
        agent = endpoint.agent()
        assert agent is not None
        agent.send_signal(signal.SIGSTOP)
        shutil.copytree(endpoint.directory, twin.directory, ignore=shutil.ignore_patterns("daemon.pid", "*.sock"))
        copied = starts(log).total()
        agent.send_signal(signal.SIGCONT)
        wait_for_starts(log, copied + 6)
        try:
            with pytest.raises(Unavailable, match="SPOOL_OUTDATED"):
                twin.start()
        finally:
            twin.kill()
        assert expect_ends(futures, log) == {"success": TASKS}
