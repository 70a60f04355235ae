"""Attempts: the tasks of a stage while they run. Failed tasks are retried, and slow tasks get a copy."""

from __future__ import annotations

import dataclasses
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from typing import Any, Final, Protocol

from farcall_analytics.reports import StageReport
from farcall_analytics.tasks import Chain, Done, Regroup, Task, Unsuitable
from farcall_common.errors import ConfigurationError, ObjectGone, TaskFailed

GRACE_S: Final = 10.0
"""Seconds to wait for tasks that are no longer needed, before their blocks are deleted."""
_LOOKS_EVERY_S: Final = 0.25
_COPIES_PART: Final = 0.1
"""Fraction of a stage's tasks that may have a copy at the same time; at least one task may."""
_SLOWNESS: Final = 1.5
"""Run time from which a task gets a copy, as a multiple of the median of other tasks."""
_UNKNOWN_S: Final = 10.0
"""Seconds after which a task gets a copy if no other task has ended."""
_MOST_ROUNDS: Final = 4
"""Rounds in which a task that must avoid some nodes seeks another one: with 2, 4, 8, ... attempts at the same time."""


class Executor(Protocol):
    """What runs the tasks."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Start a call."""


@dataclasses.dataclass
class _Attempts:
    """The attempts of one task; ``started``: when the newest one was submitted. ``avoided``: places where one of them
    has lacked memory or disk. ``rounds``: in which no other place was found."""

    task: Task | Chain | Regroup
    futures: list[Future[Done]] = dataclasses.field(default_factory=list)
    started: float = 0.0
    failures: int = 0
    error: BaseException | None = None
    avoided: frozenset[str] = frozenset()
    rounds: int = 0
    done: Done | None = None


