"""Stages of graphs in the reports of agents: limits them to what stores and answers have room for. What is malformed is
left out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from farcall_common.graphs import (
    MAX_CALLS,
    MAX_STAGES,
    MAX_STATES,
    STAGE_CALLS,
    STAGE_RUN_S,
    STAGES,
    STATES,
    VALUES,
    StageState,
)
from farcall_common.store.model import GraphState
from farcall_common.wire import is_uuid

#: Bytes of the stages of one result, as JSON.
_MAX_STAGES_BYTES: Final = 384 * 1024
#: Stages of which the error is kept, and characters of one text there.
_MAX_ERRORS: Final = 20
_MAX_ERROR_TEXT: Final = 4096
#: Characters of one value in Base64, which has 4 KiB, and of all together: sixteen of these.
_MAX_VALUE: Final = 5464
_MAX_VALUES: Final = 16 * _MAX_VALUE
_BASE64: Final = re.compile("[A-Za-z0-9+/]*={0,2}")
_STAGE_NUMBER: Final = re.compile("0|[1-9][0-9]{0,4}")

#: Graphs of an endpoint's report, stages of each, and bytes of all together: each submit reads the report.
_MAX_GRAPHS: Final = 20
_MAX_SHOWN: Final = 20
_MAX_GRAPHS_BYTES: Final = 32 * 1024

_MAX_NAME: Final = 100
_MAX_WORKERS: Final = 8
#: Seconds of all calls together: a million of them for a month.
_MAX_RUN_S: Final = 3e12
#: A peer's clock may be off, but not so far that the time could not be stored or makes no sense.
MAX_SKEW_S: Final = 366 * 86400.0


def clean_graph(value: Mapping[str, Any], *, now: float) -> dict[str, Any]:
    """Return the valid part of the details about a graph: its stages, the number and seconds of its calls, and small
    values. In the details of a sealed call, only the numbers are readable. ``now`` is in epoch seconds."""
    states = list(_states(value.get(STAGES), now=now))
    cleaned: dict[str, Any] = {STAGES: _within(states, _MAX_STAGES_BYTES)} if states else {}
    calls = _count(value.get(STAGE_CALLS), MAX_CALLS) or min(sum(s.ended for s in states), MAX_CALLS)
    if states or calls:
        cleaned[STAGE_CALLS] = calls
        run_s = _seconds(value.get(STAGE_RUN_S)) or min(sum(s.run_s for s in states), _MAX_RUN_S)
        if states or run_s:  # without it, the time from start to end counts
            cleaned[STAGE_RUN_S] = run_s
    if values := _values(value.get(VALUES)):
        cleaned[VALUES] = values
    return cleaned


def clean_graphs(value: Any, *, now: float) -> tuple[GraphState, ...]:
    """The graphs of an endpoint's report: of each the stages that say most, without errors."""
    found: list[GraphState] = []
    room = _MAX_GRAPHS_BYTES
    for each in value[:_MAX_GRAPHS] if isinstance(value, list | tuple) else ():
        if not isinstance(each, Mapping) or not is_uuid(each.get("task_id", "")):
            continue
        states = [
            msgspec.structs.replace(state, error=None, workers=(), value_bytes=0)
            for state in _states(each.get("stages"), now=now)
        ]
        rank = {"failed": 0, "running": 1, "waiting": 2}
        chosen = sorted(states, key=lambda state: (rank.get(state.state, 3), state.number))[:_MAX_SHOWN]
        calls = _count(each.get("calls"), MAX_CALLS)
        ended = min(_count(each.get("ended"), MAX_CALLS), calls)
        graph = GraphState(each["task_id"], tuple(sorted(chosen, key=lambda state: state.number)), calls, ended)
        room -= len(msgspec.json.encode(graph))
        if room < 0:
            break
        if states or calls:
            found.append(graph)
    return tuple(found)


def _states(value: Any, *, now: float) -> Iterator[StageState]:
    """The stages of a list that can be read, each once."""
    seen: set[int] = set()
    errors = 0
    for each in value[:MAX_STATES] if isinstance(value, list | tuple) else ():
        if not isinstance(each, Mapping) or not isinstance(each.get("state"), str) or each["state"] not in STATES:
            continue
        number = each.get("number")
        if type(number) is not int or not 0 <= number < MAX_STAGES or number in seen:
            continue
        seen.add(number)
        calls = _count(each.get("calls", 1), MAX_CALLS)
        ended = min(_count(each.get("ended"), MAX_CALLS), calls)
        error = _error(each.get("error")) if errors < _MAX_ERRORS else None
        errors += error is not None
        yield StageState(
            number,
            _text(each.get("name"), _MAX_NAME),
            each["state"],
            calls=calls,
            ended=ended,
            failed=min(_count(each.get("failed"), MAX_CALLS), ended),
            retries=_count(each.get("retries"), MAX_CALLS),
            started_at=_time(each.get("started_at"), now=now),
            ended_at=_time(each.get("ended_at"), now=now),
            run_s=_seconds(each.get("run_s")),
            value_bytes=_count(each.get("value_bytes"), 2**53),
            workers=_workers(each.get("workers")),
            node=_text(each.get("node"), _MAX_NAME),
            error=error,
        )


def _within(states: list[StageState], most_bytes: int) -> list[dict[str, Any]]:
    """The states in JSON, the first that have room."""
    found: list[dict[str, Any]] = []
    for state in states:
        most_bytes -= len(msgspec.json.encode(state)) + 1
        if most_bytes < 0:
            break
        found.append(msgspec.to_builtins(state))
    return found


def _values(value: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    room = _MAX_VALUES
    for key, text in value.items() if isinstance(value, Mapping) else ():
        is_small = isinstance(text, str) and len(text) <= min(_MAX_VALUE, room)
        if is_small and isinstance(key, str) and _STAGE_NUMBER.fullmatch(key) and _BASE64.fullmatch(text):
            found[key] = text
            room -= len(text)
    return found


def _error(value: Any) -> dict[str, Any] | None:
    """The texts of an error record that people read."""
    if not isinstance(value, Mapping) or not isinstance(value.get("code"), str):
        return None
    names = ("code", "message", "hint", "exception_type", "traceback")
    # The end of a traceback is more useful than its start.
    return {name: _text(value[name], -_MAX_ERROR_TEXT) for name in names if isinstance(value.get(name), str)}


def _text(value: Any, most: int) -> str:
    """A text that PostgreSQL accepts: its first characters, or with a negative number its last."""
    if not isinstance(value, str):
        return ""
    text = value[:most] if most > 0 else value[most:]
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def _count(value: Any, most: int) -> int:
    return min(value, most) if type(value) is int and value > 0 else 0


def _seconds(value: Any) -> float:
    return min(float(value), _MAX_RUN_S) if _is_number(value) and value > 0 else 0.0


def _time(value: Any, *, now: float) -> float | None:
    return float(value) if _is_number(value) and abs(value - now) < MAX_SKEW_S else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**64


def _workers(value: Any) -> tuple[int, ...]:
    found = value[:_MAX_WORKERS] if isinstance(value, list | tuple) else ()
    return tuple(each for each in found if type(each) is int and 0 < each < 2**31)
