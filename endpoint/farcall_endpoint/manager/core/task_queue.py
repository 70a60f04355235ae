"""Waiting tasks of a manager, by submitter and environment. Payers take turns
(:mod:`farcall_common.fairness`): submitters, but all service accounts of one identity together.

Among the tasks of one submitter and environment the deepest come first: calls of tasks that wait for them, each for the
next. What was started is finished before more is started, so few tasks wait in the middle.
"""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

from farcall_common.fairness import FairQueue
from farcall_endpoint.manager.core.events import Job
from farcall_endpoint.manager.core.latency import LatencyTasks
from farcall_endpoint.manager.core.orders import unread_bytes
from farcall_endpoint.manager.core.workers import Pair

_MOST_LOOKED_AT: Final = 64
"""Number of additional calls to examine at the end of a queue, to find calls with small inputs."""
_SUBMITTER_OF: Final = operator.attrgetter("order.submitter", "order.payer")


def _level(job: Job) -> int:
    """Return the level of a job: 0 for a task, 1 for a call of a graph, 3 for a call of a running task, and so on."""
    return 2 * job.depth + (job.owner is not None)


def _pair_of(job: Job, key: str) -> Pair:
    return Pair(job.order.submitter, key, "", job.order.payer)


class _Waiting:
    """The jobs of one submitter and environment: the highest level first, each first in, first out."""

    __slots__ = ("_by_level",)

    def __init__(self) -> None:
        self._by_level: dict[int, collections.deque[Job]] = {}  # none of them is empty

    def __len__(self) -> int:
        return sum(map(len, self._by_level.values()))

    def __iter__(self) -> Iterator[Job]:
        return itertools.chain.from_iterable(self._by_level.values())

    @property
    def depth(self) -> int:
        """Depth of the deepest job."""
        return max(self._by_level) // 2

    def at(self, level: int) -> collections.deque[Job]:
        """Return the jobs of a level, to which the caller may add jobs."""
        jobs = self._by_level.get(level)
        if jobs is None:
            jobs = self._by_level[level] = collections.deque()
        return jobs

    def take(self, most: int, room_bytes: int, least_depth: int) -> list[Job]:
        """Take up to ``most`` of the first jobs, none less deep than ``least_depth``. The last may exceed the room."""
        taken: list[Job] = []
        while self._by_level and (level := max(self._by_level)) >= 2 * least_depth:
            jobs = self._by_level[level]
            while jobs and len(taken) < most and room_bytes >= 0:
                job = jobs.popleft()
                room_bytes -= unread_bytes(job)
                taken.append(job)
            if jobs:
                break
            del self._by_level[level]
        return taken

    @property
    def calls(self) -> int:
        """How many of them are calls."""
        return len(self) - len(self._by_level.get(0, ()))

    def take_calls(self, most: int, may_leave: Callable[[Job], bool], once: int) -> list[Job]:
        """Take calls from the end, of the least deep ones, those with the smallest inputs first.

        :param once: maximum number of calls that may not run twice.
        """
        taken: list[Job] = []
        for level in sorted(self._by_level):
            jobs = self._by_level[level]
            if level == 0 or len(taken) >= most:
                continue
            count = min(len(jobs), most - len(taken) + _MOST_LOOKED_AT)
            seen = [jobs.pop() for _ in range(count)]
            chosen: set[int] = set()
            for index in sorted(range(count), key=lambda index: seen[index].input_bytes + len(seen[index].payload)):
                job = seen[index]
                if len(taken) < most and may_leave(job) and (job.order.options.idempotent or once > 0):
                    once -= not job.order.options.idempotent
                    chosen.add(index)
                    taken.append(job)
            jobs.extend(job for index, job in reversed(list(enumerate(seen))) if index not in chosen)
            if not jobs:
                del self._by_level[level]
        return taken

    def take_out(self, task_ids: Collection[str]) -> list[Job]:
        """Take out those of these jobs that are here."""
        found: list[Job] = []
        for level, jobs in list(self._by_level.items()):
            out = [job for job in jobs if job.order.task_id in task_ids]
            if len(out) == len(jobs):
                del self._by_level[level]
            elif out:
                self._by_level[level] = collections.deque(job for job in jobs if job.order.task_id not in task_ids)
            found += out
        return found


