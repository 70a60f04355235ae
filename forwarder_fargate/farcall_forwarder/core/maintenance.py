"""Maintenance of one endpoint: lease renewal, ownership, sweeps and cancel requests."""

from __future__ import annotations

from collections.abc import Sequence

from farcall_common import wire
from farcall_common.store.model import LeasedTask
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core import results
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.endpoint import Endpoint
from farcall_forwarder.core.leases import Lease, Stage
from farcall_forwarder.core.policy import Instant
from farcall_forwarder.core.presence import refresh_presence


def is_to_be_swept(endpoint: Endpoint, now: Instant, *, sweep_s: float) -> bool:
    """Whether it is time to look for work that no wake-up announced; at most once in ``sweep_s``."""
    if now.mono < endpoint.sweep_at or not endpoint.is_serving or endpoint.session is None:
        return False
    endpoint.sweep_at = now.mono + sweep_s
    return True


def is_to_be_refreshed(endpoint: Endpoint, now: Instant) -> bool:
    """Whether maintenance without leases is due. That of many endpoints is done in one step."""
    is_due = now.mono >= endpoint.maintain_at and not endpoint.is_maintaining and endpoint.is_serving
    if not is_due or endpoint.session is None or endpoint.leases:
        return False
    endpoint.maintain_at = now.mono + endpoint.policy.maintenance_s
    endpoint.is_maintaining = True
    return True


def on_refreshed(endpoint: Endpoint, now: Instant, *, needs_maintenance: bool) -> list[Action]:
    """The ownership was refreshed, or the endpoint needs a full maintenance."""
    endpoint.is_maintaining = False
    return maintain(endpoint, now) if needs_maintenance else refresh_presence(endpoint, now)


def next_at(endpoint: Endpoint) -> float:
    """The monotonic second at which the next work is due."""
    return endpoint.maintain_at if endpoint.session is None else min(endpoint.maintain_at, endpoint.sweep_at)


def maintain(endpoint: Endpoint, now: Instant) -> list[Action]:
    """Renew the ownership, and the leases of tasks that the agent has or may have.

    It waits for leases that return to the queue: the tasks may be sent again, and are not to end as expired then.
    """
    policy = endpoint.policy
    endpoint.maintain_at = now.mono + policy.maintenance_s
    if endpoint.is_maintaining or endpoint.requeues or not endpoint.is_serving:
        return []
    endpoint.is_maintaining = True
    endpoint.requeued.clear()
    endpoint.renewed = [lease.task_id for lease in endpoint.leases.values() if _is_alive(endpoint, lease, now)]
    step = do.MaintainEndpoint(
        endpoint.endpoint_id,
        endpoint.fence,
        endpoint.renewed,
        endpoint.connected_spool_id,
        policy.ownership_ttl_s,
        policy.lease_s,
    )
    return [step, *refresh_presence(endpoint, now)]


def _is_alive(endpoint: Endpoint, lease: Lease, now: Instant) -> bool:
    """Whether a lease is to be renewed."""
    match lease.stage:
        case Stage.RETURNED:
            return True
        case Stage.PREPARING:  # for as long as the database takes
            return endpoint.session is not None
        case Stage.SENT | Stage.ACCEPTED:
            may_return = not lease.idempotent and now.mono < endpoint.return_until
            return endpoint.session is not None or may_return


def on_requeued(endpoint: Endpoint, now: Instant) -> list[Action]:
    """Leases have returned to the queue: the maintenance that waited for them begins."""
    endpoint.requeues -= 1
    return maintain(endpoint, now)


def on_maintained(endpoint: Endpoint, event: ev.EndpointMaintained, now: Instant) -> list[Action]:
    """The ownership and the leases are renewed; some had expired already."""
    endpoint.is_maintaining = False
    actions = _finish_expired(endpoint, event.reaped, now)
    for result in event.outbox:
        endpoint.outbox.add(result, verified=True)
    renewed = set(endpoint.renewed)  # by this step, however long it took, even if the agent has left meanwhile
    endpoint.renewed = ()
    for lease in endpoint.leases.values():
        if lease.task_id in renewed or _is_alive(endpoint, lease, now):
            lease.expires_at = now.mono + endpoint.policy.lease_s
    endpoint.leases.drop_expired(now.mono)
    if (
        endpoint.session is None
        and not endpoint.leases
        and not endpoint.outbox.has(endpoint.endpoint_id)
        and not endpoint.is_reading_attempts
        and not endpoint.requeues
    ):
        endpoint.is_over = True
        actions.append(do.ReleaseEndpoint(endpoint.endpoint_id, endpoint.fence))
    return actions


def _finish_expired(endpoint: Endpoint, reaped: Sequence[LeasedTask], now: Instant) -> list[Action]:
    """Finish the tasks of expired leases. For those that may not run twice, the database is read first: they may
    never have been sent. The queue reports expired leases again until their results are recorded."""
    unclear: list[LeasedTask] = []
    for leased in reaped:
        if leased.task.task_id in endpoint.requeued:
            continue
        lease = endpoint.leases.get(leased.task.task_id)
        if lease and lease.attempt == leased.attempt and _is_alive(endpoint, lease, now):
            continue  # It expired while the queue did not answer. The next maintenance renews it.
        if leased.task.options.idempotent or leased.cancel_requested:
            endpoint.finish(results.reaped_result(leased, endpoint_id=endpoint.endpoint_id))
        else:
            unclear.append(leased)
    if not unclear or endpoint.is_reading_attempts:
        return []
    endpoint.is_reading_attempts = True
    return [do.ReadAttempts(endpoint.endpoint_id, endpoint.fence, unclear)]


def on_attempts_read(endpoint: Endpoint, event: ev.AttemptsRead) -> list[Action]:
    """Tasks of expired leases that were sent are lost; the others return to the queue."""
    endpoint.is_reading_attempts = False
    requeue: list[str] = []
    for leased in event.reaped:
        if event.attempts.get(leased.task.task_id, 0) < leased.attempt:
            requeue.append(leased.task.task_id)
        else:
            endpoint.finish(results.reaped_result(leased, endpoint_id=endpoint.endpoint_id))
    endpoint.leases.drop(requeue)
    return endpoint.requeue(requeue)


def read_cancels(endpoint: Endpoint) -> list[Action]:
    """Read the cancel requests."""
    if endpoint.is_reading_cancels or not endpoint.leases or endpoint.session is None or not endpoint.is_serving:
        return []
    endpoint.is_reading_cancels = True
    return [do.ReadCancels(endpoint.endpoint_id, endpoint.fence)]


def on_cancels(endpoint: Endpoint, event: ev.CancelsRead, now: Instant) -> list[Action]:
    """Send each cancel request to the agent once. A task that was not sent yet ends instead of being sent."""
    endpoint.is_reading_cancels = False
    sent: list[str] = []
    for task_id in event.task_ids:
        lease = endpoint.leases.get(task_id)
        if lease and not lease.cancelled:
            lease.cancelled = True
            if lease.stage in (Stage.SENT, Stage.ACCEPTED):
                sent.append(task_id)
    return endpoint.send(wire.CancelTasks(task_ids=tuple(sent)), now) if sent else []
