"""Bring a database to the newest schema. Many processes may try at once; one does it, the others find it done."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import psycopg
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import NullPool, create_engine

from farcall_common.errors import Unavailable
from farcall_common.store.postgres import unavailable

#: The revision that this code works with. A test holds it to the newest file in ``migrations/versions``.
HEAD: Final = "0001"

_MIGRATIONS: Final = Path(__file__).with_name("migrations")
_ADVISORY_LOCK: Final = 0x_FA_CA_11
_LOCK_TIMEOUT_S: Final = 120
_LOCK_RETRY_S: Final = 0.2

#: A statement ends soon after the program that has sent it: Lambda ends a migration at its time limit, and what went on
#: would hold locks.
_OPTIONS: Final = "-c client_connection_check_interval=5s"


def upgrade(database_url: str, *, revision: str = HEAD, migrations: Path = _MIGRATIONS) -> bool:
    """Apply the missing revisions, as far as ``revision``, under an advisory lock. Returns whether there were any.
    Tests have a folder ``migrations`` with revisions after ``HEAD``.

    A database that newer code has upgraded stays as it is: a deployment that is put back meets one, and migrations only
    add to what the code before them knows.

    :raises Unavailable: when the database cannot be reached, or another upgrade holds the lock for two minutes.
    """
    try:
        with psycopg.connect(database_url, autocommit=True, connect_timeout=10) as connection:
            if _is_done(connection, revision):
                return False
            _lock(connection)
            if _is_done(connection, revision):
                return False
            _apply(database_url, revision, migrations)
            return True
    except psycopg.OperationalError as error:
        raise unavailable(error, what="cannot upgrade the database") from error


def scripts() -> ScriptDirectory:
    """The revisions as Alembic sees them."""
    return ScriptDirectory.from_config(_config(_MIGRATIONS))


def _lock(connection: psycopg.Connection[tuple[str, ...]]) -> None:
    """Take the lock for as long as the connection lives.

    By asking again and again: a statement that waits for it holds a snapshot, and an index that is built concurrently
    waits for every snapshot. The two would wait for each other.
    """
    give_up_at = time.monotonic() + _LOCK_TIMEOUT_S
    while connection.execute("SELECT 1 WHERE pg_try_advisory_lock(%s)", [_ADVISORY_LOCK]).fetchone() is None:
        if time.monotonic() > give_up_at:
            raise Unavailable(f"another upgrade of the database has been running for {_LOCK_TIMEOUT_S} s")
        time.sleep(_LOCK_RETRY_S)


def _is_done(connection: psycopg.Connection[tuple[str, ...]], revision: str) -> bool:
    """Whether the database is at ``revision``, or at one of newer code's. They are numbered: the later, the greater."""
    current = _revision(connection)
    return current is not None and (current == revision or current > HEAD)


def _revision(connection: psycopg.Connection[tuple[str, ...]]) -> str | None:
    try:
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    except psycopg.errors.UndefinedTable:
        return None
    return row[0] if row else None


def _apply(database_url: str, revision: str, migrations: Path) -> None:
    engine = create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(database_url, options=_OPTIONS), poolclass=NullPool
    )
    with engine.connect() as connection:
        config = _config(migrations)
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


def _config(migrations: Path) -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations))
    return config
