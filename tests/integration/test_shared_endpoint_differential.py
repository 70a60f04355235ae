"""The same programs of two submitters, one alone at an endpoint and one beside an attacker: what they get is equal."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable
from typing import Any

from tests.support.endpoint import EndpointProcess, FakeCloud
from tests.support.endpoint.levels import ATTACKER, LEVELS, VICTIM, endpoint_at_each_level
from tests.waiting import wait_until

UNDISTURBED = "018f0000-0000-7000-8000-00000000000c"
CPU_FACTOR = 4.0
"""Processor time of the same work, with other processes on all processors. Wall time may have any factor."""
ROUNDING_S = 0.2

endpoint = endpoint_at_each_level(workers=2, levels=LEVELS[2:])
"""Below these levels an attacker may end processes of others, as docs/security/sharing.md says."""


# -- programs ----------------------------------------------------------------------------------------------------------


def compute() -> str:
    import hashlib

    digest = hashlib.sha256()
    for _ in range(20):
        digest.update(bytes(10_000_000))
    return digest.hexdigest()


def return_values() -> object:
    return {"text": "ä" * 100, "numbers": [1, 2.5, None, True], "bytes": bytes(range(256)) * 1_000}


def return_much() -> bytes:
    return bytes(range(256)) * 8_000


def raise_an_error() -> None:
    print("before the error")
    raise LookupError("no such key", {"key": 7})


def leave_by_exit() -> None:
    raise SystemExit(3)


def die() -> None:
    import os
    import sys

    print("last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), 9)


def print_lines() -> None:
    import subprocess
    import sys

    for number in range(100):
        print("line", number)
        print("error", number, file=sys.stderr)
    sys.stdout.flush()
    subprocess.run(["echo", "of a program"], check=True)


def directories() -> list[Any]:
    import pathlib

    import farcall

    task = farcall.current()
    found = [pathlib.Path(), task.scratch, task.shared_dir, task.memory_dir]
    return [each for each in found if each is not None]


def write_files() -> int:
    found = directories()
    for place in found:
        (place / "notes").mkdir(exist_ok=True)
        for number in range(20):
            (place / "notes" / f"{number}.txt").write_text(f"note {number}" * 1_000)
    return len(found)


def read_files() -> list[list[tuple[str, int]]]:
    """The scratch directory is another one, and empty."""
    return [
        sorted((str(file.relative_to(place)), len(file.read_text())) for file in place.glob("notes/*.txt"))
        for place in directories()
    ]


def use_processes() -> list[list[int]]:
    import multiprocessing

    found = []
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            found.append(pool.map(abs, range(-20, 20)))
    return found


def use_objects() -> tuple[int, bytes]:
    from farcall import store

    small, large = store.put(list(range(100))), store.put(b"large" * 500_000)
    return sum(small.get()), large.get()[-10:]


def call_a_task() -> int:
    import subprocess
    import sys

    program = "import sys; print(sum(map(int, sys.argv[1:])))"
    return int(subprocess.run([sys.executable, "-c", program, "20", "22"], check=True, capture_output=True).stdout)


def surroundings() -> dict[str, object]:
    """What a program can see of its limits and its environment."""
    import os
    import resource
    import signal

    names = {name for name in dir(resource) if name.startswith("RLIMIT_")}
    names.remove("RLIMIT_NPROC")  # relative to what the account runs when the worker starts
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in sorted(names)}
    mask = os.umask(0)
    os.umask(mask)
    return {
        "variables": sorted(os.environ),
        "limits": limits,
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "policy": os.sched_getscheduler(0),
        "processors": sorted(os.sched_getaffinity(0)),
        "umask": mask,
        "signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }


def take_a_second() -> str:
    import time

    time.sleep(1.0)
    return "in time"


def take_too_long() -> None:
    import time

    time.sleep(1000)


def use_memory(size_bytes: int) -> int:
    import os
    import time

    data = os.urandom(size_bytes)
    time.sleep(0.5 if size_bytes < 100 * 2**20 else 1000)  # until the manager has measured it
    return len(data)


def with_cpu_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """A program that also returns the processor time of its process and of those below it."""

    def measured(*args: Any) -> Any:
        import os

        before = os.times()
        value = function(*args)
        after = os.times()
        return value, sum(after[:4]) - sum(before[:4])

    return measured


MEMORY: dict[str, object] = {"memory_bytes": 200 * 2**20, "max_attempts": 1}
PROGRAMS: list[tuple[Callable[..., Any], tuple[object, ...], dict[str, object]]] = [
    (return_values, (), {}),
    (return_much, (), {}),
    (compute, (), {}),
    (write_files, (), {}),
    (print_lines, (), {"keep_output": True}),
    (read_files, (), {}),
    (raise_an_error, (), {}),
    (leave_by_exit, (), {}),
    (use_processes, (), {}),
    (surroundings, (), {}),
    (use_objects, (), {}),
    (call_a_task, (), {}),
    (take_a_second, (), {"walltime_s": 20.0}),
    (take_too_long, (), {"walltime_s": 1.0}),
    (use_memory, (60 * 2**20,), MEMORY),
    (use_memory, (300 * 2**20,), MEMORY),
    (die, (), {"max_attempts": 1}),
    (return_values, (), {}),
]


# -- the storm: each of these ends by itself ---------------------------------------------------------------------------

STORM_S = 15.0


def fork_without_end() -> None:
    import os
    import time

    ends_at = time.monotonic() + STORM_S
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            while time.monotonic() < ends_at:
                if os.fork():
                    os._exit(0)
            os._exit(0)
    time.sleep(STORM_S)


def start_many_processes() -> None:
    import os
    import time

    for _ in range(200):
        if os.fork() == 0:
            time.sleep(STORM_S)
            os._exit(0)
    time.sleep(STORM_S)


def signal_others(pids: list[int]) -> None:
    import contextlib
    import os
    import resource
    import signal

    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1))
            with contextlib.suppress(OSError):
                os.kill(pid, number)


def flood_the_manager() -> None:
    import gc
    import os
    import time

    from farcall_endpoint.contracts import manager_worker

    [end] = [each for each in gc.get_objects() if isinstance(each, manager_worker.Channel)]
    task_id, ends_at = os.environ["FARCALL_TASK_ID"], time.monotonic() + STORM_S
    for _ in range(2):
        os.fork()
    try:
        for number in itertools.count():
            end.send(manager_worker.Progressed(task_id, number, None, "x" * 30_000))
            if number < 50:  # for more of them it is ended at once
                end.send(manager_worker.BlocksRequest(task_id, number, "", (("x", 0, 2**20),)))
            if time.monotonic() > ends_at:
                break
    finally:
        os._exit(1)


def fill_directories() -> None:
    for place in directories():
        for number in range(1_000):
            (place / f"small-{number}").write_bytes(b"x")
        (place / "large").write_bytes(bytes(20_000_000))


def leave_processes() -> None:
    import os
    import time

    ends_at = time.monotonic() + STORM_S
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            while time.monotonic() < ends_at:
                pass
            os._exit(0)


def leave_threads() -> None:
    import threading
    import time

    def spin(ends_at: float) -> None:
        while time.monotonic() < ends_at:
            pass

    for _ in range(2):
        threading.Thread(target=spin, args=[time.monotonic() + STORM_S], daemon=True).start()


def spin() -> None:
    import os
    import time

    ends_at = time.monotonic() + STORM_S
    os.fork()
    while time.monotonic() < ends_at:
        pass
    os._exit(1)


def print_without_end() -> None:
    import os
    import time

    ends_at = time.monotonic() + STORM_S
    for _ in range(2_000):
        os.write(1, b"x" * 50_000)
        if time.monotonic() > ends_at:
            break


STORMS: list[Callable[..., None]] = [
    fork_without_end,
    leave_threads,
    flood_the_manager,
    signal_others,
    fill_directories,
    start_many_processes,
    leave_processes,
    spin,
    print_without_end,
    die,
]


class Storm:
    """Tasks of the attacker, of which some wait at each time."""

    def __init__(self, endpoint: EndpointProcess) -> None:
        self._endpoint = endpoint
        self._kinds = itertools.cycle(STORMS)
        self._open: dict[str, str] = {}
        self.ended: collections.Counter[str] = collections.Counter()

    def keep_up(self) -> None:
        cloud = self._endpoint.cloud
        for task_id in [each for each in self._open if cloud.has_ended(each)]:
            self.ended[self._open.pop(task_id)] += 1
        while len(self._open) < 4:
            kind = next(self._kinds)
            args = [[each.pid for each in self._endpoint.family()]] if kind is signal_others else []
            task_id = cloud.submit(kind, *args, submitter=ATTACKER, max_attempts=1, walltime_s=1.0)
            self._open[task_id] = kind.__name__

    def has_run(self) -> bool:
        """Whether each attack has been tried."""
        return len(self.ended) == len(STORMS)

    def stop(self) -> None:
        self._endpoint.cloud.cancel(*self._open)
        self._endpoint.cloud.ends(list(self._open))


# -- what is compared --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a submitter gets of a task, without what differs by nature: ids, sizes and times in messages."""

    program: str
    state: str
    value: object
    error: dict[str, object]
    details: dict[str, object]
    attempt: int
    reports: int
    is_charged: bool


