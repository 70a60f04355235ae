"""What tasks print is seen while they run, and afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import farcall
from farcall import OutputPart, TaskFailed
from farcall_local.endpoint import LocalEndpoint
from tests.waiting import WAIT_S, wait_until


def talk(until: str, text: str) -> str:
    """Prints, waits for a file, and prints again."""
    import pathlib
    import sys

    print(f"begin {text}")
    print("a warning", file=sys.stderr)
    while not pathlib.Path(until).exists():
        time.sleep(0.02)
    print("end", end="")
    return text


def fail() -> None:
    print("before the error")
    raise LookupError("x")


@pytest.mark.smoke
def test_output_of_a_task_while_it_runs_and_when_it_has_ended(executor: farcall.Executor, tmp_path: Path) -> None:
    parts, begun = list[OutputPart](), threading.Event()

    def take(part: OutputPart) -> None:
        parts.append(part)
        begun.set()

    release = tmp_path / "release"
    future = executor.options(on_output=take).submit(talk, str(release), "äöü")
    try:
        assert begun.wait(WAIT_S)
        assert future.stdout == "begin äöü\n"
        assert future.stderr == "a warning\n"
    finally:
        release.touch()
    assert future.result(WAIT_S) == "äöü"
    wait_until(lambda: future.stdout == "begin äöü\nend")
    wait_until(lambda: "".join(part.text for part in parts if part.stream == "stdout") == "begin äöü\nend")
    assert [part.text for part in parts if part.stream == "stderr"] == ["a warning\n"]


def test_output_of_others_is_unknown(
    executor: farcall.Executor, client: farcall.Client, other_client: farcall.Client
) -> None:
    future = executor.submit(fail)
    assert isinstance(future.exception(WAIT_S), TaskFailed)
    assert future.stdout == "before the error\n"
    assert client.get_output([future.task_id])[future.task_id].stdout == "before the error\n"
    assert other_client.get_output([future.task_id]) == {}


def test_output_is_kept_at_its_endpoint(
    client: farcall.Client, own_endpoint: Callable[..., LocalEndpoint], tmp_path: Path
) -> None:
    release = tmp_path / "release"
    release.touch()
    endpoint = own_endpoint()
    with farcall.Executor(endpoint.endpoint_id, client=client) as executor:
        future = executor.submit(talk, str(release), "kept")
        silent = executor.options(output_bytes=0).submit(talk, str(release), "not kept")
        assert (future.result(WAIT_S), silent.result(WAIT_S)) == ("kept", "not kept")

    def reason(future: farcall.ComputeFuture[str]) -> str | None:
        return client.get_output([future.task_id])[future.task_id].reason

    assert future.details.get("stdout_tail") is None  # it is not in the database
    endpoint.kill()
    wait_until(lambda: reason(future) == "ENDPOINT_OFFLINE")
    endpoint.start()
    wait_until(lambda: client.get_output([future.task_id])[future.task_id].stdout == "begin kept\nend")
    wait_until(lambda: reason(silent) == "NOT_KEPT")
