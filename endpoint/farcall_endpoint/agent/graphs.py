"""Graphs of an agent's tasks: what it checks and keeps of them, how they are now, and what their results tell. No I/O.

The agent sends a graph to one manager, as any task, and never looks at the calls in it. A graph may be hostile, and so
may be what is reported of one: the names and errors of its stages are those that a submitter wrote.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from farcall_common.environments import Environment
from farcall_common.errors import DeserializationError, ErrorRecord
from farcall_common.graphs import COLLECT, MAX_CALLS, MAX_STATES, Stage, StageState, is_graph, unpack_graph
from farcall_common.task_options import TaskOptions
from farcall_endpoint import outcomes
from farcall_endpoint.shared_memory import Bytes

if TYPE_CHECKING:
    from farcall_endpoint.agent.tasks import Task

MOST_ENVIRONMENTS: Final = 20
"""Of the stages of one graph. Each may be an image that a node has to prepare."""
MOST_REPORTED: Final = 20
"""Graphs in a report to the cloud, and in the endpoint's status."""
_MOST_STAGES: Final = 10
"""Of each graph there, one by one."""
_MOST_REPORTED_BYTES: Final = 16 * 1024
_MOST_KEPT: Final = 1000
"""Graphs of which the agent keeps how they are."""
_REPORT_PERIOD_S: Final = 1.0
_MOST_NAME: Final = 100
_MOST_TEXT: Final = 1000
_MOST_TRACEBACK: Final = 4000
_MOST_WORKERS: Final = 10
_MOST_DETAIL_BYTES: Final = 256 * 1024
_MOST_VALUE: Final = 5500
"""Characters of one value: 4 KiB as Base64, and some for its lines."""
_MOST_VALUES: Final = 88 * 1024
"""Characters of all values: 64 KiB as Base64."""
_MOST_COUNT: Final = 2**53
_RANKS: Final = {"failed": 0, "running": 1}
_STATES: Final = ("waiting", "running", "done", "failed", "cancelled", "skipped")
_ERROR_FIELDS: Final = {
    "code": _MOST_NAME,
    "fault": _MOST_NAME,
    "message": _MOST_TEXT,
    "hint": _MOST_TEXT,
    "exception_type": _MOST_NAME,
    "traceback": _MOST_TRACEBACK,
}


# -- acceptance --------------------------------------------------------------------------------------------------------


class StageNeeds(msgspec.Struct, frozen=True, array_like=True):
    """Options that stages of a graph have. ``label``: the first stage with them, as messages name it."""

    label: str
    options: TaskOptions


class GraphNeeds(msgspec.Struct, frozen=True, array_like=True):
    """What an agent has to know of a graph. The spool keeps it, so that a graph is read once.

    :param stages: how many it has.
    :param width: how many of its calls may run at the same time: those of its widest layer. A map counts as
        :data:`~farcall_common.graphs.MAX_CALLS`: how many calls it makes is known when it runs.
    :param once: whether one of its stages may not run twice: then the graph may not, either.
    :param walltime_s: the longest limit of a call; None if one has none.
    :param environments: those of its stages, the one of most stages first; None: the endpoint's default.
    :param options: different ones that its stages have of their own, as far as an endpoint may refuse them.
    """

    stages: int
    width: int
    once: bool
    walltime_s: float | None
    environments: tuple[Environment | None, ...]
    options: tuple[StageNeeds, ...] = ()


def read_graph(payload: Bytes, options: TaskOptions) -> GraphNeeds | ErrorRecord | None:
    """What an agent has to know of a task's graph, or why it cannot run; None if the payload is no graph.

    :param options: of the task. Those of a stage take their place.
    """
    if not is_graph(payload):
        return None
    try:
        graph = unpack_graph(payload, callees=len(options.callees))
    except DeserializationError as error:
        return outcomes.graph_invalid(_cut(error.record.message, _MOST_TEXT))
    stages = graph.stages
    counts: collections.Counter[Environment | None] = collections.Counter()
    needs: dict[tuple[object, ...], StageNeeds] = {}
    longest: StageNeeds | None = None
    once, limits = False, set[float | None]()
    for number, stage in enumerate(stages):
        if stage.function == COLLECT:
            continue
        own = stage.options
        if own is None:
            own = options
        elif own.callees:
            return of_stage(_label(number, stage), outcomes.graph_invalid("It names functions of its own to call."))
        else:
            environment = own.environment
            key = (environment, own.container is not None and environment is None, own.untranslatable() is not None)
            if key not in needs:
                label = _label(number, stage)
                if environment is not None and (problem := environment.problem()):
                    return of_stage(label, outcomes.environment_invalid(problem))
                needs[key] = StageNeeds(label, own)
            if (own.walltime_s or 0.0) > (0.0 if longest is None else longest.options.walltime_s or 0.0):
                longest = StageNeeds(_label(number, stage), own)
        counts[own.environment] += 1
        if len(counts) > MOST_ENVIRONMENTS:
            return outcomes.graph_invalid(f"The graph has stages in more than {MOST_ENVIRONMENTS} environments.")
        once = once or not own.idempotent
        limits.add(own.walltime_s)
    return GraphNeeds(
        len(stages),
        _width(stages),
        once,
        None if None in limits else max(filter(None, limits), default=None),
        tuple(environment for environment, _ in counts.most_common()) or (options.environment,),
        (*needs.values(), *([] if longest is None else [longest])),
    )


