"""Graphs that have not ended: how they are now, and the slots that they can use; and the progress of tasks that run. No
I/O.

The names of stages are those that a submitter wrote, and the text of progress is the function's; of a sealed call none
is reported.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from farcall_common.graphs import STATES, StageState
from farcall_common.progress import PROGRESS, Progress, read_progress
from farcall_endpoint.agent.core.graphs import MOST_NAME, RANKS, cut
from farcall_endpoint.agent.core.tasks import Stage, Task, TaskResult
from farcall_endpoint.contracts.agent_manager import ReportedProgress

MOST_REPORTED: Final = 20
"""Graphs in a report to the cloud, and in the endpoint's status."""
_MOST_STAGES: Final = 10
"""Stages of each reported graph that have an entry of their own."""
_MOST_REPORTED_BYTES: Final = 16 * 1024
MOST_PROGRESS: Final = 100
"""Tasks whose progress is in a report to the cloud."""
_MOST_PROGRESS_BYTES: Final = 8 * 1024
"""Maximum total size of the progress texts in a report."""
_MOST_KEPT: Final = 1000
"""Graphs whose state the agent keeps."""
_REPORT_PERIOD_S: Final = 1.0
_MOST_COUNT: Final = 2**53


class RunningGraphs:
    """The graphs that have not ended, and how they and other tasks that call functions are now, as their managers
    report it. Instants are epoch seconds.

    :param slots: workers of a manager, as far as that is known.
    """

    def __init__(self, *, slots: int) -> None:
        self._slots = slots
        #: Graphs, and other tasks of which something was reported.
        self.tasks: dict[str, Task] = {}
        #: Of those that managers have.
        self._rows: dict[str, dict[str, Any]] = {}
        self._reported: list[dict[str, Any]] = []
        #: Of those that managers have and that have said something.
        self._progress: dict[str, tuple[Task, Progress]] = {}
        self._reported_progress: list[dict[str, Any]] = []
        self._has_news = False
        self._report_at = 0.0
        #: Those with stages in several environments, while it is not known that a manager can run all of them.
        self.unchecked: set[Task] = set()

    def add(self, task: Task) -> None:
        """A graph was accepted."""
        self.tasks[task.task_id] = task
        if task.graph is not None and len(task.graph.environments) > 1:
            self.unchecked.add(task)

    def managers_changed(self) -> None:
        """Check again which graphs can run: the environments of managers have changed."""
        mixed = (task for task in self.tasks.values() if task.graph and len(task.graph.environments) > 1)
        self.unchecked.update(mixed)

    def extra(self) -> collections.Counter[str]:
        """Count the slots that graphs can use beyond one per graph, by the key of the graph's environment."""
        found: collections.Counter[str] = collections.Counter()
        for task in self.tasks.values():
            if task.graph is not None and task.graph.width > 1 and task.stage is not Stage.STAGING:
                found[task.environment_key] += min(task.graph.width, self._slots) - 1
        return found

    def note(self, task: Task, states: Sequence[StageState]) -> None:
        """A manager has reported the stages of a task."""
        if task.task_id in self._rows or len(self._rows) < _MOST_KEPT:
            self.tasks[task.task_id] = task
            self._rows[task.task_id] = _row(task, states)
            self._has_news = True

    def note_progress(self, task: Task, reported: ReportedProgress) -> None:
        """A manager has reported how far a task is."""
        if task.task_id in self._progress or len(self._progress) < _MOST_KEPT:
            self.tasks[task.task_id] = task
            progress = Progress(reported.done, reported.total, reported.text, reported.at)
            self._progress[task.task_id] = task, progress
            self._has_news = True

    def with_progress(self, task: Task, result: TaskResult) -> TaskResult:
        """The result of a task, with its last progress if its manager could not report that with the result."""
        known = self._progress.get(task.task_id)
        if known is not None and PROGRESS not in (result.details or {}):
            result.details = {**(result.details or {}), PROGRESS: known[1].to_json()}
        return result

    def stopped(self, task: Task) -> None:
        """A manager does not have a task any more."""
        for known in (self._rows, self._progress):
            if known.pop(task.task_id, None) is not None:
                self._has_news = True  # there is room in the report for others

    def ended(self, task: Task) -> None:
        """A task has ended, or is not needed."""
        self.stopped(task)
        self.tasks.pop(task.task_id, None)
        self.unchecked.discard(task)

    def refresh(self, *, now: float) -> None:
        """Take what was noted into the next report, at most once a second."""
        if self._has_news and now >= self._report_at:
            self._has_news = False
            self._report_at = now + _REPORT_PERIOD_S
            self._reported = _reported(self._rows.values())
            self._reported_progress = _progress_rows(self._progress.values())

    def report(self) -> list[dict[str, Any]]:
        """Return at most :data:`MOST_REPORTED` running graphs, the oldest first."""
        return [row for row in self._reported if row["task_id"] in self._rows]

    def progress(self) -> list[dict[str, Any]]:
        """Return the progress of at most :data:`MOST_PROGRESS` running tasks, the first to report first."""
        return [row for row in self._reported_progress if row["task_id"] in self._progress]

    def describe(self) -> list[dict[str, object]]:
        """The same as a table for the endpoint's status."""
        return [
            {
                "task_id": row["task_id"],
                **{state: row.get(state, 0) for state in ("waiting", "running", "done", "failed")},
                "calls": row["calls"],
                "ended_calls": row["ended"],
                "stages": [_shown(each) for each in row.get("stages", ()) if each["state"] in RANKS],
            }
            for row in self.report()
        ]

    def describe_progress(self) -> list[dict[str, object]]:
        """How far tasks are that run, as a table for the endpoint's status; some at most."""
        return [
            {"task_id": row["task_id"], "progress": str(read_progress(row)), "said_at": row["at"]}
            for row in self.progress()[:MOST_REPORTED]
        ]


