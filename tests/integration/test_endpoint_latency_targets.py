"""Latency targets on an engine and an endpoint, with this machine's own means to share the CPUs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from farcall_common.qos import QoS
from farcall_common.wire import TaskState
from farcall_endpoint import Engine
from farcall_endpoint.config.settings import ActuatorName, QosSettings
from farcall_endpoint.host import process_reaper
from farcall_endpoint.host.cgroups import Cgroups, Group, Hierarchy, writable_hierarchies
from farcall_endpoint.host.process_reaper import tree
from farcall_endpoint.manager.shell.cpu_shares import CpuShares, Pressure
from farcall_endpoint.qos.actuators import Actuator, NoActuator, choose
from farcall_endpoint.qos.cgroup_shares import group_name, hierarchy_of
from farcall_endpoint.qos.controller import BATCH
from tests.support.cgroups import made_hierarchies
from tests.support.endpoint import running_endpoint
from tests.support.ordinary_user import as_ordinary_user
from tests.waiting import wait_until

URGENT = QoS(target_ms=60_000)


@pytest.fixture
def cgroups() -> Iterator[Cgroups]:
    """Groups below some for this test alone."""
    with made_hierarchies() as parents:
        yield Cgroups(parents)


@pytest.fixture
def pids() -> Iterator[tuple[int, int]]:
    command = ["sh", "-c", "sleep 1000 & wait"]
    with subprocess.Popen(command, start_new_session=True) as one, subprocess.Popen(command) as other:
        wait_until(lambda: tree(one.pid))
        yield one.pid, other.pid
        process_reaper.kill_trees({one.pid, other.pid})


class Recorded(NoActuator):
    """An actuator that writes down its orders, and fails at first."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: dict[int, str] = {}
        self.weights: Mapping[str, float] = {}
        self.forgotten: list[str] = []
        self.failures = 1

    def join(self, pid: int, function: str) -> None:
        self.groups[pid] = function

    def set_weights(self, weights: Mapping[str, float], running: Mapping[str, int] | None = None) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("a defect")
        self.weights = dict(weights)

    def forget(self, function: str) -> None:
        self.forgotten.append(function)


def recording(actuator: Recorded) -> CpuShares:
    def make(_: Cgroups, __: ActuatorName) -> Actuator:
        return actuator

    return CpuShares(Cgroups(()), make=make, batch_after_s=0.0)


def test_workers_join_from_the_first_weights_on_also_those_that_run_already(pids: tuple[int, int]) -> None:
    actuator = Recorded()
    shares = recording(actuator)
    shares.add(pids[0], "")
    shares.add(1, "f")
    shares.remove(1)
    assert shares.news() is None
    shares.share({}, {})
    assert actuator.groups == {}
    shares.share({BATCH: 100.0, "f": 200.0}, {})
    wait_until(lambda: actuator.groups == {pids[0]: BATCH})
    shares.add(pids[1], "f")
    wait_until(lambda: actuator.groups == {pids[0]: BATCH, pids[1]: "f"})
    wait_until(lambda: (measured := shares.news()) is not None and measured.actuator == "none")
    shares.share({BATCH: 100.0, "f": 300.0}, {})
    wait_until(lambda: actuator.weights == {BATCH: 100.0, "f": 300.0}, "one that fails is tried again")
    shares.share({BATCH: 100.0}, {})
    wait_until(lambda: actuator.forgotten == ["f"])
    shares.close()


def test_nothing_happens_where_nothing_is_permitted(tmp_path: Path) -> None:
    shares = CpuShares(Cgroups([Hierarchy(tmp_path / "missing")]), actuator="cgroup1")
    shares.add(os.getpid(), "f")
    assert shares.directories == ()
    shares.share({"f": 200.0}, {})
    wait_until(lambda: (measured := shares.news()) is not None and "cgroup v1" in measured.problem)
    shares.close()


def test_processes_get_the_weight_of_their_class(cgroups: Cgroups, pids: tuple[int, int]) -> None:
    if choose(cgroups, "cgroup1").actuator.name == "none":
        pytest.skip("cgroups of version 1 cannot be used here")
    shares = CpuShares(cgroups, actuator="cgroup1", batch_after_s=0.0)
    shares.add(pids[0], "f")
    shares.add(pids[1], "")
    shares.share({BATCH: 100.0, "f": 400.0}, {BATCH: 3, "f": 1})
    hierarchy = hierarchy_of(cgroups.hierarchies, 1)
    assert hierarchy is not None
    root = cgroups.tree(hierarchy).paths[0]

    def group(name: str) -> Group:
        return Group(group_name(name), (root / group_name(name),))

    wait_until(lambda: group("f").processes() == {pids[0], *tree(pids[0])})
    wait_until(lambda: pids[1] in group(BATCH).processes())
    wait_until(lambda: group("f").read("cpu.shares") == ["4096"])
    assert group(BATCH).read("cpu.shares") == ["1024"]
    assert (root / "cpu.shares").read_text().strip() == str(1024 * max(4, len(os.sched_getaffinity(0))))
    process_reaper.kill_trees(set(pids))
    shares.close()
    assert not any(directory.exists() for directory in shares.directories)


