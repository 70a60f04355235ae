"""CPU shares of functions, on the machine's own kernel: one suite for all actuators that it permits."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from farcall_endpoint.host import process_reaper
from farcall_endpoint.host.cgroups import Cgroups, Group, Hierarchy
from farcall_endpoint.host.process_reaper import tree
from farcall_endpoint.qos.actuators import Actuator, choose
from farcall_endpoint.qos.autogroup import AutogroupShares, read_autogroup
from farcall_endpoint.qos.cgroup_shares import CgroupShares, group_name, hierarchy_of
from tests.support.cgroups import close, made_hierarchies
from tests.support.ordinary_user import as_ordinary_user
from tests.waiting import wait_until

BUSY = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"
HOSTILE = ("", ".", "../../x", "a/b", "\0", "x\n", "ü" * 300, "\ud800", "-r")


@dataclasses.dataclass(frozen=True)
class Backend:
    """An actuator, and what the kernel has for a process: a number that is larger for a larger share."""

    actuator: Actuator
    share: Callable[[int], float]
    ordinary: float
    cgroups: Cgroups | None = None
    is_real: bool = True

    def settle(self) -> None:
        wait_until(lambda: self.actuator.tick() is None, "all changes are made")


@dataclasses.dataclass(frozen=True)
class ImitatedGroup(Group):
    """Files such as a group of version 2 has."""

    def join(self, pid: int) -> None:
        for path in self.paths:
            for group in path.parent.iterdir() if self.name else path.glob("farcall-*/*"):
                if (file := group / "cgroup.procs").exists():
                    file.write_text("".join(f"{each}\n" for each in file.read_text().split() if each != str(pid)))
            with (path / "cgroup.procs").open("a") as joined:
                joined.write(f"{pid}\n")

    def remove(self) -> bool:
        for path in self.paths:
            shutil.rmtree(path, ignore_errors=True)
        return True


class ImitatedCgroups(Cgroups):
    """A directory that looks as a hierarchy of version 2."""

    def enable_cpu(self, hierarchy: Hierarchy) -> None:
        self.create_tree(hierarchy)

    def own(self, hierarchy: Hierarchy) -> Group:
        return ImitatedGroup("", (hierarchy.path,))

    def create(self, name: str, *, within: Hierarchy | None = None) -> Group:
        group = super().create(name, within=within)
        for path in group.paths:
            for file, text in (("cgroup.procs", ""), ("cpu.weight", "100\n")):
                (path / file).write_text(text)
        return ImitatedGroup(group.name, group.paths)


@pytest.fixture
def parents() -> Iterator[list[Hierarchy]]:
    """Groups for this test alone, in which those of an actuator lie, with a process as a manager's own have."""
    with made_hierarchies() as found, subprocess.Popen(["sleep", "1000"]) as manager:
        Group("", tuple(each.path for each in found)).join(manager.pid)
        yield found
        manager.kill()


@pytest.fixture(params=["cgroup v1", "cgroup v2", "cgroup v2, imitated", "autogroup"])
def backend(request: pytest.FixtureRequest, tmp_path: Path, parents: list[Hierarchy]) -> Iterator[Backend]:
    if request.param == "cgroup v2, imitated":
        yield from cgroups_backend(ImitatedCgroups([Hierarchy(tmp_path)]), 2, is_real=False)
        return
    cgroups = Cgroups(parents)
    try:
        if reason := choose(cgroups).reasons[request.param]:
            pytest.skip(f"{request.param}: {reason}")
        if request.param == "autogroup":
            actuator = AutogroupShares()
            yield Backend(actuator, weight_of_nice, 1.0)
            actuator.close()
        else:
            yield from cgroups_backend(cgroups, int(request.param[-1]))
    finally:
        close(cgroups)


def cgroups_backend(cgroups: Cgroups, version: int, *, is_real: bool = True) -> Iterator[Backend]:
    hierarchy = hierarchy_of(cgroups.hierarchies, version)
    assert hierarchy is not None
    ordinary = {1: 1024.0, 2: 100.0}[version]
    file = {1: "cpu.shares", 2: "cpu.weight"}[version]

    def share(pid: int) -> float:
        for path in cgroups.tree(hierarchy).paths[0].iterdir():
            if path.is_dir() and pid in Group("", (path,)).processes():
                return float((path / file).read_text())
        return ordinary

    actuator = CgroupShares(cgroups, version)
    yield Backend(actuator, share, ordinary, cgroups, is_real)
    actuator.close()


