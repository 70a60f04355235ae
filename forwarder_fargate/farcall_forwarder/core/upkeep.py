"""Keeping an endpoint: its ownership, the leases that its agent holds, what it is known to be, what was cancelled."""

from __future__ import annotations

from collections.abc import Sequence

from farcall_common import wire
from farcall_common.store.model import EndpointStatus, LeasedTask
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core import results
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.leases import Lease, Stage
from farcall_forwarder.core.policy import Instant
from farcall_forwarder.core.served import Phase, Served
from farcall_forwarder.core.untrusted import clean_status

__all__ = ["Upkeep"]


class Upkeep:
    """What comes round for one endpoint, and when."""

    def __init__(self, served: Served, *, now: Instant) -> None:
        self._served = served
        self._is_keeping = self._is_reading_cancels = self._is_reading_attempts = False
        self._sweep_at = self._upkeep_at = now.mono
        self._status = EndpointStatus()
        self._presence_at = 0.0
        self._shown_at = float("-inf")
        self._is_presence_stale = False
        #: Monotonic second until which an agent that has left may come back to what may not run twice.
        self._return_until = 0.0
        self._prolonged: list[str] = []
        #: Set when nothing is left to do for an endpoint without a session.
        self.is_over = False

    def session_lost(self, now: Instant) -> None:
        """The agent has left."""
        self._return_until = now.mono + self._served.shared.policy.return_s

    def forget_steps(self) -> None:
        """What is under way belongs to a former claim: its answer will not be heard."""
        self._is_keeping = self._is_reading_cancels = self._is_reading_attempts = False

    def on_heartbeat(self, report: wire.EndpointReport, now: Instant) -> list[Action]:
        """The agent's numbers; what others look at is recorded at once, the rest when it is due."""
        former, self._status = self._status, clean_status(report)
        shown = [(status.managers, status.total_workers, status.problem) for status in (former, self._status)]
        if shown[0] == shown[1]:
            return []
        self._is_presence_stale = True
        return self.record_delayed(now)

    def record_delayed(self, now: Instant) -> list[Action]:
        """Numbers that others look at, unless that was done a moment ago: then a little later."""
        if not self._is_presence_stale:
            return []
        if now.mono < self._shown_at + self._served.shared.policy.record_s:
            self._served.shared.delayed.add(self._served.endpoint_id)
            return []
        self._shown_at = now.mono
        return self.report_presence(now)

    def is_to_be_swept(self, now: Instant, *, sweep_s: float) -> bool:
        """Whether it is time to look for work that no wake-up told of; once in so many seconds."""
        if now.mono < self._sweep_at or self._served.phase is not Phase.SERVING or self._served.session is None:
            return False
        self._sweep_at = now.mono + sweep_s
        return True

    def sweep_soon(self, now: Instant) -> None:
        """Wake-ups may have passed unheard."""
        self._sweep_at = now.mono

    @property
    def spool_heard(self) -> str:
        """The spool of the agent that is heard, or nothing."""
        return self._served.spool_id if self._served.session else ""

    def is_to_be_refreshed(self, now: Instant) -> bool:
        """Whether an upkeep is due that has no lease to prolong, so that it can be had together with others."""
        is_quiet = self._is_due_for_upkeep(now) and self._served.session is not None and not self._served.table
        if is_quiet:
            self._upkeep_at = now.mono + self._served.shared.policy.upkeep_s
            self._is_keeping = True
        return is_quiet

    def on_refreshed(self, now: Instant, *, needs_upkeep: bool) -> list[Action]:
        """The ownership was refreshed, unless a closer look is needed."""
        self._is_keeping = False
        if needs_upkeep:
            return self.keep(now)
        is_presence_due = (
            self._served.session is not None and now.mono >= self._presence_at + self._served.shared.policy.presence_s
        )
        return self.report_presence(now) if is_presence_due else []

    def _is_due_for_upkeep(self, now: Instant) -> bool:
        return now.mono >= self._upkeep_at and not self._is_keeping and self._served.phase is Phase.SERVING

    def on_tick(self, now: Instant) -> list[Action]:
        """Upkeep, if it is due."""
        return self.keep(now) if now.mono >= self._upkeep_at else []

    @property
    def next_at(self) -> float:
        """The monotonic second at which something here is due next."""
        return self._upkeep_at if self._served.session is None else min(self._upkeep_at, self._sweep_at)

    def keep(self, now: Instant) -> list[Action]:
        """Keep the ownership, and prolong the leases of what the agent has or may have."""
        policy = self._served.shared.policy
        self._upkeep_at = now.mono + policy.upkeep_s
        if self._is_keeping or self._served.phase is not Phase.SERVING:
            return []
        self._is_keeping = True
        self._prolonged = [lease.task_id for lease in self._served.table.values() if self._is_alive(lease, now)]
        keep = do.KeepEndpoint(
            self._served.endpoint_id,
            self._served.fence,
            self._prolonged,
            self.spool_heard,
            policy.ownership_ttl_s,
            policy.lease_s,
        )
        is_presence_due = self._served.session is not None and now.mono >= self._presence_at + policy.presence_s
        return [keep, *(self.report_presence(now) if is_presence_due else [])]

    def _is_alive(self, lease: Lease, now: Instant) -> bool:
        """Whether a lease is to be prolonged."""
        match lease.stage:
            case Stage.RETURNED:
                return True
            case Stage.PREPARING:  # for as long as the database takes
                return self._served.session is not None
            case Stage.SENT | Stage.ACCEPTED:
                may_return = not lease.idempotent and now.mono < self._return_until
                return self._served.session is not None or may_return

    def on_kept(self, event: ev.UpkeepDone, now: Instant) -> list[Action]:
        """The ownership and the leases are prolonged; some had expired already."""
        self._is_keeping = False
        actions = self._end_expired(event.reaped, now)
        for result in event.outbox:
            self._served.shared.outbox.add(result, verified=True)
        prolonged = set(self._prolonged)  # by this very step, however long it took, and whoever has left meanwhile
        self._prolonged = []
        for lease in self._served.table.values():
            if lease.task_id in prolonged or self._is_alive(lease, now):
                lease.expires_at = now.mono + self._served.shared.policy.lease_s
        self._served.table.drop_expired(now.mono)
        if (
            self._served.session is None
            and not self._served.table
            and not self._served.shared.outbox.has(self._served.endpoint_id)
            and not self._is_reading_attempts
        ):
            self.is_over = True
            actions.append(do.ReleaseEndpoint(self._served.endpoint_id, self._served.fence))
        return actions

    def _end_expired(self, reaped: Sequence[LeasedTask], now: Instant) -> list[Action]:
        """End the tasks of expired leases. Of those that may not run twice, the database is asked first whether they
        were ever sent; the queue names them again and again until they have ended."""
        unclear: list[LeasedTask] = []
        for leased in reaped:
            lease = self._served.table.get(leased.task.task_id)
            if lease and lease.attempt == leased.attempt and self._is_alive(lease, now):
                continue  # It expired while the queue did not answer. The next upkeep prolongs it.
            if leased.task.options.idempotent or leased.cancel_requested:
                self._served.end(results.end_reaped(leased, endpoint_id=self._served.endpoint_id))
            else:
                unclear.append(leased)
        if not unclear or self._is_reading_attempts:
            return []
        self._is_reading_attempts = True
        return [do.ReadAttempts(self._served.endpoint_id, self._served.fence, unclear)]

    def on_attempts_read(self, event: ev.AttemptsRead) -> list[Action]:
        """Tasks of expired leases that were sent are lost; the others go back to the queue."""
        self._is_reading_attempts = False
        requeue: list[str] = []
        for leased in event.reaped:
            if event.attempts.get(leased.task.task_id, 0) < leased.attempt:
                requeue.append(leased.task.task_id)
            else:
                self._served.end(results.end_reaped(leased, endpoint_id=self._served.endpoint_id))
        self._served.table.drop(requeue)
        return self._served.requeue(requeue)

    def report_presence(self, now: Instant) -> list[Action]:
        """Record whether the endpoint is there, and its numbers."""
        if self._served.phase is not Phase.SERVING:
            return []
        self._presence_at = now.mono
        self._is_presence_stale = False
        online = self._served.session is not None
        status = self._status if online else EndpointStatus()
        ttl_s = self._served.shared.policy.ownership_ttl_s
        return [do.SetPresence(self._served.endpoint_id, self._served.fence, online, status, ttl_s)]

    def read_cancels(self) -> list[Action]:
        """Ask for tasks that somebody wants stopped."""
        if (
            self._is_reading_cancels
            or not self._served.table
            or self._served.session is None
            or self._served.phase is not Phase.SERVING
        ):
            return []
        self._is_reading_cancels = True
        return [do.ReadCancels(self._served.endpoint_id, self._served.fence)]

    def on_cancels(self, event: ev.CancelsRead, now: Instant) -> list[Action]:
        """Tell the agent to stop these, each once; what it does not have yet ends before it is sent."""
        self._is_reading_cancels = False
        told: list[str] = []
        for task_id in event.task_ids:
            lease = self._served.table.get(task_id)
            if lease and not lease.cancelled:
                lease.cancelled = True
                if lease.stage in (Stage.SENT, Stage.ACCEPTED):
                    told.append(task_id)
        return self._served.say(wire.CancelTasks(task_ids=tuple(told)), now) if told else []
