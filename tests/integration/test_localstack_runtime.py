"""Lambda execution environment of the offline tier: awslambdaric in a process, with our Runtime API."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_PLUGIN = Path(__file__).resolve().parents[2] / "localstack" / "plugin"

Start = Callable[..., Any]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Any]:
    """The plugin's module. The plugin is installed in LocalStack's environment, but this part does not need
    LocalStack."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(_PLUGIN))
        yield importlib.import_module("farcall_localstack_plugin.runtime")


@pytest.fixture
def start(runtime: Any, tmp_path: Path) -> Iterator[Start]:
    """Start an environment for the source of a module with a function ``handle``."""
    running = []

    def begin(source: str, *, timeout_s: float = 20.0) -> Any:
        (tmp_path / "app.py").write_text(source, encoding="utf-8")
        process = runtime.RuntimeProcess(
            "app",
            python=Path(sys.executable),
            code=tmp_path,
            handler="app.handle",
            environment={"AWS_REGION": "us-east-1", "GREETING": "hello"},
            timeout_s=timeout_s,
            init_timeout_s=20.0,
            log=tmp_path / "app.log",
        )
        running.append(process)
        process.start()
        return process

    yield begin
    for process in running:
        process.stop()


def _invoke(runtime: Any, process: Any, event: object, request_id: str = "r1") -> tuple[Any, bool]:
    outcome = process.invoke(
        runtime.Invocation(request_id, json.dumps(event).encode(), "arn:aws:lambda:us-east-1:0:function:app", "Root=1")
    )
    return json.loads(outcome.payload), outcome.is_error


def test_the_handler_gets_lambdas_context(runtime: Any, start: Start) -> None:
    process = start(
        "import os\n"
        "def handle(event, context):\n"
        "    print('working')\n"
        "    assert context.get_remaining_time_in_millis() > 0\n"
        "    return [event, context.aws_request_id, os.environ['GREETING']]\n"
    )
    assert _invoke(runtime, process, {"n": 1}) == ([{"n": 1}, "r1", "hello"], False)
    assert _invoke(runtime, process, {"n": 2}, "r2") == ([{"n": 2}, "r2", "hello"], False)
    assert process.log_text().count("working") == 2


def test_an_exception_is_an_error_and_the_environment_keeps_running(runtime: Any, start: Start) -> None:
    process = start("def handle(event, context):\n    return 1 / event\n")
    error, failed = _invoke(runtime, process, 0)
    assert failed
    assert error["errorType"] == "ZeroDivisionError"
    assert _invoke(runtime, process, 2) == (0.5, False)


def test_a_crash_is_an_error_and_the_next_invocation_has_a_new_process(runtime: Any, start: Start) -> None:
    process = start("import os\ndef handle(event, context):\n    return os.getpid() if event else os._exit(3)\n")
    first, _ = _invoke(runtime, process, True)
    error, failed = _invoke(runtime, process, False)
    assert failed
    assert error["errorType"] == "Runtime.ExitError"
    second, failed = _invoke(runtime, process, True)
    assert not failed
    assert second != first


def test_a_handler_that_takes_too_long_is_killed(runtime: Any, start: Start) -> None:
    process = start(
        "import threading\ndef handle(event, context):\n    return threading.Event().wait(600) if event else 'quick'\n",
        timeout_s=1.0,
    )
    error, failed = _invoke(runtime, process, True)
    assert failed
    assert "timed out after 1.00 seconds" in error["errorMessage"]
    assert _invoke(runtime, process, False, "r2") == ("quick", False)


def test_an_answer_over_lambdas_limit_is_an_error(runtime: Any, start: Start) -> None:
    """The limit is for the answer as JSON, in which quotes take two bytes."""
    process = start("def handle(event, context):\n    return event[0] * event[1]\n")
    for text, most in (("x", 6_291_554), ('"', 3_145_777)):
        assert _invoke(runtime, process, [text, most])[1] is False
        error, failed = _invoke(runtime, process, [text, most + 1])
        assert failed
        assert error["errorType"] == "Function.ResponseSizeTooLarge"


def test_the_throttle_admits_a_burst_and_then_its_rate(runtime: Any) -> None:
    now = [0.0]
    bucket = importlib.import_module("farcall_localstack_plugin.limits").TokenBucket(2, 3, clock=lambda: now[0])
    admitted = []
    for at in (0, 0, 0, 0, 0.25, 0.5, 0.5, 100, 100, 100, 100):
        now[0] = at
        admitted.append(bucket.take())
    assert admitted == [True, True, True, False, False, True, False, True, True, True, False]


def test_a_module_that_cannot_be_imported_is_reported(runtime: Any, start: Start) -> None:
    with pytest.raises(runtime.RuntimeFailed, match="no_such_module"):
        start("import no_such_module\n")
