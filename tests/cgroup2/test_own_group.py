"""CPU shares by version 2 below a group that has processes itself, as a manager's own has: none of them is moved."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farcall_endpoint.host.cgroups import Cgroups, Group, Hierarchy, own_hierarchies, writable_hierarchies
from farcall_endpoint.qos.actuators import choose
from farcall_endpoint.qos.cgroup_shares import CgroupShares, group_name
from tests.integration.test_endpoint_cpu_shares import BUSY, is_busy, measured, running
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not os.environ.get("FARCALL_CGROUP2"), reason="make test-cgroup2 runs it")

STARTED = """
import sys, threading
thread = threading.Thread(target=sys.stdin.read)
thread.start()
print("started", flush=True)
"""

MANAGER = """
import os, subprocess, sys
from farcall_endpoint.host import process_reaper
from farcall_endpoint.host.cgroups import Cgroups, writable_hierarchies
from farcall_endpoint.qos.cgroup_shares import CgroupShares
cgroups = Cgroups(writable_hierarchies())
actuator = CgroupShares(cgroups, 2)
worker = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL)
actuator.join(worker.pid, "f")
assert not actuator.problem, actuator.problem
if sys.argv[1] == "reaper":
    command = [sys.executable, "-I", "-S", process_reaper.__file__]
    reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, stdout=subprocess.DEVNULL)
    reaper.stdin.write(b"".join(b"=%s\\n" % bytes(each) for each in cgroups.directories) + b"+%d\\n" % worker.pid)
    reaper.stdin.flush()
print(worker.pid, flush=True)
sys.stdin.read()
actuator.close()
worker.kill()
worker.wait()
cgroups.close()
"""


@pytest.fixture
def own() -> Iterator[Hierarchy]:
    """The group of this process, which is afterwards as it was."""
    [found] = own_hierarchies()
    before = state(found.path)
    yield found
    wait_until(lambda: state(found.path) == before, "the group is as it was")


@contextlib.contextmanager
def started_manager(cleaner: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A manager with a worker, until the end of its standard input."""
    command = [sys.executable, "-c", MANAGER, cleaner]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as manager:
        assert manager.stdout is not None
        yield manager, int(manager.stdout.readline())


def state(path: Path) -> object:
    kind = path / "cgroup.type"
    controllers = (path / "cgroup.subtree_control").read_text() if kind.exists() else ""
    return kind.exists() and kind.read_text(), controllers, sorted(each.name for each in path.glob("farcall-*"))


def weight(own: Hierarchy, pid: int, function: str) -> str:
    """Of the group of a function with this process."""
    path = next(each for each in own.path.glob(f"farcall-*/{group_name(function)}") if pid in processes(each))
    return (path / "cpu.weight").read_text().strip()


def processes(path: Path) -> set[int]:
    return Group("", (path,)).processes()


def test_it_is_the_best_actuator_and_moves_no_process(own: Hierarchy) -> None:
    cgroups = Cgroups(writable_hierarchies())
    before = processes(own.path)
    choice = choose(cgroups)
    assert (choice.actuator.name, choice.reasons["cgroup v2"]) == ("cgroup v2", "")
    actuator = choice.actuator
    with running("sleep", "1000") as joins, running("sleep", "1000") as other:
        actuator.join(joins, "f")
        actuator.set_weights({"f": 400})
        assert (weight(own, joins, "f"), actuator.problem) == ("400", "")
        assert os.getpid() in processes(own.path)
        assert before <= processes(own.path)
        assert other in processes(own.path)
        actuator.forget("f")
        assert joins in processes(own.path)
    actuator.close()
    cgroups.close()


def test_all_threads_of_a_process_join(own: Hierarchy) -> None:
    cgroups = Cgroups(writable_hierarchies())
    actuator = CgroupShares(cgroups, 2)
    command = [sys.executable, "-c", STARTED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        actuator.join(process.pid, "f")
        [group] = cgroups.groups()
        assert group.processes() == {process.pid}
        assert len(group.read("cgroup.threads")[0].split()) == 2
    actuator.close()
    cgroups.close()


def test_functions_get_their_shares_of_a_core(own: Hierarchy) -> None:
    cgroups = Cgroups(writable_hierarchies())
    actuator = CgroupShares(cgroups, 2)
    with running(sys.executable, "-c", BUSY) as one, running(sys.executable, "-c", BUSY) as other:
        actuator.join(one, "f")
        actuator.join(other, "g")
        wait_until(lambda: is_busy(one) and is_busy(other))
        actuator.set_weights({"f": 400, "g": 100})
        ratio = measured(one, other)
        actuator.set_weights({"f": 25})
        back = measured(other, one)
        assert actuator.problem == ""
    actuator.close()
    cgroups.close()
    print(f"\n{ratio:.2f}, reversed {back:.2f}")
    assert 2.5 < ratio < 6
    assert 2.5 < back < 6


def test_managers_share_a_group(own: Hierarchy) -> None:
    cgroups = Cgroups(writable_hierarchies())
    actuator = CgroupShares(cgroups, 2)
    with running("sleep", "1000") as pid, started_manager("alone") as (manager, worker):
        actuator.join(pid, "f")
        actuator.set_weights({"f": 400})
        assert weight(own, worker, "f") == "100"
        assert manager.stdin is not None
        manager.stdin.close()
        assert manager.wait() == 0
        actuator.set_weights({"f": 800})
        assert (weight(own, pid, "f"), actuator.problem) == ("800", "")
        actuator.join(pid, "g")
        assert (weight(own, pid, "g"), actuator.problem) == ("100", "")
    actuator.close()
    cgroups.close()


@pytest.mark.parametrize("cleaner", ["reaper", "next manager"])
def test_nothing_is_left_of_a_manager_that_was_killed(own: Hierarchy, cleaner: str) -> None:
    with started_manager(cleaner) as (manager, worker):
        [left] = own.path.glob(f"farcall-{manager.pid}-*")
        manager.kill()
        manager.wait()
    if cleaner == "reaper":
        wait_until(lambda: not left.exists(), "the groups are removed")
    wait_until(lambda: is_clean(left), "the next manager has removed what was left")
    wait_until(lambda: not Path(f"/proc/{worker}/cmdline").exists() or not Path(f"/proc/{worker}/cmdline").read_text())


def is_clean(left: Path) -> bool:
    Cgroups(writable_hierarchies()).close()
    return not left.exists()


def test_other_groups_of_the_same_group_are_a_reason(own: Hierarchy) -> None:
    if not (own.path / "cgroup.type").exists():
        pytest.skip("the uppermost group may have both")
    other = Group("", (own.path / "other",))
    other.paths[0].mkdir()
    cgroups = Cgroups(writable_hierarchies())
    actuator = CgroupShares(cgroups, 2)
    with running("sleep", "1000") as pid:
        other.join(pid)
        actuator.join(pid, "f")
        assert actuator.problem.endswith("cgroup.type: Operation not supported")
    wait_until(other.remove)
    actuator.close()
    cgroups.close()
