"""Processes of tasks: they end with their worker, however fast they fork, and delay no other submitter."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farcall_common.environments import Environment
from farcall_common.graphs import Graph, Stage, pack_graph
from tests.support.endpoint import EndpointProcess, FakeCloud, running_endpoint
from tests.support.endpoint.levels import ATTACKER, VICTIM, endpoint_at_each_level
from tests.waiting import wait_until

endpoint = endpoint_at_each_level(workers=2)
single = endpoint_at_each_level(workers=1)


def run_away(name: str, fast: int) -> None:
    """Three processes, each of which forks and exits again and again. They end by themselves after five minutes."""
    import os
    import time
    from pathlib import Path

    Path("/proc/self/comm").write_text(name)
    ends_at = time.monotonic() + 300
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            count = 0
            while time.monotonic() < ends_at:
                if os.fork():
                    os._exit(0)
                count += 1
                if count > fast:
                    time.sleep(0.03)
            os._exit(0)
    time.sleep(300)


def answer() -> int:
    return 42


def named(name: str) -> list[int]:
    """The living processes with a name, of whatever namespace."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and (process / "comm").read_text().strip() == name:
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                found += [int(process.name)] if state != "Z" else []
    return found


@pytest.mark.parametrize("fast", [3_000, 10**9], ids=["slower_later", "fast"])
def test_process_that_keeps_on_forking_delays_no_other_submitter(
    cloud: FakeCloud, endpoint: EndpointProcess, fast: int
) -> None:
    [manager] = endpoint.managers()
    name = f"runs{os.getpid()}"
    runaway = cloud.submit(run_away, name, fast, submitter=ATTACKER, walltime_s=2.0)
    wait_until(lambda: named(name))
    answered = 0
    while not cloud.has_ended(runaway):
        assert cloud.end(cloud.submit(answer, submitter=VICTIM)).value == 42
        answered += 1
    assert answered
    assert cloud.end(runaway).error["code"] == "WALLTIME_EXCEEDED"
    wait_until(lambda: not named(name))
    assert endpoint.managers() == [manager], "the agent had no reason to end it"


def leave_behind(name: str, adopted: bool) -> None:
    """A daemon that lives for five minutes. It has begun when this returns."""
    import ctypes
    import os
    import time

    prctl = ctypes.CDLL(None).prctl
    if not adopted:
        prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        prctl(15, name.encode(), 0, 0, 0)  # PR_SET_NAME
        os.write(writer, b"1")
        time.sleep(300)
        os._exit(0)
    os.wait()
    os.read(reader, 1)


@pytest.mark.parametrize("adopted", [True, False], ids=["adopted", "not_adopted"])
def test_what_a_task_of_another_submitter_leaves_behind_ends(single: EndpointProcess, adopted: bool) -> None:
    name = f"stays{os.getpid()}"
    task_id = single.cloud.submit(leave_behind, name, adopted, submitter=ATTACKER)
    assert not single.cloud.end(task_id).error
    wait_until(lambda: not named(name))
    assert single.cloud.end(single.cloud.submit(answer, submitter=ATTACKER)).value == 42


def leave_a_thread(name: str) -> None:
    """A thread that computes for five minutes. It has begun when this returns."""
    import ctypes
    import threading
    import time

    begun = threading.Event()

    def compute() -> None:
        ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)  # PR_SET_NAME
        begun.set()
        end = time.monotonic() + 300
        while time.monotonic() < end:
            pass

    threading.Thread(target=compute, daemon=True).start()
    begun.wait()


def threads_named(name: str) -> list[Path]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            found += [each for each in process.glob("task/*/comm") if each.read_text().strip() == name]
    return found


def test_a_thread_that_a_task_of_another_submitter_leaves_computing_ends(single: EndpointProcess) -> None:
    name = f"computes{os.getpid()}"
    task_id = single.cloud.submit(leave_a_thread, name, submitter=ATTACKER)
    assert not single.cloud.end(task_id).error
    wait_until(lambda: not threads_named(name))
    assert single.cloud.end(single.cloud.submit(answer, submitter=ATTACKER)).value == 42


def test_what_a_task_of_the_owner_leaves_behind_stays_for_the_next_one(single: EndpointProcess) -> None:
    single.cloud.end(single.cloud.submit(start_again))
    name = f"kept{os.getpid()}"
    wait_until(lambda: not single.cloud.end(single.cloud.submit(leave_behind, name, True)).error)
    for _ in range(3):
        single.cloud.end(single.cloud.submit(answer))
    assert named(name)


def start_again() -> None:
    """End the worker, as one that has run tasks of others keeps nothing."""
    import os

    os._exit(1)


def leave_in_a_call(name: str) -> None:
    """Leave a daemon behind in a call of this task."""
    import farcall

    farcall.current().call(leave_behind, name, True)


@pytest.mark.parametrize("nested", [False, True], ids=["stage", "nested"])
def test_what_a_call_leaves_behind_ends(single: EndpointProcess, nested: bool) -> None:
    """A call of a graph, and one of a running task."""
    cloud, name = single.cloud, f"call{os.getpid()}"
    if nested:
        task_id = cloud.submit(leave_in_a_call, name, submitter=ATTACKER)
    else:
        payload = pack_graph(Graph((Stage(0),), (cloud.serializer.pack_call((name, True)),), 0))
        task_id = cloud.submit_graph([leave_behind], payload, submitter=ATTACKER)
    assert not cloud.end(task_id).error
    wait_until(lambda: not named(name))
    assert cloud.end(cloud.submit(answer, submitter=ATTACKER)).value == 42


