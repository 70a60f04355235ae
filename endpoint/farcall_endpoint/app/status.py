"""Status of an endpoint for people and for programs: the numbers that the agent writes each second.

The agent may report keys that are unknown here. A key's suffix tells how to write its value (``_s``, ``_bytes``,
``_at``, ``_per_s``), a list of mappings becomes a table.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NoReturn

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from farcall_common.exit_codes import FAILED, UNHEALTHY
from farcall_common.plain_text import escaped, plain
from farcall_endpoint.services.daemon import State

_OURS: Final = ("name", "status", "endpoint_id", "pid", "hostname", "started_at", "reported_at", "note")
_HIDDEN: Final = ("connected", "connection_problem", "problem", "blocked", "known_environments", "at")
_AGES: Final = ("up_s", "reported_at")
"""Facts that change with the time alone."""
_NOT_WRITTEN: Final = ("up_s",)
"""For programs only: the time of the start says it."""
_ORDER: Final = (
    "managers",
    "workers",
    "idle_workers",
    "waiting_tasks",
    "unfinished_tasks",
    "finished_tasks",
    "tasks_per_s",
)
_COLUMNS: Final = ("block_id", "state", "since", "managers", "workers", "scheduler")
_STALE_S: Final = 10.0
_HUNG_S: Final = 60.0
"""An agent that has not written its status for so long does not run tasks either."""
_COLOURS: Final = {
    "Running": "green",
    "Blocked": "red",
    "Disconnected": "red",
    "Stopped": "yellow",
    "Initialized": "yellow",
}
_EXIT_CODES: Final = {"Running": 0, "Blocked": UNHEALTHY}
_WATCH_S: Final = 1.0
"""The agent writes its status each second."""


def facts_of(name: str, state: State, *, now: float) -> dict[str, Any]:
    """All facts as JSON values. ``now`` is in epoch seconds."""
    facts: dict[str, Any] = {
        "name": name,
        "status": state.state,
        "endpoint_id": state.endpoint_id,
        "pid": state.agent.pid if state.agent else None,
        "hostname": state.agent.hostname if state.agent else None,
        "note": state.note,
    }
    if state.agent is not None:
        facts["started_at"] = state.agent.started_at
        facts["up_s"] = round(now - state.agent.started_at, 1)
        reported_at = state.numbers.get("at")
        if isinstance(reported_at, int | float):
            facts["reported_at"] = reported_at
            if now - reported_at > _STALE_S and not facts["note"]:
                facts["note"] = f"no status from the agent for {_duration(now - reported_at)}"
            if now - reported_at > _HUNG_S and facts["status"] in ("Running", "Blocked"):
                facts["status"] = "Disconnected"
    return facts | {key: value for key, value in state.numbers.items() if key not in _HIDDEN}


def status_exit_code(facts: Mapping[str, Any]) -> int:
    """The exit code of ``status``: 0 if the endpoint runs, 3 if it is connected and can run nothing, else 1."""
    return _EXIT_CODES.get(str(facts["status"]), FAILED)


def show_status(facts: Mapping[str, Any], *, console: Console, as_json: bool) -> None:
    """Write the facts: as JSON, as tables on a terminal, as lines with tabs to a pipe."""
    if as_json:
        typer.echo(escaped(json.dumps(facts, indent=2)))
    elif sys.stdout.isatty():
        console.print(render(facts, now=time.time()))
    else:
        for line in lines(facts, now=time.time()):
            typer.echo(line)


def watch_status(
    read: Callable[[], Mapping[str, Any]],
    *,
    console: Console,
    as_json: bool,
    wait: Callable[[float], object] = time.sleep,
) -> NoReturn:
    """Show the status until interrupted: again and again on a terminal that can redraw; else each time when more has
    changed than the age of something, as a line of JSON or as lines with an empty one behind them."""
    if sys.stdout.isatty() and not (as_json or console.is_dumb_terminal):
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                live.update(render(read(), now=time.time()), refresh=True)
                wait(_WATCH_S)
    last: Mapping[str, Any] | None = None
    while True:
        facts = read()
        lasting = {key: value for key, value in facts.items() if key not in _AGES}
        if lasting != last:
            text = escaped(json.dumps(facts)) if as_json else "\n".join([*lines(facts, now=time.time()), ""])
            typer.echo(text)
            sys.stdout.flush()
        last = lasting
        wait(_WATCH_S)


def render(facts: Mapping[str, Any], *, now: float) -> RenderableType:
    """The facts for a person."""
    single, listed = _parts(facts)
    rows = Table(show_header=False, box=None, pad_edge=False)
    for key, value in single.items():
        style = _COLOURS.get(str(value), "") if key == "status" else ""
        rows.add_row(_words(key), Text(_value(key, value, now), style=style))
    return Group(rows, *(_table(key, value, now) for key, value in listed.items()))


def lines(facts: Mapping[str, Any], *, now: float) -> Iterator[str]:
    """The facts for a pipe, with tabs between the cells: a name and a value on each line, then the rows of tables, each
    with the name of its table first."""
    single, listed = _parts(facts)
    for key, value in single.items():
        yield f"{_words(key)}\t{_one_line(_value(key, value, now))}"
    for key, items in listed.items():
        for row in _rows(items, now):
            yield "\t".join((_words(key), *map(_one_line, row)))


def _parts(facts: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[Mapping[str, Any]]]]:
    """The single facts in their order, and the tables."""
    listed = {key: value for key, value in facts.items() if _is_table(value)}
    single = _ordered((key for key in facts if key not in listed and key not in _NOT_WRITTEN), (*_OURS, *_ORDER))
    return {key: facts[key] for key in single}, listed


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _table(key: str, items: list[Mapping[str, Any]], now: float) -> Table:
    table = Table(title=f"\n{_words(key)}", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in _columns(items):
        table.add_column(_words(column))
    for row in _rows(items, now):
        table.add_row(*map(Text, row))
    return table


def _columns(items: list[Mapping[str, Any]]) -> list[str]:
    return _ordered(dict.fromkeys(key for item in items for key in item), _COLUMNS)


def _rows(items: list[Mapping[str, Any]], now: float) -> Iterator[list[str]]:
    columns = _columns(items)
    return ([_value(column, item.get(column), now) for column in columns] for item in items)


def _is_table(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _ordered(keys: Iterable[str], first: tuple[str, ...]) -> list[str]:
    known = list(keys)
    return [key for key in first if key in known] + [key for key in known if key not in first]


def _words(key: str) -> str:
    for suffix in ("_per_s", "_bytes", "_at", "_s"):
        if key.endswith(suffix) and key != suffix:
            return key.removesuffix(suffix).replace("_", " ") + (" per second" if suffix == "_per_s" else "")
    return key.replace("_", " ")


def _value(key: str, value: object, now: float) -> str:
    if value in (None, "", [], {}):
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return plain(", ".join(map(str, value)) if isinstance(value, list) else str(value))
    if key.endswith("_per_s"):
        return f"{value:,.1f}"
    if key.endswith("_bytes"):
        return _size(value)
    if key.endswith("_at") or key == "since":
        return _moment(value, now)
    if key.endswith("_s"):
        return _duration(value)
    return str(value) if key == "pid" else f"{value:,}"


def _moment(at: float, now: float) -> str:
    """A local time, with its date if that is another day, and how long ago it was, or how far ahead it is."""
    local, today = (dt.datetime.fromtimestamp(each).astimezone() for each in (at, now))
    written = f"{local:%H:%M:%S}" if local.date() == today.date() else f"{local:%Y-%m-%d %H:%M:%S}"
    return f"{written} (in {_duration(at - now)})" if at > now else f"{written} ({_duration(now - at)} ago)"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86_400)
    if hours == 0:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if days == 0 else f"{days} d {hours % 24} h"


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
