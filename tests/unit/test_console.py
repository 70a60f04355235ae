"""What command lines have in common: tables, ids, groups of commands."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from farcall_common.console import duration, new_group, short_ids, show_fields, show_table

IDS = ("01a20336-1234-7abc-8000-000000000001", "01a20336-1234-7abd-8000-000000000002")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Shows a table on a terminal, and returns its lines."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")

    def show(*arguments: Any, columns: int = 80, **options: Any) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        with contextlib.redirect_stdout(Terminal()) as terminal:
            show_table(*arguments, **options)
        return terminal.getvalue().splitlines()

    return show


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_ids_are_whole_on_one_line_in_any_terminal(columns: int, on_terminal: Callable[..., list[str]]) -> None:
    lines = on_terminal(("task", "group", "error"), [(IDS[0], IDS[1], "word " * 40)], columns=columns)
    assert lines[1].startswith(f"{IDS[0]}  {IDS[1]}  word")


def test_a_long_last_column_is_cut_off_at_the_edge_or_left_out(on_terminal: Callable[..., list[str]]) -> None:
    rows = [(IDS[0], "word " * 40)]
    heading, row = on_terminal(("task", "error"), rows, cut=True)
    assert (heading.split(), row[-1], len(row)) == (["task", "error"], "…", 80)
    assert on_terminal(("task", "error"), rows, cut=True, columns=40) == [f"{'task':36}", IDS[0]]


def test_a_table_in_a_pipe_is_lines_with_tabs(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(("task", "error"), [(IDS[0], "two\nlines\there"), (IDS[1], None)], title="Tasks", cut=True)
    show_fields({"state": "failed", "nothing": None, "types": ["uv", "venv"], "packages": {"dill": "0.4", "x": 1}})
    fields = "state\tfailed\ntypes\tuv, venv\npackages\tdill 0.4, x 1\n"
    assert capsys.readouterr().out == f"{IDS[0]}\ttwo lines here\n{IDS[1]}\t\n{fields}"


def test_short_ids_are_beginnings_that_no_other_id_has() -> None:
    assert short_ids(IDS) == {IDS[0]: "01a20336-1234-7abc", IDS[1]: "01a20336-1234-7abd"}
    assert short_ids([IDS[0]]) == {IDS[0]: "01a20336"}
    assert short_ids([IDS[0], IDS[0]], least=13) == {IDS[0]: "01a20336-1234"}
    assert short_ids([]) == {}


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, ""), (0.0123, "12 ms"), (1.23, "1.2 s"), (59, "59 s"), (63, "1 min 3 s"), (3000, "50 min"),
     (7500, "2 h 5 min"), (90_000, "1 d 1 h")],
)  # fmt: skip
def test_durations(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


app = new_group("Things.")


@app.callback()
def _app() -> None: ...


@app.command("list")
def list_(flag: Annotated[bool, typer.Option("--flag")] = False) -> None:
    """List things."""
    typer.echo(f"things {flag}")


def test_ls_and_list_are_one_command_with_one_entry_in_the_help() -> None:
    assert CliRunner().invoke(app, ["ls", "--flag"]).output == "things True\n"
    assert CliRunner().invoke(app, ["list"]).output == "things False\n"
    shown = CliRunner().invoke(app, []).output
    assert "list" in shown
    assert "│ ls" not in shown
