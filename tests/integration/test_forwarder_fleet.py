"""Fleets: several forwarders, many endpoints at once, rolling deployments and killed processes under load."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from farcall_common import wire
from farcall_common.store.model import ForwarderInfo
from farcall_common.store.settings import Stores
from farcall_common.wire import TaskState
from tests.integration.forwarder_peers import (
    FAST,
    Agent,
    Client,
    Cloud,
    Peer,
    RunningForwarder,
    Start,
    cloud,
    endpoint_id,
    environ,
    forwarder,
    forwarding,
    start,
    stores,
)
from tests.support.stores import FakeQueue, fake_stores, single
from tests.waiting import wait_until

__all__ = ["cloud", "endpoint_id", "environ", "forwarder", "start", "stores"]


@pytest.fixture
def fleet(stores: Stores) -> Iterator[tuple[RunningForwarder, RunningForwarder]]:
    """Two forwarders that know each other."""
    with forwarding(stores) as first, forwarding(stores) as second:
        wait_until(lambda: all(_has_others(forwarder) for forwarder in (first, second)), "they know each other")
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
        Client(cloud, "another owner", there) as other_client,
    ):
        agent.open_session(credit=1000)
        assert not client.open("group").resumed
        other_client.open("group")
        task_ids = cloud.submit_new(endpoint_id, 500, task_group_id="group")
        agent.finish(agent.take(500), body=b"from afar")
        found = client.results(500)
        assert set(found) == set(task_ids)
        assert {body for _, body in found.values()} == {b"from afar"}
        assert all(result.timings["recorded_at"] == result.finished_at for result, _ in found.values())
        assert not other_client._unread


def test_a_blob_result_of_another_forwarder_is_pushed_with_its_url(
    cloud: Cloud, fleet: tuple[RunningForwarder, RunningForwarder], endpoint_id: str
) -> None:
    here, there = fleet
    sha256 = "0" * 64
    with Agent(cloud, endpoint_id, here) as agent, Client(cloud, cloud.owner_id, there) as client:
        agent.open_session(credit=1)
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
        wait_until(lambda: _has_others(here), "they know each other")
        agent = stack.enter_context(Agent(cloud, endpoint_id, here))
        client = stack.enter_context(Client(cloud, cloud.owner_id, there))
        agent.open_session(credit=10)
        before = client.open("group")
        queue.reachable = False
        wait_until(lambda: not queue._listeners[there.service.forwarder_id], "the interruption is noticed")
        queue.reachable = True
        wait_until(lambda: bool(queue._listeners[there.service.forwarder_id]), "the subscription is back")
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
        first.open_session(credit=10)
        for _ in range(3):  # it is still refused, also after a maintenance round
            second.connect(there)
            second.say(second.hello())
            refused, _ = second.hear(wire.Refused)
            assert refused.error["code"] == "ENDPOINT_IN_USE"
            assert first.hears_no(wire.Redirect, for_s=FAST.maintenance_s)
        task_ids = cloud.submit_new(endpoint_id, 3)
        first.finish(first.take(3))
        first.until_recorded(task_ids)
        first.say(wire.Goodbye())
        wait_until(lambda: second.is_let_in(there), "the endpoint is free")
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
        first.open_session(credit=10)
        [once] = cloud.submit_new(endpoint_id, 1, idempotent=False)
        [often] = cloud.submit_new(endpoint_id, 1)
        first.take(2)
        doomed.kill()
        second.say(second.hello())
        refused, _ = second.hear(wire.Refused)
        assert refused.error["code"] == "ENDPOINT_IN_USE"
        wait_until(lambda: second.is_let_in(heir), "the dead forwarder's claim is over")
        second.say(wire.Credit(tasks=10))
        [spec] = second.take(1)
        assert spec.task_id == often
        cloud.until_all([once], TaskState.LOST)


@pytest.mark.parametrize("is_running", [True, False], ids=["running before", "started after"])
def test_an_agent_whose_forwarder_dies_keeps_its_tasks_at_another_one(
    is_running: bool, stores: Stores, cloud: Cloud, endpoint_id: str
) -> None:
    doomed = RunningForwarder(stores)
    with contextlib.ExitStack() as stack, Agent(cloud, endpoint_id, doomed) as agent:
        if is_running:
            heir = stack.enter_context(forwarding(stores))
        agent.open_session(credit=6)
        task_ids = cloud.submit_new(endpoint_id, 3) + cloud.submit_new(endpoint_id, 3, idempotent=False)
        held = agent.take(6)
        doomed.kill()
        more = cloud.submit_new(endpoint_id, 4, idempotent=False)
        if not is_running:
            heir = stack.enter_context(forwarding(stores))
        agent.connect(heir)
        assert agent.open_session(credit=10).forget == ()
        assert {spec.task_id for spec in agent.take(4)} == set(more)
        assert agent.hears_no(wire.RunTasks, for_s=2 * FAST.lease_s)  # no task that the agent holds is reaped
        agent.finish(held)
        agent.until_recorded(task_ids)
    assert cloud.states(task_ids) == {TaskState.SUCCESS}
    assert {cloud.task(task_id).attempt for task_id in task_ids} == {1}


# -- many endpoints at the same moment ---------------------------------------------------------------------------------

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
    for admitted in there:
        agents[admitted].hear(wire.Welcome)
    wait_until(lambda: online(stores, agents) == there, "the admitted ones are online")
    agents[restored].say(wire.Credit(tasks=5))
    assert [spec.task_id for spec in agents[restored].take(3)] == waiting
    # Half of them leave: exactly these become offline.
    going = sorted(there)[::2]
    for each in going:
        agents[each].say(wire.Goodbye())
    wait_until(lambda: online(stores, agents) == there - set(going), "the others are offline")


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
    for id_, agent in agents.items():
        agent.finish(specs[id_][:1])
        agent.until_recorded(task_ids[id_][:1])
    for agent in agents.values():
        agent.connect(forwarder)
        agent.say(agent.hello())
    for id_, agent in agents.items():
        welcome, _ = agent.hear(wire.Welcome)
        assert welcome.forget == ()
        agent.finish(specs[id_][1:])
        agent.until_recorded(task_ids[id_][1:])
    cloud.until_all([task_id for ids in task_ids.values() for task_id in ids], TaskState.SUCCESS)


# -- rolling deployments and killed processes under load ---------------------------------------------------------------

ENDPOINTS = 6
HEARTBEAT_S = 1.0
#: Settings of forwarders that are replaced.
BRISK = {"FARCALL_FORWARDER_LEASE_S": "3", "FARCALL_FORWARDER_DRAIN_S": "2"}


class Worker(Agent):
    """An agent that counts how often it starts each task."""

    def __init__(self, *arguments: Any) -> None:
        self.starts: collections.Counter[str] = collections.Counter()
        super().__init__(*arguments)

    def on_message(self, envelope: wire.Envelope) -> None:
        if isinstance(envelope.message, wire.RunTasks):
            self.starts.update(spec.task_id for spec in envelope.message.tasks if spec.task_id not in self.spool)
        super().on_message(envelope)


class RoamingPeer(threading.Thread):
    """A peer that stays with one forwarder until it is redirected, and then connects to another one."""

    def __init__(self, cloud: Cloud, peer: Callable[[ForwarderInfo], Peer]) -> None:
        super().__init__(name="roamer")
        self._cloud = cloud
        self._make = peer
        self._over = threading.Event()
        self.peer: Peer | None = None
        self.redirects = 0
        self.cuts = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._over.is_set():
                if forwarders := self._cloud.stores.queue.forwarders():
                    self._visit(random.choice(forwarders))
                else:
                    self._over.wait(0.05)
        except BaseException as error:  # noqa: BLE001 -- raised in the test
            self.error = error
        finally:
            if self.peer:
                self.peer.close()

    def _visit(self, forwarder: ForwarderInfo) -> None:
        if self.peer is None:
            self.peer = self._make(forwarder)
        else:
            self.peer.connect(forwarder)
        peer = self.peer
        peer.session.heartbeat_s = HEARTBEAT_S
        self.open_session(peer)
        while not self._over.is_set():
            envelope = peer._receive(0.1)
            now = time.monotonic()
            if envelope is not None and isinstance(envelope.message, wire.Redirect):
                self.redirects += 1
                self.leave()
                peer.say(wire.Goodbye())
                self._over.wait(envelope.message.retry_after_s)
                return
            if peer.session.is_dead(now=now) or peer.session.phase is wire.Phase.CLOSED:
                self.cuts += 1
                self.leave()
                return
            if peer.session.heartbeat_due(now=now):
                peer.say(wire.Heartbeat(at=time.time()))
            if envelope is not None:
                self.answer(peer, envelope)

    def open_session(self, peer: Peer) -> None: ...

    def answer(self, peer: Peer, envelope: wire.Envelope) -> None: ...

    def leave(self) -> None: ...

    def stop(self) -> None:
        self._over.set()
        self.join()
        if self.error:
            raise self.error


class RoamingWorker(RoamingPeer):
    """An agent that follows redirects."""

    def open_session(self, peer: Peer) -> None:
        assert isinstance(peer, Worker)
        peer.say(peer.hello(heartbeat_s=HEARTBEAT_S))

    def answer(self, peer: Peer, envelope: wire.Envelope) -> None:
        assert isinstance(peer, Worker)
        match envelope.message:
            case wire.Welcome(forget=forget):
                for ref in forget:
                    peer.spool.pop(ref.task_id, None)
                if peer.spool:
                    peer.finish(list(peer.spool.values()))
                peer.say(wire.Credit(tasks=50))
            case wire.RunTasks(tasks=tasks):
                peer.finish(tasks)
                peer.say(wire.Credit(tasks=len(tasks)))


class RoamingClient(RoamingPeer):
    """A client that follows redirects, and one task group."""

    group = "group"
    cursor: str | None = None
    is_open = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: set[str] = set()

    def open_session(self, peer: Peer) -> None:
        assert isinstance(peer, Client)
        peer.say(
            wire.OpenStream(
                ticket=peer.ticket,
                protocol_versions=(wire.PROTOCOL_VERSION,),
                heartbeat_s=HEARTBEAT_S,
                task_group_ids=(self.group,),
                cursor=self.cursor,
            )
        )

    def answer(self, peer: Peer, envelope: wire.Envelope) -> None:
        match envelope.message:
            case wire.StreamOpened(cursor=cursor):
                self.cursor, self.is_open = cursor, True
            case wire.ResultsReady(cursor=cursor, results=results):
                self.cursor = cursor
                self.seen |= {result.task_id for result in results}

    def leave(self) -> None:
        self.is_open = False


#: Most tasks that wait. While no forwarder runs, a slow machine would collect more than it can run in a test's time.
BACKLOG = 500


class Load:
    """Busy endpoints, a client with a stream, and tasks that are submitted until the block ends."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self.endpoint_ids = [cloud.add_endpoint() for _ in range(ENDPOINTS)]
        self.workers = [
            RoamingWorker(cloud, functools.partial(Worker, cloud, endpoint_id)) for endpoint_id in self.endpoint_ids
        ]
        self.client = RoamingClient(cloud, functools.partial(Client, cloud, cloud.owner_id))
        self.task_ids: list[str] = []
        self._over = threading.Event()
        self._submitter = threading.Thread(target=self._submit, name="submitter")

    def _submit(self) -> None:
        for number in itertools.count():
            if len(self.task_ids) - self._started() < BACKLOG:
                self.submit(number)
            if self._over.wait(0.02):
                return

    def submit(self, number: int) -> list[str]:
        endpoint_id = self.endpoint_ids[number % ENDPOINTS]
        task_ids = self.cloud.submit_new(endpoint_id, 10, idempotent=bool(number % 3), task_group_id="group")
        self.task_ids += task_ids
        return task_ids

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        roamers = [*self.workers, self.client]
        for roamer in roamers:
            roamer.start()
        self._submitter.start()
        try:
            yield
            self._over.set()
            self._submitter.join()
            self.cloud.until_all(self.task_ids, TaskState.SUCCESS)
            wait_until(lambda: self.client.is_open, "the client has a stream")
            last = {task_id for number in range(ENDPOINTS) for task_id in self.submit(number)}
            wait_until(lambda: last <= self.client.seen, "the client gets results of every endpoint")
        finally:
            self._over.set()
            self._submitter.join()
            for roamer in roamers:
                roamer.stop()

    @property
    def starts(self) -> collections.Counter[str]:
        """How often each task was started."""
        total: collections.Counter[str] = collections.Counter()
        for worker in self.workers:
            assert isinstance(worker.peer, Worker)
            total += worker.peer.starts
        return total

    def do_more(self) -> None:
        """Wait until another 300 tasks were started."""
        before = self._started()
        wait_until(lambda: self._started() >= before + 300, "work is under way")

    def _started(self) -> int:
        return sum(len(worker.peer.starts) for worker in self.workers if isinstance(worker.peer, Worker))


