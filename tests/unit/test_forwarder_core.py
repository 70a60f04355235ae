"""Core of the forwarder: events in, lists of actions out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from farcall_common import wire
from farcall_common.environments import Environment
from farcall_common.errors import EndpointInUse, ErrorRecord, FrameMalformed
from farcall_common.limits import MAX_TRANSITIONS
from farcall_common.qos import QoS
from farcall_common.store.model import (
    EndpointStatus,
    FunctionBody,
    LeasedTask,
    PeerKey,
    PeerKind,
    QueuedTask,
    SharedResults,
    Task,
    TaskEvent,
    TaskResult,
)
from farcall_common.store.tickets import Tickets
from farcall_common.wire import Envelope, Reporter, TaskState
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.forwarder import Forwarder
from farcall_forwarder.core.policy import Instant, Policy
from farcall_forwarder.core.recorder import ShareBuffer
from tests.task_fields import with_options

ENDPOINT_ID = "00000000-0000-4000-8000-00000000000e"
OWNER_ID = "00000000-0000-4000-8000-00000000000a"
SPOOL_ID = "00000000-0000-4000-8000-000000000005"
INSTANCE_ID = "00000000-0000-4000-8000-000000000001"
AGENT = PeerKey("agent key", PeerKind.AGENT, ENDPOINT_ID)
CLIENT = PeerKey("client key", PeerKind.CLIENT, OWNER_ID)
POLICY = Policy()
TICKETS = Tickets("a key of more than thirty-two bytes")
EPOCH = 1_800_000_000.0
ONLINE = EndpointStatus()


class FixedIdSource:
    """Counts ids, and returns the middle of every range."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)

    def new_id(self) -> str:
        return f"session-{next(self._ids)}"

    def fraction(self) -> float:
        return 0.5


def task_id(number: int) -> str:
    return f"00000000-0000-7000-8000-{number:012d}"


def leased(number: int, *, attempt: int = 1, cancel_requested: bool = False, **fields: Any) -> LeasedTask:
    values: dict[str, Any] = {
        "task_id": task_id(number),
        "task_group_id": "group",
        "owner_id": OWNER_ID,
        "endpoint_id": ENDPOINT_ID,
        "function_id": "function",
        "function_hash": "hash",
        "payload": b"payload %d" % number,
        "submitted_at": EPOCH - 2,
    }
    task = QueuedTask(**with_options({"idempotent": True} | values | fields))
    return LeasedTask(task, attempt, enqueued_at=EPOCH - 1, leased_at=EPOCH, cancel_requested=cancel_requested)


def open_task(number: int, **fields: Any) -> Task:
    """An open task, as the database has it."""
    queued = leased(number).task
    shared = {name: getattr(queued, name) for name in queued.__struct_fields__}
    del shared["submitted_at"]
    return Task(**with_options(shared | fields))


class World:
    """A core, and a clock that tests move."""

    def __init__(self, policy: Policy = POLICY) -> None:
        self.mono = 100.0
        self.epoch_offset = 0.0
        self.core = Forwarder(
            policy,
            forwarder_id="forwarder",
            address="tcp://here:1",
            server_key="server key",
            tickets=TICKETS,
            id_source=FixedIdSource(),
            now=self.now,
        )

    @property
    def now(self) -> Instant:
        return Instant(self.mono, EPOCH + self.epoch_offset + self.mono - 100.0)

    def on(self, *events: ev.Event) -> list[do.Action]:
        """The actions of the core, without log lines."""
        return [action for action in self.core.handle(events, self.now) if not isinstance(action, do.Log)]

    def after(self, seconds: float) -> list[do.Action]:
        """The actions of the core when time passes."""
        self.mono += seconds
        return self.on(ev.Tick())

    def passes(self, seconds: int) -> list[do.Action]:
        """The actions of the core when time passes, with a tick every half second."""
        return [action for _ in range(2 * seconds) for action in self.after(0.5)]

    def hears(
        self, message: wire.Message, *frames: bytes, peer: PeerKey = AGENT, routing_id: bytes = b"agent"
    ) -> list[do.Action]:
        return self.on(ev.Received(routing_id, peer, Envelope(message, frames)))

    def is_drained(self) -> bool:
        return self.core.is_drained

    # -- shortcuts

    def serve(self, *, credit: int = 0, fence: int = 7, **hello_fields: Any) -> list[do.Action]:
        """Connect an agent and serve its endpoint; the actions of the last event."""
        self.hears(hello(**hello_fields))
        self.on(ev.EndpointClaimed(ENDPOINT_ID, 1, fence))
        actions = self.on(ev.LeasesRead(ENDPOINT_ID, fence, {}))
        if credit:
            actions = self.hears(wire.Credit(tasks=credit))
        return actions

    def dispatch(self, *tasks: LeasedTask) -> None:
        """Lease, send and accept tasks."""
        self.core._context.functions.add("function", "hash", FunctionBody("name", b"body"))
        self.on(ev.TasksLeased(ENDPOINT_ID, 7, 500, tasks))
        refs = tuple(wire.TaskRef(task_id=task.task.task_id, attempt=task.attempt) for task in tasks)
        self.hears(wire.TasksAccepted(tasks=refs))

    def open_stream(self, *groups: str, routing_id: bytes = b"client", ticket_s: float = 1_000_000) -> list[do.Action]:
        request = wire.OpenStream(
            ticket=TICKETS.issue(CLIENT, expires_at=EPOCH + ticket_s),
            protocol_versions=(1,),
            heartbeat_s=30.0,
            task_group_ids=groups,
        )
        actions = self.hears(request, peer=CLIENT, routing_id=routing_id)
        if actions == [do.WatchOwners([OWNER_ID], POLICY.watch_ttl_s)]:
            actions = self.on(ev.OwnersWatched([OWNER_ID], frozenset({OWNER_ID})))
        return actions


def hello(**fields: Any) -> wire.Hello:
    values: dict[str, Any] = {
        "endpoint_id": ENDPOINT_ID,
        "ticket": TICKETS.issue(AGENT, expires_at=EPOCH + 1_000_000),
        "instance_id": INSTANCE_ID,
        "spool_id": SPOOL_ID,
        "protocol_versions": (1,),
        "heartbeat_s": 30.0,
    }
    return wire.Hello(**(values | fields))


def sent(actions: Sequence[do.Action]) -> list[wire.Message]:
    """The messages among actions."""
    return [action.envelope.message for action in actions if isinstance(action, do.Send)]


def success(number: int, attempt: int = 1) -> wire.TaskResults:
    spec = wire.ResultSpec(task_id=task_id(number), attempt=attempt, state=TaskState.SUCCESS, result=0)
    return wire.TaskResults(results=(spec,))


def the_flush(actions: Sequence[do.Action]) -> do.FlushResults:
    [flush] = [action for action in actions if isinstance(action, do.FlushResults)]
    return flush


def recorded(flush: do.FlushResults) -> ev.Flushed:
    """The answer to a flush that made all of its results final."""
    first = {
        result.task_id: msgspec.structs.replace(result, owner_id=OWNER_ID, task_group_id="group")
        for batch in flush.batches
        for result in batch.results
    }
    return ev.Flushed([ev.BatchFlushed(batch) for batch in flush.batches], first, {}, EPOCH + 1)


# -- endpoints ---------------------------------------------------------------------------------------------------------


def test_a_hello_claims_the_endpoint() -> None:
    claim = do.ClaimEndpoint(ENDPOINT_ID, 1, AGENT.public_key, SPOOL_ID, POLICY.ownership_ttl_s)
    assert World().hears(hello()) == [claim]


def test_a_claimed_endpoint_without_tasks_is_served_at_once() -> None:
    world = World()
    world.hears(hello())
    assert world.on(ev.EndpointClaimed(ENDPOINT_ID, 1, 7)) == [do.ReadLeases(ENDPOINT_ID, 7)]
    welcome = wire.Welcome(
        session_id="session-1",
        forwarder_id="forwarder",
        protocol_version=1,
        heartbeat_s=30.0,
        relay_piece_bytes=POLICY.relay_piece_bytes,
        file_piece_bytes=POLICY.file_piece_bytes,
    )
    assert world.on(ev.LeasesRead(ENDPOINT_ID, 7, {})) == [
        do.Send(b"agent", Envelope(welcome)),
        do.SetPresence(ENDPOINT_ID, 7, True, ONLINE, POLICY.ownership_ttl_s),
        do.MaintainEndpoint(ENDPOINT_ID, 7, [], SPOOL_ID, POLICY.ownership_ttl_s, POLICY.lease_s),
    ]


