"""Calls of graphs and of running tasks on several managers: an agent, two managers and their workers."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from farcall_common.environments import Environment
from farcall_common.graphs import Graph, Input, Stage, pack_graph
from farcall_common.task_options import Callee, TaskOptions
from farcall_common.wire import TaskState
from tests.support.endpoint import EndpointProcess, running_endpoint
from tests.waiting import wait_until

MIB = 2**20
TWO = {"provider": {"type": "LocalProvider", "init_blocks": 2, "min_blocks": 2, "max_blocks": 2}}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndpointProcess]:
    with running_endpoint(tmp_path_factory.mktemp("home"), workers=1, engine=TWO) as endpoint:
        wait_until(lambda: len(endpoint.workers()) == 2)
        yield endpoint


def submit(endpoint: EndpointProcess, functions: Sequence[Callable[..., Any]], payload: bytes, **options: Any) -> str:
    """Submit a task with callees."""
    cloud = endpoint.cloud
    bodies = [cloud.serializer.pack_function(each) for each in functions]
    callees = tuple(Callee(f"id-{number}", hashlib.sha256(body).hexdigest()) for number, body in enumerate(bodies))
    for body in bodies:
        cloud.submit_raw(body, [])  # the next message has it
    return cloud.submit_raw(bodies[-1], [payload], callees=callees, **options)[0]


def fan_out(endpoint: EndpointProcess, count: int, *args: object, options: TaskOptions | None = None) -> bytes:
    """The first function makes elements, the second one is called with each of them, and these arguments."""
    pack = endpoint.cloud.serializer.pack_call
    stages = (Stage(0, "elements"), Stage(1, "each", (Input(0, (0,), each=True),), 0, options))
    return pack_graph(Graph(stages, (pack([count]), pack([None, *args])), 1))


def numbers(count: int) -> list[int]:
    """So many elements."""
    return list(range(count))


def manager_of(number: int, path: str, others: int) -> int:
    """The process id of the manager. The first calls last until calls of so many managers have begun."""
    import os
    import time
    from pathlib import Path

    manager = os.getppid()
    Path(path, str(manager)).touch()
    while len(list(Path(path).iterdir())) < others:
        time.sleep(0.005)
    return manager


def test_a_fan_out_runs_on_both_managers(endpoint: EndpointProcess, tmp_path: Path) -> None:
    task_id = submit(endpoint, [numbers, manager_of], fan_out(endpoint, 200, str(tmp_path), 2))
    ended = endpoint.cloud.end(task_id)
    assert ended.error is None, ended.error
    managers = ended.value
    assert len(managers) == 200
    assert set(managers) == {each.pid for each in endpoint.managers()}
    [_, calls] = ended.spec.details["stages"]
    assert (calls["state"], calls["calls"], calls["ended"], calls["retries"]) == ("done", 200, 200, 0)
    assert len(calls["workers"]) == 2
    assert calls["node"]
