"""The reconciler."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable, Mapping, Sequence

import pytest

from farcall_common.errors import Unavailable
from farcall_common.store.model import AuditEntry, OpenTask, QueueState, Task, TaskEvent, TaskResult
from farcall_common.wire.states import Reporter, TaskState
from farcall_lambdas.services.reconcile import Reconciled
from farcall_lambdas.settings import ApiSettings
from tests.support.memory_api import ALICE, Clock, MemoryApi
from tests.support.stores import FakeDatabase, FakeQueue, fake_stores, single

DAY_S = 86_400.0


class WatchedQueue(FakeQueue):
    """Calls ``on_find_missing`` after each comparison."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.on_find_missing: Callable[[], object] = lambda: None

    def find_missing(self, task_ids: Mapping[str, Sequence[str]]) -> frozenset[str]:
        found = super().find_missing(task_ids)
        self.on_find_missing()
        return found


class WatchedDatabase(FakeDatabase):
    """Calls ``on_call`` with the name of a method and the number of tasks that are read, or may be purged."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.on_call: Callable[[str, int], None] = lambda _method, _count: None
        self.before_tasks_are_added: Callable[[], object] = lambda: None

    def add_tasks(
        self,
        tasks: Sequence[Task],
        *,
        memoized: Mapping[str, Task] | None = None,
        audit: AuditEntry | None = None,
        endpoint_id: str | None = None,
    ) -> Mapping[str, Task]:
        self.before_tasks_are_added()
        return super().add_tasks(tasks, memoized=memoized, audit=audit, endpoint_id=endpoint_id)

    def get_tasks(self, task_ids: Sequence[str], **kinds: bool) -> Mapping[str, Task]:
        self.on_call("get_tasks", len(task_ids))
        return super().get_tasks(task_ids, **kinds)

    def list_open_tasks(self, endpoint_id: str, *, after: str = "", limit: int = 1000) -> Sequence[Task]:
        found = super().list_open_tasks(endpoint_id, after=after, limit=limit)
        self.on_call("list_open_tasks", len(found))
        return found

    def list_open_ids(self, *, after: tuple[int, str] = (0, ""), limit: int = 1000) -> Sequence[OpenTask]:
        found = super().list_open_ids(after=after, limit=limit)
        self.on_call("list_open_ids", len(found))
        return found

    def purge_tasks(self, *, ended_before: dt.datetime, limit: int) -> int:
        self.on_call("purge_tasks", limit)
        return super().purge_tasks(ended_before=ended_before, limit=limit)


class Lab:
    """An API whose queue can be away while tasks are submitted."""

    def __init__(self, settings: ApiSettings | None = None) -> None:
        clock = Clock()
        self.queue, self.database = WatchedQueue(clock), WatchedDatabase(clock)
        stores = fake_stores(clock, database=self.database, queue=self.queue)
        self.api = MemoryApi(settings=settings, stores=stores, clock=clock)
        self.records = self.api.stores
        self.reconciler = self.api.application.services.reconciler
        self.function_id = self.api.function()
        self.endpoint_id = self.api.endpoint()

    def submit(self, count: int = 1, *, queued: bool = True) -> list[str]:
        self.queue.reachable = queued
        body = {"tasks": {self.function_id: ["p"] * count}}
        answer = self.api.call("POST", f"/v3/endpoints/{self.endpoint_id}/submit", body)
        self.queue.reachable = True
        return list(answer.body["tasks"][self.function_id])

    def own(self) -> int:
        fence = single.claim(self.queue, self.endpoint_id, "fwd-1", ttl_s=1e9)
        single.mark_restored(self.queue, self.endpoint_id, fence)
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

    leased = single.lease(lab.queue, lab.endpoint_id, fence, limit=2000, lease_s=30)
    assert (done.endpoints, done.offered) == (1, 1500)
    assert [each.task.task_id for each in leased] == task_ids
    assert wake_ups.get(0) == [lab.endpoint_id]


def test_second_run_queues_no_task_twice(lab: Lab) -> None:
    lab.submit(queued=False)
    lab.api.clock.now += 60

    lab.reconciler.run()
    lab.reconciler.run()

    assert lab.queue.depth([lab.endpoint_id]) == 1


def test_recent_submit_is_left_alone(lab: Lab) -> None:
    lab.submit(queued=False)

    assert lab.reconciler.run().offered == 0


def test_dispatched_task_is_restored_by_its_forwarder(lab: Lab) -> None:
    [task_id] = lab.submit()
    at = dt.datetime.fromtimestamp(lab.api.clock.now, dt.UTC)
    lab.records.tasks.record_transitions(
        [TaskEvent(task_id, TaskState.WAITING_FOR_NODES, Reporter.AGENT, at, attempt=1)]
    )
    lab.queue.wipe()
    lab.api.clock.now += 60

    assert lab.reconciler.run().offered == 0
    assert lab.queue.depth([lab.endpoint_id]) == 0


def test_each_run_logs_the_number_of_waiting_tasks(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reached, running, _, ended = lab.submit(4)
    at = dt.datetime.fromtimestamp(lab.api.clock.now, dt.UTC)
    for task_id, state in ((reached, TaskState.WAITING_FOR_NODES), (running, TaskState.RUNNING)):
        lab.records.tasks.record_transitions([TaskEvent(task_id, state, Reporter.AGENT, at, attempt=1)])
    end(lab, [ended])
    lab.api.clock.now += 60
    lab.submit()  # just now

    lab.reconciler.run()
    end(lab, [each.task_id for each in lab.records.tasks.list_open_tasks(lab.endpoint_id)])
    lab.reconciler.run()

    told = [vars(record)["tasks_waiting"] for record in caplog.records if "tasks_waiting" in vars(record)]
    assert told == [2, 0]


def test_results_left_in_the_outbox_are_recorded(lab: Lab) -> None:
    [task_id] = lab.submit()
    fence = lab.own()
    single.lease(lab.queue, lab.endpoint_id, fence, limit=1, lease_s=30)
    end = TaskResult(
        task_id, lab.endpoint_id, 1, TaskState.SUCCESS, Reporter.AGENT, result=b"00\nr",
        timings={"returned_at": lab.api.clock.now},
    )  # fmt: skip
    single.ack(lab.queue, fence, [end])

    lab.api.clock.now += 5
    assert lab.reconciler.run().recorded == 0, "its forwarder may be at it"
    lab.api.clock.now += 60
    assert lab.reconciler.run().recorded == 1

    assert lab.records.tasks.get_tasks([task_id])[task_id].result == b"00\nr"
    assert lab.queue.outbox(lab.endpoint_id) == []
    assert lab.reconciler.run().endpoints == 0


@pytest.mark.parametrize("hours", [1, -1])
def test_results_with_wrong_clocks_are_recorded(lab: Lab, hours: int) -> None:
    [task_id] = lab.submit()
    fence = lab.own()
    single.lease(lab.queue, lab.endpoint_id, fence, limit=1, lease_s=30)
    end = TaskResult(
        task_id, lab.endpoint_id, 1, TaskState.SUCCESS, Reporter.AGENT, result=b"00\nr",
        timings={"returned_at": lab.api.clock.now + 3600 * hours},
    )  # fmt: skip
    single.ack(lab.queue, fence, [end])
    lab.api.clock.now += 60
    assert lab.reconciler.run().recorded == 1
    assert lab.records.tasks.get_tasks([task_id])[task_id].result == b"00\nr"


def test_reconciler_never_claims_an_endpoint(lab: Lab) -> None:
    lab.submit(queued=False)
    fence = lab.own()
    lab.api.clock.now += 60

    lab.reconciler.run()

    assert lab.queue.renew_ownership("fwd-1", {lab.endpoint_id: (fence, "")}, ttl_s=45) == []


def test_task_with_a_wrong_submit_time_is_queued(lab: Lab) -> None:
    """The checkpoint goes by the order of transactions: an hour more or less on the submit's clock changes nothing."""
    lab.submit()
    offered = 0
    for skew in (-3600, 3600):
        lab.api.clock.now += 60
        offered += lab.reconciler.run().offered
        lab.api.clock.now += skew
        lab.submit(queued=False)
        lab.api.clock.now -= skew
    for _ in range(3):
        lab.api.clock.now += 60
        offered += lab.reconciler.run().offered

    assert offered == 2
    assert lab.queue.depth([lab.endpoint_id]) == 3


