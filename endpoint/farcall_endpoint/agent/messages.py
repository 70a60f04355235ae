"""What the cloud hears of a turn: batches that are large enough to be cheap and small enough to be taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from farcall_common.wire import (
    BlobRequest,
    Credit,
    Envelope,
    ResultSpec,
    TaskRef,
    TaskResults,
    TasksAccepted,
    TaskTransitions,
)
from farcall_endpoint.agent.tasks import Decisions, Task

_MAX_BATCH: Final = 1000
_MAX_BATCH_BYTES: Final = 4 * 1024 * 1024


def messages_to_cloud(decisions: Decisions, *, body: Callable[[Task], bytes]) -> Iterator[Envelope]:
    """The messages of a turn, in the order in which they are to be sent. ``body`` gives the result of a task."""
    if decisions.acknowledged:
        refs = tuple(TaskRef(task_id=task.task_id, attempt=task.attempt) for task in decisions.acknowledged)
        yield Envelope(TasksAccepted(tasks=refs))
    if decisions.credit:
        yield Envelope(Credit(tasks=decisions.credit))
    for start in range(0, len(decisions.transitions), _MAX_BATCH):
        yield Envelope(TaskTransitions(transitions=tuple(decisions.transitions[start : start + _MAX_BATCH])))
    yield from _results(decisions.results, body)
    for task in decisions.blob_requests:
        assert task.end is not None
        size_bytes, sha256 = task.end.size_bytes, task.end.sha256
        yield Envelope(BlobRequest(task_id=task.task_id, attempt=task.attempt, size_bytes=size_bytes, sha256=sha256))


def _results(tasks: Sequence[Task], body: Callable[[Task], bytes]) -> Iterator[Envelope]:
    specs: list[ResultSpec] = []
    frames: list[bytes] = []
    size_bytes = 0
    for task in tasks:
        end = task.end
        assert end is not None
        frame = None
        if end.size_bytes and end.blob is None:
            frame = len(frames)
            frames.append(body(task))
            size_bytes += end.size_bytes
        specs.append(
            ResultSpec(
                task_id=task.task_id,
                attempt=task.attempt,
                state=end.state,
                result=frame,
                result_blob=end.blob,
                error=end.error,
                started_at=end.started_at,
                ended_at=end.ended_at,
                exhausted=end.exhausted,
                details=end.details or {},
            )
        )
        if len(specs) >= _MAX_BATCH or size_bytes >= _MAX_BATCH_BYTES:
            yield Envelope(TaskResults(results=tuple(specs)), tuple(frames))
            specs, frames, size_bytes = [], [], 0
    if specs:
        yield Envelope(TaskResults(results=tuple(specs)), tuple(frames))
