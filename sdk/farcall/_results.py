"""Result handling: decoding results, polling the API for them, and settling futures."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, InvalidStateError, ThreadPoolExecutor
from typing import Any, Final

import msgspec

from farcall._api import IDS_PER_REQUEST, Api, BlobRef, Blobs, with_new_address
from farcall._arguments import as_id
from farcall._future import ComputeFuture, Origin, record_of, settle_cancelled, settle_failed
from farcall._pacing import FOREIGN_RETRY_S, OutageTimer, PollSchedule
from farcall._sealing import Sealer
from farcall._trust import ResultPolicy
from farcall_common.errors import (
    BlobUnknown,
    ErrorRecord,
    FarcallError,
    Forbidden,
    NotFound,
    ProtocolError,
    TaskCancelled,
    TaskDeadLettered,
    TaskError,
    TaskFailed,
    TaskLost,
    TaskPending,
    TaskUnknown,
    Unauthenticated,
    Unavailable,
)
from farcall_common.graphs import STAGES
from farcall_common.payload import Piece, Serializer, load_user_data
from farcall_common.payload import task_error as error_of_record
from farcall_common.payload.data import writers
from farcall_common.payload.include import hint_for_missing
from farcall_common.progress import PROGRESS
from farcall_common.staging import STAGING
from farcall_common.wire import BlobLocation, StreamResult, TaskState

_logger = logging.getLogger(__name__)

_CLASSES: Final[Mapping[TaskState, type[TaskError]]] = {
    TaskState.FAILED: TaskFailed,
    TaskState.CANCELLED: TaskCancelled,
    TaskState.LOST: TaskLost,
    TaskState.DEAD_LETTERED: TaskDeadLettered,
}
_PARALLEL_DOWNLOADS: Final = 4
#: The stream may still push the result of a task that is younger than this.
_SAMPLE_AGE_S: Final = 1.0


def result_from_json(task: Mapping[str, Any]) -> tuple[StreamResult, bytes | None]:
    """A task of the API's JSON in the form in which the stream pushes results, and its value if that is inline.

    :raises ProtocolError: if the answer cannot be read.
    """
    try:
        return _result_from_json(task)
    except (ArithmeticError, KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise ProtocolError(
            f"The API's answer about task {task.get('task_id')} cannot be read: {error!r}",
            hint="Is api_url the address of Farcall's API?",
        ) from error


def _result_from_json(task: Mapping[str, Any]) -> tuple[StreamResult, bytes | None]:
    ref, value, finished_at = task.get("result_ref"), task.get("result"), task.get("completion_t")
    details, timings, failure = (_mapping(task.get(name)) for name in ("details", "timings", "error"))
    running = {name: task[name] for name in (STAGES, PROGRESS, STAGING) if task.get(name)}  # of a task that runs
    if failure:
        ErrorRecord.from_json(failure)
    result = StreamResult(
        task_id=task["task_id"],
        task_group_id=task.get("task_group_id") or "",
        state=TaskState(task["status"]),
        attempt=int(task.get("attempt") or 0),
        result_blob=None if ref is None else msgspec.convert(ref, BlobLocation),
        error=failure or None,
        finished_at=None if finished_at is None else float(finished_at),
        timings={name: at for name, at in timings.items() if isinstance(at, int | float)},
        details={**running, **details},
    )
    return result, None if value is None else str(value).encode()


def _mapping(value: Any) -> dict[str, Any]:
    """An object of an answer; empty for anything else."""
    return value if isinstance(value, dict) else {}


def origin_from_json(task: Mapping[str, Any]) -> Origin:
    """Read the expected origin of a task's result from the API's JSON."""
    endpoint_id, strategies = task.get("endpoint_id"), task.get("result_serializers")
    asked_for = tuple(map(str, strategies)) if isinstance(strategies, list) else ()
    return Origin(endpoint_ids_of(str(endpoint_id or "")), asked_for)


def endpoint_ids_of(endpoint_id: str | None) -> tuple[str, ...]:
    """The endpoint of an :class:`Origin`."""
    return (endpoint_id,) if endpoint_id else ()


def task_error(result: StreamResult, *, load_original: Callable[[bytes], Any] | None = None) -> TaskError | TaskUnknown:
    """The exception for a task that ended without a value, has not ended, or does not exist.

    For a task that exists, a :class:`TaskError` by its state, so that ``except TaskFailed`` catches every failure; the
    record keeps the precise code. The remote traceback is a note of the exception: Python prints it below the local
    one. The function's own exception is the ``__cause__`` if ``load_original`` reads it.
    """
    state = result.state
    if not state.is_terminal:
        return TaskPending(f"task {result.task_id} is {state}", hint="Try again later, or wait for it.")
    expected = _CLASSES.get(state, TaskError)
    if result.error is None:
        return expected(f"task {result.task_id} ended as {state}")
    record, data = ErrorRecord.from_json(result.error), _exception_data(result)
    if hint := hint_for_missing(record.message):
        record = dataclasses.replace(record, hint=hint)
    load = None if data is None or load_original is None else functools.partial(load_original, data)
    return error_of_record(record, expected=expected, load_original=load)


def _with_source(origin: Origin, result: StreamResult) -> Origin:
    """The origin of a result; a memoized one was written by the endpoint of an earlier task. The details may be the
    endpoint's own: they only add an endpoint that must be trusted too."""
    if "memoized_from" not in result.details:
        return origin
    try:
        source = as_id(str(result.details.get("memoized_endpoint_id")))
    except ValueError:
        source = ""
    return dataclasses.replace(origin, endpoint_ids=(*(origin.endpoint_ids or ("",)), source))