@pytest.fixture(scope="module")
def prefix() -> Iterator[Path]:
    """A virtual environment that every user can read."""
    with tempfile.TemporaryDirectory(dir="/opt") as name:
        path = Path(name)
        path.chmod(0o755)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", path / "venv"], check=True)
        yield path / "venv"


def parent() -> int:
    import os

    return os.getppid()


def test_what_a_task_in_a_fork_of_a_template_leaves_behind_ends(
    prefix: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Where no level separates submitters: above it, forks for others need more than this user may have."""
    engine = {"isolation": "none", "environments": {"locations": [str(prefix)]}}
    there: dict[str, Any] = {"environment": Environment(type="venv", location=str(prefix)), "submitter": ATTACKER}
    name = f"fork{os.getpid()}"
    with running_endpoint(tmp_path_factory.mktemp("home"), workers=1, engine=engine) as endpoint:
        cloud = endpoint.cloud
        [manager] = endpoint.managers()

        def is_fork() -> bool:
            cloud.end(cloud.submit(start_again, **there))
            return bool(cloud.end(cloud.submit(parent, **there)).value != manager.pid)

        wait_until(is_fork)
        end = cloud.end(cloud.submit(leave_behind, name, True, **there))
        assert not end.error, end.error
        wait_until(lambda: not named(name))
        assert cloud.end(cloud.submit(answer, **there)).value == 42


def start_processes() -> int:
    """Use what starts processes in all ways that Python offers; how often this worker has done so."""
    import builtins
    import multiprocessing
    import subprocess
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing.shared_memory import SharedMemory

    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with context.Pool(2) as pool:
            assert pool.map(abs, [-1, -2]) == [1, 2]
        with ProcessPoolExecutor(2, mp_context=context) as executor:
            assert list(executor.map(abs, [-1, -2])) == [1, 2]
    memory = SharedMemory(create=True, size=10)
    memory.close()
    memory.unlink()
    subprocess.run(["true"], check=True)
    count: int = getattr(builtins, "farcall_test_count", 0) + 1
    builtins.farcall_test_count = count  # type: ignore[attr-defined]
    return count


def test_tasks_that_use_process_pools_share_a_worker(single: EndpointProcess) -> None:
    counts = []
    for _ in range(3):
        ended = single.cloud.end(single.cloud.submit(start_processes, submitter=VICTIM))
        assert not ended.error, ended.error
        counts.append(ended.value)
    assert counts == [1, 2, 3]


def wait_with_a_name(name: str) -> None:
    import time
    from pathlib import Path

    Path("/proc/self/comm").write_text(name)
    time.sleep(1000)


def limit_and_slow(pids: list[int]) -> dict[int, list[str]]:
    """Limit what processes may use so that the kernel ends them or fails their calls, and slow them."""
    import os
    import resource

    done: dict[int, list[str]] = {}
    for pid in pids:
        attempts: dict[str, Callable[[int], object]] = {
            "open files": lambda pid: resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3)),
            "size of files": lambda pid: resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0)),
            "policy": lambda pid: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
            "priority": lambda pid: os.setpriority(os.PRIO_PROCESS, pid, 19),
            "processor time": lambda pid: resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1)),
        }
        for name, attempt in attempts.items():
            try:
                attempt(pid)
            except OSError:
                continue
            done.setdefault(pid, []).append(name)
    return done


def state_of(pid: int) -> tuple[object, ...]:
    """What others may have changed. Reading resource limits by a call would take a right that root may lack."""
    limits = Path(f"/proc/{pid}/limits").read_text()
    return limits, os.sched_getscheduler(pid), os.getpriority(os.PRIO_PROCESS, pid)


def test_no_task_ends_or_slows_processes_of_others_by_their_limits(
    cloud: FakeCloud, endpoint: EndpointProcess, level: str
) -> None:
    name = f"slow{os.getpid()}"
    waiting = cloud.submit(wait_with_a_name, name, submitter=VICTIM, max_attempts=1)
    wait_until(lambda: named(name))
    assert endpoint.agent is not None
    [victim], [manager] = named(name), endpoint.managers()
    separates = level in ("landlock", "bubblewrap")
    targets = [victim, manager.pid, endpoint.agent.pid] if separates else [victim]
    before = {pid: state_of(pid) for pid in targets}
    found = cloud.end(cloud.submit(limit_and_slow, targets, submitter=ATTACKER)).value
    assert found == (
        {} if separates else {victim: ["open files", "size of files", "policy", "priority", "processor time"]}
    )
    assert ({pid: state_of(pid) for pid in targets} == before) == separates
    assert cloud.end(cloud.submit(answer, submitter=ATTACKER)).value == 42
    assert not cloud.has_ended(waiting)
    cloud.cancel(waiting)
    assert cloud.end(waiting).error["code"] == "TASK_CANCELLED"
    assert endpoint.managers() == [manager]
