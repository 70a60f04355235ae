"""Late enqueues: tasks that are enqueued after their end, when the queue has lost the marker of their result.

They come from a process that read them as open from the database, and was delayed since.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from farcall_common import wire
from farcall_common.store.settings import Stores
from farcall_common.wire import TaskState
from tests.integration.forwarder_peers import (
    Agent,
    Cloud,
    RunningForwarder,
    cloud,
    endpoint_id,
    forwarder,
    stores,
    until,
)
from tests.support.stores import FakeQueue

__all__ = ["cloud", "endpoint_id", "forwarder", "stores"]


@pytest.fixture
def forget_results(stores: Stores, request: pytest.FixtureRequest) -> Callable[[], None]:
    """Makes the queue forget recorded results."""
    if isinstance(stores.queue, FakeQueue):
        return stores.queue.forget_results
    url = request.getfixturevalue("valkey").url

    def forget() -> None:
        with redis.Redis.from_url(url) as server:
            assert server.delete(*(key for key in server.scan_iter("t:*") if server.ttl(key) != -1))

    return forget


@pytest.mark.parametrize("is_back", [False, True], ids=["same session", "new session"])
def test_a_recorded_non_idempotent_task_is_not_sent_again(
    is_back: bool,
    cloud: Cloud,
    forwarder: RunningForwarder,
    endpoint_id: str,
    forget_results: Callable[[], None],
) -> None:
    [task] = cloud.tasks(endpoint_id, 1, idempotent=False)
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.greet(credit=5)
        cloud.submit([task])
        agent.finish(agent.take(1), b"the result")
        agent.until_recorded([task.task_id])
        until(lambda: not cloud.stores.queue.outbox(endpoint_id), "the result is marked as recorded")
        forget_results()
        if is_back:
            agent.connect(forwarder)
            agent.greet(credit=5)
        before = cloud.stores.tasks.list_events(task.task_id)
        cloud.enqueue([task])
        # A task submitted after it arrives, so the late one was processed.
        cloud.submit_new(endpoint_id, 1)
        [spec] = agent.take(1)
        assert spec.task_id != task.task_id
        assert agent.hears_no(wire.RunTasks, for_s=0.5)
        until(lambda: _is_gone(cloud, endpoint_id, task.task_id), "the queue has removed it")
    ended = cloud.task(task.task_id)
    assert (ended.state, ended.result) == (TaskState.SUCCESS, b"the result")
    events = cloud.stores.tasks.list_events(task.task_id)
    assert [event.state for event in events if event.state.is_terminal] == [TaskState.SUCCESS]
    assert len(events) <= len(before) + 1  # its dispatch


def test_the_first_result_of_an_idempotent_task_is_kept(
    cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str, forget_results: Callable[[], None]
) -> None:
    [task] = cloud.tasks(endpoint_id, 1)
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.greet(credit=5)
        cloud.submit([task])
        agent.finish(agent.take(1), b"first")
        agent.until_recorded([task.task_id])
        until(lambda: not cloud.stores.queue.outbox(endpoint_id), "the result is marked as recorded")
        forget_results()
        cloud.enqueue([task])
        agent.finish(agent.take(1), b"second")
        agent.until_recorded([task.task_id])
        until(lambda: _is_gone(cloud, endpoint_id, task.task_id), "the queue has removed it")
    ended = cloud.task(task.task_id)
    assert (ended.state, ended.result) == (TaskState.SUCCESS, b"first")


def _is_gone(cloud: Cloud, endpoint_id: str, task_id: str) -> bool:
    place = cloud.stores.queue.position(endpoint_id, task_id)
    return place.state.value in ("", "done") and not cloud.stores.queue.outbox(endpoint_id)
