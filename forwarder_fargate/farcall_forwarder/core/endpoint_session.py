"""Endpoint session: the queue, the leases and the agent's connection of one endpoint, as a state machine.

::

    CLAIMING ──▶ READING ──▶ COMPARING ──▶ SERVING
       ▲            │ data lost              │ data lost
       │            ▼                        │
       │        RESTORING ──▶ READING        │
       └─────────────────────────────────────┘

Each greeting of an agent starts an endpoint session of a new generation, without memory of the one before: the tasks
that the agent holds are compared with the queue's leases and the database. When the queue loses its data, the same
phases follow under a new fence, while the connection stays open and the lease table has the tasks that the agent holds.
After the agent has disconnected, the endpoint session lives on until the agent's leases have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from farcall_common import wire
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.dispatcher import Dispatcher
from farcall_forwarder.core.endpoint_state import EndpointPhase, EndpointState, ForwarderContext
from farcall_forwarder.core.leases import Stage
from farcall_forwarder.core.policy import Instant
from farcall_forwarder.core.reports import Reports
from farcall_forwarder.core.resume import compare
from farcall_forwarder.core.sessions import PeerSession
from farcall_forwarder.core.upkeep import Upkeep


class EndpointSession:
    """One endpoint in one generation: claims it, compares its tasks, then serves it. Events of an earlier fence or
    generation are ignored."""

    def __init__(
        self,
        endpoint_id: str,
        generation: int,
        session: PeerSession,
        hello: wire.Hello,
        context: ForwarderContext,
        *,
        now: Instant,
    ) -> None:
        self.instance_id = hello.instance_id
        self.state = EndpointState(endpoint_id, generation, hello.spool_id, context, session, hello.spool_generation)
        self.dispatcher = Dispatcher(self.state)
        self.reports = Reports(self.state)
        self.upkeep = Upkeep(self.state, now=now)
        self._weights = hello.weights
        self._is_recording_spool_generation = False
        self._spool_generation_at = float("-inf")
        self._recorded_spool_generation = hello.spool_generation
        self._held = {held.task_id: held.attempt for held in hello.held}
        self._is_welcome = False
        self._leases: Mapping[str, int] = {}
        context.outbox.admit(endpoint_id, generation)

    # -- until SERVING -------------------------------------------------------------------------------------------------

    def claim(self) -> list[Action]:
        """Claim the endpoint, at first or after its queue lost its data."""
        self.state.phase = EndpointPhase.CLAIMING
        self.state.fence = 0
        self._is_recording_spool_generation = False
        self.dispatcher.forget_step()
        self.upkeep.forget_steps()
        self.state.context.outbox.hold(self.state.endpoint_id)
        return [
            do.ClaimEndpoint(
                self.state.endpoint_id,
                self.state.generation,
                self.state.spool_id,
                self.state.context.policy.ownership_ttl_s,
                self._weights,
                self.state.spool_generation,
            )
        ]

    def on_claimed(self, event: ev.EndpointClaimed) -> list[Action]:
        if self.state.phase is not EndpointPhase.CLAIMING or event.generation != self.state.generation:
            return []
        self.state.fence = event.fence
        self.state.phase = EndpointPhase.READING
        return [do.ReadLeases(self.state.endpoint_id, self.state.fence)]

    def on_lost(self) -> list[Action]:
        """The queue has lost this endpoint's data (or never had it)."""
        match self.state.phase:
            case EndpointPhase.READING:
                self.state.phase = EndpointPhase.RESTORING
                held = self.state.table.attempts() if self._is_welcome else self._held
                return [
                    do.RestoreQueue(self.state.endpoint_id, self.state.fence, held, self.state.context.policy.lease_s)
                ]
            case EndpointPhase.CLAIMING:
                return []
            case _:
                return self.claim()

    def on_restored(self) -> list[Action]:
        self.state.phase = EndpointPhase.READING
        return [do.ReadLeases(self.state.endpoint_id, self.state.fence)]

    def on_leases_read(self, event: ev.LeasesRead, now: Instant) -> list[Action]:
        if self.state.phase is not EndpointPhase.READING:
            return []
        self.state.phase = EndpointPhase.COMPARING
        self._leases = event.leases
        known: Iterable[str] = self.state.table if self._is_welcome else self._held
        unheld = frozenset(event.leases.keys() - known)
        wanted = unheld if self._is_welcome else unheld | self._held.keys()
        if not wanted:
            return self._serve((), now)
        return [do.ReadTasks(self.state.endpoint_id, self.state.fence, sorted(wanted), unheld)]

    def on_tasks_read(self, event: ev.TasksRead, now: Instant) -> list[Action]:
        if self.state.phase is not EndpointPhase.COMPARING:
            return []
        found = compare(
            endpoint_id=self.state.endpoint_id,
            spool_id=self.state.spool_id,
            held={} if self._is_welcome else self._held,
            leases={id_: n for id_, n in self._leases.items() if id_ not in self.state.table},
            tasks=event.tasks,
            spools=event.spools,
            accepted=event.accepted,
            expires_at=now.mono + self.state.context.policy.lease_s,
        )
        self.state.table.update((lease.task_id, lease) for lease in found.keep)
        for result in found.results:
            self.state.context.outbox.add(result, verified=True)
        actions = self.state.requeue(found.requeue) + self._serve(tuple(found.forget), now)
        if unknown := sum(ref.task_id not in event.tasks for ref in found.forget):
            # They ended long ago, or the database was restored to a time before they were submitted.
            fields: dict[str, str | int] = {"endpoint_id": self.state.endpoint_id, "tasks": unknown}
            actions.append(do.Log("the endpoint drops tasks that the database does not have", fields))
        return actions

    def _serve(self, forget: tuple[wire.TaskRef, ...], now: Instant) -> list[Action]:
        self.state.phase = EndpointPhase.SERVING
        self._held, self._leases = {}, {}
        self.state.context.outbox.open(self.state.endpoint_id, self.state.fence)
        self.dispatcher.expect_work()
        actions: list[Action] = []
        if self.state.session and not self._is_welcome and self.state.session.may_send(wire.Welcome):
            welcome = wire.Welcome(
                session_id=self.state.session.session_id,
                forwarder_id=self.state.context.forwarder_id,
                protocol_version=wire.PROTOCOL_VERSION,
                heartbeat_s=self.state.session.wire.heartbeat_s,
                forget=forget,
                relay_piece_bytes=self.state.context.policy.relay_piece_bytes,
            )
            actions.append(self.state.session.send(welcome, now))
        if not self._is_welcome or self.state.session is None:
            actions += self.upkeep.report_presence(now)
        self._is_welcome = True
        actions += self._record_spool_generation(now)
        return [*actions, *self.upkeep.maintain(now), *self.upkeep.read_cancels(), *self.dispatcher.lease()]

    def on_work_available(self) -> list[Action]:
        """The queue may have work, or tasks to cancel."""
        self.dispatcher.expect_work()
        return self.dispatcher.lease() + self.upkeep.read_cancels()

    # -- reports of the agent ------------------------------------------------------------------------------------------

    def on_message(self, message: wire.Message, frames: Sequence[bytes], now: Instant) -> list[Action]:
        """Handle a message of the agent in an open session."""
        if self.state.end_silence():
            self.dispatcher.expect_work()
            return [*self._on_report(message, frames, now), *self.dispatcher.lease()]
        return self._on_report(message, frames, now)

    def _on_report(self, message: wire.Message, frames: Sequence[bytes], now: Instant) -> list[Action]:
        state = self.state
        match message:
            case wire.Credit():
                return self.dispatcher.lease()
            case wire.TasksAccepted(tasks=tasks):
                self.reports.accepted(tasks, now)
            case wire.TaskTransitions(transitions=transitions):
                self.reports.transitioned(transitions, now)
            case wire.TaskResults(results=specs):
                self.reports.returned(specs, frames, now)
            case wire.BlobRequest():
                return self.reports.grant(message, now)
            case wire.BlobPull() if state.session:
                return state.context.relay.pull(state.session, message, state.table.get(message.task_id), now)
            case wire.BlobPush() if state.session:
                lease = state.table.get(message.task_id)
                return state.context.relay.push(state.session, message, frames, lease, now)
            case wire.Heartbeat(report=report, spool_generation=spool_generation):
                actions = self._raise_spool_generation(spool_generation, now)
                return actions + self.upkeep.on_heartbeat(report, now) if report else actions
            case _:
                pass
        return []

    def on_recorded(self, recorded: ev.BatchFlushed, now: Instant) -> list[Action]:
        """The database has these results. A submitter without any task left at the agent gets its next ones leased,
        although others have used up the credit."""
        table = self.state.table
        owners = {lease.owner_id for result in recorded.batch.results if (lease := table.get(result.task_id))}
        actions = self.reports.on_recorded(recorded, now)
        if not owners <= {lease.owner_id for lease in table.values()}:
            self.dispatcher.expect_newcomers()
            actions += self.dispatcher.lease()
        return actions

    def _raise_spool_generation(self, spool_generation: int | None, now: Instant) -> list[Action]:
        """The generation of the agent's spool has risen. It is recorded by one step at a time, and at most once in
        ``policy.record_s``."""
        state = self.state
        if spool_generation is None or (
            state.spool_generation is not None and spool_generation <= state.spool_generation
        ):
            return []
        state.spool_generation = spool_generation
        return self._record_spool_generation(now)

    def _record_spool_generation(self, now: Instant) -> list[Action]:
        state = self.state
        is_due = state.spool_generation != self._recorded_spool_generation and state.phase is EndpointPhase.SERVING
        if not is_due or state.spool_generation is None or self._is_recording_spool_generation:
            return []
        if now.mono < self._spool_generation_at + state.context.policy.record_s:
            state.context.delayed.add(state.endpoint_id)
            return []
        self._spool_generation_at = now.mono
        self._is_recording_spool_generation = True
        return [do.RecordSpoolGeneration(state.endpoint_id, state.fence, state.spool_id, state.spool_generation)]

    def record_delayed(self, now: Instant) -> list[Action]:
        """Record delayed data, if ``policy.record_s`` is over."""
        return [*self._record_spool_generation(now), *self.upkeep.record_delayed(now)]

    def on_spool_generation_recorded(self, event: ev.SpoolGenerationRecorded, now: Instant) -> list[Action]:
        """Record the next generation of the spool, if it has risen meanwhile."""
        self._is_recording_spool_generation = False
        self._recorded_spool_generation = event.spool_generation
        return self._record_spool_generation(now)

    # -- the agent leaves ----------------------------------------------------------------------------------------------

    def lose_session(self, now: Instant) -> list[Action]:
        """The agent has disconnected. Tasks that it accepted stay leased for a while: it may return with them. Sent
        tasks that may not run twice stay leased, too: they may have arrived."""
        self.state.session = None
        self.upkeep.session_lost(now)
        if self.state.phase is not EndpointPhase.SERVING:
            return []
        returned = [
            lease.task_id
            for lease in self.state.table.values()
            if lease.stage is Stage.PREPARING or (lease.stage is Stage.SENT and lease.idempotent)
        ]
        self.state.table.drop(returned)
        return [*self.state.requeue(returned), *self.upkeep.report_presence(now)]