NAMED = ("code", "exception_type", "fault", "retryable", "stdout_tail", "stderr_tail", "reasons")


def run(
    cloud: FakeCloud, submitter: str, meanwhile: Callable[[], None] = lambda: None
) -> tuple[list[Outcome], list[float]]:
    """Run all programs one after the other; their outcomes, and the processor time of those that return."""
    outcomes, cpu_s = [], []
    for function, args, options in PROGRAMS:
        task_id = cloud.submit(with_cpu_time(function), *args, submitter=submitter, **options)

        def has_ended(task_id: str = task_id) -> bool:
            meanwhile()
            return cloud.has_ended(task_id)

        wait_until(has_ended)
        ended = cloud.end(task_id)
        spec, value, seconds = ended.spec, ended.value, 0.0
        run_s = -1.0
        if spec.started_at is not None and spec.ended_at is not None:
            run_s = spec.ended_at - spec.started_at
        if value is not None:
            assert isinstance(value, tuple)
            value, seconds = value
            if function is take_a_second:
                assert 0.9 < run_s < 20.0
            if function is compute:
                assert run_s > seconds - ROUNDING_S, "all of it is charged"
        outcomes.append(
            Outcome(
                program=function.__name__,
                state=ended.state,
                value=value,
                error={name: ended.error.get(name) for name in NAMED}
                | {"message": re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}|[\d.]+", "#", ended.error.get("message", ""))},
                details=spec.details,
                attempt=spec.attempt,
                reports=sum(each.task_id == task_id for each in cloud.results),
                is_charged=run_s >= 0.0,
            )
        )
        cpu_s.append(seconds)
    return outcomes, cpu_s


def test_programs_beside_an_attacker_have_the_same_outcome(cloud: FakeCloud, endpoint: EndpointProcess) -> None:
    [manager] = endpoint.managers()
    expected, expected_cpu_s = run(cloud, UNDISTURBED)
    states = collections.Counter(each.state for each in expected)
    codes = [str(each.error["code"]) for each in expected if each.error["code"]]
    assert states == {"success": 13, "failed": 5}
    assert codes == ["TASK_FAILED", "TASK_FAILED", "WALLTIME_EXCEEDED", "MEMORY_EXCEEDED", "WORKER_DIED"]
    storm = Storm(endpoint)
    try:
        while not storm.has_run():
            found, cpu_s = run(cloud, VICTIM, storm.keep_up)
            assert found == expected
            for one, other in zip(cpu_s, expected_cpu_s, strict=True):
                assert one < CPU_FACTOR * other + ROUNDING_S
                assert other < CPU_FACTOR * one + ROUNDING_S
    finally:
        storm.stop()
    assert endpoint.managers() == [manager]
    assert endpoint.agent is not None
    assert endpoint.agent.poll() is None
