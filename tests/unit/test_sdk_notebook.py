"""HTML of our objects in notebooks."""

from __future__ import annotations

import concurrent.futures
import json
import re
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from farcall import ComputeFuture, Executor
from farcall._display import Records, local_time
from farcall.testing import FakeCloud
from tests.waiting import WAIT_S


@pytest.fixture
def executor(cloud: FakeCloud) -> Iterator[Executor]:
    with cloud.client() as client, Executor(cloud.endpoint_id, client=client, label="a <b>") as executor:
        yield executor


def fail(why: str) -> None:
    raise ValueError(why)


def test_successful_call_is_shown(executor: Executor) -> None:
    future = executor.submit(str.upper, "<i>" * 1000)
    concurrent.futures.wait([future], WAIT_S)
    shown = future._repr_html_()
    assert "succeeded" in shown
    assert future.task_id in shown
    assert "&lt;I&gt;" in shown
    assert "<I>" not in shown
    assert len(shown) < 2000
    assert repr(future) == f"<ComputeFuture of task {future.task_id} at endpoint {future.endpoint_id}, succeeded>"


def test_failed_call_is_shown(executor: Executor) -> None:
    future = executor.submit(fail, "too <cold>")
    concurrent.futures.wait([future], WAIT_S)
    shown = future._repr_html_()
    assert "failed" in shown
    assert "too &lt;cold&gt;" in shown


def test_waiting_and_cancelled_calls_are_shown() -> None:
    with FakeCloud(workers=0) as cloud, cloud.client() as client:
        executor = Executor(cloud.endpoint_id, client=client)
        future = executor.submit(str.upper, "a")
        assert any(words in future._repr_html_() for words in ("on its way", "waiting or running"))
        future.cancel()
        assert "cancelled" in future._repr_html_()
        executor.shutdown()
        assert "shut down" in executor._repr_html_()


def test_executor_and_reason_are_shown(executor: Executor) -> None:
    assert "a &lt;b&gt;" in executor._repr_html_()
    assert "0 open futures" in executor._repr_html_()
    future = executor.submit(str.upper, "a")
    concurrent.futures.wait([future], WAIT_S)
    assert future.why()._repr_html_().startswith("<b>The task succeeded.</b>")


def test_tasks_are_shown_with_words_and_local_times(executor: Executor, cloud: FakeCloud) -> None:
    futures: list[ComputeFuture[Any]] = [executor.submit(str.upper, "<a>"), executor.submit(fail, "too <cold>")]
    concurrent.futures.wait(futures, WAIT_S)
    with cloud.client() as client:
        done, failed = client.get_batch_result([future.task_id for future in futures]).values()
        year = local_time(done.finished_at)[:4]
        assert re.match(rf"<TaskInfo {done.task_id}: success, ran \d+\.\d s, ended {year}-", repr(done))
        shown = done._repr_html_()
        assert "&#x27;&lt;A&gt;&#x27;" in shown
        assert f">{local_time(done.timings['started_at'])}<" in shown
        assert str(done.timings["started_at"]) not in shown
        assert "too &lt;cold&gt;" in failed._repr_html_()
        assert repr(failed).startswith(f"<TaskInfo {failed.task_id}: failed, ran ")
        assert done["status"] == "success"
        assert "unknown" in repr(client.get_batch_result([str(uuid.uuid4())]))


def test_lists_are_shown_as_tables_and_stay_lists(executor: Executor, cloud: FakeCloud) -> None:
    future = executor.submit(str.upper, "a")
    future.result(WAIT_S)
    with cloud.client() as client:
        tasks = client.get_tasks()
        assert json.loads(json.dumps(tasks)) == tasks
        assert msgspec.json.decode(msgspec.json.encode(tasks)) == tasks
        shown = tasks._repr_html_()  # type: ignore[attr-defined]
        assert shown.count("<tr>") == 2
        assert local_time(tasks[0]["finished_at"]) in shown
        assert str(tasks[0]["finished_at"]) not in shown
        for rows in (client.get_endpoints(), client.get_functions(), client.get_task_groups()):
            assert "<th" in rows._repr_html_()  # type: ignore[attr-defined]
        events = client.get_task_events(future.task_id)
        assert local_time(events[0]["at"]) in events._repr_html_()  # type: ignore[attr-defined]
        status = client.get_endpoint_status(cloud.endpoint_id)
        assert "online" in status._repr_html_()  # type: ignore[attr-defined]
        assert "display_name" not in client.get_endpoint(cloud.endpoint_id)._repr_html_()  # type: ignore[attr-defined]


def test_long_lists_and_strange_values_are_shown() -> None:
    rows = Records({"name": f"<{number}>", "text": "x" * 300, "at": 1e300} for number in range(150))
    shown = rows._repr_html_()
    assert "and 50 more" in shown
    assert "&lt;99&gt;" in shown
    assert "&lt;100&gt;" not in shown
    assert "x" * 201 not in shown
    assert "1e+300" in shown
    assert Records()._repr_html_() == "<i>none</i>"
    assert local_time(None) == ""