def test_waiting_tasks_are_queued_again_after_a_wipe(lab: Lab) -> None:
    task_ids = lab.submit(1500)
    for _ in range(3):
        lab.api.clock.now += 60
        assert lab.reconciler.run().offered == 0
    lab.queue.wipe()

    assert lab.reconciler.run().offered == 1500
    fence = lab.own()
    leased = single.lease(lab.queue, lab.endpoint_id, fence, limit=2000, lease_s=30)
    assert [each.task.task_id for each in leased] == task_ids


def test_wipe_during_a_run_is_repaired_by_the_next(lab: Lab) -> None:
    lab.submit(3)
    for _ in range(3):
        lab.api.clock.now += 60
        lab.reconciler.run()

    lab.queue.on_find_missing = lab.queue.wipe
    assert lab.reconciler.run().offered == 0
    lab.queue.on_find_missing = lambda: None

    assert lab.reconciler.run().offered == 3


def test_single_lost_task_is_found_by_the_sweep(lab: Lab) -> None:
    """Such as by a hand in the queue: no wipe, so that the checkpoint is still there."""
    task_ids = lab.submit(2500)
    for _ in range(3):
        lab.api.clock.now += 60
        lab.reconciler.run()
    endpoint = lab.queue._endpoint(lab.endpoint_id)
    endpoint.waiting.remove(ALICE.identity_id, task_ids[1700])
    del endpoint.entries[task_ids[1700]]

    assert sum(lab.reconciler.run().offered for _ in range(3)) == 1
    assert lab.queue.depth([lab.endpoint_id]) == 2500


