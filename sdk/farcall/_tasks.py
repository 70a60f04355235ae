"""What the client tells of a task."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farcall_common.wire import TaskState

__all__ = ["TaskInfo"]


@dataclasses.dataclass(frozen=True)
class TaskInfo:
    """A task as it was when asked for. Instants and ``timings`` are epoch seconds.

    ``state`` is None for a task that does not exist. ``exception`` is what :meth:`result` raises: a
    :class:`TaskError`, or why the result cannot be read here.
    """

    task_id: str
    state: TaskState | None
    task_group_id: str = ""
    endpoint_id: str = ""
    function_id: str = ""
    attempt: int = 0
    finished_at: float | None = None
    timings: Mapping[str, float] = dataclasses.field(default_factory=dict)
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    value: Any = dataclasses.field(default=None, repr=False)
    exception: Exception | None = dataclasses.field(default=None, repr=False)

    @property
    def pending(self) -> bool:
        """Whether the task has not ended yet."""
        return self.state is not None and not self.state.is_terminal

    def result(self) -> Any:
        """What the task returned.

        :raises TaskPending: if it has not ended.
        :raises TaskFailed, TaskCancelled, TaskLost: if it did not succeed.
        :raises TaskUnknown: if there is no such task.
        :raises DeserializationError: if the result cannot be read here.
        """
        if self.exception is not None:
            raise self.exception
        return self.value
