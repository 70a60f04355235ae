"""The logical forwarder of one endpoint: its queue, its leases and its agent's session.

::

    CLAIMING ──▶ READING ──▶ COMPARING ──▶ SERVING
       ▲            │ data lost              │ data lost
       │            ▼                        │
       │        RESTORING ──▶ READING        │
       └─────────────────────────────────────┘

A new session starts a new life with nothing remembered: what the agent says it holds is compared with the queue's
leases and the database. When the queue loses its data the same way is gone again under a new fence, while the session
stays up and the lease table says what the agent holds. Without a session the logical forwarder stays until the leases
that the agent took with it have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from farcall_common import wire
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.dispatcher import Dispatcher
from farcall_forwarder.core.leases import Stage
from farcall_forwarder.core.policy import Instant
from farcall_forwarder.core.reports import Reports
from farcall_forwarder.core.resume import compare
from farcall_forwarder.core.served import Phase, Served, Shared
from farcall_forwarder.core.sessions import PeerSession
from farcall_forwarder.core.upkeep import Upkeep

__all__ = ["LogicalForwarder"]


class LogicalForwarder:
    """One endpoint in one life: its way to being served, and who serves it then. Events of an earlier fence or life
    are ignored."""

    def __init__(
        self, endpoint_id: str, life: int, session: PeerSession, hello: wire.Hello, shared: Shared, *, now: Instant
    ) -> None:
        self.instance_id = hello.instance_id
        self.served = Served(endpoint_id, life, hello.spool_id, shared, session, hello.spool_generation)
        self.dispatcher = Dispatcher(self.served)
        self.reports = Reports(self.served)
        self.upkeep = Upkeep(self.served, now=now)
        self._weights = hello.weights
        self._is_recording_generation = False
        self._generation_at = float("-inf")
        self._recorded_generation = hello.spool_generation
        self._held = {held.task_id: held.attempt for held in hello.held}
        self._is_welcome = False
        self._leases: Mapping[str, int] = {}
        shared.outbox.admit(endpoint_id, life)

    # -- the way to SERVING --------------------------------------------------------------------------------------------

    def claim(self) -> list[Action]:
        """Take the endpoint over, at first or after its queue lost its data."""
        self.served.phase = Phase.CLAIMING
        self.served.fence = 0
        self._is_recording_generation = False
        self.dispatcher.forget_step()
        self.upkeep.forget_steps()
        self.served.shared.outbox.hold(self.served.endpoint_id)
        return [
            do.ClaimEndpoint(
                self.served.endpoint_id,
                self.served.life,
                self.served.spool_id,
                self.served.shared.policy.ownership_ttl_s,
                self._weights,
                self.served.generation,
            )
        ]

    def on_claimed(self, event: ev.EndpointClaimed) -> list[Action]:
        if self.served.phase is not Phase.CLAIMING or event.life != self.served.life:
            return []
        self.served.fence = event.fence
        self.served.phase = Phase.READING
        return [do.ReadLeases(self.served.endpoint_id, self.served.fence)]

    def on_lost(self) -> list[Action]:
        """The queue has lost this endpoint's data (or never had it)."""
        match self.served.phase:
            case Phase.READING:
                self.served.phase = Phase.RESTORING
                held = self.served.table.attempts() if self._is_welcome else self._held
                return [
                    do.RestoreQueue(self.served.endpoint_id, self.served.fence, held, self.served.shared.policy.lease_s)
                ]
            case Phase.CLAIMING:
                return []
            case _:
                return self.claim()

    def on_restored(self) -> list[Action]:
        self.served.phase = Phase.READING
        return [do.ReadLeases(self.served.endpoint_id, self.served.fence)]

    def on_leases_read(self, event: ev.LeasesRead, now: Instant) -> list[Action]:
        if self.served.phase is not Phase.READING:
            return []
        self.served.phase = Phase.COMPARING
        self._leases = event.leases
        known: Iterable[str] = self.served.table if self._is_welcome else self._held
        unheld = frozenset(event.leases.keys() - known)
        wanted = unheld if self._is_welcome else unheld | self._held.keys()
        if not wanted:
            return self._serve((), now)
        return [do.ReadTasks(self.served.endpoint_id, self.served.fence, sorted(wanted), unheld)]

    def on_tasks_read(self, event: ev.TasksRead, now: Instant) -> list[Action]:
        if self.served.phase is not Phase.COMPARING:
            return []
        found = compare(
            endpoint_id=self.served.endpoint_id,
            spool_id=self.served.spool_id,
            held={} if self._is_welcome else self._held,
            leases={id_: n for id_, n in self._leases.items() if id_ not in self.served.table},
            tasks=event.tasks,
            spools=event.spools,
            accepted=event.accepted,
            expires_at=now.mono + self.served.shared.policy.lease_s,
        )
        self.served.table.update((lease.task_id, lease) for lease in found.keep)
        for end in found.ends:
            self.served.shared.outbox.add(end, verified=True)
        actions = self.served.requeue(found.requeue) + self._serve(tuple(found.forget), now)
        if unknown := sum(ref.task_id not in event.tasks for ref in found.forget):
            # They ended long ago, or the database was restored from before they were submitted.
            fields: dict[str, str | int] = {"endpoint_id": self.served.endpoint_id, "tasks": unknown}
            actions.append(do.Note("the endpoint drops tasks that the database does not have", fields))
        return actions

    def _serve(self, forget: tuple[wire.TaskRef, ...], now: Instant) -> list[Action]:
        self.served.phase = Phase.SERVING
        self._held, self._leases = {}, {}
        self.served.shared.outbox.open(self.served.endpoint_id, self.served.fence)
        self.dispatcher.expect_work()
        actions: list[Action] = []
        if self.served.session and not self._is_welcome and self.served.session.may_send(wire.Welcome):
            welcome = wire.Welcome(
                session_id=self.served.session.session_id,
                forwarder_id=self.served.shared.forwarder_id,
                protocol_version=wire.PROTOCOL_VERSION,
                heartbeat_s=self.served.session.wire.heartbeat_s,
                forget=forget,
                relay_piece_bytes=self.served.shared.policy.relay_piece_bytes,
            )
            actions.append(self.served.session.send(welcome, now))
        if not self._is_welcome or self.served.session is None:
            actions += self.upkeep.report_presence(now)
        self._is_welcome = True
        actions += self._record_generation(now)
        return [*actions, *self.upkeep.keep(now), *self.upkeep.read_cancels(), *self.dispatcher.lease()]

    def on_woken(self) -> list[Action]:
        """The queue may have work, or tasks to cancel."""
        self.dispatcher.expect_work()
        return self.dispatcher.lease() + self.upkeep.read_cancels()

    # -- what the agent says -------------------------------------------------------------------------------------------

    def on_message(self, message: wire.Message, frames: Sequence[bytes], now: Instant) -> list[Action]:
        """A report of the agent in an open session."""
        if self.served.heard():
            self.dispatcher.expect_work()
            return [*self._on_report(message, frames, now), *self.dispatcher.lease()]
        return self._on_report(message, frames, now)

    def _on_report(self, message: wire.Message, frames: Sequence[bytes], now: Instant) -> list[Action]:
        served = self.served
        match message:
            case wire.Credit():
                return self.dispatcher.lease()
            case wire.TasksAccepted(tasks=tasks):
                self.reports.accepted(tasks, now)
            case wire.TasksMoved(moves=moves):
                self.reports.moved(moves, now)
            case wire.TaskResults(results=specs):
                self.reports.returned(specs, frames, now)
            case wire.BlobRequest():
                return self.reports.grant(message, now)
            case wire.BlobPull() if served.session:
                return served.shared.relay.pull(served.session, message, served.table.get(message.task_id), now)
            case wire.BlobPush() if served.session:
                lease = served.table.get(message.task_id)
                return served.shared.relay.push(served.session, message, frames, lease, now)
            case wire.Heartbeat(report=report, spool_generation=generation):
                actions = self._raise_generation(generation, now)
                return actions + self.upkeep.on_heartbeat(report, now) if report else actions
            case _:
                pass
        return []

    def on_recorded(self, recorded: ev.BatchFlushed, now: Instant) -> list[Action]:
        """The database has these ends. A submitter that has nothing left at the agent gets in although others have used
        up the credit."""
        table = self.served.table
        owners = {lease.owner_id for result in recorded.batch.results if (lease := table.get(result.task_id))}
        actions = self.reports.on_recorded(recorded, now)
        if not owners <= {lease.owner_id for lease in table.values()}:
            self.dispatcher.expect_newcomers()
            actions += self.dispatcher.lease()
        return actions

    def _raise_generation(self, generation: int | None, now: Instant) -> list[Action]:
        """The agent's spool is newer than it was; one step at a time records how new, not more often than a second."""
        served = self.served
        if generation is None or (served.generation is not None and generation <= served.generation):
            return []
        served.generation = generation
        return self._record_generation(now)

    def _record_generation(self, now: Instant) -> list[Action]:
        served = self.served
        is_due = served.generation != self._recorded_generation and served.phase is Phase.SERVING
        if not is_due or served.generation is None or self._is_recording_generation:
            return []
        if now.mono < self._generation_at + served.shared.policy.record_s:
            served.shared.delayed.add(served.endpoint_id)
            return []
        self._generation_at = now.mono
        self._is_recording_generation = True
        return [do.RecordGeneration(served.endpoint_id, served.fence, served.spool_id, served.generation)]

    def record_delayed(self, now: Instant) -> list[Action]:
        """What came too soon after the last time, unless it still does."""
        return [*self._record_generation(now), *self.upkeep.record_delayed(now)]

    def on_generation_recorded(self, event: ev.GenerationRecorded, now: Instant) -> list[Action]:
        """Record the next one, if it has risen meanwhile."""
        self._is_recording_generation = False
        self._recorded_generation = event.generation
        return self._record_generation(now)

    # -- the end of a session ------------------------------------------------------------------------------------------

    def lose_session(self, now: Instant) -> list[Action]:
        """The agent is gone. What it accepted stays leased for a while: it may come back with it. What it was sent, and
        may not run twice, stays too: it may have arrived."""
        self.served.session = None
        self.upkeep.session_lost(now)
        if self.served.phase is not Phase.SERVING:
            return []
        given_back = [
            lease.task_id
            for lease in self.served.table.values()
            if lease.stage is Stage.PREPARING or (lease.stage is Stage.SENT and lease.idempotent)
        ]
        self.served.table.drop(given_back)
        return [*self.served.requeue(given_back), *self.upkeep.report_presence(now)]
