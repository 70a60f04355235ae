"""Controller: the weights of the latency classes of a node, from the latencies of their tasks. No I/O, no clock.

A latency class is the tasks of one function and submitter with one target. Seconds are those of a monotonic clock.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Final

from farcall_endpoint.config.settings import DEFAULT_WEIGHT, PolicyName, QosSettings
from farcall_endpoint.contracts.agent_manager import OrderTarget, WeightOfClass
from farcall_endpoint.qos.histograms import WindowedHistogram
from farcall_endpoint.qos.policies import Gains, Policy, ProportionalIntegral, ShortFirst, Static, Target, Threshold
from farcall_endpoint.qos.weights import LEAST_WEIGHT

BATCH: Final = "batch"
"""The group of all tasks without a target."""

_WINDOW_S: Final = 4.0
_MOST_CLASSES: Final = 128
"""Maximum number of latency classes of a node. Tasks of further classes are batch work."""
_MOST_OF_ONE: Final = 16
"""Maximum number of latency classes of one payer: a submitter may name any number of targets."""
_FORGET_S: Final = 600.0
"""Seconds without a task after which a class is forgotten."""
_LATE_S: Final = 10.0
"""Seconds for which a target must be missed before it is reported as one that cannot be held."""
_KEPT_S: Final = 60.0
"""Seconds after the last task of a class during which its problem stays reported: later tasks may have been refused."""
_LEAST_PRESSURE: Final = Gains().least_pressure
_AT_BOUND: Final = 0.95
_SLOWER: Final = 1.01
_LEAST_RUNS: Final = 5
_LEAST_THREADS: Final = 0.01
"""Threads of a task below which it computes next to nothing."""
_HANGS: Final = 20.0
_HANGS_S: Final = 30.0
"""A task hangs if it is late by ``_HANGS`` times its target and by ``_HANGS_S`` seconds: more CPU would not help it."""
_NEW: Final = 0.2
"""Weight of the newest task in the mean of run times."""
_AGEING: Final = 10.0
"""Factor of run times in the order of ``short-first``: a task waits up to this multiple of the difference in run times
for shorter tasks that arrived later."""

NEEDS_WORKERS: Final = "workers"
NEEDS_CPU: Final = "cpu"
NEEDS_LOOSER: Final = "looser"


@dataclasses.dataclass(slots=True)
class LatencyClass:
    """``pending``: the tasks that have not ended, with their arrival. ``late_since``: start of the current period in
    which the target is missed; None if it is held. ``run_s``: mean run time; None before a task has ended. ``threads``,
    ``running``: mean numbers of computing threads and of running tasks. ``fastest_s``: the shortest run; longer runs
    raise it slowly. ``payer``: the identity that the submitter counts as. ``max_weight``: maximum sum of the weights of
    the payer's classes; None for the owner of the endpoint. ``is_met``: whether a task has met the target."""

    target: Target
    window: WindowedHistogram
    used_at: float
    payer: str = ""
    pending: dict[str, float] = dataclasses.field(default_factory=dict)
    run_s: float | None = None
    weight: float = DEFAULT_WEIGHT
    late_since: float | None = None
    problem: str = ""
    threads: float = 0.0
    running: float = 0.0
    fastest_s: float = math.inf
    ended: int = 0
    max_weight: float | None = None
    is_met: bool = False


_POLICIES: Final[Mapping[PolicyName, Callable[[QosSettings], Policy | None]]] = {
    "pi": lambda settings: ProportionalIntegral(batch_share=settings.batch_share),
    "threshold": lambda settings: Threshold(ratio=settings.ratio, delta=settings.delta),
    "short-first": lambda settings: ShortFirst(batch_share=settings.batch_share),
    "static": lambda _: Static(),
    "none": lambda _: None,
}


