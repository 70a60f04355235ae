"""Replay of the forwarder's core: recorded events and instants return the same actions from a new core."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from farcall_common import wire
from farcall_common.errors import FrameMalformed
from farcall_common.store.model import SharedResults, TaskResult
from farcall_common.wire import Reporter, TaskState
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.policy import Instant
from tests.unit.test_forwarder_core import (
    AGENT,
    CLIENT,
    ENDPOINT_ID,
    EPOCH,
    OWNER_ID,
    POLICY,
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
    return ev.TasksPrepared(order, {"hash": ("name", b"body")}, {}, frozenset())


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
