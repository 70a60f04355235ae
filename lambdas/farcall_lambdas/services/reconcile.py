"""Reconciler: retention, the maximum wait, and the repair of tasks that a crash left between two stores.

Two gaps are possible. A submit may have died between its commit and the queue: the task is in the database only. A
forwarder may have died between acknowledging a result in the queue and writing it to the database: the result is in the
outbox. Any process may repair both at any time, also while a forwarder works: queueing skips queued tasks, and the
first recorded result counts. So the reconciler owns nothing and claims nothing. It leaves expired leases alone: the
next owner of the endpoint reaps them. Also here: idle forwarders are put to sleep, where the deployment wants that.

The work of a round is in proportion to the tasks submitted since the last one and to the endpoints with open tasks, not
to the number of waiting tasks: docs/adr/0041-reconciler-constant-work.md.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Final

import msgspec
from aws_lambda_powertools import Logger

from farcall_common.errors import Unavailable, WaitedTooLong
from farcall_common.store import CancelOutcome, Queue
from farcall_common.store.model import OpenTask, TaskResult
from farcall_common.wire.states import Reporter, TaskState
from farcall_lambdas.fleet import Fleet
from farcall_lambdas.logs import SERVICE
from farcall_lambdas.services.actions import ActionService
from farcall_lambdas.services.base import Context, Service
from farcall_lambdas.services.deletion import end_tasks
from farcall_lambdas.services.sharing import SharingService
from farcall_lambdas.services.submit import queue_tasks, was_dispatched
from farcall_lambdas.services.withdrawal import WithdrawalService

logger = Logger(service=SERVICE, child=True)

_NAME: Final = "reconciler"

#: Ids of open tasks that are read, and compared with the queue, at once.
_PAGE: Final = 1000

#: Batches of tasks of deleted endpoints that a round ends.
_ORPHAN_BATCHES: Final = 20

#: The position of the recount in the queue, and the steps of a round.
_RECOUNT: Final = "recount"
_RECOUNT_STEPS: Final = 20

#: Tasks whose payloads are read at once.
_BODIES: Final = 100

#: The lock expires a little before the next round begins, after this part of the period.
_LOCK_PART: Final = 0.95

_DAY_S: Final = 86_400.0


@dataclasses.dataclass(frozen=True)
class Reconciled:
    """Numbers of one round: endpoints with open tasks, tasks that the queue lacked and were queued, results moved from
    outboxes to the database, tasks that exceeded the maximum wait, tasks that ended because their endpoint was deleted,
    old tasks and audit entries deleted; ``withdrawn`` tasks were cancelled because a right was withdrawn.
    ``tasks_waiting`` were submitted a while ago and do not run yet, wherever they wait; if more than a thousand are
    open, those that wait in queues. ``usage_combined`` batches of results were added to the sums of their days.
    ``actions_overdue`` reached their deadline. ``skipped`` is 1 if another round was under way."""

    endpoints: int = 0
    offered: int = 0
    recorded: int = 0
    expired: int = 0
    orphaned: int = 0
    purged: int = 0
    audit_purged: int = 0
    tasks_waiting: int = 0
    skipped: int = 0
    withdrawn: int = 0
    usage_combined: int = 0
    actions_overdue: int = 0


class _Checkpoint(msgspec.Struct, frozen=True):
    """Up to where the queue is known to have all open tasks. It is stored in the queue: a wipe deletes it.

    The queue has every open task that was added before transaction ``checked``, and of that one those up to
    ``checked_id``: all tasks of a submit have the same transaction. ``seen`` is the first transaction
    that was unfinished in the last round. The next round also compares the page of open tasks after ``page_after``, a
    position in the order of transactions.
    """

    checked: int = 0
    checked_id: str = ""
    seen: int = 0
    page_after: tuple[int, str] = (0, "")


class Reconciler(Service):
    """Runs rounds; of two concurrent ones, the second does nothing."""

    def __init__(
        self, context: Context, withdrawals: WithdrawalService, sharing: SharingService, actions: ActionService
    ) -> None:
        super().__init__(context)
        self._withdrawals = withdrawals
        self._sharing = sharing
        self._actions = actions

    def run(self) -> Reconciled:
        """One round.

        :raises Unavailable: when a store cannot be reached; the next round starts over.
        """
        if not self._stores.database.try_lock(_NAME, ttl_s=_LOCK_PART * self._settings.reconcile_period_s):
            logger.warning("another round is under way")
            return Reconciled(skipped=1)
        try:
            done = self._round()
        finally:
            self._stores.database.unlock(_NAME)
        # One line per round: the metric TasksWaiting is made of it.
        logger.info("reconciled", **dataclasses.asdict(done))
        return done

    def _round(self) -> Reconciled:
        began_at = self._clock()
        # First: it needs no queue, and repairs must not keep the disk from being freed.
        purged, audit_purged = self._purge(until=began_at + self._settings.purge_until_s)
        until = began_at + self._settings.repair_until_s
        self._sharing.end_shares(until=until)
        combined = self._repeat(lambda limit: self._stores.usage.fold_usage(limit=limit), until)
        withdrawn = self._withdrawals.continue_all(until=until)
        overdue = self._actions.end_overdue(until=until)
        expired = self._expire(until=until)
        endpoint_ids = self._stores.tasks.list_endpoints_with_open_tasks()
        limits = self._stores.endpoints.find_running_limits(endpoint_ids)
        self._stores.queue.set_limits(limits, complete=True)
        recorded = sum(self._record_outbox(id_, until=until) for id_ in self._stores.queue.find_outboxes(endpoint_ids))
        deleted, orphaned = self._end_orphans(endpoint_ids, until=until)
        settled = _moment(began_at - self._settings.settle_s)
        offered, waiting = self._repair(settled, deleted, until=until)
        if waiting is None:
            waiting = self._stores.queue.depth(endpoint_ids)
        self._recount(until=until)
        return Reconciled(
            len(endpoint_ids),
            offered,
            recorded,
            expired,
            orphaned,
            purged,
            audit_purged,
            waiting,
            withdrawn=withdrawn,
            usage_combined=combined,
            actions_overdue=overdue,
        )

    def _end_orphans(self, endpoint_ids: Sequence[str], *, until: float) -> tuple[frozenset[str], int]:
        """End tasks of deleted endpoints, as many as a round may. Returns the deleted ones of these endpoints, and how
        many tasks ended."""
        deleted = sorted(set(endpoint_ids) - self._stores.endpoints.find_spools(endpoint_ids).keys())
        ended, batches = 0, 0
        for endpoint_id in deleted:
            is_all = False
            while not is_all and batches < _ORPHAN_BATCHES and self._clock() < until:
                done = end_tasks(self._stores, endpoint_id, reporter=Reporter.RECONCILER, at=_moment(self._clock()))
                ended, is_all, batches = ended + done.count, done.is_all, batches + 1
        return frozenset(deleted), ended

    def _record_outbox(self, endpoint_id: str, *, until: float) -> int:
        """Record old results. A live forwarder does so within moments: old ones were left behind.

        Their times are by the forwarder's clock, which may be ahead of ours: a time far in the future counts as old.
        Recording a result that a live forwarder is about to record is harmless: the first one counts.
        """
        recorded = 0
        while (now := self._clock()) < until:
            results = [
                result
                for result in self._stores.queue.outbox(endpoint_id)
                if abs(now - _returned_at(result)) > self._settings.settle_s
            ]
            if not results:
                break
            try:
                self._stores.tasks.record_results(results, at=_moment(now))
            except Unavailable:
                raise
            except Exception:  # one endpoint's results must not block the repair of the others
                logger.exception("results cannot be recorded", endpoint_id=endpoint_id)
                break
            self._stores.queue.flushed({endpoint_id: [result.task_id for result in results]})
            recorded += len(results)
        return recorded

    def _repair(self, settled: dt.datetime, deleted: Set[str], *, until: float) -> tuple[int, int | None]:
        """Queue the tasks that the queue lacks: of those added since the checkpoint, and of the next page of all open
        tasks; without those of deleted endpoints, which are about to end.

        Returns how many were queued; and how many wait, if one page has all open tasks.
        """
        queue, records = self._stores.queue, self._stores
        text = queue.read_checkpoint(_NAME)
        known = msgspec.json.decode(text, type=_Checkpoint) if text else _Checkpoint()
        unfinished = records.tasks.first_unfinished_transaction()
        if known.checked > unfinished:  # the database was replaced by an older one
            known = _Checkpoint()

        def is_due(task: OpenTask) -> bool:
            """Tasks that were added before the last round are checked, whatever their time says; newer ones when their
            submit has had time to queue them."""
            return task.added_in < known.seen or task.submitted_at < settled

        began = reached = (known.checked, known.checked_id)
        offered, checked = 0, (unfinished, "")
        for page in self._pages(after=began):
            count, is_whole = self._offer(list(filter(is_due, page)), deleted, until=until)
            offered += count
            checked = min([checked, *((task.added_in, "") for task in page if not is_due(task))])
            if is_whole:
                reached = (page[-1].added_in, page[-1].task_id)
            if not is_whole or self._clock() >= until:
                checked = min(checked, reached)
                break

        page = records.tasks.list_open_ids(after=known.page_after, limit=_PAGE)
        count, is_whole = self._offer(list(filter(is_due, page)), deleted, until=until)
        offered += count
        page_after = (page[-1].added_in, page[-1].task_id) if len(page) == _PAGE else (0, "")
        page_after = page_after if is_whole else known.page_after
        number, task_id = max(began, checked)
        now = _Checkpoint(checked=number, checked_id=task_id, seen=unfinished, page_after=page_after)
        # It fails when the queue was wiped meanwhile: the next round starts from scratch.
        queue.write_checkpoint(_NAME, msgspec.json.encode(now).decode(), expected=text)
        has_all = known.page_after == (0, "") and len(page) < _PAGE
        waiting = sum(task.state is not TaskState.RUNNING and task.submitted_at < settled for task in page)
        return offered, waiting if has_all else None

    def _recount(self, *, until: float) -> None:
        """Correct the bytes that tasks take in the queue, for the next few endpoints."""
        queue = self._stores.queue
        text = queue.read_checkpoint(_RECOUNT)
        cursor = int(text or 0)
        for _ in range(_RECOUNT_STEPS):
            cursor = queue.recount_bytes(cursor)
            if cursor == 0 or self._clock() >= until:
                break
        queue.write_checkpoint(_RECOUNT, str(cursor), expected=text)

    def _pages(self, *, after: tuple[int, str]) -> Iterator[Sequence[OpenTask]]:
        while page := self._stores.tasks.list_open_ids(after=after, limit=_PAGE):
            yield page
            after = (page[-1].added_in, page[-1].task_id)

    def _offer(self, tasks: Sequence[OpenTask], deleted: Set[str], *, until: float) -> tuple[int, bool]:
        """Queue those of these tasks that were never dispatched and that the queue lacks, a few at a time: on a busy
        disk, payloads take milliseconds each. At least the first ones are queued, whatever ``until`` is. Returns how
        many, and whether those are all."""
        by_endpoint = defaultdict(list)
        for task in tasks:
            if task.attempt == 0 and task.endpoint_id not in deleted:
                by_endpoint[task.endpoint_id].append(task.task_id)
        missing = self._stores.queue.find_missing(by_endpoint)
        offered, has_begun = 0, False
        for ids in by_endpoint.values() if missing else ():
            lacking = [task_id for task_id in ids if task_id in missing]
            for start in range(0, len(lacking), _BODIES):
                if has_begun and self._clock() >= until:
                    return offered, False
                has_begun = True
                some = lacking[start : start + _BODIES]
                found = self._stores.tasks.get_tasks(some)  # only of these, payloads are read
                wanted = [found[task_id] for task_id in some if task_id in found and not was_dispatched(found[task_id])]
                queue_tasks(self._stores, wanted)
                offered += len(wanted)
        return offered, True

    def _expire(self, *, until: float) -> int:
        """Fail tasks that have not started ``max_wait_days`` after their submission: the blobs of their arguments are
        only kept for that long. Returns how many."""
        days = self._settings.max_wait_days
        before = _moment(self._clock() - days * _DAY_S)
        expired = 0
        for page in self._pages(after=(0, "")):
            old = [t for t in page if t.submitted_at < before and t.state is not TaskState.RUNNING]
            expired += self._fail(old, WaitedTooLong(f"The task has not started within {days:g} days."))
            if page[-1].submitted_at >= before or self._clock() >= until:
                break
        return expired

    def _fail(self, tasks: Sequence[OpenTask], error: WaitedTooLong) -> int:
        """Fail tasks, then remove them from the queue: the database refuses any later result."""
        by_endpoint = defaultdict(list)
        for task in tasks:
            by_endpoint[task.endpoint_id].append(task.task_id)
        failed = 0
        for endpoint_id, ids in by_endpoint.items():
            results = [
                TaskResult(task_id, endpoint_id, 0, TaskState.FAILED, Reporter.RECONCILER, error=error.record)
                for task_id in ids
            ]
            failed += len(self._stores.tasks.record_results(results, at=_moment(self._clock())))
            outcomes = self._stores.queue.cancel(endpoint_id, ids)
            removed = [task_id for task_id, outcome in outcomes.items() if outcome is CancelOutcome.REMOVED]
            self._stores.queue.flushed({endpoint_id: removed})
        return failed

    def _purge(self, *, until: float) -> tuple[int, int]:
        """Delete old tasks, audit entries and days of usage, in batches that hold no lock for long, until ``until``
        (epoch seconds)."""
        records, settings = self._stores, self._settings
        now = _moment(self._clock())
        ended_before = now - dt.timedelta(days=settings.retention_days)
        before = now - dt.timedelta(days=settings.audit_days)
        tasks = self._repeat(lambda limit: records.tasks.purge_tasks(ended_before=ended_before, limit=limit), until)
        # An action is as old as its tasks may be: they wait, then they are kept.
        old = ended_before - dt.timedelta(days=settings.max_wait_days)
        self._repeat(lambda limit: records.actions.purge_actions(created_before=old, limit=limit), until)
        self._repeat(lambda limit: records.usage.purge_usage(before=before.date(), limit=limit), until)
        return tasks, self._repeat(lambda limit: records.audit.purge_entries(before=before, limit=limit), until)

    def _repeat(self, purge: Callable[[int], int], until: float) -> int:
        """Batches until one is not full, or until ``until``; at least one."""
        limit = self._settings.purge_batch
        purged = count = purge(limit)
        while count == limit and self._clock() < until:
            purged += (count := purge(limit))
        return purged


class IdleWatch:
    """Puts idle forwarders to sleep. Without a ``fleet`` they always run.

    It needs no lock: a peer that connects at this moment is redirected by the drain, requests a forwarder from the API,
    and so wakes them again.
    """

    def __init__(self, queue: Queue, fleet: Fleet | None) -> None:
        self._queue = queue
        self._fleet = fleet

    def run(self) -> int:
        """One round; returns how many forwarders were put to sleep.

        :raises Unavailable: when the queue or the fleet cannot be reached; the next round starts over.
        """
        if self._fleet is None:
            return 0
        forwarders = self._queue.forwarders()
        idle = [each for each in forwarders if each.idle_s is not None and each.idle_s >= self._fleet.idle_s]
        if not forwarders or len(idle) < len(forwarders):
            return 0
        self._fleet.sleep()
        logger.info("forwarders put to sleep", forwarders=len(idle))
        return len(idle)


def _moment(epoch_s: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(epoch_s, dt.UTC)


def _returned_at(result: TaskResult) -> float:
    return result.timings.get("returned_at", 0.0)