def _width(stages: Sequence[Stage]) -> int:
    """The calls of the widest layer, at most :data:`MAX_CALLS`. A layer has the stages with equally long ways to it."""
    layers: list[int] = []
    layer_of: list[int] = []
    for stage in stages:
        layer = 1 + max([layer_of[each.stage] for each in stage.inputs], default=-1)
        layer_of.append(layer)
        if layer == len(layers):
            layers.append(0)
        if stage.function != COLLECT:
            layers[layer] += MAX_CALLS if stage.is_map else 1
    return max(1, min(max(layers), MAX_CALLS))


def _label(number: int, stage: Stage) -> str:
    return f"Stage {number} ({_cut(stage.name, _MOST_NAME)})" if stage.name else f"Stage {number}"


def of_stage(label: str, record: ErrorRecord) -> ErrorRecord:
    """The record of a refusal, with the stage that it is about."""
    return dataclasses.replace(record, message=_cut(f"{label}: {record.message}", _MOST_TEXT))


def _cut(text: str, most: int) -> str:
    """A text as one line of limited length."""
    return "".join(each if each.isprintable() else " " for each in text[:most])


# -- while they run ----------------------------------------------------------------------------------------------------


class RunningGraphs:
    """The graphs that have not ended, and how they and other tasks that call functions are now, as their managers
    report it. Instants are epoch seconds.

    :param slots: workers of a manager, as far as that is known.
    """

    def __init__(self, *, slots: int) -> None:
        self._slots = slots
        self._graphs: dict[str, Task] = {}
        #: Of tasks that managers have.
        self._rows: dict[str, dict[str, Any]] = {}
        self._reported: list[dict[str, Any]] = []
        self._has_news = False
        self._report_at = 0.0
        #: Those with stages in several environments, while it is not known that a manager can run all of them.
        self.unchecked: set[Task] = set()

    def __bool__(self) -> bool:
        return bool(self._graphs or self._rows)

    def add(self, task: Task) -> None:
        """A graph was accepted."""
        self._graphs[task.task_id] = task
        if task.graph is not None and len(task.graph.environments) > 1:
            self.unchecked.add(task)

    def managers_changed(self) -> None:
        """What managers can run has changed."""
        mixed = (task for task in self._graphs.values() if task.graph and len(task.graph.environments) > 1)
        self.unchecked.update(mixed)

    def extra(self) -> collections.Counter[str]:
        """By the key of their environment, the slots that graphs can use beyond one for each."""
        found: collections.Counter[str] = collections.Counter()
        for task in self._graphs.values():
            if task.graph is not None and task.graph.width > 1:
                found[task.environment_key] += min(task.graph.width, self._slots) - 1
        return found

    def note(self, task: Task, states: Sequence[StageState]) -> None:
        """A manager has reported the stages of a task."""
        if task.task_id in self._rows or len(self._rows) < _MOST_KEPT:
            self._rows[task.task_id] = _row(task, states)
            self._has_news = True

    def stopped(self, task: Task) -> None:
        """A manager does not have a task any more."""
        self._rows.pop(task.task_id, None)

    def ended(self, task: Task) -> None:
        """A task has ended, or is not needed."""
        self._rows.pop(task.task_id, None)
        self._graphs.pop(task.task_id, None)
        self.unchecked.discard(task)

    def refresh(self, *, now: float) -> None:
        """Take what was noted into the next report, at most once a second."""
        if self._has_news and now >= self._report_at:
            self._has_news = False
            self._report_at = now + _REPORT_PERIOD_S
            self._reported = _reported(self._rows.values())

    def report(self) -> list[dict[str, Any]]:
        """Those that run, the oldest first, some at most."""
        return [row for row in self._reported if row["task_id"] in self._rows]

    def describe(self) -> list[dict[str, object]]:
        """The same as a table for the endpoint's status."""
        return [
            {
                "task_id": row["task_id"],
                **{state: row.get(state, 0) for state in ("waiting", "running", "done", "failed")},
                "calls": row["calls"],
                "ended_calls": row["ended"],
                "stages": [_shown(each) for each in row.get("stages", ()) if each["state"] in _RANKS],
            }
            for row in self.report()
        ]


