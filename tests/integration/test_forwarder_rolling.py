"""A fleet of forwarder processes under load: replaced in turn, and killed. Real stores, and peers that reconnect."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from farcall_common import wire
from farcall_common.store.model import ForwarderInfo
from farcall_common.store.settings import Stores
from farcall_common.wire import TaskState
from tests.integration.forwarder_peers import Agent, Client, Cloud, Peer, until
from tests.integration.test_forwarder_process import ForwarderProcess, environ, start, stores

__all__ = ["environ", "start", "stores"]

ENDPOINTS = 6
HEARTBEAT_S = 1.0

Start = Callable[[], ForwarderProcess]


class Worker(Agent):
    """An agent that counts how often it starts each task."""

    def __init__(self, *arguments: Any) -> None:
        self.starts: collections.Counter[str] = collections.Counter()
        super().__init__(*arguments)

    def on_message(self, envelope: wire.Envelope) -> None:
        if isinstance(envelope.message, wire.RunTasks):
            self.starts.update(spec.task_id for spec in envelope.message.tasks if spec.task_id not in self.spool)
        super().on_message(envelope)


class Roamer(threading.Thread):
    """A peer that stays with one forwarder until it is redirected, and then connects to another one."""

    def __init__(self, cloud: Cloud, peer: Callable[[ForwarderInfo], Peer]) -> None:
        super().__init__(name="roamer")
        self._cloud = cloud
        self._make = peer
        self._over = threading.Event()
        self.peer: Peer | None = None
        self.moves = 0
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
        self.greet(peer)
        while not self._over.is_set():
            envelope = peer._receive(0.1)
            now = time.monotonic()
            if envelope is not None and isinstance(envelope.message, wire.Redirect):
                self.moves += 1
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

    def greet(self, peer: Peer) -> None: ...

    def answer(self, peer: Peer, envelope: wire.Envelope) -> None: ...

    def leave(self) -> None: ...

    def stop(self) -> None:
        self._over.set()
        self.join()
        if self.error:
            raise self.error


class RoamingWorker(Roamer):
    """An agent that follows redirects."""

    def greet(self, peer: Peer) -> None:
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


class RoamingClient(Roamer):
    """A client that follows redirects, and one task group."""

    group = "group"
    cursor: str | None = None
    is_open = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: set[str] = set()

    def greet(self, peer: Peer) -> None:
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
            self.submit(number)
            if self._over.wait(0.02):
                return

    def submit(self, number: int) -> list[str]:
        endpoint_id = self.endpoint_ids[number % ENDPOINTS]
        task_ids = self.cloud.submit_new(endpoint_id, 10, idempotent=bool(number % 3), task_group_id="group")
        self.task_ids += task_ids
        return task_ids

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        roamers = [*self.workers, self.client]
        for roamer in roamers:
            roamer.start()
        self._submitter.start()
        try:
            yield
            self._over.set()
            self._submitter.join()
            self.cloud.until_all(self.task_ids, TaskState.SUCCESS)
            until(lambda: self.client.is_open, "the client has a stream")
            last = {task_id for number in range(ENDPOINTS) for task_id in self.submit(number)}
            until(lambda: last <= self.client.seen, "the client gets results of every endpoint")
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

    def has_done(self, count: int) -> bool:
        return self.done() >= count

    def done(self) -> int:
        return sum(len(worker.peer.starts) for worker in self.workers if isinstance(worker.peer, Worker))


@pytest.fixture
def load(stores: Stores) -> Load:
    return Load(Cloud(stores))


def test_a_rolling_deploy_under_load_loses_nothing_and_starts_nothing_twice(load: Load, start: Start) -> None:
    first, second = start(), start()
    with load.going_on():
        until(functools.partial(load.has_done, 300), "work is under way")
        for old in (first, second):
            start()
            assert old.end() == 0
            until(functools.partial(load.has_done, load.done() + 300), "the others have taken over")
    assert sum(worker.moves for worker in load.workers) >= ENDPOINTS
    assert set(load.starts) == set(load.task_ids)
    assert set(load.starts.values()) == {1}
    tasks = load.cloud.stores.tasks.get_tasks(load.task_ids)
    assert {task.attempt for task in tasks.values()} == {1}


def test_a_killed_forwarders_endpoints_are_taken_over_under_load(load: Load, start: Start) -> None:
    doomed = start()
    with load.going_on():
        until(functools.partial(load.has_done, 300), "work is under way")
        start()
        doomed.end(signal.SIGKILL)
        until(functools.partial(load.has_done, load.done() + 300), "the other one has taken over")
    assert sum(worker.cuts for worker in load.workers) >= ENDPOINTS
    assert set(load.starts) == set(load.task_ids)
    assert set(load.starts.values()) == {1}
