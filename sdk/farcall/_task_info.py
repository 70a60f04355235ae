"""Task information from the API: state, result, and why a task has not started."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from farcall._details import BY_SERVICE, listed
from farcall._display import card, local_time, shortened
from farcall._stages import Stages
from farcall_common.durations import ago
from farcall_common.plain_text import plain
from farcall_common.progress import Progress
from farcall_common.staging import StagedFile, Staging

if TYPE_CHECKING:
    from farcall_common.wire import TaskState


def target_of(answer: Mapping[str, Any]) -> str:
    """The latency target in an answer about a task, in words; empty without one."""
    if not (found := answer.get("qos")):
        return ""
    from farcall_common.qos_report import target_text  # here: most tasks have none

    return target_text(found.get("target_ms"), found.get("max_slowdown"), found.get("percentile", 95.0))


def _infeasible_of(answer: Mapping[str, Any]) -> str:
    if not (found := answer.get("infeasible")):
        return ""
    from farcall_common.qos_report import Infeasible

    return str(Infeasible(str(found.get("reason", "")), str(found.get("fix", ""))))


#: Fields of a task by the labels with which they are shown, where these differ.
_LABELS: Final = {
    "task group": "task_group_id",
    "endpoint": "endpoint_id",
    "function": "function_id",
    "attempts": "attempt",
    "submitted": "timings",
    "started": "timings",
    "ended": "timings",
    "seconds": "timings",
    "ran": "timings",
    "finished": "finished_at",
    "retry of": "retry_of",
    "error": "exception",
}
_BLOCKED: Final = frozenset(
    {"ENDPOINT_DELETED", "ENDPOINT_NEVER_SEEN", "ENDPOINT_OFFLINE", "ENDPOINT_PROBLEM", "ALLOWANCE", "NO_WORKERS"}
    | {"QUEUE_AWAY", "ENVIRONMENT_PROBLEM"}
)


@dataclasses.dataclass(frozen=True)
class Why:
    """Why a task is in its state. ``str()`` of it is one sentence.

    ``reason`` is for programs: ENDED, RUNNING, RETRYING, STAGING_IN, STAGING_OUT, STARTING, ENVIRONMENT_STARTING,
    ENVIRONMENT_PROBLEM, ENDPOINT_DELETED, ENDPOINT_NEVER_SEEN, ENDPOINT_OFFLINE, ENDPOINT_PROBLEM, ALLOWANCE,
    NO_WORKERS, WORKERS_BUSY, NEXT, NOT_QUEUED, QUEUE_AWAY (of the API), WAITING_FOR_INPUTS, NOT_SENT (of this side);
    there may be more. ``state``
    is the task's state, which it has been in for ``state_age_s`` seconds. If it has not started at ``expires_at``
    (epoch seconds), it ends as failed. ``queue_position`` is how many of your tasks go first, None when it is not in
    the endpoint's queue, in which ``queue_depth`` tasks of ``queue_submitters`` submitters wait, who take turns. The
    fields of the endpoint are its name, whether it is online, when it was last seen (epoch seconds), its workers and
    how many of them are idle, and ``problem``, as the endpoint reports it; its last report came at ``reported_at``
    (epoch seconds), ``report_age_s`` seconds before the answer. Both are None if there was none. ``target`` is the
    latency that the task is to hold, in words, and ``infeasible`` why the endpoint cannot hold it and what would help;
    both are empty without."""

    task_id: str
    reason: str
    text: str
    state: str
    state_age_s: float
    attempt: int = 0
    queue_position: int | None = None
    queue_depth: int | None = None
    queue_submitters: int | None = None
    endpoint_id: str = ""
    endpoint_name: str = ""
    endpoint_online: bool | None = None
    endpoint_seen_at: float | None = None
    total_workers: int | None = None
    idle_workers: int | None = None
    problem: str = ""
    expires_at: float | None = None
    reported_at: float | None = None
    report_age_s: float | None = None
    target: str = ""
    infeasible: str = ""

    @property
    def is_blocked(self) -> bool:
        """Whether something holds the task up that may need a person: its endpoint is off, for instance."""
        return self.reason in _BLOCKED

    def __str__(self) -> str:
        return plain(self.text)

    @property
    def workers(self) -> str | None:
        """The endpoint's workers in words, with the age of the numbers; None if they are not known."""
        if self.total_workers is None:
            return None
        age = "" if self.report_age_s is None else f", as of {ago(self.report_age_s)}"
        return f"{self.idle_workers or 0} of {self.total_workers} idle{age}"

    def _repr_html_(self) -> str:
        known = {"task": self.task_id, "state": self.state, "endpoint": self.endpoint_name or self.endpoint_id}
        ahead = {"tasks before it": self.queue_position, "workers": self.workers, "problem": self.problem}
        return card(self.text, {**known, **ahead})

    @classmethod
    def from_json(cls, answer: Mapping[str, Any]) -> Why:
        """Read the API's answer; unknown fields are ignored."""
        endpoint: Mapping[str, Any] = answer.get("endpoint") or {}
        details: Mapping[str, Any] = endpoint.get("details") or {}
        return cls(
            task_id=answer["task_id"],
            reason=answer["reason"],
            text=answer["text"],
            state=answer["state"],
            state_age_s=answer["state_age_s"],
            attempt=answer.get("attempt", 0),
            queue_position=answer.get("queue_position"),
            queue_depth=answer.get("queue_depth"),
            queue_submitters=answer.get("queue_submitters"),
            endpoint_id=endpoint.get("endpoint_id", ""),
            endpoint_name=endpoint.get("name", ""),
            endpoint_online=endpoint["status"] == "online" if endpoint else None,
            endpoint_seen_at=endpoint.get("seen_at"),
            total_workers=details.get("total_workers"),
            idle_workers=details.get("idle_workers"),
            problem=endpoint.get("problem", ""),
            expires_at=answer.get("expires_at"),
            reported_at=endpoint.get("reported_at"),
            report_age_s=endpoint.get("age_s"),
            target=target_of(answer),
            infeasible=_infeasible_of(answer),
        )