@pytest.fixture
def load(cloud: Cloud) -> Load:
    return Load(cloud)


def test_a_rolling_deploy_under_load_loses_nothing_and_starts_nothing_twice(load: Load, start: Start) -> None:
    first, second = (start(**BRISK) for _ in range(2))
    with load.running():
        load.do_more()
        for old in (first, second):
            start(**BRISK)
            assert old.end() == 0
            load.do_more()
    assert sum(worker.redirects for worker in load.workers) >= ENDPOINTS
    assert set(load.starts) == set(load.task_ids)
    assert set(load.starts.values()) == {1}
    tasks = load.cloud.stores.tasks.get_tasks(load.task_ids)
    assert {task.attempt for task in tasks.values()} == {1}


def test_endpoints_of_killed_forwarders_are_taken_over_under_load(load: Load, start: Start) -> None:
    first = start(**BRISK)
    with load.running():
        load.do_more()
        second = start(**BRISK)
        first.end(signal.SIGKILL)
        load.do_more()
        second.end(signal.SIGKILL)
        start(**BRISK)  # for a moment there was none
        load.do_more()
    assert sum(worker.cuts for worker in load.workers) >= ENDPOINTS
    assert set(load.starts) == set(load.task_ids)
    assert set(load.starts.values()) == {1}
