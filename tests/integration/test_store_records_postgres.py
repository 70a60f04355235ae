"""The records in a real PostgreSQL: the suite of every Records, and what only a server can get wrong."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from farcall_common.errors import InvalidRequest, Unavailable
from farcall_common.store import Records, open_records, task_rows
from farcall_common.store.postgres import PostgresDatabase
from farcall_common.store.tasks_postgres import _ENDPOINTS_WITH_OPEN_TASKS, _OPEN_IDS
from farcall_common.wire.states import TaskState
from tests.integration.store_servers import execute, free_port
from tests.unit.test_store_records import (
    RecordsSuite,
    at,
    make_dead,
    make_entry,
    make_function,
    make_task,
    make_task_result,
    transition,
)
from tests.unit.test_store_usage import UsageSuite
from tests.waiting import WAIT_S


@pytest.fixture
def records(postgres_url: str) -> Iterator[Records]:
    records = open_records(postgres_url, timeout_s=5)
    yield records
    records.close()


class TestPostgresRecords(RecordsSuite):
    pass


class TestPostgresUsage(UsageSuite):
    pass


def test_unstorable_text_is_the_callers_fault(records: Records) -> None:
    with pytest.raises(InvalidRequest):
        records.functions.add_function(make_function(name="nul \x00"))
    with pytest.raises(InvalidRequest):
        records.functions.add_function(make_function(name="half a pair \ud800"))


def test_an_absent_server_is_unavailable() -> None:
    records = open_records(f"postgresql://farcall@127.0.0.1:{free_port()}/postgres", timeout_s=0.2)
    with pytest.raises(Unavailable):
        records.database.ping()
    records.close()


def test_broken_connections_are_replaced(records: Records, postgres_url: str) -> None:
    records.database.ping()
    others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    execute(postgres_url, f"SELECT pg_terminate_backend(pid, 10000) {others}")  # and wait for its end, milliseconds
    records.database.ping()


def test_batches_that_share_tasks_in_opposite_orders_do_not_lock_each_other_out(records: Records) -> None:
    tasks = [make_task(f"t{n:03}") for n in range(100)]
    start = threading.Barrier(4)

    def work(worker: int) -> int:
        order = tasks if worker % 2 else tasks[::-1]
        start.wait()
        for _ in range(5):
            records.tasks.add_tasks(order)
            records.tasks.record_transitions(
                [transition(task.task_id, TaskState.WAITING_FOR_NODES, 1) for task in order]
            )
        return len(records.tasks.record_results([make_task_result(task.task_id) for task in order], at=at(1)))

    with ThreadPoolExecutor(4) as workers:
        assert sum(workers.map(work, range(4))) == 100


def test_one_of_many_concurrent_callers_gets_the_permit(records: Records) -> None:
    records.tasks.add_tasks([make_task(idempotent=False)])
    start = threading.Barrier(4)

    def ask(_: int) -> list[str]:
        start.wait()
        return list(records.tasks.record_transitions([transition("t1", TaskState.WAITING_FOR_NODES, 1)]))

    with ThreadPoolExecutor(4) as workers:
        assert sorted(workers.map(ask, range(4))) == [[], [], [], ["t1"]]


def test_a_history_begins_once_with_concurrent_writers(records: Records, postgres_url: str) -> None:
    """Releases before this one added an event for what the row of the task says."""
    records.tasks.add_tasks([make_task("t1"), make_task("t2")])
    execute(
        postgres_url,
        "INSERT INTO task_event (task_id, state, reporter, at, attempt)"
        " SELECT task_id, 'received', 'api', submitted_at, 0 FROM task WHERE task_id = 't1'",
    )
    records.tasks.record_transitions([transition("t1", TaskState.RUNNING, 1), transition("t2", TaskState.RUNNING, 1)])
    first, second = records.tasks.list_events("t1"), records.tasks.list_events("t2")
    assert [event.state for event in first] == [TaskState.RECEIVED, TaskState.RUNNING]
    assert [(e.state, e.reporter, e.at, e.attempt, e.detail) for e in first] == [
        (e.state, e.reporter, e.at, e.attempt, e.detail) for e in second
    ]


def test_tasks_that_may_call_a_function_are_found_among_those_that_call_any(postgres_url: str) -> None:
    """However many other tasks are open."""
    query = task_rows.open_tasks([task_rows.CALLS_FUNCTION], with_options=False)
    with psycopg.connect(postgres_url) as connection:
        connection.execute("SET enable_seqscan = off")
        wanted = {"function_id": "f1", "after": "", "limit": 9}
        plan = connection.execute(f"EXPLAIN {query}".encode(), wanted).fetchall()
    assert "task_open_callees" in str(plan)


def test_key_lookups_are_planned_once_and_never_scan_a_table(postgres_url: str) -> None:
    """Also when it is planned while the tables are empty, which is when a scan looks cheapest."""
    records = open_records(postgres_url, max_connections=1)
    for number in range(8):  # the driver prepares what comes often
        records.tasks.read_for_submit("e1", ["f1"], [])
        records.tasks.add_tasks([make_task(f"t{number}")])
        records.tasks.get_tasks([f"t{number}"])
    settings = "SELECT current_setting('plan_cache_mode') AS plans, current_setting('enable_seqscan') AS scans"
    database = records.database
    assert isinstance(database, PostgresDatabase)
    [after] = database.rows(settings, {})
    prepared = database.rows("SELECT statement, generic_plans, custom_plans FROM pg_prepared_statements", {})
    records.close()
    assert after == {"plans": "force_custom_plan", "scans": "on"}
    plans = {row["statement"]: (row["generic_plans"], row["custom_plans"]) for row in prepared}
    by_keys = [text for text in plans if "set_config" not in text]
    assert len(by_keys) == 3
    with psycopg.connect(postgres_url) as connection:
        connection.execute("SET enable_seqscan = off")
        for text in by_keys:
            assert plans[text][0] > 0 == plans[text][1]
            plan = connection.execute(f"EXPLAIN (GENERIC_PLAN) {text}".encode()).fetchall()
            assert "Seq Scan" not in str(plan)


def test_a_result_is_found_among_many_of_the_same_call(records: Records, postgres_url: str) -> None:
    """One look at the index for each key, also when everybody asked the same at once and so nothing was remembered."""
    tasks = [make_task(f"t{n:04}", memo_key=f"k{n % 2}") for n in range(3000)]
    records.tasks.add_tasks(tasks)
    records.tasks.record_results([make_task_result(task.task_id) for task in tasks], at=at(1))
    execute(postgres_url, "ANALYZE task")
    assert records.tasks.find_memoized("alice", ["k0", "k1", "k2"]).keys() == {"k0", "k1"}
    plan = "EXPLAIN (ANALYZE, FORMAT JSON) " + task_rows.MEMOIZED
    with psycopg.connect(postgres_url) as connection:
        row = connection.execute(plan.encode(), {"owner_id": "alice", "keys": ["k0", "k1", "k2"]}).fetchone()
    assert row is not None
    text = str(row[0])
    assert "task_memo" in text
    assert "Seq Scan" not in text
    assert "Sort" not in text


def test_old_results_are_found_by_their_index(records: Records, postgres_url: str) -> None:
    """A look for them once a minute must not cost more the more tasks there are."""
    tasks = [make_task(f"t{n:04}") for n in range(3000)]
    records.tasks.add_tasks(tasks)
    for second in range(3):
        records.tasks.record_results([make_task_result(task.task_id) for task in tasks[second::3]], at=at(second))
    execute(postgres_url, "ANALYZE task")
    with psycopg.connect(postgres_url) as connection:
        parameters = {"ended_before": at(0), "limit": 500}
        row = connection.execute(f"EXPLAIN (FORMAT JSON) {task_rows.PURGE}".encode(), parameters).fetchone()
    assert row is not None
    assert "task_ended" in str(row[0])
    assert records.tasks.purge_tasks(ended_before=at(1), limit=5000) == 1000


def test_concurrent_purges_share_the_work(records: Records) -> None:
    tasks = [make_task(f"t{n:04}") for n in range(400)]
    records.tasks.add_tasks(tasks)
    records.tasks.record_results([make_task_result(task.task_id) for task in tasks], at=at(0))
    start = threading.Barrier(4)

    def purge(_: int) -> int:
        start.wait()
        return sum(records.tasks.purge_tasks(ended_before=at(1), limit=50) for _ in range(12))

    with ThreadPoolExecutor(4) as workers:
        assert sum(workers.map(purge, range(4))) == 400


def test_dead_letters_are_found_by_their_index(records: Records, postgres_url: str) -> None:
    """An owner without tasks does not pay for the tasks of all others."""
    tasks = [make_task(f"t{n:04}", submitted_at=at(n)) for n in range(3000)]
    records.tasks.add_tasks(tasks)
    records.tasks.record_results([make_dead(task.task_id) for task in tasks[::10]], at=at(5000))
    execute(postgres_url, "ANALYZE task, dead_letter")
    parameters = dict.fromkeys(("endpoint_id", "since", "until", "before_at", "before_id"))
    with psycopg.connect(postgres_url) as connection:
        plan = f"EXPLAIN (FORMAT JSON) {task_rows.list_of_tasks(TaskState.DEAD_LETTERED)}"
        row = connection.execute(plan.encode(), {**parameters, "owner_id": "alice", "limit": 10}).fetchone()
    assert row is not None
    assert "dead_letter_of_owner" in str(row[0])
    assert "Seq Scan" not in str(row[0])


def test_ids_are_found_by_the_key_of_their_table(records: Records, postgres_url: str) -> None:
    records.tasks.add_tasks([make_task(f"{n:04x}", task_group_id=f"g{n:04x}", owner_id="bob") for n in range(3000)])
    execute(postgres_url, "ANALYZE task, task_group")
    with psycopg.connect(postgres_url) as connection:
        for kind, beginning, key in (("task", "000a", "task_pkey"), ("group", "g000a", "task_group_pkey")):
            wanted = {"beginning": beginning, "owners": ["alice"], "limit": 20}
            plan = f"EXPLAIN (FORMAT JSON) {task_rows.find_ids(kind)}"
            row = connection.execute(plan.encode(), wanted).fetchone()
            assert row is not None
            assert (key in str(row[0]), "Seq Scan" in str(row[0])) == (True, False)


def test_audit_rows_cannot_be_rewritten(records: Records, postgres_url: str) -> None:
    records.audit.add_entries([make_entry("endpoint.update", "e1")])
    with pytest.raises(psycopg.errors.RaiseException, match="append-only"):
        execute(postgres_url, "UPDATE audit SET identity_id = 'mallory'")


def test_queries_end_when_their_caller_stops_waiting(records: Records) -> None:
    database = records.database
    assert isinstance(database, PostgresDatabase)
    assert database.rows("SHOW statement_timeout", {}) == [{"statement_timeout": "28s"}]
    with pytest.raises(Unavailable), database.connection() as connection:
        connection.execute("SET statement_timeout = 20; SELECT pg_sleep(20)")


def test_a_transition_updates_its_row_in_place(records: Records, postgres_url: str) -> None:
    """No index holds what transitions change; that is what the indexes on finished_at are for."""
    records.tasks.add_tasks([make_task(memo_key="a call")])
    records.tasks.record_transitions([transition("t1", TaskState.WAITING_FOR_NODES, 1)])
    records.tasks.record_transitions([transition("t1", TaskState.RUNNING, 1)])
    records.close()  # a session that ends hands in its statistics
    query = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'task'"
    deadline = time.monotonic() + WAIT_S
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        while (updates := connection.execute(query).fetchone() or (0, 0))[0] < 2 and time.monotonic() < deadline:
            connection.execute("SELECT pg_sleep(0.02)")
    assert updates == (2, 2)


def test_rows_read_by_the_reconciler_do_not_grow_with_the_backlog(postgres_url: str) -> None:
    def rows_read(backlog: int) -> dict[str, float]:
        """By name of the statement; with a fifth of the tasks ended, and 20 endpoints."""
        execute(postgres_url, "TRUNCATE task")
        execute(postgres_url, _BACKLOG.format(backlog))
        with psycopg.connect(postgres_url, options="-c plan_cache_mode=force_generic_plan -c enable_seqscan=off") as it:
            # As prepared for the connection, which is what the records do after some rounds.
            it.execute(f"PREPARE open_ids (text, text, int) AS {_numbered(_OPEN_IDS)}".encode())
            it.execute(f"PREPARE endpoints AS {_ENDPOINTS_WITH_OPEN_TASKS}".encode())
            calls = {
                "newest": "open_ids('999999999', '', 100)",
                "page": "open_ids('0', '', 100)",
                "endpoints": "endpoints",
            }
            plans = {
                name: it.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE {call}".encode()).fetchone()
                for name, call in calls.items()
            }
        return {name: _rows_of(plan[0][0]["Plan"]) for name, plan in plans.items() if plan}

    short, long = rows_read(2_000), rows_read(20_000)
    assert short == long
    assert long["newest"] == 0
    assert long["page"] == 200, "each row once by the index, once by the limit"


_BACKLOG = """
    INSERT INTO task (task_id, task_group_id, owner_id, endpoint_id, function_id, function_hash, payload, details,
        submitted_at, timings, state, finished_at, options)
    SELECT 't' || n, 'g', 'o', 'e' || n % 20, 'f', 'h', 'p', '{{}}', now(), '{{}}',
        CASE WHEN n % 5 = 0 THEN 'success' ELSE 'received' END, CASE WHEN n % 5 = 0 THEN now() END, '{{}}'
    FROM generate_series(1, {}) AS n
"""


def _numbered(statement: str) -> str:
    for number, name in enumerate(("added_in", "task_id", "limit"), 1):
        statement = statement.replace(f"%({name})s", f"${number}")
    return statement


def _rows_of(plan: dict[str, Any]) -> float:
    removed = plan.get("Rows Removed by Filter", 0)
    here = (plan["Actual Rows"] + removed) * plan["Actual Loops"]
    return float(here + sum(map(_rows_of, plan.get("Plans", ()))))


def test_database_size_grows_with_its_content(records: Records) -> None:
    before = records.database.size_bytes()
    records.functions.add_function(make_function(body=os.urandom(1_000_000)))
    assert records.database.size_bytes() - before >= 1_000_000
