"""The command line as a whole: help, usage errors, start-up cost, completion."""

from __future__ import annotations

import io
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farcall.cli._app import COMMANDS, app
from farcall.cli._arguments import parse_argument, parse_kwargs, remember
from farcall.cli._output import show_json
from farcall_common.console import prepare_streams
from farcall_common.errors import InvalidRequest
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
        (("run", "script.py:f", "--timeout", "nan"), "Expected a number"),
    ],
)
def test_a_usage_error_is_one_line_with_a_hint(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, arguments, prog_name="farcall")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: [COMMAND_LINE] ")
    assert message in result.stderr
    assert "--help` to see the commands and options" in result.stderr
    assert result.stderr.count("\n") == 1
    told = CliRunner().invoke(app, ["--debug", *arguments, "--json"], prog_name="farcall").stderr
    assert json.loads(told)["error"]["code"] == "COMMAND_LINE"


def test_without_arguments_there_is_help() -> None:
    for arguments in ([], ["tasks"]):
        result = CliRunner().invoke(app, arguments, prog_name="farcall")
        assert "Usage: farcall" in result.stdout
        assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "alike"),
    [
        (("taks", "ls"), "Did you mean 'tasks'"),
        (("tasks", "cancle"), "Did you mean 'cancel'?"),
        (("help", "functoins"), "Did you mean 'functions'?"),
        (("tasks", "ls", "--limt", "3"), "Did you mean --limit?"),
    ],
)
def test_an_unknown_command_or_option_is_answered_with_those_alike(arguments: tuple[str, ...], alike: str) -> None:
    result = CliRunner().invoke(app, arguments, prog_name="farcall")
    assert result.exit_code == 2
    assert alike in result.stderr


@pytest.mark.parametrize("arguments", [("tasks", "ls", "-h"), ("help", "tasks", "ls"), ("tasks", "help", "list")])
def test_help_has_its_usual_names(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, arguments, prog_name="farcall")
    assert (result.exit_code, "Usage: farcall tasks l" in result.stdout) == (0, True)
    assert "<bool>" not in result.stdout
    assert "--limit" in result.stdout


def test_help_of_the_whole_command_line() -> None:
    result = CliRunner().invoke(app, ["help"], prog_name="farcall")
    assert (result.exit_code, "Exit codes" in result.stdout, "<bool>" in result.stdout) == (0, True, False)


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version(option: str) -> None:
    assert CliRunner().invoke(app, [option], prog_name="farcall").stdout.split()[0] == "farcall"


def test_versions_for_a_bug_report() -> None:
    shown = dict(
        line.split(" ", 1) for line in CliRunner().invoke(app, ["version"], prog_name="farcall").stdout.splitlines()
    )
    assert {"farcall", "farcall-common", "farcall-endpoint", "farcall-local", "farcall-infra"} <= shown.keys()
    assert shown["python"] == platform.python_version()
    assert shown["platform"]


@pytest.mark.parametrize(("name", "package"), [("local", "farcall-local"), ("cloud", "farcall-infra")])
def test_commands_of_packages_that_are_missing_name_the_package(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    result = CliRunner().invoke(app, [name, "status", "--json"], prog_name="farcall")
    assert (result.exit_code, f"pip install {package}" in result.stderr) == (78, True)


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


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_characters_that_the_terminal_does_not_have_are_escaped(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding, write_through=True))
    prepare_streams()
    value = "\u017d \xe9 \U0001f600"
    show_json(value)
    print(value)
    lines = written.getvalue().decode(encoding).splitlines()
    assert json.loads(lines[0]) == value
    if encoding != "utf-8":
        assert r"\u017d" in lines[1]


def test_an_argument_is_utf_8_in_any_locale() -> None:
    undecoded = "\u017d".encode().decode("ascii", "surrogateescape")
    assert parse_argument(undecoded) == "\u017d"
    assert parse_kwargs(f'{{"a": "{undecoded}"}}') == {"a": "\u017d"}
    with pytest.raises(InvalidRequest, match="is not UTF-8"):
        parse_argument("\udcff")
