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

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from farcall_common import wire
from farcall_common.store.model import EndpointStatus, LeasedTask, TaskResult
from farcall_common.wire import Reporter, TaskState, is_uuid
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core import results, uploads
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.dispatch import dispatches, orders
from farcall_forwarder.core.functions import FunctionCache
from farcall_forwarder.core.leases import Lease, LeaseTable, Stage
from farcall_forwarder.core.moves import MoveBuffer
from farcall_forwarder.core.outbox import Outbox
from farcall_forwarder.core.policy import Instant, Policy
from farcall_forwarder.core.resume import compare
from farcall_forwarder.core.sessions import PeerSession
from farcall_forwarder.core.untrusted import clean_map, clean_status, clean_time

__all__ = ["LogicalForwarder", "Phase", "Shared"]

#: States that an agent may report on the way.
_ON_THE_WAY: Final = frozenset(
    state for state in TaskState if Reporter.AGENT in wire.REPORTERS[state] and not state.is_terminal
)


class Phase(enum.Enum):
    CLAIMING = enum.auto()
    READING = enum.auto()
    RESTORING = enum.auto()
    COMPARING = enum.auto()
    SERVING = enum.auto()


@dataclasses.dataclass
class Shared:
    """What all logical forwarders of a process have in common. ``is_draining``: no more tasks are taken."""

    forwarder_id: str
    policy: Policy
    functions: FunctionCache
    outbox: Outbox
    moves: MoveBuffer
    is_draining: bool = False


