"""Task futures, and futures as arguments of calls."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from farcall._display import card, shortened
from farcall._task_info import Why
from farcall_common.errors import TaskError, original_of
from farcall_common.futures import GuardedFuture

_Future = concurrent.futures.Future[Any]
_SEQUENCES: Final = (list, tuple, set, frozenset)
_INSIDES: Final = (*_SEQUENCES, dict)


class InputFailed(TaskError):
    """A call was never made: a future that it takes as an argument failed. That failure is the ``__cause__``."""

    code = "INPUT_FAILED"


def inputs_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Future]:
    """The futures among the arguments and directly inside of lists, tuples, sets and dictionaries among them."""
    found: dict[int, _Future] = {}
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, _INSIDES):
            if type(value) in _INSIDES:
                found |= {id(each): each for each in _inside(value) if isinstance(each, concurrent.futures.Future)}
        elif isinstance(value, concurrent.futures.Future):
            found[id(value)] = value
    return list(found.values())


def resolved(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the results of their futures, which are done and did not fail, in the futures' places."""
    return tuple(map(_resolve, args)), {name: _resolve(value) for name, value in kwargs.items()}


def failure_of(inputs: Iterable[_Future]) -> InputFailed | None:
    """The error of a call whose inputs are done, if one of them failed."""
    from farcall_common.payload.hints import message_of  # importing this package loads nothing of pickling

    for future in inputs:
        what = f"task {future.task_id}" if hasattr(future, "task_id") else "a future"
        cause: BaseException | None
        if future.cancelled():
            cause, how = concurrent.futures.CancelledError(), "was cancelled"
        else:
            cause = future.exception()
            how = f"failed: {cause and message_of(cause)}"
        if cause is not None:
            error = InputFailed(f"not called, because {what}, which is one of its arguments, {how}", hint="")
            error.__cause__ = cause
            return error
    return None


def when_all_done(inputs: Sequence[_Future], act: Callable[[], None]) -> None:
    """Call ``act`` once, when the last of the inputs is done: in the thread that learns of it, or here."""
    left = len(inputs)
    lock = threading.Lock()

    def one_done(_: _Future) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            act()

    for future in inputs:
        future.add_done_callback(one_done)


def _inside(value: Any) -> Iterator[Any]:
    return iter(value.values() if type(value) is dict else value)


def _resolve(value: Any) -> Any:
    if isinstance(value, concurrent.futures.Future):
        return value.result()
    kind = type(value)
    if kind is dict:
        return {key: _result_of(item) for key, item in value.items()}
    if kind in _SEQUENCES:
        return kind(map(_result_of, value))
    return value


def _result_of(value: Any) -> Any:
    return value.result() if isinstance(value, concurrent.futures.Future) else value


T = TypeVar("T")

_cancelling: Final = threading.Lock()
_NOTHING: Final[Mapping[str, Any]] = types.MappingProxyType({})