def weight_of_nice(pid: int) -> float:
    found = read_autogroup(pid)
    assert found is not None
    return 1.25 ** -found[1]


@contextlib.contextmanager
def running(*command: str) -> Iterator[int]:
    """A worker's process: in a session of its own, and killed with its descendants."""
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            yield process.pid
        finally:
            process_reaper.kill_trees({process.pid})


@pytest.fixture
def pids() -> Iterator[tuple[int, int]]:
    with running("sleep", "1000") as one, running("sleep", "1000") as other:
        yield one, other


def test_weights_reach_the_kernel_and_change(backend: Backend, pids: tuple[int, int]) -> None:
    one, other = pids
    actuator = backend.actuator
    actuator.join(one, "f")
    actuator.set_weights({"f": 400, "g": 100})
    actuator.join(other, "g")
    backend.settle()
    assert backend.share(one) / backend.share(other) == pytest.approx(4, rel=0.1)
    actuator.set_weights({"g": 1600})
    backend.settle()
    assert backend.share(other) / backend.share(one) == pytest.approx(4, rel=0.1)
    actuator.set_weights({"f": 20, "g": 20})
    backend.settle()
    assert backend.share(other) == backend.share(one)
    assert actuator.problem == ""


def test_a_worker_goes_from_function_to_function(backend: Backend, pids: tuple[int, int]) -> None:
    one, other = pids
    actuator = backend.actuator
    actuator.set_weights({"f": 400, "g": 100})
    actuator.join(one, "f")
    actuator.join(other, "g")
    backend.settle()
    actuator.join(one, "g")
    actuator.join(other, "f")
    backend.settle()
    assert backend.share(other) / backend.share(one) == pytest.approx(4, rel=0.1)


def test_descendants_join_also_in_sessions_of_their_own(backend: Backend, pids: tuple[int, int]) -> None:
    actuator = backend.actuator
    with running("sh", "-c", "sleep 1000 & setsid sleep 1000 & wait") as worker:
        wait_until(lambda: len({os.getsid(each) for each in tree(worker)}) == len(tree(worker)) == 2)
        actuator.join(worker, "f")
        actuator.join(pids[0], "g")
        actuator.set_weights({"f": 100, "g": 400})
        backend.settle()
        shares = {backend.share(each) for each in (worker, *tree(worker))}
        assert len(shares) == 1
        assert backend.share(pids[0]) / shares.pop() == pytest.approx(4, rel=0.1)


def test_a_function_that_is_forgotten_has_its_ordinary_share_again(backend: Backend, pids: tuple[int, int]) -> None:
    one, other = pids
    actuator = backend.actuator
    actuator.set_weights({"f": 400, "g": 50})
    actuator.join(one, "f")
    actuator.join(other, "g")
    backend.settle()
    assert backend.share(other) != backend.ordinary
    for _ in range(2):
        actuator.forget("g")
        backend.settle()
        assert backend.share(other) == backend.ordinary
    actuator.join(other, "g")
    backend.settle()
    assert backend.share(other) / backend.share(one) == pytest.approx(1 / 4, rel=0.1)


def test_a_process_that_has_ended_is_left_out(backend: Backend, pids: tuple[int, int]) -> None:
    actuator = backend.actuator
    with subprocess.Popen(["true"], start_new_session=True) as ended:
        pass
    actuator.join(ended.pid, "f")
    with running("sleep", "1000") as ends:
        actuator.join(ends, "f")
    actuator.set_weights({"f": 400})
    actuator.join(pids[0], "g")
    backend.settle()
    actuator.join(ends, "g")
    actuator.set_weights({"f": 400, "g": 100})
    backend.settle()
    assert actuator.problem == ""
    with subprocess.Popen(["true"], start_new_session=True) as zombie:
        wait_until(lambda: psutil.Process(zombie.pid).status() == psutil.STATUS_ZOMBIE)
        actuator.join(zombie.pid, "f")
        backend.settle()
    assert actuator.problem == ""


def test_every_text_can_be_a_function(backend: Backend, pids: tuple[int, int]) -> None:
    one, other = pids
    actuator = backend.actuator
    actuator.join(other, "f")
    for function in HOSTILE:
        actuator.join(one, function)
        actuator.set_weights({function: 400, "f": 100})
        backend.settle()
        assert backend.share(one) / backend.share(other) == pytest.approx(4, rel=0.1)
        actuator.forget(function)
    assert actuator.problem == ""