def test_a_report_of_latency_targets_is_recorded_with_the_presence() -> None:
    world = World()
    world.serve()
    row = {"function_id": task_id(1), "target_ms": 200.0, "infeasible": {"reason": "it waits"}}
    detail = {"qos": {"policy": "pi", "admission": "refuse", "functions": [row, {"function_id": "?"}]}}
    report = wire.EndpointReport(total_workers=1, detail=detail)
    heartbeat = wire.Heartbeat(at=1.0, report=report)
    [step] = [each for each in world.hears(heartbeat) if isinstance(each, do.SetPresence)]
    assert step.qos is not None
    assert (step.qos.policy, [each.function_id for each in step.qos.functions]) == ("pi", [task_id(1)])
    assert (step.status.refuses_infeasible, [each.reason for each in step.status.infeasible]) == (True, ["it waits"])
    world.after(POLICY.record_s)
    assert not any(isinstance(each, do.SetPresence) for each in world.hears(heartbeat))


def test_a_queue_without_data_is_restored_before_the_welcome() -> None:
    world = World()
    held = (wire.HeldTask(task_id=task_id(1), attempt=2),)
    world.hears(hello(held=held))
    [read] = world.on(ev.EndpointClaimed(ENDPOINT_ID, 1, 7))
    assert isinstance(read, do.ReadLeases)
    assert world.on(ev.StepLost(read)) == [do.RestoreQueue(ENDPOINT_ID, 7, {task_id(1): 2}, POLICY.lease_s)]
    assert world.on(ev.QueueRestored(ENDPOINT_ID, 7)) == [do.ReadLeases(ENDPOINT_ID, 7)]
    assert world.on(ev.LeasesRead(ENDPOINT_ID, 7, {task_id(1): 2})) == [
        do.ReadTasks(ENDPOINT_ID, 7, [task_id(1)], frozenset())
    ]
    actions = world.on(ev.TasksRead(ENDPOINT_ID, 7, {task_id(1): open_task(1)}, {}))
    assert [type(message) for message in sent(actions)] == [wire.Welcome]
    [step] = [action for action in actions if isinstance(action, do.MaintainEndpoint)]
    assert step.renew == [task_id(1)]


def test_answers_of_an_earlier_generation_or_fence_are_ignored() -> None:
    world = World()
    world.serve(credit=5)
    assert world.on(ev.EndpointClaimed(ENDPOINT_ID, 99, 99)) == []
    assert world.on(ev.TasksLeased(ENDPOINT_ID, 6, 5, [leased(1)])) == []
    assert world.on(ev.StepFenced(do.LeaseTasks(ENDPOINT_ID, 6, 5, 30.0))) == []


# -- dispatch ----------------------------------------------------------------------------------------------------------


def test_credit_leases_tasks_and_sends_them_with_their_function() -> None:
    world = World()
    assert world.serve(credit=3) == [do.LeaseTasks(ENDPOINT_ID, 7, 3, POLICY.lease_s)]
    [prepare] = world.on(ev.TasksLeased(ENDPOINT_ID, 7, 3, [leased(1)]))
    assert isinstance(prepare, do.PrepareTasks)
    assert (prepare.functions, prepare.blob_keys, prepare.dispatches) == ([("function", "hash")], [], [])
    [send] = world.on(ev.TasksPrepared(prepare, {"function": {"hash": FunctionBody("name", b"body")}}, {}, frozenset()))
    assert isinstance(send, do.Send)
    order = send.envelope.message
    assert isinstance(order, wire.RunTasks)
    assert send.envelope.frames == (b"body", b"payload 1")
    assert order.functions == (wire.FunctionSpec(function_hash="hash", name="name", body=0),)
    assert [(spec.task_id, spec.attempt, spec.payload) for spec in order.tasks] == [(task_id(1), 1, 1)]
    assert [spec.submitter for spec in order.tasks] == [OWNER_ID]


def test_a_cached_function_is_not_fetched_and_is_sent_once() -> None:
    world = World()
    world.serve(credit=3)
    world.core._context.functions.add("function", "hash", FunctionBody("name", b"body"))
    [first] = sent(world.on(ev.TasksLeased(ENDPOINT_ID, 7, 3, [leased(1)])))
    world.on(ev.WorkAvailable([ENDPOINT_ID]))
    [second] = sent(world.on(ev.TasksLeased(ENDPOINT_ID, 7, 2, [leased(2)])))
    assert isinstance(first, wire.RunTasks)
    assert isinstance(second, wire.RunTasks)
    assert (len(first.functions), len(second.functions)) == (1, 0)


def test_one_lease_step_is_under_way_and_never_exceeds_the_credit() -> None:
    world = World()
    world.serve(credit=2)
    assert world.on(ev.WorkAvailable([ENDPOINT_ID])) == []
    world.core._context.functions.add("function", "hash", FunctionBody("name", b"body"))
    actions = world.on(ev.TasksLeased(ENDPOINT_ID, 7, 2, [leased(1), leased(2)]))
    assert [type(action) for action in actions] == [do.Send]
    assert world.hears(wire.Credit(tasks=1)) == [do.LeaseTasks(ENDPOINT_ID, 7, 1, POLICY.lease_s)]


def leases(actions: Sequence[do.Action]) -> list[tuple[int, int]]:
    """Limit and reserve of the leases among actions."""
    return [(action.limit, action.reserve) for action in actions if isinstance(action, do.LeaseTasks)]


def test_the_reserve_is_limited() -> None:
    assert leases(World().serve(reserve=2**40)) == [(0, 64)]


def test_new_submitters_are_leased_without_credit_up_to_the_reserve() -> None:
    world = World()
    world.core._context.functions.add("function", "hash", FunctionBody("name", b"body"))
    assert leases(world.serve(reserve=2)) == [(0, 2)]
    assert leases(world.on(ev.TasksLeased(ENDPOINT_ID, 7, 0, [], 2))) == []
    assert leases(world.hears(wire.Credit(tasks=1))) == [(1, 0)]  # there may be work, and no new submitter since
    assert leases(world.on(ev.TasksLeased(ENDPOINT_ID, 7, 1, [leased(1)]))) == []
    assert leases(world.on(ev.WorkAvailable([ENDPOINT_ID]))) == [(0, 2)]
    actions = world.on(ev.TasksLeased(ENDPOINT_ID, 7, 0, [leased(2, owner_id="bob")], 2))
    assert ([type(message) for message in sent(actions)], leases(actions)) == ([wire.RunTasks], [])
    assert leases(world.on(ev.WorkAvailable([ENDPOINT_ID]))) == [(0, 1)]
    actions = world.on(ev.TasksLeased(ENDPOINT_ID, 7, 0, [leased(3, owner_id="carol")], 1))
    assert ([type(message) for message in sent(actions)], leases(actions)) == ([wire.RunTasks], [])
    assert leases(world.on(ev.WorkAvailable([ENDPOINT_ID]))) == []  # the reserve is used up
    assert leases(world.hears(wire.Credit(tasks=2))) == [(0, 2)]


def test_submitter_without_tasks_at_the_agent_uses_the_reserve_again() -> None:
    world = World()
    world.serve(credit=2, reserve=2)
    world.core._context.functions.add("function", "hash", FunctionBody("name", b"body"))
    world.on(ev.TasksLeased(ENDPOINT_ID, 7, 2, [leased(1), leased(2)], 2))
    world.on(ev.WorkAvailable([ENDPOINT_ID]))
    world.on(ev.TasksLeased(ENDPOINT_ID, 7, 0, [leased(3, owner_id="bob")], 2))
    assert leases(world.on(recorded(the_flush(world.hears(success(1), b"r"))))) == []  # alice has another task there
    assert leases(world.on(recorded(the_flush(world.hears(success(3), b"r"))))) == [(0, 1)]


