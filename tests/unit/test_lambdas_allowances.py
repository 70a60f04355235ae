"""Allowances: their values, and what a submit, the queue, the reconciler and ``why`` make of them."""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import Any

import msgspec
import pytest

from farcall_common.errors import InvalidRequest
from farcall_common.store.allowance import Allowance, most_generous
from farcall_common.store.model import EndpointStatus, Presence, RunningLimit, TaskResult
from farcall_common.wire.states import Reporter, TaskState
from farcall_common.worker_share import WorkerShare
from farcall_lambdas.allowed_users import SOME_GROUPS
from farcall_lambdas.identity import Identity
from tests.support.memory_api import ALICE, BOB, Answer, MemoryApi
from tests.support.stores import FakeQueue, single


def make_result(task_id: str, endpoint_id: str, **changes: Any) -> TaskResult:
    plain = TaskResult(task_id, endpoint_id, 1, TaskState.SUCCESS, Reporter.AGENT, result=b"r")
    return msgspec.structs.replace(plain, **changes)


class Lab:
    """Bob uses an endpoint of Alice, with an allowance."""

    def __init__(self, **limits: Any) -> None:
        self.api = MemoryApi()
        self.endpoint_id = self.api.endpoint()
        self.share(**limits)
        self.function_id = self.api.function(public=True)
        queue = self.api.stores.queue
        assert isinstance(queue, FakeQueue)
        self.queue = queue
        self.fence = single.claim(queue, self.endpoint_id, "w1", ttl_s=1e9)
        single.mark_restored(queue, self.endpoint_id, self.fence)

    def share(self, **limits: Any) -> None:
        self.api.share(f"endpoints/{self.endpoint_id}", BOB, allowance=limits)

    def submit(self, count: int = 1, *, caller: Identity = BOB, **fields: object) -> Answer:
        body = {"tasks": {self.function_id: ["p"] * count}, **fields}
        return self.api.call("POST", f"/v3/endpoints/{self.endpoint_id}/submit", body, caller=caller)

    def submitted(self, count: int = 1, **fields: Any) -> list[str]:
        answer = self.submit(count, **fields)
        assert answer.status == 200, answer.body
        return list(answer.body["tasks"][self.function_id])

    def lease(self) -> int:
        return len(single.lease(self.queue, self.endpoint_id, self.fence, limit=100, lease_s=1e9))

    def finish(self, task_id: str, *, hours: float) -> None:
        at = self.api.clock()
        timings = {"started_at": at, "ended_at": at + hours * 3600}
        result = make_result(task_id, self.endpoint_id, timings=timings)
        self.api.stores.tasks.record_results([result], at=dt.datetime.fromtimestamp(at + hours * 3600, dt.UTC))


# values


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_running": 3, "max_waiting": 100, "weight": 2},
        {"max_walltime_s": 60.5, "core_hours_per_month": 0, "gpu_hours_per_month": 10.0},
    ],
)
def test_allowance_is_json(limits: dict[str, Any]) -> None:
    allowance = Allowance(**limits)
    assert allowance.to_json() == limits
    assert Allowance.from_json(allowance.to_json()) == allowance


@pytest.mark.parametrize(
    "value",
    [
        {"max_running": 0},
        {"max_running": True},
        {"max_running": "3"},
        {"max_running": 2**31},
        {"max_walltime_s": 0},
        {"core_hours_per_month": -1},
        {"core_hours_per_month": float("nan")},
        {"gpu_hours_per_month": float("inf")},
        {"weight": 1001},
        {"cores": 1},
    ],
)
def test_impossible_allowance_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Allowance.from_json(value)


def test_most_generous_has_the_highest_of_each_limit() -> None:
    narrow = Allowance(max_running=1, max_waiting=10, core_hours_per_month=5)
    wide = Allowance(max_running=4, core_hours_per_month=1, weight=3)
    assert most_generous([narrow, wide]) == Allowance(max_running=4, core_hours_per_month=5, weight=3)
    assert most_generous([wide, narrow]) == most_generous([narrow, wide])
    assert most_generous([narrow]) == narrow
    assert most_generous([narrow, Allowance()]) == most_generous([]) == Allowance()


# submit


def test_owner_has_no_limits() -> None:
    lab = Lab(max_waiting=1, max_running=1, core_hours_per_month=0)
    assert lab.submit(5, caller=ALICE).status == 200


def test_walltime_of_the_allowance_is_that_of_the_task() -> None:
    lab = Lab(max_walltime_s=60)
    tasks = lab.api.stores.tasks
    for given, has in ((None, 60.0), (30.0, 30.0), (60.0, 60.0)):
        [task_id] = lab.submitted(walltime_s=given)
        assert tasks.get_tasks([task_id])[task_id].options.walltime_s == has
    refused = lab.submit(walltime_s=61)
    assert (refused.status, refused.body["code"]) == (403, "ALLOWANCE_EXCEEDED")


def test_waiting_tasks_are_limited() -> None:
    lab = Lab(max_waiting=3)
    lab.submitted(2)
    refused = lab.submit(2)
    assert (refused.status, refused.body["code"]) == (429, "QUEUE_FULL")
    assert "allowance of 3" in refused.body["reason"]
    lab.submitted(1)
    assert lab.lease() == 3
    lab.submitted(3)
    assert lab.submit(4).body["code"] == "ALLOWANCE_EXCEEDED"  # waiting would not help


