"""The schema's upgrade: once, by one, however many try.

Later releases add revisions to the first one: the tests have made-up ones.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from farcall_common.errors import Unavailable
from farcall_common.store import migrate
from tests.integration.store_servers import execute, free_port
from tests.waiting import WAIT_S, wait_until

#: A revision of a later release, with its number, the one before it, and its statement.
REVISION = """
from alembic import op
from farcall_common.store.migrations import create_index

revision, down_revision = {revision!r}, {former!r}

def upgrade():
    {statement}
"""
BUILD_INDEX = 'create_index("task_later", "task (finished_at)")'
LATER = f"{int(migrate.HEAD) + 1:04}"


@pytest.fixture
def empty_database(postgres_server: str) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex}"
    execute(postgres_server, f"CREATE DATABASE {name}")
    yield postgres_server.replace("/postgres", f"/{name}")
    execute(postgres_server, f"DROP DATABASE {name} WITH (FORCE)")


def later_release(directory: Path, *statements: str) -> Path:
    """The migrations of a release with a revision more for each statement."""
    migrations = directory / "migrations"
    shutil.copytree(Path(migrate.__file__).with_name("migrations"), migrations)
    for number, statement in enumerate(statements, int(migrate.HEAD)):
        revision = f"{number + 1:04}"
        text = REVISION.format(revision=revision, former=f"{number:04}", statement=statement)
        (migrations / "versions" / f"v{revision}_later.py").write_text(text)
    return migrations


def revision_of(database_url: str) -> str:
    with psycopg.connect(database_url) as connection:
        ((revision,),) = connection.execute("SELECT version_num FROM alembic_version").fetchall()
    return str(revision)


def test_an_upgrade_is_done_once(empty_database: str) -> None:
    assert migrate.upgrade(empty_database)
    assert not migrate.upgrade(empty_database)


def test_one_of_many_concurrent_upgrades_runs(empty_database: str) -> None:
    with ThreadPoolExecutor(4) as workers:
        assert sorted(workers.map(migrate.upgrade, [empty_database] * 4)) == [False, False, False, True]


def test_revisions_of_a_later_release_are_applied_in_their_order(empty_database: str, tmp_path: Path) -> None:
    steps = ('op.execute("CREATE TABLE later (a text)")', 'op.execute("ALTER TABLE later ADD COLUMN b text")')
    migrations, newest = later_release(tmp_path, *steps), f"{int(LATER) + 1:04}"
    migrate.upgrade(empty_database)
    assert migrate.upgrade(empty_database, revision=newest, migrations=migrations)
    assert not migrate.upgrade(empty_database, revision=newest, migrations=migrations)
    execute(empty_database, "INSERT INTO later (a, b) VALUES ('a', 'b')")


def test_finished_revisions_stay_if_a_later_one_fails(empty_database: str, tmp_path: Path) -> None:
    create = 'op.execute("CREATE TABLE later (a text)")'
    migrations, newest = later_release(tmp_path, create, create), f"{int(LATER) + 1:04}"
    with pytest.raises(Exception, match="already exists"):
        migrate.upgrade(empty_database, revision=newest, migrations=migrations)
    assert revision_of(empty_database) == LATER


def test_a_large_table_accepts_writes_while_its_index_is_built(empty_database: str, tmp_path: Path) -> None:
    """An index that is built at once waits for every writer, and lets none in behind itself."""
    migrations = later_release(tmp_path, BUILD_INDEX)
    migrate.upgrade(empty_database)
    group = "INSERT INTO task_group (task_group_id, owner_id) VALUES (%s, 'alice')"
    lock = "LOCK TABLE task IN ROW EXCLUSIVE MODE"
    waits = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'CREATE INDEX%' AND wait_event_type = 'Lock'"
    with (
        ThreadPoolExecutor(1) as pool,
        psycopg.connect(empty_database) as writer,
        psycopg.connect(empty_database, autocommit=True, options="-c lock_timeout=60s") as other,
    ):
        writer.execute(lock)
        upgrade = pool.submit(migrate.upgrade, empty_database, revision=LATER, migrations=migrations)
        deadline = time.monotonic() + WAIT_S
        while other.execute(waits).fetchone() == (0,) and time.monotonic() < deadline:
            other.execute("SELECT pg_sleep(0.02)")
        assert not upgrade.done()
        with other.transaction():
            other.execute(lock)
            other.execute(group, ["g1"])
        writer.commit()
        assert upgrade.result(timeout=WAIT_S)
    assert revision_of(empty_database) == LATER


def test_a_statement_ends_with_the_program_that_has_sent_it(empty_database: str, tmp_path: Path) -> None:
    """As Lambda ends a function at its time limit; the next attempt must not wait for the first one's locks."""
    migrations = later_release(tmp_path, BUILD_INDEX)
    migrate.upgrade(empty_database)
    waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    program = f"""
from pathlib import Path
from farcall_common.store import migrate
migrate.upgrade({empty_database!r}, revision={LATER!r}, migrations=Path({str(migrations)!r}))
"""
    with (
        psycopg.connect(empty_database) as reader,
        psycopg.connect(empty_database, autocommit=True) as other,
        subprocess.Popen([sys.executable, "-c", program]) as migrator,
    ):
        reader.execute("LOCK TABLE task IN ACCESS EXCLUSIVE MODE")
        wait_until(lambda: other.execute(waits).fetchone() != (0,), "a statement of the migration waits")
        migrator.kill()
        wait_until(lambda: other.execute(waits).fetchone() == (0,), "the server ends the statement")


def test_an_interrupted_index_is_rebuilt(empty_database: str, tmp_path: Path) -> None:
    migrate.upgrade(empty_database)
    for group_id in ("g1", "g2"):
        execute(empty_database, f"INSERT INTO task_group (task_group_id, owner_id) VALUES ('{group_id}', 'alice')")
    with pytest.raises(psycopg.errors.UniqueViolation):
        execute(empty_database, "CREATE UNIQUE INDEX CONCURRENTLY group_later ON task_group (owner_id)")

    build = 'create_index("group_later", "task_group (created_at)")'
    assert migrate.upgrade(empty_database, revision=LATER, migrations=later_release(tmp_path, build))

    query = "SELECT indisvalid, pg_get_indexdef(indexrelid) FROM pg_index WHERE indexrelid = 'group_later'::regclass"
    with psycopg.connect(empty_database) as connection:
        row = connection.execute(query).fetchone()
    assert row is not None
    assert row[0]
    assert "created_at" in row[1]


def test_the_head_is_the_newest_revision() -> None:
    assert migrate.scripts().get_current_head() == migrate.HEAD


def test_old_code_does_not_change_a_newer_database(empty_database: str, tmp_path: Path) -> None:
    """CloudFormation that puts a deployment back runs the old code's migration on what the new code's has made."""
    migrate.upgrade(empty_database, revision=LATER, migrations=later_release(tmp_path, BUILD_INDEX))
    assert not migrate.upgrade(empty_database)
    assert revision_of(empty_database) == LATER


def test_the_schema_has_the_tables(postgres_url: str) -> None:
    query = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
    with psycopg.connect(postgres_url) as connection:
        tables = {name for (name,) in connection.execute(query)}
    assert tables == {
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
