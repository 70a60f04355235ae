"""The schema's upgrade: once, by one, however many try."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from farcall_common.errors import Unavailable
from farcall_common.store import migrate, open_records
from farcall_common.store.model import ObjectKind, Right
from farcall_common.task_options import TaskOptions
from tests.integration.store_servers import execute, free_port
from tests.waiting import WAIT_S, wait_until


@pytest.fixture
def empty_database(postgres_server: str) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex}"
    execute(postgres_server, f"CREATE DATABASE {name}")
    yield postgres_server.replace("/postgres", f"/{name}")
    execute(postgres_server, f"DROP DATABASE {name} WITH (FORCE)")


def test_an_upgrade_is_done_once(empty_database: str) -> None:
    assert migrate.upgrade(empty_database)
    assert not migrate.upgrade(empty_database)


def test_one_of_many_concurrent_upgrades_runs(empty_database: str) -> None:
    with ThreadPoolExecutor(4) as workers:
        assert sorted(workers.map(migrate.upgrade, [empty_database] * 4)) == [False, False, False, True]


def test_a_large_table_accepts_writes_while_its_index_is_built(empty_database: str) -> None:
    """An index that is built at once waits for every writer, and lets none in behind itself."""
    migrate.upgrade(empty_database, revision="0002")
    group = "INSERT INTO task_group (task_group_id, owner_id) VALUES (%s, 'alice')"
    lock = "LOCK TABLE task IN ROW EXCLUSIVE MODE"
    waits = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'CREATE INDEX%' AND wait_event_type = 'Lock'"
    with (
        ThreadPoolExecutor(1) as pool,
        psycopg.connect(empty_database) as writer,
        psycopg.connect(empty_database, autocommit=True, options="-c lock_timeout=60s") as other,
    ):
        writer.execute(lock)
        upgrade = pool.submit(migrate.upgrade, empty_database)
        deadline = time.monotonic() + WAIT_S
        while other.execute(waits).fetchone() == (0,) and time.monotonic() < deadline:
            other.execute("SELECT pg_sleep(0.02)")
        assert not upgrade.done()
        with other.transaction():
            other.execute(lock)
            other.execute(group, ["g1"])
        writer.commit()
        assert upgrade.result(timeout=WAIT_S)
    assert not migrate.upgrade(empty_database)


def test_a_statement_ends_with_the_program_that_has_sent_it(empty_database: str) -> None:
    """As Lambda ends a function at its time limit; the next attempt must not wait for the first one's locks."""
    migrate.upgrade(empty_database, revision="0002")
    waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    program = f"from farcall_common.store import migrate; migrate.upgrade({empty_database!r})"
    with (
        psycopg.connect(empty_database) as reader,
        psycopg.connect(empty_database, autocommit=True) as other,
        subprocess.Popen([sys.executable, "-c", program]) as migrator,
    ):
        reader.execute("LOCK TABLE task IN ACCESS EXCLUSIVE MODE")
        wait_until(lambda: other.execute(waits).fetchone() != (0,), "a statement of the migration waits")
        migrator.kill()
        wait_until(lambda: other.execute(waits).fetchone() == (0,), "the server ends the statement")


def test_an_interrupted_index_is_rebuilt(empty_database: str) -> None:
    migrate.upgrade(empty_database, revision="0002")
    columns = "task_id, task_group_id, owner_id, endpoint_id, function_id, function_hash, payload, idempotent, "
    columns += "max_attempts, result_serializers, resource_specification, details, submitted_at, timings"
    values = "'g', 'a', 'e', 'f', 'h', 'p', true, 1, '[]', '{}', '{}', now(), '{}'"
    for task_id in ("t1", "t2"):
        execute(empty_database, f"INSERT INTO task ({columns}) VALUES ('{task_id}', {values})")
    with pytest.raises(psycopg.errors.UniqueViolation):
        execute(empty_database, "CREATE UNIQUE INDEX CONCURRENTLY task_ended ON task (owner_id)")

    assert migrate.upgrade(empty_database)

    query = "SELECT indisvalid, pg_get_indexdef(indexrelid) FROM pg_index WHERE indexrelid = 'task_ended'::regclass"
    with psycopg.connect(empty_database) as connection:
        row = connection.execute(query).fetchone()
    assert row is not None
    assert row[0]
    assert "finished_at" in row[1]


@pytest.mark.parametrize("former", ["0004", "0005", "0008"])
def test_an_interrupted_revision_can_be_repeated(empty_database: str, former: str) -> None:
    """Those that run outside of a transaction may have done half of their work."""
    migrate.upgrade(empty_database)
    execute(empty_database, f"UPDATE alembic_version SET version_num = '{former}'")
    assert migrate.upgrade(empty_database)
    query = "SELECT conname FROM pg_constraint WHERE conrelid = 'task'::regclass AND contype = 'c' ORDER BY conname"
    with psycopg.connect(empty_database) as connection:
        assert [name for (name,) in connection.execute(query)] == [
            "task_ended_check",
            "task_options_check",
            "task_payload_check",
        ]


