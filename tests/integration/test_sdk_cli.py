"""The command line against a cloud in memory that is reached over HTTP."""

from __future__ import annotations

import importlib.metadata
import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farcall.cli import main
from farcall.cli._arguments import load_function, parse_argument, parse_kwargs
from farcall.testing import FakeCloud
from farcall_common.errors import InvalidRequest
from tests.integration.sdk_served_cloud import serving

SCRIPT = '''
"""A script."""
import neighbour

def greet(name, punctuation="!"):
    """Says hello.

    Loudly."""
    return f"hello {name}{punctuation}"

def count(values):
    return {"count": len(values) + neighbour.ZERO}

def nothing():
    pass

def fail():
    raise ValueError("no such luck")

answer = 42
'''

Run = Callable[..., int]


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeCloud]:
    with FakeCloud() as cloud, serving(cloud) as address:
        monkeypatch.setenv("FARCALL_API_URL", address)
        monkeypatch.setenv("FARCALL_TOKEN", cloud.token)
        monkeypatch.setenv("FARCALL_HOME", str(tmp_path / "home"))
        monkeypatch.delenv("FARCALL_ENDPOINT", raising=False)
        yield cloud


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("ZERO = 0\n")
    return str(tmp_path / "script.py")


@pytest.fixture
def run() -> Run:
    def run(*arguments: str) -> int:
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        return int(exit_.value.code or 0)

    return run


Output = pytest.CaptureFixture[str]


def test_the_reason_of_a_waiting_task_is_shown(cloud: FakeCloud, script: str, run: Run, capsys: Output) -> None:
    assert run("run", f"{script}:greet", "world", "--no-wait") == 0
    task_id = capsys.readouterr().out.strip()
    assert run("tasks", "why", task_id, "--json") == 0
    assert json.loads(capsys.readouterr().out)["task_id"] == task_id
    with cloud.client() as client:
        client.get_result(task_id, wait_s=20)
    assert run("tasks", "why", task_id) == 0
    first, *fields = capsys.readouterr().out.splitlines()
    assert first == "The task ended as success."
    assert "reason\tENDED" in fields
    assert "workers\t1 of 1 idle, as of now" in fields
    assert run("tasks", "why", str(uuid.uuid4())) == 66


def test_run_shows_the_result(cloud: FakeCloud, script: str, run: Run, capsys: Output) -> None:
    assert run("run", f"{script}:greet", "world", "--kwargs", '{"punctuation": "?"}') == 0
    assert capsys.readouterr().out == "hello world?\n"
    assert run("run", f"{script}:count", "[1, 2, 3]", "--endpoint", "fake") == 0
    assert capsys.readouterr().out == "{'count': 3}\n"
    assert run("run", f"{script}:nothing", "-e", cloud.endpoint_id) == 0
    assert capsys.readouterr().out == ""
    assert run("run", "math:sqrt", "9") == 0
    assert capsys.readouterr().out == "3.0\n"
    assert run("run", "--", "math:fabs", "-2") == 0
    assert capsys.readouterr().out == "2.0\n"


def test_run_prints_json_for_programs(cloud: FakeCloud, script: str, run: Run, capsys: Output) -> None:
    assert run("run", f"{script}:count", "[1]", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["result"] == {"count": 1}
    assert answer["timings"]["ended_at"] > 0
    assert run("run", f"{script}:count", "[1]", "--no-wait", "--json") == 0
    task_id = json.loads(capsys.readouterr().out)["task_id"]
    assert run("tasks", "show", task_id) == 0


def test_a_function_that_raises(cloud: FakeCloud, script: str, run: Run, capsys: Output) -> None:
    assert run("run", f"{script}:fail") == 1
    errors = capsys.readouterr().err
    assert "Remote traceback" in errors
    assert 'raise ValueError("no such luck")' in errors
    assert "TASK_FAILED" in errors
    assert "farcall/cli" not in errors  # no frame of ours


def test_errors_are_json_for_programs(cloud: FakeCloud, script: str, run: Run, capsys: Output) -> None:
    assert run("run", f"{script}:fail", "--json") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err)["error"]["exception_type"] == "ValueError"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nowhere.py:f",), 65, "no file nowhere.py"),
        (("{script}:missing",), 65, "no function 'missing'"),
        (("{script}:answer",), 65, "no function 'answer'"),
        (("{script}",), 65, "is not FILE.py:FUNCTION"),
        (("no_such_module:f",), 65, "cannot be imported"),
        (("{script}:greet", "--kwargs", "[1]"), 65, "not a JSON object"),
        (("{script}:greet", "x", "--retries", "101"), 65, "retries: Expected `int` <= 100"),
        (("{script}:greet", "x", "--retries", "1", "--retry-on", "OSErorr"), 65, "did you mean OSError?"),
        (("{script}:greet", "x", "--retry-on", "OSError"), 65, "--retry-on has no effect without --retries"),
        (("{script}:greet", "x", "--endpoint", "elsewhere"), 66, "no endpoint named 'elsewhere'"),
        (("{script}:greet", "x", "--endpoint", str(uuid.uuid4())), 66, "ENDPOINT_UNKNOWN"),
    ],
)
def test_wrong_calls(
    cloud: FakeCloud, script: str, run: Run, capsys: Output, arguments: tuple[str, ...], code: int, message: str
) -> None:
    assert run("run", *(each.format(script=script) for each in arguments)) == code
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


