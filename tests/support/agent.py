"""A driver of the agent's core: events by short names, and the actions of a turn by what they are about."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from farcall_common.event_log import UserBytes
from farcall_common.wire import (
    BlobGrant,
    BlobLocation,
    EndpointReport,
    FunctionSpec,
    HeldTask,
    RunTasks,
    TaskRef,
    TaskSpec,
    TaskTransition,
)
from farcall_endpoint.agent.core import actions as do
from farcall_endpoint.agent.core import events as ev
from farcall_endpoint.agent.core.agent import AgentCore
from farcall_endpoint.agent.core.demand import Demand
from farcall_endpoint.agent.core.reports import tasks_received
from farcall_endpoint.agent.core.tasks import SpooledTask, Task
from farcall_endpoint.agent.shell.spool import Spool
from farcall_endpoint.contracts.agent_manager import Progress


@dataclasses.dataclass(frozen=True)
class Turn:
    """The actions of a turn."""

    actions: Sequence[do.Action]
    write: do.WriteSpool
    orders: dict[str, Sequence[Task]]
    cancels: dict[str, list[str]]

    @classmethod
    def of(cls, actions: Sequence[do.Action]) -> Turn:
        return cls(
            actions,
            next((each for each in actions if isinstance(each, do.WriteSpool)), do.WriteSpool()),
            {each.manager_id: each.tasks for each in actions if isinstance(each, do.RunTasks)},
            {each.manager_id: list(each.task_ids) for each in actions if isinstance(each, do.CancelTasks)},
        )

    @property
    def functions(self) -> list[tuple[FunctionSpec, bytes]]:
        return list(self.write.functions)

    @property
    def accepted(self) -> list[Task]:
        return list(self.write.accepted)

    @property
    def redelivered(self) -> list[Task]:
        return list(self.write.redelivered)

    @property
    def fetched(self) -> list[Task]:
        return list(self.write.fetched)

    @property
    def starts(self) -> list[Task]:
        return list(self.write.starts)

    @property
    def finished(self) -> list[Task]:
        return list(self.write.finished)

    @property
    def dropped(self) -> list[int]:
        return list(self.write.dropped)

    @property
    def forgotten(self) -> list[int]:
        return list(self.write.forgotten)

    @property
    def fetches(self) -> list[Task]:
        return list(next((each.tasks for each in self.actions if isinstance(each, do.FetchPayloads)), ()))

    @property
    def uploads(self) -> list[tuple[Task, BlobGrant]]:
        return list(next((each.uploads for each in self.actions if isinstance(each, do.UploadResults)), ()))

    @property
    def acknowledged(self) -> list[Task]:
        return list(next((each.tasks for each in self.actions if isinstance(each, do.AcknowledgeTasks)), ()))

    @property
    def credit(self) -> int:
        return next((each.tasks for each in self.actions if isinstance(each, do.GiveCredit)), 0)

    @property
    def transitions(self) -> list[TaskTransition]:
        return list(next((each.transitions for each in self.actions if isinstance(each, do.ReportTransitions)), ()))

    @property
    def results(self) -> list[Task]:
        return list(next((each.tasks for each in self.actions if isinstance(each, do.ReportResults)), ()))

    @property
    def upload_requests(self) -> list[Task]:
        return list(next((each.tasks for each in self.actions if isinstance(each, do.RequestUploads)), ()))


class CoreDriver:
    """Collects events until :meth:`decide` gives them to the core as one turn."""

    def __init__(self, core: AgentCore) -> None:
        self.core = core
        self.events: list[ev.Event] = []

    def add(self, event: ev.Event) -> None:
        self.events.append(event)

    def decide(self, *, now: float) -> Turn:
        """The actions of the events since the last turn."""
        events, self.events = self.events, []
        return Turn.of(self.core.handle(events, now))

    def written(self, *, now: float) -> Turn:
        """The last turn is in the spool."""
        return Turn.of(self.core.handle([ev.SpoolWritten()], now))

    def fail_write(self, *, now: float, reason: str = "full") -> Turn:
        """The last turn could not be written."""
        return Turn.of(self.core.handle([ev.SpoolWriteFailed(reason)], now))

    def restore(
        self, tasks: Sequence[SpooledTask], functions: Sequence[str], signed: Sequence[FunctionSpec] = ()
    ) -> None:
        self.add(ev.Restored(tasks, functions, signed))

    def opened(self, forget: Sequence[TaskRef] = ()) -> None:
        self.add(ev.SessionOpened(forget))

    def closed(self) -> None:
        self.add(ev.SessionClosed())

    def drain(self) -> None:
        self.add(ev.DrainOrdered())

    def run_tasks(self, message: RunTasks, frames: Sequence[bytes]) -> None:
        self.add(tasks_received(message, frames))

    def accept(self, *specs: TaskSpec, payload: bytes = b"", functions: Iterable[str] = ()) -> None:
        known = [FunctionSpec(function_hash=each, name="f", body=0) for each in functions]
        bodies = UserBytes([b"" for _ in known])
        self.add(ev.TasksReceived(specs, UserBytes([payload for _ in specs]), known, bodies))

    def cancel(self, task_ids: Sequence[str]) -> None:
        self.add(ev.CancelRequested(task_ids))

    def recorded(self, refs: Sequence[TaskRef]) -> None:
        self.add(ev.ResultsRecorded(refs))

    def fetched(self, task: Task, payload: bytes) -> None:
        self.add(ev.PayloadFetched(task.task_id, task.seq, UserBytes([payload])))

    def fetch_failed(self, task: Task, reason: str) -> None:
        self.add(ev.FetchFailed(task.task_id, task.seq, reason))

    def granted(self, grant: BlobGrant) -> None:
        self.add(ev.BlobGranted(grant))

    def uploaded(self, task: Task, location: BlobLocation) -> None:
        self.add(ev.ResultUploaded(task.task_id, task.seq, location))

    def upload_failed(self, task: Task, reason: str, *, retryable: bool) -> None:
        self.add(ev.UploadFailed(task.task_id, task.seq, reason, retryable))

    def measured(self, room: tuple[int, int] | None) -> None:
        self.add(ev.SpoolMeasured(room))

    def nodes(self, *, refusal: str, problem: str) -> None:
        self.add(ev.NodesChanged(refusal, problem))

    def manager_registered(
        self,
        manager_id: str,
        *,
        slots: int,
        ends_at: float | None = None,
        node: str = "",
        types: Mapping[str, str] | None = None,
        image: str = "",
    ) -> None:
        self.add(ev.ManagerRegistered(manager_id, slots, ends_at, node, types or {}, image))

    def progress(self, manager_id: str, progress: Progress, results: Sequence[bytes] = ()) -> None:
        self.add(ev.ManagerProgress(manager_id, progress, UserBytes(results)))

    def manager_lost(self, manager_id: str, reason: str, *, expected: bool = False, unstarted: bool = False) -> None:
        self.add(ev.ManagerLost(manager_id, reason, expected, unstarted))

    def held(self) -> tuple[HeldTask, ...]:
        return self.core.held()

    def demand(self) -> Demand:
        return self.core.demand()

    def report(self) -> EndpointReport:
        return self.core.report()

    def next_deadline(self) -> float | None:
        return self.core.next_deadline()


def load(spool: Spool) -> tuple[list[Task], set[str]]:
    """The tasks of a spool as a core continues with them, and the hashes of its functions."""
    tasks, functions = spool.load()
    return [task.to_task() for task in tasks], functions