def test_submitter_without_tasks_with_targets_at_the_agent_uses_the_reserve_again() -> None:
    world = World()
    world.serve(credit=1, reserve=2)
    world.core._context.functions.add("function", "hash", FunctionBody("name", b"body"))
    world.on(ev.TasksLeased(ENDPOINT_ID, 7, 1, [leased(1)], 2))
    assert leases(world.on(ev.WorkAvailable([ENDPOINT_ID]))) == [(0, 2)]
    urgent = leased(2, qos=QoS(target_ms=200))
    actions = world.on(ev.TasksLeased(ENDPOINT_ID, 7, 0, [urgent], 2))
    assert ([type(message) for message in sent(actions)], leases(actions)) == ([wire.RunTasks], [])
    assert leases(world.on(recorded(the_flush(world.hears(success(2), b"r"))))) == [(0, 1)]


def test_weights_of_submitters_are_sent_with_the_claim() -> None:
    [claim] = World().hears(hello(weights={"bob": 3}))
    assert isinstance(claim, do.ClaimEndpoint)
    assert claim.weights == {"bob": 3}


def test_an_empty_queue_is_not_leased_from_before_a_wake_up_or_the_sweep() -> None:
    world = World()
    world.serve(credit=2)
    world.on(ev.TasksLeased(ENDPOINT_ID, 7, 2, []))
    assert world.hears(wire.Credit(tasks=5)) == []
    assert world.on(ev.WorkAvailable([ENDPOINT_ID])) == [do.LeaseTasks(ENDPOINT_ID, 7, 7, POLICY.lease_s)]
    world.on(ev.TasksLeased(ENDPOINT_ID, 7, 7, []))
    sweep = do.SweepQueues({ENDPOINT_ID: 7})
    assert sweep in world.after(POLICY.sweep_s)
    assert sweep not in world.after(POLICY.sweep_s)  # one at a time
    assert do.LeaseTasks(ENDPOINT_ID, 7, 7, POLICY.lease_s) in world.on(
        ev.ActivityFound([ENDPOINT_ID, "other-endpoint"])
    )
    assert sweep in world.after(POLICY.sweep_s)
    assert world.on(ev.ActivityFound([])) == []


def test_the_dispatch_of_a_non_idempotent_task_is_recorded_before_it_is_sent() -> None:
    world = World()
    world.serve(credit=2)
    world.core._context.functions.add("function", "hash", FunctionBody("name", b"body"))
    once, often = leased(1, idempotent=False), leased(2)
    send, prepare = world.on(ev.TasksLeased(ENDPOINT_ID, 7, 2, [once, often]))
    assert [spec.task_id for spec in sent([send])[0].tasks] == [task_id(2)]  # type: ignore[attr-defined]
    assert isinstance(prepare, do.PrepareTasks)
    [event] = prepare.dispatches
    assert (event.task_id, event.state, event.attempt) == (task_id(1), TaskState.WAITING_FOR_NODES, 1)
    assert event.detail == {"spool_id": SPOOL_ID}
    [order] = sent(world.on(ev.TasksPrepared(prepare, {}, {}, frozenset())))
    assert isinstance(order, wire.RunTasks)
    assert [spec.task_id for spec in order.tasks] == [task_id(1)]


def test_a_non_idempotent_task_without_a_permit_is_lost() -> None:
    world = World()
    world.serve(credit=2)
    world.core._context.functions.add("function", "hash", FunctionBody("name", b"body"))
    [prepare] = world.on(ev.TasksLeased(ENDPOINT_ID, 7, 2, [leased(1, idempotent=False)]))
    assert isinstance(prepare, do.PrepareTasks)
    [flush] = world.on(ev.TasksPrepared(prepare, {}, {}, frozenset({task_id(1)})))
    [result] = the_flush([flush]).batches[0].results
    assert (result.state, result.reporter) == (TaskState.LOST, Reporter.FORWARDER)


def test_a_cancelled_task_is_not_sent() -> None:
    world = World()
    world.serve(credit=2)
    flush = the_flush(world.on(ev.TasksLeased(ENDPOINT_ID, 7, 2, [leased(1, cancel_requested=True)])))
    assert [result.state for result in flush.batches[0].results] == [TaskState.CANCELLED]


def test_leases_for_a_disconnected_agent_are_requeued() -> None:
    world = World()
    world.serve(credit=2)
    world.hears(wire.Goodbye())
    assert world.on(ev.TasksLeased(ENDPOINT_ID, 7, 2, [leased(1)])) == [do.RequeueTasks(ENDPOINT_ID, 7, [task_id(1)])]


def test_tasks_in_preparation_are_requeued_when_the_session_ends() -> None:
    world = World()
    world.serve(credit=2)
    [prepare] = world.on(ev.TasksLeased(ENDPOINT_ID, 7, 2, [leased(1)]))
    assert isinstance(prepare, do.PrepareTasks)
    assert do.RequeueTasks(ENDPOINT_ID, 7, [task_id(1)]) in world.hears(wire.Goodbye())
    assert (
        world.on(ev.TasksPrepared(prepare, {"function": {"hash": FunctionBody("name", b"body")}}, {}, frozenset()))
        == []
    )


def test_accepted_tasks_stay_leased_after_the_session_until_the_lease_expires() -> None:
    world = World()
    world.serve(credit=2)
    world.dispatch(leased(1))
    assert not [action for action in world.hears(wire.Goodbye()) if isinstance(action, do.RequeueTasks)]
    world.on(ev.EndpointMaintained(ENDPOINT_ID, 7, [], []))
    world.after(POLICY.lease_s + 1)
    assert world.on(ev.EndpointMaintained(ENDPOINT_ID, 7, [], [])) == [do.ReleaseEndpoint(ENDPOINT_ID, 7)]
    assert world.core.status().endpoints == 0


def test_a_lease_renewed_while_the_session_ended_is_kept_until_it_expires() -> None:
    """The queue answers late, and the lease runs from then on: a forwarder that releases earlier would lose it."""
    world = World()
    world.serve(credit=1)
    world.dispatch(leased(1))
    world.on(ev.EndpointMaintained(ENDPOINT_ID, 7, [], []))
    assert any(isinstance(action, do.MaintainEndpoint) for action in world.after(POLICY.maintenance_s))
    world.hears(wire.Goodbye())
    world.mono += POLICY.maintenance_s / 2
    world.on(ev.EndpointMaintained(ENDPOINT_ID, 7, [], []))
    world.after(POLICY.lease_s - 1)
    assert world.on(ev.EndpointMaintained(ENDPOINT_ID, 7, [], [])) == []
    world.after(POLICY.maintenance_s)
    assert world.on(ev.EndpointMaintained(ENDPOINT_ID, 7, [], [])) == [do.ReleaseEndpoint(ENDPOINT_ID, 7)]


# -- results -----------------------------------------------------------------------------------------------------------


def test_the_first_result_is_flushed_at_once_and_later_ones_collect() -> None:
    world = World()
    world.serve(credit=3)
    world.dispatch(leased(1), leased(2), leased(3))
    first = the_flush(world.hears(success(1), b"one"))
    assert world.hears(success(2), b"two") == []
    assert world.hears(success(3), b"three") == []
    second = the_flush(world.on(recorded(first)))
    assert [result.result for result in second.batches[0].results] == [b"two", b"three"]


def test_a_recorded_result_is_pushed_acknowledged_and_marked() -> None:
    world = World()
    world.serve(credit=1)
    world.dispatch(leased(1))
    world.open_stream("group")
    flush = the_flush(world.hears(success(1), b"one"))
    assert flush.watchers == {OWNER_ID}
    push, acknowledged, mark = world.on(recorded(flush))
    assert isinstance(push, do.Send)
    assert push.routing_id == b"client"
    assert push.envelope.frames == (b"one",)
    assert sent([acknowledged]) == [wire.ResultsRecorded(tasks=(wire.TaskRef(task_id=task_id(1), attempt=1),))]
    assert mark == do.MarkFlushed({ENDPOINT_ID: [task_id(1)]})


def test_a_result_of_an_unknown_task_is_unverified() -> None:
    world = World()
    world.serve()
    [batch] = the_flush(world.hears(success(1), b"one")).batches
    assert batch.unverified == {task_id(1)}


def test_foreign_results_are_not_acknowledged() -> None:
    world = World()
    world.serve()
    flush = the_flush(world.hears(success(1), b"one"))
    outcome = ev.BatchFlushed(flush.batches[0], foreign=frozenset({task_id(1)}))
    assert world.on(ev.Flushed([outcome], {}, {}, EPOCH)) == []
    assert world.core.counters["foreign_results"] == 1


