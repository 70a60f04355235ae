"""What a task may use: the decision, and the measuring."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from farcall_common.task_options import TaskOptions
from farcall_common.wire import TaskSpec, TaskState
from farcall_endpoint.agent.core import AgentCore
from farcall_endpoint.agent.fleet import NO_LIMITS
from farcall_endpoint.agent.scheduling import round_robin
from farcall_endpoint.manager.limits import breach, is_limited
from farcall_endpoint.manager.processes import MeasuredTask, memory_of_tasks, output_bytes
from farcall_endpoint.prefetch import PrefetchPolicy
from farcall_endpoint.protocol import Limits, TaskOrder
from tests.support.agent import CoreDriver


def order(*, memory_bytes: int | None = None, max_output_bytes: int | None = None) -> TaskOrder:
    return TaskOrder("t", 1, "h", 0, TaskOptions(memory_bytes=memory_bytes, max_output_bytes=max_output_bytes))


def test_only_tasks_with_limits_are_measured() -> None:
    assert not is_limited(order())
    assert is_limited(order(memory_bytes=1))
    assert is_limited(order(max_output_bytes=1))


@pytest.mark.parametrize(
    ("memory_bytes", "output", "code"),
    [(100, 10, None), (101, 10, "MEMORY_EXCEEDED"), (100, 11, "OUTPUT_EXCEEDED"), (101, 11, "MEMORY_EXCEEDED")],
)
def test_limit_itself_may_be_used(memory_bytes: int, output: int, code: str | None) -> None:
    record = breach(order(memory_bytes=100, max_output_bytes=10), memory_bytes=memory_bytes, output_bytes=output)
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
    assert breach(order(), memory_bytes=2**60, output_bytes=2**60) is None


def test_memory_counts_descendants_to_each_of_their_ancestors() -> None:
    program = "import sys; data = bytearray(64 * 2**20); print('x', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.read(1) == b"x"
        nothing_held = MeasuredTask(2**60, {})
        memory = memory_of_tasks(dict.fromkeys([os.getpid(), child.pid, 2**22 + 1], nothing_held))
        child.communicate()
    assert memory[child.pid] > 64 * 2**20
    assert memory[os.getpid()] > memory[child.pid]
    assert memory[2**22 + 1] == 0


FORKING = """
import os, sys
data = bytearray(b"x") * (64 * 2**20)
for _ in range(3 if len(sys.argv) > 1 else 0):
    if os.fork() == 0:
        break
else:
    print("x", flush=True)
sys.stdin.read()
"""


def measured(task: MeasuredTask, *arguments: str) -> int:
    """What a program of 64 MB is found to use, with three forked children if it has an argument."""
    command = [sys.executable, "-c", FORKING, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.read(1) == b"x"
        if task.held_bytes:
            task.held_bytes[program.pid] = task.held_bytes.pop(0)
        used = memory_of_tasks({program.pid: task})[program.pid]
        program.communicate()
    return used


def test_pages_that_forked_processes_share_count_once() -> None:
    assert 60 * 2**20 < measured(MeasuredTask(100 * 2**20, {}), "fork") < 100 * 2**20


def test_memory_held_before_the_task_does_not_count() -> None:
    assert measured(MeasuredTask(2**20, {0: 60 * 2**20})) < 30 * 2**20
    assert measured(MeasuredTask(2**20, {0: 60 * 2**20}), "fork") < 40 * 2**20


def test_memory_freed_and_allocated_again_counts() -> None:
    held = MeasuredTask(2**20, {0: 2**40})
    assert measured(held) == 0
    [lowered] = held.held_bytes.values()
    assert 64 * 2**20 < lowered < 2**30


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
