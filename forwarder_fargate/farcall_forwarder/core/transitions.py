"""Transition buffer: delays state transitions, because a task that ends meanwhile needs only its result recorded."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from farcall_common.store.model import TaskEvent
from farcall_common.wire import Reporter, TaskState
from farcall_forwarder.core.untrusted import NO_DETAIL

#: Transitions of one task between two recordings. More than these are dropped.
_MAX_TRANSITIONS: Final = 32


class _Transition(NamedTuple):
    state: TaskState
    reporter: Reporter
    at: float
    attempt: int
    detail: Mapping[str, Any]


class TransitionBuffer:
    """Transitions that are not recorded yet, by task, oldest task first."""

    def __init__(self) -> None:
        self._transitions: dict[str, list[_Transition]] = {}
        self._since: float | None = None

    def __len__(self) -> int:
        return len(self._transitions)

    @property
    def since(self) -> float | None:
        """Monotonic second since which a transition waits; None if none does."""
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
        detail: Mapping[str, Any] = NO_DETAIL,
    ) -> None:
        """Add a transition at ``at`` epoch seconds. One with a ``detail`` is recorded even if its task ends before."""
        transitions = self._transitions.setdefault(task_id, [])
        if len(transitions) < _MAX_TRANSITIONS:
            transitions.append(_Transition(state, reporter, at, attempt, detail))
        if self._since is None:
            self._since = now_mono

    def drop(self, task_id: str) -> None:
        """The task has ended: its transitions need not be recorded any more, except those with a detail."""
        transitions = self._transitions.pop(task_id, None)
        if transitions is None:
            return
        if kept := [each for each in transitions if each.detail]:
            self._transitions[task_id] = kept
        elif not self._transitions:
            self._since = None

    def take(self, limit: int) -> Sequence[TaskEvent]:
        """Remove and return the transitions of the oldest ``limit`` tasks."""
        taken = list(itertools.islice(self._transitions, limit))
        events = [
            TaskEvent(
                task_id,
                transition.state,
                transition.reporter,
                dt.datetime.fromtimestamp(transition.at, dt.UTC),
                transition.attempt,
                transition.detail,
            )
            for task_id in taken
            for transition in self._transitions.pop(task_id)
        ]
        if not self._transitions:
            self._since = None
        return events