def _row(task: Task, states: Sequence[StageState]) -> dict[str, Any]:
    """How a graph is: stages by state, calls, and the stages worth it. Of a sealed call no text."""
    counts = collections.Counter(each.state for each in states)
    chosen = sorted(states, key=lambda each: (_RANKS.get(each.state, 2), each.number))[:_MOST_STAGES]
    return {
        "task_id": task.task_id,
        **{state: counts[state] for state in _STATES if counts[state]},
        "calls": min(sum(each.calls for each in states), _MOST_COUNT),
        "ended": min(sum(each.ended for each in states), _MOST_COUNT),
        "stages": [
            {
                "number": each.number,
                "state": each.state if each.state in _STATES else "",
                "calls": each.calls,
                "ended": each.ended,
                **({"failed": each.failed} if each.failed else {}),
                **({"retries": each.retries} if each.retries else {}),
                **({} if each.started_at is None else {"started_at": each.started_at}),
                **({"name": _cut(each.name, _MOST_NAME)} if each.name and not task.answer_key else {}),
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


def _shown(stage: Mapping[str, Any]) -> str:
    """A stage in a few words."""
    name = f"{stage['number']} {stage.get('name', '')}".rstrip()
    calls = f" {stage['ended']}/{stage['calls']}" if stage["calls"] != 1 else ""
    return f"{name}{calls}{' failed' if stage['state'] == 'failed' else ''}"


# -- results -----------------------------------------------------------------------------------------------------------


def bounded(details: dict[str, Any]) -> dict[str, Any]:
    """The details of a task, with stages and values that are none left out, and long ones cut."""
    found = {name: value for name, value in details.items() if name not in ("stages", "values")}
    if states := _states(details.get("stages")):
        while len(msgspec.msgpack.encode(states)) > _MOST_DETAIL_BYTES:
            states = fewer(states)
        found["stages"] = states
    if values := _values(details.get("values")):
        found["values"] = values
    return found


def fewer(states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The states without the texts of their errors; if they have none, the half of them that is more interesting."""
    if any(len(each.get("error") or ()) > 1 for each in states):
        return [{**each, **({"error": _code(each["error"])} if each.get("error") else {})} for each in states]
    chosen = sorted(states, key=lambda each: (_RANKS.get(each["state"], 2), each["number"]))[: len(states) // 2]
    return [dict(each) for each in sorted(chosen, key=lambda each: each["number"])]


def _code(error: Mapping[str, Any]) -> dict[str, Any]:
    return {"code": error.get("code", "")}


def _states(value: object) -> list[dict[str, Any]]:
    try:
        states = msgspec.convert(value, list[StageState])
    except msgspec.ValidationError:
        return []
    found: list[dict[str, Any]] = []
    for each in states[:MAX_STATES]:
        if each.state in _STATES:
            kept = msgspec.structs.replace(
                each,
                name=_cut(each.name, _MOST_NAME),
                node=_cut(each.node, _MOST_NAME),
                workers=each.workers[:_MOST_WORKERS],
                error=None if each.error is None else _error(each.error),
            )
            found.append(msgspec.to_builtins(kept))
    return found


def _error(error: Mapping[str, Any]) -> dict[str, Any]:
    """An error record with the fields that tell what happened; of a traceback the end."""
    return {
        name: value[-most:] if name == "traceback" else value[:most]
        for name, most in _ERROR_FIELDS.items()
        if isinstance(value := error.get(name), str)
    }


def _values(value: object) -> dict[str, str]:
    found: dict[str, str] = {}
    size = 0
    for number, text in value.items() if isinstance(value, dict) else ():
        if isinstance(text, str) and len(text) <= _MOST_VALUE and str(number)[:7].isdigit():
            size += len(text)
            if size > _MOST_VALUES:
                break
            found[str(number)[:7]] = text
    return found
