"""The queue in memory: the scripts of ``lua/``, in Python."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from farcall_common.errors import EndpointInUse, Fenced, QueueDataLost
from farcall_common.fairness import FairQueue
from farcall_common.store import transitions
from farcall_common.store.model import (
    AckOutcome,
    CancelOutcome,
    HeldLeases,
    LeasedTask,
    MaintenanceResult,
    QueuedTask,
    QueuePlace,
    QueueState,
    Taken,
    TaskResult,
)
from tests.support.stores.registry import FakeRegistry

_RESCUE_LEASE_S = 60.0
_Read = TypeVar("_Read")


@dataclasses.dataclass
class _Entry:
    """A task hash. ``result`` says that the task is done. Once it is flushed, the entry is a marker."""

    task: QueuedTask
    attempt: int
    enqueued_at: float
    leased_at: float | None = None
    result: TaskResult | None = None


@dataclasses.dataclass
class _Lane:
    """What the queue knows of one endpoint."""

    fence: int | None = None
    forwarder_id: str | None = None
    until: float = 0.0
    spool_id: str = ""
    complete: bool = False
    entries: dict[str, _Entry] = dataclasses.field(default_factory=dict)
    waiting: FairQueue[str] = dataclasses.field(default_factory=FairQueue)
    leases: dict[str, float] = dataclasses.field(default_factory=dict)
    stops: set[str] = dataclasses.field(default_factory=set)
    outbox: dict[str, None] = dataclasses.field(default_factory=dict)

    def require_claim(self, fence: int) -> None:
        if self.fence is None:
            raise QueueDataLost("nobody has claimed the endpoint")
        if self.fence != fence:
            raise Fenced("the endpoint has a newer owner")

    def require_owner(self, fence: int) -> None:
        self.require_claim(fence)
        if not self.complete:
            raise QueueDataLost("the queue is not restored")

    def add(self, task: QueuedTask, *, attempt: int, held: bool, lease_s: float, now: float) -> None:
        self.entries[task.task_id] = _Entry(task, attempt, now)
        if not held and _may_start_again(task, attempt):
            self.waiting.add(task.owner_id, task.task_id)
        else:
            self.leases[task.task_id] = now + lease_s
            self.waiting.hold(task.owner_id)

    def submitter_of(self, task_id: str) -> str:
        return self.entries[task_id].task.owner_id

    def put_back(self, task_ids: Sequence[str]) -> None:
        for task_id in reversed(task_ids):
            del self.leases[task_id]
            self.waiting.done(self.submitter_of(task_id))
            self.waiting.put_back(self.submitter_of(task_id), task_id)

    def finish(self, task_id: str, result: TaskResult) -> None:
        if self.leases.pop(task_id, None) is None:
            self.waiting.remove(self.submitter_of(task_id), task_id)
        else:
            self.waiting.done(self.submitter_of(task_id))
        self.stops.discard(task_id)
        self.entries[task_id].result = result
        self.outbox[task_id] = None

    def live_owner(self, now: float) -> str | None:
        return self.forwarder_id if self.until > now else None

    def view(self, task_id: str, *, leased_at: float) -> LeasedTask:
        entry = self.entries[task_id]
        return LeasedTask(entry.task, entry.attempt, entry.enqueued_at, leased_at, task_id in self.stops)


class FakeQueue(FakeRegistry):
    """:class:`~farcall_common.store.ports.Queue` that lasts until :meth:`wipe`."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self._lanes: dict[str, _Lane] = {}
        self._buckets: dict[str, tuple[float, float]] = {}
        self._checkpoints: dict[str, str] = {}
        # Stands for the server's clock, which a wipe does not turn back.
        self._fences = itertools.count(1)

    def wipe(self) -> None:
        super().wipe()
        with self._call():
            self._lanes.clear()
            self._buckets.clear()
            self._checkpoints.clear()

    def forget_ends(self) -> None:
        """Forget ended tasks that were flushed, as when the time of their markers is over."""
        with self._call():
            for lane in self._lanes.values():
                lane.entries = {
                    id_: entry for id_, entry in lane.entries.items() if entry.result is None or id_ in lane.outbox
                }

    # producing

    def enqueue(self, tasks: Sequence[QueuedTask]) -> int:
        with self._call():
            if not tasks:
                return 0
            lane = self._lane(tasks[0].endpoint_id)
            for task in tasks:
                if task.task_id not in lane.entries:
                    lane.add(task, attempt=task.attempt, held=False, lease_s=_RESCUE_LEASE_S, now=self._clock())
            self._wake_owner(lane, tasks[0].endpoint_id)
            return self.depth(tasks[0].endpoint_id)

    def cancel(self, endpoint_id: str, task_ids: Sequence[str]) -> Mapping[str, CancelOutcome]:
        with self._call():
            lane = self._lane(endpoint_id)
            outcomes = {task_id: self._cancel(lane, endpoint_id, task_id) for task_id in dict.fromkeys(task_ids)}
            if CancelOutcome.REQUESTED in outcomes.values():
                self._wake_owner(lane, endpoint_id)
            return outcomes

    def _wake_owner(self, lane: _Lane, endpoint_id: str) -> None:
        for listener in self._listeners.get(lane.live_owner(self._clock()) or "", []):
            listener.hear(endpoint_id)

    def _cancel(self, lane: _Lane, endpoint_id: str, task_id: str) -> CancelOutcome:
        if task_id not in lane.entries:
            return CancelOutcome.UNKNOWN
        if lane.entries[task_id].result is not None:
            return CancelOutcome.FINISHED
        if task_id in lane.leases:
            lane.stops.add(task_id)
            return CancelOutcome.REQUESTED
        lane.finish(task_id, transitions.cancelled_while_waiting(task_id, endpoint_id))
        return CancelOutcome.REMOVED

    # owning

    def claim(
        self,
        endpoint_id: str,
        forwarder_id: str,
        *,
        spool_id: str = "",
        weights: Mapping[str, int] | None = None,
        ttl_s: float,
    ) -> int:
        with self._call():
            lane = self._lane(endpoint_id)
            now = self._clock()
            if lane.live_owner(now) not in (None, forwarder_id) and lane.spool_id not in ("", spool_id):
                raise EndpointInUse("another agent is connected as this endpoint")
            lane.fence, lane.forwarder_id, lane.until = next(self._fences), forwarder_id, now + ttl_s
            lane.spool_id = spool_id
            lane.waiting.set_weights(weights or {})
            return lane.fence

    def claim_many(
        self, forwarder_id: str, wanted: Sequence[tuple[str, str, Mapping[str, int]]], *, ttl_s: float
    ) -> Sequence[int | EndpointInUse]:
        answers: list[int | EndpointInUse] = []
        for endpoint_id, spool_id, weights in wanted:
            claim = functools.partial(self.claim, spool_id=spool_id, weights=weights, ttl_s=ttl_s)
            try:
                answers.append(claim(endpoint_id, forwarder_id))
            except EndpointInUse as error:
                answers.append(error)
        return answers

    def renew_ownership(
        self, endpoint_id: str, forwarder_id: str, fence: int, *, spool_id: str = "", ttl_s: float
    ) -> None:
        with self._owned(endpoint_id, fence) as lane:
            lane.forwarder_id, lane.until, lane.spool_id = forwarder_id, self._clock() + ttl_s, spool_id

    def leave_many(
        self, forwarder_id: str, owned: Sequence[tuple[str, int]], *, ttl_s: float
    ) -> Sequence[Fenced | QueueDataLost | None]:
        return [
            _refusal(functools.partial(self.renew_ownership, id_, forwarder_id, fence, ttl_s=ttl_s))
            for id_, fence in owned
        ]

    def refresh(self, forwarder_id: str, owned: Mapping[str, tuple[int, str]], *, ttl_s: float) -> Sequence[str]:
        found: list[str] = []
        with self._call():
            now = self._clock()
            for endpoint_id, (fence, spool_id) in owned.items():
                lane = self._lane(endpoint_id)
                is_owned = lane.fence == fence and lane.complete
                if is_owned:
                    lane.forwarder_id, lane.until, lane.spool_id = forwarder_id, now + ttl_s, spool_id
                if not is_owned or lane.outbox or any(deadline <= now for deadline in lane.leases.values()):
                    found.append(endpoint_id)
        return found

    def maintain(
        self, forwarder_id: str, held: Mapping[str, HeldLeases], *, ttl_s: float, lease_s: float
    ) -> Mapping[str, MaintenanceResult | Fenced | QueueDataLost]:
        found: dict[str, MaintenanceResult | Fenced | QueueDataLost] = {}
        for endpoint_id, holding in held.items():
            try:
                self.renew_ownership(endpoint_id, forwarder_id, holding.fence, spool_id=holding.spool_id, ttl_s=ttl_s)
                self.renew(endpoint_id, holding.fence, holding.leases, lease_s=lease_s)
                reaped = self.reap(endpoint_id, holding.fence)
                found[endpoint_id] = MaintenanceResult(reaped, self.outbox(endpoint_id))
            except (Fenced, QueueDataLost) as refusal:
                found[endpoint_id] = refusal
        return found

    def release(self, endpoint_id: str, forwarder_id: str, fence: int) -> None:
        with self._call():
            lane = self._lane(endpoint_id)
            if lane.fence == fence:
                lane.forwarder_id, lane.spool_id = None, ""

    def evict(self, endpoint_id: str) -> None:
        with self._call():
            lane = self._lane(endpoint_id)
            lane.fence = None if lane.fence is None else lane.fence + 1
            lane.forwarder_id, lane.spool_id = None, ""

    # consuming

    def lease(self, endpoint_id: str, fence: int, *, limit: int, lease_s: float) -> Sequence[LeasedTask]:
        return self._lease(endpoint_id, fence, limit, 0, lease_s=lease_s)

    def _lease(self, endpoint_id: str, fence: int, limit: int, reserve: int, *, lease_s: float) -> Sequence[LeasedTask]:
        with self._owned(endpoint_id, fence) as lane:
            now = self._clock()
            task_ids: list[str] = []
            while len(task_ids) < limit + reserve:
                taken = lane.waiting.take(newcomers_only=len(task_ids) >= limit)
                if taken is None:
                    break
                task_ids.append(taken[1])
            for task_id in task_ids:
                lane.entries[task_id].attempt += 1
                lane.entries[task_id].leased_at = now
                lane.leases[task_id] = now + lease_s
            return [lane.view(task_id, leased_at=now) for task_id in task_ids]

    def lease_many(
        self, wanted: Mapping[str, tuple[int, int, int]], *, lease_s: float
    ) -> Mapping[str, Sequence[LeasedTask] | Fenced | QueueDataLost]:
        leased: dict[str, Sequence[LeasedTask] | Fenced | QueueDataLost] = {}
        for endpoint_id, (fence, limit, reserve) in wanted.items():
            try:
                leased[endpoint_id] = self._lease(endpoint_id, fence, limit, reserve, lease_s=lease_s)
            except (Fenced, QueueDataLost) as refusal:
                leased[endpoint_id] = refusal
        return leased

    def renew(self, endpoint_id: str, fence: int, task_ids: Sequence[str], *, lease_s: float) -> Sequence[str]:
        with self._owned(endpoint_id, fence) as lane:
            deadline = self._clock() + lease_s
            lane.leases |= {task_id: deadline for task_id in task_ids if task_id in lane.leases}
            return [task_id for task_id in task_ids if task_id not in lane.leases]

    def unlease(self, endpoint_id: str, fence: int, task_ids: Sequence[str]) -> None:
        with self._owned(endpoint_id, fence) as lane:
            back = [task_id for task_id in task_ids if task_id in lane.leases]
            for task_id in back:
                lane.entries[task_id].attempt -= 1
            lane.put_back(back)

    def leased(self, endpoint_id: str, fence: int) -> Mapping[str, int]:
        with self._owned(endpoint_id, fence) as lane:
            return {task_id: lane.entries[task_id].attempt for task_id in lane.leases}

    def leased_many(self, owned: Sequence[tuple[str, int]]) -> Sequence[Mapping[str, int] | Fenced | QueueDataLost]:
        return _of_each(owned, self.leased)

    def cancel_requests(self, endpoint_id: str, fence: int) -> Sequence[str]:
        with self._owned(endpoint_id, fence) as lane:
            return [task_id for task_id in lane.leases if task_id in lane.stops]

    def cancel_requests_many(
        self, owned: Sequence[tuple[str, int]]
    ) -> Sequence[Sequence[str] | Fenced | QueueDataLost]:
        return _of_each(owned, self.cancel_requests)

    def endpoints_with_activity(self, fences: Mapping[str, int]) -> Sequence[str]:
        with self._call():
            lanes = [(endpoint_id, self._lane(endpoint_id), fence) for endpoint_id, fence in fences.items()]
            return [
                endpoint_id
                for endpoint_id, lane, fence in lanes
                if lane.waiting or lane.stops or not lane.complete or lane.fence != fence
            ]

    def reap(self, endpoint_id: str, fence: int, *, limit: int = 500) -> Sequence[LeasedTask]:
        with self._owned(endpoint_id, fence) as lane:
            now = self._clock()
            expired = sorted((deadline, task_id) for task_id, deadline in lane.leases.items() if deadline <= now)
            again, ended = [], []
            for _, task_id in expired[:limit]:
                entry = lane.entries[task_id]
                if task_id not in lane.stops and _may_start_again(entry.task, entry.attempt):
                    again.append(task_id)
                else:
                    ended.append(lane.view(task_id, leased_at=entry.leased_at or entry.enqueued_at))
            lane.put_back(again)
            return ended

    def ack(self, fence: int, results: Sequence[TaskResult]) -> Mapping[str, AckOutcome]:
        if not results:
            return {}
        outcomes: dict[str, AckOutcome] = {}
        with self._owned(results[0].endpoint_id, fence) as lane:
            for result in results:
                entry = lane.entries.get(result.task_id)
                if entry is None:
                    outcomes[result.task_id] = AckOutcome.UNKNOWN
                elif entry.result is not None:
                    outcomes.setdefault(result.task_id, AckOutcome.DUPLICATE)
                else:
                    lane.finish(result.task_id, result)
                    outcomes[result.task_id] = AckOutcome.FIRST
        return outcomes

    def ack_many(self, ends: Sequence[tuple[int, Sequence[TaskResult]]]) -> Sequence[Fenced | QueueDataLost | None]:
        return [_refusal(functools.partial(self.ack, fence, results)) for fence, results in ends]

    def outbox(self, endpoint_id: str, *, limit: int = 200) -> Sequence[TaskResult]:
        with self._call():
            lane = self._lane(endpoint_id)
            return list(_ended(lane.entries[task_id] for task_id in itertools.islice(lane.outbox, limit)))

    def flushed(self, endpoint_id: str, task_ids: Sequence[str]) -> None:
        with self._call():
            lane = self._lane(endpoint_id)
            for task_id in task_ids:
                lane.outbox.pop(task_id, None)

    def flushed_many(self, task_ids: Mapping[str, Sequence[str]]) -> None:
        for endpoint_id, ids in task_ids.items():
            self.flushed(endpoint_id, ids)

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
            lane = self._lane(endpoint_id)
            lane.require_claim(fence)
            for task in tasks:
                entry, is_held = lane.entries.get(task.task_id), task.task_id in held
                if entry is None:
                    attempt = max(task.attempt, held.get(task.task_id, 0))
                    lane.add(task, attempt=attempt, held=is_held, lease_s=lease_s, now=self._clock())
                elif is_held and entry.result is None:
                    if task.task_id not in lane.leases:
                        lane.waiting.remove(task.owner_id, task.task_id)
                        lane.waiting.hold(task.owner_id)
                    lane.leases[task.task_id] = self._clock() + lease_s
                    entry.attempt = max(entry.attempt, held[task.task_id])

    def mark_restored(self, endpoint_id: str, fence: int) -> None:
        with self._call():
            lane = self._lane(endpoint_id)
            lane.require_claim(fence)
            lane.complete = True

    def mark_restored_many(self, owned: Sequence[tuple[str, int]]) -> Sequence[Fenced | QueueDataLost | None]:
        return [_refusal(functools.partial(self.mark_restored, *each)) for each in owned]

    def find_missing(self, task_ids: Mapping[str, Sequence[str]]) -> frozenset[str]:
        with self._call():
            return frozenset(
                task_id
                for endpoint_id, ids in task_ids.items()
                for task_id in ids
                if task_id not in self._lane(endpoint_id).entries
            )

    def find_outboxes(self, endpoint_ids: Sequence[str]) -> Sequence[str]:
        with self._call():
            return [endpoint_id for endpoint_id in endpoint_ids if self._lane(endpoint_id).outbox]

    def read_checkpoint(self, name: str) -> str:
        with self._call():
            return self._checkpoints.get(name, "")

    def write_checkpoint(self, name: str, value: str, *, expected: str) -> bool:
        with self._call():
            if self._checkpoints.get(name, "") != expected:
                return False
            self._checkpoints[name] = value
            return True

    def depths(self, endpoint_ids: Sequence[str]) -> int:
        return sum(map(self.depth, endpoint_ids))

    def depth(self, endpoint_id: str) -> int:
        with self._call():
            return len(self._lane(endpoint_id).waiting)

    def depth_of(self, endpoint_id: str, owner_id: str) -> tuple[int, int]:
        with self._call():
            waiting = self._lane(endpoint_id).waiting
            return len(waiting), len(waiting.of(owner_id))

    def take(self, bucket: str, tokens: int, *, rate_per_s: float, burst: int) -> Taken:
        with self._call():
            now = self._clock()
            held, since = self._buckets.get(bucket, (float(burst), now))
            at = max(since, now)
            held = min(float(burst), held + (at - since) * rate_per_s)
            given = min(tokens, int(held))
            self._buckets[bucket] = (held - given, at)
            return Taken(given, 0.0 if given else (1 - held) / rate_per_s)

    def place(self, endpoint_id: str, task_id: str) -> QueuePlace:
        with self._call():
            lane = self._lane(endpoint_id)
            depth = len(lane.waiting)
            standing, ahead = QueueState.UNKNOWN, 0
            if task_id in lane.leases:
                standing = QueueState.LEASED
            elif task_id in lane.entries:
                own = lane.waiting.of(lane.submitter_of(task_id))
                if task_id in own:
                    standing, ahead = QueueState.QUEUED, own.index(task_id)
                else:
                    standing = QueueState.DONE
            return QueuePlace(standing, ahead, depth, lane.waiting.submitters)

    def _lane(self, endpoint_id: str) -> _Lane:
        return self._lanes.setdefault(endpoint_id, _Lane())

    @contextlib.contextmanager
    def _owned(self, endpoint_id: str, fence: int) -> Iterator[_Lane]:
        with self._call():
            lane = self._lane(endpoint_id)
            lane.require_owner(fence)
            yield lane


def _of_each(
    owned: Iterable[tuple[str, int]], read: Callable[[str, int], _Read]
) -> list[_Read | Fenced | QueueDataLost]:
    found: list[_Read | Fenced | QueueDataLost] = []
    for endpoint_id, fence in owned:
        try:
            found.append(read(endpoint_id, fence))
        except (Fenced, QueueDataLost) as refusal:
            found.append(refusal)
    return found


def _refusal(call: Callable[[], object]) -> Fenced | QueueDataLost | None:
    try:
        call()
    except (Fenced, QueueDataLost) as refusal:
        return refusal
    return None


def _may_start_again(task: QueuedTask, attempt: int) -> bool:
    return attempt == 0 or (task.options.idempotent and attempt < task.options.max_attempts)


def _ended(entries: Iterable[_Entry]) -> Iterator[TaskResult]:
    for entry in entries:
        if entry.result is not None:
            task = entry.task
            yield msgspec.structs.replace(entry.result, task_group_id=task.task_group_id, owner_id=task.owner_id)