def test_a_transition_is_not_recorded_if_the_task_ends_in_time() -> None:
    world = World()
    world.serve(credit=1)
    world.dispatch(leased(1))
    flush = the_flush(world.hears(success(1), b"one"))
    world.on(recorded(flush))
    assert not [action for action in world.after(5) if isinstance(action, do.RecordTransitions)]


def test_a_function_with_the_body_of_another_has_its_own_name() -> None:
    world = World()
    world.serve(credit=2)
    world.core._context.functions.add("private", "hash", FunctionBody("ALICES-PRIVATE-NAME", b"body"))

    [prepare] = world.on(ev.TasksLeased(ENDPOINT_ID, 7, 2, [leased(1)]))
    assert isinstance(prepare, do.PrepareTasks), "it is fetched as if no other function had this body"
    assert prepare.functions == [("function", "hash")]
    [order] = sent(
        world.on(ev.TasksPrepared(prepare, {"function": {"hash": FunctionBody("name", b"body")}}, {}, frozenset()))
    )

    assert isinstance(order, wire.RunTasks)
    assert [function.name for function in order.functions] == ["name"]


def test_waiting_transitions_are_recorded_together() -> None:
    world = World()
    world.serve(credit=2)
    world.dispatch(leased(1), leased(2))
    move = wire.TaskTransition(task_id=task_id(2), attempt=1, state=TaskState.RUNNING, at=EPOCH)
    # A terminal state is not a transition that an agent may report.
    forged = wire.TaskTransition(task_id=task_id(1), attempt=1, state=TaskState.SUCCESS, at=EPOCH)
    world.hears(wire.TaskTransitions(transitions=(move, forged)))
    [record] = [action for action in world.after(POLICY.transitions_idle_s) if isinstance(action, do.RecordTransitions)]
    assert [(event.task_id, event.state, event.reporter) for event in record.events] == [
        (task_id(1), TaskState.WAITING_FOR_NODES, Reporter.FORWARDER),
        (task_id(2), TaskState.WAITING_FOR_NODES, Reporter.FORWARDER),
        (task_id(2), TaskState.RUNNING, Reporter.AGENT),
    ]


def test_an_agent_cannot_fill_the_history_of_a_task() -> None:
    world = World()
    world.serve(credit=1)
    world.dispatch(leased(1))
    recorded_events: list[TaskEvent] = []
    for _ in range(MAX_TRANSITIONS):
        moves = tuple(
            wire.TaskTransition(task_id=task_id(1), attempt=1, state=state, at=EPOCH, detail={"x": "y" * 60_000})
            for state in (TaskState.RUNNING, TaskState.WAITING_FOR_LAUNCH)
        )
        world.hears(wire.TaskTransitions(transitions=moves))
        for action in world.after(POLICY.transitions_idle_s):
            if isinstance(action, do.RecordTransitions):
                recorded_events += action.events
                world.on(ev.TransitionsRecorded())
    reported = [event for event in recorded_events if event.reporter is Reporter.AGENT]
    assert len(reported) == MAX_TRANSITIONS
    assert all(not event.detail for event in reported)


def test_the_history_has_each_retry_even_if_the_task_ends_before_it_is_recorded() -> None:
    world = World()
    world.serve(credit=1)
    world.dispatch(leased(1))
    detail = {"retry": 1, "retries": 3, "retry_at": EPOCH + 5.0, "error": "OSError"}
    waits = wire.TaskTransition(
        task_id=task_id(1), attempt=1, state=TaskState.WAITING_FOR_NODES, at=EPOCH, detail=detail | {"x": "free text"}
    )
    runs = wire.TaskTransition(task_id=task_id(1), attempt=1, state=TaskState.RUNNING, at=EPOCH)
    world.hears(wire.TaskTransitions(transitions=(waits, runs)))
    result = wire.ResultSpec(task_id=task_id(1), attempt=1, state=TaskState.SUCCESS, result=0)
    world.hears(wire.TaskResults(results=(result,)), b"r")
    [record] = [action for action in world.after(POLICY.transitions_busy_s) if isinstance(action, do.RecordTransitions)]
    assert [(event.state, event.detail) for event in record.events] == [(TaskState.WAITING_FOR_NODES, detail)]


# -- several forwarders ------------------------------------------------------------------------------------------------


def test_stream_opens_after_the_subscription_to_its_owner() -> None:
    world = World()
    request = wire.OpenStream(
        ticket=TICKETS.issue(CLIENT, expires_at=EPOCH + 60), protocol_versions=(1,), heartbeat_s=30.0
    )
    watch = do.WatchOwners([OWNER_ID], POLICY.watch_ttl_s)
    assert world.hears(request, peer=CLIENT, routing_id=b"client") == [watch]
    assert world.hears(request, peer=CLIENT, routing_id=b"another") == []
    assert world.hears(wire.Goodbye(), peer=CLIENT, routing_id=b"another") == [do.DropBacklog(b"another")]
    [opened] = sent(world.on(ev.OwnersWatched([OWNER_ID], frozenset({OWNER_ID}))))
    assert isinstance(opened, wire.StreamOpened)
    assert watch in world.after(POLICY.watch_s)


def test_results_of_other_forwarders_are_pushed_and_not_shared_again() -> None:
    world = World()
    world.on(ev.Announced(others=1))
    world.open_stream("group")
    result = TaskResult(task_id(1), "elsewhere", 1, TaskState.SUCCESS, Reporter.AGENT, result=b"one")
    result = msgspec.structs.replace(result, owner_id=OWNER_ID, task_group_id="group")
    [push] = world.on(ev.ResultsHeard([SharedResults([result], {}, EPOCH)]))
    assert isinstance(push, do.Send)
    assert push.envelope.frames == (b"one",)


def test_results_are_shared_one_batch_at_a_time() -> None:
    world = World()
    world.on(ev.Announced(others=1))
    world.serve(credit=3)
    world.dispatch(leased(1), leased(2), leased(3))

    def shares(actions: Sequence[do.Action]) -> list[list[str]]:
        steps = [action for action in actions if isinstance(action, do.ShareResults)]
        return [[result.task_id for _, results in step.groups for result in results] for step in steps]

    assert shares(world.on(recorded(the_flush(world.hears(success(1), b"one"))))) == [[task_id(1)]]
    assert shares(world.on(recorded(the_flush(world.hears(success(2), b"two"))))) == []
    assert shares(world.on(recorded(the_flush(world.hears(success(3), b"three"))))) == []
    assert shares(world.on(ev.ResultsShared())) == [[task_id(2), task_id(3)]]


def test_the_share_buffer_is_bounded() -> None:
    buffer = ShareBuffer(limit=2)
    buffer.on_announced(others=1)
    results = [TaskResult(task_id(n), ENDPOINT_ID, 1, TaskState.SUCCESS, Reporter.AGENT) for n in range(3)]
    for result in results:
        buffer.add([result], recorded_at=EPOCH)
    share = buffer.next_share(url_ttl_s=1)
    assert share is not None
    assert [result for _, group in share.groups for result in group] == results[1:]
    buffer.on_announced(others=0)
    buffer.add(results, recorded_at=EPOCH)
    buffer.on_shared()
    assert buffer.next_share(url_ttl_s=1) is None


@pytest.mark.parametrize("event", [ev.PubSubLost(), ev.OwnersWatched([OWNER_ID], frozenset({OWNER_ID}))])
def test_a_stream_does_not_resume_over_a_gap(event: ev.Event) -> None:
    world = World()
    [opened] = sent(world.open_stream("group"))
    assert isinstance(opened, wire.StreamOpened)
    request = wire.OpenStream(
        ticket=TICKETS.issue(CLIENT, expires_at=EPOCH + 60),
        protocol_versions=(1,),
        heartbeat_s=30.0,
        cursor=opened.cursor,
    )
    [resumed] = sent(world.hears(request, peer=CLIENT, routing_id=b"second"))
    world.on(event)
    [broken] = sent(world.hears(request, peer=CLIENT, routing_id=b"third"))
    assert isinstance(resumed, wire.StreamOpened)
    assert isinstance(broken, wire.StreamOpened)
    assert (resumed.resumed, broken.resumed) == (True, False)


def test_an_endpoint_that_another_forwarder_serves_for_another_agent_is_in_use() -> None:
    world = World()
    world.hears(hello())
    assert world.on(ev.ClaimRefused(ENDPOINT_ID, 99, EndpointInUse("an earlier claim"))) == []
    actions = world.on(ev.ClaimRefused(ENDPOINT_ID, 1, EndpointInUse("another agent")))
    [refused] = sent(actions)
    assert isinstance(refused, wire.Refused)
    assert refused.error["code"] == "ENDPOINT_IN_USE"
    assert [type(action) for action in actions] == [do.DropBacklog, do.Send]
    assert (world.core.status().endpoints, world.core.status().connections) == (0, 0)


