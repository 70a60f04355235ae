"""HTML of our objects in notebooks."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator

import pytest

from farcall import Executor
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
