"""Task futures, and futures as arguments of calls."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import threading
import time
import types
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from farcall._details import BY_SERVICE, is_signed, listed
from farcall._display import card, shortened
from farcall._stages import Stages, stages_of
from farcall._task_info import Why
from farcall._task_output import ENDPOINT_OFFLINE, StreamName, TaskOutput
from farcall_common.errors import TaskError, original_of
from farcall_common.forks import fork_safe_lock
from farcall_common.futures import GuardedFuture
from farcall_common.graph_builder import Graph
from farcall_common.progress import PROGRESS, Progress, read_progress

_Future = concurrent.futures.Future[Any]
_SEQUENCES: Final = (list, tuple, set, frozenset)
_CONTAINERS: Final = (*_SEQUENCES, dict)


class InputFailed(TaskError):
    """A call was not made because a future among its arguments failed. That failure is the ``__cause__``."""

    code = "INPUT_FAILED"


def inputs_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[_Future]:
    """The futures among the arguments and directly inside of lists, tuples, sets and dictionaries among them."""
    found: dict[int, _Future] = {}
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, _CONTAINERS):
            if type(value) in _CONTAINERS:
                found |= {id(each): each for each in _items(value) if isinstance(each, concurrent.futures.Future)}
        elif isinstance(value, concurrent.futures.Future):
            found[id(value)] = value
    return tuple(found.values())  # empty, it is one object for all calls


def resolved(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with each future replaced by its result. All of them are done, and none failed."""
    return tuple(map(_resolve, args)), {name: _resolve(value) for name, value in kwargs.items()}


def failure_of(inputs: Iterable[_Future]) -> InputFailed | None:
    """The error of a call whose inputs are done, if one of them failed."""
    from farcall_common.payload.strategy import message_of  # here, because that package takes long to load

    for future in inputs:
        what = f"task {future.task_id}" if hasattr(future, "task_id") else "a future"
        cause: BaseException | None
        if future.cancelled():
            cause, how = concurrent.futures.CancelledError(), "was cancelled"
        else:
            cause = future.exception()
            how = f"failed: {cause and message_of(cause)}"
        if cause is not None:
            error = InputFailed(f"not called: its argument, {what}, {how}", hint="")
            error.__cause__ = cause
            return error
    return None


def when_all_done(inputs: Sequence[_Future], act: Callable[[], None]) -> None:
    """Call ``act`` once, when the last of the inputs is done: in the thread that settles it, or here."""
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


def _items(value: Any) -> Iterator[Any]:
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

_cancelling: Final = fork_safe_lock()
_NOTHING: Final[Mapping[str, Any]] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Origin:
    """Expected origin of a result, from the submit, not from the endpoint's report: the endpoints that may have written
    it (empty if unknown), and the strategies that its submitter requested (empty: any). ``sealed``: whether the call
    was sealed, so that the result must be, too. None: another client submitted it, and the task id says so."""

    endpoint_ids: tuple[str, ...]
    result_serializers: tuple[str, ...] = ()
    sealed: bool | None = None


