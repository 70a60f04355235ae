"""Replay of the forwarder's core: recorded events and instants return the same actions from a new core."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from unittest import mock

import pytest

from farcall_common import wire
from farcall_common.errors import FrameMalformed
from farcall_common.store.model import FunctionBody, SharedResults, TaskResult
from farcall_common.store.tickets import Ticket
from farcall_common.wire import Reporter, TaskState
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.event_log import EventLog, read_events, without_user_data
from farcall_forwarder.core.forwarder import Forwarder
from farcall_forwarder.core.policy import Instant
from tests.unit.test_forwarder_core import (
    AGENT,
    CLIENT,
    ENDPOINT_ID,
    EPOCH,
    OWNER_ID,
    POLICY,
    FixedIdSource,
    World,
    hello,
    leased,
    open_task,
    recorded,
    success,
    task_id,
    the_flush,
)


class RecordedWorld(World):
    """A world that records the events, instants and actions of its core, log lines included."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[Sequence[ev.Event], Instant, Sequence[do.Action]]] = []

    def on(self, *events: ev.Event) -> list[do.Action]:
        actions = self.core.handle(events, self.now)
        self.log.append((events, self.now, actions))
        return [action for action in actions if not isinstance(action, do.Log)]


def assert_replays(scenario: Callable[[RecordedWorld], None]) -> None:
    world = RecordedWorld()
    scenario(world)
    replayed = World().core
    for number, (events, now, actions) in enumerate(world.log):
        assert replayed.handle(events, now) == actions, f"actions of the events number {number}: {events}"
    assert replayed.status() == world.core.status()


def prepared(actions: Sequence[do.Action]) -> ev.TasksPrepared:
    [order] = [action for action in actions if isinstance(action, do.PrepareTasks)]
    return ev.TasksPrepared(order, {"function": {"hash": FunctionBody("name", b"body")}}, {}, frozenset())


def run_tasks(world: RecordedWorld) -> None:
    """Two tasks run, of which one may not run twice, and a client receives a result."""
    world.open_stream("group")
    world.serve(credit=5)
    tasks = [leased(1), leased(2, idempotent=False), leased(3, cancel_requested=True)]
    actions = world.on(ev.TasksLeased(ENDPOINT_ID, 7, 5, tasks))
    world.on(prepared(actions), recorded(the_flush(actions)))
    world.hears(wire.TasksAccepted(tasks=tuple(wire.TaskRef(task_id=task_id(n), attempt=1) for n in (1, 2))))
    transition = wire.TaskTransition(task_id=task_id(1), attempt=1, state=TaskState.RUNNING, at=EPOCH)
    world.hears(wire.TaskTransitions(transitions=(transition,)))
    world.on(ev.TransitionsRecorded())
    world.on(recorded(the_flush(world.hears(success(1), b"one"))), ev.Announced(1))
    world.on(ev.WorkAvailable([ENDPOINT_ID]), ev.CancelsRead(ENDPOINT_ID, 7, [task_id(2)]))
    world.passes(90)


def meet_faults(world: RecordedWorld) -> None:
    """The queue loses its data, peers break the protocol and disappear, and the forwarder drains."""
    held = tuple(wire.HeldTask(task_id=task_id(n), attempt=1) for n in (1, 2))
    world.hears(hello(held=held, spool_generation=4))
    [read] = world.on(ev.EndpointClaimed(ENDPOINT_ID, 1, 7))
    assert isinstance(read, do.ReadLeases)
    world.on(ev.StepLost(read))
    world.on(ev.QueueRestored(ENDPOINT_ID, 7))
    world.on(ev.LeasesRead(ENDPOINT_ID, 7, {task_id(n): 1 for n in (1, 3)}))
    world.on(ev.TasksRead(ENDPOINT_ID, 7, {task_id(n): open_task(n) for n in (1, 3)}, {}))
    report = wire.EndpointReport(managers=1, total_workers=4, idle_workers=4)
    world.hears(wire.Heartbeat(at=EPOCH, report=report, spool_generation=5))
    world.on(ev.Refreshed({ENDPOINT_ID: (7, "")}, frozenset()))
    world.on(ev.EndpointMaintained(ENDPOINT_ID, 7, [leased(4, attempt=3)], []))
    world.open_stream("group")
    world.on(ev.MalformedReceived(b"client", CLIENT, FrameMalformed("no envelope")))
    result = TaskResult(task_id(9), ENDPOINT_ID, 1, TaskState.SUCCESS, Reporter.AGENT, result=b"x", owner_id=OWNER_ID)
    world.on(ev.PubSubLost(), ev.ResultsHeard([SharedResults([result], {}, EPOCH)]))
    world.on(ev.SlowConsumer(b"agent"))
    world.on(ev.PeerDisconnected(b"agent"))
    world.hears(success(1), b"late", peer=AGENT)
    world.on(ev.DrainOrdered())
    world.passes(int(POLICY.drain_s) + 1)
    assert world.is_drained()


def test_tasks_and_results_replay() -> None:
    assert_replays(run_tasks)


def test_faults_and_a_drain_replay() -> None:
    assert_replays(meet_faults)


# -- the event log -----------------------------------------------------------------------------------------------------


class AnyTicket:
    """A log has no tickets: a replay accepts those of every peer, and they do not end."""

    def verify(self, ticket: str, *, now: float) -> Ticket:
        return Ticket(mock.ANY, math.inf)


@pytest.mark.parametrize("scenario", [run_tasks, meet_faults])
def test_a_written_event_log_replays_the_same_actions(scenario: Callable[[RecordedWorld], None]) -> None:
    world = RecordedWorld()
    began_at = world.now
    scenario(world)
    log = EventLog()
    for events, now, _ in world.log:
        log.add(events, now)
    written = [json.dumps(record) for record in log.records()]
    assert log.dropped_turns == 0
    replayed = Forwarder(
        POLICY,
        forwarder_id="forwarder",
        address="tcp://here:1",
        server_key="server key",
        tickets=AnyTicket(),
        id_source=FixedIdSource(),
        now=began_at,
    )
    turns = list(read_events(map(json.loads, written)))
    for (now, events), (_, _, actions) in zip(turns, world.log, strict=True):
        kinds = [type(action) for action in actions]
        repeated = replayed.handle(events, now)
        assert [type(action) for action in repeated] == kinds, events
        assert without_user_data(repeated) == without_user_data(actions), events
    text = "".join(written)
    for secret in ("payload 1", "body", "no envelope", "https://"):
        assert secret not in text, secret


def test_an_event_log_is_bounded_by_turns_and_bytes() -> None:
    log = EventLog(max_turns=3, max_bytes=100_000)
    for number in range(5):
        log.add([ev.Tick()], Instant(float(number), EPOCH))
    assert [record["instant"][0] for record in log.records()] == [2.0, 3.0, 4.0]
    assert log.dropped_turns == 2
    log.add([ev.TasksLeased(ENDPOINT_ID, 7, 5, [leased(1, payload=bytes(98_000))])], Instant(5.0, EPOCH))
    assert len(log) == 1
    log.add([ev.Tick()], Instant(6.0, EPOCH), size=200_000)
    assert len(log) == 0, "a turn that is too large is not kept"


def test_what_is_no_event_is_refused() -> None:
    with pytest.raises(ValueError):
        list(read_events([{"instant": [1.0, 2.0], "events": [{"kind": "Unknown", "fields": {}}]}]))