def test_all_functions_together_weigh_as_much_as_a_process_on_each_cpu(backend: Backend, pids: tuple[int, int]) -> None:
    if backend.cgroups is None or not backend.is_real:
        pytest.skip("no cgroup")
    backend.actuator.join(pids[0], "f")
    [weight] = [
        float(file.read_text())
        for hierarchy in backend.cgroups.hierarchies
        for path in backend.cgroups.tree(hierarchy).paths
        for file in (path / "cpu.shares", path / "cpu.weight")
        if file.exists()
    ]
    assert weight == backend.ordinary * len(os.sched_getaffinity(0))


def test_nothing_is_left_after_close(backend: Backend, pids: tuple[int, int]) -> None:
    actuator = backend.actuator
    for number, pid in enumerate(pids):
        actuator.join(pid, f"f{number}")
    actuator.set_weights({"f0": 400, "f1": 50, "f2": 100})
    actuator.close()
    assert (actuator.problem, actuator.tick()) == ("", None)
    if backend.cgroups is not None:
        assert backend.cgroups.groups() == []
    actuator.close()


@pytest.mark.parametrize("removed", ["group", "tree"])
@pytest.mark.parametrize("noticed_by", ["set_weights", "join"])
def test_a_group_that_was_removed_is_made_again(
    backend: Backend, pids: tuple[int, int], removed: str, noticed_by: str
) -> None:
    if backend.cgroups is None or not backend.is_real:
        pytest.skip("no cgroup")
    actuator, cgroups = backend.actuator, backend.cgroups
    for pid, function in zip(pids, "fg", strict=True):
        actuator.join(pid, function)
    actuator.set_weights({"f": 400, "g": 100, "h": 100})
    hierarchy = next(each for each in cgroups.hierarchies if "cpu" in each.controllers or not each.controllers)
    for group in cgroups.groups():
        for pid in group.processes():
            cgroups.own(hierarchy).join(pid)
        wait_until(group.remove)
    if removed == "tree":
        wait_until(cgroups.tree(hierarchy).remove)
    if noticed_by == "join":
        actuator.join(pids[1], "h")
    actuator.set_weights({"f": 400})
    assert actuator.problem == ""
    assert backend.share(pids[0]) / backend.share(pids[1]) == pytest.approx(4, rel=0.1)


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def is_busy(pid: int) -> bool:
    """Whether one of these processes has its loop ahead of it: it runs on one CPU only."""
    return len(os.sched_getaffinity(pid)) == 1


def measured(one: int, other: int) -> float:
    """The ratio of the CPU seconds of two processes, until they have had one second together."""
    before = cpu_seconds(one), cpu_seconds(other)
    wait_until(lambda: cpu_seconds(one) + cpu_seconds(other) - sum(before) > 1.2)
    return (cpu_seconds(one) - before[0]) / max(cpu_seconds(other) - before[1], 0.001)


def test_functions_get_their_shares_of_a_core(backend: Backend) -> None:
    if not backend.is_real:
        pytest.skip("no kernel divides the CPU by these files")
    actuator = backend.actuator
    with running(sys.executable, "-c", BUSY) as one, running(sys.executable, "-c", BUSY) as other:
        actuator.join(one, "f")
        actuator.join(other, "g")
        actuator.set_weights({"f": 400, "g": 100})
        backend.settle()
        wait_until(lambda: all(map(is_busy, (one, other))))
        ratio = measured(one, other)
        assert 2.5 < ratio < 6
        actuator.set_weights({"f": 25})
        backend.settle()
        back = measured(other, one)
        assert 2.5 < back < 6
        print(f"\n{actuator.name}: {ratio:.2f}, reversed {back:.2f}")


def test_shares_belong_to_functions_and_not_to_processes(backend: Backend) -> None:
    if not backend.is_real:
        pytest.skip("no kernel divides the CPU by these files")
    busy = [sys.executable, "-c", BUSY]
    with running(*busy) as one, running(*busy) as two, running(*busy) as three:
        for pid, function in ((one, "f"), (two, "g"), (three, "g")):
            backend.actuator.join(pid, function)
        backend.settle()
        wait_until(lambda: all(map(is_busy, (one, two, three))))
        before = [cpu_seconds(each) for each in (one, two, three)]
        wait_until(lambda: sum(map(cpu_seconds, (one, two, three))) - sum(before) > 1.5)
        used = [cpu_seconds(each) - start for each, start in zip((one, two, three), before, strict=True)]
        print(f"\n{backend.actuator.name}: {used[0] / sum(used):.2f}")
        assert 0.4 < used[0] / sum(used) < 0.6


