"""Result handling: decoding results, polling the API for them, and settling futures."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, InvalidStateError, ThreadPoolExecutor
from typing import Any, Final

from farcall._api import Api, BlobRef, Blobs
from farcall._functions import unpack_result
from farcall._future import ComputeFuture
from farcall._pacing import Pace, Silence
from farcall_common.errors import (
    BlobUnknown,
    ErrorRecord,
    FarcallError,
    Forbidden,
    NotFound,
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
from farcall_common.payload import Piece, load_user_data
from farcall_common.payload import task_error as error_of_record
from farcall_common.wire import BlobLocation, StreamResult, TaskState

_CLASSES: Final[Mapping[TaskState, type[TaskError]]] = {
    TaskState.FAILED: TaskFailed,
    TaskState.CANCELLED: TaskCancelled,
    TaskState.LOST: TaskLost,
    TaskState.DEAD_LETTERED: TaskDeadLettered,
}


def end_from_json(task: Mapping[str, Any]) -> tuple[StreamResult, bytes | None]:
    """A task as the API shows it, in the shape in which the stream pushes ends, and its result when that is inline."""
    ref, result, finished_at = task.get("result_ref"), task.get("result"), task.get("completion_t")
    end = StreamResult(
        task_id=task["task_id"],
        task_group_id=task.get("task_group_id") or "",
        state=TaskState(task["status"]),
        attempt=task.get("attempt") or 0,
        result_blob=None if ref is None else BlobLocation(**ref),
        error=task.get("error"),
        finished_at=None if finished_at is None else float(finished_at),
        timings=task.get("timings") or {},
        details=task.get("details") or {},
    )
    return end, None if result is None else result.encode()


def task_error(end: StreamResult) -> TaskError | TaskUnknown:
    """The exception for a task that ended without a result, has not ended, or does not exist.

    For a task that exists, a :class:`TaskError` that fits its state, so that ``except TaskFailed`` catches every
    failure; the record keeps the precise code. The remote traceback is a note of the exception: Python prints it below
    the local one. What the function raised is the ``__cause__`` if it can be read here.
    """
    state = end.state
    if not state.is_terminal:
        return TaskPending(f"task {end.task_id} is {state}", hint="Ask again later, or wait for it.")
    expected = _CLASSES.get(state, TaskError)
    if end.error is None:
        return expected(f"task {end.task_id} ended as {state}")
    record = ErrorRecord.from_json(end.error)
    data = record.exception_data
    load = None if data is None else lambda: unpack_result(data.encode())
    return error_of_record(record, expected=expected, load_original=load)


class ResultReader:
    """Reads results, fetching those that are blobs. May be used from any thread."""

    def __init__(self, api: Api, blobs: Blobs) -> None:
        self._api = api
        self._blobs = blobs

    def read(self, end: StreamResult, data: Piece | None) -> Any:
        """The value that a task returned. May block for a download.

        :raises TaskError: if the task did not succeed.
        :raises TaskUnknown: if there is no such task.
        :raises DeserializationError: if the value cannot be made here.
        :raises BlobUnknown: if the result was there once, and its time is over.
        :raises FarcallError: if the result cannot be fetched.
        """
        if end.state is not TaskState.SUCCESS:
            raise task_error(end)
        found = self._fetch(end) if data is None else data
        return load_user_data(lambda: unpack_result(found))

    def _fetch(self, end: StreamResult) -> Piece:
        found = self._downloaded(end.result_blob)
        if found is not None:
            return found
        fresh, data = end_from_json(self._api.get_task(end.task_id))
        found = self._downloaded(fresh.result_blob) if data is None else data
        if found is None:
            raise BlobUnknown(
                f"the result of task {end.task_id} is not there any more",
                hint="Results are kept for their retention time; run the task again.",
            )
        return found

    def _downloaded(self, blob: BlobLocation | None) -> Piece | None:
        """The blob, if it is there. A pre-signed address lives for minutes; after that it is forbidden, as what is gone
        may be too."""
        if blob is None or blob.url is None:
            return None
        try:
            return self._blobs.download(BlobRef(blob.blob_key, blob.size_bytes, blob.sha256), blob.url)
        except (Forbidden, NotFound):
            return None


_PARALLEL_DOWNLOADS: Final = 4

_logger = logging.getLogger(__name__)


class Collector:
    """Holds the open futures of an executor.

    Ends come from the stream and from polling, in threads of their own; each takes the future out of the table first,
    so that it is settled by one of them. Results that must be downloaded are left to a few threads more.

    :param on_finished: called once, after :meth:`close`, when the last future is settled.
    """

    def __init__(self, reader: ResultReader, *, on_finished: Callable[[], None]) -> None:
        self._reader = reader
        self._on_finished = on_finished
        self._open: dict[str, ComputeFuture[Any]] = {}
        self._fetching: dict[str, ComputeFuture[Any]] = {}
        self._downloads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._closing = False
        self._finished = False
        self._broken: BaseException | None = None

    def add(self, future: ComputeFuture[Any]) -> None:
        """Wait for the end of a task.

        :raises RuntimeError: after :meth:`close`.
        :raises BrokenExecutor: after :meth:`break_down`.
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

    def accepted(self, *, before: float | None = None) -> list[str]:
        """The tasks that the API has (since ``before``, monotonic seconds, at least) and whose end is not known."""
        return [
            task_id
            for task_id, future in self._open.copy().items()
            if future._accepted_mono is not None and (before is None or future._accepted_mono < before)
        ]

    def drop(self, future: ComputeFuture[Any]) -> None:
        """The future is done without us: it was cancelled."""
        self._open.pop(future.task_id, None)
        self._check_finished()

    def take_pushed(self, results: Sequence[StreamResult], frames: Sequence[bytes]) -> None:
        """Settle what the stream pushed."""
        for end in results:
            self._settle(end, None if end.result is None else frames[end.result])
        self._check_finished()

    def take_polled(self, tasks: Iterable[Mapping[str, Any]]) -> int:
        """Settle those of the polled tasks that ended. Returns how many did."""
        before = len(self._open)
        for task in tasks:
            end, data = end_from_json(task)
            if end.state.is_terminal:
                self._settle(end, data)
        self._check_finished()
        return before - len(self._open)

    def fail(self, task_ids: Iterable[str], error: BaseException) -> None:
        """End futures with an error of this side."""
        for task_id in list(task_ids):
            future = self._open.pop(task_id, None)
            if future is not None:
                future._end_failed(error)
        self._check_finished()

    def break_down(self, error: BaseException) -> None:
        """End every future with an error of ours, and take no more: what would settle them is gone."""
        with self._lock:
            self._broken = error
            downloading = [*self._fetching.values()]
        for future in downloading:
            future._end_failed(error)
        self.fail(self._open.copy(), error)

    def close(self) -> None:
        """No more futures will be added."""
        with self._lock:
            self._closing = True
        self._check_finished()

    def _settle(self, end: StreamResult, data: bytes | None) -> None:
        future = self._open.pop(end.task_id, None)
        if future is None:
            return  # the other way was faster, or it was cancelled
        future.attempt, future.details, future._stations = end.attempt, end.details, end.timings
        future._received_at = time.time()
        try:
            if end.state is TaskState.CANCELLED:
                future._end_cancelled()
            elif end.state is not TaskState.SUCCESS or data is not None:
                self._set_result(future, end, data)
            else:
                self._fetch(future, end)
        except BaseException as error:  # a defect of ours: it ends this thread, which does not know the future any more
            future._end_failed(error)
            raise

    def _set_result(self, future: ComputeFuture[Any], end: StreamResult, data: bytes | None) -> None:
        try:
            value = self._reader.read(end, data)
        except FarcallError as error:
            future._end_failed(error.with_traceback(None))  # our own frames would only be in the reader's way
            return
        try:
            future.set_result(value)
        except InvalidStateError:
            _logger.debug("task %s: cancelled here before its result came", future.task_id)

    def _fetch(self, future: ComputeFuture[Any], end: StreamResult) -> None:
        with self._lock:
            if self._downloads is None:
                self._downloads = ThreadPoolExecutor(_PARALLEL_DOWNLOADS, thread_name_prefix="farcall-download")
            self._fetching[end.task_id] = future
        try:
            download = self._downloads.submit(self._set_result, future, end, None)
        except RuntimeError as error:  # the process ends: threads that wait are not given anything to do any more
            self._fetching.pop(end.task_id, None)
            future._end_failed(Unavailable("The process ended before the result was downloaded."))
            _logger.debug("task %s: %s", end.task_id, error)
        else:
            download.add_done_callback(lambda done: self._fetched(future, done))

    def _fetched(self, future: ComputeFuture[Any], done: Future[None]) -> None:
        error = done.exception()
        if error is not None:
            future._end_failed(error)
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


