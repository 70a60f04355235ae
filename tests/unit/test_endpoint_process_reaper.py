"""Process reaper: processes are killed with all their descendants, and no others; old zombies are reaped."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Collection, Iterator

import psutil
import pytest

from farcall_endpoint.host import process_reaper
from farcall_endpoint.host.isolation import landlock
from farcall_endpoint.host.isolation.confinement import SUPERVISED
from farcall_endpoint.host.process_reaper import Process, descendants, read_process
from farcall_endpoint.manager.shell.processes import MeasuredTask
from tests.support.endpoint.endpoint_process import wait_gone
from tests.support.endpoint.measuring import use_of
from tests.waiting import WAIT_S, wait_until

FAMILY = """
import os, sys, time
from farcall_endpoint.host import process_reaper
process_reaper.adopt_orphans()
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
            process_reaper.kill_trees({root.pid})


def process(parent: int, *, start: int = 0) -> Process:
    return Process(parent=parent, start=start, resident_bytes=0, is_zombie=False)


def test_descendants_are_found_by_parents() -> None:
    processes = {pid: process(parent) for pid, parent in [(1, 0), (10, 1), (11, 10), (12, 11), (20, 1), (21, 20)]}
    assert descendants({10}, processes) == {11, 12}
    assert descendants({11, 20}, processes) == {12, 21}
    assert descendants({1}, processes) == {10, 11, 12, 20, 21}
    assert descendants({99}, processes) == set()
    assert process_reaper.children_of(1, processes) == {10, 20}


def test_a_reused_pid_is_not_a_parent() -> None:
    processes = {10: process(11, start=5), 11: process(10, start=7)}
    assert list(process_reaper.ancestry(10, processes)) == [10]
    assert descendants({10}, processes) == {11}


def test_a_process_is_read_from_proc() -> None:
    me = process_reaper.read_process(os.getpid())
    assert me is not None
    assert me.parent == os.getppid()
    assert not me.is_zombie
    assert me.resident_bytes > 2**20
    assert process_reaper.read_processes()[os.getpid()].start == me.start
    assert process_reaper.read_process(2**22 + 1) is None


@pytest.mark.parametrize("lists_children", [True, False])
def test_a_tree_is_killed_and_no_other(lists_children: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if lists_children and not process_reaper._LISTS_CHILDREN:
        pytest.skip("this kernel lists no children")
    monkeypatch.setattr(process_reaper, "_LISTS_CHILDREN", lists_children)
    with family() as (root, descendants), family() as (other, others):
        process_reaper.kill_trees({root.pid})
        assert root.wait(WAIT_S) == -9
        wait_gone(descendants)
        assert other.poll() is None
        assert all(each.is_running() and each.status() == psutil.STATUS_SLEEPING for each in others)


def test_the_reaper_kills_its_list_when_the_pipe_closes() -> None:
    with family() as (listed, descendants), family() as (released, others):
        with subprocess.Popen([sys.executable, "-I", "-S", process_reaper.__file__], stdin=subprocess.PIPE) as process:
            process.communicate(f"+{listed.pid}\n+{released.pid}\n-{released.pid}\n".encode())
        assert process.returncode == 0
        assert listed.wait(WAIT_S) == -9
        wait_gone(descendants)
        assert released.poll() is None
        assert all(each.is_running() for each in others)


RUNS_AWAY = """
import os, signal, sys, time
from farcall_endpoint.host import process_reaper
process_reaper.adopt_orphans()
if sys.argv[1] == "no zombies":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
ends_at = time.monotonic() + 300
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        while time.monotonic() < ends_at:
            if os.fork():
                os._exit(0)
        os._exit(0)
print("ready", flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("leaves", ["zombies", "no zombies"])
def test_processes_that_keep_on_forking_are_ended(leaves: str) -> None:
    command = [sys.executable, "-c", RUNS_AWAY, leaves]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as root,
        subprocess.Popen([sys.executable, "-I", "-S", process_reaper.__file__], stdin=subprocess.PIPE) as reaper,
        family() as (other, others),
    ):
        assert root.stdout is not None
        assert root.stdout.readline() == "ready\n"
        reaper.communicate(f"+{root.pid}\n!{root.pid}\n".encode())
        assert root.wait(WAIT_S) == -9
        assert root.stdout.read() == "", "all that have inherited it have ended"
        assert other.poll() is None
        assert all(each.is_running() for each in others)


WITHOUT_FIRST_THREAD = """
import ctypes, threading, time
memory = bytearray(b"x" * 50_000_000)
def run():
    time.sleep(0.1)
    print("runs", flush=True)
    time.sleep(300)
threading.Thread(target=run, daemon=True).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[__import__("os").uname().machine], 0)
"""


def test_a_process_without_its_first_thread_is_none_that_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", WITHOUT_FIRST_THREAD], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
        found = read_process(process.pid)
        assert found is not None
        assert not found.is_zombie
        assert use_of(MeasuredTask(root=process.pid, memory_bytes=2**40)).resident_bytes > 40_000_000
        process.kill()


GUARDS = """
import os, sys, time
reader, writer = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() > 0:
        os._exit(0)
    try:
        os.kill(int(sys.argv[1]), 9)
    except PermissionError:
        print("refused", flush=True)
    os.write(writer, b".")
    time.sleep(300)
