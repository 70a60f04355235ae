"""The reconciler."""

from __future__ import annotations

import datetime as dt
import logging

import pytest

from farcall_common.errors import Unavailable
from farcall_common.store.fakes import FakeQueue
from farcall_common.store.model import TaskEvent, TaskResult
from farcall_common.wire.states import Reporter, TaskState
from farcall_lambdas.settings import ApiSettings
from farcall_lambdas.testing import ALICE, MemoryApi

DAY_S = 86_400.0


class Lab:
    """An API whose queue can be away while tasks are submitted."""

    def __init__(self, settings: ApiSettings | None = None) -> None:
        self.api = MemoryApi(settings=settings)
        assert isinstance(self.api.stores.queue, FakeQueue)
        self.queue = self.api.stores.queue
        self.records = self.api.stores.records
        self.reconciler = self.api.application.services.reconciler
        function = {"function_name": "f", "function_code": "4\n01\nf"}
        self.function_id: str = self.api.call("POST", "/v3/functions", function).body["function_uuid"]
        endpoint = self.api.call("POST", "/v3/endpoints", {"endpoint_name": "laptop"})
        self.endpoint_id: str = endpoint.body["endpoint_id"]

    def submit(self, count: int = 1, *, queued: bool = True) -> list[str]:
        self.queue.reachable = queued
        body = {"tasks": {self.function_id: ["p"] * count}}
        answer = self.api.call("POST", f"/v3/endpoints/{self.endpoint_id}/submit", body)
        self.queue.reachable = True
        return list(answer.body["tasks"][self.function_id])

    def own(self) -> int:
        fence = self.queue.claim(self.endpoint_id, "fwd-1", ttl_s=1e9, now=self.api.clock.now)
        self.queue.mark_restored(self.endpoint_id, fence)
        return fence


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_committed_tasks_that_were_never_queued_are_queued_in_order(lab: Lab) -> None:
    task_ids = lab.submit(1500, queued=False)
    lab.api.clock.now += 60
    fence = lab.own()
    wake_ups = lab.queue.listen("fwd-1")

    done = lab.reconciler.run()

    leased = lab.queue.lease(lab.endpoint_id, fence, limit=2000, lease_s=30, now=lab.api.clock.now)
    assert (done.endpoints, done.offered) == (1, 1500)
    assert [each.task.task_id for each in leased] == task_ids
    assert wake_ups.get(0) == [lab.endpoint_id]


def test_a_second_round_queues_nothing_twice(lab: Lab) -> None:
    lab.submit(queued=False)
    lab.api.clock.now += 60

    lab.reconciler.run()
    lab.reconciler.run()

    assert lab.queue.depth(lab.endpoint_id) == 1


def test_a_submit_that_is_still_at_it_is_left_alone(lab: Lab) -> None:
    lab.submit(queued=False)

    assert lab.reconciler.run().offered == 0


def test_what_was_dispatched_is_its_forwarders_to_restore(lab: Lab) -> None:
    [task_id] = lab.submit()
    at = dt.datetime.fromtimestamp(lab.api.clock.now, dt.UTC)
    lab.records.record_moves([TaskEvent(task_id, TaskState.WAITING_FOR_NODES, Reporter.AGENT, at, attempt=1)])
    lab.queue.wipe()
    lab.api.clock.now += 60

    assert lab.reconciler.run().offered == 0
    assert lab.queue.depth(lab.endpoint_id) == 0