class LogicalForwarder:
    """One endpoint in one life. Events of an earlier fence or life are ignored."""

    def __init__(
        self, endpoint_id: str, life: int, session: PeerSession, hello: wire.Hello, shared: Shared, *, now: Instant
    ) -> None:
        self.endpoint_id = endpoint_id
        self.life = life
        self.fence = 0
        self.phase = Phase.CLAIMING
        self.session: PeerSession | None = session
        self.spool_id = hello.spool_id
        self.instance_id = hello.instance_id
        #: Set when nothing is left to do for an endpoint without a session.
        self.is_over = False
        self._held = {held.task_id: held.attempt for held in hello.held}
        self._is_welcome = False
        self._shared = shared
        self._table = LeaseTable()
        self._leases: Mapping[str, int] = {}
        self._forget_steps()
        self._may_have_work = True
        self._sweep_at = self._upkeep_at = now.mono
        self._status = EndpointStatus()
        self._presence_at = 0.0
        shared.outbox.admit(endpoint_id, life)

    def _forget_steps(self) -> None:
        self._is_leasing = self._is_keeping = self._is_reading_cancels = False

    # -- the way to SERVING --------------------------------------------------------------------------------------------

    def claim(self) -> list[Action]:
        """Take the endpoint over, at first or after its queue lost its data."""
        self.phase = Phase.CLAIMING
        self.fence = 0
        self._forget_steps()
        self._shared.outbox.hold(self.endpoint_id)
        return [do.ClaimEndpoint(self.endpoint_id, self.life, self.spool_id, self._shared.policy.ownership_ttl_s)]

    def on_claimed(self, event: ev.EndpointClaimed) -> list[Action]:
        if self.phase is not Phase.CLAIMING or event.life != self.life:
            return []
        self.fence = event.fence
        self.phase = Phase.READING
        return [do.ReadLeases(self.endpoint_id, self.fence)]

    def on_lost(self) -> list[Action]:
        """The queue has lost this endpoint's data (or never had it)."""
        match self.phase:
            case Phase.READING:
                self.phase = Phase.RESTORING
                held = self._table.attempts() if self._is_welcome else self._held
                return [do.RestoreQueue(self.endpoint_id, self.fence, held, self._shared.policy.lease_s)]
            case Phase.CLAIMING:
                return []
            case _:
                return self.claim()

    def on_restored(self) -> list[Action]:
        self.phase = Phase.READING
        return [do.ReadLeases(self.endpoint_id, self.fence)]

    def on_leases_read(self, event: ev.LeasesRead, now: Instant) -> list[Action]:
        if self.phase is not Phase.READING:
            return []
        self.phase = Phase.COMPARING
        self._leases = event.leases
        known: Iterable[str] = self._table if self._is_welcome else self._held
        unheld = frozenset(event.leases.keys() - known)
        wanted = unheld if self._is_welcome else unheld | self._held.keys()
        if not wanted:
            return self._serve((), now)
        return [do.ReadTasks(self.endpoint_id, self.fence, sorted(wanted), unheld)]

    def on_tasks_read(self, event: ev.TasksRead, now: Instant) -> list[Action]:
        if self.phase is not Phase.COMPARING:
            return []
        found = compare(
            endpoint_id=self.endpoint_id,
            spool_id=self.spool_id,
            held={} if self._is_welcome else self._held,
            leases={id_: n for id_, n in self._leases.items() if id_ not in self._table},
            tasks=event.tasks,
            spools=event.spools,
            expires_at=now.epoch + self._shared.policy.lease_s,
        )
        self._table.update((lease.task_id, lease) for lease in found.keep)
        for end in found.ends:
            self._shared.outbox.add(end, verified=True)
        return self._requeue(found.requeue) + self._serve(tuple(found.forget), now)

    def _serve(self, forget: tuple[wire.TaskRef, ...], now: Instant) -> list[Action]:
        self.phase = Phase.SERVING
        self._held, self._leases = {}, {}
        self._shared.outbox.open(self.endpoint_id, self.fence)
        self._may_have_work = True
        actions: list[Action] = []
        if self.session and not self._is_welcome and self.session.may_send(wire.Welcome):
            welcome = wire.Welcome(
                session_id=self.session.session_id,
                forwarder_id=self._shared.forwarder_id,
                protocol_version=wire.PROTOCOL_VERSION,
                heartbeat_s=self.session.wire.heartbeat_s,
                forget=forget,
            )
            actions.append(self.session.send(welcome, now))
        if not self._is_welcome or self.session is None:
            actions += self._report_presence(now)
        self._is_welcome = True
        return [*actions, *self._keep(now), *self._read_cancels(), *self.lease()]

    # -- work ----------------------------------------------------------------------------------------------------------

    def on_woken(self) -> list[Action]:
        """The queue may have work, or tasks to cancel."""
        self._may_have_work = True
        return self.lease() + self._read_cancels()

    def lease(self) -> list[Action]:
        """Ask the queue for tasks, if there may be some and the agent can take them."""
        if self._is_leasing or not self._may_have_work or self.phase is not Phase.SERVING:
            return []
        if (session := self._willing_session()) is None:
            return []
        credit = session.wire.credit - sum(1 for _ in self._table.at(Stage.PREPARING))
        if credit <= 0:
            return []
        self._is_leasing, self._may_have_work = True, False
        policy = self._shared.policy
        return [do.LeaseTasks(self.endpoint_id, self.fence, min(credit, policy.max_lease_batch), policy.lease_s)]

    def _willing_session(self) -> PeerSession | None:
        """The session, if tasks may be sent in it."""
        is_willing = self.session and self.session.may_send(wire.RunTasks) and not self._shared.is_draining
        return self.session if is_willing else None

    def on_leased(self, event: ev.TasksLeased, now: Instant) -> list[Action]:
        self._is_leasing = False
        if (session := self._willing_session()) is None:
            return self._requeue([leased.task.task_id for leased in event.tasks])
        if len(event.tasks) == event.limit:
            self._may_have_work = True
        ready: list[LeasedTask] = []
        unready: list[LeasedTask] = []
        expires_at = now.epoch + self._shared.policy.lease_s
        for leased in event.tasks:
            task = leased.task
            if leased.cancel_requested:
                self._end(results.cancelled(task.task_id, endpoint_id=self.endpoint_id, attempt=leased.attempt))
                continue
            is_ready = task.idempotent and task.payload_ref is None and self._has_function(session, task.function_hash)
            stage = Stage.SENT if is_ready else Stage.PREPARING
            self._table[task.task_id] = Lease.of_leased(leased, stage=stage, expires_at=expires_at)
            (ready if is_ready else unready).append(leased)
        return [*self._run(session, ready, {}, now), *self._prepare(session, unready, now), *self.lease()]

    def _has_function(self, session: PeerSession, function_hash: str) -> bool:
        return function_hash in session.functions or self._shared.functions.get(function_hash) is not None

    def _prepare(self, session: PeerSession, tasks: Sequence[LeasedTask], now: Instant) -> list[Action]:
        if not tasks:
            return []
        unknown = {t.task.function_id for t in tasks if not self._has_function(session, t.task.function_hash)}
        policy = self._shared.policy
        return [
            do.PrepareTasks(
                endpoint_id=self.endpoint_id,
                life=self.life,
                session_id=session.session_id,
                spool_id=self.spool_id,
                tasks=tasks,
                function_ids=sorted(unknown),
                blob_keys=sorted({t.task.payload_ref.blob_key for t in tasks if t.task.payload_ref}),
                dispatches=dispatches(tasks, spool_id=self.spool_id, at=now.epoch),
                url_ttl_s=policy.download_url_ttl_s,
            )
        ]

    def on_prepared(self, event: ev.TasksPrepared, now: Instant) -> list[Action]:
        for function_hash, (name, body) in event.bodies.items():
            self._shared.functions.add(function_hash, name, body)
        if self.session is None or self.session.session_id != event.order.session_id:
            return []  # The end of that session has given the leases back.
        if (session := self._willing_session()) is None:
            return self._requeue(self._table.pop_at(Stage.PREPARING))
        ready: list[LeasedTask] = []
        for leased in event.order.tasks:
            task = leased.task
            lease = self._table.get(task.task_id)
            if lease is None or lease.stage is not Stage.PREPARING or lease.attempt != leased.attempt:
                continue
            if end := self._unfit(session, leased, lease, event):
                self._end(end)
            else:
                lease.stage = Stage.SENT
                ready.append(leased)
        return [*self._run(session, ready, event.bodies, now, event.urls), *self.lease()]

    def _unfit(
        self, session: PeerSession, leased: LeasedTask, lease: Lease, event: ev.TasksPrepared
    ) -> TaskResult | None:
        """The end of a task that turns out not to be for sending."""
        task = leased.task
        if lease.cancelled:
            return results.cancelled(task.task_id, endpoint_id=self.endpoint_id, attempt=leased.attempt)
        if task.task_id in event.refused:
            reason = "The task was sent to the endpoint before, and the endpoint has lost it."
            return results.lost(task.task_id, endpoint_id=self.endpoint_id, attempt=leased.attempt, reason=reason)
        if task.function_hash not in event.bodies and not self._has_function(session, task.function_hash):
            return results.unknown_function(task, endpoint_id=self.endpoint_id, attempt=leased.attempt)
        return None

    def _run(
        self,
        session: PeerSession,
        tasks: Sequence[LeasedTask],
        fetched: Mapping[str, tuple[str, bytes]],
        now: Instant,
        urls: Mapping[str, str] | None = None,
    ) -> list[Action]:
        """Send tasks whose functions are fetched, cached or known to the agent."""
        new = {leased.task.function_hash for leased in tasks} - session.functions
        bodies = {h: body for h in sorted(new) if (body := fetched.get(h) or self._shared.functions.get(h))}
        session.functions |= new
        for leased in tasks:
            if leased.task.idempotent:  # The others' dispatch was committed before.
                self._shared.moves.add(
                    leased.task.task_id,
                    TaskState.WAITING_FOR_NODES,
                    Reporter.FORWARDER,
                    at=leased.leased_at,
                    attempt=leased.attempt,
                    now_mono=now.mono,
                )
        limit = self._shared.policy.max_run_bytes
        return [
            session.send(order, now, frames=frames)
            for order, frames in orders(tasks, bodies=bodies, urls=urls or {}, limit_bytes=limit)
        ]

    # -- what the agent says -------------------------------------------------------------------------------------------

    def on_message(self, message: wire.Message, frames: Sequence[bytes], now: Instant) -> list[Action]:
        """A report of the agent in an open session."""
        match message:
            case wire.Credit():
                return self.lease()
            case wire.TasksAccepted(tasks=tasks):
                self._accepted(tasks, now)
            case wire.TasksMoved(moves=moves):
                self._moved(moves, now)
            case wire.TaskResults(results=specs):
                self._returned(specs, frames, now)
            case wire.BlobRequest():
                return self._grant(message, now)
            case wire.Heartbeat(report=wire.EndpointReport() as report):
                status = clean_status(report)
                has_changed = (status.managers, status.total_workers, status.problem) != (
                    self._status.managers,
                    self._status.total_workers,
                    self._status.problem,
                )
                self._status = status
                return self._report_presence(now) if has_changed else []
            case _:
                pass
        return []

    def _accepted(self, tasks: Sequence[wire.TaskRef], now: Instant) -> None:
        for ref in tasks:
            lease = self._table.get(ref.task_id)
            if lease and lease.stage is Stage.SENT:
                lease.stage = Stage.ACCEPTED
                lease.timings["accepted_at"] = now.epoch

    def _moved(self, moves: Sequence[wire.TaskMove], now: Instant) -> None:
        for move in moves:
            lease = self._table.get(move.task_id)
            if lease and lease.stage is not Stage.RETURNED and move.state in _ON_THE_WAY:
                self._shared.moves.add(
                    move.task_id,
                    move.state,
                    Reporter.AGENT,
                    at=clean_time(move.at, now=now.epoch) or now.epoch,
                    attempt=min(move.attempt, lease.attempt),
                    detail=clean_map(move.detail) if move.detail else None,
                    now_mono=now.mono,
                )

    def _returned(self, specs: Sequence[wire.ResultSpec], frames: Sequence[bytes], now: Instant) -> None:
        for spec in specs:
            lease = self._table.get(spec.task_id)
            if lease is None and not (is_uuid(spec.task_id) and spec.attempt < results.MAX_ATTEMPTS):
                continue
            result = results.read_result(spec, frames, endpoint_id=self.endpoint_id, lease=lease, returned_at=now.epoch)
            if lease:
                lease.stage = Stage.RETURNED
            self._shared.moves.drop(spec.task_id)
            self._shared.outbox.add(result, verified=lease is not None)

    def _grant(self, request: wire.BlobRequest, now: Instant) -> list[Action]:
        lease = self._table.get(request.task_id)
        error = uploads.refusal(request, is_leased=lease is not None, policy=self._shared.policy)
        if error:
            return self._say(uploads.refused(request, error), now)
        owner_id = lease.owner_id if lease else None
        ttl_s = self._shared.policy.upload_url_ttl_s
        return [uploads.order(request, self.endpoint_id, self.life, owner_id=owner_id, ttl_s=ttl_s)]

    def on_granted(self, event: ev.UploadGranted, now: Instant) -> list[Action]:
        return self._say(uploads.granted(event), now)

    def _say(self, message: wire.Message, now: Instant) -> list[Action]:
        if self.session is None or not self.session.may_send(type(message)):
            return []
        return [self.session.send(message, now)]

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _end(self, result: TaskResult) -> None:
        """Declare the end of a leased task."""
        if lease := self._table.get(result.task_id):
            lease.stage = Stage.RETURNED
        self._shared.moves.drop(result.task_id)
        self._shared.outbox.add(result, verified=True)

    def on_recorded(self, recorded: ev.BatchFlushed, now: Instant) -> list[Action]:
        """The database has these ends."""
        refs = tuple(
            wire.TaskRef(task_id=result.task_id, attempt=result.attempt)
            for result in recorded.batch.results
            if result.task_id not in recorded.foreign
        )
        self._table.drop(ref.task_id for ref in refs)
        return self._say(wire.ResultsRecorded(tasks=refs), now) if refs else []

    # -- cancelling ----------------------------------------------------------------------------------------------------

    def _read_cancels(self) -> list[Action]:
        if self._is_reading_cancels or not self._table or self.session is None or self.phase is not Phase.SERVING:
            return []
        self._is_reading_cancels = True
        return [do.ReadCancels(self.endpoint_id, self.fence)]

    def on_cancels(self, event: ev.CancelsRead, now: Instant) -> list[Action]:
        self._is_reading_cancels = False
        told: list[str] = []
        for task_id in event.task_ids:
            lease = self._table.get(task_id)
            if lease and not lease.cancelled:
                lease.cancelled = True
                if lease.stage in (Stage.SENT, Stage.ACCEPTED):
                    told.append(task_id)
        return self._say(wire.CancelTasks(task_ids=tuple(told)), now) if told else []

    # -- time ----------------------------------------------------------------------------------------------------------

    def is_to_be_swept(self, now: Instant, *, sweep_s: float) -> bool:
        """Whether it is time to look for work that no wake-up told of; once in so many seconds."""
        if now.mono < self._sweep_at or self.phase is not Phase.SERVING or self.session is None:
            return False
        self._sweep_at = now.mono + sweep_s
        return True

    @property
    def spool_heard(self) -> str:
        """The spool of the agent that is heard, or nothing."""
        return self.spool_id if self.session else ""

    def is_to_be_refreshed(self, now: Instant) -> bool:
        """Whether an upkeep is due that has no lease to prolong, so that it can be had together with others."""
        is_quiet = self._is_due_for_upkeep(now) and self.session is not None and not self._table
        if is_quiet:
            self._upkeep_at = now.mono + self._shared.policy.upkeep_s
            self._is_keeping = True
        return is_quiet

    def on_refreshed(self, now: Instant, *, needs_upkeep: bool) -> list[Action]:
        """The ownership was refreshed, unless a closer look is needed."""
        self._is_keeping = False
        if needs_upkeep:
            return self._keep(now)
        is_presence_due = self.session is not None and now.mono >= self._presence_at + self._shared.policy.presence_s
        return self._report_presence(now) if is_presence_due else []

    def _is_due_for_upkeep(self, now: Instant) -> bool:
        return now.mono >= self._upkeep_at and not self._is_keeping and self.phase is Phase.SERVING

    def on_tick(self, now: Instant) -> list[Action]:
        """What is due: a look at the queue, upkeep of ownership and leases."""
        actions: list[Action] = []
        if now.mono >= self._upkeep_at:
            actions += self._keep(now)
        return actions

    def _keep(self, now: Instant) -> list[Action]:
        policy = self._shared.policy
        self._upkeep_at = now.mono + policy.upkeep_s
        if self._is_keeping or self.phase is not Phase.SERVING:
            return []
        self._is_keeping = True
        alive = (Stage.ACCEPTED, Stage.RETURNED) if self.session else (Stage.RETURNED,)
        renew = [lease.task_id for lease in self._table.at(*alive)]
        keep = do.KeepEndpoint(
            self.endpoint_id, self.fence, renew, self.spool_heard, policy.ownership_ttl_s, policy.lease_s
        )
        is_presence_due = self.session is not None and now.mono >= self._presence_at + policy.presence_s
        return [keep, *(self._report_presence(now) if is_presence_due else [])]

    def on_upkeep_done(self, event: ev.UpkeepDone, now: Instant) -> list[Action]:
        self._is_keeping = False
        requeue: list[str] = []
        for leased in event.reaped:
            task = leased.task
            lease = self._table.get(task.task_id)
            if lease and lease.stage is Stage.RETURNED:
                continue
            never_sent = not task.idempotent and event.sent_attempts.get(task.task_id, 0) < leased.attempt
            if never_sent and not leased.cancel_requested:
                requeue.append(task.task_id)
            else:
                self._end(results.end_reaped(leased, endpoint_id=self.endpoint_id))
        for result in event.outbox:
            self._shared.outbox.add(result, verified=True)
        self._table.drop(requeue)
        if self.session:
            # These were prolonged by this very step, however long it took.
            for lease in self._table.at(Stage.ACCEPTED):
                lease.expires_at = now.epoch + self._shared.policy.lease_s
        self._table.drop_expired(now.epoch)
        if self.session is None and not self._table and not self._shared.outbox.has(self.endpoint_id):
            self.is_over = True
            return [*self._requeue(requeue), do.ReleaseEndpoint(self.endpoint_id, self.fence)]
        return self._requeue(requeue)

    def _requeue(self, task_ids: Sequence[str]) -> list[Action]:
        return [do.RequeueTasks(self.endpoint_id, self.fence, task_ids)] if task_ids else []

    def _report_presence(self, now: Instant) -> list[Action]:
        if self.phase is not Phase.SERVING:
            return []
        self._presence_at = now.mono
        online = self.session is not None
        status = self._status if online else EndpointStatus()
        ttl_s = self._shared.policy.ownership_ttl_s
        return [do.SetPresence(self.endpoint_id, self.fence, online, status, now.epoch, ttl_s)]

    # -- the end of a session ------------------------------------------------------------------------------------------

    def lose_session(self, now: Instant) -> list[Action]:
        """The agent is gone. What it accepted stays leased for a while: it may come back with it."""
        self.session = None
        if self.phase is not Phase.SERVING:
            return []
        given_back = [
            lease.task_id
            for lease in self._table.values()
            if lease.stage is Stage.PREPARING or (lease.stage is Stage.SENT and lease.idempotent)
        ]
        self._table.drop(given_back)
        return [*self._requeue(given_back), *self._report_presence(now)]