UNPRIVILEGED = """
import os, subprocess, sys
assert os.geteuid() != 0
from farcall_endpoint.host.cgroups import Cgroups, writable_hierarchies
from farcall_endpoint.qos.actuators import choose
from farcall_endpoint.qos.autogroup import write_nice
from tests.integration.test_endpoint_cpu_shares import BUSY, is_busy, measured, running, wait_until
cgroups = Cgroups(writable_hierarchies(), remove_leftovers=False)
choice = choose(cgroups)
cgroups.close()
if choice.reasons["autogroup"]:
    print("not permitted:", choice.reasons["autogroup"])
    sys.exit()
assert choice.actuator.name == "autogroup", choice
actuator = choice.actuator
busy = [sys.executable, "-c", BUSY]
with running(*busy) as one, running(*busy) as other:
    actuator.join(one, "f")
    actuator.join(other, "g")
    wait_until(lambda: is_busy(one) and is_busy(other))
    for weights in ({"f": 400, "g": 100}, {"f": 25}):
        actuator.set_weights(weights)
        wait_until(lambda: actuator.tick() is None)
        assert not actuator.problem, actuator.problem
        print(measured(one, other))
    try:
        for number in range(10_000):
            write_nice(one, number % 5)
    except BlockingIOError:
        print("refused")
    actuator.join(os.getpid(), "f")
    actuator.tick()
    print(actuator.problem == f"process {os.getpid()} is not in a session of its own")
"""


def test_without_groups_a_reason_is_given_for_each_version() -> None:
    reasons = choose(Cgroups([])).reasons
    assert list(reasons) == ["cgroup v2", "cgroup v1", "autogroup"]
    assert reasons["cgroup v2"]
    assert reasons["cgroup v1"]


def test_an_ordinary_user_sets_shares_by_autogroups() -> None:
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("no other user can be had here")
    command = as_ordinary_user([sys.executable, "-c", UNPRIVILEGED], reachable=[Path.cwd()])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("not permitted:"):
        pytest.skip(done.stdout)
    [ratio, back, refused, problem] = done.stdout.splitlines()
    assert 2.5 < float(ratio) < 6
    assert 2.5 < 1 / float(back) < 6
    assert (refused, problem) == ("refused", "True")
    print(done.stdout)


OWNER = """
import os, subprocess, sys
from pathlib import Path
from farcall_endpoint.host import process_reaper
from farcall_endpoint.host.cgroups import Cgroups, Hierarchy
from farcall_endpoint.qos.actuators import choose
given = zip(sys.argv[2::2], sys.argv[3::2])
cgroups = Cgroups([Hierarchy(Path(path), tuple(filter(None, names.split(",")))) for path, names in given])
actuator = choose(cgroups).actuator
worker = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL)
actuator.join(worker.pid, "f")
actuator.set_weights({"f": 400})
if sys.argv[1] == "reaper":
    command = [sys.executable, "-I", "-S", process_reaper.__file__]
    reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, stdout=subprocess.DEVNULL)
    reaper.stdin.write(b"".join(b"=%s\\n" % bytes(each) for each in cgroups.directories) + b"+%d\\n" % worker.pid)
    reaper.stdin.flush()
print(actuator.name, worker.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("cleaner", ["reaper", "next manager"])
def test_no_group_is_left_of_an_owner_that_was_killed(parents: list[Hierarchy], cleaner: str) -> None:
    arguments = [text for each in parents for text in (str(each.path), ",".join(each.controllers))]
    command = [sys.executable, "-c", OWNER, cleaner, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        name, _, pid = owner.stdout.readline().rpartition(" ")
        worker = psutil.Process(int(pid))
        if not name.startswith("cgroup"):
            worker.kill()
            owner.kill()
            pytest.skip(f"the best actuator here is {name}")
        left = [path for each in parents for path in each.path.glob(f"farcall-{owner.pid}-*")]
        assert any((path / group_name("f")).is_dir() for path in left)
        owner.send_signal(signal.SIGKILL)

    def is_clean() -> bool:
        if cleaner != "reaper":
            Cgroups(parents).close()
        return not any(path.exists() for path in left)

    wait_until(is_clean, "the groups are removed")
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "the worker has ended")
