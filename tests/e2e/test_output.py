"""Output of tasks: read from the API while they run, after their end, and after the death of their agent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

import farcall
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
