"""What a task may use: the decision, and the measuring."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farcall_common.task_options import TaskOptions
from farcall_common.wire import TaskSpec, TaskState
from farcall_endpoint.agent.core.agent import AgentCore
from farcall_endpoint.agent.core.scheduling import round_robin
from farcall_endpoint.agent.shell.fleet import NO_LIMITS
from farcall_endpoint.contracts.agent_manager import Limits, TaskOrder
from farcall_endpoint.contracts.prefetch import PrefetchPolicy
from farcall_endpoint.host.isolation import bubblewrap
from farcall_endpoint.host.memory_files import Mounts, held
from farcall_endpoint.manager.core.limits import OWN_BYTES, TaskUse, breach, is_limited, start_bytes
from farcall_endpoint.manager.shell.processes import MeasuredTask, Measuring, ShareLimit, output_bytes
from tests.support.agent import CoreDriver
from tests.support.endpoint.measuring import use_of
from tests.support.ordinary_user import as_ordinary_user

MIB = 2**20


def order(*, memory_bytes: int | None = None, max_output_bytes: int | None = None, submitter: str = "") -> TaskOrder:
    options = TaskOptions(memory_bytes=memory_bytes, max_output_bytes=max_output_bytes)
    return TaskOrder("t", 1, "h", 0, options, submitter=submitter)


def test_only_tasks_with_limits_are_measured() -> None:
    assert not is_limited(order(), processes=5)
    assert not is_limited(order(submitter="s"), processes=0)
    assert is_limited(order(submitter="s"), processes=5)
    assert is_limited(order(memory_bytes=1), processes=0)
    assert is_limited(order(max_output_bytes=1), processes=0)


@pytest.mark.parametrize(
    ("memory_bytes", "output", "code"),
    [(100, 10, None), (101, 10, "MEMORY_EXCEEDED"), (100, 11, "OUTPUT_EXCEEDED"), (101, 11, "MEMORY_EXCEEDED")],
)
def test_limit_itself_may_be_used(memory_bytes: int, output: int, code: str | None) -> None:
    limited = order(memory_bytes=100, max_output_bytes=10)
    record = breach(limited, TaskUse(60, memory_bytes - 60), output_bytes=output, processes=0)
    assert (record.code if record else None) == code


@pytest.mark.parametrize("wanted", [None, 50, 200])
def test_task_limit_cannot_exceed_the_endpoint_limit(wanted: int | None) -> None:
    asked = TaskOptions(
        walltime_s=wanted, memory_bytes=wanted, max_output_bytes=wanted, idempotent=False, keep_output=True
    )
    limit = 50 if wanted == 50 else 100
    limited = Limits(walltime_s=100, memory_bytes=100, output_bytes=100).applied_to(asked)
    assert limited == TaskOptions(
        walltime_s=limit, memory_bytes=limit, max_output_bytes=limit, idempotent=False, keep_output=True
    )
    assert NO_LIMITS.applied_to(asked) == asked


def test_unlimited_use_is_no_breach() -> None:
    use = TaskUse(2**60, 2**60, processes=10**6)
    assert breach(order(), use, output_bytes=2**60, processes=5) is None
    assert breach(order(submitter="s"), use, output_bytes=2**60, processes=0) is None


def test_process_limit_is_for_other_submitters_than_the_owner() -> None:
    assert breach(order(submitter="s"), TaskUse(processes=5), output_bytes=0, processes=5) is None
    record = breach(order(submitter="s"), TaskUse(processes=6), output_bytes=0, processes=5)
    assert record is not None
    assert record.code == "PROCESSES_EXCEEDED"
    assert "5" in record.message
    assert "engine.limits.processes" in (record.hint or "")


def memory_of(task: MeasuredTask) -> int:
    use = use_of(task)
    return use.resident_bytes + use.file_bytes


@contextlib.contextmanager
def running(program: str) -> Iterator[int]:
    """The process of a Python program that has run, and waits."""
    program = f"import fcntl, mmap, os, sys, tempfile, threading\n{program}\nprint(flush=True)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"\n"
        yield child.pid
        child.communicate()


def limited_to(mebibytes: int, pid: int, *, held_bytes: int = 0, files: dict[str, int] | None = None) -> MeasuredTask:
    return MeasuredTask(
        root=pid, memory_bytes=mebibytes * MIB, held_bytes={pid: held_bytes}, held_file_bytes=files or {}
    )


def test_a_start_has_as_much_memory_as_a_task_and_what_python_takes() -> None:
    most_bytes = start_bytes(None, 2 * OWN_BYTES, OWN_BYTES)
    assert most_bytes == 2 * OWN_BYTES
    assert start_bytes(None, None) is None
    uses = [TaskUse(resident_bytes=OWN_BYTES, file_bytes=more_bytes) for more_bytes in (OWN_BYTES, OWN_BYTES + 1)]
    records = [breach(None, use, output_bytes=0, processes=0, most_start_bytes=most_bytes) for use in uses]
    assert [record and record.code for record in records] == [None, "MEMORY_EXCEEDED"]


def test_what_computes_outside_of_tasks_counts_by_submitter() -> None:
    limit = ShareLimit(4.0)
    many = {"eve": dict.fromkeys(range(3), 0.06) | {3: 0.0}, "ada": {4: 0.09}, "bob": {5: 0.0, 6: 0.3}}
    assert limit.excess(many, now=0.0) == []
    assert limit.excess({**many, "bob": {5: 0.0, 6: 0.0}}, now=3.0) == []
    assert limit.excess(many, now=4.0) == [0, 1, 2], "no one of them uses a tenth of a processor; bob has begun again"
    assert sorted(limit.excess(many, now=8.0)) == [0, 1, 2, 6]


def test_memory_counts_descendants_to_each_of_their_ancestors() -> None:
    with running("data = bytearray(64 * 2**20)") as pid:
        assert 64 * MIB < memory_of(limited_to(2**40, pid)) < memory_of(limited_to(2**40, os.getpid()))
    assert use_of(limited_to(2**40, 2**22 + 1)) == TaskUse()


HOLDING = "data = bytearray(b'x') * (64 * 2**20)\n"
FORK = """
for _ in range(3):
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
"""


def test_pages_that_forked_processes_share_count_once() -> None:
    with running(HOLDING + FORK) as pid:
        assert 60 * MIB < memory_of(limited_to(100, pid)) < 100 * MIB


def test_memory_held_before_the_task_does_not_count() -> None:
    for program, most in ((HOLDING, 30), (HOLDING + FORK, 40)):
        with running(program) as pid:
            assert memory_of(limited_to(1, pid, held_bytes=60 * MIB)) < most * MIB


def test_memory_freed_and_allocated_again_counts() -> None:
    with running(HOLDING) as pid:
        task = limited_to(1, pid, held_bytes=2**40)
        assert memory_of(task) == 0
    assert 64 * MIB < task.held_bytes[pid] < 2**30


BASE = 30
"""Mebibytes that Python takes itself, at most."""
MEMFD = "file = os.memfd_create('x'); os.truncate(file, 2**30); os.pwrite(file, b'x' * (64 * 2**20), 0)\n"
MAPPED = "memory = mmap.mmap(file, 64 * 2**20, flags=mmap.{}); memory[:] = b'y' * len(memory)\n"


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(MEMFD, id="memory file"),
        pytest.param(MEMFD + FORK, id="inherited"),
        pytest.param(MEMFD + "os.dup(file)", id="open twice"),
        pytest.param(MEMFD + MAPPED.format("MAP_SHARED"), id="mapped"),
        pytest.param(MEMFD + MAPPED.format("MAP_SHARED") + FORK, id="mapped and inherited"),
        pytest.param(MEMFD + MAPPED.format("MAP_SHARED") + "os.close(file)", id="mapped and closed"),
        pytest.param("memory = mmap.mmap(-1, 64 * 2**20); memory[:] = b'y' * len(memory)\n" + FORK, id="shared"),
        pytest.param(
            "file = tempfile.TemporaryFile(dir='/dev/shm'); file.write(b'x' * (64 * 2**20)); file.flush()", id="deleted"
        ),
    ],
)
def test_files_in_memory_count_once(program: str) -> None:
    with running(program) as pid:
        assert 64 * MIB <= memory_of(limited_to(1, pid)) < (64 + BASE) * MIB
        assert memory_of(limited_to(2**40, pid)) >= 64 * MIB


def test_changed_copies_of_a_file_in_memory_count_besides_the_file() -> None:
    with running(MEMFD + MAPPED.format("MAP_PRIVATE")) as pid:
        assert 128 * MIB <= memory_of(limited_to(1, pid)) < (128 + BASE) * MIB


def test_mapped_file_with_a_path_counts_as_far_as_it_is_used() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(b"x" * (64 * MIB))
        file.flush()
        program = f"memory = mmap.mmap(os.open({file.name!r}, os.O_RDWR), 64 * 2**20); memory[:8 * 2**20]"
        with running(program) as pid:
            assert 8 * MIB < memory_of(limited_to(1, pid)) < (8 + BASE) * MIB


def test_files_on_disk_do_not_count() -> None:
    with running("file = tempfile.TemporaryFile(dir='/var/tmp'); file.write(b'x' * (64 * 2**20)); file.flush()") as pid:
        assert memory_of(limited_to(1, pid)) < BASE * MIB


def test_files_in_memory_that_were_held_before_the_task_do_not_count() -> None:
    with running(MEMFD) as pid:
        files = held([pid], Mounts.of(pid))
        assert memory_of(limited_to(1, pid, files=files)) < BASE * MIB
        assert memory_of(limited_to(1, pid, files=dict.fromkeys(files, 0))) > 64 * MIB
    with running("") as pid:
        task = limited_to(1, pid, files=files)
        use_of(task)
    assert not any(task.held_file_bytes.values()), "what was freed counts again"


def test_threads_count_as_processes_and_end_the_measurement_early() -> None:
    with running(
        "for _ in range(20): threading.Thread(target=threading.Event().wait, daemon=True).start()\n" + FORK
    ) as pid:
        assert use_of(MeasuredTask(root=pid, processes=24)) == TaskUse(processes=24)
        assert use_of(MeasuredTask(root=pid, processes=20, memory_bytes=1)) == TaskUse(processes=21)


def test_files_in_memory_decide_at_the_second_measurement() -> None:
    """A worker holds a large result in such a file until it is sent."""
    for program, before in ((HOLDING, True), (MEMFD, False)):
        with running(program) as pid:
            measuring = Measuring(clock=itertools.count().__next__)
            found = [1 in measuring.turn({1: ("an attempt", lambda: limited_to(60, pid))}) for _ in range(200)]
            first = found.index(True)
            assert found.index(True, first + 1) - first == (first + 1 if before else (first + 1) // 2)


BUBBLEWRAP = """
import subprocess, sys
from farcall_endpoint.host.isolation.bubblewrap import prefix
from farcall_endpoint.manager.shell.processes import MeasuredTask, measure