def test_run_stops_at_its_time_limit_and_the_next_continues() -> None:
    lab = Lab(ApiSettings(repair_until_s=1.5))
    lab.submit(10, queued=False)
    lab.submit(5000, queued=False)
    lab.api.clock.now += 60
    lab.reconciler.run()
    lab.queue.wipe()

    def slow() -> None:
        lab.api.clock.now += 1.0

    lab.queue.on_find_missing = slow
    offered = [lab.reconciler.run().offered for _ in range(8)]

    assert sum(offered) == 5010
    assert max(offered) <= 3000, "two pages, and one of the sweep"


def test_run_on_a_slow_disk_ends_in_time_and_the_next_continues() -> None:
    settings = ApiSettings(repair_until_s=45.0)
    lab = Lab(settings)
    lab.submit(3000, queued=False)  # one transaction
    lab.api.clock.now += 60

    def slow(method: str, count: int) -> None:
        if method == "get_tasks":
            lab.api.clock.now += 0.02 * count

    lab.database.on_call = slow
    offered: list[int] = []
    while not offered or offered[-1]:
        began_at = lab.api.clock.now
        offered.append(lab.reconciler.run().offered)
        assert lab.api.clock.now - began_at <= settings.repair_until_s + 2 * 2.0, (
            "a few tasks of a page and of the sweep"
        )
    assert sum(offered) == 3000
    assert offered[0] > 2000


def test_tasks_of_one_transaction_are_compared_once() -> None:
    lab = Lab(ApiSettings(repair_until_s=1.5))
    lab.submit(10_000, queued=False)
    lab.api.clock.now += 60

    def slow() -> None:
        lab.api.clock.now += 0.4  # three or four pages in a round

    lab.queue.on_find_missing = slow
    assert sum(lab.reconciler.run().offered for _ in range(4)) == 10_000


def test_concurrent_run_is_skipped(lab: Lab) -> None:
    lab.submit(queued=False)
    lab.api.clock.now += 60
    second: list[Reconciled] = []
    lab.queue.on_find_missing = lambda: second.append(lab.reconciler.run())

    assert lab.reconciler.run().offered == 1
    assert set(second) == {Reconciled(skipped=1)}


def test_old_tasks_are_purged_while_the_queue_is_unavailable(lab: Lab) -> None:
    end(lab, lab.submit(3))
    lab.api.clock.now += 31 * DAY_S
    lab.submit(queued=False)
    lab.queue.reachable = False

    with pytest.raises(Unavailable):
        lab.reconciler.run()

    lab.queue.reachable = True
    assert lab.reconciler.run().purged == 0, "they were forgotten by the first round"
    assert len(lab.records.tasks.list_open_ids()) == 1


