"""The end of a task: from the stream or from the API into a value, or into the error that it ended with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from farcall._api import Api
from farcall._blobs import BlobRef, Blobs
from farcall._calls import unpack_result
from farcall_common.errors import (
    BlobUnknown,
    ErrorRecord,
    Forbidden,
    NotFound,
    TaskCancelled,
    TaskDeadLettered,
    TaskError,
    TaskFailed,
    TaskLost,
    TaskPending,
    TaskUnknown,
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
