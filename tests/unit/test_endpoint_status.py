"""What ``status`` shows."""

from __future__ import annotations

import datetime as dt
import io
import json
import time
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from rich.console import Console

from farcall_endpoint.agent.shell.fleet import Fleet
from farcall_endpoint.agent.shell.service import Agent, Clock, Rate
from farcall_endpoint.app.status import facts_of, lines, render, show_status, status_exit_code, watch_status
from farcall_endpoint.services.daemon import State
from farcall_endpoint.services.directory import AgentProcess

NOW = 1_000_000.0
AGENT = AgentProcess(4711, NOW - 7_300, "login1")


def shown(facts: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(render(facts, now=NOW))
    return out.getvalue()


def numbers(**more: Any) -> dict[str, Any]:
    return {"connected": True, "at": NOW - 1, "managers": 2, "workers": 64, "idle_workers": 3, **more}


def test_what_is_to_come_is_shown_as_such() -> None:
    said = numbers(environments=[{"environment": "sci", "state": "failed", "what": "denied", "retry_at": NOW + 250}])
    text = shown(facts_of("lab", State("Running", "e-1", AGENT, said, ""), now=NOW))
    assert "retry" in text
    assert "(in 4 min)" in text


def test_running_endpoint_is_shown_with_blocks() -> None:
    said = numbers(
        waiting_tasks=12_345,
        tasks_per_s=2_500.25,
        spool_bytes=3 * 2**20,
        problem="hidden, because it is the note",
        blocks=[
            {
                "block_id": "b1",
                "state": "running",
                "managers": 2,
                "workers": 64,
                "scheduler": "812 RUNNING",
                "since": NOW - 90,
            },
            {"block_id": "b2", "state": "waiting", "managers": 0, "workers": 0, "scheduler": "813 PENDING (Priority)"},
        ],
    )
    facts = facts_of("lab", State("Running", "e-1", AGENT, said, "a note"), now=NOW)
    assert json.loads(json.dumps(facts))["blocks"][1]["scheduler"] == "813 PENDING (Priority)"
    assert facts["pid"] == 4711
    text = shown(facts)
    for words in ("Running", "2 h 1 min", "12,345", "2,500.2", "3.0 MiB", "a note", "tasks per second", "1 min ago"):
        assert words in text, words
    assert "813 PENDING (Priority)" in text
    assert "hidden" not in text
    assert "━" not in text, "tables have the style of all commands"
    in_pipe = list(lines(facts, now=NOW))
    assert "status\tRunning" in in_pipe
    assert in_pipe[-2:] == [
        f"blocks\tb1\trunning\t{local(NOW - 90, '%H:%M:%S')} (1 min ago)\t2\t64\t812 RUNNING",
        "blocks\tb2\twaiting\t-\t0\t0\t813 PENDING (Priority)",
    ]
    written = text.splitlines()
    assert next(n for n, line in enumerate(written) if "name" in line) < next(
        n for n, line in enumerate(written) if "workers" in line
    )


def test_unknown_values_are_shown() -> None:
    facts = facts_of("lab", State("Running", "e-1", AGENT, numbers(quarantined_tasks=7, sites=["a", "b"]), ""), now=NOW)
    text = shown(facts)
    assert "quarantined tasks" in text
    assert "a, b" in text


def test_stopped_endpoint_is_shown() -> None:
    facts = facts_of("lab", State("Stopped", None, None, {}, ""), now=NOW)
    assert facts == {"name": "lab", "status": "Stopped", "endpoint_id": None, "pid": None, "hostname": None, "note": ""}
    assert "Stopped" in shown(facts)


def test_a_stale_status_is_noted() -> None:
    facts = facts_of("lab", State("Running", "e-1", AGENT, numbers() | {"at": NOW - 300}, ""), now=NOW)
    assert facts["note"] == "no status from the agent for 5 min"
    assert (facts["status"], status_exit_code(facts)) == ("Disconnected", 1), "the process is stopped or hangs"
    facts = facts_of("lab", State("Running", "e-1", AGENT, numbers() | {"at": NOW - 30}, ""), now=NOW)
    assert (facts["status"], facts["note"]) == ("Running", "no status from the agent for 30 s")


def test_a_status_is_not_stale_after_the_clock_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor after a laptop was suspended: monotonic time stops then, and the system's time does not."""
    clock = Clock()
    now = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: now)
    agent = cast(Agent, MagicMock(_clock=clock))
    facts = facts_of("lab", State("Running", "e-1", AGENT, Agent._status(agent), ""), now=now)
    assert (facts["reported_at"], facts["note"]) == (now, "")


def test_the_start_of_a_block_does_not_vary_with_the_float_of_the_offset() -> None:
    block = SimpleNamespace(started_at=5432.139794, kill_at=None, managers=[], handle=MagicMock(), image="")
    fleet = cast(Fleet, SimpleNamespace(_here={"block-1": block}))
    offsets = (1795629536.0, 1795629536.0000002)
    first, second = ([row["since"] for row in Fleet.describe(fleet, offset_s=offset)] for offset in offsets)
    assert first == second == [1795634968.14]