def test_an_endpoint_without_a_session_is_maintained_without_a_spool() -> None:
    world = World()
    world.serve(credit=1)
    world.dispatch(leased(1))
    world.on(ev.EndpointMaintained(ENDPOINT_ID, 7, [], []))
    [presence] = [action for action in world.hears(wire.Goodbye()) if isinstance(action, do.SetPresence)]
    assert not presence.online
    [step] = [action for action in world.after(POLICY.maintenance_s) if isinstance(action, do.MaintainEndpoint)]
    assert step.spool_id == ""


@pytest.mark.parametrize("data_only", [False, True])
def test_tasks_say_whether_their_endpoint_runs_certain_functions_only(data_only: bool) -> None:
    world = World()
    world.hears(hello())
    world.on(ev.EndpointClaimed(ENDPOINT_ID, 1, 7, data_only))
    world.on(ev.LeasesRead(ENDPOINT_ID, 7, {}))
    world.hears(wire.Credit(tasks=2))
    world.core._context.functions.add("function", "hash", FunctionBody("name", b"body"))
    [order] = sent(world.on(ev.TasksLeased(ENDPOINT_ID, 7, 500, [leased(1), leased(2)])))
    assert isinstance(order, wire.RunTasks)
    assert [spec.data_only for spec in order.tasks] == [data_only, data_only]


@pytest.mark.parametrize("containers", [(), ("docker",), ("docker", "apptainer")])
def test_a_task_is_not_sent_to_an_agent_that_does_not_run_its_environment(containers: tuple[str, ...]) -> None:
    world = World()
    world.hears(hello(capabilities=wire.Capabilities(containers=containers)))
    world.on(ev.EndpointClaimed(ENDPOINT_ID, 1, 7))
    world.on(ev.LeasesRead(ENDPOINT_ID, 7, {}))
    world.hears(wire.Credit(tasks=2))
    world.core._context.functions.add("function", "hash", FunctionBody("name", b"body"))
    sci = Environment(type="apptainer", location="/images/sci.sif", name="sci")

    actions = world.on(ev.TasksLeased(ENDPOINT_ID, 7, 500, [leased(1, environment=sci), leased(2)]))

    [order] = sent(actions)
    assert isinstance(order, wire.RunTasks)
    if "apptainer" in containers:
        assert [spec.options.environment for spec in order.tasks] == [sci, None]
        return
    assert [spec.task_id for spec in order.tasks] == [task_id(2)]
    [result] = the_flush(actions).batches[0].results
    assert result.error is not None
    assert (result.task_id, result.state, result.error.code) == (task_id(1), TaskState.FAILED, "ENDPOINT_INCOMPATIBLE")
    assert "requires environment sci (apptainer)" in result.error.message


# -- losing the queue, or the endpoint ---------------------------------------------------------------------------------


def test_after_a_wipe_the_session_stays_and_results_wait_for_the_rebuilt_queue() -> None:
    world = World()
    world.serve(credit=2)
    world.dispatch(leased(1), leased(2))
    flush = the_flush(world.hears(success(1), b"one"))
    lost = ev.Flushed([ev.BatchFlushed(flush.batches[0], lost=True)], {}, {}, EPOCH)
    assert world.on(lost) == [do.ClaimEndpoint(ENDPOINT_ID, 1, AGENT.public_key, SPOOL_ID, POLICY.ownership_ttl_s)]
    [read] = world.on(ev.EndpointClaimed(ENDPOINT_ID, 1, 8))
    assert isinstance(read, do.ReadLeases)
    [restore] = world.on(ev.StepLost(read))
    assert isinstance(restore, do.RestoreQueue)
    assert restore.held == {task_id(1): 1, task_id(2): 1}
    world.on(ev.QueueRestored(ENDPOINT_ID, 8))
    actions = world.on(ev.LeasesRead(ENDPOINT_ID, 8, {task_id(1): 1, task_id(2): 1}))
    assert sent(actions) == []
    [batch] = the_flush(actions).batches
    assert (batch.fence, [result.task_id for result in batch.results]) == (8, [task_id(1)])


def test_fenced_endpoint_is_dropped_and_its_agent_redirected() -> None:
    world = World()
    world.serve(credit=2)
    actions = world.on(ev.StepFenced(do.LeaseTasks(ENDPOINT_ID, 7, 2, 30.0)))
    [move] = sent(actions)
    assert isinstance(move, wire.Redirect)
    assert move.retry_after_s == POLICY.redirect_spread_s / 2
    assert world.hears(success(1), b"one") == []  # late messages of the agent are ignored
    assert world.on(ev.WorkAvailable([ENDPOINT_ID])) == []


def errors_of(actions: Sequence[do.Action]) -> list[tuple[TaskState, str]]:
    [batch] = the_flush(actions).batches
    return [(result.state, result.error.code) for result in batch.results if result.error]


def test_expired_leases_end_as_failed_or_cancelled() -> None:
    world = World()
    world.serve()
    actions = world.on(
        ev.EndpointMaintained(ENDPOINT_ID, 7, [leased(1, attempt=3), leased(2, cancel_requested=True)], [])
    )
    assert errors_of(actions) == [
        (TaskState.DEAD_LETTERED, "TASK_DEAD_LETTERED"),
        (TaskState.CANCELLED, "TASK_CANCELLED"),
    ]


def test_an_expired_lease_of_a_task_that_may_not_run_twice_is_lost_only_if_the_task_was_sent() -> None:
    world = World()
    world.serve()
    reaped = [leased(1, idempotent=False), leased(2, idempotent=False)]
    assert do.ReadAttempts(ENDPOINT_ID, 7, reaped) in world.on(ev.EndpointMaintained(ENDPOINT_ID, 7, reaped, []))
    assert world.on(ev.EndpointMaintained(ENDPOINT_ID, 7, reaped, [])) == []  # the database is being asked
    actions = world.on(ev.AttemptsRead(ENDPOINT_ID, 7, reaped, {task_id(1): 1, task_id(2): 0}))
    assert do.RequeueTasks(ENDPOINT_ID, 7, [task_id(2)]) in actions
    assert errors_of(actions) == [(TaskState.LOST, "TASK_LOST")]


def test_expired_leases_that_return_to_the_queue_do_not_end_meanwhile() -> None:
    world = World()
    world.serve(credit=5)
    world.dispatch(leased(2))
    reaped = [leased(1, idempotent=False)]
    world.on(ev.EndpointMaintained(ENDPOINT_ID, 7, reaped, []))
    [maintain] = [each for each in world.after(POLICY.maintenance_s) if isinstance(each, do.MaintainEndpoint)]
    world.on(ev.AttemptsRead(ENDPOINT_ID, 7, reaped, {task_id(1): 0}))
    assert world.on(ev.EndpointMaintained(ENDPOINT_ID, 7, reaped, [])) == []  # read before the lease returned
    assert not [each for each in world.after(POLICY.maintenance_s) if isinstance(each, do.MaintainEndpoint)]
    assert maintain in world.on(ev.TasksRequeued(ENDPOINT_ID, 7))
    reaped = [leased(1, attempt=2, idempotent=False)]
    actions = world.on(ev.EndpointMaintained(ENDPOINT_ID, 7, reaped, []))
    assert actions == [do.ReadAttempts(ENDPOINT_ID, 7, reaped)]


def test_leases_of_a_connected_agent_outlast_any_store_outage() -> None:
    world = World()
    world.serve(credit=5)
    world.dispatch(leased(1))
    waits_for_database = leased(2, idempotent=False)
    world.on(ev.TasksLeased(ENDPOINT_ID, 7, 1, [waits_for_database]))
    world.mono += 10 * POLICY.lease_s  # and the queue reports the expired leases
    [record] = world.on(ev.EndpointMaintained(ENDPOINT_ID, 7, [leased(1), waits_for_database], []))
    assert isinstance(record, do.RecordTransitions)  # of the sent task; no task ends
    assert renewed(world.after(POLICY.maintenance_s)) == [task_id(1), task_id(2)]


