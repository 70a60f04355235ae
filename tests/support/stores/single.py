"""Calls of the queue for one endpoint, for tests: the answer without its batch; a refusal is raised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from farcall_common.errors import EndpointInUse, Fenced, QueueDataLost
from farcall_common.store import LeasedTask, Queue, TaskResult
from farcall_common.store.model import HeldLeases, MaintenanceResult

_Answer = TypeVar("_Answer")


def _raised(answer: _Answer | EndpointInUse | Fenced | QueueDataLost) -> _Answer:
    if isinstance(answer, EndpointInUse | Fenced | QueueDataLost):
        raise answer
    return answer


def claim(
    queue: Queue,
    endpoint_id: str,
    forwarder_id: str,
    *,
    spool_id: str = "",
    weights: Mapping[str, int] | None = None,
    ttl_s: float,
) -> int:
    [fence] = queue.claim(forwarder_id, [(endpoint_id, spool_id, weights or {})], ttl_s=ttl_s)
    return _raised(fence)


def maintain(
    queue: Queue,
    endpoint_id: str,
    fence: int,
    *,
    renew: Sequence[str] = (),
    forwarder_id: str = "w1",
    spool_id: str = "",
    ttl_s: float = 45,
    lease_s: float = 30,
) -> MaintenanceResult:
    held = {endpoint_id: HeldLeases(fence, spool_id, renew)}
    return _raised(queue.maintain(forwarder_id, held, ttl_s=ttl_s, lease_s=lease_s)[endpoint_id])


def reap(queue: Queue, endpoint_id: str, fence: int) -> Sequence[LeasedTask]:
    return maintain(queue, endpoint_id, fence).reaped


def lease(queue: Queue, endpoint_id: str, fence: int, *, limit: int, lease_s: float) -> Sequence[LeasedTask]:
    """Up to ``limit`` tasks, however many a call may lease."""
    leased: list[LeasedTask] = []
    while True:
        wanted = {endpoint_id: (fence, limit - len(leased), 0)}
        found = _raised(queue.lease(wanted, lease_s=lease_s)[endpoint_id])
        leased += found
        if not found or len(leased) == limit:
            return leased


def leased(queue: Queue, endpoint_id: str, fence: int) -> Mapping[str, int]:
    [found] = queue.leased([(endpoint_id, fence)])
    return _raised(found)


def cancel_requests(queue: Queue, endpoint_id: str, fence: int) -> Sequence[str]:
    [found] = queue.cancel_requests([(endpoint_id, fence)])
    return _raised(found)


def ack(queue: Queue, fence: int, results: Sequence[TaskResult]) -> None:
    _raised(queue.ack([(fence, results)])[0])


def mark_restored(queue: Queue, endpoint_id: str, fence: int) -> None:
    _raised(queue.mark_restored([(endpoint_id, fence)])[0])


def mark_disconnected(queue: Queue, endpoint_id: str, forwarder_id: str, fence: int) -> None:
    _raised(queue.mark_disconnected(forwarder_id, [(endpoint_id, fence)], ttl_s=45)[0])