def _row(task: Task, states: Sequence[StageState]) -> dict[str, Any]:
    """How a graph is: stages by state, calls, and the stages worth it. Of a sealed call no text."""
    counts = collections.Counter(each.state for each in states)
    chosen = sorted(states, key=lambda each: (RANKS.get(each.state, 2), each.number))[:_MOST_STAGES]
    return {
        "task_id": task.task_id,
        **{state: counts[state] for state in sorted(STATES) if counts[state]},
        "calls": min(sum(each.calls for each in states), _MOST_COUNT),
        "ended": min(sum(each.ended for each in states), _MOST_COUNT),
        "stages": [
            {
                "number": each.number,
                "state": each.state if each.state in STATES else "",
                "calls": each.calls,
                "ended": each.ended,
                **({"failed": each.failed} if each.failed else {}),
                **({"retries": each.retries} if each.retries else {}),
                **({} if each.started_at is None else {"started_at": each.started_at}),
                **({"name": cut(each.name, MOST_NAME)} if each.name and not task.answer_key else {}),
            }
            for each in sorted(chosen, key=lambda each: each.number)
        ],
    }


def _reported(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows for a report of limited size: the stages are left out of those that exceed it."""
    found: list[dict[str, Any]] = []
    size_bytes = 0
    for row in list(rows)[:MOST_REPORTED]:
        size_bytes += len(msgspec.msgpack.encode(row))
        if size_bytes > _MOST_REPORTED_BYTES:
            row = {name: value for name, value in row.items() if name != "stages"}
        found.append(row)
    return found


def _progress_rows(known: Iterable[tuple[Task, Progress]]) -> list[dict[str, Any]]:
    """Rows for a report of limited size: without texts of sealed calls, and where they would exceed it."""
    found: list[dict[str, Any]] = []
    size_bytes = 0
    for task, progress in itertools.islice(known, MOST_PROGRESS):
        row = {"task_id": task.task_id, **progress.to_json()}
        if "text" in row:
            size_bytes += len(row["text"].encode())
            if task.answer_key or size_bytes > _MOST_PROGRESS_BYTES:
                del row["text"]
        found.append(row)
    return found


def _shown(stage: Mapping[str, Any]) -> str:
    """A stage in a few words."""
    name = f"{stage['number']} {stage.get('name', '')}".rstrip()
    calls = f" {stage['ended']}/{stage['calls']}" if stage["calls"] != 1 else ""
    return f"{name}{calls}{' failed' if stage['state'] == 'failed' else ''}"