def test_results_that_did_not_reach_the_database_are_flushed_again() -> None:
    world = World()
    world.serve()
    left = TaskResult(task_id(1), ENDPOINT_ID, 1, TaskState.SUCCESS, Reporter.AGENT, result=b"one")
    flush = the_flush(world.on(ev.EndpointMaintained(ENDPOINT_ID, 7, [], [left])))
    assert flush.batches[0].results == [left]


# -- cancelling --------------------------------------------------------------------------------------------------------


def test_a_cancel_request_reaches_the_agent_once() -> None:
    world = World()
    world.serve(credit=5)
    world.dispatch(leased(1))
    assert do.ReadCancels(ENDPOINT_ID, 7) in world.on(ev.WorkAvailable([ENDPOINT_ID]))
    assert sent(world.on(ev.CancelsRead(ENDPOINT_ID, 7, [task_id(1)]))) == [wire.CancelTasks(task_ids=(task_id(1),))]
    assert world.on(ev.CancelsRead(ENDPOINT_ID, 7, [task_id(1)])) == []


def test_a_task_cancelled_during_preparation_is_not_sent() -> None:
    world = World()
    world.serve(credit=5)
    [prepare] = world.on(ev.TasksLeased(ENDPOINT_ID, 7, 5, [leased(1)]))
    assert isinstance(prepare, do.PrepareTasks)
    assert world.on(ev.CancelsRead(ENDPOINT_ID, 7, [task_id(1)])) == []
    flush = the_flush(
        world.on(ev.TasksPrepared(prepare, {"function": {"hash": FunctionBody("name", b"body")}}, {}, frozenset()))
    )
    assert [result.state for result in flush.batches[0].results] == [TaskState.CANCELLED]


# -- time --------------------------------------------------------------------------------------------------------------


def test_heartbeats_are_sent_when_idle_and_silence_ends_a_session() -> None:
    world = World()
    world.serve(heartbeat_s=30.0)
    assert wire.Heartbeat(at=EPOCH + 30) in sent(world.passes(30))
    actions = world.passes(60)
    assert do.SetPresence(ENDPOINT_ID, 7, False, ONLINE, POLICY.ownership_ttl_s) in actions
    assert world.core.status().connections == 0


def test_the_announced_idle_time_follows_the_monotonic_clock() -> None:
    world = World()

    def idle_s() -> float | None:
        announced = [action.info for action in world.after(POLICY.announce_s) if isinstance(action, do.Announce)]
        assert announced
        return announced[-1].idle_s

    first = idle_s()
    world.epoch_offset += 3600
    second = idle_s()
    assert first is not None
    assert second is not None
    assert POLICY.announce_s <= second - first < 3600
    world.serve()
    assert idle_s() is None
    world.on(ev.PeerDisconnected(b"agent"))
    left = idle_s()
    assert left is not None
    world.epoch_offset -= 7200
    later = idle_s()
    assert later is not None
    assert left < later < left + 3600


def test_maintenance_renews_leases_of_sent_accepted_and_prepared_tasks() -> None:
    world = World()
    world.serve(credit=5)
    world.dispatch(leased(1))
    more = [leased(2), leased(3, function_hash="unknown")]
    world.on(ev.EndpointMaintained(ENDPOINT_ID, 7, [], []), ev.TasksLeased(ENDPOINT_ID, 7, 4, more))
    assert renewed(world.after(POLICY.maintenance_s)) == [task_id(1), task_id(2), task_id(3)]


def renewed(actions: Sequence[do.Action]) -> Sequence[str]:
    [step] = [action for action in actions if isinstance(action, do.MaintainEndpoint)]
    return step.renew


def send_once_only(world: World, number: int) -> None:
    """A task that may not run twice is leased, permitted and sent."""
    world.core._context.functions.add("function", "hash", FunctionBody("name", b"body"))
    actions = world.on(ev.TasksLeased(ENDPOINT_ID, 7, 500, [leased(number, idempotent=False)]))
    [order] = [action for action in actions if isinstance(action, do.PrepareTasks)]
    world.on(ev.TasksPrepared(order, {}, {}, frozenset(), {}))


def test_non_idempotent_tasks_stay_leased_while_their_agent_may_return() -> None:
    world = World()
    world.serve(credit=5)
    world.dispatch(leased(1))
    send_once_only(world, 2)
    send_once_only(world, 3)
    world.hears(wire.TasksAccepted(tasks=(wire.TaskRef(task_id=task_id(3), attempt=1),)))
    world.on(ev.EndpointMaintained(ENDPOINT_ID, 7, [], []))
    assert not [action for action in world.hears(wire.Goodbye()) if isinstance(action, do.RequeueTasks)]
    until = world.mono + POLICY.return_s
    while world.mono + POLICY.maintenance_s < until:
        assert renewed(world.after(POLICY.maintenance_s)) == [task_id(2), task_id(3)]
        assert world.on(ev.EndpointMaintained(ENDPOINT_ID, 7, [], [])) == []
    assert renewed(world.after(POLICY.maintenance_s)) == []


def test_a_silent_agent_gets_no_more_tasks_until_its_next_message() -> None:
    world = World()
    world.serve(credit=5)
    world.core._context.functions.add("function", "hash", FunctionBody("name", b"body"))
    world.on(ev.TasksLeased(ENDPOINT_ID, 7, 5, [leased(1)]))
    world.passes(int(POLICY.silence_s) + 1)
    assert not [action for action in world.on(ev.WorkAvailable([ENDPOINT_ID])) if isinstance(action, do.LeaseTasks)]
    actions = world.hears(wire.TasksAccepted(tasks=(wire.TaskRef(task_id=task_id(1), attempt=1),)))
    assert [action.limit for action in actions if isinstance(action, do.LeaseTasks)] == [4]


def test_an_idle_agent_is_not_silent() -> None:
    world = World()
    world.serve(credit=5)
    world.on(ev.TasksLeased(ENDPOINT_ID, 7, 5, []))
    world.passes(20)
    assert [action for action in world.on(ev.WorkAvailable([ENDPOINT_ID])) if isinstance(action, do.LeaseTasks)]


def test_a_forwarder_that_was_suspended_closes_no_session_for_silence() -> None:
    """Messages that the peers sent meanwhile are unread in its socket, or under way."""
    world = World()
    world.serve(credit=5)
    send_once_only(world, 1)
    world.on(ev.EndpointMaintained(ENDPOINT_ID, 7, [], []))
    assert renewed(world.after(300)) == [task_id(1)]
    assert world.core.status().connections == 1
    world.passes(90)
    assert world.core.status().connections == 0


def test_the_acceptance_of_a_non_idempotent_task_is_recorded() -> None:
    world = World()
    world.serve(credit=5)
    send_once_only(world, 1)
    world.hears(wire.TasksAccepted(tasks=(wire.TaskRef(task_id=task_id(1), attempt=1),)))
    [record] = [action for action in world.after(POLICY.transitions_idle_s) if isinstance(action, do.RecordTransitions)]
    moved = [(event.task_id, event.state, event.reporter) for event in record.events]
    assert moved == [(task_id(1), TaskState.WAITING_FOR_NODES, Reporter.AGENT)]


# -- old copies of a spool ---------------------------------------------------------------------------------------------


def spool_generations(actions: Sequence[do.Action]) -> list[int]:
    return [action.spool_generation for action in actions if isinstance(action, do.RecordSpoolGeneration)]


def test_spool_generations_are_recorded_one_step_at_a_time() -> None:
    world = World()
    world.hears(hello(spool_generation=3))
    world.on(ev.EndpointClaimed(ENDPOINT_ID, 1, 7), ev.LeasesRead(ENDPOINT_ID, 7, {}))
    assert spool_generations(world.hears(wire.Heartbeat(at=1.0, spool_generation=3))) == []
    assert spool_generations(world.hears(wire.Heartbeat(at=1.0, spool_generation=4))) == [4]
    assert spool_generations(world.hears(wire.Heartbeat(at=1.0, spool_generation=5))) == []
    assert spool_generations(world.hears(wire.Heartbeat(at=1.0, spool_generation=6))) == []
    assert spool_generations(world.on(ev.SpoolGenerationRecorded(ENDPOINT_ID, 7, 4))) == []
    assert spool_generations(world.after(POLICY.record_s)) == [6]
    assert spool_generations(world.on(ev.SpoolGenerationRecorded(ENDPOINT_ID, 7, 6))) == []
    assert spool_generations(world.after(POLICY.record_s)) == []


