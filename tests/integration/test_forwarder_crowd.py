"""Many endpoints that connect, work and disconnect at the same moment: they share only round trips."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import pytest

from farcall_common import wire
from farcall_common.store.settings import Stores
from farcall_common.wire import TaskState
from tests.integration.forwarder_peers import Agent, Cloud, RunningForwarder, cloud, forwarder, stores, until
from tests.support.stores import single

__all__ = ["cloud", "forwarder", "stores"]

CROWD = 60


@pytest.fixture
def agents(cloud: Cloud, forwarder: RunningForwarder) -> Iterator[Mapping[str, Agent]]:
    """Connected agents that have not greeted."""
    with contextlib.ExitStack() as stack:
        ids = [cloud.add_endpoint() for _ in range(CROWD)]
        yield {id_: stack.enter_context(Agent(cloud, id_, forwarder)) for id_ in ids}


def online(stores: Stores, endpoint_ids: Mapping[str, Agent]) -> set[str]:
    found = map(stores.endpoints.get_endpoint, endpoint_ids)
    return {endpoint.endpoint_id for endpoint in found if endpoint and endpoint.online}


def test_all_agents_are_admitted_except_those_that_are_refused(
    stores: Stores, cloud: Cloud, agents: Mapping[str, Agent]
) -> None:
    taken, deleted, restored, *_ = agents
    single.claim(stores.queue, taken, "another forwarder", spool_id="another", ttl_s=60)
    stores.endpoints.delete_endpoint(deleted)
    waiting = cloud.submit_new(restored, 3)
    for agent in agents.values():
        agent.say(agent.hello())
    refused, _ = agents[taken].hear(wire.Refused)
    assert refused.error["code"] == "ENDPOINT_IN_USE"
    refused, _ = agents[deleted].hear(wire.Refused)
    assert refused.error["code"] == "ENDPOINT_UNKNOWN"
    there = agents.keys() - {taken, deleted}
    for endpoint_id in there:
        agents[endpoint_id].hear(wire.Welcome)
    until(lambda: online(stores, agents) == there, "the admitted ones are online")
    agents[restored].say(wire.Credit(tasks=5))
    assert [spec.task_id for spec in agents[restored].take(3)] == waiting
    # Half of them leave: exactly these become offline.
    going = sorted(there)[::2]
    for endpoint_id in going:
        agents[endpoint_id].say(wire.Goodbye())
    until(lambda: online(stores, agents) == there - set(going), "the others are offline")


def test_all_agents_finish_their_tasks_and_reconnect_with_held_tasks(
    cloud: Cloud, forwarder: RunningForwarder, agents: Mapping[str, Agent]
) -> None:
    for agent in agents.values():
        agent.say(agent.hello())
    for agent in agents.values():
        agent.hear(wire.Welcome)
        agent.say(wire.Credit(tasks=2))
    task_ids = {endpoint_id: cloud.submit_new(endpoint_id, 2) for endpoint_id in agents}
    specs = {endpoint_id: agent.take(2) for endpoint_id, agent in agents.items()}
    assert {endpoint_id: [spec.task_id for spec in taken] for endpoint_id, taken in specs.items()} == task_ids
    for endpoint_id, agent in agents.items():
        agent.finish(specs[endpoint_id][:1])
        agent.until_recorded(task_ids[endpoint_id][:1])
    for agent in agents.values():
        agent.connect(forwarder)
        agent.say(agent.hello())
    for endpoint_id, agent in agents.items():
        welcome, _ = agent.hear(wire.Welcome)
        assert welcome.forget == ()
        agent.finish(specs[endpoint_id][1:])
        agent.until_recorded(task_ids[endpoint_id][1:])
    cloud.until_all([task_id for ids in task_ids.values() for task_id in ids], TaskState.SUCCESS)
