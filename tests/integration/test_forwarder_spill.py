"""Spilled arguments: too large for the queue, stored in the database, and sent to the agent."""

from __future__ import annotations

import os

import pytest

from farcall_common import wire
from farcall_common.store.model import MAX_QUEUED_BYTES, QueuedTask
from farcall_common.wire import TaskState
from tests.integration.forwarder_peers import (
    Agent,
    Cloud,
    RunningForwarder,
    cloud,
    endpoint_id,
    forwarder,
    forwarding,
    stores,
)

__all__ = ["cloud", "endpoint_id", "forwarder", "stores"]

SIZES = [0, 1, MAX_QUEUED_BYTES, MAX_QUEUED_BYTES + 1, 64 * 1024]


@pytest.mark.parametrize("idempotent", [True, False])
def test_arguments_of_any_size_arrive(
    idempotent: bool, cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    tasks = [cloud.tasks(endpoint_id, 1, payload=os.urandom(size), idempotent=idempotent)[0] for size in SIZES]
    assert [QueuedTask.of(task).is_spilled for task in tasks] == [False, False, False, True, True]
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.greet(credit=len(tasks))
        task_ids = cloud.submit(tasks)
        specs = agent.take(len(tasks))
        assert agent.payloads == {task.task_id: task.payload for task in tasks}
        agent.finish(specs)
        agent.until_recorded(task_ids)
    cloud.until_all(task_ids, TaskState.SUCCESS)


def test_arguments_arrive_after_a_rebuild_of_the_queue(cloud: Cloud, endpoint_id: str) -> None:
    [task] = cloud.tasks(endpoint_id, 1, payload=os.urandom(64 * 1024))
    cloud.stores.tasks.add_tasks([task])  # and never enqueued: as after a wipe
    with forwarding(cloud.stores) as running, Agent(cloud, endpoint_id, running) as agent:
        agent.greet(credit=1)
        agent.serve(1)
        assert agent.payloads == {task.task_id: task.payload}


def test_a_task_without_a_record_leaves_the_queue(cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str) -> None:
    [phantom] = cloud.tasks(endpoint_id, 1, payload=os.urandom(64 * 1024))
    [real] = cloud.tasks(endpoint_id, 1, payload=b"real")
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.greet(credit=2)
        cloud.enqueue([phantom])
        cloud.submit([real])
        [spec] = agent.take(1)
        assert spec.task_id == real.task_id
        agent.finish([spec])
        agent.until_recorded([real.task_id])
        assert agent.hears_no(wire.RunTasks, for_s=0.5)