os.wait()
os.read(reader, 1)
if sys.argv[2] == "runs":
    time.sleep(300)
sys.exit(3)
"""


@pytest.mark.skipif(bool(landlock.missing_alone()), reason=landlock.missing_alone())
@pytest.mark.parametrize(("does", "code"), [("runs", 128 + 9), ("ends", 3)])
def test_supervisor_ends_its_domain_and_nothing_else(does: str, code: int) -> None:
    with family() as (other, others):
        command = [*SUPERVISED, sys.executable, "-c", GUARDS, str(other.pid), does]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as guard:
            assert guard.stdout is not None
            assert guard.stdout.readline() == "refused\n"
            if does == "runs":
                guard.terminate()
            assert guard.wait(WAIT_S) == code
            assert guard.stdout.read() == "", "all that have inherited it have ended"
        assert other.poll() is None
        assert all(each.is_running() for each in others)


class Recorded:
    """Records whose end was ordered, in place of ending them."""

    def __init__(self) -> None:
        self.ended: list[int] = []

    def __call__(self, pids: Collection[int]) -> Recorded:
        self.ended += pids
        return self

    def advance(self, _: float) -> bool:
        return True


def test_a_process_that_reuses_a_pid_is_spared() -> None:
    starts: dict[int, list[int | None]] = {41: [100, 100], 42: [100, 200], 43: [100, None], 44: [100, 200]}
    recorded = Recorded()
    orders = process_reaper.Orders(start_of=lambda pid: starts[pid].pop(0), end=recorded)  # type: ignore[arg-type]
    for line in ("+41", "+42", "+43", "+44", "!44"):
        orders.take(line)
    orders.advance()
    assert recorded.ended == []
    starts[44] = [200]
    orders.close()
    assert recorded.ended == [41, 43]


def test_guard_that_does_not_end_is_ended() -> None:
    now = 0.0
    recorded = Recorded()
    orders = process_reaper.Orders(start_of=lambda _: 1, end=recorded, clock=lambda: now)  # type: ignore[arg-type]
    absent = 2**22 + 1  # no process has this id
    for line in (f"+{absent} guard", f"!{absent}"):
        orders.take(line)
    wait_s = orders.advance()
    assert wait_s is not None
    assert wait_s > 0
    assert recorded.ended == []
    now += wait_s
    orders.advance()
    assert recorded.ended == [absent]


REAPS = """
import os
from farcall_endpoint.host.process_reaper import ZombieReaper

zombies = ZombieReaper()
zombies.reap(now=0.0)  # no children
alive = os.fork()
if alive == 0:
    os.read(os.pipe()[0], 1)
dead = os.fork()
if dead == 0:
    os._exit(3)
os.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT)

zombies.reap(now=60.0)  # sees it for the first time
zombies.reap(now=119.0)  # too early to look
assert os.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT | os.WNOHANG).si_status == 3

zombies.reap(now=120.0)
try:
    os.waitpid(dead, os.WNOHANG)
except ChildProcessError:
    print("reaped")
assert os.waitpid(alive, os.WNOHANG) == (0, 0)
os.kill(alive, 9)
assert os.waitpid(alive, 0)[1] == 9
zombies.reap(now=180.0)
"""


def test_zombies_are_reaped_after_a_minute() -> None:
    done = subprocess.run([sys.executable, "-c", REAPS], capture_output=True, text=True, timeout=WAIT_S)
    assert (done.stdout, done.stderr, done.returncode) == ("reaped\n", "", 0)
