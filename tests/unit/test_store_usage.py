"""Usage of every Records. Here on the fake; test_store_records_postgres runs the same suite on PostgreSQL."""

from __future__ import annotations

import datetime as dt
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from farcall_common.errors import ErrorRecord
from farcall_common.store import Endpoint, Records
from farcall_common.store.model import Usage, UsageBy
from farcall_common.task_options import TaskOptions
from farcall_common.wire.states import Reporter, TaskState
from farcall_common.worker_share import WorkerShare
from tests.support.stores import FakeDatabase
from tests.unit.test_store_records import at, make_task, make_task_result, transition

TODAY = at(0).date()
ALL = {"since": TODAY - dt.timedelta(days=400), "until": TODAY + dt.timedelta(days=400)}
ERROR = ErrorRecord("FAILED", "it failed")


def run(records: Records, task_id: str, seconds: float = 10.0, *, ended: float = 100.0, **changes: Any) -> None:
    """A task that ran for so long, and whose end was recorded ``ended`` seconds after the submit."""
    result = changes.pop("result", {})
    task = make_task(task_id, **changes)
    records.tasks.add_tasks([task])
    timings = {"started_at": 1000.0, "ended_at": 1000.0 + seconds}
    reported = make_task_result(task_id, **{"endpoint_id": task.endpoint_id, "timings": timings, **result})
    records.tasks.record_results([reported], at=at(ended))


def usage(records: Records, *by: UsageBy, **wanted: Any) -> list[Usage]:
    return list(records.usage.read_usage(by, **{**ALL, **wanted}))


def put_endpoint(records: Records, endpoint_id: str = "e1", owner_id: str = "olga", **share: Any) -> None:
    records.endpoints.put_endpoint(Endpoint(endpoint_id, owner_id, "name"))
    records.endpoints.change_endpoint(endpoint_id, {"worker_share": WorkerShare(**share)})


