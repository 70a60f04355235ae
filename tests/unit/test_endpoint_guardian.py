"""Ending processes with all that descends from them, and nothing else. The processes are real, and all of them ours."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from farcall_endpoint import guardian
from farcall_endpoint.guardian import Process, descendants
from tests.support.endpoint.endpoint_process import wait_gone, wait_until
from tests.waiting import WAIT_S

FAMILY = """
import os, sys, time
from farcall_endpoint import guardian
guardian.adopt_orphans()
if os.fork() == 0:  # a daemon as in the book: its parent has gone, its session is its own
    os.setsid()
    if os.fork() > 0:
        os._exit(0)
    os.execvp("sleep", ["sleep", "1000"])
os.wait()
if os.fork() == 0:
    os.setsid()
    os.execvp("sh", ["sh", "-c", "sleep 1000 & wait"])
print("ready", flush=True)
time.sleep(1000)
"""


@contextlib.contextmanager
def family() -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A process that adopts orphans, and all that descend from it: a daemon, a shell in its own session, its child."""
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as root:
        try:
            assert root.stdout is not None
            assert root.stdout.readline() == "ready\n"
            wait_until(lambda: len(psutil.Process(root.pid).children(recursive=True)) == 3)
            yield root, psutil.Process(root.pid).children(recursive=True)
        finally:
            guardian.end({root.pid})


def process(parent: int, *, start: int = 0) -> Process:
    return Process(parent=parent, start=start, resident_bytes=0, is_zombie=False)


def test_descent_is_by_parents() -> None:
    processes = {pid: process(parent) for pid, parent in [(1, 0), (10, 1), (11, 10), (12, 11), (20, 1), (21, 20)]}
    assert descendants({10}, processes) == {11, 12}
    assert descendants({11, 20}, processes) == {12, 21}
    assert descendants({1}, processes) == {10, 11, 12, 20, 21}
    assert descendants({99}, processes) == set()
    assert guardian.children_of(1, processes) == {10, 20}


def test_a_number_that_was_given_anew_while_we_looked_is_nobodys_parent() -> None:
    processes = {10: process(11, start=5), 11: process(10, start=7)}
    assert list(guardian.line_of(10, processes)) == [10]
    assert descendants({10}, processes) == {11}


def test_what_is_said_of_a_process() -> None:
    me = guardian.read_process(os.getpid())
    assert me is not None
    assert me.parent == os.getppid()
    assert not me.is_zombie
    assert me.resident_bytes > 2**20
    assert guardian.read_processes()[os.getpid()].start == me.start
    assert guardian.read_process(2**22 + 1) is None


def test_the_end_of_a_process_is_that_of_its_family_and_of_nobody_else() -> None:
    with family() as (root, descendants), family() as (other, others):
        guardian.end({root.pid})
        assert root.wait(WAIT_S) == -9
        wait_gone(descendants)
        assert other.poll() is None
        assert all(each.is_running() and each.status() == psutil.STATUS_SLEEPING for each in others)


def test_the_guardian_ends_what_is_left_when_the_pipe_closes() -> None:
    with family() as (guarded, descendants), family() as (released, others):
        with subprocess.Popen([sys.executable, "-I", "-S", guardian.__file__], stdin=subprocess.PIPE) as process:
            process.communicate(f"+{guarded.pid}\n+{released.pid}\n-{released.pid}\n".encode())
        assert process.returncode == 0
        assert guarded.wait(WAIT_S) == -9
        wait_gone(descendants)
        assert released.poll() is None
        assert all(each.is_running() for each in others)


def test_the_guardian_does_not_take_another_process_for_one_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: dict[int, list[int | None]] = {41: [100, 100], 42: [100, 200], 43: [100, None]}
    ended: list[int] = []
    monkeypatch.setattr(guardian, "_start_of", lambda pid: starts[pid].pop(0))
    monkeypatch.setattr(guardian, "end", ended.extend)
    guardian.guard(["+41\n", "+42\n", "+43\n"])
    assert ended == [41, 43]
