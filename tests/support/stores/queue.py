"""The queue in memory: the scripts of ``lua/``, in Python."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from farcall_common.errors import EndpointInUse, ErrorRecord, Fenced, QueueDataLost
from farcall_common.fairness import LANE, FairQueue
from farcall_common.store import codec, transitions
from farcall_common.store.model import (
    CancelOutcome,
    HeldLeases,
    LeasedTask,
    MaintenanceResult,
    QueuedTask,
    QueueMemory,
    QueuePosition,
    QueueState,
    RunningLimit,
    TaskResult,
    TokensTaken,
)
from farcall_common.store.queue_valkey import RESCUE_LEASE_S
from farcall_common.store.valkey import BATCH
from tests.support.stores.registry import FakeRegistry

_REAPED = 500
_RESULTS = 200
_Answer = TypeVar("_Answer")


@dataclasses.dataclass
class _Entry:
    """A task hash. ``result`` says that the task is done. Once it is flushed, the entry is a marker."""

    task: QueuedTask
    attempt: int
    enqueued_at: float
    leased_at: float | None = None
    result: TaskResult | None = None


@dataclasses.dataclass
class _Endpoint:
    """What the queue knows of one endpoint."""

    fence: int | None = None
    forwarder_id: str | None = None
    until: float = 0.0
    spool_id: str = ""
    complete: bool = False
    deleted: bool = False
    entries: dict[str, _Entry] = dataclasses.field(default_factory=dict)
    waiting: FairQueue[str] = dataclasses.field(default_factory=FairQueue)
    weights: Mapping[str, int] = dataclasses.field(default_factory=dict)
    limits: dict[str, RunningLimit] = dataclasses.field(default_factory=dict)
    leases: dict[str, float] = dataclasses.field(default_factory=dict)
    stops: set[str] = dataclasses.field(default_factory=set)
    outbox: dict[str, None] = dataclasses.field(default_factory=dict)

    def require_claim(self, fence: int) -> None:
        if self.deleted:
            raise Fenced("the endpoint was deleted")
        if self.fence is None:
            raise QueueDataLost("the endpoint has no owner")
        if self.fence != fence:
            raise Fenced("the endpoint has a newer owner")

    def require_owner(self, fence: int) -> None:
        self.require_claim(fence)
        if not self.complete:
            raise QueueDataLost("the queue is not restored")

    def add(self, task: QueuedTask, *, attempt: int, held: bool, lease_s: float, now: float) -> None:
        self.entries[task.task_id] = _Entry(task, attempt, now)
        if not held and _may_start_again(task, attempt):
            self.waiting.add(task.lane, task.task_id)
        else:
            self.leases[task.task_id] = now + lease_s
            self.waiting.hold(task.lane)

    def lane_of(self, task_id: str) -> str:
        return self.entries[task_id].task.lane

    def put_back(self, task_ids: Sequence[str]) -> None:
        for task_id in reversed(task_ids):
            del self.leases[task_id]
            self.waiting.done(self.lane_of(task_id))
            self.waiting.put_back(self.lane_of(task_id), task_id)

    def finish(self, task_id: str, result: TaskResult) -> None:
        if self.leases.pop(task_id, None) is None:
            self.waiting.remove(self.lane_of(task_id), task_id)
        else:
            self.waiting.done(self.lane_of(task_id))
        self.stops.discard(task_id)
        self.entries[task_id].result = result
        self.outbox[task_id] = None

    def own(self, forwarder_id: str, spool_id: str, *, until: float) -> None:
        self.forwarder_id, self.spool_id, self.until = forwarder_id, spool_id, until

    def reap(self, now: float) -> list[LeasedTask]:
        expired = sorted((deadline, task_id) for task_id, deadline in self.leases.items() if deadline <= now)
        again, ended = [], []
        for _, task_id in expired[:_REAPED]:
            entry = self.entries[task_id]
            if task_id not in self.stops and _may_start_again(entry.task, entry.attempt):
                again.append(task_id)
            else:
                ended.append(self.view(task_id, leased_at=entry.leased_at or entry.enqueued_at))
        self.put_back(again)
        return ended

    def unrecorded(self) -> list[TaskResult]:
        entries = (self.entries[task_id] for task_id in itertools.islice(self.outbox, _RESULTS))
        return [
            msgspec.structs.replace(entry.result, task_group_id=entry.task.task_group_id, owner_id=entry.task.owner_id)
            for entry in entries
            if entry.result is not None
        ]

    def held_back(self) -> list[str]:
        """Submitters that wait because of their limits."""
        return list(filter(self.waiting.limit_reached, self.waiting.waiting()))

    def apply_limits(self) -> None:
        own = {owner_id: limit.weight for owner_id, limit in self.limits.items() if limit.weight}
        weights = {**self.weights, **own}
        self.waiting.set_weights({**weights, **{owner_id + LANE: weight for owner_id, weight in weights.items()}})
        most = {owner_id: limit.max_running for owner_id, limit in self.limits.items()}
        self.waiting.set_limits({owner_id: each for owner_id, each in most.items() if each})

    def waiting_of(self, owner_id: str) -> int:
        return len(self.waiting.of(owner_id)) + len(self.waiting.of(owner_id + LANE))

    def live_owner(self, now: float) -> str | None:
        return self.forwarder_id if self.until > now else None

    def view(self, task_id: str, *, leased_at: float) -> LeasedTask:
        entry = self.entries[task_id]
        return LeasedTask(entry.task, entry.attempt, entry.enqueued_at, leased_at, task_id in self.stops)


class FakeQueue(FakeRegistry):
    """:class:`~farcall_common.store.ports.Queue` that lasts until :meth:`wipe`."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self._endpoints: dict[str, _Endpoint] = {}
        self._buckets: dict[str, tuple[float, float]] = {}
        self._reserved: dict[tuple[str, str], tuple[int, float]] = {}
        self._checkpoints: dict[str, str] = {}
        #: What :meth:`memory` answers.
        self.has_memory = QueueMemory(0, 0)
        # Stands for the server's clock, which a wipe does not turn back.
        self._fences = itertools.count(1)

    def wipe(self) -> None:
        super().wipe()
        with self._call():
            self._endpoints.clear()
            self._buckets.clear()
            self._reserved.clear()
            self._checkpoints.clear()

    def forget_results(self) -> None:
        """Forget ended tasks that were flushed, as when their markers expire."""
        with self._call():
            for endpoint in self._endpoints.values():
                endpoint.entries = {
                    id_: entry
                    for id_, entry in endpoint.entries.items()
                    if entry.result is None or id_ in endpoint.outbox
                }

    # producing

    def enqueue(self, tasks: Sequence[QueuedTask]) -> int:
        with self._call():
            if not tasks:
                return 0
            endpoint = self._endpoint(tasks[0].endpoint_id)
            if endpoint.deleted:
                return 0
            for task in tasks:
                if task.task_id not in endpoint.entries:
                    endpoint.add(task, attempt=task.attempt, held=False, lease_s=RESCUE_LEASE_S, now=self._clock())
            self._wake_owner(endpoint, tasks[0].endpoint_id)
            return len(endpoint.waiting)

    def cancel(
        self, endpoint_id: str, task_ids: Sequence[str], *, error: ErrorRecord | None = None
    ) -> Mapping[str, CancelOutcome]:
        with self._call():
            endpoint = self._endpoint(endpoint_id)
            outcomes = {
                task_id: self._cancel(endpoint, endpoint_id, task_id, error) for task_id in dict.fromkeys(task_ids)
            }
            if CancelOutcome.REQUESTED in outcomes.values():
                self._wake_owner(endpoint, endpoint_id)
            return outcomes

    def _owner_of(self, endpoint_id: str) -> str | None:
        endpoint = self._endpoints.get(endpoint_id)
        return None if endpoint is None else endpoint.live_owner(self._clock())

    def _wake_owner(self, endpoint: _Endpoint, endpoint_id: str) -> None:
        for listener in self._listeners.get(endpoint.live_owner(self._clock()) or "", []):
            listener.hear(endpoint_id)

    def _cancel(self, endpoint: _Endpoint, endpoint_id: str, task_id: str, error: ErrorRecord | None) -> CancelOutcome:
        if task_id not in endpoint.entries:
            return CancelOutcome.UNKNOWN
        if endpoint.entries[task_id].result is not None:
            return CancelOutcome.FINISHED
        if task_id in endpoint.leases:
            endpoint.stops.add(task_id)
            return CancelOutcome.REQUESTED
        endpoint.finish(task_id, transitions.cancelled_before_dispatch(task_id, endpoint_id, error))
        return CancelOutcome.REMOVED

    # ownership

    def claim(
        self, forwarder_id: str, wanted: Sequence[tuple[str, str, Mapping[str, int]]], *, ttl_s: float
    ) -> Sequence[int | EndpointInUse]:
        answers: list[int | EndpointInUse] = []
        with self._call():
            now = self._clock()
            for endpoint_id, spool_id, weights in wanted:
                endpoint = self._endpoint(endpoint_id)
                if endpoint.live_owner(now) not in (None, forwarder_id) and endpoint.spool_id not in ("", spool_id):
                    answers.append(EndpointInUse("another agent is connected as this endpoint"))
                    continue
                endpoint.fence = next(self._fences)
                endpoint.own(forwarder_id, spool_id, until=now + ttl_s)
                endpoint.weights = weights
                endpoint.apply_limits()
                answers.append(endpoint.fence)
        return answers

    def renew_ownership(
        self, forwarder_id: str, owned: Mapping[str, tuple[int, str]], *, ttl_s: float
    ) -> Sequence[str]:
        found: list[str] = []
        with self._call():
            now = self._clock()
            for endpoint_id, (fence, spool_id) in owned.items():
                endpoint = self._endpoint(endpoint_id)
                is_owned = endpoint.fence == fence and endpoint.complete
                if is_owned:
                    endpoint.own(forwarder_id, spool_id, until=now + ttl_s)
                if not is_owned or endpoint.outbox or any(deadline <= now for deadline in endpoint.leases.values()):
                    found.append(endpoint_id)
        return found

    def mark_disconnected(
        self, forwarder_id: str, owned: Sequence[tuple[str, int]], *, ttl_s: float
    ) -> Sequence[Fenced | QueueDataLost | None]:
        def renew(endpoint: _Endpoint) -> None:
            endpoint.own(forwarder_id, "", until=self._clock() + ttl_s)

        return [self._owned(id_, fence, renew) for id_, fence in owned]

    def maintain(
        self, forwarder_id: str, held: Mapping[str, HeldLeases], *, ttl_s: float, lease_s: float
    ) -> Mapping[str, MaintenanceResult | Fenced | QueueDataLost]:
        now = self._clock()

        def maintain(endpoint: _Endpoint, holding: HeldLeases) -> MaintenanceResult:
            endpoint.own(forwarder_id, holding.spool_id, until=now + ttl_s)
            endpoint.leases |= {task_id: now + lease_s for task_id in holding.leases if task_id in endpoint.leases}
            return MaintenanceResult(endpoint.reap(now), endpoint.unrecorded())

        return {
            endpoint_id: self._owned(endpoint_id, holding.fence, functools.partial(maintain, holding=holding))
            for endpoint_id, holding in held.items()
        }

    def release(self, endpoint_id: str, forwarder_id: str, fence: int) -> None:
        with self._call():
            endpoint = self._endpoint(endpoint_id)
            if endpoint.fence == fence:
                endpoint.forwarder_id, endpoint.spool_id = None, ""

    def evict(self, endpoint_id: str) -> None:
        with self._call():
            endpoint = self._endpoint(endpoint_id)
            endpoint.fence = None if endpoint.fence is None else endpoint.fence + 1
            endpoint.forwarder_id, endpoint.spool_id = None, ""

    def forget_endpoint(self, endpoint_id: str, *, limit: int) -> bool:
        with self._call():
            endpoint = self._endpoint(endpoint_id)
            endpoint.deleted, endpoint.complete, endpoint.forwarder_id, endpoint.spool_id = True, False, None, ""
            found = [*endpoint.waiting.items(), *endpoint.leases, *endpoint.outbox][:limit]
            for task_id in found:
                if task_id in endpoint.outbox:
                    del endpoint.outbox[task_id]
                elif endpoint.leases.pop(task_id, None) is None:
                    endpoint.waiting.remove(endpoint.lane_of(task_id), task_id)
                else:
                    endpoint.waiting.done(endpoint.lane_of(task_id))
                del endpoint.entries[task_id]
            if len(found) == limit:
                return False
            endpoint.stops.clear()
            endpoint.limits.clear()
            endpoint.apply_limits()
            return True

    # consuming

    def lease(
        self, wanted: Mapping[str, tuple[int, int, int]], *, lease_s: float
    ) -> Mapping[str, Sequence[LeasedTask] | Fenced | QueueDataLost]:
        now = self._clock()

        def lease(endpoint: _Endpoint, limit: int, reserve: int) -> Sequence[LeasedTask]:
            task_ids: list[str] = []
            while len(task_ids) < limit + reserve:
                taken = endpoint.waiting.take(new_submitters_only=len(task_ids) >= limit)
                if taken is None:
                    break
                task_ids.append(taken[1])
            for task_id in task_ids:
                endpoint.entries[task_id].attempt += 1
                endpoint.entries[task_id].leased_at = now
                endpoint.leases[task_id] = now + lease_s
            return [endpoint.view(task_id, leased_at=now) for task_id in task_ids]

        return {
            endpoint_id: self._owned(
                endpoint_id, fence, functools.partial(lease, limit=min(limit, BATCH), reserve=reserve)
            )
            for endpoint_id, (fence, limit, reserve) in wanted.items()
        }

    def unlease(self, endpoint_id: str, fence: int, task_ids: Sequence[str]) -> None:
        def unlease(endpoint: _Endpoint) -> None:
            back = [task_id for task_id in task_ids if task_id in endpoint.leases]
            for task_id in back:
                endpoint.entries[task_id].attempt -= 1
            endpoint.put_back(back)

        if refusal := self._owned(endpoint_id, fence, unlease):
            raise refusal

    def leased(self, owned: Sequence[tuple[str, int]]) -> Sequence[Mapping[str, int] | Fenced | QueueDataLost]:
        def attempts(endpoint: _Endpoint) -> Mapping[str, int]:
            return {task_id: endpoint.entries[task_id].attempt for task_id in endpoint.leases}

        return [self._owned(endpoint_id, fence, attempts) for endpoint_id, fence in owned]

    def cancel_requests(self, owned: Sequence[tuple[str, int]]) -> Sequence[Sequence[str] | Fenced | QueueDataLost]:
        def requests(endpoint: _Endpoint) -> Sequence[str]:
            return [task_id for task_id in endpoint.leases if task_id in endpoint.stops]

        return [self._owned(endpoint_id, fence, requests) for endpoint_id, fence in owned]

    def endpoints_with_activity(self, fences: Mapping[str, int]) -> Sequence[str]:
        with self._call():
            endpoints = [(endpoint_id, self._endpoint(endpoint_id), fence) for endpoint_id, fence in fences.items()]
            return [
                endpoint_id
                for endpoint_id, endpoint, fence in endpoints
                if endpoint.waiting or endpoint.stops or not endpoint.complete or endpoint.fence != fence
            ]

    def ack(self, results: Sequence[tuple[int, Sequence[TaskResult]]]) -> Sequence[Fenced | QueueDataLost | None]:
        def end(endpoint: _Endpoint, reported: Sequence[TaskResult]) -> None:
            for result in reported:
                if (entry := endpoint.entries.get(result.task_id)) and entry.result is None:
                    endpoint.finish(result.task_id, result)

        return [
            self._owned(each[0].endpoint_id, fence, functools.partial(end, reported=each)) if each else None
            for fence, each in results
        ]

    def outbox(self, endpoint_id: str) -> Sequence[TaskResult]:
        with self._call():
            return self._endpoint(endpoint_id).unrecorded()

    def flushed(self, task_ids: Mapping[str, Sequence[str]]) -> None:
        with self._call():
            for endpoint_id, ids in task_ids.items():
                endpoint = self._endpoint(endpoint_id)
                for task_id in ids:
                    endpoint.outbox.pop(task_id, None)

    def restore(
        self,
        endpoint_id: str,
        fence: int,
        tasks: Sequence[QueuedTask],
        *,
        held: Mapping[str, int],
        lease_s: float,
    ) -> None:
        with self._call():
            endpoint = self._endpoint(endpoint_id)
            endpoint.require_claim(fence)
            for task in tasks:
                entry, is_held = endpoint.entries.get(task.task_id), task.task_id in held
                if entry is None:
                    attempt = max(task.attempt, held.get(task.task_id, 0))
                    endpoint.add(task, attempt=attempt, held=is_held, lease_s=lease_s, now=self._clock())
                elif is_held and entry.result is None:
                    if task.task_id not in endpoint.leases:
                        endpoint.waiting.remove(entry.task.lane, task.task_id)
                        endpoint.waiting.hold(entry.task.lane)
                    endpoint.leases[task.task_id] = self._clock() + lease_s
                    entry.attempt = max(entry.attempt, held[task.task_id])

    def mark_restored(self, owned: Sequence[tuple[str, int]]) -> Sequence[Fenced | QueueDataLost | None]:
        def mark(endpoint: _Endpoint) -> None:
            endpoint.complete = True

        return [self._owned(endpoint_id, fence, mark, rebuilding=True) for endpoint_id, fence in owned]

    def find_missing(self, task_ids: Mapping[str, Sequence[str]]) -> frozenset[str]:
        with self._call():
            return frozenset(
                task_id
                for endpoint_id, ids in task_ids.items()
                for task_id in ids
                if task_id not in self._endpoint(endpoint_id).entries
            )

    def find_outboxes(self, endpoint_ids: Sequence[str]) -> Sequence[str]:
        with self._call():
            return [endpoint_id for endpoint_id in endpoint_ids if self._endpoint(endpoint_id).outbox]

    def read_checkpoint(self, name: str) -> str:
        with self._call():
            return self._checkpoints.get(name, "")

    def write_checkpoint(self, name: str, value: str, *, expected: str) -> bool:
        with self._call():
            if self._checkpoints.get(name, "") != expected:
                return False
            self._checkpoints[name] = value
            return True

    def depth(self, endpoint_ids: Sequence[str]) -> int:
        with self._call():
            return sum(len(self._endpoint(endpoint_id).waiting) for endpoint_id in endpoint_ids)

    def depth_of(self, endpoint_id: str, owner_id: str) -> tuple[int, int]:
        with self._call():
            endpoint = self._endpoint(endpoint_id)
            return len(endpoint.waiting), endpoint.waiting_of(owner_id)

    def reserve(self, endpoint_id: str, owner_id: str, count: int, *, most: int) -> int | None:
        with self._call():
            reserved, until = self._reserved.get((endpoint_id, owner_id), (0, 0.0))
            reserved = reserved if self._clock() < until else 0
            waiting = reserved + self._endpoint(endpoint_id).waiting_of(owner_id)
            if waiting + count > most:
                return waiting
            self._reserved[endpoint_id, owner_id] = reserved + count, self._clock() + 60
            return None

    def free(self, endpoint_id: str, owner_id: str, count: int) -> None:
        with self._call():
            reserved, until = self._reserved.get((endpoint_id, owner_id), (0, 0.0))
            self._reserved[endpoint_id, owner_id] = max(0, reserved - count), until

    def bytes_of(self, owner_id: str) -> int:
        with self._call():
            return sum(
                len(codec.pack(entry.task))
                for endpoint in self._endpoints.values()
                for task_id, entry in endpoint.entries.items()
                if entry.task.payer_id == owner_id and (entry.result is None or task_id in endpoint.outbox)
            )

    def recount_bytes(self, cursor: int) -> int:
        with self._call():
            return 0  # bytes_of counts the tasks themselves

    def memory(self) -> QueueMemory:
        with self._call():
            return self.has_memory

    def set_limits(self, limits: Mapping[str, Mapping[str, RunningLimit]], *, complete: bool) -> None:
        with self._call():
            for endpoint_id, each in limits.items():
                endpoint = self._endpoint(endpoint_id)
                if endpoint.deleted:
                    continue
                waited = endpoint.held_back()
                endpoint.limits = {**({} if complete else endpoint.limits), **each}
                endpoint.apply_limits()
                self._wake_if_free(endpoint, endpoint_id, waited)

    def take_tokens(
        self, bucket: str, tokens: int, *, rate_per_s: float, burst: int, in_debt: bool = False
    ) -> TokensTaken:
        with self._call():
            now = self._clock()
            held, since = self._buckets.get(bucket, (float(burst), now))
            at = max(since, now)
            held = min(float(burst), held + (at - since) * rate_per_s)
            given = tokens if in_debt else max(0, min(tokens, math.floor(held)))
            self._buckets[bucket] = (held - given, at)
            return TokensTaken(given, 0.0 if given else (1 - held) / rate_per_s)

    def position(self, endpoint_id: str, task_id: str) -> QueuePosition:
        with self._call():
            endpoint = self._endpoint(endpoint_id)
            depth = len(endpoint.waiting)
            state, ahead, limit = QueueState.UNKNOWN, 0, 0
            if task_id in endpoint.leases:
                state = QueueState.LEASED
            elif task_id in endpoint.entries:
                own = endpoint.waiting.of(endpoint.lane_of(task_id))
                if task_id in own:
                    state, ahead = QueueState.QUEUED, own.index(task_id)
                    limit = endpoint.waiting.limit_reached(endpoint.lane_of(task_id))
                else:
                    state = QueueState.DONE
            submitters = {each.removesuffix(LANE) for each in endpoint.waiting.waiting()}
            return QueuePosition(state, ahead, depth, len(submitters), limit)

    def _endpoint(self, endpoint_id: str) -> _Endpoint:
        return self._endpoints.setdefault(endpoint_id, _Endpoint())

    def _owned(
        self, endpoint_id: str, fence: int, call: Callable[[_Endpoint], _Answer], *, rebuilding: bool = False
    ) -> _Answer | Fenced | QueueDataLost:
        """The answer of a call for the owner of a complete queue, or of one that is being rebuilt."""
        with self._call():
            endpoint = self._endpoint(endpoint_id)
            try:
                endpoint.require_claim(fence) if rebuilding else endpoint.require_owner(fence)
            except (Fenced, QueueDataLost) as refusal:
                return refusal
            waited = endpoint.held_back()
            answer = call(endpoint)
            self._wake_if_free(endpoint, endpoint_id, waited)
            return answer

    def _wake_if_free(self, endpoint: _Endpoint, endpoint_id: str, waited: Sequence[str]) -> None:
        """Wake the owner if one of these submitters waits no longer because of its limit."""
        if any(each in endpoint.waiting.waiting() and not endpoint.waiting.limit_reached(each) for each in waited):
            self._wake_owner(endpoint, endpoint_id)


def _may_start_again(task: QueuedTask, attempt: int) -> bool:
    return attempt == 0 or (task.options.idempotent and attempt < task.options.max_attempts)