class ComputeFuture(GuardedFuture[T]):
    """The future of a task; everything that works with :class:`concurrent.futures.Future` works with it.

    ``task_id`` is known from the start. When the function raised, ``result()`` raises :class:`TaskFailed` with the
    remote traceback, which is also an instance of the nearest built-in class of what was raised (see
    :attr:`Executor.raise_original`). It raises :class:`TaskLost` when the task was lost, and
    :class:`concurrent.futures.CancelledError` when it was cancelled, here or elsewhere. ``running()`` is always false:
    until the task ends, it can be cancelled.
    In a coroutine, ``await future`` does the same; cancelling the coroutine cancels the task.

    Callbacks run in the thread that receives results: a callback must not wait for another result.
    """

    def __init__(
        self,
        task_id: str,
        *,
        task_group_id: str,
        endpoint_id: str,
        on_cancel: Callable[[ComputeFuture[Any]], None],
        ask_why: Callable[[str], Why],
        adopted: bool = False,
        raise_original: bool = False,
        inputs: Sequence[concurrent.futures.Future[Any]] = (),
    ) -> None:
        super().__init__()
        self.task_id = task_id
        self.task_group_id = task_group_id
        self.endpoint_id = endpoint_id
        #: How often the task was started, as far as known.
        self.attempt = 0
        #: What the endpoint says of the run (Python version and the like), once the task ended.
        self.details: Mapping[str, Any] = _NOTHING
        self._on_cancel = on_cancel
        self._ask_why = ask_why
        self._raise_original = raise_original
        #: What must be done before the task is sent.
        self._inputs = inputs
        self._stations: Mapping[str, float] = _NOTHING
        #: Epoch seconds; None for a task that was submitted elsewhere.
        self._made_at = None if adopted else time.time()
        #: Whether the task may be on its way to the API; set before it is, see Sender.
        self._sent = adopted
        self._accepted_at: float | None = time.time() if adopted else None
        self._received_at: float | None = None
        #: Monotonic seconds: for ages, which no clock that is set may change.
        self._made_mono = time.monotonic()
        self._accepted_mono: float | None = self._made_mono if adopted else None
        #: What the task ended with, if ``result()`` raises the function's own exception instead.
        self._task_error: TaskError | None = None
        #: The span above the task, if the program makes spans.
        self._traceparent: str | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of task {self.task_id} at endpoint {self.endpoint_id}, {self._fate()}>"

    def _repr_html_(self) -> str:
        error = self.exception() if self.done() and not self.cancelled() else None
        known = {
            "task": self.task_id,
            "endpoint": self.endpoint_id,
            "state": self._fate(),
            "attempts": self.attempt or None,
            "seconds": self._seconds(),
            "error": error and str(error),
            "result": shortened(self.result()) if self._fate() == "succeeded" else None,
        }
        return card("Call", known)

    def _fate(self) -> str:
        """What is known here of how the task is, in words."""
        if not self.done():
            return "on its way" if self._accepted_at is None else "waiting or running"
        return "cancelled" if self.cancelled() else "failed" if self.exception() else "succeeded"

    def _seconds(self) -> str | None:
        if self._made_at is None:
            return None
        return f"{(self._received_at or time.time()) - self._made_at:.1f}"

    @property
    def timings(self) -> dict[str, float]:
        """Epoch seconds at the stations of the task's way, as far as known.

        Of the client's clock: ``client_submitted_at``, ``client_accepted_at`` (the API has the task) and
        ``client_received_at``; between them those of the cloud and of the worker, each by its own clock
        (``submitted_at``, ``enqueued_at``, ``leased_at``, ``accepted_at``, ``started_at``, ``ended_at``,
        ``returned_at``, ``recorded_at``). Only differences within one clock mean anything.
        """
        own = {"client_submitted_at": self._made_at, "client_accepted_at": self._made_at and self._accepted_at}
        own["client_received_at"] = self._received_at
        return {**{name: at for name, at in own.items() if at is not None}, **self._stations}

    @property
    def stdout(self) -> str | None:
        """The end of what the task wrote to standard output, once it ended: of a failed task, and of one that succeeded
        with :attr:`Executor.keep_output`. None if nothing is kept."""
        return self._printed("stdout_tail")

    @property
    def stderr(self) -> str | None:
        """The same of standard error."""
        return self._printed("stderr_tail")

    def _printed(self, name: str) -> str | None:
        if not self.done() or self.cancelled():
            return None
        error = self._task_error or self.exception()
        tail: str | None = getattr(error.record, name) if isinstance(error, TaskError) else self.details.get(name)
        return tail or None

    def why(self) -> Why:
        """Why the task is where it is: ``print(future.why())`` says it in one sentence.

        Asks the API, unless the task has not got that far or has ended.

        :raises FarcallError: if the API cannot be asked.
        """
        age_s = time.monotonic() - self._made_mono
        if self.done():
            how = "was cancelled" if self.cancelled() else self._fate()
            return Why(self.task_id, "ENDED", f"It does not wait: it {how}.", "ended", state_age_s=0.0)
        waiting = [future for future in self._inputs if not future.done()]
        if waiting:
            what = f"task {waiting[0].task_id}" if isinstance(waiting[0], ComputeFuture) else "a future"
            others = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
            text = f"It has not been sent: it waits for its arguments, {what}{others}."
            return Why(self.task_id, "WAITING_FOR_INPUTS", text, "unsent", state_age_s=age_s)
        if self._accepted_at is None:
            text = f"It is on its way: the API has not taken it yet, for {age_s:.1f} s."
            return Why(self.task_id, "NOT_SENT", text, "unsent", state_age_s=age_s)
        return self._ask_why(self.task_id)

    def __await__(self) -> Generator[Any, None, T]:
        # Loaded here: whoever awaits has it already, and to others it is a third of the package's import time.
        import asyncio

        return asyncio.wrap_future(self).__await__()

    def cancel(self) -> bool:
        """Cancel the task, also when it runs. False if it has ended.

        Waiting callers hear of it at once. A task that was not sent never is; for one that was, the cloud is told to
        stop it. Should it end before that is heard, its result is in the record (:meth:`Client.get_task`) and not here.
        """
        with _cancelling:  # twice at once would end in an error of the base class
            if self.cancelled():
                return True
            if not super().cancel():
                return False
            self.set_running_or_notify_cancel()  # wakes those who wait for several futures
        self._on_cancel(self)
        return True

    def _end_failed(self, error: BaseException) -> None:
        """The task failed, or its result cannot be had; nothing if the future is done."""
        if self._raise_original and isinstance(error, TaskError):
            self._task_error, error = error, original_of(error)
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled here before its error came
            self.set_exception(error)

    def _end_cancelled(self) -> None:
        """The task was cancelled elsewhere."""
        with _cancelling:
            if not self.cancelled() and super().cancel():
                self.set_running_or_notify_cancel()
