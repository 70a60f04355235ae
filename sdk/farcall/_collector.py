"""Futures that wait for their end, and how the end reaches them: once, whichever way it comes first."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, InvalidStateError, ThreadPoolExecutor
from typing import Any, Final

from farcall._ends import ResultReader, end_from_json
from farcall._future import ComputeFuture
from farcall_common.errors import FarcallError, Unavailable
from farcall_common.wire import StreamResult, TaskState

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
