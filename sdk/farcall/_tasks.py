"""What the client tells of a task."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farcall_common.wire import TaskState


@dataclasses.dataclass(frozen=True)
class TaskInfo(Mapping[str, Any]):
    """A task as it was when asked for. Instants and ``timings`` are epoch seconds.

    ``state`` is None for a task that does not exist. ``exception`` is what :meth:`result` raises: a
    :class:`TaskError`, or why the result cannot be read here. ``retry_of`` is the task that this one tries again.

    Programs for Globus Compute look into a dictionary, and may: ``info["status"]``, ``info["pending"]`` and
    ``info["details"]`` are always there, ``info["completion_t"]`` (text) and one of ``info["result"]`` and
    ``info["exception"]`` once the task has ended.
    """

    task_id: str
    state: TaskState | None
    task_group_id: str = ""
    endpoint_id: str = ""
    function_id: str = ""
    attempt: int = 0
    finished_at: float | None = None
    retry_of: str = ""
    timings: Mapping[str, float] = dataclasses.field(default_factory=dict)
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    value: Any = dataclasses.field(default=None, repr=False)
    exception: Exception | None = dataclasses.field(default=None, repr=False)

    @property
    def pending(self) -> bool:
        """Whether the task has not ended yet."""
        return self.state is not None and not self.state.is_terminal

    def __getitem__(self, key: str) -> Any:
        if key == "result" and not self.pending:
            return self.result()
        return self._as_dict()[key]

    def __contains__(self, key: object) -> bool:
        return key in self._as_dict()

    def __iter__(self) -> Iterator[str]:
        return iter(self._as_dict())

    def __len__(self) -> int:
        return len(self._as_dict())

    def _as_dict(self) -> dict[str, Any]:
        known: dict[str, Any] = {
            "task_id": self.task_id,
            "status": str(self.state or "unknown"),
            "pending": self.pending,
            "details": self.details,
        }
        if self.finished_at is not None:
            known["completion_t"] = str(self.finished_at)
        if not self.pending:
            known |= {"result": self.value} if self.exception is None else {"exception": self.exception}
        return known

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
