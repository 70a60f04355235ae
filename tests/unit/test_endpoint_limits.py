"""What a task may use: the decision, and the measuring."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from farcall_common.wire import TaskSpec, TaskState
from farcall_endpoint.agent.core import AgentCore
from farcall_endpoint.agent.scheduling import RoundRobinPolicy
from farcall_endpoint.manager.limits import breach, has_limits, output_bytes
from farcall_endpoint.manager.processes import memory_of_trees
from farcall_endpoint.prefetch import PrefetchPolicy
from farcall_endpoint.protocol import TaskOrder


def order(*, memory_bytes: int | None = None, max_output_bytes: int | None = None) -> TaskOrder:
    return TaskOrder("t", 1, "h", 0, memory_bytes=memory_bytes, max_output_bytes=max_output_bytes)


def test_only_tasks_with_limits_are_measured() -> None:
    assert not has_limits(order())
    assert has_limits(order(memory_bytes=1))
    assert has_limits(order(max_output_bytes=1))


@pytest.mark.parametrize(
    ("memory_bytes", "output", "code"),
    [(100, 10, None), (101, 10, "MEMORY_EXCEEDED"), (100, 11, "OUTPUT_EXCEEDED"), (101, 11, "MEMORY_EXCEEDED")],
)
def test_a_limit_is_what_may_be_used(memory_bytes: int, output: int, code: str | None) -> None:
    record = breach(order(memory_bytes=100, max_output_bytes=10), memory_bytes=memory_bytes, output_bytes=output)
    assert (record.code if record else None) == code


def test_without_a_limit_anything_goes() -> None:
    assert breach(order(), memory_bytes=2**60, output_bytes=2**60) is None


def test_memory_counts_descendants_to_each_of_their_ancestors() -> None:
    program = "import sys; data = bytearray(64 * 2**20); print('x', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.read(1) == b"x"
        memory = memory_of_trees([os.getpid(), child.pid, 2**22 + 1])
        child.communicate()
    assert memory[child.pid] > 64 * 2**20
    assert memory[os.getpid()] > memory[child.pid]
    assert memory[2**22 + 1] == 0


def test_output_is_that_of_the_larger_stream(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "b").write_bytes(b"123")
    descriptors = [os.open(tmp_path / name, os.O_RDONLY) for name in "ab"]
    assert output_bytes(descriptors) == 5
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize("value", [0, -1, "2 GB", True, 1.5])
def test_a_limit_that_is_none_ends_the_task_and_says_so(value: object) -> None:
    none = PrefetchPolicy(horizon_s=0.0, limit=0)
    core = AgentCore(endpoint_id="e", policy=RoundRobinPolicy(), slots_hint=1, prefetch=none, window=none, max_window=8)
    core.opened(())
    core.know("h")
    spec = TaskSpec("t", 1, "f", "h", 0, max_attempts=1, resource_specification={"memory_bytes": value, "num_nodes": 2})
    core.accept(spec, b"", now=0.0)
    [task] = core.decide(now=0.0).results
    assert task.end is not None
    assert task.end.error is not None
    assert (task.end.state, task.end.error["code"]) == (TaskState.FAILED, "LIMIT_INVALID")
