"""Dead letters: a task that kills its workers is given up, shown, retried when its cause is gone, or deleted."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import farcall
from farcall_common.errors import Conflict, TaskUnknown
from farcall_common.wire import TaskState
from farcall_local.endpoint import LocalEndpoint
from tests.waiting import WAIT_S


def kill_its_worker(place: str) -> str:
    """Counts its starts, and survives once the cause is fixed."""
    import os
    import pathlib
    import signal

    with pathlib.Path(place, "starts").open("a") as starts:
        starts.write("started\n")
    if not pathlib.Path(place, "fixed").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


def letters(client: farcall.Client) -> set[str]:
    return {task["task_id"] for task in client.iter_tasks(state="dead-lettered")}


def ended(client: farcall.Client, task_id: str) -> farcall.TaskInfo:
    deadline = time.monotonic() + WAIT_S
    while (info := client.get_task(task_id)).pending:
        assert time.monotonic() < deadline, f"task {task_id} is {info.state}"
        time.sleep(0.05)
    return info


def test_a_task_that_kills_its_workers_ends_as_a_dead_letter(
    client: farcall.Client, other_client: farcall.Client, endpoint: LocalEndpoint, tmp_path: Path
) -> None:
    began_at = time.time()
    with farcall.Executor(endpoint.endpoint_id, client=client, max_attempts=3) as executor:
        future = executor.submit(kill_its_worker, str(tmp_path))
        error = future.exception(WAIT_S)
    task_id = future.task_id

    # What is said, by the future and by the record.
    assert isinstance(error, farcall.TaskDeadLettered)
    assert isinstance(error, farcall.TaskFailed)
    assert f"farcall tasks retry {task_id}" in error.hint
    assert f"farcall tasks discard {task_id}" in error.hint
    assert len(error.record.reasons or ()) == 3
    assert "How its attempts ended" in "".join(error.__notes__)
    assert (tmp_path / "starts").read_text().count("started") == 3
    info = client.get_task(task_id)
    assert info.state is TaskState.DEAD_LETTERED
    assert isinstance(info.exception, farcall.TaskDeadLettered)
    assert info.exception.record.reasons == error.record.reasons
    last = client.get_task_events(task_id)[-1]
    assert (last["state"], last["detail"]["reasons"]) == ("dead-lettered", list(error.record.reasons or ()))
    assert task_id in letters(client)

    # Only its owner can act on it.
    for attempt in (other_client.retry, other_client.discard):
        with pytest.raises(TaskUnknown):
            attempt(task_id)

    # Tried again before its cause is gone, it ends the same; after that it succeeds.
    again = client.retry(task_id)
    assert ended(client, again).state is TaskState.DEAD_LETTERED
    assert letters(client) >= {task_id, again}
    (tmp_path / "fixed").touch()
    retried = ended(client, client.retry(again))
    assert (retried.result(), retried.retry_of) == ("survived", again)
    assert client.get_task(task_id).state is TaskState.DEAD_LETTERED

    # Forgotten, it is listed no more and cannot be tried again.
    for each in (task_id, again, task_id):
        client.discard(each)
    assert not letters(client) & {task_id, again}
    with pytest.raises(Conflict):
        client.retry(task_id)

    done = [entry["action"] for entry in client.iter_audit(since=began_at - 1)]
    assert (done.count("task.retry"), done.count("task.discard")) == (2, 2)
