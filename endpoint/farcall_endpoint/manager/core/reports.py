"""Reports of a manager to its agent: results within the window that the agent has room for, and other news."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from farcall_common.progress import PROGRESS
from farcall_common.wire import TaskState
from farcall_endpoint.contracts.agent_manager import (
    FIRST_WINDOW_BYTES,
    CpuSharesStatus,
    Died,
    EnvironmentStatus,
    Finished,
    GraphProgress,
    Progress,
    ReportedProgress,
    Started,
)
from farcall_endpoint.contracts.output import Printed
from farcall_endpoint.host.shared_memory import Frame
from farcall_endpoint.manager.core.actions import Report
from farcall_endpoint.manager.core.events import Instant, Job, Outcome
from farcall_endpoint.manager.core.task_progress import ProgressOfTasks

_REPORT_PERIOD_S: Final = 1.0
"""Longest time between two reports; a local agent also sees the manager die."""
_ENVIRONMENTS_PERIOD_S: Final = 0.25
"""Shortest time between two reports of environments."""


class Reports:
    """Pending reports, and the results that the agent has not taken yet.

    ``due_at``: when the next report is due without news. ``changed``: the workers have changed since the last report.
    """

    def __init__(self) -> None:
        self.due_at = 0.0
        self.changed = False
        self._finished: list[Finished] = []
        self._results: list[Frame] = []
        self._result_bytes = 0  # of those
        self._untaken_bytes = 0  # of sent results that the agent has not taken yet
        self._window_bytes = FIRST_WINDOW_BYTES
        self._died: list[Died] = []
        self._last_progress: list[ReportedProgress] = []  # of the tasks of those
        self._started: list[Started] = []
        self._graphs: dict[str, GraphProgress] = {}
        self._offered: tuple[tuple[str, int], ...] | None = None  # if it has changed
        self._environments: tuple[EnvironmentStatus, ...] | None = None  # if they were not reported yet
        self._known_environments: tuple[EnvironmentStatus, ...] = ()
        self.environments_at = 0.0
        #: Tasks with links to copies of files that have ended; their taker clears it.
        self.ended_with_links: list[Job] = []
        #: Tasks with a target that have ended, each with how long its function ran; None: it did not end by itself.
        #: Their taker clears it.
        self.ended_with_target: list[tuple[Job, float | None]] = []
        #: The ids of tasks that the agent has asked to give back.
        self.returned: list[str] = []
        self._cpu_shares: CpuSharesStatus | None = None  # if they have changed
        self.task_progress = ProgressOfTasks()

    def finish(
        self,
        job: Job,
        state: TaskState,
        error: Mapping[str, Any] | None,
        *,
        result: Frame = b"",
        started_at: float | None = None,
        ended_at: float | None = None,
        details: dict[str, Any] | None = None,
        is_retried: bool = False,
        output: tuple[Printed, bytes] | None = None,
        parts: Sequence[Frame] | None = None,
        pid: int = 0,
        node: str = "",
        start_s: float = 0.0,
    ) -> None:
        """A task has ended, or a call, which is a matter of its owner."""
        if job.owner is not None:
            job.owner.ended(
                job,
                Outcome(
                    state=state,
                    error=None if error is None else dict(error),
                    parts=() if parts is None else parts,
                    started_at=started_at,
                    ended_at=ended_at,
                    is_retried=is_retried,
                    output=output,
                    pid=pid,
                    node=node,
                ),
            )
            return
        if job.read_dir:
            self.ended_with_links.append(job)
        if job.order.target is not None:
            run_s = None if started_at is None or ended_at is None else ended_at - started_at
            self.ended_with_target.append((job, run_s))
        if self.task_progress.last and (last := self.task_progress.ended(job.order.task_id)) is not None:
            details = {**(details or {}), PROGRESS: last.to_json()}
        frame = None
        if state is TaskState.SUCCESS or result:
            frame = len(self._results)
            self._results.append(result)
            self._result_bytes += len(result)
        record = dict(error) if error is not None else None
        finished = Finished(
            job.order.task_id, state, frame, record, started_at, ended_at, details, is_retried=is_retried
        )
        if output is not None:
            finished = msgspec.structs.replace(finished, printed=output[0], output=len(self._results))
            self._results.append(output[1])
            self._result_bytes += len(output[1])
        if start_s:
            finished = msgspec.structs.replace(finished, start_s=start_s)
        self._finished.append(finished)

    def died(self, job: Job, died: Died) -> None:
        """A worker died with a task."""
        if job.owner is not None:
            job.owner.died(job, died)
        else:
            if job.read_dir:
                self.ended_with_links.append(job)
            if job.order.target is not None:
                self.ended_with_target.append((job, None))
            if (last := self.task_progress.ended(died.task_id)) is not None:  # how far it was when it crashed
                self._last_progress.append(ReportedProgress(died.task_id, **vars(last)))
            self._died.append(died)

    def started(self, job: Job, at: float) -> None:
        """A task has been running for a while, since this epoch second."""
        if job.owner is not None:
            job.owner.started(job, at)
        else:
            self._started.append(Started(job.order.task_id, at))

    def graph(self, progress: GraphProgress) -> None:
        """How a graph is now."""
        self._graphs[progress.task_id] = progress

    def offer(self, calls: tuple[tuple[str, int], ...]) -> None:
        """Other managers may take over these calls, by environment."""
        self._offered = calls

    def cpu_shares(self, status: CpuSharesStatus) -> None:
        """How the latency classes are now."""
        self._cpu_shares = status

    def passed(self, size_bytes: int) -> None:
        """Bytes of calls go to the agent, too; it has the same room for them."""
        self._untaken_bytes += size_bytes

    def environments(self, statuses: Callable[[], tuple[EnvironmentStatus, ...]], now: Instant) -> None:
        """Look at the environments, which is due at ``environments_at``, and report them if they have changed."""
        self.environments_at = now.mono + _ENVIRONMENTS_PERIOD_S
        if (found := statuses()) != self._known_environments:
            self._environments = self._known_environments = found

    def taken(self, size_bytes: int, window_bytes: int) -> None:
        """The agent has taken results."""
        self._untaken_bytes -= size_bytes
        self._window_bytes = window_bytes

    @property
    def is_window_full(self) -> bool:
        """Whether the results fill the room that the agent has for them."""
        return self._untaken_bytes + self._result_bytes >= self._window_bytes

    def is_due(self, now: float, *, everything: bool) -> bool:
        """Whether there is something to report: changes at once, and the number of workers each second.

        :param everything: as of :meth:`make`.
        """
        if self._finished and (everything or not self.is_window_full or self._results_within_window()[0] > 0):
            return True
        has_news = self._died or self._started or self._graphs or self.changed or self._environments is not None
        has_news = has_news or self._cpu_shares is not None or bool(self.returned)
        return bool(has_news) or self._offered is not None or now >= self.due_at or now >= self.task_progress.due_at

    def make(self, now: float, *, workers: int, idle_workers: int, problem: str, everything: bool) -> Report:
        """The next report. Results for which the agent has no room stay here, unless it must have ``everything``."""
        finished, results = self._finished, self._results
        if everything or not self.is_window_full:
            self._finished, self._results = [], []
        else:
            count, results = self._results_within_window()
            sent = len(results)
            self._finished, finished = [_moved(each, sent) for each in finished[count:]], finished[:count]
            self._results = self._results[sent:]
        self.due_at = now + _REPORT_PERIOD_S
        self.changed = False
        progress = Progress(
            finished=tuple(finished),
            died=tuple(self._died),
            started=tuple(self._started),
            workers=workers,
            idle_workers=idle_workers,
            problem=problem,
            environments=self._environments,
        )
        if self._graphs:
            progress = msgspec.structs.replace(progress, graphs=tuple(self._graphs.values()))
            self._graphs = {}
        if self._offered is not None:
            progress = msgspec.structs.replace(progress, waiting_calls=self._offered)
            self._offered = None
        if self._cpu_shares is not None:
            progress = msgspec.structs.replace(progress, cpu_shares=self._cpu_shares)
            self._cpu_shares = None
        if self.returned:
            progress = msgspec.structs.replace(progress, returned=tuple(self.returned))
            self.returned = []
        if self._last_progress or now >= self.task_progress.due_at:
            said = (*self._last_progress, *self.task_progress.due(now))
            progress = msgspec.structs.replace(progress, progress=said)
            self._last_progress = []
        size_bytes = sum(map(len, results))
        self._untaken_bytes += size_bytes
        self._result_bytes -= size_bytes
        self._died, self._started, self._environments = [], [], None
        return Report(progress, results)

    def _results_within_window(self) -> tuple[int, list[Frame]]:
        """How many finished tasks may be reported, and their results; the last one may exceed the window."""
        results: list[Frame] = []
        room_bytes = self._window_bytes - self._untaken_bytes
        for count, each in enumerate(self._finished):
            bodies = [self._results[body] for body in (each.result, each.output) if body is not None]
            if bodies and room_bytes <= 0:
                return count, results
            results += bodies
            room_bytes -= sum(map(len, bodies))
        return len(self._finished), results


def _moved(finished: Finished, sent: int) -> Finished:
    """Return a report with new positions of its bodies, after ``sent`` bodies before them were sent."""
    result, output = (None if body is None else body - sent for body in (finished.result, finished.output))
    return msgspec.structs.replace(finished, result=result, output=output)
