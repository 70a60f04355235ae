"""Waiting tasks of a manager, by submitter and environment. Submitters take turns (:mod:`farcall_common.fairness`)."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator

from farcall_common.fairness import FairQueue
from farcall_endpoint.manager.events import Job
from farcall_endpoint.manager.workers import Pair


class TaskQueue:
    """First in, first out for each submitter and environment.

    :param shared: whether workers serve all submitters: then their pair has none.
    :param default_key: the environment of tasks that name none.
    """

    def __init__(self, *, shared: bool, default_key: str = "") -> None:
        self._shared = shared
        self._default_key = default_key
        self._turns: FairQueue[None] = FairQueue()  # an item for each waiting task
        self._jobs: dict[Pair, collections.deque[Job]] = {}
        self._entered: dict[Pair, int] = {}  # when a pair began to wait for a place
        self._next_entry = 0

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, job: Job, key: str) -> None:
        """Put a task behind the others of its submitter and environment, which has this key."""
        submitter = job.order.submitter
        jobs = self._jobs.get((submitter, key))  # type: ignore[call-overload]  # quicker to make than a pair
        (self._enter(submitter, key) if jobs is None else jobs).append(job)
        self._turns.add(submitter, None)

    def put_back(self, job: Job, key: str) -> None:
        """Put a task before the others of its submitter and environment; it counts as taken until :meth:`done`."""
        submitter = job.order.submitter
        jobs = self._jobs.get(Pair(submitter, key))
        (self._enter(submitter, key) if jobs is None else jobs).appendleft(job)
        self._turns.put_back(submitter, None)

    def take(self, pair: Pair) -> Job | None:
        """The next task for a worker of this pair; it counts as taken until :meth:`done`."""
        if self._shared:
            if (submitter := self._next_submitter(pair.key)) is None:
                return None
            pair = Pair(submitter, pair.key)
        if (jobs := self._jobs.get(pair)) is None:
            return None
        self._turns.take(submitter=pair.submitter)
        job = jobs.popleft()
        if not jobs:
            self._forget(pair)
        return job

    def _next_submitter(self, key: str) -> str | None:
        """The submitter that is next among those with tasks in an environment."""
        if len(self._jobs) == 1:
            ((submitter, only_key),) = self._jobs
            return submitter if key == only_key else None
        return next((each for each in self._turns.in_turn() if (each, key) in self._jobs), None)

    def done(self, submitter: str) -> None:
        """A task that was taken has ended, or waits again."""
        self._turns.done(submitter)

    def remove(self, job: Job) -> None:
        """Take out a task; it does not count as taken."""
        environment = job.order.options.environment
        pair = Pair(job.order.submitter, self._default_key if environment is None else environment.key)
        self._jobs[pair].remove(job)
        self._turns.remove(job.order.submitter, None)
        if not self._jobs[pair]:
            self._forget(pair)

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
