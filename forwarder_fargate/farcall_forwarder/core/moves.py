"""Reports of moves, held back for a moment: a task that ends meanwhile is recorded once, by its end."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from farcall_common.store.model import TaskEvent
from farcall_common.wire import Reporter, TaskState

__all__ = ["MoveBuffer"]

#: Of one task between two recordings; an agent that reports more is not believed.
_MAX_MOVES: Final = 32


class _Move(NamedTuple):
    state: TaskState
    reporter: Reporter
    at: float
    attempt: int
    detail: Mapping[str, Any]


class MoveBuffer:
    """Moves that are not recorded yet, by task, oldest task first."""

    def __init__(self) -> None:
        self._moves: dict[str, list[_Move]] = {}
        self._since: float | None = None

    def __len__(self) -> int:
        return len(self._moves)

    @property
    def since(self) -> float | None:
        """Monotonic second since when a move waits; None when none does."""
        return self._since

    def add(
        self,
        task_id: str,
        state: TaskState,
        reporter: Reporter,
        *,
        at: float,
        attempt: int,
        now_mono: float,
        detail: Mapping[str, Any] | None = None,
    ) -> None:
        """A task moved at ``at`` epoch seconds."""
        moves = self._moves.setdefault(task_id, [])
        if len(moves) < _MAX_MOVES:
            moves.append(_Move(state, reporter, at, attempt, detail or {}))
        if self._since is None:
            self._since = now_mono

    def drop(self, task_id: str) -> None:
        """The task has ended; nobody needs to know the way any more."""
        if self._moves.pop(task_id, None) is not None and not self._moves:
            self._since = None

    def take(self, limit: int) -> Sequence[TaskEvent]:
        """The moves of the oldest ``limit`` tasks."""
        taken = list(itertools.islice(self._moves, limit))
        events = [
            TaskEvent(
                task_id,
                move.state,
                move.reporter,
                dt.datetime.fromtimestamp(move.at, dt.UTC),
                move.attempt,
                move.detail,
            )
            for task_id in taken
            for move in self._moves.pop(task_id)
        ]
        if not self._moves:
            self._since = None
        return events