def test_each_round_tells_how_many_tasks_wait_in_one_line(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reached, running, _, ended = lab.submit(4)
    at = dt.datetime.fromtimestamp(lab.api.clock.now, dt.UTC)
    for task_id, state in ((reached, TaskState.WAITING_FOR_NODES), (running, TaskState.RUNNING)):
        lab.records.record_moves([TaskEvent(task_id, state, Reporter.AGENT, at, attempt=1)])
    end(lab, [ended])
    lab.api.clock.now += 60
    lab.submit()  # just now

    lab.reconciler.run()
    end(lab, [each.task_id for each in lab.records.list_open_tasks(lab.endpoint_id)])
    lab.reconciler.run()

    told = [vars(record)["tasks_waiting"] for record in caplog.records if "tasks_waiting" in vars(record)]
    assert told == [2, 0]


def test_ends_that_nobody_wrote_down_are_recorded(lab: Lab) -> None:
    [task_id] = lab.submit()
    fence = lab.own()
    lab.queue.lease(lab.endpoint_id, fence, limit=1, lease_s=30, now=lab.api.clock.now)
    end = TaskResult(
        task_id, lab.endpoint_id, 1, TaskState.SUCCESS, Reporter.AGENT, result=b"00\nr",
        timings={"returned_at": lab.api.clock.now},
    )  # fmt: skip
    lab.queue.ack(fence, [end], now=lab.api.clock.now)

    lab.api.clock.now += 5
    assert lab.reconciler.run().recorded == 0, "its forwarder may be at it"
    lab.api.clock.now += 60
    assert lab.reconciler.run().recorded == 1

    assert lab.records.get_tasks([task_id])[task_id].result == b"00\nr"
    assert lab.queue.outbox(lab.endpoint_id) == []
    assert lab.reconciler.run().endpoints == 0


def test_it_never_takes_an_endpoint_over(lab: Lab) -> None:
    lab.submit(queued=False)
    fence = lab.own()
    lab.api.clock.now += 60

    lab.reconciler.run()

    lab.queue.keep(lab.endpoint_id, "fwd-1", fence, ttl_s=45, now=lab.api.clock.now)


def test_an_outage_is_said(lab: Lab) -> None:
    lab.submit(queued=False)
    lab.api.clock.now += 60
    lab.queue.reachable = False

    with pytest.raises(Unavailable):
        lab.reconciler.run()


def end(lab: Lab, task_ids: list[str]) -> None:
    """The tasks succeed now."""
    now = dt.datetime.fromtimestamp(lab.api.clock.now, dt.UTC)
    ends = [TaskResult(id_, lab.endpoint_id, 1, TaskState.SUCCESS, Reporter.AGENT, result=b"r") for id_ in task_ids]
    lab.records.record_results(ends, at=now)


def test_tasks_are_forgotten_when_their_time_is_over(lab: Lab) -> None:
    old = lab.submit(3)
    end(lab, old)
    lab.api.clock.now += 29 * DAY_S
    young = lab.submit(2)
    end(lab, young[:1])
    assert lab.reconciler.run().purged == 0

    lab.api.clock.now += 2 * DAY_S

    assert lab.reconciler.run().purged == 3
    assert lab.records.get_tasks([*old, *young]).keys() == set(young)
    assert lab.api.call("GET", f"/v2/tasks/{old[0]}").body["code"] == "TASK_UNKNOWN"


def test_an_open_task_is_never_forgotten(lab: Lab) -> None:
    [task_id] = lab.submit()
    lab.api.clock.now += 1000 * DAY_S

    assert lab.reconciler.run().purged == 0
    assert lab.records.get_tasks([task_id])


def test_a_round_forgets_in_small_batches_until_nothing_is_left_or_it_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(ApiSettings(purge_batch=2, purge_until_s=2.5))
    end(lab, lab.submit(7))
    lab.api.clock.now += 31 * DAY_S
    limits: list[int] = []
    purge = lab.records.purge_tasks

    def noted(*, ended_before: dt.datetime, limit: int) -> int:
        limits.append(limit)
        lab.api.clock.now += 1.0
        return purge(ended_before=ended_before, limit=limit)

    monkeypatch.setattr(lab.records, "purge_tasks", noted)

    assert [lab.reconciler.run().purged for _ in range(3)] == [6, 1, 0]
    assert limits == [2] * 5


def test_what_was_done_is_forgotten_when_its_time_is_over(lab: Lab) -> None:
    before = len(lab.records.list_audit([ALICE.identity_id]))
    assert before > 0
    lab.api.clock.now += 401 * DAY_S

    assert lab.reconciler.run().audit_purged == before
    assert lab.records.list_audit([ALICE.identity_id]) == []
