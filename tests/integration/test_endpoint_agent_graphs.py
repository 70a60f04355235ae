"""Graphs on real processes: agent, manager and workers. Hostile ones, and ends of the agent while one runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from farcall_common.graphs import Graph, Input, Stage, pack_graph
from farcall_common.task_options import Callee, TaskOptions
from farcall_common.wire import TaskState
from tests.support.endpoint import EndpointProcess, running_endpoint
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndpointProcess]:
    with running_endpoint(tmp_path_factory.mktemp("home"), workers=2) as endpoint:
        yield endpoint


def note(path: str, text: str) -> str:
    """Write a line, and return it."""
    import pathlib

    with pathlib.Path(path).open("a") as file:
        file.write(f"{text}\n")
    return text


def join(path: str, release: str, texts: list[str]) -> list[str]:
    """Write a line, wait until a file is there, and return the texts."""
    import pathlib
    import time

    with pathlib.Path(path).open("a") as file:
        file.write("join\n")
    while not pathlib.Path(release).exists():
        time.sleep(0.01)
    return texts


def gathered(endpoint: EndpointProcess, log: Path, release: Path, *, once: bool = False) -> bytes:
    """Two calls of the first function, and one of the second that gets their values."""
    pack = endpoint.cloud.serializer.pack_call
    stages = (
        Stage(0, "first"),
        Stage(0, "second"),
        Stage(1, "join", (Input(0, (2, 0)), Input(1, (2, 1))), 0, TaskOptions(idempotent=False) if once else None),
    )
    calls = (pack([str(log), "a"]), pack([str(log), "b"]), pack([str(log), str(release), [None, None]]))
    return pack_graph(Graph(stages, calls, 2))


@pytest.mark.parametrize("payload", [b"gr\n", b"gr\n" + b"A" * 1000, b"gr\n\xff" + b"x" * 100_000])
def test_a_hostile_graph_fails_and_nothing_else(endpoint: EndpointProcess, payload: bytes) -> None:
    ended = endpoint.cloud.end(endpoint.cloud.submit_graph([abs], payload))
    assert (ended.state, ended.error["code"]) == (TaskState.FAILED, "GRAPH_INVALID")
    assert endpoint.cloud.end(endpoint.cloud.submit(abs, -1)).value == 1


def test_a_graph_without_the_body_of_a_callee_is_refused(endpoint: EndpointProcess) -> None:
    pack = endpoint.cloud.serializer.pack_call
    body = endpoint.cloud.serializer.pack_function(abs)
    callees = (Callee("here", hashlib.sha256(body).hexdigest()), Callee("away", "0" * 64))
    payload = pack_graph(Graph((Stage(0), Stage(1)), (pack([-1]), pack([-1])), 0))
    [task_id] = endpoint.cloud.submit_raw(body, [payload], callees=callees)
    error = endpoint.cloud.end(task_id).error
    assert (error["code"], "0" * 12 in error["message"]) == ("FUNCTION_UNKNOWN", True)


@pytest.mark.parametrize("once", [False, True])
def test_a_graph_runs_again_after_its_agent_was_killed_if_it_may(
    endpoint: EndpointProcess, tmp_path: Path, once: bool
) -> None:
    log, release = tmp_path / "log", tmp_path / "release"
    task_id = endpoint.cloud.submit_graph([note, join], gathered(endpoint, log, release, once=once))
    wait_until(lambda: log.exists() and "join" in log.read_text())
    endpoint.kill_agent()
    release.touch()
    endpoint.start()
    ended = endpoint.cloud.end(task_id)
    runs = log.read_text().split()
    if once:
        assert (ended.state, runs.count("join")) == (TaskState.LOST, 1)
    else:
        assert (ended.value, runs.count("join")) == (["a", "b"], 2)
        assert [each["state"] for each in ended.spec.details["stages"]] == ["done"] * 3


def test_a_graph_is_shown_while_it_runs_and_cancelled_as_a_whole(endpoint: EndpointProcess, tmp_path: Path) -> None:
    log, release = tmp_path / "log", tmp_path / "release"
    task_id = endpoint.cloud.submit_graph([note, join], gathered(endpoint, log, release))

    def stages() -> list[str]:
        rows = endpoint.cloud.reports[-1].detail.get("graphs", []) if endpoint.cloud.reports else []
        return [each["state"] for row in rows if row["task_id"] == task_id for each in row["stages"]]

    endpoint.cloud.wait_for(lambda: stages() == ["done", "done", "running"])
    endpoint.cloud.cancel(task_id)
    assert endpoint.cloud.end(task_id).state is TaskState.CANCELLED
    endpoint.cloud.wait_for(lambda: not stages())


def chatter(count: int) -> None:
    """Print so many bytes."""
    print("x" * count)


def test_no_stage_exceeds_the_limits_of_the_endpoint(tmp_path: Path) -> None:
    with running_endpoint(tmp_path, workers=1, engine={"limits": {"output": 4096}}) as endpoint:
        stage = Stage(0, "chatter", options=TaskOptions(max_output_bytes=2**40))
        call = endpoint.cloud.serializer.pack_call([100_000])
        ended = endpoint.cloud.end(endpoint.cloud.submit_graph([chatter], pack_graph(Graph((stage,), (call,), 0))))
        assert ended.error["code"] == "OUTPUT_EXCEEDED"
        assert "stage 0 (chatter)" in ended.error["message"]
