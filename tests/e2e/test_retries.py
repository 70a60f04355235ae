"""Retries of what a function raised: the endpoint runs the task again, and its history has each retry."""

from __future__ import annotations

import time
from pathlib import Path

import farcall
from farcall_common.wire import TaskState
from farcall_local.endpoint import LocalEndpoint
from tests.waiting import WAIT_S, wait_until


def fail(path: str, times: int) -> int:
    """Raise in the first ``times`` runs; then their number."""
    import os
    import pathlib

    log = pathlib.Path(path)
    runs = len(log.read_text()) + 1 if log.exists() else 1
    log.write_text("x" * runs)
    assert os.environ["FARCALL_RETRY"] == str(runs - 1)
    if runs <= times:
        raise FileNotFoundError(f"run {runs}")
    return runs


def retries(client: farcall.Client, task_id: str) -> list[tuple[int, int, str]]:
    """The retries in the history, which are recorded at intervals."""
    shown = [event["detail"] for event in client.get_task_events(task_id) if "retry" in event["detail"]]
    return [(each["retry"], each["retries"], each["error"]) for each in shown]


def test_a_task_is_retried_while_its_submitter_is_gone(
    client: farcall.Client, endpoint: LocalEndpoint, tmp_path: Path
) -> None:
    batch = client.create_batch(retries=3, retry_on=OSError, retry_delay_s=0.2)
    function_id = client.register_function(fail)
    for name, times in (("succeeds", 2), ("fails", 9)):
        batch.add(function_id, (str(tmp_path / name), times))
    client.batch_run(endpoint.endpoint_id, batch)
    succeeds, fails = batch.task_ids

    deadline = time.monotonic() + WAIT_S
    found = client.get_batch_result([succeeds, fails])
    while any(info.pending for info in found.values()):
        assert time.monotonic() < deadline, client.why(fails)
        time.sleep(0.05)
        found = client.get_batch_result([succeeds, fails])

    ended, info = found[succeeds], found[fails]
    assert (ended.result(), ended.details["retries_used"]) == (3, 2)
    assert info.state is TaskState.FAILED
    assert isinstance(info.exception, farcall.TaskFailed)
    assert info.exception.record.retries_used == 3
    assert "after 3 retries" in info.exception.__notes__[0]
    assert (tmp_path / "fails").read_text() == "xxxx"
    for task_id, used in ((succeeds, 2), (fails, 3)):
        wait_until(lambda task_id=task_id, used=used: len(retries(client, task_id)) == used)  # type: ignore[misc]
        assert retries(client, task_id) == [(retry, 3, "FileNotFoundError") for retry in range(1, used + 1)]