def test_work_of_a_run_is_independent_of_the_backlog() -> None:
    def read_in_a_round(backlog: int) -> list[int]:
        """Rows that each statement of a round returned."""
        lab = Lab()
        for _ in range(backlog // 5000):
            lab.submit(5000)
        for _ in range(3):
            lab.api.clock.now += 60
            lab.reconciler.run()
        read: list[int] = []

        def counted(method: str, count: int) -> None:
            assert method in ("list_open_ids", "purge_tasks"), "no bodies are read"
            if method == "list_open_ids":
                read.append(count)

        lab.database.on_call = counted
        assert lab.reconciler.run().tasks_waiting == backlog
        return read

    assert read_in_a_round(5000) == read_in_a_round(20_000) == [1000, 0, 1000]


def test_task_not_started_in_time_fails_with_a_reason(lab: Lab) -> None:
    waiting, leased, running, ended = lab.submit(4)
    fence = lab.own()
    single.lease(lab.queue, lab.endpoint_id, fence, limit=3, lease_s=1e9)
    lab.queue.unlease(lab.endpoint_id, fence, [waiting])
    at = dt.datetime.fromtimestamp(lab.api.clock.now, dt.UTC)
    lab.records.tasks.record_transitions([TaskEvent(running, TaskState.RUNNING, Reporter.AGENT, at, attempt=1)])
    end(lab, [ended])
    lab.api.clock.now += 29 * DAY_S
    [young] = lab.submit()
    assert lab.reconciler.run().expired == 0
    lab.api.clock.now += 2 * DAY_S

    assert lab.reconciler.run().expired == 2

    shown = lab.api.call("GET", f"/v2/tasks/{waiting}").body
    assert (shown["status"], shown["completion_t"] is not None) == ("failed", True)
    assert lab.records.tasks.get_tasks([waiting])[waiting].error == lab.records.tasks.get_tasks([leased])[leased].error
    error = lab.records.tasks.get_tasks([waiting])[waiting].error
    assert error is not None
    assert error.code == "WAITED_TOO_LONG"
    assert [task.task_id for task in lab.records.tasks.list_open_ids()] == [running, young]
    assert lab.queue.outbox(lab.endpoint_id) == []
    assert single.cancel_requests(lab.queue, lab.endpoint_id, fence) == [leased], "its endpoint is asked to stop"
    assert lab.queue.position(lab.endpoint_id, waiting).state is QueueState.DONE


def test_queue_outage_is_raised(lab: Lab) -> None:
    lab.submit(queued=False)
    lab.api.clock.now += 60
    lab.queue.reachable = False

    with pytest.raises(Unavailable):
        lab.reconciler.run()


def end(lab: Lab, task_ids: list[str]) -> None:
    """The tasks succeed now."""
    now = dt.datetime.fromtimestamp(lab.api.clock.now, dt.UTC)
    ends = [TaskResult(id_, lab.endpoint_id, 1, TaskState.SUCCESS, Reporter.AGENT, result=b"r") for id_ in task_ids]
    lab.records.tasks.record_results(ends, at=now)


def test_ended_tasks_are_purged_after_their_retention(lab: Lab) -> None:
    old = lab.submit(3)
    end(lab, old)
    lab.api.clock.now += 29 * DAY_S
    young = lab.submit(2)
    end(lab, young[:1])
    assert lab.reconciler.run().purged == 0

    lab.api.clock.now += 2 * DAY_S

    assert lab.reconciler.run().purged == 3
    assert lab.records.tasks.get_tasks([*old, *young]).keys() == set(young)
    assert lab.api.call("GET", f"/v2/tasks/{old[0]}").body["code"] == "TASK_UNKNOWN"


def test_open_task_is_never_purged(lab: Lab) -> None:
    [task_id] = lab.submit()
    lab.api.clock.now += 1000 * DAY_S

    assert lab.reconciler.run().purged == 0
    assert lab.records.tasks.get_tasks([task_id])


def test_tasks_are_purged_in_batches_within_the_time_limit() -> None:
    lab = Lab(ApiSettings(purge_batch=2, purge_until_s=2.5))
    end(lab, lab.submit(7))
    lab.api.clock.now += 31 * DAY_S
    limits: list[int] = []

    def noted(method: str, limit: int) -> None:
        if method == "purge_tasks":
            limits.append(limit)
            lab.api.clock.now += 1.0

    lab.database.on_call = noted

    assert [lab.reconciler.run().purged for _ in range(3)] == [6, 1, 0]
    assert limits == [2] * 5


def test_audit_entries_are_purged_after_their_retention(lab: Lab) -> None:
    before = len(lab.records.audit.list_entries([ALICE.identity_id]))
    assert before > 0
    lab.api.clock.now += 401 * DAY_S

    assert lab.reconciler.run().audit_purged == before
    assert lab.records.audit.list_entries([ALICE.identity_id]) == []


def test_usage_is_combined_and_kept_as_long_as_the_audit(lab: Lab) -> None:
    [task_id] = lab.submit()
    result = TaskResult(task_id, lab.endpoint_id, 1, TaskState.SUCCESS, Reporter.AGENT, result=b"r")
    lab.records.tasks.record_results([result], at=dt.datetime.fromtimestamp(lab.api.clock(), dt.UTC))
    assert [lab.reconciler.run().usage_combined for _ in range(2)] == [1, 0]

    def tasks() -> list[int]:
        found = lab.records.usage.read_usage([], since=dt.date(2023, 1, 1), until=dt.date(2030, 1, 1))
        return [each.tasks for each in found]

    lab.api.clock.now += 399 * DAY_S
    assert lab.reconciler.run().purged == 1
    assert tasks() == [1]
    lab.api.clock.now += 2 * DAY_S
    lab.reconciler.run()
    assert tasks() == []


def delete(lab: Lab) -> None:
    assert lab.api.call("DELETE", f"/v2/endpoints/{lab.endpoint_id}").status == 200


def test_tasks_of_a_deleted_endpoint_are_cancelled(lab: Lab) -> None:
    [ended] = lab.submit()
    end(lab, [ended])
    waiting, leased = lab.submit(2)
    fence = lab.own()
    single.lease(lab.queue, lab.endpoint_id, fence, limit=2, lease_s=1e9)
    lab.queue.unlease(lab.endpoint_id, fence, [waiting])

    delete(lab)

    tasks = lab.records.tasks.get_tasks([ended, waiting, leased])
    assert [tasks[each].state for each in (ended, waiting, leased)] == [
        TaskState.SUCCESS, TaskState.CANCELLED, TaskState.CANCELLED,
    ]  # fmt: skip
    error = tasks[leased].error
    assert error is not None
    assert (error.code, tasks[waiting].error) == ("ENDPOINT_DELETED", error)
    assert lab.records.tasks.list_open_ids() == []
    assert lab.queue.find_missing({lab.endpoint_id: [waiting, leased]}) == {waiting, leased}
    assert lab.reconciler.run().orphaned == 0


def test_many_tasks_of_a_deleted_endpoint_end_in_rounds_of_equal_work(lab: Lab) -> None:
    for _ in range(4):
        lab.submit(10_000)
    delete(lab)
    assert lab.queue.depth([lab.endpoint_id]) == 35_000, "the request ended some"

    lab.api.clock.now += 60
    done = lab.reconciler.run()
    assert (done.orphaned, done.offered) == (20_000, 0)
    lab.api.clock.now += 60
    done = lab.reconciler.run()
    assert (done.orphaned, done.offered) == (15_000, 0)
    assert lab.queue.depth([lab.endpoint_id]) == 0
    assert lab.records.tasks.list_open_ids() == []


def test_tasks_of_an_endpoint_deleted_while_the_queue_was_away_leave_it_later(lab: Lab) -> None:
    task_ids = lab.submit(3)
    lab.queue.reachable = False
    delete(lab)
    assert len(lab.records.tasks.list_open_ids()) == 3
    lab.queue.reachable = True
    lab.api.clock.now += 60

    done = lab.reconciler.run()

    assert (done.orphaned, done.offered) == (3, 0)
    assert lab.queue.find_missing({lab.endpoint_id: task_ids}) == set(task_ids)


def test_task_of_an_endpoint_that_was_deleted_meanwhile_is_refused(lab: Lab) -> None:
    """The submit has read the endpoint, and commits after the delete."""
    lab.database.before_tasks_are_added = lambda: delete(lab)
    body = {"tasks": {lab.function_id: ["p"]}}

    answer = lab.api.call("POST", f"/v3/endpoints/{lab.endpoint_id}/submit", body)

    assert (answer.status, answer.body["code"]) == (404, "ENDPOINT_UNKNOWN")
    assert lab.records.tasks.list_open_ids() == []
    assert lab.queue.depth([lab.endpoint_id]) == 0


def test_open_tasks_of_an_unknown_endpoint_end_and_are_not_queued(lab: Lab) -> None:
    """As an earlier release left them."""
    lab.submit(3, queued=False)
    lab.database.delete_endpoint(lab.endpoint_id)
    other = lab.api.endpoint(endpoint_name="other")
    lab.endpoint_id, deleted = other, lab.endpoint_id
    lab.submit(2, queued=False)
    lab.api.clock.now += 60

    done = lab.reconciler.run()

    assert (done.orphaned, done.offered) == (3, 2)
    assert (lab.queue.depth([deleted]), lab.queue.depth([other])) == (0, 2)


def test_a_round_recounts_the_bytes_of_some_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    api = MemoryApi()
    steps: list[int] = []

    def step(cursor: int) -> int:
        steps.append(cursor)
        return (cursor + 1) % 30

    monkeypatch.setattr(api.stores.queue, "recount_bytes", step)
    api.application.services.reconciler.run()
    assert steps == list(range(20))
    api.application.services.reconciler.run()
    assert steps[20:] == list(range(20, 30)), "it continues, and a walk ends with the round"
    api.application.services.reconciler.run()
    assert steps[30:] == list(range(20))