def test_options_of_tasks_are_carried_over(empty_database: str) -> None:
    """Those that are there, and those that a release before this one adds until it is replaced."""
    migrate.upgrade(empty_database, revision="0008")
    columns = "task_id, task_group_id, owner_id, endpoint_id, function_id, function_hash, payload, idempotent, "
    columns += "max_attempts, walltime_s, container_id, result_serializers, resource_specification, details, "
    columns += "submitted_at, timings"
    statement = (
        f"INSERT INTO task ({columns}) VALUES ('{{}}', 'g', 'a', 'e', 'f', 'h', 'p', {{}}, '{{}}', now(), '{{}}')"
    )
    former = {
        "full": """false, 7, 2.5, 'c1', '["x", "y"]',
            '{"memory_bytes": 5, "num_nodes": 2, "num_ranks": null, "keep_output": true, "queue": {"a": null}}'""",
        "plain": "true, 3, NULL, NULL, '[]', '{}'",
        "wrong": """true, 3, NULL, NULL, '[]', '{"memory_bytes": "2 GB", "num_nodes": 0, "keep_output": 1}'""",
    }
    expected = {
        "full": TaskOptions(
            idempotent=False,
            max_attempts=7,
            walltime_s=2.5,
            container="c1",
            result_serializers=("x", "y"),
            memory_bytes=5,
            num_nodes=2,
            keep_output=True,
            resource_specification={"queue": {"a": None}},
        ),
        "plain": TaskOptions(),
        "wrong": TaskOptions(resource_specification={"memory_bytes": "2 GB", "num_nodes": 0, "keep_output": 1}),
    }
    for name, values in former.items():
        execute(empty_database, statement.format(name, values, "{}", "{}"))
    assert migrate.upgrade(empty_database)
    for name, values in former.items():
        execute(empty_database, statement.format(f"{name}, later", values, "{}", "{}"))

    with contextlib.closing(open_records(empty_database, timeout_s=5)) as records:
        found = records.tasks.get_tasks([*expected, *(f"{name}, later" for name in expected)])
    assert {task_id: task.options for task_id, task in found.items()} == {
        **expected,
        **{f"{name}, later": options for name, options in expected.items()},
    }


def test_grants_become_shares(empty_database: str) -> None:
    migrate.upgrade(empty_database, revision="0012")
    execute(empty_database, "INSERT INTO endpoint (endpoint_id, owner_id, name) VALUES ('e', 'alice', 'lab')")
    execute(empty_database, "INSERT INTO function (function_id, owner_id, name) VALUES ('f', 'carol', 'f')")
    execute(empty_database, "INSERT INTO access_grant VALUES ('bob', 'e'), ('bob', 'f'), ('bob', 'deleted')")
    migrate.upgrade(empty_database)
    with contextlib.closing(open_records(empty_database, timeout_s=5)) as records:
        assert records.shares.find_rights(["e", "f"], ["identity bob"]) == {"e": Right.USE, "f": Right.USE}
        found = records.shares.list_shares_with(["identity bob"])
    assert [(each.object_id, each.kind, each.granted_by) for each in found] == [
        ("e", ObjectKind.ENDPOINT, "alice"),
        ("f", ObjectKind.FUNCTION, "carol"),
    ]


def test_the_head_is_the_newest_revision() -> None:
    assert migrate.scripts().get_current_head() == migrate.HEAD


def test_old_code_does_not_change_a_newer_database(empty_database: str) -> None:
    """CloudFormation that puts a deployment back runs the old code's migration on what the new code's has made."""
    migrate.upgrade(empty_database)
    newer = f"{int(migrate.HEAD) + 1:04}"
    execute(empty_database, f"UPDATE alembic_version SET version_num = '{newer}'")
    assert not migrate.upgrade(empty_database)
    with psycopg.connect(empty_database) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == (newer,)


def test_the_schema_has_the_tables(postgres_url: str) -> None:
    query = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
    with psycopg.connect(postgres_url) as connection:
        tables = {name for (name,) in connection.execute(query)}
    assert tables == {
        "access_grant",
        "alembic_version",
        "api_token",
        "audit",
        "container",
        "dead_letter",
        "endpoint",
        "endpoint_key",
        "endpoint_qos",
        "flow_action",
        "function",
        "function_alias",
        "function_version",
        "person",
        "running_limit",
        "service_account",
        "share",
        "task",
        "task_event",
        "task_group",
        "team",
        "team_member",
        "turn",
        "usage",
        "usage_part",
        "withdrawal",
    }


def test_an_absent_database_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        migrate.upgrade(f"postgresql://farcall@127.0.0.1:{free_port()}/farcall")