def test_writes_caused_by_heartbeats_are_rate_limited() -> None:
    world = World()
    world.serve(spool_generation=0)
    world.after(POLICY.record_s)
    written: list[do.Action] = []
    for number in range(1, 101):  # within ten seconds
        report = wire.EndpointReport(total_workers=number)
        written += world.hears(wire.Heartbeat(at=1.0, report=report, spool_generation=number))
        written += world.after(0.1)
        if last := spool_generations(written[-5:]):
            written += world.on(ev.SpoolGenerationRecorded(ENDPOINT_ID, 7, last[-1]))
    written += world.after(POLICY.record_s)
    written += world.passes(5)
    presences = [action for action in written if isinstance(action, do.SetPresence)]
    assert 2 <= len(spool_generations(written)) <= 12
    assert 2 <= len(presences) <= 13
    assert spool_generations(written)[-1] == presences[-1].status.total_workers == 100, "the last value is recorded"


def reported(world: World, **numbers: Any) -> list[do.SetPresence]:
    """The records that a report causes at once."""
    actions = world.hears(wire.Heartbeat(at=1.0, report=wire.EndpointReport(**numbers)))
    return [action for action in actions if isinstance(action, do.SetPresence)]


def test_numbers_are_recorded_at_once_with_the_time_of_the_report() -> None:
    world = World()
    world.serve()
    [first] = reported(world)
    assert first.status.reported_at == world.now.epoch, "an endpoint without workers has reported, too"
    world.after(POLICY.record_s)
    assert reported(world) == [], "nothing has changed"
    [busy] = reported(world, managers=1, total_workers=4, idle_workers=3, outstanding_tasks=1, blocks=1)
    assert (busy.status.idle_workers, busy.status.blocks) == (3, 1)
    assert busy.status.reported_at == world.now.epoch


def test_unchanged_numbers_are_recorded_again_when_presence_is_nearly_due() -> None:
    world = World()
    world.serve()
    reported(world, managers=1)
    world.mono += POLICY.presence_s / 2
    assert reported(world, managers=1) == []
    world.mono += POLICY.presence_s / 2
    [again] = reported(world, managers=1)
    assert again.status.reported_at == world.now.epoch


def test_a_flood_of_reports_costs_one_record_a_second_and_soon_one_in_five() -> None:
    world = World()
    world.serve()
    times: list[float] = []
    for number in range(1, 60_001):  # a thousand a second
        world.mono += 0.001
        times += [world.mono for _ in reported(world, outstanding_tasks=number)]
        if number % 500 == 0:
            times += [world.mono for action in world.on(ev.Tick()) if isinstance(action, do.SetPresence)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert min(gaps) > 0.99 * POLICY.record_s
    assert len(times) <= POLICY.record_burst + 60 / POLICY.record_sustained_s + 2


# -- steps that a store refuses ----------------------------------------------------------------------------------------


def test_a_step_that_fails_ends_the_session_of_its_endpoint() -> None:
    world = World()
    world.serve(credit=1)
    [lease] = [action for action in world.on(ev.WorkAvailable([ENDPOINT_ID])) if isinstance(action, do.LeaseTasks)] or [
        do.LeaseTasks(ENDPOINT_ID, 7, 1, POLICY.lease_s)
    ]
    assert world.on(ev.StepFailed(do.LeaseTasks(ENDPOINT_ID, 6, 1, POLICY.lease_s))) == [], "earlier fence"
    actions = world.on(ev.StepFailed(lease))
    assert do.ReleaseEndpoint(ENDPOINT_ID, 7) in actions
    assert [type(message) for message in sent(actions)] == [wire.Redirect]
    assert world.core.counters["endpoints_failed"] == 1
    assert world.on(ev.StepFailed(lease)) == []


def test_an_agent_with_an_old_copy_of_the_spool_is_refused_and_the_other_one_stays() -> None:
    world = World()
    world.serve(spool_generation=3)
    world.hears(wire.Heartbeat(at=1.0, spool_generation=4))
    copy = hello(spool_generation=3, instance_id="00000000-0000-4000-8000-000000000002")
    [refusal] = sent(world.hears(copy, routing_id=b"copy"))
    assert isinstance(refusal, wire.Refused)
    assert refusal.error["code"] == "SPOOL_OUTDATED"
    assert "--new-spool" in refusal.error["hint"]
    assert spool_generations(world.hears(wire.Heartbeat(at=1.0, spool_generation=5))) == []  # it is still connected
    world.on(ev.SpoolGenerationRecorded(ENDPOINT_ID, 7, 4))
    assert spool_generations(world.after(POLICY.record_s)) == [5]


def test_endpoints_without_tasks_are_refreshed_in_one_step() -> None:
    world = World()
    world.serve(credit=1)
    world.on(ev.EndpointMaintained(ENDPOINT_ID, 7, [], []))
    refresh = do.RefreshEndpoints({ENDPOINT_ID: (7, SPOOL_ID)}, POLICY.ownership_ttl_s)
    actions = world.after(POLICY.maintenance_s)
    assert refresh in actions
    assert not [action for action in actions if isinstance(action, do.MaintainEndpoint)]
    assert refresh not in world.after(POLICY.maintenance_s)  # one at a time
    assert world.on(ev.Refreshed(refresh.owned, frozenset())) == []
    assert refresh in world.after(POLICY.maintenance_s)
    maintain = do.MaintainEndpoint(ENDPOINT_ID, 7, [], SPOOL_ID, POLICY.ownership_ttl_s, POLICY.lease_s)
    assert maintain in world.on(ev.Refreshed(refresh.owned, frozenset({ENDPOINT_ID})))


def test_many_endpoints_are_swept_less_often() -> None:
    world = World(Policy(sweeps_per_s=0.5))
    world.serve(credit=1)
    world.after(1)  # this sweep schedules the next one: in two seconds
    world.on(ev.ActivityFound([]))
    assert not [action for action in world.after(1.5) if isinstance(action, do.SweepQueues)]
    assert [action for action in world.after(1) if isinstance(action, do.SweepQueues)]


def test_all_queues_are_swept_when_wake_ups_may_have_been_missed() -> None:
    world = World(Policy(sweeps_per_s=0.001))
    world.serve()
    world.after(1)  # this sweep schedules the next one: in a quarter of an hour
    world.on(ev.ActivityFound([]))
    assert not [action for action in world.after(10) if isinstance(action, do.SweepQueues)]
    world.on(ev.PubSubLost())
    assert do.SweepQueues({ENDPOINT_ID: 7}) in world.after(1)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_malformed_messages_are_refused_once() -> None:
    world = World()
    malformed = ev.MalformedReceived(b"agent", AGENT, FrameMalformed("nonsense"))
    [refused] = sent(world.on(malformed))
    assert isinstance(refused, wire.Refused)
    assert refused.error["code"] == "FRAME_MALFORMED"
    assert world.on(malformed) == []
    assert world.core.counters["protocol_errors"] == 2


def test_another_peer_on_a_reused_routing_id_does_not_get_the_session() -> None:
    world = World()
    world.serve(credit=1)
    other = PeerKey("other key", PeerKind.AGENT, "00000000-0000-4000-8000-00000000000f")
    [refused] = sent(world.hears(wire.Credit(tasks=1), peer=other))
    assert isinstance(refused, wire.Refused)
    assert world.core.status().endpoints == 0


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"spool_id": "00000000-0000-4000-8000-000000000006"}, "ENDPOINT_IN_USE"),
        ({"endpoint_id": "00000000-0000-4000-8000-00000000000f"}, "ENDPOINT_MISMATCH"),
        ({"ticket": "rubbish"}, "TICKET_INVALID"),
        ({"protocol_versions": (2,)}, "VERSION_UNSUPPORTED"),
        ({"spool_id": "\0"}, "PROTOCOL_ERROR"),
    ],
)
def test_an_invalid_second_hello_is_refused_and_the_first_session_stays(fields: dict[str, Any], code: str) -> None:
    world = World()
    world.serve(credit=1)
    refused, *probes = sent(world.hears(hello(**fields), routing_id=b"second"))
    assert probes == [wire.Heartbeat(at=EPOCH)] * (code == "ENDPOINT_IN_USE")  # probes the first connection
    assert isinstance(refused, wire.Refused)
    assert refused.error["code"] == code
    assert world.core.status().endpoints == 1