class TaskRecord:
    """State of one task in this process: one record, shared by its future, the sender and the collector.

    Instants are epoch seconds. ``*_mono`` are monotonic seconds, for ages: setting the clock does not change those.

    :param adopted: whether the task was submitted by another program.
    """

    __slots__ = (
        "accepted_at",
        "accepted_mono",
        "cancelled",
        "created_at",
        "created_mono",
        "graph",
        "inputs",
        "origin",
        "rebuild",
        "received_at",
        "sent",
        "stage_numbers",
        "task_id",
        "timings",
        "traceparent",
    )

    def __init__(self, task_id: str, *, adopted: bool = False) -> None:
        now, now_mono = time.time(), time.monotonic()
        self.task_id: str = task_id
        self.created_at: float | None = None if adopted else now
        self.created_mono: float = now_mono
        #: Whether the API may have received the task; set before the request is sent, see Sender.
        self.sent: bool = adopted
        self.accepted_at: float | None = now if adopted else None
        self.accepted_mono: float | None = now_mono if adopted else None
        self.received_at: float | None = None
        self.cancelled: bool = False
        #: Futures that must be done before the task is sent.
        self.inputs: Sequence[_Future] = ()
        #: Where it was submitted to; None if another program did that.
        self.origin: Origin | None = None
        #: Instants in the cloud and on the worker, as they came with the result.
        self.timings: Mapping[str, float] = _NOTHING
        #: Converts the result to the value, if they differ in form.
        self.rebuild: Callable[[Any], Any] | None = None
        #: Of a graph whose target does not need all of its stages, the numbers of those that it needs.
        self.stage_numbers: Sequence[int] | None = None
        #: The graph that the future is a target of, if any.
        self.graph: weakref.ref[Graph] | None = None
        #: The span of the call, if the program makes spans.
        self.traceparent: str | None = None


class FutureOwner(Protocol):
    """Services of an executor that all its futures use."""

    def cancel(self, task: TaskRecord, /) -> None:
        """The future was cancelled here."""

    def why(self, task_id: str, /) -> Why:
        """Why a task is in its state, by the API."""

    def cause_of_delay(self, endpoint_id: str, /) -> str:
        """Why no task of an endpoint starts, as far as it is known; else empty. Asks nothing."""

    def output(self, task_id: str, /) -> TaskOutput | None:
        """The last output of a task, by the API."""

    def details(self, task: TaskRecord, /) -> Mapping[str, Any]:
        """The details of a task, by the API."""

    def read(self, task: TaskRecord, data: bytes, what: str, /, *, signed: bool) -> Any:
        """A value that a task has sent beside its result; ``signed``: under its seal."""