def test_submits_at_the_same_time_do_not_pass_the_limit_of_waiting_tasks() -> None:
    lab = Lab(max_waiting=5)
    add_tasks = lab.api.stores.tasks.add_tasks
    others: list[Answer] = []

    def add_while_another_is_under_way(*args: Any, **kwargs: Any) -> Any:
        if not others:
            others.append(Answer(0, None, {}))
            others[0] = lab.submit(3)
        return add_tasks(*args, **kwargs)

    lab.api.stores.tasks.add_tasks = add_while_another_is_under_way  # type: ignore[method-assign]
    lab.submitted(3)
    assert (others[0].status, others[0].body["code"]) == (429, "QUEUE_FULL")
    lab.submitted(2)


def test_limits_stay_while_the_groups_of_a_person_are_not_recorded() -> None:
    lab = Lab()
    lab.share(max_running=9)
    path = f"endpoints/{lab.endpoint_id}"
    [share] = lab.api.call("GET", f"/v3/{path}/shares").body["shares"]
    assert lab.api.call("DELETE", f"/v3/{path}/shares/{share['share_id']}").status == 200
    lab.api.share(path, "group lab-7", allowance={"max_running": 2})
    unsure = dataclasses.replace(BOB, verified=frozenset({"group lab-7", SOME_GROUPS}))
    lab.submitted(10, caller=unsure)
    assert lab.lease() == 2
    lab.api.share(path, "name carol@example.org")
    lab.api.application.services.reconciler.run()
    assert lab.lease() == 0


@pytest.mark.parametrize("limits", [{"core_hours_per_month": 8}, {"gpu_hours_per_month": 2}])
def test_hours_of_a_month_are_limited(limits: dict[str, Any]) -> None:
    lab = Lab(**limits)
    lab.api.stores.endpoints.change_endpoint(lab.endpoint_id, {"worker_share": WorkerShare(cores=4, gpus=1)})
    one, two = lab.submitted(2)
    lab.finish(one, hours=1.5)
    lab.api.clock.now += 61
    lab.submitted()
    lab.finish(two, hours=0.5)
    lab.submitted()  # hours are read once a minute
    lab.api.clock.now += 61
    refused = lab.submit()
    assert (refused.status, refused.body["code"]) == (403, "ALLOWANCE_EXCEEDED")
    assert "renewed on 2023-12-01" in refused.body["reason"]
    lab.api.clock.now = dt.datetime(2023, 12, 1, tzinfo=dt.UTC).timestamp()
    lab.submitted()


# the queue


def test_running_tasks_are_limited_and_why_says_so() -> None:
    lab = Lab(max_running=2)
    ids = lab.submitted(4)
    assert lab.lease() == 2
    status = EndpointStatus(managers=1, total_workers=8, idle_workers=6)
    lab.api.stores.endpoints.set_presence([Presence(lab.endpoint_id, online=True, status=status)])
    why = lab.api.call("GET", f"/v3/tasks/{ids[3]}/why", caller=BOB).body
    assert (why["reason"], why["queue_position"]) == ("ALLOWANCE", 1)
    assert why["text"] == (
        "Your allowance on endpoint laptop is 2 running tasks, and it has as many; one task goes first."
    )
    single.ack(lab.queue, lab.fence, [make_result(ids[0], lab.endpoint_id)])
    assert lab.api.call("GET", f"/v3/tasks/{ids[3]}/why", caller=BOB).body["reason"] == "NEXT"


def test_changed_allowance_counts_with_the_next_submit() -> None:
    lab = Lab(max_running=1)
    lab.submitted(4)
    assert lab.lease() == 1
    lab.share(max_running=2, weight=5)
    lab.submitted()
    limits = lab.api.stores.endpoints.find_running_limits([lab.endpoint_id])
    assert limits == {lab.endpoint_id: {BOB.identity_id: RunningLimit(2, 5)}}
    assert lab.lease() == 1
    lab.share()
    lab.submitted()
    assert lab.api.stores.endpoints.find_running_limits([lab.endpoint_id]) == {lab.endpoint_id: {}}
    assert lab.lease() == 4


def test_reconciler_sets_limits_that_the_queue_lost() -> None:
    lab = Lab(max_running=1)
    lab.submitted(3)
    lab.queue.wipe()
    lab.api.clock.now += 3600
    lab.api.application.services.reconciler.run()
    lab.fence = single.claim(lab.queue, lab.endpoint_id, "w1", ttl_s=1e9)
    single.mark_restored(lab.queue, lab.endpoint_id, lab.fence)
    assert (lab.queue.depth([lab.endpoint_id]), lab.lease()) == (3, 1)


def test_reconciler_takes_away_limits_that_are_not_recorded() -> None:
    lab = Lab()
    lab.submitted(3)
    lab.queue.set_limits({lab.endpoint_id: {BOB.identity_id: RunningLimit(1)}}, complete=False)
    assert lab.lease() == 1
    lab.api.application.services.reconciler.run()
    assert lab.lease() == 2


def test_submit_goes_on_while_the_queue_is_unavailable() -> None:
    lab = Lab(max_running=1, max_waiting=5)
    lab.queue.reachable = False
    lab.submitted(3)
    lab.queue.reachable = True
    lab.api.clock.now += 3600
    lab.api.application.services.reconciler.run()
    assert lab.lease() == 1
