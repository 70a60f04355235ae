"""Keeping an endpoint: its ownership, the leases that its agent holds, what it is known to be, what was cancelled."""

from __future__ import annotations

from farcall_common import wire
from farcall_common.store.model import EndpointStatus
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core import results
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.leases import Stage
from farcall_forwarder.core.policy import Instant
from farcall_forwarder.core.served import Phase, Served
from farcall_forwarder.core.untrusted import clean_status

__all__ = ["Upkeep"]


class Upkeep:
    """What comes round for one endpoint, and when."""

    def __init__(self, served: Served, *, now: Instant) -> None:
        self._served = served
        self._is_keeping = self._is_prolonging = self._is_reading_cancels = False
        self._sweep_at = self._upkeep_at = now.mono
        self._status = EndpointStatus()
        self._presence_at = 0.0
        #: Set when nothing is left to do for an endpoint without a session.
        self.is_over = False

    def forget_steps(self) -> None:
        """What is under way belongs to a former claim: its answer will not be heard."""
        self._is_keeping = self._is_reading_cancels = False

    def on_heartbeat(self, report: wire.EndpointReport, now: Instant) -> list[Action]:
        """The agent's numbers; what others look at is recorded at once, the rest when it is due."""
        former, self._status = self._status, clean_status(report)
        shown = [(status.managers, status.total_workers, status.problem) for status in (former, self._status)]
        return self.report_presence(now) if shown[0] != shown[1] else []

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
        """Keep the ownership, and prolong the leases of what the agent has accepted."""
        policy = self._served.shared.policy
        self._upkeep_at = now.mono + policy.upkeep_s
        if self._is_keeping or self._served.phase is not Phase.SERVING:
            return []
        self._is_keeping = True
        self._is_prolonging = self._served.session is not None
        alive = (Stage.ACCEPTED, Stage.RETURNED) if self._is_prolonging else (Stage.RETURNED,)
        renew = [lease.task_id for lease in self._served.table.at(*alive)]
        keep = do.KeepEndpoint(
            self._served.endpoint_id,
            self._served.fence,
            renew,
            self.spool_heard,
            policy.ownership_ttl_s,
            policy.lease_s,
        )
        is_presence_due = self._served.session is not None and now.mono >= self._presence_at + policy.presence_s
        return [keep, *(self.report_presence(now) if is_presence_due else [])]

    def on_kept(self, event: ev.UpkeepDone, now: Instant) -> list[Action]:
        """The ownership and the leases are prolonged; some had expired already."""
        self._is_keeping = False
        requeue: list[str] = []
        for leased in event.reaped:
            task = leased.task
            lease = self._served.table.get(task.task_id)
            if lease and lease.stage is Stage.RETURNED:
                continue
            never_sent = not task.idempotent and event.sent_attempts.get(task.task_id, 0) < leased.attempt
            if never_sent and not leased.cancel_requested:
                requeue.append(task.task_id)
            else:
                self._served.end(results.end_reaped(leased, endpoint_id=self._served.endpoint_id))
        for result in event.outbox:
            self._served.shared.outbox.add(result, verified=True)
        self._served.table.drop(requeue)
        if self._served.session or self._is_prolonging:
            # These were prolonged by this very step, however long it took, and whoever has left meanwhile.
            for lease in self._served.table.at(Stage.ACCEPTED):
                lease.expires_at = now.epoch + self._served.shared.policy.lease_s
        self._served.table.drop_expired(now.epoch)
        if (
            self._served.session is None
            and not self._served.table
            and not self._served.shared.outbox.has(self._served.endpoint_id)
        ):
            self.is_over = True
            return [*self._served.requeue(requeue), do.ReleaseEndpoint(self._served.endpoint_id, self._served.fence)]
        return self._served.requeue(requeue)

    def report_presence(self, now: Instant) -> list[Action]:
        """Record whether the endpoint is there, and its numbers."""
        if self._served.phase is not Phase.SERVING:
            return []
        self._presence_at = now.mono
        online = self._served.session is not None
        status = self._status if online else EndpointStatus()
        ttl_s = self._served.shared.policy.ownership_ttl_s
        return [do.SetPresence(self._served.endpoint_id, self._served.fence, online, status, now.epoch, ttl_s)]

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