program = "open('/tmp/x', 'wb').write(b'x' * (64 * 2**20)); open('/dev/shm/y', 'wb').write(b'x' * (8 * 2**20)); " \
    "print(flush=True); import sys; sys.stdin.read()"
readable = ["/usr", "/bin", "/lib", "/lib64", "/etc"]
from pathlib import Path
command = [*prefix(readable=readable, writable=[], directory=Path("/")), "/usr/bin/python3", "-c", program]
with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    child.stdout.readline()
    steps = measure(MeasuredTask(root=child.pid, namespaced=True, memory_bytes=1))
    try:
        while True:
            next(steps)
    except StopIteration as ended:
        print(ended.value.file_bytes)
    child.communicate()
"""


@pytest.mark.skipif(bool(bubblewrap.missing()), reason=bubblewrap.missing())
def test_private_directories_in_memory_count_for_an_ordinary_user() -> None:
    command = as_ordinary_user([sys.executable, "-c", BUBBLEWRAP], reachable=[Path(__file__).parents[2]])
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert 72 * MIB <= int(found.stdout) < 80 * MIB, found.stderr


IDLE = 1000


def test_measuring_many_processes_takes_longer_and_not_more_of_the_time() -> None:
    """Time passes only while tasks are measured, and in one leap to the next turn: no other load is counted."""

    def periods(processes: int) -> tuple[float, float]:
        """Seconds from one measurement to the next, and the share of the time that measuring takes."""
        skipped_s = busy_s = 0.0

        def clock() -> float:
            return time.thread_time() + skipped_s

        ready = f"for _ in range({processes}):\n    if os.fork() == 0:\n        sys.stdin.read(); os._exit(0)\n"
        with running(ready) as pid:
            measuring = Measuring(clock=clock)
            tasks = {1: ("an attempt", lambda: MeasuredTask(root=pid, memory_bytes=1))}
            began_s, ended_at = clock(), list[float]()
            while len(ended_at) < 3:
                before_s = clock()
                found = measuring.turn(tasks)
                busy_s += clock() - before_s
                if found:
                    assert found[1].resident_bytes > MIB
                    ended_at.append(clock())
                skipped_s += max(0.0, measuring.due_at - clock())
            return ended_at[2] - ended_at[1], busy_s / (clock() - began_s)

    few, many = periods(2), periods(IDLE)
    assert few[0] < many[0] / 5
    assert max(few[1], many[1]) < 1 / 18


def test_output_limit_applies_to_the_larger_stream(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "b").write_bytes(b"123")
    descriptors = [os.open(tmp_path / name, os.O_RDONLY) for name in "ab"]
    assert output_bytes(descriptors) == 5
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize("value", [0, -1, "2 GB", True, 1.5])
def test_invalid_limit_fails_the_task_with_a_reason(value: object) -> None:
    none = PrefetchPolicy(horizon_s=0.0, limit=0)
    core = CoreDriver(
        AgentCore(endpoint_id="e", policy=round_robin(), slots_hint=1, prefetch=none, window=none, max_window=8)
    )
    core.opened()
    options = TaskOptions(max_attempts=1, resource_specification={"memory_bytes": value})
    core.accept(TaskSpec("t", 1, "f", "h", options, 0), functions=["h"])
    [task] = core.decide(now=0.0).results
    assert task.result is not None
    assert task.result.error is not None
    assert (task.result.state, task.result.error["code"]) == (TaskState.FAILED, "LIMIT_INVALID")
    assert f"memory_bytes as {value!r}" in task.result.error["message"]