class Controller:
    """Record of the tasks with a target on a node; decides the weights of their classes.

    ``classes``: the current classes, by name. ``due_at``: when :meth:`decide` is due. ``is_short_first``: whether the
    policy is ``short-first``.

    :param settings: QoS settings of the endpoint.
    """

    def __init__(self, settings: QosSettings) -> None:
        self._settings = settings
        self._policy = _POLICIES[settings.policy](settings)
        self.is_short_first = settings.policy == "short-first"
        self.classes: dict[str, LatencyClass] = {}
        self.due_at = math.inf
        self._class_of: dict[str, str] = {}  # by unfinished task
        self._decided_at: float | None = None
        self._processors = 0

    def add(self, task_id: str, target: OrderTarget, now: float, *, submitter: str = "", payer: str = "") -> bool:
        """Add a task; return False if it is batch work, because its target is invalid or there are too many classes.

        :param payer: identity that the submitter counts as; empty: the submitter itself.
        """
        payer = payer or submitter
        name = target.name
        known = self.classes.get(name)
        if known is None or (target.latency_s, target.expected_s) != (known.target.latency_s, known.target.expected_s):
            # a new class, or another baseline
            try:
                found = self._target(target, payer)
            except ValueError:
                return False
            if known is not None:
                known.target = found
            elif not self._make_room(payer):
                return False
            else:
                known = LatencyClass(found, WindowedHistogram(_WINDOW_S), now, payer, max_weight=target.max_weight)
                self.classes[name] = known
        if self.due_at == math.inf:
            self.due_at = now
        known.pending[task_id] = now - max(0.0, target.waited_s)
        known.used_at = now
        self._class_of[task_id] = name
        return True

    def restart(self) -> None:
        """Forget what the policy has learnt, but not the tasks."""
        self._policy = _POLICIES[self._settings.policy](self._settings)

    def has(self, task_id: str) -> bool:
        """Whether a task was added and has not ended."""
        return task_id in self._class_of

    def due_time(self, task_id: str) -> float:
        """Return the instant by which an unfinished task should end."""
        known = self.classes[self._class_of[task_id]]
        return known.pending[task_id] + known.target.latency_s

    def ended(self, task_id: str, now: float, run_s: float) -> None:
        """Record the end of a task whose function ran for ``run_s`` seconds."""
        known = self._leave(task_id, now)
        if known is None:
            return
        name, class_, arrived_at = known
        latency_s = max(0.0, now - arrived_at)
        class_.window.add(latency_s, now)
        class_.is_met = class_.is_met or latency_s <= class_.target.latency_s
        run_s = min(max(0.0, run_s), latency_s)  # which a task may have forged
        class_.run_s = run_s if class_.run_s is None else class_.run_s + _NEW * (run_s - class_.run_s)
        class_.fastest_s = min(run_s, _SLOWER * class_.fastest_s)
        class_.ended += 1
        if self._policy is not None:
            self._policy.on_task_ended(name, class_.target, latency_s)

    def drop(self, task_id: str, now: float) -> None:
        """Remove a task that was cancelled, lost or moved. Its latency counts only if the task was late already."""
        if (known := self._leave(task_id, now)) is not None:
            _, class_, arrived_at = known
            if now - arrived_at > class_.target.latency_s:
                class_.window.add(now - arrived_at, now)

    def urgency(self, task_id: str) -> float:
        """Return the sort key of a task among all classes, smallest first: the instant by which it should end. With
        ``short-first``, the key grows with the run time; a task that waits long enough precedes shorter tasks."""
        known = self.classes[self._class_of[task_id]]
        arrived_at, target = known.pending[task_id], known.target
        if not self.is_short_first:
            return arrived_at + target.latency_s
        run_s = (target.expected_s or target.latency_s) if known.run_s is None else known.run_s
        return arrived_at + _AGEING * run_s

    def payer_of(self, name: str) -> str:
        """Return the identity that the submitter of a class counts as; empty if the class is unknown."""
        known = self.classes.get(name)
        return "" if known is None else known.payer

    def run_s(self, name: str) -> float | None:
        """Return the mean run time of a class in seconds; None if it is not known."""
        known = self.classes.get(name)
        return None if known is None else known.run_s

    def measured(self, demands: Mapping[str, float], running: Mapping[str, int], processors: int) -> None:
        """Record the computing threads and the running tasks of each class, and the number of processors."""
        self._processors = processors or self._processors
        for name, class_ in self.classes.items():
            if (count := running.get(name, 0)) and name in demands:
                class_.threads += _NEW * (demands[name] - class_.threads)
                class_.running += _NEW * (count - class_.running)

    def most_running(self, name: str, most: int) -> int:
        """Return how many tasks of a class may run concurrently, at most ``most``. More tasks than processors would
        delay one another, and tasks of equal length would all end late."""
        threads = self._threads(name)
        if not self._processors or threads is None or threads < _LEAST_THREADS:
            return most
        return max(1, round(min(most, self._processors / threads)))

    def places(self, name: str, running: Mapping[str, int], most: int, now: float) -> int:
        """Return how many more tasks of a class may run now.

        With ``short-first``, all classes together compute on as many processors as the node has. No task is
        interrupted, though, and a task may run for ever. So a task that would otherwise be late may start beyond this
        limit if it is the only one of its class (up to one such task per processor), or the only one of its payer.

        :param running: number of running tasks by class.
        :param most: maximum number of running tasks of the class.
        """
        own = self.most_running(name, most) - running.get(name, 0)
        if not self.is_short_first or not self._processors or own <= 0:
            return own
        computing, class_ = 0.0, self.classes[name]
        is_only = True  # of its payer
        for other, count in running.items():
            if count and (known := self.classes.get(other)) is not None:
                threads = self._threads(other)
                computing += count * (1.0 if threads is None else threads)
                is_only &= known.payer != class_.payer
        threads = self._threads(name)
        left = round((self._processors - computing) / max(1.0 if threads is None else threads, _LEAST_THREADS))
        if computing < _LEAST_THREADS:
            left = max(left, 1)
        if left > 0 or not self._is_urgent(class_, now):
            return min(own, max(left, 0))
        return int(is_only or (not running.get(name, 0) and computing < 2 * self._processors))

    def decide(self, now: float, *, pressure: float, others: int, workers: int) -> Mapping[str, float]:
        """Return the new weights by class and for :data:`BATCH`. The caller forgets the weights of all other classes.

        :param pressure, others: see :meth:`~farcall_endpoint.qos.policies.Policy.weights`.
        :param workers: maximum number of workers of a class.
        """
        interval_s = self._settings.interval_s if self._decided_at is None else now - self._decided_at
        self._decided_at = now
        self._forget_unused(now)
        self.due_at = now + self._settings.interval_s if self.classes else math.inf
        latencies = {name: self._latency_s(class_, now, workers) for name, class_ in self.classes.items()}
        if self._policy is None:
            return {}
        targets = {name: class_.target for name, class_ in self.classes.items()}
        weights = self._policy.weights(targets, latencies, pressure=pressure, interval_s=interval_s, others=others)
        weights = self._within_shares(weights)
        for name, class_ in self.classes.items():
            class_.weight = weights[name]
            self._find_problem(class_, latencies[name], pressure, workers, now)
        return {**weights, BATCH: DEFAULT_WEIGHT}

    def report(self) -> tuple[WeightOfClass, ...]:
        """Return the weight of each class for the agent, and what its target needs if it cannot be held."""
        return tuple(
            WeightOfClass(name, round(class_.weight, 1), class_.problem) for name, class_ in self.classes.items()
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _within_shares(self, weights: Mapping[str, float]) -> Mapping[str, float]:
        """The weights, with those of each other submitter reduced to what its share permits: the processors are divided
        by submitters first. A target that no task has ever held, and none would on an idle endpoint, gets no more than
        batch work."""
        limited = dict(weights)
        by_payer: dict[str, list[str]] = {}
        for name, class_ in self.classes.items():
            if class_.max_weight is None:
                continue
            expected_s = class_.target.expected_s
            if not class_.is_met and (expected_s is None or expected_s > class_.target.latency_s):
                limited[name] = min(limited[name], DEFAULT_WEIGHT)
            if class_.pending:
                by_payer.setdefault(class_.payer, []).append(name)
        for names in by_payer.values():
            most = min(self.classes[name].max_weight or math.inf for name in names)
            excess = sum(limited[name] for name in names) / most
            if excess > 1:
                limited |= {name: max(limited[name] / excess, LEAST_WEIGHT) for name in names}
        return limited

    def _threads(self, name: str) -> float | None:
        """Return the mean number of computing threads of a class's task; None while it is not known."""
        class_ = self.classes.get(name)
        return None if class_ is None or not class_.running else class_.threads / class_.running

    def _is_urgent(self, class_: LatencyClass, now: float) -> bool:
        """Whether the first task of a class will be late unless it starts now."""
        first_at = next(iter(class_.pending.values()), now)
        return now + (class_.run_s or 0.0) >= first_at + class_.target.latency_s

    def _make_room(self, payer: str) -> bool:
        """Make room for one more class of a payer by dropping the longest unused one; return whether there is room."""
        own = [name for name, class_ in self.classes.items() if class_.payer == payer]
        full = own if len(own) >= _MOST_OF_ONE else list(self.classes) if len(self.classes) >= _MOST_CLASSES else []
        if not full:
            return True
        unused = [name for name in full if not self.classes[name].pending]
        if not unused:
            return False
        del self.classes[min(unused, key=lambda name: self.classes[name].used_at)]
        return True

    def _target(self, target: OrderTarget, payer: str) -> Target:
        """:raises ValueError: if the target is invalid."""
        settings = self._settings
        return Target(
            target.latency_s,
            target.percentile,
            min_weight=settings.min_weight,
            max_weight=settings.max_weight,
            expected_s=target.expected_s,
            weight=target.weight,
            delta=target.delta,
            group=payer,
        )

    def _leave(self, task_id: str, now: float) -> tuple[str, LatencyClass, float] | None:
        name = self._class_of.pop(task_id, None)
        if name is None:
            return None
        class_ = self.classes[name]
        class_.used_at = now
        return name, class_, class_.pending.pop(task_id)

    def _latency_s(self, class_: LatencyClass, now: float, workers: int) -> float | None:
        """Return the latency at the percentile of the target, over recently ended tasks and unfinished tasks that are
        late, or will be late when the tasks before them have run."""
        histogram = class_.window.histogram(now)
        limit_s, run_s = class_.target.latency_s, class_.run_s or 0.0
        for place, arrived_at in enumerate(class_.pending.values()):
            expected_s = now - arrived_at + (place // max(workers, 1)) * run_s
            if limit_s < expected_s < max(_HANGS * limit_s, _HANGS_S):
                histogram.add(expected_s)
        return histogram.quantile(class_.target.percentile / 100)

    def _find_problem(
        self, class_: LatencyClass, latency_s: float | None, pressure: float, workers: int, now: float
    ) -> None:
        """Set the problem of a class: what its target needs if it cannot be held now."""
        if latency_s is None and now - class_.used_at < _KEPT_S:
            return
        if latency_s is None or latency_s <= class_.target.latency_s:
            class_.late_since, class_.problem = None, ""
            return
        if class_.ended >= _LEAST_RUNS and class_.fastest_s > class_.target.latency_s:
            class_.problem = NEEDS_LOOSER
            return
        if class_.late_since is None:
            class_.late_since = now
        if now - class_.late_since < _LATE_S:
            return
        is_pressed = pressure >= _LEAST_PRESSURE
        if self.is_short_first:  # its tasks wait for processors, which are no busier for that
            class_.problem = NEEDS_CPU
        elif len(class_.pending) > workers:
            class_.problem = NEEDS_WORKERS
        elif not is_pressed:
            class_.problem = NEEDS_LOOSER
        elif not isinstance(self._policy, ProportionalIntegral) or class_.weight >= _AT_BOUND * self._most(class_):
            class_.problem = NEEDS_CPU
        else:
            class_.problem = ""

    def _most(self, class_: LatencyClass) -> float:
        """The largest weight that a class can have beside batch work."""
        share = self._settings.batch_share
        of_payer = math.inf if class_.max_weight is None else class_.max_weight
        return min(class_.target.max_weight, of_payer, DEFAULT_WEIGHT * (1 - share) / share)

    def _forget_unused(self, now: float) -> None:
        for name, class_ in list(self.classes.items()):
            if not class_.pending and now - class_.used_at >= _FORGET_S:
                del self.classes[name]