class UsageSuite:
    """``records`` are empty."""

    def test_nothing_is_used_at_first(self, records: Records) -> None:
        records.tasks.add_tasks([make_task()])
        assert usage(records) == usage(records, UsageBy.DAY) == []

    def test_usage_is_summed_by_what_is_asked_for(self, records: Records) -> None:
        run(records, "t1")
        run(records, "t2", 20.0, function_id="f2")
        run(records, "t3", 40.0, owner_id="bob", result={"state": TaskState.FAILED, "result": None, "error": ERROR})
        assert usage(records) == [Usage(3, 1, 70.0, 70.0, 0.0)]
        assert usage(records, UsageBy.IDENTITY) == [
            Usage(2, 0, 30.0, 30.0, 0.0, owner_id="alice"),
            Usage(1, 1, 40.0, 40.0, 0.0, owner_id="bob"),
        ]
        assert usage(records, UsageBy.FUNCTION, UsageBy.DAY, owner_ids=["alice"]) == [
            Usage(1, 0, 10.0, 10.0, 0.0, day=TODAY, function_id="f1"),
            Usage(1, 0, 20.0, 20.0, 0.0, day=TODAY, function_id="f2"),
        ]

    def test_result_that_comes_again_is_counted_once(self, records: Records) -> None:
        run(records, "t1")
        records.tasks.record_results([make_task_result("t1")] * 2, at=at(101))
        assert [each.tasks for each in usage(records)] == [1]

    def test_result_of_another_endpoint_does_not_count(self, records: Records) -> None:
        run(records, "t1", result={"endpoint_id": "e2"})
        assert usage(records) == []

    def test_resources_of_a_worker_and_account(self, records: Records) -> None:
        put_endpoint(records, cores=4, gpus=2, node_cores=64, node_gpus=8, account="phys-7")
        run(records, "t1")
        run(records, "t2", options=TaskOptions(num_nodes=2))
        run(records, "t3", options=TaskOptions(num_ranks=10, ranks_per_node=4))
        assert usage(records, UsageBy.ACCOUNT) == [
            Usage(3, 0, 30.0, 10.0 * (4 + 2 * 64 + 3 * 64), 10.0 * (2 + 2 * 8 + 3 * 8), account="phys-7")
        ]

    def test_endpoint_keeps_its_share(self, records: Records) -> None:
        put_endpoint(records, cores=4, account="phys-7")
        found = records.endpoints.get_endpoint("e1")
        assert found is not None
        assert found.worker_share == WorkerShare(cores=4, account="phys-7")

    def test_run_time_is_not_more_than_the_time_since_the_submit(self, records: Records) -> None:
        run(records, "t1", 1e6, ended=100.0)
        run(records, "t2", -5.0)
        assert [each.wall_s for each in usage(records)] == [100.0]

    def test_stopped_task_counts_from_the_report_that_it_runs(self, records: Records) -> None:
        for task_id, state in (("t1", TaskState.FAILED), ("t2", TaskState.LOST)):
            records.tasks.add_tasks([make_task(task_id)])
            records.tasks.record_transitions([transition(task_id, TaskState.WAITING_FOR_NODES, 1)])
            records.tasks.record_transitions([transition(task_id, TaskState.RUNNING, 1)])
            ended = make_task_result(task_id, state=state, result=None, error=ERROR)
            records.tasks.record_results([ended], at=at(31))
        assert usage(records) == [Usage(2, 2, 30.0, 30.0, 0.0)]

    @pytest.mark.parametrize("timed", [True, False])
    def test_runs_that_were_retried_count(self, records: Records, timed: bool) -> None:
        result: dict[str, Any] = {"details": {"earlier_run_s": 7.5, "retries_used": 2}}
        run(records, "t1", 20.0, result=result if timed else {**result, "timings": {}})
        run(records, "t2", 20.0, result={"details": {"earlier_run_s": 1e9}})
        assert [each.wall_s for each in usage(records)] == [(27.5 if timed else 7.5) + 100.0]

    def test_calls_of_a_graph_count_together(self, records: Records) -> None:
        put_endpoint(records, cores=2)
        run(records, "t1", 20.0, result={"details": {"stage_calls": 40, "stage_run_s": 50.0, "earlier_run_s": 1.0}})
        failed: dict[str, Any] = {"state": TaskState.FAILED, "result": None, "error": ERROR, "timings": {}}
        run(records, "t2", result={**failed, "details": {"stage_calls": 2, "stage_run_s": 3.5}})
        run(records, "t3", 10.0)
        assert usage(records) == [Usage(3, 1, 64.5, 129.0, 0.0, stages=42)]
        assert records.usage.fold_usage(limit=10) == len(usage(records, *UsageBy)) * 3
        assert usage(records, UsageBy.IDENTITY) == [Usage(3, 1, 64.5, 129.0, 0.0, owner_id="alice", stages=42)]

    def test_calls_of_a_graph_run_no_longer_than_since_the_submit_each(self, records: Records) -> None:
        run(records, "t1", 20.0, ended=100.0, result={"details": {"stage_calls": 3, "stage_run_s": 1e9}})
        run(records, "t2", 20.0, ended=100.0, result={"details": {"stage_calls": 0, "stage_run_s": 0.0}})
        assert usage(records) == [Usage(2, 0, 400.0, 400.0, 0.0, stages=3)]

    def test_task_that_makes_calls_runs_beside_them(self, records: Records) -> None:
        run(records, "t1", 100.0, ended=100.0, result={"details": {"stage_calls": 1, "stage_run_s": 190.0}})
        assert [each.wall_s for each in usage(records)] == [190.0]

    def test_cancelled_task_that_never_ran_used_nothing(self, records: Records) -> None:
        cancelled = {"state": TaskState.CANCELLED, "reporter": Reporter.API, "result": None, "error": ERROR}
        run(records, "t1", result={**cancelled, "timings": {}})
        assert usage(records) == [Usage(1, 0, 0.0, 0.0, 0.0)]

    def test_usage_counts_on_the_day_of_the_end(self, records: Records) -> None:
        run(records, "t1", ended=86_400.0)
        run(records, "t2")
        tomorrow = TODAY + dt.timedelta(days=1)
        assert [each.day for each in usage(records, UsageBy.DAY)] == [TODAY, tomorrow]
        assert [each.day for each in usage(records, UsageBy.DAY, until=tomorrow)] == [TODAY]
        assert [each.day for each in usage(records, UsageBy.DAY, since=tomorrow)] == [tomorrow]

    def test_owner_of_an_endpoint_finds_all_its_users(self, records: Records) -> None:
        put_endpoint(records, "e1", "olga")
        put_endpoint(records, "e2", "paul")
        run(records, "t1", endpoint_id="e1")
        run(records, "t2", endpoint_id="e2")
        run(records, "t3", endpoint_id="e1", owner_id="bob")
        assert [each.tasks for each in usage(records, endpoint_owner_ids=["olga"])] == [2]
        assert usage(records, endpoint_owner_ids=["quinn"]) == []
        assert [each.tasks for each in usage(records, endpoint_id="e1", owner_ids=["bob"])] == [1]

    def test_pages(self, records: Records) -> None:
        for n in range(5):
            run(records, f"t{n}", function_id=f"f{n}")
        pages = [usage(records, UsageBy.FUNCTION, after=after, limit=2) for after in (0, 2, 4, 6)]
        assert [[each.function_id for each in page] for page in pages] == [["f0", "f1"], ["f2", "f3"], ["f4"], []]

    def test_combining_batches_changes_no_answer(self, records: Records) -> None:
        everything = tuple(UsageBy)
        for n in range(5):
            run(records, f"t{n}", owner_id=("alice", "bob")[n % 2])
        before = usage(records, *everything)
        assert records.usage.fold_usage(limit=3) == 3
        assert usage(records, *everything) == before
        assert [records.usage.fold_usage(limit=3) for _ in range(2)] == [2, 0]
        assert usage(records, *everything) == before

    def test_concurrent_rounds_combine_each_batch_once(self, records: Records) -> None:
        for n in range(20):
            run(records, f"t{n}")
        start = threading.Barrier(4)

        def fold(_: int) -> int:
            start.wait()
            count = folded = records.usage.fold_usage(limit=3)
            while folded:
                count += (folded := records.usage.fold_usage(limit=3))
            return count

        with ThreadPoolExecutor(4) as pool:
            counts = list(pool.map(fold, range(4)))
        assert sum(counts) == 20
        assert usage(records) == [Usage(20, 0, 200.0, 200.0, 0.0)]

    @pytest.mark.parametrize("folds", [False, True])
    def test_purged_tasks_stay_counted(self, records: Records, folds: bool) -> None:
        run(records, "t1")
        assert records.tasks.purge_tasks(ended_before=at(1000), limit=10) == 1
        assert records.usage.fold_usage(limit=10) if folds else True
        assert [each.tasks for each in usage(records)] == [1]

    def test_sums_of_old_days_are_purged(self, records: Records) -> None:
        run(records, "t1")
        run(records, "t2", ended=2 * 86_400.0)
        records.usage.fold_usage(limit=10)
        assert records.usage.purge_usage(before=TODAY, limit=10) == 0
        assert records.usage.purge_usage(before=TODAY + dt.timedelta(days=1), limit=10) == 1
        assert [each.tasks for each in usage(records)] == [1]


class TestFakeUsage(UsageSuite):
    @pytest.fixture
    def records(self) -> Records:
        return FakeDatabase().records
