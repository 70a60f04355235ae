"""The command line as a whole: help, usage errors, start-up cost, completion."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farcall.cli._app import COMMANDS, app
from farcall.cli._arguments import remember
from tests.unit.start_cost import calls_of

TALKERS = ("httpx", "zmq", "dill", "asyncio")


@pytest.mark.parametrize("name", COMMANDS)
def test_listed_help_is_the_help_of_the_command(name: str) -> None:
    said = COMMANDS[name].help.rstrip(".")
    assert said
    assert (COMMANDS[name].load(name).help or "").startswith(said)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json(name: str) -> None:
    command = COMMANDS[name].load(name)
    leaves = list(command.commands.values()) if hasattr(command, "commands") else [command]
    assert leaves
    for leaf in leaves:
        assert "--json" in {option for parameter in leaf.params for option in parameter.opts}, leaf.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nonsense",), "No such command 'nonsense'"),
        (("--nonsense",), "No such option"),
        (("tasks", "show"), "Missing argument"),
        (("tasks", "ls", "--state", "asleep"), "'asleep'"),
    ],
)
def test_a_usage_error_is_one_line_with_a_hint(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, arguments, prog_name="farcall")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: [COMMAND_LINE] ")
    assert message in result.stderr
    assert "--help` lists the options" in result.stderr
    assert result.stderr.count("\n") == 1
    told = CliRunner().invoke(app, ["--debug", *arguments, "--json"], prog_name="farcall").stderr
    assert json.loads(told)["error"]["code"] == "COMMAND_LINE"


def test_without_arguments_there_is_help() -> None:
    for arguments in ([], ["tasks"]):
        result = CliRunner().invoke(app, arguments, prog_name="farcall")
        assert "Usage: farcall" in result.output
        assert "Error" not in result.output


def test_help_imports_no_client_library(tmp_path: Path) -> None:
    code = "from farcall.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    loaded = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*[name for name in {TALKERS!r} if name in sys.modules])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "Exit codes" in loaded
    assert loaded.splitlines()[-1] == ""
    assert calls_of(code, tmp_path) < 180_000


def test_seen_names_are_completed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path))
    remember("endpoints", ["laptop", "lab-cluster", "desk"])
    words = "farcall endpoints show la"
    asked = {"_FARCALL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "3"}
    assert CliRunner().invoke(app, [], prog_name="farcall", env=asked).output.split() == ["laptop", "lab-cluster"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_their_completion(shell: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path))
    asked = {"_FARCALL_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": "farcall tasks c", "COMP_CWORD": "2"}
    asked |= {"COMP_WORDS": "farcall tasks c", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    completed = CliRunner().invoke(app, [], prog_name="farcall", env=asked)
    assert "cancel" in completed.output
    assert "groups" not in completed.output