def test_waiting_ends_after_the_timeout(cloud: FakeCloud, run: Run, capsys: Output, monkeypatch: Any) -> None:
    with FakeCloud(workers=0) as offline, serving(offline) as address:
        monkeypatch.setenv("FARCALL_API_URL", address)
        assert run("run", "math:sqrt", "9", "--timeout", "0.1") == 75
        assert "TASK_PENDING" in capsys.readouterr().err
        assert run("tasks", "ls", "--state", "cancelled", "--json") == 0
        (task,) = json.loads(capsys.readouterr().out)
        assert run("tasks", "show", task["task_id"]) == 0
        assert "cancelled" in capsys.readouterr().out


def test_tasks(cloud: FakeCloud, script: str, run: Run, capsys: Output) -> None:
    assert run("run", f"{script}:fail") == 1
    assert run("run", f"{script}:greet", "you") == 0
    capsys.readouterr()
    assert run("tasks", "ls") == 0
    newest, oldest = capsys.readouterr().out.splitlines()
    assert newest.split("\t")[1:4] == ["greet", "fake", "success"]
    assert oldest.split("\t")[1:4] == ["fail", "fake", "failed"]
    assert "no such luck" in oldest
    failed = oldest.split("\t")[0]
    assert run("tasks", "show", failed) == 0
    assert "Remote traceback" in capsys.readouterr().out
    assert run("tasks", "show", failed, "--json") == 0
    assert json.loads(capsys.readouterr().out)["error"]["exception_type"] == "ValueError"
    assert run("tasks", "show", newest.split("\t")[0]) == 0
    assert "'hello you!'" in capsys.readouterr().out
    assert run("tasks", "events", failed) == 0
    assert [line.split("\t")[1] for line in capsys.readouterr().out.splitlines()] == ["received", "running", "failed"]
    assert run("tasks", "cancel", failed) == 0
    assert capsys.readouterr().out == f"{failed}\tfinished\n"
    assert run("tasks", "cancel", str(uuid.uuid4())) == 66
    assert run("tasks", "show", str(uuid.uuid4())) == 66


def test_functions(cloud: FakeCloud, script: str, run: Run, capsys: Output) -> None:
    assert run("run", f"{script}:greet", "you", "--no-wait") == 0
    capsys.readouterr()
    assert run("functions", "ls", "--search", "gree") == 0
    function_id, name, *_, description = capsys.readouterr().out.rstrip("\n").split("\t")
    assert (name, description) == ("greet", "Says hello.")
    assert run("functions", "show", function_id) == 0
    assert "python version" in capsys.readouterr().out
    assert run("functions", "delete", function_id) == 0
    assert run("functions", "show", function_id) == 66
    assert "FUNCTION_UNKNOWN" in capsys.readouterr().err


def test_endpoints(cloud: FakeCloud, run: Run, capsys: Output) -> None:
    assert run("endpoints", "ls") == 0
    assert capsys.readouterr().out == f"fake\tonline\t{cloud.endpoint_id}\tme\t\n"
    assert run("endpoints", "ls", "--mine", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["uuid"] == cloud.endpoint_id
    assert run("endpoints", "show", "fake") == 0
    assert cloud.endpoint_id in capsys.readouterr().out
    assert run("endpoints", "status", "fake") == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"status\tonline", "as of\tnow", "total workers\t1", "blocks\t1"} <= set(lines)


def test_a_wrong_token(cloud: FakeCloud, run: Run, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_TOKEN", "wrong")
    assert run("endpoints", "ls") == 77
    errors = capsys.readouterr().err
    assert "UNAUTHENTICATED" in errors
    assert "FARCALL_TOKEN" in errors  # the hint


def test_no_configuration(run: Run, capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path))
    monkeypatch.delenv("FARCALL_API_URL", raising=False)
    monkeypatch.delenv("FARCALL_TOKEN", raising=False)
    assert run("tasks", "ls") == 78
    assert "farcall local up" in capsys.readouterr().err


def test_versions(cloud: FakeCloud, run: Run, capsys: Output) -> None:
    assert run("version") == 0
    assert capsys.readouterr().out.startswith(f"farcall {importlib.metadata.version('farcall')}\n")
    assert run("version", "--server", "--json") == 0
    assert "min_ep_version" in json.loads(capsys.readouterr().out)


def test_help_lists_commands_and_exit_codes(run: Run, capsys: Output) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("run", "tasks", "functions", "endpoints", "local", "Exit codes"))
    assert run("nonsense") == 2


def test_without_the_local_package_its_command_shows_how_to_install_it(
    run: Run, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: importlib.metadata.EntryPoints())
    assert run("local") == 78
    assert "pip install farcall-local" in capsys.readouterr().err
    assert run("local", "up") == 78
    assert "pip install farcall-local" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "value"), [("3", 3), ('"3"', "3"), ("three", "three"), ('{"a": null}', {"a": None})])
def test_arguments_are_json_or_text(text: str, value: object) -> None:
    assert parse_argument(text) == value


def test_keyword_arguments_are_an_object() -> None:
    assert parse_kwargs('{"a": [1]}') == {"a": [1]}
    with pytest.raises(InvalidRequest):
        parse_kwargs("nonsense")


def test_a_script_that_fails_to_load_is_an_error_of_the_caller(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1/0\n")
    with pytest.raises(InvalidRequest, match="ZeroDivisionError"):
        load_function(f"{tmp_path / 'broken.py'}:f")
