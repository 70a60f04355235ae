"""Waiting tasks of a manager, by submitter and environment. Submitters take turns (:mod:`farcall_common.fairness`)."""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from farcall_common.fairness import FairQueue
from farcall_endpoint.manager.events import Job
from farcall_endpoint.manager.orders import unread_bytes
from farcall_endpoint.manager.workers import Pair

_SUBMITTER_OF: Final = operator.attrgetter("order.submitter")


class TaskQueue:
    """First in, first out for each submitter and environment.

    :param shared: whether workers serve all submitters: then their pair has none.
    :param default_key: the environment of tasks that name none.
    """

    def __init__(self, *, shared: bool, default_key: str = "") -> None:
        self._shared = shared
        self._default_key = default_key
        self._turns: FairQueue[None] = FairQueue()  # an item for each waiting task
        #: Called with the submitter of a task that was taken, when it has ended or waits again.
        self.done = self._turns.done
        self._jobs: dict[Pair, collections.deque[Job]] = {}
        self._entered: dict[Pair, int] = {}  # when a pair began to wait for a place
        self._next_entry = 0

    def __len__(self) -> int:
        return len(self._turns)

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def add(self, jobs: Iterable[Job], key: str, *, first: bool = False) -> None:
        """Put tasks of an environment, which has this key, behind the others of their submitters.

        :param first: before them.
        """
        for submitter, group in itertools.groupby(jobs, _SUBMITTER_OF):
            waiting = self._jobs.get(Pair(submitter, key))
            if waiting is None:
                waiting = self._enter(submitter, key)
            before = len(waiting)
            if first:
                waiting.extendleft(reversed(list(group)))
            else:
                waiting.extend(group)
            self._turns.add_several(submitter, [None] * (len(waiting) - before))

    def put_back(self, job: Job, key: str) -> None:
        """Put a task before the others of its submitter and environment; it counts as taken until :attr:`done`."""
        submitter = job.order.submitter
        jobs = self._jobs.get(Pair(submitter, key))
        (self._enter(submitter, key) if jobs is None else jobs).appendleft(job)
        self._turns.put_back(submitter, None)

    def take(self, pair: Pair, most: int, *, room_bytes: int) -> list[Job]:
        """The next tasks for a worker of this pair; they count as taken until :attr:`done`.

        :param room_bytes: of the worker's socket; the last task may exceed it.
        """
        if not self._shared:
            return self._take(pair, most, room_bytes)
        if len(self._jobs) == 1:
            (only,) = self._jobs
            return self._take(only, most, room_bytes) if only.key == pair.key else []
        taken: list[Job] = []
        while len(taken) < most and room_bytes >= 0 and (submitter := self._next_submitter(pair.key)) is not None:
            [job] = self._take(Pair(submitter, pair.key), 1, room_bytes)
            room_bytes -= unread_bytes(job)
            taken.append(job)
        return taken

    def _take(self, pair: Pair, most: int, room_bytes: int) -> list[Job]:
        jobs = self._jobs.get(pair)
        taken: list[Job] = []
        while jobs and len(taken) < most and room_bytes >= 0:
            job = jobs.popleft()
            room_bytes -= unread_bytes(job)
            taken.append(job)
        if taken:
            self._turns.take_several(pair.submitter, len(taken))
            if not jobs:
                self._forget(pair)
        return taken

    def _next_submitter(self, key: str) -> str | None:
        """The submitter that is next among those with tasks in an environment."""
        return next((each for each in self._turns.in_turn() if (each, key) in self._jobs), None)

    def remove(self, job: Job) -> None:
        """Take out a task; it does not count as taken."""
        environment = job.order.options.environment
        pair = Pair(job.order.submitter, self._default_key if environment is None else environment.key)
        self._jobs[pair].remove(job)
        self._turns.remove(job.order.submitter, None)
        if not self._jobs[pair]:
            self._forget(pair)

    def take_out(self, task_ids: Collection[str]) -> list[Job]:
        """Take out tasks; they do not count as taken."""
        found: list[Job] = []
        for pair, jobs in list(self._jobs.items()):
            wanted = [job for job in jobs if job.order.task_id in task_ids]
            if not wanted:
                continue
            found += wanted
            left = [job for job in jobs if job.order.task_id not in task_ids]
            jobs.clear()
            jobs.extend(left)
            for _ in wanted:
                self._turns.remove(pair.submitter, None)
            if not jobs:
                self._forget(pair)
        return found

    def remove_all(self, key: str) -> list[Job]:
        """Take out all tasks of an environment."""
        jobs = [job for pair, jobs in self._jobs.items() if pair.key == key for job in jobs]
        for job in jobs:
            self.remove(job)
        return jobs

    def clear(self) -> None:
        """Take out all."""
        self._turns.clear()
        self._jobs.clear()
        self._entered.clear()

    def items(self) -> Iterator[Job]:
        """All that wait."""
        return itertools.chain.from_iterable(self._jobs.values())

    def waiting(self, pair: Pair) -> int:
        """How many tasks wait for workers of a pair."""
        if not self._shared:
            return len(self._jobs.get(pair, ()))
        return sum(len(jobs) for each, jobs in self._jobs.items() if each.key == pair.key)

    def pairs(self) -> set[Pair]:
        """For whose workers tasks wait."""
        return {Pair("", pair.key) for pair in self._jobs} if self._shared else set(self._jobs)

    def in_turn(self) -> list[Pair]:
        """The same as :meth:`pairs`, the submitter that is next first, and of its environments the one that waits for
        a place longest."""
        if len(self._jobs) == 1 and not self._shared:
            return list(self._jobs)
        if self._shared:
            return sorted(self.pairs(), key=self.entered)
        by_submitter: dict[str, list[Pair]] = {each: [] for each in self._turns.in_turn()}
        for pair in self._jobs:
            by_submitter[pair.submitter].append(pair)
        return [pair for pairs in by_submitter.values() for pair in sorted(pairs, key=self.entered)]

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

    def _enter(self, submitter: str, key: str) -> collections.deque[Job]:
        pair = Pair(submitter, key)
        jobs = self._jobs[pair] = collections.deque()
        self._next_entry += 1
        self._entered[pair] = self._next_entry
        return jobs

    def _forget(self, pair: Pair) -> None:
        del self._jobs[pair], self._entered[pair]
