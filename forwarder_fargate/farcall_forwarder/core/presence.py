"""Presence and spool generation: an agent's own data, each recorded at most once in ``policy.record_s``. Numbers that
change all the time are recorded less often; see :class:`ReportLimiter`."""

from __future__ import annotations

from farcall_common import wire
from farcall_common.store.model import EndpointStatus
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.endpoint import Endpoint
from farcall_forwarder.core.policy import Instant
from farcall_forwarder.core.untrusted import clean_qos, clean_status


def on_heartbeat(endpoint: Endpoint, heartbeat: wire.Heartbeat, now: Instant) -> list[Action]:
    """Take over the generation of the spool and the agent's numbers. Changed numbers are recorded soon; the same ones,
    for their time, when presence is about to be due."""
    actions: list[Action] = []
    generation = heartbeat.spool_generation
    if generation is not None and generation > endpoint.spool_generation:
        endpoint.spool_generation = generation
        actions += record_spool(endpoint, now)
    if heartbeat.report is None:
        return actions
    qos = clean_qos(heartbeat.report, now=now.epoch)
    former, endpoint.status = endpoint.status, clean_status(heartbeat.report, qos, now=now.epoch)
    is_changed = former != endpoint.status or (qos is not None and not qos.is_like(endpoint.qos))
    endpoint.qos, is_first = qos, former.reported_at is None
    is_soon_due = now.mono >= endpoint.presence_at + endpoint.policy.presence_s - endpoint.policy.maintenance_s
    if is_first or is_changed or is_soon_due:
        endpoint.is_presence_stale = True
    return actions + _record_status(endpoint, now)


def record_delayed(endpoint: Endpoint, now: Instant) -> list[Action]:
    """Record delayed data, if ``policy.record_s`` is over."""
    return record_spool(endpoint, now) + _record_status(endpoint, now)


def _record_status(endpoint: Endpoint, now: Instant) -> list[Action]:
    if not endpoint.is_presence_stale:
        return []
    if now.mono < endpoint.status_limiter.next_at:
        endpoint.context.delayed.add(endpoint.endpoint_id)
        return []
    endpoint.status_limiter.used(now=now.mono)
    return record_presence(endpoint, now)


def refresh_presence(endpoint: Endpoint, now: Instant) -> list[Action]:
    """Record the presence of a connected agent, if that is due."""
    is_due = endpoint.session is not None and now.mono >= endpoint.presence_at + endpoint.policy.presence_s
    return record_presence(endpoint, now) if is_due else []


def record_presence(endpoint: Endpoint, now: Instant) -> list[Action]:
    """Record whether the endpoint is online, and its numbers."""
    if not endpoint.is_serving:
        return []
    endpoint.presence_at = now.mono
    endpoint.is_presence_stale = False
    online = endpoint.session is not None
    status = endpoint.status if online else EndpointStatus()
    ttl_s = endpoint.policy.ownership_ttl_s
    qos = endpoint.qos if online else None
    return [do.SetPresence(endpoint.endpoint_id, endpoint.fence, online, status, ttl_s, qos)]


def record_spool(endpoint: Endpoint, now: Instant) -> list[Action]:
    """Record the generation of the spool if it has risen, by one step at a time."""
    generation = endpoint.spool_generation
    if generation == endpoint.recorded_spool_generation or not endpoint.is_serving or endpoint.is_recording_spool:
        return []
    if now.mono < endpoint.spool_recorded_at + endpoint.policy.record_s:
        endpoint.context.delayed.add(endpoint.endpoint_id)
        return []
    endpoint.spool_recorded_at = now.mono
    endpoint.is_recording_spool = True
    return [do.RecordSpoolGeneration(endpoint.endpoint_id, endpoint.fence, endpoint.spool_id, generation)]


def on_spool_recorded(endpoint: Endpoint, event: ev.SpoolGenerationRecorded, now: Instant) -> list[Action]:
    """Record the next generation of the spool, if it has risen meanwhile."""
    endpoint.is_recording_spool = False
    endpoint.recorded_spool_generation = event.spool_generation
    return record_spool(endpoint, now)