class ComputeFuture(GuardedFuture[T]):
    """The future of a task; everything that works with :class:`concurrent.futures.Future` works with it.

    ``task_id`` is known from the start. When the function raised, ``result()`` raises :class:`TaskFailed` with the
    remote traceback, which is also an instance of the nearest built-in class of the exception (see
    :attr:`Executor.raise_original`). It raises :class:`TaskLost` when the task was lost, and
    :class:`concurrent.futures.CancelledError` when it was cancelled, here or elsewhere. ``running()`` is always false:
    until the task ends, it can be cancelled.
    In a coroutine, ``await future`` does the same; cancelling the coroutine cancels the task.

    Callbacks run in the thread that receives results: a callback must not wait for another result.
    """

    def __init__(
        self,
        record: TaskRecord,
        *,
        task_group_id: str,
        endpoint_id: str,
        owner: FutureOwner,
        raise_original: bool = False,
    ) -> None:
        super().__init__()
        self.task_id: str = record.task_id
        self.task_group_id = task_group_id
        self.endpoint_id = endpoint_id
        #: How often the task was started, as far as known.
        self.attempt = 0
        #: Details of the run from the endpoint (Python version and the like), once the task ended.
        self.details: Mapping[str, Any] = _NOTHING
        self._record = record
        self._owner = owner
        self._raise_original = raise_original
        #: The error of the task, if ``result()`` raises the function's own exception instead.
        self._task_error: TaskError | None = None
        #: The output of the task, once it is complete and was asked for.
        self._output: TaskOutput | None = None
        #: The progress of the task, as it was read last.
        self._progress: Progress | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of task {self.task_id} at endpoint {self.endpoint_id}, {self._state_text()}>"

    def _repr_html_(self) -> str:
        error = self.exception() if self.done() and not self.cancelled() else None
        known = {
            "task": self.task_id,
            "endpoint": self.endpoint_id,
            "state": self._state_text(),
            "attempts": self.attempt or None,
            "seconds": self._seconds(),
            "progress": read_progress(self.details.get(PROGRESS)) or self._progress,
            "error": error and str(error),
            "result": shortened(self.result()) if self._state_text() == "succeeded" else None,
        }
        origin = self._record.origin
        if origin is not None and origin.sealed:
            # A value or an error proves the state. Without one, as of a cancelled call, the service says it.
            unproven = [] if self.done() and not self.cancelled() else ["state"]
            unsigned = [] if is_signed(self.details, PROGRESS) else ["progress"]
            known[BY_SERVICE] = listed(each for each in (*unproven, "attempts", *unsigned) if known[each])
        return card("Call", known)

    def _state_text(self) -> str:
        """The state of the task as far as it is known here, in words."""
        if not self.done():
            return "on its way" if self._record.accepted_at is None else "waiting or running"
        return "cancelled" if self.cancelled() else "failed" if self.exception() else "succeeded"

    def _seconds(self) -> str | None:
        if self._record.created_at is None:
            return None
        return f"{(self._record.received_at or time.time()) - self._record.created_at:.1f}"

    @property
    def timings(self) -> dict[str, float]:
        """Epoch seconds of the steps of the task, as far as known.

        By the client's clock: ``client_submitted_at``, ``client_accepted_at`` (the API has the task) and
        ``client_received_at``; between them those of the cloud and of the worker, each by its own clock
        (``submitted_at``, ``enqueued_at``, ``leased_at``, ``accepted_at``, ``started_at``, ``ended_at``,
        ``returned_at``, ``recorded_at``). Compare only instants of the same clock.
        """
        record = self._record
        own = {"client_submitted_at": record.created_at, "client_accepted_at": record.created_at and record.accepted_at}
        own["client_received_at"] = record.received_at
        return {**{name: at for name, at in own.items() if at is not None}, **record.timings}

    @property
    def stdout(self) -> str | None:
        """The last part of what the task has written to standard output, also while it runs. None if there is none.

        Calls the API, which asks the endpoint, unless the task has failed, was submitted with
        :attr:`Executor.keep_output`, or was not sent yet. The endpoint keeps output for a day.

        :raises FarcallError: if the API cannot be reached.
        """
        return self._output_tail("stdout")

    @property
    def stderr(self) -> str | None:
        """The same of standard error."""
        return self._output_tail("stderr")

    def _output_tail(self, stream: StreamName) -> str | None:
        if self.done() and not self.cancelled():
            error = self._task_error or self.exception()
            name = f"{stream}_tail"
            tail = getattr(error.record, name) if isinstance(error, TaskError) else self.details.get(name)
            if tail:
                return str(tail)
        output = self._output
        if output is None and self._record.accepted_at is not None:
            output = self._owner.output(self.task_id)
            if output is not None and output.complete and output.reason != ENDPOINT_OFFLINE:
                self._output = output
        return (getattr(output, stream) or None) if output else None

    @property
    def stages(self) -> Stages:
        """The stages of a graph: their states, timings, workers and errors, also while the task runs; ``print`` shows a
        table. None for a task that is no graph, and before its endpoint reports them.

        Calls the API, unless the task has ended or was not sent yet.

        :raises FarcallError: if the API cannot be reached.
        """
        record, details = self._record, self._known_details()
        return stages_of(
            details,
            functools.partial(self._owner.read, record, signed=is_signed(details, "values")),
            numbers=record.stage_numbers,
            graph=record.graph,
        )

    @property
    def progress(self) -> Progress | None:
        """How far the task is, as its function last said with ``current().progress``, also after it has ended. None if
        it has said nothing. While it runs, this is a few seconds old, and of a sealed call without its text. In
        notebooks, a future shows what was read here last.

        Calls the API, unless the task has ended or was not sent yet.

        :raises FarcallError: if the API cannot be reached.
        """
        known = read_progress(self._known_details().get(PROGRESS))
        if known is not None or not self.done():  # None while it runs: it has started again
            self._progress = known
        return self._progress

    def _known_details(self) -> Mapping[str, Any]:
        """The details of the task: its result's, or those of a request."""
        known, record = self.details, self._record
        if not known and record.accepted_at is not None and (self.cancelled() or not self.done()):
            known = self._owner.details(record)
        return known

    def result(self, timeout: float | None = None) -> T:
        """The value that the function returned, as :meth:`concurrent.futures.Future.result`.

        :param timeout: seconds to wait at most; None = no limit.
        :raises TimeoutError: after ``timeout``; the message names what holds the task up, if that is known.
        """
        try:
            return super().result(timeout)
        except TimeoutError:
            if timeout is None or self.done():  # the error of the function
                raise
            raise self._not_ended(timeout) from None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What :meth:`result` would raise, as :meth:`concurrent.futures.Future.exception`; waits in the same way."""
        try:
            return super().exception(timeout)
        except TimeoutError:
            if timeout is None:
                raise
            raise self._not_ended(timeout) from None

    def _not_ended(self, timeout_s: float) -> TimeoutError:
        cause = self._owner.cause_of_delay(self.endpoint_id)
        late = f"task {self.task_id} has not ended after {timeout_s:g} s"
        return TimeoutError(f"{late}. {cause}." if cause else f"{late}; future.why() gives the reason")

    def why(self) -> Why:
        """Why the task is in its state: ``print(future.why())`` shows it in one sentence.

        Calls the API, unless the task was not sent yet or has ended.

        :raises FarcallError: if the API cannot be reached.
        """
        age_s = time.monotonic() - self._record.created_mono
        if self.done():
            state = "was cancelled" if self.cancelled() else self._state_text()
            return Why(self.task_id, "ENDED", f"The task {state}.", "ended", state_age_s=0.0)
        waiting = [future for future in self._record.inputs if not future.done()]
        if waiting:
            what = f"task {waiting[0].task_id}" if isinstance(waiting[0], ComputeFuture) else "a future"
            others = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
            text = f"It has not been sent: it waits for its arguments, {what}{others}."
            return Why(self.task_id, "WAITING_FOR_INPUTS", text, "unsent", state_age_s=age_s)
        if self._record.accepted_at is None:
            text = f"It is on its way: the API has not taken it yet, for {age_s:.1f} s."
            return Why(self.task_id, "NOT_SENT", text, "unsent", state_age_s=age_s)
        return self._owner.why(self.task_id)

    def __await__(self) -> Generator[Any, None, T]:
        # Here: a program that awaits has loaded it, and for others it is a third of the package's import time.
        import asyncio

        return asyncio.wrap_future(self).__await__()

    def cancel(self) -> bool:
        """Cancel the task, also when it runs. False if it has ended.

        Waiting callers return at once. A task that was not sent never is; for one that was, the cloud receives a
        cancellation. If the task ends before the endpoint receives that, its result is in the task's record
        (:meth:`Client.get_task`) and not here.
        """
        with _cancelling:  # two threads at once would cause an error in the base class
            if self.cancelled():
                return True
            if not super().cancel():
                return False
            self._record.cancelled = True
            self.set_running_or_notify_cancel()  # notifies callers that wait for several futures
        self._owner.cancel(self._record)
        return True

    def _settle_failed(self, error: BaseException) -> None:
        if self._raise_original and isinstance(error, TaskError):
            self._task_error, error = error, original_of(error)
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled here before its error arrived
            self.set_exception(error)

    def _settle_cancelled(self) -> None:
        with _cancelling:
            if not self.cancelled() and super().cancel():
                self.set_running_or_notify_cancel()


def record_of(future: ComputeFuture[Any]) -> TaskRecord:
    """The state of a future's task."""
    return future._record


def settle_failed(future: ComputeFuture[Any], error: BaseException) -> None:
    """The task failed, or its result cannot be read. Does nothing if the future is done."""
    future._settle_failed(error)


def settle_cancelled(future: ComputeFuture[Any]) -> None:
    """The task was cancelled elsewhere."""
    future._settle_cancelled()
