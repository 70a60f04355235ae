"""Attempts: the tasks of a stage while they run. Failed ones are tried again, and slow ones get a copy."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Final, Protocol

from farcall_analytics.tasks import Done, Regroup, Task
from farcall_common.errors import ConfigurationError, ObjectGone, TaskFailed

GRACE_S: Final = 10.0
"""For which tasks that nothing waits for are awaited before what they write is deleted."""
_LOOKS_EVERY_S: Final = 0.25
_COPIES_PART: Final = 0.1
"""Of the tasks of a stage, how many may have a copy at most; one at least."""
_SLOWNESS: Final = 1.5
"""How many times the median of the others nothing must have finished before slow tasks get copies."""


class Executor(Protocol):
    """What runs the tasks."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Start a call."""


@dataclasses.dataclass
class StageReport:
    """What a stage took. ``busy_s``: of all its tasks together; ``size``: bytes that it wrote.

    :param copies: of slow tasks. ``retries``: of failed ones. ``reused``: tasks of which an earlier attempt had
        committed.
    :param repeats: because what it had written was lost.
    :param sampled_s: of its seconds, those that the sample of a sort took.
    """

    number: int
    tasks: int = 0
    rows: int = 0
    size: int = 0
    seconds: float = 0.0
    busy_s: float = 0.0
    copies: int = 0
    retries: int = 0
    reused: int = 0
    repeats: int = 0
    sampled_s: float = 0.0


@dataclasses.dataclass
class _Attempts:
    """The attempts of one task; ``started``: the newest one."""

    task: Task | Regroup
    futures: list[Future[Done]] = dataclasses.field(default_factory=list)
    started: float = 0.0
    failures: int = 0
    done: Done | None = None


class Attempts:
    """The attempts of tasks that run at the same time.

    :param function: that runs them.
    :param copies_after: the part of the tasks after which others that still run are started once more; None: never.
    :param retries: of a task that failed.
    :param report: where retries and copies are counted.
    :param progress: called with the number of tasks that are done.
    """

    def __init__(
        self,
        executor: Executor,
        function: Callable[..., Done],
        tasks: Sequence[Task | Regroup],
        *,
        copies_after: float | None,
        retries: int,
        report: StageReport,
        progress: Callable[[int], None],
    ) -> None:
        self._executor = executor
        self._function = function
        self._copies_after = copies_after
        self._retries = retries
        self._report = report
        self._progress = progress
        self._all = [_Attempts(task) for task in tasks]
        self._running: dict[Future[Done], _Attempts] = {}
        self._finished_at = 0.0
        self._copies = 0
        self.losers: list[Future[Done]] = []
        """Attempts that still run although another one has done their task."""

    def run(self) -> list[Done]:
        """What the tasks have done, in order. If one fails for good, others are cancelled, and awaited for a while."""
        try:
            for each in self._all:
                self._start(each)
            while any(each.done is None for each in self._all):
                finished, _ = wait(self._running, timeout=_LOOKS_EVERY_S, return_when=FIRST_COMPLETED)
                for future in finished:
                    if future in self._running:
                        self._finish(future)
                if finished:
                    self._finished_at = time.monotonic()
                    self._progress(sum(each.done is not None for each in self._all))
                self._start_copies()
        finally:
            for future in self._running:
                future.cancel()
            wait(self._running, timeout=GRACE_S)
        return self.done

    @property
    def done(self) -> list[Done]:
        """What has been done so far, in order."""
        return [each.done for each in self._all if each.done is not None]

    def _start(self, attempts: _Attempts) -> None:
        is_first = not attempts.futures
        task = attempts.task._replace(attempt=uuid.uuid4().hex, may_be_done=attempts.task.may_be_done or not is_first)
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
            for other in attempts.futures:
                if self._running.pop(other, None) is not None and not other.cancel():
                    self.losers.append(other)
            return
        error = _inner(error)
        attempts.failures += 1
        if any(not other.done() for other in attempts.futures):
            return  # a copy still runs
        if attempts.failures > self._retries or not _may_pass(error):
            raise error
        self._report.retries += 1
        self._start(attempts)

    def _start_copies(self) -> None:
        """Start copies once nothing has finished for as long as a task usually takes, and half of it: what still runs
        is slow then, and does not wait for a worker."""
        part = self._copies_after
        done = self.done
        if part is None or not done or len(done) < part * len(self._all):
            return
        slow_s = _SLOWNESS * statistics.median(each.busy_s for each in done) + _LOOKS_EVERY_S
        most = max(1, math.ceil(len(self._all) * _COPIES_PART))
        for each in self._all:
            is_alone = each.done is None and len(each.futures) == each.failures + 1
            waited_s = time.monotonic() - max(each.started, self._finished_at)
            if is_alone and self._copies < most and waited_s > slow_s:
                self._copies += 1
                self._report.copies += 1
                self._start(each)


def _inner(error: BaseException) -> BaseException:
    """What a task has raised, if that can be read here."""
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
