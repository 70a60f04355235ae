"""A database role for each program: what it may do, and that no program takes the connections of another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from farcall_common.database_logins import ROLES, connection_limit
from farcall_common.errors import ConfigurationError, Unavailable
from farcall_common.store import Records, open_records
from farcall_common.store.postgres import PostgresDatabase
from farcall_common.store.roles import prepare_roles
from tests.integration.store_servers import execute
from tests.unit.test_store_records import at, make_entry, make_function, make_task, make_task_result
from tests.waiting import wait_until

PASSWORDS = {role: f"of {role}" for role in ROLES}
#: What the API may have where that is given by hand.
API_CONNECTIONS = 2


@pytest.fixture
def urls(postgres_url: str) -> dict[str, str]:
    """Where each role logs in."""
    prepare_roles(postgres_url, [{"username": role, "password": word} for role, word in PASSWORDS.items()])
    return {role: make_conninfo(postgres_url, user=role, password=word) for role, word in PASSWORDS.items()}


@contextlib.contextmanager
def opened(url: str, *, max_connections: int = 1) -> Iterator[Records]:
    # Nothing here may wait for its time-out: a test that does never ends.
    records = open_records(url, max_connections=max_connections, timeout_s=600)
    try:
        yield records
    finally:
        records.close()


def test_connection_limits_are_shares_of_the_servers_limit() -> None:
    def limits(max_connections: int) -> list[int]:
        return [connection_limit(role, max_connections) for role in PASSWORDS]

    assert limits(100) == [54, 27, 4]
    assert limits(400) == [234, 117, 19]
    assert all(sum(limits(count)) < count for count in (30, 60, 100, 400, 5000))
    with pytest.raises(ConfigurationError):
        connection_limit("postgres", 100)


@pytest.mark.parametrize("role", PASSWORDS)
def test_a_role_may_only_read_and_write_rows(urls: dict[str, str], role: str) -> None:
    with opened(urls[role]) as records:
        records.functions.audited(make_entry("function.register", "f1")).add_function(make_function())
        records.tasks.add_tasks([make_task()])
        records.tasks.record_results([make_task_result()], at=at(1))
        assert records.database.try_lock("reconciler", ttl_s=1)
        assert records.tasks.purge_tasks(ended_before=at(9), limit=10) == 1
    with psycopg.connect(urls[role], autocommit=True) as connection:
        for statement in ("CREATE TABLE mine ()", "DROP TABLE task", "DELETE FROM alembic_version", "TRUNCATE audit"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement.encode())


@pytest.mark.parametrize("role", PASSWORDS)
def test_a_role_adds_to_the_audit_and_reads_it_and_only_the_reconciler_deletes(
    urls: dict[str, str], postgres_url: str, role: str
) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as owner:  # rights that an earlier release gave
        owner.execute(f"GRANT UPDATE, DELETE ON audit TO {role}".encode())
    prepare_roles(postgres_url, [{"username": role, "password": PASSWORDS[role]}])
    with opened(urls[role]) as records:
        records.audit.add_entries([make_entry("function.register", "f1")])
        [entry] = records.audit.list_entries([make_entry("function.register", "f1").identity_id])
        assert entry.object_id == "f1"
        with psycopg.connect(urls[role], autocommit=True) as connection:
            for statement in ("UPDATE audit SET action = 'other'", "DELETE FROM audit", "TRUNCATE audit"):
                if role == "farcall_reconciler" and statement.startswith("DELETE"):
                    continue
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute(statement.encode())
        if role == "farcall_reconciler":
            assert records.audit.purge_entries(before=at(9), limit=10) == 1


def test_a_role_gets_its_share_of_the_connections(urls: dict[str, str], postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        ((most,),) = connection.execute("SELECT current_setting('max_connections')::int").fetchall()
        found = connection.execute("SELECT rolname, rolconnlimit FROM pg_roles WHERE rolname = ANY(%s)", [list(ROLES)])
        assert dict(found.fetchall()) == {role: connection_limit(role, most) for role in PASSWORDS}


def test_limits_are_shares_of_the_wanted_number_before_the_server_takes_it(postgres_url: str) -> None:
    """RDS changes ``max_connections`` at a restart, and nothing prepares the roles again after one."""
    prepare_roles(postgres_url, [{"username": role, "password": "p"} for role in ROLES], max_connections=400)
    with psycopg.connect(postgres_url) as connection:
        found = connection.execute("SELECT rolname, rolconnlimit FROM pg_roles WHERE rolname = ANY(%s)", [list(ROLES)])
        assert dict(found.fetchall()) == {role: connection_limit(role, 400) for role in ROLES}


def test_idle_connections_of_the_api_are_ended_by_the_server_and_replaced(
    urls: dict[str, str], postgres_url: str
) -> None:
    """Functions that have ended leave connections behind, and one that was frozen finds its own ended."""
    with psycopg.connect(postgres_url) as connection:
        found = connection.execute("SELECT rolname, rolconfig FROM pg_roles WHERE rolname = ANY(%s)", [list(ROLES)])
        idle = {role: settings[0].partition("=")[2] for role, settings in found.fetchall()}
    assert idle == {"farcall_api": "2min", "farcall_forwarder": "0", "farcall_reconciler": "0"}
    execute(postgres_url, "ALTER ROLE farcall_api SET idle_session_timeout = '10ms'")
    with opened(urls["farcall_api"]) as records:
        records.database.ping()
        wait_until(lambda: _connections(postgres_url, "farcall_api") == 0, "the server ends the connection")
        records.database.ping()


def _connections(postgres_url: str, role: str) -> int:
    with psycopg.connect(postgres_url) as connection:
        ((count,),) = connection.execute("SELECT count(*) FROM pg_stat_activity WHERE usename = %s", [role]).fetchall()
        return int(count)


def test_a_burst_of_requests_leaves_the_forwarder_its_connections(urls: dict[str, str], postgres_url: str) -> None:
    execute(postgres_url, f"ALTER ROLE farcall_api CONNECTION LIMIT {API_CONNECTIONS}")
    tasks = [make_task(f"t{number}") for number in range(10)]
    with opened(urls["farcall_forwarder"], max_connections=2) as forwarder, contextlib.ExitStack() as storm:
        forwarder.tasks.add_tasks(tasks)
        answered = [storm.enter_context(opened(urls["farcall_api"])) for _ in range(API_CONNECTIONS)]
        for each in answered:
            each.database.ping()  # and keeps its connection
        refused = [storm.enter_context(opened(urls["farcall_api"])) for _ in range(4)]
        for task in tasks:  # as often as API Gateway passes requests on
            for each in refused:
                with pytest.raises(Unavailable, match="no connection left") as caught:
                    each.database.ping()
                assert caught.value.record.retry_after_s
            assert len(forwarder.tasks.record_results([make_task_result(task.task_id)], at=at(1))) == 1
        for each in answered:
            each.database.ping()
        answered[0].close()
        wait_until(lambda: _answers(refused[0]), "the connection of another is free")


def _answers(records: Records) -> bool:
    try:
        records.database.ping()
    except Unavailable:
        return False
    return True


def test_a_late_refusal_ends_the_wait(urls: dict[str, str], postgres_url: str) -> None:
    """A slow server refuses while a caller waits; by the time that the caller looks, the refusal is not recent."""
    execute(postgres_url, f"ALTER ROLE farcall_api CONNECTION LIMIT {API_CONNECTIONS}")
    with contextlib.ExitStack() as storm:
        for _ in range(API_CONNECTIONS):
            storm.enter_context(opened(urls["farcall_api"])).database.ping()
        late = PostgresDatabase(urls["farcall_api"], max_connections=1, timeout_s=600, refused_s=0.0)
        storm.callback(late.close)
        with pytest.raises(Unavailable, match="no connection left"):
            late.ping()


def test_a_new_password_is_read_from_its_source(urls: dict[str, str], postgres_url: str) -> None:
    asked = []

    def source(fresh: bool) -> str:
        asked.append(fresh)
        return make_conninfo(urls["farcall_api"], password=f"{'new' if fresh else 'of'} farcall_api")

    prepare_roles(postgres_url, [{"username": "farcall_api", "password": "new farcall_api"}])
    records = open_records(source, timeout_s=600)
    records.database.ping()
    records.close()
    assert asked[:2] == [False, True]


def test_a_wrong_password_without_a_newer_one_is_reported(urls: dict[str, str]) -> None:
    records = open_records(make_conninfo(urls["farcall_api"], password="wrong"), timeout_s=0.5)
    with pytest.raises(Unavailable):
        records.database.ping()
    records.close()
