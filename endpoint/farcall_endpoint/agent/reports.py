"""Reports to the cloud: credit, state transitions, retries of uploads, and the messages of a turn."""

from __future__ import annotations

import collections
import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from farcall_common.backoff import Backoff
from farcall_common.wire import (
    BlobRequest,
    Credit,
    Envelope,
    ResultSpec,
    TaskRef,
    TaskResults,
    TasksAccepted,
    TaskState,
    TaskTransition,
    TaskTransitions,
)
from farcall_endpoint.agent.tasks import Decisions, Stage, Task
from farcall_endpoint.prefetch import PrefetchPolicy


class CreditWindow:
    """Of one session at a time.

    :param window: tasks to hold here for each slot, so that the way to the cloud is hidden; at most ``limit`` together,
        but never less than two for each slot.
    """

    def __init__(self, window: PrefetchPolicy, *, limit: int) -> None:
        self._window = window
        self._limit = limit
        self._given = 0
        self._held = 0

    def restart(self) -> None:
        """A session has begun: nothing is given yet."""
        self._given = 0

    def used(self, count: int) -> None:
        """So many tasks came, or that much credit was not given after all."""
        self._given -= count
        self._held += count

    def grant(self, *, slots: int, held: int) -> int:
        """Credit to give now, with so many slots and unfinished tasks here. Small change waits until it is worth a
        message, unless the cloud has none left. It has less than none when tasks came from the reserve."""
        window = min(slots * (2 + self._window.depth), max(self._limit, 2 * slots))
        due = window - held - self._given
        ended, self._held = max(0, self._held - held), held
        if self._given < 0:  # the reserve is used: what ended gives it back, also while the window shrinks
            due = max(due, min(ended, -self._given))
        if due < max(1, window // 4) and not (due > 0 and self._given <= 0):
            return 0
        self._given += due
        return due


REPORT_AFTER_S: Final = 0.5
"""A state that lasts for so long is worth a message."""


class States:
    """Keeps an eye on tasks that have not ended. Instants are epoch seconds.

    :param are_told: whether anybody wants to know.
    """

    def __init__(self, *, are_told: bool) -> None:
        self._are_told = are_told
        self._watched: collections.deque[tuple[float, Task]] = collections.deque()

    def watch(self, task: Task, at: float) -> None:
        """Look at a task again when its state of now, entered ``at``, has lasted."""
        if self._are_told:
            task.watched = True
            self._watched.append((at + REPORT_AFTER_S, task))

    def enter(self, task: Task, state: TaskState, at: float) -> None:
        """A task changes its state."""
        task.state, task.at = state, at
        if not task.watched and task.reported is not state:
            self.watch(task, at)

    def next_deadline(self) -> float | None:
        """When :meth:`due` may have something next."""
        return self._watched[0][0] if self._watched else None

    def due(self, *, now: float, connected: bool) -> list[TaskTransition]:
        """What is to be told now. Without a session nothing is, and the next one's greeting says it all."""
        transitions = []
        while self._watched and self._watched[0][0] <= now:
            task = self._watched.popleft()[1]
            task.watched = False
            if task.stage is Stage.ENDED or task.reported is task.state:
                continue
            if now < task.at + REPORT_AFTER_S:
                self.watch(task, task.at)
            elif connected:
                task.reported = task.state
                transitions.append(
                    TaskTransition(task_id=task.task_id, attempt=task.attempt, state=task.state, at=task.at)
                )
        return transitions


_TRIES: Final = 5
_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 4.0


class UploadRetries:
    """Tasks whose results wait for their next try. Instants are epoch seconds."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Task]] = []

    def add(self, task: Task, *, now: float) -> bool:
        """Try the result of a task again, after twice as long each time. False when it was tried often enough."""
        assert task.end is not None
        if task.end.upload_backoff is None:
            task.end.upload_backoff = Backoff(first_s=_FIRST_WAIT_S, most_s=_LONGEST_WAIT_S)
        backoff = task.end.upload_backoff
        if backoff.failures + 1 >= _TRIES:
            return False
        heapq.heappush(self._due, (now + backoff.next_s(), task.seq, task))
        return True

    def next_deadline(self) -> float | None:
        """When :meth:`due` may have something next."""
        return self._due[0][0] if self._due else None

    def due(self, *, now: float) -> Iterator[Task]:
        """Those whose time has come."""
        while self._due and self._due[0][0] <= now:
            yield heapq.heappop(self._due)[2]


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
