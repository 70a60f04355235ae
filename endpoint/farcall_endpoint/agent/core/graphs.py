"""Graphs of an agent's tasks: what it checks and keeps of them, and what their results tell of their stages. No I/O.

The agent sends a graph to one manager, as any task, and never looks at the calls in it. A graph may be hostile, and so
may be what is reported of one: the names and errors of its stages are those that a submitter wrote.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from farcall_common.environments import Environment
from farcall_common.errors import DeserializationError, ErrorRecord
from farcall_common.file_arguments import without_files
from farcall_common.graphs import (
    COLLECT,
    MAX_CALLS,
    MAX_STATES,
    STAGES,
    STATES,
    VALUES,
    Stage,
    StageState,
    is_graph,
    unpack_graph,
)
from farcall_common.task_options import TaskOptions
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.host.shared_memory import Bytes

MOST_ENVIRONMENTS: Final = 20
"""Maximum number of environments in one graph. Each may be an image that a node has to prepare."""
MOST_NAME: Final = 100
_MOST_TEXT: Final = 1000
_MOST_TRACEBACK: Final = 4000
_MOST_WORKERS: Final = 10
_MOST_DETAIL_BYTES: Final = 256 * 1024
_MOST_VALUE: Final = 5500
"""Characters of one value: 4 KiB as Base64, and some for its lines."""
_MOST_VALUES: Final = 88 * 1024
"""Characters of all values: 64 KiB as Base64."""
RANKS: Final = {"failed": 0, "running": 1}
_ERROR_FIELDS: Final = {
    "code": MOST_NAME,
    "fault": MOST_NAME,
    "message": _MOST_TEXT,
    "hint": _MOST_TEXT,
    "exception_type": MOST_NAME,
    "traceback": _MOST_TRACEBACK,
}


# -- acceptance --------------------------------------------------------------------------------------------------------


class StageNeeds(msgspec.Struct, frozen=True, array_like=True):
    """Options that stages of a graph have. ``label``: the first stage with them, as messages name it."""

    label: str
    options: TaskOptions


class GraphNeeds(msgspec.Struct, frozen=True, array_like=True):
    """Requirements of a graph that the agent needs. The spool keeps them, so that a graph is read once.

    :param stages: number of stages.
    :param width: number of calls that may run at the same time: those of its widest layer. A map counts as
        :data:`~farcall_common.graphs.MAX_CALLS`, because its number of calls is known when it runs.
    :param once: whether one of its stages, and therefore the graph, must not run twice.
    :param walltime_s: time limit of the task, else the longest limit of a call; None if a call has no limit.
    :param environments: environments of its stages, that of most stages first; None: the endpoint's default.
    :param options: different options of its stages, as far as an endpoint may refuse them.
    """

    stages: int
    width: int
    once: bool
    walltime_s: float | None
    environments: tuple[Environment | None, ...]
    options: tuple[StageNeeds, ...] = ()


def read_graph(payload: Bytes, options: TaskOptions, *, is_restricted: bool = False) -> GraphNeeds | ErrorRecord | None:
    """Read the requirements of a task's graph. Return an error if it cannot run, None if the payload is not a graph.

    :param options: options of the task. The options of a stage replace them, with two exceptions: a stage without an
        environment uses that of its function, and the task's time limit holds for the whole graph, too.
    :param is_restricted: whether the service has a list of functions for the endpoint. The service has checked the
        environments of these functions, but cannot see the environment of a stage, which could run other code.
    """
    payload = without_files(payload)
    if not is_graph(payload):
        return None
    try:
        graph = unpack_graph(payload, callees=len(options.callees))
    except DeserializationError as error:
        return outcomes.graph_invalid(cut(error.record.message, _MOST_TEXT))
    stages = graph.stages
    counts: collections.Counter[Environment | None] = collections.Counter()
    needs: dict[tuple[object, ...], StageNeeds] = {}
    longest: StageNeeds | None = None
    once, limits = False, set[float | None]()
    for number, stage in enumerate(stages):
        if stage.function == COLLECT:
            continue
        own, environment = stage.options, stage.environment(options.callees)
        if is_restricted and environment is not None and environment != options.callees[stage.function].environment:
            return of_stage(_label(number, stage), outcomes.environment_not_permitted(environment.label))
        if own is None:
            own = options
        elif own.callees:
            return of_stage(_label(number, stage), outcomes.graph_invalid("It names functions of its own to call."))
        else:
            named = own.environment
            unusable = own.untranslatable() is not None or own.unknown_resource() is not None
            key = (named, own.container is not None and named is None, unusable)
            if key not in needs:
                label = _label(number, stage)
                if named is not None and (problem := named.problem()):
                    return of_stage(label, outcomes.environment_invalid(problem))
                needs[key] = StageNeeds(label, own)
            if (own.walltime_s or 0.0) > (0.0 if longest is None else longest.options.walltime_s or 0.0):
                longest = StageNeeds(_label(number, stage), own)
        counts[environment] += 1
        if len(counts) > MOST_ENVIRONMENTS:
            return outcomes.graph_invalid(f"The graph has stages in more than {MOST_ENVIRONMENTS} environments.")
        once = once or not own.idempotent
        limits.add(own.walltime_s)
    walltime_s = options.walltime_s
    if walltime_s is None and None not in limits:
        walltime_s = max(filter(None, limits), default=None)
    return GraphNeeds(
        len(stages),
        _width(stages),
        once,
        walltime_s,
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
    return f"Stage {number} ({cut(stage.name, MOST_NAME)})" if stage.name else f"Stage {number}"


def of_stage(label: str, record: ErrorRecord) -> ErrorRecord:
    """The record of a refusal, with the stage that it is about."""
    return dataclasses.replace(record, message=cut(f"{label}: {record.message}", _MOST_TEXT))


def cut(text: str, most: int) -> str:
    """A text as one line of limited length."""
    return "".join(each if each.isprintable() else " " for each in text[:most])


# -- results -----------------------------------------------------------------------------------------------------------


def bounded(details: dict[str, Any]) -> dict[str, Any]:
    """The details of a task, with stages and values that are none left out, and long ones cut."""
    found = {name: value for name, value in details.items() if name not in (STAGES, VALUES)}
    if states := _states(details.get(STAGES)):
        while len(msgspec.msgpack.encode(states)) > _MOST_DETAIL_BYTES:
            states = fewer(states)
        found[STAGES] = states
    if values := _values(details.get(VALUES)):
        found[VALUES] = values
    return found


def fewer(states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The states without the texts of their errors; if they have none, the half of them that is more interesting."""
    if any(len(each.get("error") or ()) > 1 for each in states):
        return [{**each, **({"error": _code(each["error"])} if each.get("error") else {})} for each in states]
    chosen = sorted(states, key=lambda each: (RANKS.get(each["state"], 2), each["number"]))[: len(states) // 2]
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
        if each.state in STATES:
            kept = msgspec.structs.replace(
                each,
                name=cut(each.name, MOST_NAME),
                node=cut(each.node, MOST_NAME),
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