class TaskQueue:
    """First in, first out for each submitter, environment and depth.

    :param shared: whether workers serve all submitters: then their pair has none.
    :param default_key: the environment of tasks that name none.
    :param latency: where tasks with a target wait, apart from the others: only by this object. If it takes none, they
        wait here, before the other tasks of their submitter.
    """

    def __init__(self, *, shared: bool, latency: LatencyTasks, default_key: str = "") -> None:
        self._shared = shared
        self._default_key = default_key
        self._latency = latency
        self._turns: FairQueue[None] = FairQueue()  # by payer, an item for each waiting task
        #: Called with the payer of a task that was taken, when it has ended or waits again.
        self.done = self._turns.done
        self._jobs: dict[Pair, _Waiting] = {}
        self._entered: dict[Pair, int] = {}  # when a pair began to wait for a place
        self._next_entry = 0

    def __len__(self) -> int:
        return len(self._turns)

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def add(self, jobs: Iterable[Job], key: str, *, first: bool = False) -> None:
        """Put jobs of one depth of an environment, which has this key, behind the others of their submitters.

        :param first: before them.
        """
        if self._latency.controller.classes:
            jobs = self._without_targets(jobs, key)
        for (submitter, payer), group in itertools.groupby(jobs, _SUBMITTER_OF):
            several = list(group)
            pair = Pair(submitter, key, "", payer)
            waiting = self._jobs.get(pair)
            if waiting is None:
                waiting = self._enter(pair)
            at = waiting.at(_level(several[0]))
            if first:
                at.extendleft(reversed(several))
            else:
                at.extend(several)
            self._turns.add_several(pair.share_of, [None] * len(several))

    def put_back(self, job: Job, key: str) -> None:
        """Put a job before the others of its submitter, environment and depth; it counts as taken until
        :attr:`done`."""
        if self._latency.takes(job):
            self._latency.add(job, key, first=True)
            return
        pair = _pair_of(job, key)
        jobs = self._jobs.get(pair)
        (self._enter(pair) if jobs is None else jobs).at(_level(job)).appendleft(job)
        self._turns.put_back(pair.share_of, None)

    def take(self, pair: Pair, most: int, *, room_bytes: int, least_depth: int = 0) -> list[Job]:
        """The next jobs for a worker of this pair; they count as taken until :attr:`done`.

        :param room_bytes: of the worker's socket; the last job may exceed it.
        :param least_depth: none that is less deep.
        """
        if pair.target:
            jobs = self._latency.take(pair, most, room_bytes=room_bytes)
            for job in jobs:
                self._turns.hold(job.order.share_of)
            return jobs
        if not self._shared:
            return self._take(pair, most, room_bytes, least_depth)
        if len(self._jobs) == 1:
            (only,) = self._jobs
            return self._take(only, most, room_bytes, least_depth) if only.key == pair.key else []
        taken: list[Job] = []
        while len(taken) < most and room_bytes >= 0:
            found = self._next_pair(pair.key, least_depth)
            if found is None:
                break
            [job] = self._take(found, 1, room_bytes, least_depth)
            room_bytes -= unread_bytes(job)
            taken.append(job)
        return taken

    def passed(self, job: Job) -> None:
        """A job went to a worker without waiting here; it counts as taken until :attr:`done`."""
        self._turns.add_several(job.order.share_of, [None])
        self._turns.take_several(job.order.share_of, 1)

    def _without_targets(self, jobs: Iterable[Job], key: str) -> list[Job]:
        """Let those of these jobs wait that have a target; the others."""
        others: list[Job] = []
        for job in jobs:
            if job.order.target is None or not self._latency.controller.has(job.order.task_id):
                others.append(job)
            elif self._latency.takes(job):
                self._latency.add(job, key)
            else:
                self._put_before_later(job, key)
        return others

    def _put_before_later(self, job: Job, key: str) -> None:
        """Put a job with a target before those of its submitter that need not end so early."""
        pair, controller = _pair_of(job, key), self._latency.controller
        due_time = controller.due_time(job.order.task_id)
        jobs = (self._jobs.get(pair) or self._enter(pair)).at(_level(job))
        earlier = itertools.takewhile(
            lambda each: controller.has(each.order.task_id) and controller.due_time(each.order.task_id) <= due_time,
            jobs,
        )
        jobs.insert(sum(1 for _ in earlier), job)
        self._turns.add(pair.share_of, None)

    def _take(self, pair: Pair, most: int, room_bytes: int, least_depth: int) -> list[Job]:
        jobs = self._jobs.get(pair)
        if jobs is None:
            return []
        taken = jobs.take(most, room_bytes, least_depth)
        if taken:
            self._turns.take_several(pair.share_of, len(taken))
            if not jobs:
                self._forget(pair)
        return taken

    def _next_pair(self, key: str, least_depth: int) -> Pair | None:
        """The pair with jobs as deep in an environment that is next."""
        return next(
            (pair for pair in self._by_turn() if pair.key == key and self.depth(pair) >= least_depth),
            None,
        )

    def _by_turn(self) -> list[Pair]:
        """The submitters and environments with waiting jobs: by the turns of payers, then the one that waits for a
        place longest."""
        by_payer: dict[str, list[Pair]] = {each: [] for each in self._turns.in_turn()}
        for pair in self._jobs:
            by_payer[pair.share_of].append(pair)
        return [pair for pairs in by_payer.values() for pair in sorted(pairs, key=self._entered.__getitem__)]

    def depth(self, pair: Pair) -> int:
        """Depth of the deepest waiting job of a submitter and environment; -1 if none waits."""
        jobs = self._jobs.get(pair)
        return -1 if jobs is None else jobs.depth

    def deepest(self) -> list[tuple[Pair, int]]:
        """For whose workers the deepest job of each submitter waits, and its depth; the deepest of all first. Where
        workers serve all submitters, that is one pair."""
        pairs = sorted(self._jobs, key=self.depth, reverse=True)
        if self._shared:
            return [(Pair("", pair.key), self.depth(pair)) for pair in pairs[:1]]
        first: dict[str, Pair] = {}
        for pair in pairs:
            first.setdefault(pair.submitter, pair)
        return [(pair, self.depth(pair)) for pair in first.values()]

    def take_out(self, task_ids: Collection[str]) -> list[Job]:
        """Take out tasks; they do not count as taken."""
        found = self._latency.take_out(task_ids)
        for pair, jobs in list(self._jobs.items()):
            out = jobs.take_out(task_ids)
            for _ in out:
                self._turns.remove(pair.share_of, None)
            if not jobs:
                self._forget(pair)
            found += out
        return found

    def calls(self) -> dict[str, int]:
        """How many calls of graphs and running tasks wait, by the key of their environment."""
        counts: dict[str, int] = {}
        for pair, jobs in self._jobs.items():
            if count := jobs.calls:
                counts[pair.key] = counts.get(pair.key, 0) + count
        return counts

    def take_calls(self, key: str, most: int, may_leave: Callable[[Job], bool], *, once: int) -> list[Job]:
        """Take out calls that another manager runs, of the payer that is next first; they do not count as taken.

        :param once: maximum number of calls that may not run twice.
        """
        found: list[Job] = []
        for pair in self._by_turn() if most > 0 else ():
            if pair.key != key or len(found) >= most:
                continue
            jobs = self._jobs[pair]
            out = jobs.take_calls(most - len(found), may_leave, once)
            once -= sum(not job.order.options.idempotent for job in out)
            for _ in out:
                self._turns.remove(pair.share_of, None)
            if not jobs:
                self._forget(pair)
            found += out
        return found

    def remove_all(self, key: str, submitter: str | None = None) -> list[Job]:
        """Take out all tasks of an environment, or those of one submitter."""
        pairs = [pair for pair in self._jobs if pair.key == key and submitter in (None, pair.submitter)]
        task_ids = {job.order.task_id for pair in pairs for job in self._jobs[pair]}
        return [*self._latency.remove_all(key, submitter), *self.take_out(task_ids)]

    def clear(self) -> None:
        """Take out all."""
        self._latency.clear()
        self._turns.clear()
        self._jobs.clear()
        self._entered.clear()

    def items(self) -> Iterator[Job]:
        """All that wait."""
        return itertools.chain(self._latency.items(), *self._jobs.values())

    def waiting(self, pair: Pair) -> int:
        """How many tasks wait for workers of a pair."""
        if pair.target:
            return self._latency.waiting(pair)
        if not self._shared:
            return len(self._jobs.get(pair, ()))
        return sum(len(jobs) for each, jobs in self._jobs.items() if each.key == pair.key)

    def pairs(self) -> set[Pair]:
        """For whose workers tasks wait that have no target."""
        return {Pair("", pair.key) for pair in self._jobs} if self._shared else set(self._jobs)

    def keys(self) -> set[str]:
        """The environments that tasks wait for."""
        return {pair.key for pair in (*self._jobs, *self._latency.pairs())}

    def in_turn(self) -> list[Pair]:
        """The same as :meth:`pairs`, the payer that is next first, and of its pairs the one that waits for a place
        longest."""
        if len(self._jobs) == 1 and not self._shared:
            return list(self._jobs)
        if self._shared:
            return sorted(self.pairs(), key=self.entered)
        return self._by_turn()

    def entered(self, pair: Pair) -> int:
        """A number that is higher the later a pair began to wait for a place."""
        if not self._shared:
            return self._entered[pair]
        return min(number for each, number in self._entered.items() if each.key == pair.key)

    def got_place(self, pair: Pair) -> None:
        """A pair waits for its next place from now on."""
        for each in self._entered:
            if each == pair or (self._shared and each.key == pair.key):
                self._next_entry += 1
                self._entered[each] = self._next_entry

    def _enter(self, pair: Pair) -> _Waiting:
        jobs = self._jobs[pair] = _Waiting()
        self._next_entry += 1
        self._entered[pair] = self._next_entry
        return jobs

    def _forget(self, pair: Pair) -> None:
        del self._jobs[pair], self._entered[pair]
