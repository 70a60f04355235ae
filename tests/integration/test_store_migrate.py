"""The schema's upgrade: once, by one, however many try."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from farcall_common.errors import Unavailable
from farcall_common.store import migrate
from tests.integration.store_servers import execute, free_port


@pytest.fixture
def empty_database(postgres_server: str) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex}"
    execute(postgres_server, f"CREATE DATABASE {name}")
    yield postgres_server.replace("/postgres", f"/{name}")
    execute(postgres_server, f"DROP DATABASE {name} WITH (FORCE)")


def test_an_upgrade_is_done_once(empty_database: str) -> None:
    assert migrate.upgrade(empty_database)
    assert not migrate.upgrade(empty_database)


def test_one_of_many_upgrades_does_it(empty_database: str) -> None:
    with ThreadPoolExecutor(4) as workers:
        assert sorted(workers.map(migrate.upgrade, [empty_database] * 4)) == [False, False, False, True]


def test_the_head_is_the_newest_revision() -> None:
    assert migrate.scripts().get_current_head() == migrate.HEAD


def test_the_schema_has_the_tables(postgres_url: str) -> None:
    query = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
    with psycopg.connect(postgres_url) as connection:
        tables = {name for (name,) in connection.execute(query)}
    assert tables == {
        "access_grant",
        "alembic_version",
        "container",
        "endpoint",
        "endpoint_key",
        "function",
        "function_version",
        "task",
        "task_event",
        "task_group",
    }


def test_an_absent_database_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        migrate.upgrade(f"postgresql://farcall@127.0.0.1:{free_port()}/farcall")