def test_a_restarted_agent_takes_over_from_its_former_process() -> None:
    world = World()
    world.serve(credit=1)
    restarted = hello(instance_id="00000000-0000-4000-8000-000000000002")
    actions = world.hears(restarted, routing_id=b"second")
    assert do.ClaimEndpoint(ENDPOINT_ID, 2, AGENT.public_key, SPOOL_ID, POLICY.ownership_ttl_s) in actions
    [refused] = [action for action in actions if isinstance(action, do.Send)]
    assert refused.routing_id == b"agent"


def test_a_dead_agent_does_not_block_another_one() -> None:
    world = World()
    world.serve(credit=1)
    world.mono += 90  # and no tick has noticed yet
    actions = world.hears(hello(spool_id="00000000-0000-4000-8000-000000000006"), routing_id=b"second")
    assert [action.endpoint_id for action in actions if isinstance(action, do.ClaimEndpoint)] == [ENDPOINT_ID]


# -- drain -------------------------------------------------------------------------------------------------------------


def test_a_drain_redirects_all_peers_then_releases_endpoints() -> None:
    world = World()
    world.serve(credit=1)
    world.open_stream()
    actions = world.on(ev.DrainOrdered())
    assert [action.info.draining for action in actions if isinstance(action, do.Announce)] == [True]
    redirects = [*sent(actions), *sent(world.after(0.2))]
    assert [type(message) for message in redirects] == [wire.Redirect, wire.Redirect]
    assert not world.is_drained()
    actions = world.hears(wire.Goodbye()) + world.after(0.2)
    assert world.is_drained()
    assert actions[-2:] == [do.ReleaseEndpoint(ENDPOINT_ID, 7), do.Withdraw("forwarder")]


def test_a_drain_waits_for_results_up_to_its_limit() -> None:
    world = World()
    world.serve(credit=1)
    world.dispatch(leased(1))
    world.on(ev.DrainOrdered())
    world.hears(success(1), b"one")
    world.hears(wire.Goodbye())
    world.after(POLICY.drain_s / 2)
    assert not world.is_drained()
    world.after(POLICY.drain_s / 2)
    assert world.is_drained()


def test_a_drain_leases_no_more_tasks() -> None:
    world = World(Policy(redirects_per_s=0.001))
    world.open_stream()
    world.serve(credit=1)
    world.on(ev.DrainOrdered())  # the client is redirected first, the agent much later
    assert world.on(ev.TasksLeased(ENDPOINT_ID, 7, 1, [leased(1)])) == [do.RequeueTasks(ENDPOINT_ID, 7, [task_id(1)])]
    assert world.on(ev.WorkAvailable([ENDPOINT_ID])) == []


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_metrics_are_logged_once_a_minute() -> None:
    world = World()
    world.serve(credit=2)
    world.dispatch(leased(1), leased(2, attempt=2))
    world.on(recorded(the_flush(world.hears(success(1), b"result"))))

    def readings() -> list[Mapping[str, str | int | float]]:
        actions = world.core.handle([ev.Tick()], world.now)
        return [action.fields for action in actions if isinstance(action, do.Log) and action.message == "minute"]

    assert readings() == []
    world.mono += POLICY.meter_s
    (reading,) = readings()
    assert reading["tasks_dispatched"] == reading["tasks_redelivered"] == reading["tasks_finished"] == 1
    assert (reading["tasks_failed"], reading["queue_wait_s"]) == (0, 1.0)
    world.mono += POLICY.meter_s
    (reading,) = readings()
    assert reading["tasks_finished"] == 0


# -- tickets that end --------------------------------------------------------------------------------------------------


def test_an_agent_whose_ticket_ends_is_redirected_and_finishes_its_messages() -> None:
    world = World()
    world.serve(credit=3, ticket=TICKETS.issue(AGENT, expires_at=EPOCH + 20))
    world.dispatch(leased(1))
    assert [type(message) for message in sent(world.passes(19))] == []

    [redirect] = sent(world.passes(2))

    assert isinstance(redirect, wire.Redirect)
    assert redirect.reason == "the ticket has expired"
    assert world.core.counters["tickets_ended"] == 1
    # It gets no more tasks, and its results under way count.
    assert not [each for each in world.on(ev.WorkAvailable([ENDPOINT_ID])) if isinstance(each, do.LeaseTasks)]
    [batch] = the_flush(world.hears(success(1), b"one")).batches
    assert [result.task_id for result in batch.results] == [task_id(1)]


def test_a_peer_that_stays_after_its_ticket_ended_is_refused() -> None:
    world = World()
    world.serve(credit=3, ticket=TICKETS.issue(AGENT, expires_at=EPOCH + 20))
    world.open_stream("group")
    world.passes(45)
    assert len(world.core._connections) == 2

    actions = world.passes(6)

    [refused] = [each for each in sent(actions) if isinstance(each, wire.Refused)]
    assert refused.error["code"] == "TICKET_INVALID"
    assert [each.routing_id for each in actions if isinstance(each, do.DropBacklog)] == [b"agent"]
    assert len(world.core._connections) == 1, "the client's ticket ends later"
    assert world.core.counters["refused.TICKET_INVALID"] == 1


def test_a_client_whose_ticket_ends_gets_no_more_results_and_misses_none_with_a_new_one() -> None:
    world = World()
    world.serve(credit=3)
    [begun] = sent(world.open_stream("group", ticket_s=60))
    assert isinstance(begun, wire.StreamOpened)
    [redirect] = [each for each in sent(world.passes(61)) if isinstance(each, wire.Redirect)]
    assert redirect.reason == "the ticket has expired"
    world.dispatch(leased(1))
    actions = world.on(recorded(the_flush(world.hears(success(1), b"one"))))
    assert not [each for each in sent(actions) if isinstance(each, wire.ResultsReady)]

    request = wire.OpenStream(
        ticket=TICKETS.issue(CLIENT, expires_at=EPOCH + 600),
        protocol_versions=(1,),
        heartbeat_s=30.0,
        task_group_ids=("group",),
        cursor=begun.cursor,
    )
    opened, ready = sent(world.hears(request, peer=CLIENT, routing_id=b"again"))
    assert isinstance(opened, wire.StreamOpened)
    assert isinstance(ready, wire.ResultsReady)
    assert [result.task_id for result in ready.results] == [task_id(1)]


# -- signed functions --------------------------------------------------------------------------------------------------

SIGNED = wire.Capabilities(signed_functions=True)


def not_signed(number: int) -> wire.TaskResults:
    error = ErrorRecord("FUNCTION_NOT_SIGNED", "it has no signature").to_json()
    return wire.TaskResults(
        results=(wire.ResultSpec(task_id=task_id(number), attempt=1, state=TaskState.FAILED, error=error),)
    )


def sends(world: World, number: int, *, signature: str, function_id: str = "function") -> list[str]:
    """The signatures that travel with a task, of a function that the database has with this one."""
    [*_, prepare] = world.on(ev.TasksLeased(ENDPOINT_ID, 7, 5, [leased(number, function_id=function_id)]))
    if isinstance(prepare, do.PrepareTasks):
        body = FunctionBody("name", b"body", signature)
        [order] = sent(world.on(ev.TasksPrepared(prepare, {function_id: {"hash": body}}, {}, frozenset())))
    else:
        [order] = sent([prepare])
    assert isinstance(order, wire.RunTasks)
    return [function.signature for function in order.functions]


def test_each_function_is_sent_with_its_own_signature() -> None:
    world = World()
    world.serve(credit=9, capabilities=SIGNED)
    assert sends(world, 1, signature="a") == ["a"]
    assert sends(world, 2, signature="a") == [], "once in a session"
    assert sends(world, 3, signature="b", function_id="same body") == ["b"]


def test_functions_of_other_endpoints_are_known_by_their_body() -> None:
    world = World()
    world.serve(credit=9)
    assert sends(world, 1, signature="a") == ["a"]
    assert sends(world, 2, signature="b", function_id="same body") == []


def test_a_function_that_is_signed_later_is_read_again() -> None:
    """Neither the cache nor what was sent in the session hides the signature."""
    world = World()
    world.core._context.functions.add("function", "hash", FunctionBody("name", b"body"))
    world.serve(credit=9, capabilities=SIGNED)
    assert sends(world, 1, signature="") == [""]
    world.hears(not_signed(1))
    assert sends(world, 2, signature="a") == ["a"]
