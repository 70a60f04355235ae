"""Retries of what a function raised, on real processes: agent, manager and workers, and an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from farcall_common.errors import TaskFailed
from farcall_common.wire import TaskState
from farcall_endpoint import Engine
from tests.support.endpoint import EndpointProcess, running_endpoint
from tests.waiting import WAIT_S

DELAY_S = 1.0


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndpointProcess]:
    with running_endpoint(tmp_path_factory.mktemp("home"), workers=1) as endpoint:
        yield endpoint


def fail(path: str, times: int) -> list[str]:
    """Raise in the first ``times`` runs; then say which retry each run was."""
    import os
    import pathlib

    class Away(ConnectionError):
        pass

    log = pathlib.Path(path)
    with log.open("a") as file:
        file.write(f"retry {os.environ.get('FARCALL_RETRY')}\n")
    runs = log.read_text().splitlines()
    if len(runs) <= times:
        raise Away(f"run {len(runs)}")
    return runs


def runs(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def kill_agent(endpoint: EndpointProcess) -> None:
    endpoint.kill_agent()
    endpoint.start()


def kill_manager(endpoint: EndpointProcess) -> None:
    endpoint.managers()[0].kill()


def shut_down(endpoint: EndpointProcess) -> None:
    endpoint.stop()
    endpoint.start()


@pytest.mark.parametrize("end", [kill_agent, kill_manager, shut_down])
def test_a_task_is_retried_after_its_agent_or_manager_ended_in_the_back_off(
    endpoint: EndpointProcess, end: Any, tmp_path: Path
) -> None:
    cloud, log = endpoint.cloud, tmp_path / "runs"
    options = {"retries": 1, "retry_on": ("builtins.ConnectionError",), "retry_delay_s": DELAY_S}
    task_id = cloud.submit(fail, str(log), 1, **options)
    cloud.wait_for(lambda: any(each.task_id == task_id and each.detail for each in cloud.transitions))
    end(endpoint)
    ended = cloud.end(task_id)
    assert ended.state is TaskState.SUCCESS
    # On a slow machine it ends in the run after the back-off, which then begins again: the retry stays the first.
    assert set(cast(list[str], ended.value)) == {"retry 0", "retry 1"}
    assert ended.spec.details["retries_used"] == 1
    [shown] = [each.detail for each in cloud.transitions if each.task_id == task_id and each.detail]
    assert (shown["retry"], shown["retries"], shown["error"]) == (1, 1, f"{__name__}.fail.<locals>.Away")


def test_no_more_runs_than_asked_for_and_none_for_another_error(endpoint: EndpointProcess, tmp_path: Path) -> None:
    cloud, used_up, other = endpoint.cloud, tmp_path / "used up", tmp_path / "other"
    first = cloud.submit(fail, str(used_up), 5, retries=1, retry_delay_s=0.0)
    second = cloud.submit(fail, str(other), 5, retries=1, retry_on=("builtins.ValueError",))
    assert (cloud.end(first).error["message"], runs(used_up)) == (f"{__name__}.fail.<locals>.Away: run 2", 2)
    assert cloud.end(first).error["retries_used"] == 1
    assert (cloud.end(second).error["message"], runs(other)) == (f"{__name__}.fail.<locals>.Away: run 1", 1)
    assert "retries_used" not in cloud.end(second).error


def test_a_cancel_in_the_back_off_ends_the_task_at_once(endpoint: EndpointProcess, tmp_path: Path) -> None:
    cloud, log = endpoint.cloud, tmp_path / "runs"
    task_id = cloud.submit(fail, str(log), 5, retries=5, retry_delay_s=300.0)
    cloud.wait_for(lambda: any(each.task_id == task_id and each.detail for each in cloud.transitions))
    assert cloud.end(cloud.submit(abs, -1)).value == 1, "the only worker is free meanwhile"
    cloud.cancel(task_id)
    assert (cloud.end(task_id).state, runs(log)) == (TaskState.CANCELLED, 1)


def test_an_engine_retries(tmp_path: Path) -> None:
    with Engine(max_workers=1, retry_delay_s=0.0) as engine:
        retried = engine.options(retries=2, retry_on=OSError)
        assert len(retried.submit(fail, str(tmp_path / "a"), 2).result(WAIT_S)) == 3
        with pytest.raises(TaskFailed) as caught:
            retried.submit(fail, str(tmp_path / "b"), 5).result(WAIT_S)
        assert "after 2 retries" in caught.value.__notes__[0]
        assert isinstance(caught.value.__cause__, ConnectionError)
        with pytest.raises(TaskFailed):
            engine.submit(fail, str(tmp_path / "c"), 5).result(WAIT_S)
        assert [runs(tmp_path / name) for name in "abc"] == [3, 3, 1]


def test_a_walltime_is_retried_if_it_is_named(endpoint: EndpointProcess, tmp_path: Path) -> None:
    def hang_once(path: str) -> str:
        import pathlib
        import time

        mark = pathlib.Path(path)
        if not mark.exists():
            mark.touch()
            time.sleep(600)
        return "in time"

    cloud = endpoint.cloud
    options = {"walltime_s": 1.0, "retries": 1, "retry_delay_s": 0.0}
    named = cloud.submit(hang_once, str(tmp_path / "named"), **options, retry_on=("builtins.TimeoutError",))
    assert cloud.end(named).value == "in time"
    assert cloud.end(named).spec.details["earlier_run_s"] > 0.5