class Attempts:
    """The attempts of tasks that run at the same time.

    :param function: that runs them.
    :param copies_after: the part of the tasks after which others that still run are started once more; None: never.
    :param retries: of a task that failed.
    :param report: where retries and copies are counted.
    :param progress: called with the number of tasks that have ended since the last call.
    :param stopped: is set when the tasks are not wanted any more.
    """

    def __init__(
        self,
        executor: Executor,
        function: Callable[..., Done],
        tasks: Sequence[Task | Chain | Regroup],
        *,
        copies_after: float | None,
        retries: int,
        report: StageReport,
        progress: Callable[[int], None],
        stopped: threading.Event,
    ) -> None:
        self._executor = executor
        self._function = function
        self._copies_after = copies_after
        self._retries = retries
        self._report = report
        self._progress = progress
        self._stopped = stopped
        self._all = [_Attempts(task) for task in tasks]
        self._running: dict[Future[Done], _Attempts] = {}
        self._started = time.monotonic()
        self._ended: list[float] = []
        self._has_other_places = True
        self.losers: list[Future[Done]] = []
        """Attempts that still run although another one has done their task."""

    def run(self) -> list[Done]:
        """Run the tasks, and return their results in order. If one fails for good, cancel the others and wait for them,
        but no longer than :data:`GRACE_S`.

        :raises CancelledError: if the tasks were stopped.
        """
        try:
            for each in self._all:
                self._start(each)
            while len(self._ended) < len(self._all):
                if self._stopped.is_set():
                    raise CancelledError
                finished, _ = wait(self._running, timeout=_LOOKS_EVERY_S, return_when=FIRST_COMPLETED)
                for future in finished:
                    if future in self._running:
                        self._finish(future)
                self._start_copies()
        finally:
            left = [future for future in self._running if not future.cancel()]
            self.losers += left
            wait(left, timeout=GRACE_S)
        return self.done

    @property
    def done(self) -> list[Done]:
        """Results of the tasks that are done so far, in order."""
        return [each.done for each in self._all if each.done is not None]

    def _start(self, attempts: _Attempts) -> None:
        is_first = not attempts.futures
        may_be_done = attempts.task.may_be_done or not is_first
        avoided = attempts.avoided if self._has_other_places else frozenset()
        task = attempts.task._replace(may_be_done=may_be_done, avoided=avoided)
        future: Future[Done] = self._executor.submit(self._function, task)
        attempts.futures.append(future)
        attempts.started = time.monotonic()
        self._running[future] = attempts

    def _finish(self, future: Future[Done]) -> None:
        attempts = self._running.pop(future)
        if attempts.done is not None:
            return
        error = future.exception()
        if error is None:
            attempts.done = future.result()
            self._ended.append(time.monotonic())
            self._progress(_size(attempts.task))
            for other in attempts.futures:
                if self._running.pop(other, None) is not None and not other.cancel():
                    self.losers.append(other)
            return
        error = _inner(error)
        is_avoided = isinstance(error, Unsuitable) and error.reason is None
        if isinstance(error, Unsuitable):
            attempts.avoided |= {error.place}
            error = error.reason
        if error is not None:
            attempts.failures += 1
            attempts.error = error
        if any(not other.done() for other in attempts.futures):
            return  # a copy still runs
        if attempts.error is not None and (attempts.failures > self._retries or not _may_pass(attempts.error)):
            raise attempts.error
        if is_avoided:
            self._seek_place(attempts)
            return
        self._report.retries += 1
        attempts.rounds = 0
        if isinstance(attempts.task, Chain) and _size(attempts.task) > 1:
            self._split(attempts, attempts.task)
        else:
            self._start(attempts)

    def _split(self, attempts: _Attempts, chain: Chain) -> None:
        """Try the tasks of a chain again, each for itself: others than the one that failed have all their attempts."""
        own = [_Attempts(Chain(each.name, (each,), may_be_done=True), avoided=attempts.avoided) for each in chain.tasks]
        place = self._all.index(attempts)
        self._all[place : place + 1] = own
        for each in own:
            self._start(each)

    def _seek_place(self, attempts: _Attempts) -> None:
        """Start so many attempts at the same time that one of them finds another place: those that come to an avoided
        one occupy it for a while. If all tasks that are left find none, any place will do."""
        attempts.rounds += 1
        if attempts.rounds > _MOST_ROUNDS and all(each.rounds > _MOST_ROUNDS for each in self._running.values()):
            self._has_other_places = False
        count = 2 ** min(attempts.rounds, _MOST_ROUNDS) if self._has_other_places else 1
        for _ in range(count):
            self._start(attempts)

    def _start_copies(self) -> None:
        """Start copies of tasks that have run much longer than others usually do; one begins when a worker is idle."""
        part, now = self._copies_after, time.monotonic()
        if part is None or not self._ended or len(self._ended) < part * len(self._all):
            return
        seconds = [each.busy_s for each in self.done if not each.reused]
        workers = max(1, round(sum(seconds) / max(1e-6, self._ended[-1] - self._started)))
        slow_s = _SLOWNESS * statistics.median(seconds) + _LOOKS_EVERY_S if seconds else _UNKNOWN_S
        left = [(place, each) for place, each in enumerate(self._all) if each.done is None]
        alone = [(place, each) for place, each in left if len(each.futures) == each.failures + 1]
        most = max(1, math.ceil(len(self._all) * _COPIES_PART)) - (len(left) - len(alone))
        slow = [each for place, each in alone if now - max(each.started, self._begun(place, workers)) > slow_s]
        for each in slow[: max(0, most)]:
            self._report.copies += 1
            self._start(each)

    def _begun(self, place: int, workers: int) -> float:
        """When one of so many workers has begun a task: each takes the next one when it has ended another one. If there
        are fewer workers, or some hang, nothing ends for a while: that counts from the last end."""
        if place < workers:
            return self._started
        return self._ended[min(place - workers, len(self._ended) - 1)]


def _size(task: Task | Chain | Regroup) -> int:
    """Return the number of tasks in a chain, or 1."""
    return len(task.tasks) if isinstance(task, Chain) else 1


def _inner(error: BaseException) -> BaseException:
    """Return the exception that a task has raised, if this program can read it."""
    if "No module named 'farcall_analytics" in str(error):
        missing = ConfigurationError(
            "Workers cannot import farcall_analytics.", hint="Run `pip install farcall-analytics` where workers run."
        )
        missing.__cause__ = error
        return missing
    return error.__cause__ or error if isinstance(error, TaskFailed) else error


def _may_pass(error: BaseException) -> bool:
    """Whether another attempt may succeed: not if query or input are the reason, or what it reads is lost."""
    return not isinstance(error, (ValueError, TypeError, AssertionError, ImportError, ConfigurationError, ObjectGone))
