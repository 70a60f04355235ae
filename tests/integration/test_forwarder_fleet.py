"""Several forwarders in one deployment, on stores in memory and on the real ones."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest

from farcall_common import wire
from farcall_common.store.settings import Stores
from farcall_common.wire import TaskState
from tests.integration.forwarder_peers import (
    FAST,
    Agent,
    Client,
    Cloud,
    RunningForwarder,
    cloud,
    endpoint_id,
    forwarding,
    stores,
    until,
)
from tests.support.stores import FakeQueue, fake_stores

__all__ = ["cloud", "endpoint_id", "stores"]


@pytest.fixture
def fleet(stores: Stores) -> Iterator[tuple[RunningForwarder, RunningForwarder]]:
    """Two forwarders that know each other."""
    with forwarding(stores) as first, forwarding(stores) as second:
        until(lambda: all(_has_others(forwarder) for forwarder in (first, second)), "they know each other")
        yield first, second


def _has_others(forwarder: RunningForwarder) -> bool:
    shell = forwarder.service._shell
    assert shell is not None
    return shell._core._recorder.share._has_others


# -- pushes ------------------------------------------------------------------------------------------------------------


def test_results_reach_clients_at_another_forwarder(
    cloud: Cloud, fleet: tuple[RunningForwarder, RunningForwarder], endpoint_id: str
) -> None:
    here, there = fleet
    with (
        Agent(cloud, endpoint_id, here) as agent,
        Client(cloud, cloud.owner_id, there) as client,
        Client(cloud, "another owner", there) as stranger,
    ):
        agent.greet(credit=1000)
        assert not client.open("group").resumed
        stranger.open("group")
        task_ids = cloud.submit_new(endpoint_id, 500, task_group_id="group")
        agent.finish(agent.take(500), body=b"from afar")
        found = client.results(500)
        assert set(found) == set(task_ids)
        assert {body for _, body in found.values()} == {b"from afar"}
        assert all(result.timings["recorded_at"] == result.finished_at for result, _ in found.values())
        assert not stranger._unread


def test_a_blob_result_of_another_forwarder_is_pushed_with_its_url(
    cloud: Cloud, fleet: tuple[RunningForwarder, RunningForwarder], endpoint_id: str
) -> None:
    here, there = fleet
    sha256 = "0" * 64
    with Agent(cloud, endpoint_id, here) as agent, Client(cloud, cloud.owner_id, there) as client:
        agent.greet(credit=1)
        client.open("group")
        [task_id] = cloud.submit_new(endpoint_id, 1, task_group_id="group")
        agent.take(1)
        blob = wire.BlobLocation(blob_key=f"{cloud.owner_id}/{sha256}", size_bytes=100_000, sha256=sha256)
        end = wire.ResultSpec(task_id=task_id, attempt=1, state=TaskState.SUCCESS, result_blob=blob)
        agent.say(wire.TaskResults(results=(end,)))
        [(result, body)] = client.results(1).values()
    assert body is None
    assert result.result_blob is not None
    assert result.result_blob.url
    assert sha256 in result.result_blob.url


def test_streams_do_not_resume_over_an_outage_of_the_queue() -> None:
    stores = fake_stores()
    queue = stores.queue
    assert isinstance(queue, FakeQueue)
    cloud = Cloud(stores)
    endpoint_id = cloud.add_endpoint()
    with contextlib.ExitStack() as stack:
        here = stack.enter_context(forwarding(stores))
        there = stack.enter_context(forwarding(stores))
        until(lambda: _has_others(here), "they know each other")
        agent = stack.enter_context(Agent(cloud, endpoint_id, here))
        client = stack.enter_context(Client(cloud, cloud.owner_id, there))
        agent.greet(credit=10)
        before = client.open("group")
        queue.reachable = False
        until(lambda: not queue._listeners[there.service.forwarder_id], "the interruption is noticed")
        queue.reachable = True
        until(lambda: bool(queue._listeners[there.service.forwarder_id]), "the subscription is back")
        client.connect(there)
        assert not client.open("group", cursor=before.cursor).resumed
        task_ids = cloud.submit_new(endpoint_id, 5, task_group_id="group")
        agent.finish(agent.take(5))
        assert set(client.results(5)) == set(task_ids)  # and pushes work again


# -- one agent per endpoint --------------------------------------------------------------------------------------------


def test_a_second_agent_is_refused_at_any_forwarder_while_the_first_is_connected(
    cloud: Cloud, fleet: tuple[RunningForwarder, RunningForwarder], endpoint_id: str
) -> None:
    here, there = fleet
    with Agent(cloud, endpoint_id, here) as first, Agent(cloud, endpoint_id, there) as second:
        first.greet(credit=10)
        for _ in range(3):  # it is still refused, also after an upkeep
            second.connect(there)
            second.say(second.hello())
            refused, _ = second.hear(wire.Refused)
            assert refused.error["code"] == "ENDPOINT_IN_USE"
            assert first.hears_no(wire.Redirect, for_s=FAST.upkeep_s)
        task_ids = cloud.submit_new(endpoint_id, 3)
        first.finish(first.take(3))
        first.until_recorded(task_ids)
        first.say(wire.Goodbye())
        until(lambda: second.is_let_in(there), "the endpoint is free")
        second.say(wire.Credit(tasks=10))
        task_ids = cloud.submit_new(endpoint_id, 3)
        second.finish(second.take(3))
        second.until_recorded(task_ids)


def test_a_second_agent_is_admitted_after_the_claim_of_a_dead_forwarder_expires(
    stores: Stores, cloud: Cloud, endpoint_id: str
) -> None:
    policy = dataclasses.replace(FAST, ownership_ttl_s=2.5)
    doomed = RunningForwarder(stores, policy)
    with (
        forwarding(stores, policy) as heir,
        Agent(cloud, endpoint_id, heir) as second,
        Agent(cloud, endpoint_id, doomed) as first,
    ):
        first.greet(credit=10)
        [once] = cloud.submit_new(endpoint_id, 1, idempotent=False)
        [often] = cloud.submit_new(endpoint_id, 1)
        first.take(2)
        doomed.kill()
        second.say(second.hello())
        refused, _ = second.hear(wire.Refused)
        assert refused.error["code"] == "ENDPOINT_IN_USE"
        until(lambda: second.is_let_in(heir), "the dead forwarder's claim is over")
        second.say(wire.Credit(tasks=10))
        [spec] = second.take(1)
        assert spec.task_id == often
        cloud.until_all([once], TaskState.LOST)


def test_an_agent_whose_forwarder_dies_continues_at_another_one_at_once(
    stores: Stores, cloud: Cloud, endpoint_id: str
) -> None:
    doomed = RunningForwarder(stores)
    with forwarding(stores) as heir, Agent(cloud, endpoint_id, doomed) as agent:
        agent.greet(credit=6)
        task_ids = cloud.submit_new(endpoint_id, 3) + cloud.submit_new(endpoint_id, 3, idempotent=False)
        held = agent.take(6)
        doomed.kill()
        more = cloud.submit_new(endpoint_id, 4, idempotent=False)
        agent.connect(heir)
        agent.greet(credit=10)
        assert {spec.task_id for spec in agent.take(4)} == set(more)
        assert agent.hears_no(wire.RunTasks, for_s=2 * FAST.lease_s)  # no task that the agent holds is reaped
        agent.finish(held)
        agent.until_recorded(task_ids)
    assert {cloud.task(task_id).attempt for task_id in task_ids} == {1}
