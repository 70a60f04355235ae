"""Sessions: authentication, protocol errors, heartbeats, streams, health and drain. Real ZeroMQ, stores in memory."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import itertools
import operator
import os
import time

import httpx
import msgspec
import pytest
import zmq

from farcall_common import wire
from farcall_common.store.model import PeerKey, PeerKind
from farcall_common.store.settings import Stores
from farcall_common.wire import TaskState
from tests.integration.forwarder_peers import (
    FAST,
    HEARTBEAT_S,
    Agent,
    Client,
    Cloud,
    RunningForwarder,
    check,
    cloud,
    counter,
    endpoint_id,
    forwarder,
    forwarding,
    health,
)
from tests.support.stores import FakeQueue, fake_stores
from tests.waiting import WAIT_S, wait_until

__all__ = ["cloud", "endpoint_id", "forwarder"]


@pytest.fixture
def stores() -> Stores:
    return fake_stores()


def refusal(peer: Agent | Client) -> str:
    """The code of the next refusal."""
    refused, _ = peer.hear(wire.Refused)
    assert refused.error["message"]
    return str(refused.error["code"])


# -- keys and tickets --------------------------------------------------------------------------------------------------


def test_an_unknown_key_is_refused_during_the_handshake(
    cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    with Agent(cloud, endpoint_id, forwarder, admitted=False) as unknown_peer:
        unknown_peer.socket.sndtimeo = 300
        with contextlib.suppress(zmq.Again):  # refused already
            unknown_peer.say(unknown_peer.hello())
        wait_until(lambda: health(forwarder)[1]["refused"]["keys"] > 0, "the key is refused")
        assert unknown_peer.hears_no(wire.Message, for_s=0.3)
    assert health(forwarder)[1]["connections"] == 0


def test_a_key_that_only_the_database_knows_may_connect(
    stores: Stores, cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    agent = Agent(cloud, endpoint_id, forwarder, admitted=False)
    stores.endpoints.add_endpoint_key(endpoint_id, agent.key.public_key, at=dt.datetime.now(dt.UTC))
    with agent:
        agent.connect(forwarder)
        agent.open_session()


def test_a_refused_key_is_accepted_after_its_registration(
    stores: Stores, cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    with Agent(cloud, endpoint_id, forwarder, admitted=False) as agent:
        wait_until(lambda: health(forwarder)[1]["refused"]["keys"] > 0, "the key is refused")
        stores.endpoints.add_endpoint_key(endpoint_id, agent.key.public_key, at=dt.datetime.now(dt.UTC))
        stores.queue.admit(agent.key, ttl_s=60)
        retry_timeout_s = itertools.accumulate(itertools.repeat(2.0), operator.mul, initial=0.3)
        wait_until(lambda: _can_open_session(agent, forwarder, within_s=next(retry_timeout_s)), "the key is accepted")


def _can_open_session(agent: Agent, forwarder: RunningForwarder, *, within_s: float) -> bool:
    agent.connect(forwarder)  # ZeroMQ does not reconnect after a refusal
    agent.socket.sndtimeo = 300
    try:
        agent.say(agent.hello())
    except zmq.Again:  # refused already
        return False
    return not agent.hears_no(wire.Welcome, for_s=within_s)


def test_a_key_cannot_claim_another_endpoint(cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str) -> None:
    victim = cloud.add_endpoint()
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.say(agent.hello(endpoint_id=victim))
        assert refusal(agent) == "ENDPOINT_MISMATCH"


def test_a_ticket_must_be_valid_and_belong_to_the_key(
    cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        issue = cloud.stores.tickets.issue
        for ticket in (
            "rubbish",
            issue(agent.key, expires_at=time.time() - 1),
            issue(PeerKey(agent.key.public_key, PeerKind.AGENT, cloud.add_endpoint()), expires_at=time.time() + 60),
            issue(PeerKey("x" * 40, PeerKind.AGENT, endpoint_id), expires_at=time.time() + 60),
            issue(PeerKey(agent.key.public_key, PeerKind.CLIENT, endpoint_id), expires_at=time.time() + 60),
        ):
            agent.connect(forwarder)
            agent.say(agent.hello(ticket=ticket))
            assert refusal(agent) == "TICKET_INVALID"


def test_a_refused_peer_may_send_hello_again_on_the_same_connection(
    cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.say(agent.hello(ticket="rubbish"))
        assert refusal(agent) == "TICKET_INVALID"
        agent.session = wire.Session(wire.Role.AGENT, heartbeat_s=HEARTBEAT_S, now=time.monotonic())
        agent.open_session()


def test_a_routing_id_chosen_by_the_peer_is_not_accepted(
    cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    class Poser(Agent):
        def prepare(self, socket: zmq.Socket[bytes]) -> None:
            socket.routing_id = b"chosen"

    with Poser(cloud, endpoint_id, forwarder) as agent:
        agent.say(agent.hello())
        wait_until(lambda: health(forwarder)[1]["refused"]["routing_ids"] == 1, "the message is dropped")


def test_a_client_cannot_open_an_agent_session(cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        client_key = PeerKey(agent.key.public_key, PeerKind.CLIENT, endpoint_id)
        assert not cloud.stores.queue.admit(client_key, ttl_s=60), "it is the agent's"
        cloud.stores.queue.dismiss([client_key.public_key])
        assert cloud.stores.queue.admit(client_key, ttl_s=60)
        agent.connect(forwarder)
        agent.say(agent.hello())
        assert refusal(agent) == "PROTOCOL_ERROR"


def test_failed_lookups_are_repeated(
    stores: Stores, cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    assert isinstance(stores.queue, FakeQueue)
    with Agent(cloud, endpoint_id, forwarder) as agent:
        stores.queue.reachable = False
        agent.connect(forwarder)
        wait_until(lambda: health(forwarder)[0] == 503, "the forwarder is degraded")
        stores.queue.reachable = True
        agent.open_session()
        wait_until(lambda: health(forwarder)[0] == 200, "the forwarder is healthy again")


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\x01"],
        [b"\x01\xc1"],
        [b"rubbish", b"and more"],
        [os.urandom(1000)],
        [b"\x01" + msgspec.msgpack.encode({"kind": "Unheard"})],
        [b"\x01" + msgspec.msgpack.encode({"kind": "Credit", "tasks": -1})],
        [b"\x01\xdf"],
        [b"\x01" + msgspec.msgpack.encode({"kind": "TaskResults", "results": [{"task_id": "x"}]})],
        [b"\x63" + msgspec.msgpack.encode({"kind": "Heartbeat", "at": 1.0})],
        [b"\x01" + msgspec.msgpack.encode({"kind": "RunTasks", "tasks": []})],
    ],
)
def test_malformed_messages_end_only_their_session(
    frames: list[bytes], cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    other = cloud.add_endpoint()
    with Agent(cloud, endpoint_id, forwarder) as agent, Agent(cloud, other, forwarder) as bystander:
        agent.open_session(credit=1)
        bystander.open_session(credit=1)
        agent.socket.send_multipart(frames)
        assert refusal(agent) in {"FRAME_MALFORMED", "VERSION_UNSUPPORTED", "PROTOCOL_ERROR"}
        for _ in range(10):  # one refusal is enough
            agent.socket.send_multipart(frames)
        [task_id] = cloud.submit_new(other, 1)
        bystander.finish(bystander.take(1))
        bystander.until_recorded([task_id])
        assert agent.hears_no(wire.Message, for_s=0.1)
    assert counter(forwarder, "protocol_errors") == 11


def test_a_message_before_the_hello_is_refused(cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.socket.send_multipart(wire.encode(wire.Envelope(wire.Credit(tasks=10))))
        agent.session.sent(agent.hello(), now=0.0)
        assert refusal(agent) == "PROTOCOL_ERROR"


def test_an_unknown_protocol_version_is_refused(cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.say(agent.hello(protocol_versions=(99,)))
        assert refusal(agent) == "VERSION_UNSUPPORTED"


def test_malformed_ids_are_refused(cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.say(agent.hello(held=(wire.HeldTask(task_id="\0", attempt=1),)))
        assert refusal(agent) == "PROTOCOL_ERROR"


# -- one agent per endpoint --------------------------------------------------------------------------------------------


def test_a_second_agent_is_refused_while_the_first_is_connected(
    cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    with Agent(cloud, endpoint_id, forwarder) as first, Agent(cloud, endpoint_id, forwarder) as second:
        first.open_session(credit=1)
        second.say(second.hello())
        refused, _ = second.hear(wire.Refused)
        assert refused.error["code"] == "ENDPOINT_IN_USE"
        assert refused.error["hint"]
        [task_id] = cloud.submit_new(endpoint_id, 1)
        first.finish(first.take(1))
        first.until_recorded([task_id])


def test_a_second_agent_is_admitted_after_the_firsts_goodbye(
    cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    with Agent(cloud, endpoint_id, forwarder) as first, Agent(cloud, endpoint_id, forwarder) as second:
        first.open_session()
        first.say(wire.Goodbye())
        wait_until(lambda: health(forwarder)[1]["endpoints"] == 0, "the session has ended")
        second.open_session()


def test_a_restarted_agent_takes_over(cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str) -> None:
    with (
        Agent(cloud, endpoint_id, forwarder) as old,
        Agent(cloud, endpoint_id, forwarder, spool_id=old.spool_id) as new,
    ):
        old.open_session(credit=1)
        new.open_session(credit=1)
        assert refusal(old) == "ENDPOINT_TAKEN_OVER"
        [task_id] = cloud.submit_new(endpoint_id, 1)
        new.finish(new.take(1))
        new.until_recorded([task_id])


def test_a_reconnecting_agent_gets_no_taken_over_refusal(
    cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    with (
        Agent(cloud, endpoint_id, forwarder) as old,
        Agent(cloud, endpoint_id, forwarder, spool_id=old.spool_id) as same,
    ):
        same.instance_id = old.instance_id
        old.open_session()
        same.open_session()
        assert old.hears_no(wire.Refused, for_s=0.3)


# -- silence and heartbeats --------------------------------------------------------------------------------------------


def test_heartbeats_keep_a_session_and_silence_ends_it(cloud: Cloud, endpoint_id: str) -> None:
    policy = dataclasses.replace(FAST, min_heartbeat_s=0.7)  # so that this process may pause for two seconds
    with forwarding(cloud.stores, policy) as forwarder, Agent(cloud, endpoint_id, forwarder) as agent:
        assert agent.open_session(heartbeat_s=0.01).heartbeat_s == policy.min_heartbeat_s
        for _ in range(wire.SILENT_PERIODS + 1):
            agent.hear(wire.Heartbeat)
            agent.say(wire.Heartbeat(at=time.time()))
        assert health(forwarder)[1]["endpoints"] == 1
        wait_until(lambda: health(forwarder)[1]["endpoints"] == 0, "silence ends the session")
        assert counter(forwarder, "peers_silent") == 1


# -- streams -----------------------------------------------------------------------------------------------------------


def run_tasks(cloud: Cloud, agent: Agent, group: str, count: int = 1, body: bytes = b"result") -> list[str]:
    """Tasks of a group that run and are recorded."""
    agent.say(wire.Credit(tasks=count))
    task_ids = cloud.submit_new(agent.subject, count, task_group_id=group)
    agent.finish(agent.take(count), body)
    agent.until_recorded(task_ids)
    return task_ids


def test_a_stream_has_only_results_of_its_groups(cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent, Client(cloud, cloud.owner_id, forwarder) as client:
        agent.open_session()
        assert not client.open("mine").resumed
        run_tasks(cloud, agent, "another")
        mine = run_tasks(cloud, agent, "mine")
        assert list(client.results(1)) == mine


def test_a_stream_never_has_another_owners_tasks(cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent, Client(cloud, wire.new_id(), forwarder) as spy:
        agent.open_session()
        spy.open("group")
        run_tasks(cloud, agent, "group")
        assert spy.hears_no(wire.ResultsReady, for_s=0.3)


def test_a_late_subscription_pushes_recent_results(cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent, Client(cloud, cloud.owner_id, forwarder) as client:
        agent.open_session()
        client.open()
        before = run_tasks(cloud, agent, "group")
        client.say(wire.Subscribe(task_group_ids=("group",)))
        assert list(client.results(1)) == before
        after = run_tasks(cloud, agent, "group")
        assert list(client.results(1)) == after


def test_a_broken_stream_resumes_where_it_was(cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent, Client(cloud, cloud.owner_id, forwarder) as client:
        agent.open_session()
        client.open("group")
        run_tasks(cloud, agent, "group")
        client.results(1)
        client.disconnect()
        missed = run_tasks(cloud, agent, "group", 3)
        client.connect(forwarder)
        assert client.open("group", cursor=client.cursor).resumed
        assert sorted(client.results(3)) == missed


@pytest.mark.parametrize("cursor", ["", "rubbish", "another-forwarder:0", "another-forwarder:999999"])
def test_a_foreign_cursor_does_not_resume(cursor: str, cloud: Cloud, forwarder: RunningForwarder) -> None:
    with Client(cloud, cloud.owner_id, forwarder) as client:
        assert not client.open("group", cursor=cursor).resumed


def test_a_client_that_does_not_read_is_redirected(cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent, Client(cloud, cloud.owner_id, forwarder) as client:
        agent.open_session()
        client.socket.rcvhwm = 1
        client.open("group")
        body = os.urandom(FAST.max_inline_bytes)
        for _ in range(200):
            run_tasks(cloud, agent, "group", 16, body=body)
            if counter(forwarder, "peers_behind"):
                break
        assert counter(forwarder, "peers_behind") == 1
        # Others are served as before, and the client receives the redirect when it reads again.
        run_tasks(cloud, agent, "group")
        move, _ = client.hear(wire.Redirect)
        assert "slow" in move.reason


def test_too_many_groups_are_refused(stores: Stores, cloud: Cloud) -> None:
    with forwarding(stores) as forwarder, Client(cloud, cloud.owner_id, forwarder) as client:
        client.open()
        client.say(wire.Subscribe(task_group_ids=tuple(map(str, range(FAST.max_groups + 1)))))
        assert refusal(client) == "LIMIT_EXCEEDED"


# -- health ------------------------------------------------------------------------------------------------------------


def test_health_reports_the_connections(cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent, Client(cloud, cloud.owner_id, forwarder) as client:
        agent.open_session()
        client.open()
        code, report = health(forwarder)
        assert (code, report["status"]) == (200, "ok")
        assert (report["connections"], report["endpoints"], report["streams"]) == (2, 1, 1)


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/healthz"])
def test_a_healthy_forwarder_passes_every_check(path: str, forwarder: RunningForwarder) -> None:
    assert check(forwarder, path) == 200


@pytest.mark.parametrize(("path", "method", "code"), [("/", "GET", 404), ("/healthz", "POST", 405)])
def test_health_refuses_other_requests(path: str, method: str, code: int, forwarder: RunningForwarder) -> None:
    url = forwarder.health_url.replace("/healthz", path)
    assert httpx.request(method, url, timeout=WAIT_S, trust_env=False).status_code == code


def test_a_running_forwarder_is_in_the_registry(stores: Stores, forwarder: RunningForwarder) -> None:
    wait_until(lambda: bool(stores.queue.forwarders()), "the forwarder is announced")
    [info] = stores.queue.forwarders()
    assert (info.address, info.server_key) == (forwarder.address, forwarder.server_key)


# -- drain -------------------------------------------------------------------------------------------------------------


def test_a_drain_redirects_all_peers_and_ends(cloud: Cloud, endpoint_id: str) -> None:
    stores = cloud.stores
    forwarder = RunningForwarder(stores)
    with Agent(cloud, endpoint_id, forwarder) as agent, Client(cloud, cloud.owner_id, forwarder) as client:
        agent.open_session(credit=5)
        client.open("group")
        task_ids = cloud.submit_new(endpoint_id, 2, task_group_id="group")
        first, second = agent.take(2)
        wait_until(lambda: bool(stores.queue.forwarders()), "the forwarder is announced")
        forwarder.drain()
        agent.hear(wire.Redirect)
        client.hear(wire.Redirect)
        assert not stores.queue.forwarders()
        checks = [check(forwarder, path) for path in ("/livez", "/readyz", "/healthz")]
        assert checks == [200, 503, 503], "it lives on, and gets no new peers"
        agent.finish([first])  # results under way are still recorded
        agent.until_recorded([first.task_id])
        assert list(client.results(1)) == [first.task_id]
        agent.say(wire.Goodbye())
        forwarder.join()
    assert forwarder.error is None
    assert cloud.task(task_ids[0]).state is TaskState.SUCCESS
    with forwarding(stores) as next_one, Agent(cloud, endpoint_id, next_one, spool_id=agent.spool_id) as again:
        again.spool = {second.task_id: second}
        again.open_session()
        again.finish([second])
        again.until_recorded([second.task_id])


def test_a_drain_ends_although_no_peer_leaves(cloud: Cloud, endpoint_id: str) -> None:
    forwarder = RunningForwarder(cloud.stores)
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session()
        forwarder.drain()
        forwarder.join()
    assert forwarder.error is None


def test_a_peer_that_connects_during_a_drain_is_redirected(cloud: Cloud, endpoint_id: str) -> None:
    forwarder = RunningForwarder(cloud.stores)
    with (
        Agent(cloud, endpoint_id, forwarder) as agent,
        Agent(cloud, cloud.add_endpoint(), forwarder) as late,
    ):
        agent.open_session()
        forwarder.drain()
        agent.hear(wire.Redirect)
        late.say(late.hello())
        late.hear(wire.Redirect)
        agent.say(wire.Goodbye())
        forwarder.join()


# -- certain functions only --------------------------------------------------------------------------------------------


def test_tasks_that_waited_when_a_list_was_set_are_sent_as_data_only(
    stores: Stores, cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session()
        cloud.submit_new(endpoint_id, 2)
        stores.endpoints.change_endpoint(endpoint_id, {"allowed_functions": ["f"]})
        stores.queue.evict(endpoint_id)
        agent.say(wire.Credit(tasks=5))
        agent.hear(wire.Redirect)
        assert not agent.received
    with Agent(cloud, endpoint_id, forwarder, spool_id=agent.spool_id) as again:
        again.open_session(credit=5)
        assert [spec.data_only for spec in again.take(2)] == [True, True]