@dataclasses.dataclass(frozen=True)
class TaskInfo(Mapping[str, Any]):
    """A task at the time of the request. Instants and ``timings`` are epoch seconds, shown in local time.

    ``state`` is None for a task that does not exist. ``exception`` is raised by :meth:`result`: a
    :class:`TaskError`, or why the result cannot be read here. ``retry_of`` is the task that this one repeats,
    ``environment`` the name of what it runs in, or its technology and place. ``stages`` are those of a graph.
    ``progress`` is what the function last said with ``current().progress``, None if it has said nothing; of a sealed
    call without its text while it runs. :meth:`Client.get_batch_result` has both of tasks that have ended only.
    ``staging`` says which files its endpoint copies now, None if none; ``files`` are those that it has copied, the
    first 100 at most. ``target`` is the latency that it is to hold, in words; empty without one. ``by_service`` are the
    names of those fields of a sealed call that its endpoint has not sealed: the service wrote them. It is empty for
    other calls.

    It is a mapping for programs of Globus Compute: ``info["status"]``, ``info["pending"]`` and
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
    environment: str = ""
    stages: Stages = dataclasses.field(default_factory=Stages, repr=False)
    progress: Progress | None = dataclasses.field(default=None, repr=False)
    staging: Staging | None = dataclasses.field(default=None, repr=False)
    files: Sequence[StagedFile] = dataclasses.field(default=(), repr=False)
    target: str = ""
    by_service: Sequence[str] = dataclasses.field(default=(), repr=False)

    def __repr__(self) -> str:
        ran = f", ran {seconds} s" if (seconds := self._ran_s()) else ""
        ended = f", ended {local_time(self.finished_at)}" if self.finished_at is not None else ""
        said = f" ({BY_SERVICE})" if self.by_service else ""
        return f"<TaskInfo {self.task_id}: {self._state_text()}{ran}{ended}{said}>"

    def _repr_html_(self) -> str:
        known = {"state": self._state_text(), "endpoint": self.endpoint_id, "function": self.function_id}
        known |= {"environment": self.environment} if self.environment else {}
        known |= {"target": self.target} if self.target else {}
        instants = {name: self.timings.get(f"{name}_at") for name in ("submitted", "started", "ended")}
        result = shortened(self.value) if self.state is not None and self.state.value == "success" else None
        ended = {"error": self.exception and str(self.exception), "result": None if self.exception else result}
        known |= {"progress": str(self.progress)} if self.progress else {}
        if self.staging or self.files:
            known["files"] = str(self.staging or len(self.files))
        shown = {**known, "attempts": self.attempt or None, **{name: local_time(at) for name, at in instants.items()}}
        fields = {**shown, "seconds": self._ran_s(), "retry of": self.retry_of, **ended}
        said = listed(name for name, value in fields.items() if value and self.is_by_service(name))
        return card(f"Task {self.task_id}", {**fields, BY_SERVICE: said})

    def is_by_service(self, label: str) -> bool:
        """Whether what is shown with a label is the word of the service alone (see ``by_service``)."""
        return _LABELS.get(label, label) in self.by_service

    def _state_text(self) -> str:
        return str(self.state or "unknown")

    def _ran_s(self) -> str:
        """For how long its function ran; empty if that is not known."""
        started_at, ended_at = self.timings.get("started_at"), self.timings.get("ended_at")
        return "" if started_at is None or ended_at is None else f"{ended_at - started_at:.1f}"

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
            "status": self._state_text(),
            "pending": self.pending,
            "details": self.details,
        }
        if self.finished_at is not None:
            known["completion_t"] = str(self.finished_at)
        if not self.pending:
            known |= {"result": self.value} if self.exception is None else {"exception": self.exception}
        return known

    def result(self) -> Any:
        """The value that the task returned.

        :raises TaskPending: if it has not ended.
        :raises TaskFailed, TaskCancelled, TaskLost: if it did not succeed.
        :raises TaskUnknown: if the task does not exist.
        :raises DeserializationError: if the result cannot be read here.
        """
        if self.exception is not None:
            raise self.exception
        return self.value
