"""Output of tasks: read from the API while they run, after their end, and after the death of their agent."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import farcall
from farcall import OutputPart, TaskFailed
from farcall_local.deployment import Deployment
from farcall_local.endpoint import LocalEndpoint
from tests.waiting import WAIT_S, wait_until


def count_to(last: int, directory: str) -> str:
    """Print the numbers, each after the file of its name is there."""
    import sys
    import time
    from pathlib import Path

    for number in range(last):
        while not (Path(directory) / str(number)).exists():
            time.sleep(0.01)
        print("stëp", number)
    print("done", file=sys.stderr)
    return "counted"


@contextlib.contextmanager
def let_go(directory: Path) -> Iterator[None]:
    """Let the task end, also if the test fails."""
    try:
        yield
    finally:
        for number in range(2):
            (directory / str(number)).touch()


class Reader:
    """Reads output of tasks as a user."""

    def __init__(self, cloud: Deployment, user: str) -> None:
        self._url = f"{cloud.api_url}/v3/batch_output"
        self._headers = {"authorization": f"Bearer {cloud.tokens[user]}"}

    def answer(self, *task_ids: str, **offsets: int) -> dict[str, Any]:
        body = {"tasks": [{"task_id": task_id, **offsets} for task_id in task_ids]}
        with httpx.Client(headers=self._headers, timeout=WAIT_S, trust_env=False) as web:
            response = web.post(self._url, json=body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def until(self, task_id: str, condition: Callable[[dict[str, Any]], object], **offsets: int) -> dict[str, Any]:
        seen: dict[str, Any] = {}

        def holds() -> bool:
            seen.update(self.answer(task_id, **offsets)["results"].get(task_id, {}))  # it may not be submitted yet
            return bool(seen and condition(seen))

        wait_until(holds, f"the output of {task_id}")
        return seen


def test_output_is_read_while_a_task_runs_and_after_its_agent_died(
    cloud: Deployment, client: farcall.Client, own_endpoint: Callable[..., LocalEndpoint], tmp_path: Path
) -> None:
    endpoint, reader, other = own_endpoint(), Reader(cloud, "ada"), Reader(cloud, "grace")
    with farcall.Executor(endpoint.endpoint_id, client=client) as executor, let_go(tmp_path):
        future = executor.submit(count_to, 2, str(tmp_path))
        task_id = future.task_id
        (tmp_path / "0").touch()
        first = reader.until(task_id, lambda seen: seen["stdout"]["text"])
        assert first["stdout"] == {"from": 0, "next": 8, "text": "stëp 0\n"}
        assert (first["source"], first["attempt"], first["complete"], first["reason"]) == ("endpoint", 1, False, None)
        assert other.answer(task_id) == {"results": {}, "unknown": [task_id]}
        (tmp_path / "1").touch()
        assert future.result(WAIT_S) == "counted"
        rest = reader.until(task_id, lambda seen: seen["complete"], stdout_from=8)
        assert rest["stdout"] == {"from": 8, "next": 16, "text": "stëp 1\n"}
        assert rest["stderr"] == {"from": 0, "next": 5, "text": "done\n"}

        agent = endpoint.agent()
        assert agent is not None
        agent.kill()
        psutil.wait_procs([agent], timeout=WAIT_S)
        endpoint.start()
        again = reader.until(task_id, lambda seen: seen["source"] == "endpoint")
        assert (again["stdout"]["text"], again["complete"]) == ("stëp 0\nstëp 1\n", True)

        endpoint.stop()
        off = reader.until(task_id, lambda seen: seen["reason"] == "ENDPOINT_OFFLINE")
        assert (off["source"], off["stdout"]["text"], off["complete"]) == ("none", "", True)
        assert other.answer(task_id) == {"results": {}, "unknown": [task_id]}


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
