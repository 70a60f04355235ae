"""Placement: who needs a worker, and whose place it gets. No I/O, no clock.

A manager has a place for each slot. Places go to payers in equal numbers, in turns where there are fewer places than
payers (as :mod:`farcall_common.fairness` has it for tasks): to submitters, but to all service accounts of one identity
together. The places of one payer go to its pairs of submitter and environment in proportion to their tasks, by highest
averages (A. Sainte-Lague, 1910). A start of a container costs seconds, so

- a place is wanted only for tasks that no worker would begin before a start is done (CIDRE, ASPLOS 2025: wait for a
  busy warm worker, or start another), and
- a place that was given stays given for a multiple of that time, and the share of an environment must have changed by
  more than a rounding (hysteresis): environments that alternate do not take one another's places all the time.

Idle workers without waiting tasks give their places first, in the order of
:mod:`farcall_endpoint.manager.core.warm_pool`.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from farcall_endpoint.contracts.prefetch import PrefetchPolicy
from farcall_endpoint.manager.core.environment_states import EnvironmentStates, State
from farcall_endpoint.manager.core.task_queue import TaskQueue
from farcall_endpoint.manager.core.warm_pool import WarmPool
from farcall_endpoint.manager.core.workers import OWN, TURN_S, Pair, Worker

_KEPT_STARTS: Final = 4.0
"""Multiple of its start time for which an environment keeps a place at least."""
_MARGIN: Final = 1.1
"""A place goes to another pair of a payer only if its tasks are more by this factor."""
_LEAST_REVIEW_S: Final = 0.02
_LONG_START_S: Final = 30.0
"""Seconds that a start may take for a payer with more places than another payer who waits for a place."""
_ONE_START_S: Final = 600.0
"""Seconds for which a payer with a slower start is limited to one start at a time."""


class Placement:
    """Decisions about the places of the manager's workers.

    :param idle: the pair of workers that nothing is waiting for.
    :param unlimited: whether a worker may run any number of tasks.
    """

    def __init__(
        self,
        *,
        workers: Mapping[int, Worker],
        queue: TaskQueue,
        environments: EnvironmentStates,
        pool: WarmPool,
        prefetch: PrefetchPolicy,
        idle: Pair = OWN,
        unlimited: bool = True,
    ) -> None:
        self._workers = workers
        self._queue = queue
        self._environments = environments
        self._pool = pool
        self._prefetch = prefetch
        self._idle = idle
        self._unlimited = unlimited
        self._slow_starts: dict[str, float] = {}  # until when a payer has one start at a time
        self.review_at: float | None = None
        """When a decision may change without an event: a turn ends, or a task exceeds its expected duration."""

    def pair_for_slot(self, hint: Pair | None, now: float) -> Pair | None:
        """Return the pair whose worker a free slot gets; None if the slot stays free for now.

        :param hint: the pair that the slot was freed for; None: no particular pair.
        """

        def can_start(pair: Pair) -> bool:
            is_ready = self._environments.is_ready(pair.key, pair.submitter, now)
            return is_ready and not (pair.key and self._has_slow_start(pair, now))

        if hint is not None and not hint.key and can_start(hint) and self._queue.waiting(hint):
            return hint
        needs = [pair for pair, _ in self.needs(now) if can_start(pair)]
        if hint in needs:
            return hint
        if needs:
            return needs[0]
        wanted = next((pair for pair, _ in self.prewarm_needs(now)), self._idle)
        return wanted if can_start(wanted) else None

    def idle_launch_at(self) -> float:
        """Return when a free slot gets an idle worker; infinite if the environment must be prepared first."""
        if not self._idle.key:
            return self._environments.own.launch_at_of("")
        state = self._environments.get(self._idle.key)
        return math.inf if state is None or state.state is not State.READY else state.launch_at

    def needs(self, now: float) -> list[tuple[Pair, int]]:
        """Return the pairs whose tasks need more workers, in their order, with the number of missing workers."""
        if not self._queue:
            return []
        by_place = self._by_place()
        needs: list[tuple[Pair, int]] = []
        for _, pairs in itertools.groupby(self._queue.in_turn(), key=lambda pair: pair.share_of):
            needs += [
                (pair, missing)
                for pair in self._by_share(list(pairs), by_place)
                if (missing := self._missing(pair, by_place.get(pair, []), now)) > 0
            ]
        return needs

    def prewarm_needs(self, now: float) -> Iterator[tuple[Pair, int]]:
        """Yield the pairs of prewarmed environments that lack idle workers, with the number of missing workers."""
        for state in self._environments.values():
            if state.prewarm and self._environments.is_ready(state.key, "", now):
                pair = Pair("", state.key)
                have = sum(worker.place == pair and not (worker.jobs or worker.killed) for worker in self._all())
                have += sum(worker.yields_to == pair for worker in self._all())
                if have < state.prewarm:
                    yield pair, state.prewarm - have

    def protected(self) -> set[int]:
        """Return the idle workers that prewarming keeps."""
        protected: set[int] = set()
        for state in self._environments.values():
            if state.prewarm:
                pair = Pair("", state.key)
                idle = [worker for worker in self._all() if worker.is_idle and worker.pair == pair]
                idle.sort(key=lambda worker: -worker.since)
                protected.update(worker.worker_id for worker in idle[: state.prewarm])
        return protected

    def place_for(self, pair: Pair, now: float) -> Worker | None:
        """The worker whose place a pair gets; None if there is none now."""
        others = [
            worker
            for worker in self._active()
            if worker.is_ready and not worker.killed and worker.yields_to is None and worker.pair != pair
        ]
        counts = collections.Counter(worker.place for worker in self._active())
        return (
            self._place_of_start(pair, now)
            or self._unused_place(others, now, has_places=counts[pair] > 0)
            or self._place_of_payer(pair.share_of, others, now)
            or self._place_of_environment(pair, others, counts, now)
        )

    def place_to_prewarm(self, pair: Pair) -> Worker | None:
        """The idle worker whose place a pair gets without any task; None if there is none now."""
        protected = self.protected()
        idle = [
            worker
            for worker in self._active()
            if worker.is_idle
            and worker.pair != pair
            and worker.worker_id not in protected
            and not self._queue.waiting(worker.pair)
        ]
        return next(iter(self._pool.in_order(idle)), None)

    def moved_yields(self, now: float, may_step_aside: Callable[[Worker, Pair], bool]) -> Iterator[Worker]:
        """Let another worker of the same payer yield if it is idle, or if its task waits for its calls. Drop a yield
        that no task waits for any more. Return the workers that yield now; the caller frees the place of each worker
        before it asks for the next.

        :param may_step_aside: see :meth:`~farcall_endpoint.manager.core.extra_workers.Extras.may_step_aside`.
        """
        for worker in self._workers.values():
            if worker.yields_to is None or worker.killed or not worker.jobs or worker.pair.target:
                continue
            if not self._queue.waiting(worker.yields_to):
                worker.yields_to = None
                continue
            if may_step_aside(worker, worker.yields_to):
                yield worker
                continue
            for other in self._active():
                if other.pair.share_of != worker.pair.share_of or now < other.turn_began + TURN_S:
                    continue
                is_idle = other.accepts_tasks and not other.jobs and other.pair != worker.yields_to
                if is_idle or (other.yields_to is None and may_step_aside(other, worker.yields_to)):
                    other.yields_to, worker.yields_to = worker.yields_to, None
                    yield other
                    break

    def would_overrun(self, worker: Worker, now: float) -> bool:
        """Whether a task of average length would end after the worker's turn."""
        return now + (self._prefetch.mean_s or 0.0) > worker.turn_began + TURN_S

    def has_place(self, payer: str) -> bool:
        """Whether a payer has a place, or gets one."""
        return any(payer in (worker.pair.share_of, worker.place.share_of) for worker in self._with_share())

    # -- needs ---------------------------------------------------------------------------------------------------------

    def _missing(self, pair: Pair, places: list[Worker], now: float) -> int:
        """How many workers more the tasks of a pair need."""
        waiting = self._queue.waiting(pair)
        coming = sum(worker.yields_to is not None or not worker.is_ready for worker in places)
        if not pair.key:
            launch_at = self._environments.own.launch_at_of(pair.submitter)
            if now < launch_at:
                self._review(launch_at)
                return 0
            return waiting - coming
        state = self._environments.get(pair.key)
        if state is None or not self._environments.is_ready(pair.key, pair.submitter, now):
            if state is not None and state.state is State.READY:
                self._review(state.launch_at_of(pair.submitter))
            return 0
        if self._has_slow_start(pair, now):
            return 0
        is_parked = any(worker.parked and worker.pair == pair and not worker.killed for worker in self._all())
        within_s = 0.0 if is_parked else state.expected_start_s
        mean_s = state.expected_task_s
        if mean_s is None:  # as long as it has been running, at least
            mean_s = max((now - worker.since for worker in places if worker.jobs), default=0.0) or None
        if mean_s is None and self._unlimited:
            missing = 0 if places else 1
        else:
            # The start in the place of a worker that ends will have time for one.
            capacity = sum(
                1
                if worker.killed or worker.yields_to is not None
                else worker.tasks_within(within_s, mean_s=mean_s, now=now)
                for worker in places
            )
            missing = math.ceil(max(0.0, waiting - capacity))
        if not missing:
            self._review(now + max(_LEAST_REVIEW_S, within_s / 4))
        return missing

    def _by_share(self, pairs: list[Pair], by_place: Mapping[Pair, list[Worker]]) -> list[Pair]:
        """The pairs of a payer: those without a place, in the order in which they came, and then by how many tasks they
        have for each place."""
        if len(pairs) == 1:
            return pairs
        without = [pair for pair in pairs if not by_place.get(pair)]
        others = [pair for pair in pairs if by_place.get(pair)]
        others.sort(key=lambda pair: -self._demand(pair) / (len(by_place[pair]) + 0.5))
        return without + others

    def _demand(self, pair: Pair) -> int:
        """Tasks of a pair that wait or run."""
        return self._queue.waiting(pair) + sum(len(worker.jobs) for worker in self._active() if worker.pair == pair)

    # -- places --------------------------------------------------------------------------------------------------------

    def _unused_place(self, others: list[Worker], now: float, *, has_places: bool) -> Worker | None:
        """The least valuable worker that nothing waits for. An environment that has places already does not get that of
        one that had a task a moment ago: another start would cost as much as it has been idle for."""
        protected = self.protected()
        unused = [worker for worker in others if not worker.jobs and not self._queue.waiting(worker.pair)]
        idle = [worker for worker in unused if worker.worker_id not in protected]
        if not idle and all(worker.worker_id in protected for worker in self._active()):
            idle = unused  # what is kept warm keeps no task from running
        for worker in self._pool.in_order(idle) if self._environments else idle:
            state = self._environments.get(worker.pair.key)
            kept_until = worker.since + (state.expected_start_s if state is not None else 0.0)
            if not has_places or now >= kept_until:
                return worker
            self._review(kept_until)
        return None

    def _place_of_start(self, pair: Pair, now: float) -> Worker | None:
        """A start in an environment whose tasks were cancelled or have other workers; or one that takes long, of a
        payer with more places than this one, which keeps one. Nothing else ends a start before its limit of time."""
        starting = [worker for worker in self._starting() if worker.yields_to is None]
        unwanted = [each for each in starting if each.pair != pair and not self._queue.waiting(each.pair)]
        if unwanted:
            return unwanted[-1]
        counts = self._by_payer()
        for worker in reversed(starting):
            payer = worker.pair.share_of
            if counts[payer] > max(1, counts[pair.share_of] + 1):
                found = self._at_end_of_turn(worker, worker.since + _LONG_START_S, now)
                if found is not None:
                    self._slow_starts[payer] = now + _ONE_START_S
                return found
        return None

    def _has_slow_start(self, pair: Pair, now: float) -> bool:
        """Whether a payer, some of whose starts took too long, has one start now, and so no other one."""
        until = self._slow_starts.get(pair.share_of)
        if until is None:
            return False
        if now >= until:
            del self._slow_starts[pair.share_of]
            return False
        if any(worker.pair.share_of == pair.share_of for worker in self._starting()):
            self._review(until)
            return True
        return False

    def _place_of_payer(self, payer: str, others: list[Worker], now: float) -> Worker | None:
        """A worker of another payer that has more than this one, or whose turn is over."""
        counts = self._by_payer()
        others = [worker for worker in others if worker.pair.share_of != payer]
        if not counts[payer]:
            for worker in others:
                if not worker.jobs and self.would_overrun(worker, now):
                    return worker
        richest = max((counts[each.pair.share_of] for each in others), default=0)
        if richest <= counts[payer]:
            return None
        worker = min(
            (each for each in others if counts[each.pair.share_of] == richest), key=lambda each: each.turn_began
        )
        ends = worker.turn_began + TURN_S
        if richest == counts[payer] + 1 > 1:  # the odd worker changes sides, once in a turn
            both = (payer, worker.pair.share_of)
            of_both = [each for each in self._active() if each.pair.share_of in both]
            if not all(each.is_ready and each.yields_to is None for each in of_both):
                return None
            ends = max(each.turn_began for each in of_both) + TURN_S
        return self._at_end_of_turn(worker, ends, now)

    def _place_of_environment(
        self, pair: Pair, others: list[Worker], counts: Mapping[Pair, int], now: float
    ) -> Worker | None:
        """A worker of another pair of the same payer that has more places than its share."""
        mine = [worker for worker in others if worker.pair.share_of == pair.share_of]
        if not mine:
            return None
        last_place = {each: self._demand(each) / (counts[each] - 0.5) for each in {worker.pair for worker in mine}}
        giver = min(last_place, key=lambda each: (last_place[each], each))
        if counts[pair]:
            next_place = self._demand(pair) / (counts[pair] + 0.5)
            if counts[giver] < 2 or next_place <= _MARGIN * last_place[giver]:
                return None
            mine = [worker for worker in mine if worker.pair == giver]
        elif counts[giver] > 1:
            mine = [worker for worker in mine if worker.pair == giver]
        # else: fewer places than environments, which take turns
        worker = min(mine, key=lambda each: each.turn_began)
        state = self._environments.get(worker.pair.key)
        start_s = 0.0 if state is None else state.expected_start_s
        return self._at_end_of_turn(worker, worker.turn_began + max(TURN_S, _KEPT_STARTS * start_s), now)

    def _at_end_of_turn(self, worker: Worker, ends: float, now: float) -> Worker | None:
        if now >= ends:
            return worker
        self._review(ends)
        return None

    def _review(self, at: float) -> None:
        self.review_at = at if self.review_at is None else min(self.review_at, at)

    # -- workers -------------------------------------------------------------------------------------------------------

    def _all(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def _active(self) -> Iterator[Worker]:
        """The workers that have a place."""
        return (worker for worker in self._workers.values() if worker.has_slot)

    def _with_share(self) -> Iterator[Worker]:
        """The same, and those that run again after another submitter got their place: they use as much of the node."""
        return (worker for worker in self._workers.values() if worker.has_slot or (worker.aside and not worker.waits))

    def _by_payer(self) -> Mapping[str, int]:
        """How much of the node each payer has, in places."""
        return collections.Counter(worker.place.share_of for worker in self._with_share())

    def _starting(self) -> Iterator[Worker]:
        """The workers with a place that start in an environment."""
        return (each for each in self._active() if each.pair.key and not (each.is_ready or each.killed))

    def _by_place(self) -> dict[Pair, list[Worker]]:
        by_place: dict[Pair, list[Worker]] = {}
        for worker in self._active():
            by_place.setdefault(worker.place, []).append(worker)
        return by_place