def test_pressure_is_the_part_of_the_time_in_which_processes_wait(tmp_path: Path) -> None:
    now, file = [0.0], tmp_path / "cpu"
    pressure = Pressure(file, clock=lambda: now[0])
    assert pressure.measure() == 1.0, "it is not known"
    for total, elapsed_s, expected in ((0, 1.0, 1.0), (250_000, 1.0, 0.25), (9_000_000, 1.0, 1.0), (0, 1.0, 0.0)):
        now[0] += elapsed_s
        file.write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={total}\nfull total=0\n")
        assert pressure.measure() == pytest.approx(expected)
    file.write_text("nonsense")
    assert pressure.measure() == 1.0


def wait_for(path: str) -> int:
    while not Path(path).exists():
        time.sleep(0.01)
    return os.getpid()


def pid() -> int:
    return os.getpid()


def test_a_call_with_a_target_does_not_wait_for_batch_work(tmp_path: Path) -> None:
    released = tmp_path / "released"
    with Engine(max_workers=2) as engine:
        batch = [engine.submit(wait_for, str(released)) for _ in range(4)]
        urgent = engine.options(qos=URGENT)
        try:
            first = {urgent.submit(pid).result(timeout=60) for _ in range(20)}
            assert not any(future.done() for future in batch)
        finally:
            released.touch()
        others = {future.result(timeout=60) for future in batch}
        assert not first & others, "they have workers of their own"


def test_calls_with_targets_survive_crashes_cancels_and_other_policies(tmp_path: Path) -> None:
    settings = QosSettings(policy="threshold", actuator="none", interval_s=0.05)
    with Engine(max_workers=1, qos_settings=settings, max_attempts=2) as engine:
        urgent = engine.options(qos=URGENT)
        crash = urgent.submit(os._exit, 3)
        kept = [urgent.submit(pid) for _ in range(200)]
        assert "exit code 3" in str(crash.exception(timeout=60))
        assert all(future.result(timeout=60) for future in kept)
        waits = [urgent.submit(wait_for, str(tmp_path / "released")) for _ in range(2)]
        try:
            assert waits[1].cancel()
        finally:
            (tmp_path / "released").touch()
        assert waits[0].result(timeout=60)


