"""Lease renewal and upkeep of one endpoint: ownership, leases, presence, sweeps and cancel requests."""

from __future__ import annotations

from collections.abc import Sequence

from farcall_common import wire
from farcall_common.store.model import EndpointStatus, LeasedTask
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core import results
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.endpoint_state import EndpointPhase, EndpointState
from farcall_forwarder.core.leases import Lease, Stage
from farcall_forwarder.core.policy import Instant
from farcall_forwarder.core.untrusted import clean_status


class Upkeep:
    """Periodic work for one endpoint, and its schedule."""

    def __init__(self, state: EndpointState, *, now: Instant) -> None:
        self._state = state
        self._is_maintaining = self._is_reading_cancels = self._is_reading_attempts = False
        self._sweep_at = self._upkeep_at = now.mono
        self._status = EndpointStatus()
        self._presence_at = 0.0
        self._shown_at = float("-inf")
        self._is_presence_stale = False
        #: Monotonic second until which leases of tasks that may not run twice wait for a disconnected agent.
        self._return_until = 0.0
        self._renewed: list[str] = []
        #: Set when an endpoint without a connection has nothing left to do.
        self.is_over = False

    def session_lost(self, now: Instant) -> None:
        """The agent has disconnected."""
        self._return_until = now.mono + self._state.context.policy.return_s

    def forget_steps(self) -> None:
        """Forget the steps under way: they belong to an earlier claim, and their answers are ignored."""
        self._is_maintaining = self._is_reading_cancels = self._is_reading_attempts = False

    def on_heartbeat(self, report: wire.EndpointReport, now: Instant) -> list[Action]:
        """Take over the agent's numbers. Changes that users see are recorded soon, the others when presence is due."""
        former, self._status = self._status, clean_status(report)
        shown = [(status.managers, status.total_workers, status.problem) for status in (former, self._status)]
        if shown[0] == shown[1]:
            return []
        self._is_presence_stale = True
        return self.record_delayed(now)

    def record_delayed(self, now: Instant) -> list[Action]:
        """Record the numbers that users see, or delay that until ``policy.record_s`` after the last record."""
        if not self._is_presence_stale:
            return []
        if now.mono < self._shown_at + self._state.context.policy.record_s:
            self._state.context.delayed.add(self._state.endpoint_id)
            return []
        self._shown_at = now.mono
        return self.report_presence(now)

    def is_to_be_swept(self, now: Instant, *, sweep_s: float) -> bool:
        """Whether it is time to look for work that no wake-up announced; at most once in ``sweep_s``."""
        if now.mono < self._sweep_at or self._state.phase is not EndpointPhase.SERVING or self._state.session is None:
            return False
        self._sweep_at = now.mono + sweep_s
        return True

    def sweep_soon(self, now: Instant) -> None:
        """Make a sweep due: wake-ups may have been missed."""
        self._sweep_at = now.mono

    @property
    def connected_spool(self) -> str:
        """The spool of the connected agent, or empty."""
        return self._state.spool_id if self._state.session else ""

    def is_to_be_refreshed(self, now: Instant) -> bool:
        """Whether an upkeep without leases is due. Such upkeeps of many endpoints are done in one step."""
        is_quiet = self._is_due_for_upkeep(now) and self._state.session is not None and not self._state.table
        if is_quiet:
            self._upkeep_at = now.mono + self._state.context.policy.upkeep_s
            self._is_maintaining = True
        return is_quiet

    def on_refreshed(self, now: Instant, *, needs_upkeep: bool) -> list[Action]:
        """The ownership was refreshed, or the endpoint needs an upkeep of its own."""
        self._is_maintaining = False
        if needs_upkeep:
            return self.maintain(now)
        is_presence_due = (
            self._state.session is not None and now.mono >= self._presence_at + self._state.context.policy.presence_s
        )
        return self.report_presence(now) if is_presence_due else []

    def _is_due_for_upkeep(self, now: Instant) -> bool:
        return now.mono >= self._upkeep_at and not self._is_maintaining and self._state.phase is EndpointPhase.SERVING

    def on_tick(self, now: Instant) -> list[Action]:
        """Begin the upkeep, if it is due."""
        return self.maintain(now) if now.mono >= self._upkeep_at else []

    @property
    def next_at(self) -> float:
        """The monotonic second at which the next work is due."""
        return self._upkeep_at if self._state.session is None else min(self._upkeep_at, self._sweep_at)

    def maintain(self, now: Instant) -> list[Action]:
        """Renew the ownership, and the leases of tasks that the agent has or may have."""
        policy = self._state.context.policy
        self._upkeep_at = now.mono + policy.upkeep_s
        if self._is_maintaining or self._state.phase is not EndpointPhase.SERVING:
            return []
        self._is_maintaining = True
        self._renewed = [lease.task_id for lease in self._state.table.values() if self._is_alive(lease, now)]
        step = do.MaintainEndpoint(
            self._state.endpoint_id,
            self._state.fence,
            self._renewed,
            self.connected_spool,
            policy.ownership_ttl_s,
            policy.lease_s,
        )
        is_presence_due = self._state.session is not None and now.mono >= self._presence_at + policy.presence_s
        return [step, *(self.report_presence(now) if is_presence_due else [])]

    def _is_alive(self, lease: Lease, now: Instant) -> bool:
        """Whether a lease is to be renewed."""
        match lease.stage:
            case Stage.RETURNED:
                return True
            case Stage.PREPARING:  # for as long as the database takes
                return self._state.session is not None
            case Stage.SENT | Stage.ACCEPTED:
                may_return = not lease.idempotent and now.mono < self._return_until
                return self._state.session is not None or may_return

    def on_maintained(self, event: ev.EndpointMaintained, now: Instant) -> list[Action]:
        """The ownership and the leases are renewed; some had expired already."""
        self._is_maintaining = False
        actions = self._finish_expired(event.reaped, now)
        for result in event.outbox:
            self._state.context.outbox.add(result, verified=True)
        renewed = set(self._renewed)  # by this step, however long it took, even if the agent has left meanwhile
        self._renewed = []
        for lease in self._state.table.values():
            if lease.task_id in renewed or self._is_alive(lease, now):
                lease.expires_at = now.mono + self._state.context.policy.lease_s
        self._state.table.drop_expired(now.mono)
        if (
            self._state.session is None
            and not self._state.table
            and not self._state.context.outbox.has(self._state.endpoint_id)
            and not self._is_reading_attempts
        ):
            self.is_over = True
            actions.append(do.ReleaseEndpoint(self._state.endpoint_id, self._state.fence))
        return actions

    def _finish_expired(self, reaped: Sequence[LeasedTask], now: Instant) -> list[Action]:
        """Finish the tasks of expired leases. For those that may not run twice, the database is asked first whether
        they were ever sent. The queue reports expired leases again until their results are recorded."""
        unclear: list[LeasedTask] = []
        for leased in reaped:
            lease = self._state.table.get(leased.task.task_id)
            if lease and lease.attempt == leased.attempt and self._is_alive(lease, now):
                continue  # It expired while the queue did not answer. The next upkeep renews it.
            if leased.task.options.idempotent or leased.cancel_requested:
                self._state.finish(results.reaped_result(leased, endpoint_id=self._state.endpoint_id))
            else:
                unclear.append(leased)
        if not unclear or self._is_reading_attempts:
            return []
        self._is_reading_attempts = True
        return [do.ReadAttempts(self._state.endpoint_id, self._state.fence, unclear)]

    def on_attempts_read(self, event: ev.AttemptsRead) -> list[Action]:
        """Tasks of expired leases that were sent are lost; the others return to the queue."""
        self._is_reading_attempts = False
        requeue: list[str] = []
        for leased in event.reaped:
            if event.attempts.get(leased.task.task_id, 0) < leased.attempt:
                requeue.append(leased.task.task_id)
            else:
                self._state.finish(results.reaped_result(leased, endpoint_id=self._state.endpoint_id))
        self._state.table.drop(requeue)
        return self._state.requeue(requeue)

    def report_presence(self, now: Instant) -> list[Action]:
        """Record whether the endpoint is online, and its numbers."""
        if self._state.phase is not EndpointPhase.SERVING:
            return []
        self._presence_at = now.mono
        self._is_presence_stale = False
        online = self._state.session is not None
        status = self._status if online else EndpointStatus()
        ttl_s = self._state.context.policy.ownership_ttl_s
        return [do.SetPresence(self._state.endpoint_id, self._state.fence, online, status, ttl_s)]

    def read_cancels(self) -> list[Action]:
        """Read the cancel requests."""
        if (
            self._is_reading_cancels
            or not self._state.table
            or self._state.session is None
            or self._state.phase is not EndpointPhase.SERVING
        ):
            return []
        self._is_reading_cancels = True
        return [do.ReadCancels(self._state.endpoint_id, self._state.fence)]

    def on_cancels(self, event: ev.CancelsRead, now: Instant) -> list[Action]:
        """Send each cancel request to the agent once. A task that was not sent yet ends instead of being sent."""
        self._is_reading_cancels = False
        sent: list[str] = []
        for task_id in event.task_ids:
            lease = self._state.table.get(task_id)
            if lease and not lease.cancelled:
                lease.cancelled = True
                if lease.stage in (Stage.SENT, Stage.ACCEPTED):
                    sent.append(task_id)
        return self._state.send(wire.CancelTasks(task_ids=tuple(sent)), now) if sent else []
