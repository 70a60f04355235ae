"""TaPS' applications, failures and command line on our executors. No package index has TaPS: .venv-taps may lack it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine.environments import run_driver
from benchmarks.taps.__main__ import PYTHON as DEFAULT
from benchmarks.taps.__main__ import deployment, has_taps
from tests.waiting import WAIT_S

PYTHON = Path(os.environ.get("FARCALL_TAPS_PYTHON", DEFAULT))
REPOSITORY = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not has_taps(PYTHON), reason=f"no TaPS in {PYTHON.parents[1].name}")


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """Settings of a client of a local tier, with an endpoint of TaPS' interpreter."""
    with deployment(tmp_path_factory.mktemp("taps"), PYTHON, {}) as settings:
        yield settings


def found(variables: Mapping[str, str], *arguments: str) -> dict[str, Any]:
    return run_driver(PYTHON, *arguments, driver="benchmarks.taps.driver", variables=variables)


@pytest.mark.parametrize("name", ["farcall-engine", "farcall, cloud"])
def test_applications_run(variables: Mapping[str, str], name: str) -> None:
    applications = found(variables, name, "--quick")["applications"]
    assert {title: each["tasks"] for title, each in applications.items()} == {"cholesky": 5, "synthetic, diamond": 7}


def test_large_values_go_through_proxies(variables: Mapping[str, str], tmp_path: Path) -> None:
    directory = tmp_path / "objects"
    directory.mkdir()
    applications = found(variables, "farcall, cloud", "--quick", "--objects", str(directory))["applications"]
    assert applications["cholesky"]["tasks"] == 5
    assert not directory.exists()  # ProxyStore's connector deletes it at the end


@pytest.mark.parametrize(
    ("name", "dependent", "killed"),
    [
        ("farcall-engine", "ZeroDivisionError", "TaskFailed [WORKER_DIED]"),
        ("farcall, cloud", "InputFailed [INPUT_FAILED]", "TaskDeadLettered [TASK_DEAD_LETTERED]"),
    ],
)
def test_failures_end_their_tasks_and_no_others(
    variables: Mapping[str, str], name: str, dependent: str, killed: str
) -> None:
    failures = found(variables, name, "--failures", "zero-division", "worker-killed")["failures"]
    assert failures["zero-division"]["tasks"] == [["noop", "ZeroDivisionError"], ["noop", dependent]]
    assert failures["worker-killed"]["tasks"][0] == ["noop", killed]
    assert [each["after"] for each in failures.values()] == [None, None]


@pytest.mark.parametrize("configuration", ["FarcallEngineConfig(max_workers=1)", "FarcallConfig(endpoint='taps')"])
def test_functions_of_a_script_and_futures_as_arguments(variables: Mapping[str, str], configuration: str) -> None:
    code = (
        "from benchmarks.taps.plugins import *; from taps.engine import Engine\n"
        f"with Engine({configuration}.get_executor()) as engine:\n"
        "    three = 3\n"
        "    five = engine.submit(lambda a, b: a + b + three, 1, b=engine.submit(lambda: 1))\n"
        "    print(five.result(60))"
    )
    assert program("-c", code, variables=variables).stdout.strip() == "5"


def test_a_task_whose_arguments_cannot_be_sent_fails_after_the_tasks_that_it_needs() -> None:
    code = (
        "import threading; from benchmarks.taps.plugins import FarcallEngineConfig\n"
        "executor = FarcallEngineConfig(max_workers=1).get_executor()\n"
        "failed = executor.submit(max, executor.submit(pow, 2, 2), threading.Condition())\n"
        "print(type(failed.exception(60)).__name__); executor.shutdown()"
    )
    assert program("-c", code).stdout.strip() == "SerializationError"


def test_the_command_line_has_our_executors(tmp_path: Path) -> None:
    application = ["--app", "synthetic", "--app.structure", "sequential", "--app.task-count", "3"]
    options = ["--engine.executor", "farcall-engine", "--engine.executor.max-workers", "1"]
    done = program("-m", "benchmarks.taps.run", *application, *options, directory=tmp_path)
    assert "tasks=3" in done.stdout + done.stderr


def program(
    *arguments: str, directory: Path | None = None, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A program of TaPS' interpreter."""
    return subprocess.run(
        [PYTHON, *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(variables or {})},
        cwd=directory,
        capture_output=True,
        text=True,
        check=True,
        timeout=WAIT_S,
    )