def test_square_brackets_are_not_read_as_markup() -> None:
    facts = {"blocks": [{"block_id": "b", "scheduler": "job [red]812[/red]"}], "note": "[bold]x[/bold]"}
    text = shown(facts)
    assert "[bold]x[/bold]" in text
    assert "job [red]812[/red]" in text


def test_rate_covers_the_last_ten_seconds() -> None:
    rate = Rate()
    assert rate.per_s(100, now=50.0) == 0.0
    assert rate.per_s(150, now=51.0) == 50.0
    for second in range(2, 30):
        latest = rate.per_s(150, now=50.0 + second)
    assert latest == 0.0


def test_exit_codes_tell_what_can_run() -> None:
    codes = {
        state: status_exit_code({"status": state})
        for state in ("Running", "Blocked", "Disconnected", "Stopped", "Initialized")
    }
    assert codes == {"Running": 0, "Blocked": 3, "Disconnected": 1, "Stopped": 1, "Initialized": 1}


def local(at: float, form: str) -> str:
    return dt.datetime.fromtimestamp(at).astimezone().strftime(form)


def test_times_are_absolute_and_relative() -> None:
    noon = dt.datetime.fromtimestamp(NOW).astimezone().replace(hour=12).timestamp()
    agent = AgentProcess(4711, noon - 90_000, "login1")
    facts = facts_of("lab", State("Running", "e-1", agent, numbers(at=noon - 120), ""), now=noon)
    said = dict(line.split("\t") for line in lines(facts, now=noon))
    assert said["started"] == f"{local(noon - 90_000, '%Y-%m-%d %H:%M:%S')} (1 d 1 h ago)"
    assert said["reported"] == f"{local(noon - 120, '%H:%M:%S')} (2 min ago)"
    assert facts["up_s"] == 90_000


def test_a_pipe_gets_lines_with_tabs() -> None:
    blocks = [{"block_id": "b1", "state": "running", "managers": 1, "scheduler": "7\nRUNNING", "workers": 2}]
    facts = facts_of("lab", State("Running", "e-1", AGENT, numbers(blocks=blocks), "a\tnote"), now=NOW)
    said = list(lines(facts, now=NOW))
    assert "status\tRunning" in said
    assert "note\ta note" in said
    assert "blocks\tb1\trunning\t1\t2\t7 RUNNING" in said


def test_watching_writes_changes_to_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    given = iter(
        facts_of(
            "lab", State("Running", "e-1", AGENT, numbers(idle_workers=idle, at=NOW + second), ""), now=NOW + second
        )
        for second, idle in enumerate([3, 3, 3, 2, 2, 3])
    )
    with pytest.raises(StopIteration):
        watch_status(lambda: next(given), console=Console(), as_json=True, wait=lambda _: None)
    assert [json.loads(line)["idle_workers"] for line in capsys.readouterr().out.splitlines()] == [3, 2, 3]


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_watching_redraws_on_a_terminal_that_can(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    shown: list[dict[str, Any]] = [{"status": "Running", "idle_workers": 3}, {"status": "Blocked"}]
    given = iter(shown)
    console = Console(file=out, width=80, force_terminal=True, _environ={"TERM": kind})
    with pytest.raises(StopIteration):
        watch_status(lambda: next(given), console=console, as_json=False, wait=lambda _: None)
    written = capsys.readouterr().out if kind == "dumb" else out.getvalue()
    assert "Running" in written
    assert "Blocked" in written.partition("Running")[2]


def test_the_status_is_json_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    show_status({"name": "lab", "status": "Running"}, console=Console(), as_json=True)
    assert json.loads(capsys.readouterr().out) == {"name": "lab", "status": "Running"}


_HOSTILE = "a\u202eb\x1b[2Jc\x9b\u2066"


def _hostile(value: Any) -> Any:
    """The same facts with hostile text in each string."""
    if isinstance(value, dict):
        return {key: _hostile(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_hostile(each) for each in value]
    return _HOSTILE if isinstance(value, str) else value


def test_no_text_of_the_status_steers_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"environment": "sci", "state": "failed", "what": "denied", "since": NOW}]
    said = numbers(
        names=["x", "y"], nested={"x": ["y"]}, isolation="x", environments=rows, running=rows, transfers=rows
    )
    facts = _hostile(facts_of("lab", State("Running", "e-1", AGENT, said, "note"), now=NOW))
    show_status(facts, console=Console(), as_json=False)
    show_status(facts, console=Console(), as_json=True)
    texts = [shown(facts), "\n".join(lines(facts, now=NOW)), capsys.readouterr().out]
    assert all("\\u202e" in text for text in texts)
    assert not [text for text in texts if set(text) & set("\u202e\x1b\x9b\u2066")]
