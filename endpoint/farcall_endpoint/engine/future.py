"""Futures of an engine: cheap until a thread waits for them."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED, PENDING
from typing import Any, Final, TypeVar

from farcall_common.forks import fork_safe_lock
from farcall_common.futures import GuardedFuture
from farcall_common.graphs import StageState
from farcall_common.progress import Progress

T = TypeVar("T")

_changing: Final = fork_safe_lock()
"""Held for a few instructions: while a future gets its condition, or its end without one."""


class EngineFuture(GuardedFuture[T]):
    """The future of a task; everything that works with :class:`concurrent.futures.Future` works with it.

    When the function raised, ``result()`` raises a :class:`~farcall_common.errors.TaskFailed` with the remote
    traceback, which is also an instance of the nearest built-in class of what was raised, and has that as its
    ``__cause__``; with ``raise_original``, what was raised itself. When something else ended the task, the ``record``
    of the :class:`~farcall_common.errors.TaskError` says what. ``running()`` is always false: until the task ends, it
    can be cancelled. Callbacks run in the engine's thread: a callback must not wait for another result.

    A condition variable is a dozen objects, the larger part of what a short task costs its caller, and most futures are
    finished before a thread looks at them. So this one makes its condition when it is first needed; the base class, and
    ``wait`` and ``as_completed``, find it under the name that they expect.
    """

    stages: Sequence[StageState] = ()
    """Final states of the stages of a graph; empty for a task, and until the graph has ended."""
    progress: Progress | None = None
    """Progress that the function last reported (``current().progress``); up to about a second old while it runs."""

    def __init__(self, task_id: str, on_cancel: Callable[[str], None], *, raise_original: bool = False) -> None:
        self._own_condition: threading.Condition | None = None
        self._state = PENDING
        self._result: T | None = None
        self._exception: BaseException | None = None
        self.task_id = task_id
        self._on_cancel = on_cancel
        self.raise_original = raise_original

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        condition = self._own_condition
        if condition is None:
            with _changing:
                condition = self._own_condition
                if condition is None:
                    self._waiters: list[Any] = []  # only ever looked at under the condition
                    self._done_callbacks: list[Callable[[concurrent.futures.Future[Any]], object]] = []
                    condition = self._own_condition = threading.Condition()
        return condition

    def done(self) -> bool:
        """Whether the task has ended, in whatever way."""
        return self._state in _ENDED

    def cancelled(self) -> bool:
        """Whether the task was cancelled."""
        return self._state in _CANCELLED

    def result(self, timeout: float | None = None) -> T:
        """Return the value that the function returned.

        :param timeout: seconds to wait for the end of the task.
        :raises TimeoutError: when the time is up.
        :raises CancelledError: if the task was cancelled.
        :raises BaseException: the exception that the function raised, or the error that the task ended with.
        """
        if self._state == FINISHED and self._exception is None:
            return self._result  # type: ignore[return-value]
        return super().result(timeout)

    def cancel(self) -> bool:
        """Cancel the task, also when it runs: its processes are ended. False if it has ended."""
        with self._condition:
            if self._state in _CANCELLED:
                return True
            if self._state == FINISHED:
                return False
            super().cancel()
            self.set_running_or_notify_cancel()  # wakes those who wait for several futures
        self._on_cancel(self.task_id)
        return True

    def end_after_fork(self, error: BaseException) -> None:
        """Do as the base class; the condition is made when it is needed."""
        self._own_condition = None
        if self._state == PENDING:
            self._exception, self._state = error, FINISHED

    def settle(self, result: T | None, exception: BaseException | None = None) -> None:
        """End the future, from the engine's thread; nothing if it was cancelled."""
        with _changing:
            if self._own_condition is None:  # so it has no waiter and no callback, and is not cancelled
                self._result, self._exception = result, exception
                self._state = FINISHED
                return
        try:
            if exception is None:
                self.set_result(result)  # type: ignore[arg-type]
            else:
                self.set_exception(exception)
        except concurrent.futures.InvalidStateError:
            pass


_CANCELLED: Final = frozenset({CANCELLED, CANCELLED_AND_NOTIFIED})
_ENDED: Final = _CANCELLED | {FINISHED}