_logger = logging.getLogger(__name__)

_IDS_PER_REQUEST: Final = 500
#: An end that is younger than this may still be on its way through the stream.
_SAMPLE_AGE_S: Final = 1.0
#: A token that is refused for this long is not coming back.
_AUTH_PATIENCE_S: Final = 30.0


class Poller:
    """Polls ``batch_status`` at the rhythm of a :class:`Pace`.

    :param stream_is_open: whether ends come in by themselves.
    :param patience_s: after how many seconds without any contact waiting futures fail.
    """

    def __init__(
        self,
        api: Api,
        collector: Collector,
        *,
        stream_is_open: Callable[[], bool],
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._collector = collector
        self._stream_is_open = stream_is_open
        self._patience_s = patience_s
        self._clock = clock
        self._changed = threading.Condition()
        self._stop = threading.Event()
        now = self._clock()
        self._silence = Silence(now=now)
        self._pace = Pace(now=now)
        self._sampled = 0

    def expect(self) -> None:
        """There are new tasks to wait for."""
        with self._changed:
            if not self._pace.samples(stream_is_open=self._stream_is_open(), now=self._clock()):
                self._pace.hurry()
            self._changed.notify()

    def hurry(self) -> None:
        """Poll soon, even while the stream is open: something may have been missed."""
        with self._changed:
            self._pace.hurry()
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
            sampling = self._pace.samples(stream_is_open=self._stream_is_open(), now=started_at)
            self._pace.begun()
            if sampling:
                self._silence.end(now=started_at)
            try:
                ended = self._poll(self._sample() if sampling else self._collector.accepted())
            except FarcallError as error:
                now = self._clock()
                self._pace.failed(took_s=now - started_at, now=now)
                if not self._stop.is_set():
                    self._weigh(error, self._silence.lasts(now=now))
            else:
                now = self._clock()
                self._silence.end(now=now)
                note = self._pace.sampled if sampling else self._pace.polled
                note(ended=ended, took_s=now - started_at, now=now)

    def _wait_until_due(self) -> bool:
        """Wait for the next poll. False if there is to be none."""
        with self._changed:
            while not self._stop.is_set():
                now = self._clock()
                if not self._collector.accepted():
                    self._silence.end(now=now)  # nobody waits, nobody is let down
                    self._changed.wait()
                    continue
                left_s = self._pace.due_at(stream_is_open=self._stream_is_open(), now=now) - now
                if left_s <= 0:
                    return True
                self._changed.wait(left_s)
            return False

    def _sample(self) -> Sequence[str]:
        """Some of the tasks that are not young, others each time."""
        known = self._collector.accepted(before=time.monotonic() - _SAMPLE_AGE_S)
        if self._sampled >= len(known):
            self._sampled = 0
        sample = known[self._sampled : self._sampled + _IDS_PER_REQUEST]
        self._sampled += len(sample)
        return sample

    def _poll(self, task_ids: Sequence[str]) -> int:
        """Ask for tasks and settle what has ended. Returns how many had."""
        ended = 0
        for start in range(0, len(task_ids), _IDS_PER_REQUEST):
            asked = task_ids[start : start + _IDS_PER_REQUEST]
            while asked and not self._stop.is_set():
                found = self._api.batch_status(asked, patience_s=0, stop=self._stop)
                ended += self._collector.take_polled(found.values())
                if not found:  # an answer leaves out what is too much for it, but never everything
                    ended += len(asked)
                    self._collector.fail(asked, TaskUnknown(f"the API knows nothing of {len(asked)} tasks"))
                    break
                asked = [task_id for task_id in asked if task_id not in found]
        return ended

    def _weigh(self, error: FarcallError, silent_s: float) -> None:
        """Decide whether a failed poll is the last straw."""
        final = isinstance(error, Unauthenticated | Forbidden)
        _logger.debug("polling failed, %.0f s without contact: %s", silent_s, error)
        if silent_s < (min(_AUTH_PATIENCE_S, self._patience_s) if final else self._patience_s):
            return
        hint = "The tasks go on without you; Client.get_batch_result reads their results by task id."
        raised: FarcallError
        if final:
            record = dataclasses.replace(error.record, hint=f"{error.hint} {hint}".strip())
            raised = type(error)(record.message, record=record)
        else:
            raised = Unavailable(f"no contact with the API for {silent_s:.0f} s: {error}", hint=hint)
        self._collector.fail(self._collector.accepted(), raised)