def is_manager(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "farcall_endpoint.manager" in process.cmdline()
    return False


def test_weights_are_set_and_no_group_is_left_of_a_manager(tmp_path: Path) -> None:
    if not writable_hierarchies():
        pytest.skip("no cgroup is writable here")
    released = tmp_path / "released"
    settings = QosSettings(policy="static", weights={"wait_for": 400}, interval_s=0.05)
    with Engine(max_workers=1, qos_settings=settings) as engine:
        batch = engine.submit(wait_for, str(released))
        late = engine.options(qos=QoS(target_ms=1)).submit(wait_for, str(released))
        own = {each.path for each in writable_hierarchies() if "cpu" in each.controllers}
        managers: set[int] = set()

        def directories() -> list[Path]:
            managers.update(each.pid for each in psutil.Process().children(recursive=True) if is_manager(each))
            return [path for each in own for pid in managers for path in each.glob(f"farcall-{pid}-*")]

        def shares() -> list[int]:
            groups = [path for each in directories() for path in each.glob("function-*/cpu.shares")]
            return sorted(int(path.read_text()) for path in groups)

        try:
            wait_until(lambda: shares() == [1024, 4096])
        finally:
            released.touch()
        assert {batch.result(timeout=60), late.result(timeout=60)}
    wait_until(lambda: not directories())


def compute(until_s: float) -> int:
    while time.process_time() < until_s:
        pass
    return os.getpid()


@pytest.fixture
def one_cpu() -> Iterator[None]:
    """What is started from here on may use one CPU of this machine."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("one_cpu")
def test_neighbours_of_an_endpoint_keep_their_share_however_late_its_calls_are() -> None:
    endless = ["sh", "-c", "while :; do :; done"]
    neighbours = [subprocess.Popen(endless, start_new_session=True) for _ in range(3)]

    def used_s(pids: Iterable[int]) -> float:
        times = [psutil.Process(each).cpu_times() for each in pids]
        return sum(each.user + each.system for each in times)

    try:
        with Engine(max_workers=1, qos_settings=QosSettings(latency_workers=1, interval_s=0.05)) as engine:
            late = engine.options(qos=QoS(target_ms=1))
            [worker] = {late.submit(compute, 0.0).result(timeout=120) for _ in range(10)}
            computing = late.submit(compute, 1e9)
            wait_until(lambda: used_s([worker]) > 0.5)
            before_s = used_s([worker]), used_s(each.pid for each in neighbours)
            wait_until(lambda: used_s(each.pid for each in neighbours) > before_s[1] + 2)
            ours_s, theirs_s = used_s([worker]) - before_s[0], used_s(each.pid for each in neighbours) - before_s[1]
            computing.cancel()
    finally:
        for each in neighbours:
            each.kill()
            each.wait()
    assert 1 / 6 < ours_s / theirs_s < 2 / 3, "one process beside three, each in a session of its own"


AUTOGROUPS = """
import sys, threading, time
from pathlib import Path
from farcall_common.qos import QoS
from farcall_common.wire import TaskState
from farcall_endpoint import Engine
from farcall_endpoint.qos.autogroup import read_autogroup
from farcall_endpoint.config.settings import QosSettings

def wait_for(path):
    import os, time
    Path(path + f".{os.getpid()}").touch()
    while not Path(path).exists():
        time.sleep(0.01)
    return os.getpid()

released = Path(sys.argv[1]) / "released"
settings = QosSettings(policy="static", weights={"wait_for": 400}, actuator="autogroup", interval_s=0.05)
with Engine(max_workers=1, qos_settings=settings) as engine:
    batch = engine.submit(wait_for, str(released))
    late = engine.options(qos=QoS(target_ms=1)).submit(wait_for, str(released))
    until, nices = time.monotonic() + 60, {}
    while time.monotonic() < until and sorted(nices.values())[-1:] < [5]:
        pids = [int(path.suffix[1:]) for path in released.parent.glob("released.*")]
        nices = {pid: found[1] for pid in pids if (found := read_autogroup(pid)) is not None}
        threading.Event().wait(0.05)
    status = engine._loop._core.latency_targets()
    released.touch()
    print(status.get("latency_problem") or nices.get(batch.result(60), 0) - nices.get(late.result(60), 0))
"""


def test_an_ordinary_user_has_weights_by_autogroups(tmp_path: Path) -> None:
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("no other user can be had here")
    tmp_path.chmod(0o777)
    command = as_ordinary_user([sys.executable, "-c", AUTOGROUPS, str(tmp_path)], reachable=[Path.cwd(), tmp_path])
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "HOME": str(tmp_path)}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("autogroup:"):
        pytest.skip(done.stdout)
    assert int(done.stdout) >= 5


def test_calls_with_targets_outlive_their_manager_and_the_agent(tmp_path: Path) -> None:
    released = tmp_path / "released"
    target = {"qos": QoS(target_ms=60_000), "max_attempts": 5}
    with running_endpoint(tmp_path / "home") as endpoint:
        tasks = endpoint.cloud.submit_many(wait_for, [(str(released),)] * 4, **target)
        wait_until(lambda: len(endpoint.workers()) >= 2)
        killed = {manager.pid for manager in endpoint.managers()}
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: any(manager.pid not in killed for manager in endpoint.managers()))
        endpoint.kill_agent()
        endpoint.start()
        released.touch()
        assert {end.state for end in endpoint.cloud.ends(tasks)} == {TaskState.SUCCESS}


def wait() -> None:
    threading.Event().wait()


@pytest.mark.parametrize("killed", [True, False])
def test_no_group_is_left_of_a_manager_of_an_endpoint(tmp_path: Path, killed: bool) -> None:
    if not writable_hierarchies():
        pytest.skip("no cgroup is writable here")
    with running_endpoint(tmp_path / "home") as endpoint:
        endpoint.cloud.submit(wait)
        wait_until(endpoint.workers)  # one that is killed before it has a process reaper leaves groups to the next one
        [manager] = endpoint.managers()

        def groups() -> list[Path]:
            return [path for each in writable_hierarchies() for path in each.path.glob(f"farcall-{manager.pid}-*")]

        wait_until(lambda: len(groups()) == len(writable_hierarchies()))
        for path in groups():  # as when there are latency classes
            group = Group("function-x", (path / "function-x",))
            group.paths[0].mkdir()
            for each in endpoint.workers():
                group.join(each.pid)
        if killed:
            os.kill(manager.pid, signal.SIGKILL)
            wait_until(lambda: not groups())
    wait_until(lambda: not groups())