def _exception_data(result: StreamResult) -> bytes | None:
    data = None if result.error is None else result.error.get("exception_data")
    return data.encode(errors="replace") if isinstance(data, str) else None


def _load(serializer: Serializer, data: Piece, origin: Origin) -> Any:
    writers.endpoint_ids = origin.endpoint_ids
    try:
        return load_user_data(lambda: serializer.deserialize(data))
    finally:
        writers.endpoint_ids = None


class ResultReader:
    """Reads the values of results, and downloads those that are blobs. May be used from any thread.

    :param retry_timeout_s, stop: for downloads, as in :meth:`Http.call`.
    """

    def __init__(
        self,
        api: Api,
        blobs: Blobs,
        policy: ResultPolicy,
        sealer: Sealer,
        *,
        allowed: frozenset[str] | None = None,
        retry_timeout_s: float | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._api = api
        self._blobs = blobs
        self._policy = policy
        self._sealer = sealer
        self._retry_timeout_s = retry_timeout_s
        self._stop = stop
        #: The strategies that the serializer of the reader allows; None: all.
        self.allowed: frozenset[str] | None = allowed

    def opened(self, result: StreamResult, data: Piece | None, origin: Origin) -> tuple[StreamResult, Piece | None]:
        """A result and its inline value, opened if they are sealed: what the other methods take.

        :raises SealInvalid: if a seal cannot be opened.
        :raises ResultRefused: if the value has to be sealed and is not.
        """
        return self._sealer.opened(result, data, sealed=origin.sealed)

    def needs_request(self, result: StreamResult, data: Piece | None, origin: Origin) -> bool:
        """Whether :meth:`read` may block."""
        if result.state is TaskState.SUCCESS and data is None:
            return True
        buffer = data if result.state is TaskState.SUCCESS else _exception_data(result)
        return buffer is not None and self._policy.needs_request(buffer, _with_source(origin, result))

    def read(self, result: StreamResult, data: Piece | None, origin: Origin) -> Any:
        """The value that a task returned. May block for a download, and to find out whose the endpoint is.

        :raises TaskError: if the task did not succeed.
        :raises TaskUnknown: if the task does not exist.
        :raises ResultRefused: if the value may not be read here.
        :raises DeserializationError: if it cannot be read here.
        :raises BlobUnknown: if the retention time of the result is over.
        :raises FarcallError: if the result cannot be downloaded.
        """
        origin = _with_source(origin, result)
        if result.state is not TaskState.SUCCESS:
            what = f"the exception of task {result.task_id}"
            raise task_error(
                result, load_original=lambda found: self._serializer_for(found, origin, what).deserialize(found)
            )
        found = self._fetch(result, origin) if data is None else data
        serializer = self._serializer_for(found, origin, f"the result of task {result.task_id}")
        return _load(serializer, found, origin)

    def read_other(self, data: bytes, origin: Origin, what: str, *, task_id: str, signed: bool) -> Any:
        """A value that came beside the result of a task.

        :param what: the subject of the message of an error.
        :param signed: whether it was under the seal of the task.
        :raises ResultRefused: if it may not be read here.
        :raises DeserializationError: if it cannot be read here.
        :raises FarcallError: if the API cannot be asked whose the endpoint is.
        """
        self._sealer.check_signed(what, task_id, sealed=origin.sealed, signed=signed)
        return _load(self._serializer_for(data, origin, what), data, origin)

    def _serializer_for(self, found: Piece, origin: Origin, what: str) -> Serializer:
        return self._policy.serializer_for(found, origin, allowed=self.allowed, what=what)

    def _fetch(self, result: StreamResult, origin: Origin) -> Piece:
        return self._sealer.opened_value(self._fetch_as_stored(result), result.task_id, sealed=origin.sealed)

    def _fetch_as_stored(self, result: StreamResult) -> Piece:
        if result.result_blob is not None and result.result_blob.url is not None:
            try:
                return self._download(result.result_blob)
            except FarcallError as error:
                # The address has expired, the store answers about a blob that was deleted, or a proxy refuses.
                if error.record.retryable or not (error.is_foreign or isinstance(error, Forbidden | NotFound)):
                    raise
        try:
            return with_new_address(lambda: self._fetch_again(result.task_id), stop=self._stop)
        except (Forbidden, BlobUnknown) as error:
            if error.is_foreign:
                raise
            raise BlobUnknown(
                f"the result of task {result.task_id} has been deleted",
                hint="Results are kept for their retention time; run the task again.",
            ) from error

    def _fetch_again(self, task_id: str) -> Piece:
        task = self._api.get_task(task_id, retry_timeout_s=self._retry_timeout_s, stop=self._stop)
        fresh, data = result_from_json(task)
        if data is not None:
            return data
        if fresh.result_blob is None or fresh.result_blob.url is None:
            raise BlobUnknown(f"task {task_id} has no result")
        return self._download(fresh.result_blob)

    def _download(self, blob: BlobLocation) -> Piece:
        """The bytes of a blob with an address, which expires after minutes."""
        ref = BlobRef(blob.blob_key, blob.size_bytes, blob.sha256)
        return self._blobs.download(ref, blob.url or "", retry_timeout_s=self._retry_timeout_s, stop=self._stop)


class Collector:
    """Table of the open futures of an executor, which settles each of them once.

    Results arrive from the stream and from polling, each in its thread: both take a future out of the table before they
    settle it. Results that must be downloaded are left to a thread pool.

    :param on_finished: called once, after :meth:`close`, when the last future is settled.
    """

    def __init__(
        self, reader: ResultReader, *, on_finished: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._reader = reader
        self._clock = clock
        self._on_finished = on_finished
        self._open: dict[str, ComputeFuture[Any]] = {}
        self._fetching: dict[str, ComputeFuture[Any]] = {}
        #: Tasks about which the last answer said nothing that can be read, and since when, in monotonic seconds.
        self._doubted: dict[str, float] = {}
        self._settling: set[ComputeFuture[Any]] = set()
        self._downloads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._closing = False
        self._finished = False
        self._broken: BaseException | None = None

    def add(self, future: ComputeFuture[Any]) -> None:
        """Wait for the result of a task.

        :raises RuntimeError: after :meth:`close`.
        :raises BrokenExecutor: after :meth:`fail_all`.
        """
        with self._lock:
            if self._broken is not None:
                raise BrokenExecutor("a thread of the executor died") from self._broken
            if self._closing:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._open[future.task_id] = future

    def unsettled(self) -> list[ComputeFuture[Any]]:
        """The futures that are not done, in the order of their submission."""
        return [*self._open.copy().values(), *self._fetching.copy().values()]

    def all_accepted(self) -> bool:
        """Whether the API has taken every task that is open."""
        return all(record_of(future).accepted_at is not None for future in self.unsettled())

    def accepted(self, *, before: float | None = None) -> list[str]:
        """The tasks that the API has taken (before ``before``, in monotonic seconds) and that have no result yet."""
        records = map(record_of, self._open.copy().values())
        return [
            record.task_id
            for record in records
            if record.accepted_mono is not None and (before is None or record.accepted_mono < before)
        ]

    def drop(self, task_id: str) -> None:
        """The future was cancelled: it needs no result."""
        self._open.pop(task_id, None)
        self._check_finished()

    def take_pushed(self, results: Sequence[StreamResult], frames: Sequence[bytes]) -> bool:
        """Settle futures with results from the stream. Returns whether some must be polled instead: those of tasks that
        other programs submitted, as the stream does not say to which endpoint."""
        left = False
        for result in results:
            future = self._open.get(result.task_id)
            if future is not None and record_of(future).origin is None:
                left = True
            else:
                self._settle(result, None if result.result is None else frames[result.result], None)
        self._check_finished()
        return left

    def take_polled(self, tasks: Iterable[Mapping[str, Any]]) -> int:
        """Settle the futures of those tasks that ended. Returns how many did."""
        before = len(self._open)
        for task in tasks:
            try:
                result, data = result_from_json(task)
            except ProtocolError as error:
                self.doubt([task["task_id"]], error)
                continue
            self._doubted.pop(result.task_id, None)
            if result.state.is_terminal:
                self._settle(result, data, origin_from_json(task))
        self._check_finished()
        return before - len(self._open)

    def doubt(self, task_ids: Iterable[str], error: FarcallError) -> None:
        """Note tasks about which an answer says nothing that can be read. Their futures fail with the error if later
        answers do not either."""
        now = self._clock()
        for task_id in task_ids:
            if now - self._doubted.setdefault(task_id, now) >= FOREIGN_RETRY_S:
                self._doubted.pop(task_id, None)
                self.fail([task_id], error)

    def fail(self, task_ids: Iterable[str], error: BaseException) -> None:
        """Fail futures with an error of this side."""
        for task_id in list(task_ids):
            future = self._open.pop(task_id, None)
            if future is not None:
                settle_failed(future, error)
        self._check_finished()

    def fail_all(self, error: BaseException) -> None:
        """Fail every future and take no more: a thread that settles them died."""
        with self._lock:
            self._broken = error
            downloading = [*self._fetching.values()]
        for future in downloading:
            settle_failed(future, error)
        self.fail(self._open.copy(), error)

    def close(self) -> None:
        """No more futures will be added."""
        with self._lock:
            self._closing = True
        self._check_finished()

    def end_after_fork(self, error: BaseException) -> None:
        """In a forked child: end every future that a thread of the parent was to settle."""
        for future in (*self.unsettled(), *self._settling):
            future.end_after_fork(error)

    def _settle(self, result: StreamResult, data: bytes | None, polled: Origin | None) -> None:
        future = self._open.pop(result.task_id, None)
        self._doubted.pop(result.task_id, None)
        if future is None:
            return  # settled by the other thread, or cancelled
        self._settling.add(future)
        try:
            self._settle_with(future, result, data, polled)
        finally:
            self._settling.discard(future)

    def _settle_with(
        self, future: ComputeFuture[Any], result: StreamResult, data: bytes | None, polled: Origin | None
    ) -> None:
        record = record_of(future)
        origin = record.origin or polled or Origin(())
        future.attempt, record.timings = result.attempt, result.timings
        record.received_at = time.time()
        try:
            try:
                result, opened = self._reader.opened(result, data, origin)
            except FarcallError as error:
                settle_failed(future, error.with_traceback(None))
                return
            future.details = result.details
            if result.state is TaskState.CANCELLED:
                settle_cancelled(future)
            elif self._reader.needs_request(result, opened, origin):
                self._fetch(future, result, opened, origin)
            else:
                self._set_result(future, result, opened, origin)
        except BaseException as error:  # a defect of ours: it ends this thread, and the future is out of the table
            settle_failed(future, error)
            raise

    def _set_result(self, future: ComputeFuture[Any], result: StreamResult, data: Piece | None, origin: Origin) -> None:
        try:
            value = self._reader.read(result, data, origin)
            if (rebuild := record_of(future).rebuild) is not None:
                value = load_user_data(lambda: rebuild(value))
        except FarcallError as error:
            settle_failed(future, error.with_traceback(None))  # our own frames do not help the reader
            return
        try:
            future.set_result(value)
        except InvalidStateError:
            _logger.debug("task %s: cancelled here before its result arrived", future.task_id)

    def _fetch(self, future: ComputeFuture[Any], result: StreamResult, data: Piece | None, origin: Origin) -> None:
        with self._lock:
            if self._downloads is None:
                self._downloads = ThreadPoolExecutor(_PARALLEL_DOWNLOADS, thread_name_prefix="farcall-download")
            self._fetching[result.task_id] = future
        try:
            download = self._downloads.submit(self._set_result, future, result, data, origin)
        except RuntimeError as error:  # the process exits: thread pools take no more work
            self._fetching.pop(result.task_id, None)
            settle_failed(future, Unavailable("The process ended before the result was downloaded."))
            _logger.debug("task %s: %s", result.task_id, error)
        else:
            download.add_done_callback(lambda done: self._fetched(future, done))

    def _fetched(self, future: ComputeFuture[Any], done: Future[None]) -> None:
        error = done.exception()
        if error is not None:
            settle_failed(future, error)
        self._fetching.pop(future.task_id, None)
        self._check_finished()

    def _check_finished(self) -> None:
        if not self._closing or self._open or self._fetching:
            return
        with self._lock:
            first, self._finished = not self._finished, True
            downloads = self._downloads
        if first:
            if downloads is not None:
                downloads.shutdown(wait=False)
            self._on_finished()


class Poller:
    """Polls ``batch_status`` at the times of a :class:`PollSchedule`. Works without a stream, and verifies the stream.

    :param stream_is_open: whether a stream pushes results.
    :param retry_timeout_s: after how many seconds without an answer the waiting futures fail.
    """

    def __init__(
        self,
        api: Api,
        collector: Collector,
        *,
        stream_is_open: Callable[[], bool],
        retry_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._collector = collector
        self._stream_is_open = stream_is_open
        self._retry_timeout_s = retry_timeout_s
        self._clock = clock
        self._changed = threading.Condition()
        self._stop = threading.Event()
        now = self._clock()
        self._outage, self._refused = OutageTimer(now=now), OutageTimer(now=now)
        self._schedule = PollSchedule(now=now)
        self._sampled = 0

    def tasks_added(self) -> None:
        """There are new tasks to wait for."""
        with self._changed:
            if not self._schedule.next_is_sample(stream_is_open=self._stream_is_open(), now=self._clock()):
                self._schedule.poll_soon()
            self._changed.notify()

    def poll_soon(self) -> None:
        """Poll soon, also while the stream is open: results may have been missed."""
        with self._changed:
            self._schedule.poll_soon()
            self._changed.notify()

    def stop(self) -> None:
        """Let :meth:`run` return soon."""
        with self._changed:
            self._stop.set()
            self._changed.notify()

    def run(self) -> None:
        """Poll until :meth:`stop`. The body of a thread."""
        while self._wait_until_due():
            started_at = self._clock()
            is_sample = self._schedule.next_is_sample(stream_is_open=self._stream_is_open(), now=started_at)
            self._schedule.poll_started()
            if is_sample:
                self._reset(now=started_at)
            try:
                ended = self._poll(self._sample() if is_sample else self._collector.accepted())
            except FarcallError as error:
                now = self._clock()
                self._schedule.failed(took_s=now - started_at, now=now)
                if not self._stop.is_set():
                    self._give_up_after_outage(error, now=now)
            else:
                now = self._clock()
                self._reset(now=now)
                record = self._schedule.sampled if is_sample else self._schedule.polled
                record(ended=ended, took_s=now - started_at, now=now)

    def _wait_until_due(self) -> bool:
        """Wait for the next poll. False after :meth:`stop`."""
        with self._changed:
            while not self._stop.is_set():
                now = self._clock()
                if not self._collector.accepted():
                    self._reset(now=now)  # without open tasks there are no requests that could fail
                    self._changed.wait()
                    continue
                left_s = self._schedule.due_at(stream_is_open=self._stream_is_open(), now=now) - now
                if left_s <= 0:
                    return True
                self._changed.wait(left_s)
            return False

    def _sample(self) -> Sequence[str]:
        """Some of the older tasks, in turns."""
        known = self._collector.accepted(before=time.monotonic() - _SAMPLE_AGE_S)
        if self._sampled >= len(known):
            self._sampled = 0
        sample = known[self._sampled : self._sampled + IDS_PER_REQUEST]
        self._sampled += len(sample)
        return sample

    def _poll(self, task_ids: Sequence[str]) -> int:
        """Request the states of tasks and settle those that ended. Returns how many did."""
        ended = 0
        for start in range(0, len(task_ids), IDS_PER_REQUEST):
            missing = task_ids[start : start + IDS_PER_REQUEST]
            while missing and not self._stop.is_set():
                found = self._api.batch_status(missing, may_be_empty=True, retry_timeout_s=0, stop=self._stop)
                ended += self._collector.take_polled(found.values())
                if not found:  # an answer leaves out tasks beyond its largest size, but never all of them
                    self._collector.doubt(missing, TaskUnknown(f"the API does not know {len(missing)} tasks"))
                    break
                missing = [task_id for task_id in missing if task_id not in found]
        return ended

    def _reset(self, *, now: float) -> None:
        """There was an answer, or no request."""
        self._outage.reset(now=now)
        self._refused.reset(now=now)

    def _give_up_after_outage(self, error: FarcallError, *, now: float) -> None:
        """Fail the waiting futures if the API has been out of reach for ``retry_timeout_s``, or has refused every
        request for half a minute."""
        outage_s, refused_s = self._outage.failed(now=now), 0.0
        is_refusal = isinstance(error, Unauthenticated | Forbidden)
        if is_refusal:
            refused_s = self._refused.failed(now=now)
        else:
            self._refused.reset(now=now)
        _logger.debug("polling failed, %.0f s without contact: %s", outage_s, error)
        if outage_s < self._retry_timeout_s and refused_s < FOREIGN_RETRY_S:
            return
        hint = "The tasks continue; Client.get_batch_result reads their results by task id."
        raised: FarcallError
        if is_refusal:
            record = dataclasses.replace(error.record, hint=f"{error.hint} {hint}".strip())
            raised = type(error)(record.message, record=record)
        else:
            raised = Unavailable(f"no contact with the API for {outage_s:.0f} s: {error}", hint=hint)
        self._collector.fail(self._collector.accepted(), raised)
