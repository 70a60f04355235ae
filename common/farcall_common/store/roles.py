"""Database roles: one per program, each with its own limit of connections, and two logins
(:mod:`farcall_common.database_logins`).

The owner of the tables, who migrates them, makes the logins. They may read and write rows, and nothing else. They
may add entries of the audit and read them; only the reconciler may delete them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import psycopg
from psycopg import sql

from farcall_common.database_logins import connection_limit, logins, role_of
from farcall_common.store.postgres import unavailable

#: Time after which the server ends an idle connection. Functions that are frozen keep theirs, and end without notice.
_IDLE_LIMITS: Final = {"farcall_api": "2min"}

#: The role of the program that deletes old entries of the audit.
_PURGES_AUDIT: Final = "farcall_reconciler"


def prepare_roles(
    database_url: str, credentials: Sequence[Mapping[str, str]], *, max_connections: int | None = None
) -> None:
    """Make logins, or bring them up to date: password, connection limit, and rights to all tables that there are.

    A login that ``credentials`` do not name loses its password, if they name the other one of its role. Its open
    connections stay.

    :param database_url: of the owner of the tables.
    :param credentials: ``username`` and ``password`` of each login. Of two for the same login, the later one counts.
    :param max_connections: connections that the roles share; by default those that the server permits. RDS changes its
        server's number only at a restart, and nothing runs this again after one.
    :raises ConfigurationError: for a role that no program has.
    :raises Unavailable: when the database cannot be reached.
    """
    try:
        with psycopg.connect(database_url, connect_timeout=10) as connection:
            shared = max_connections or int(_shown(connection, "max_connections"))
            for each in credentials:
                limit = connection_limit(each["username"], shared)
                _prepare(connection, each["username"], each["password"], limit=limit)
            named = {each["username"] for each in credentials}
            for unused in {login for each in named for login in logins(role_of(each))} - named:
                _withdraw(connection, unused)
    except psycopg.OperationalError as error:
        raise unavailable(error, what="cannot prepare the database's roles") from error


def _prepare(connection: psycopg.Connection[tuple[str, ...]], login: str, password: str, *, limit: int) -> None:
    if not _exists(connection, login):
        connection.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(login)))
    # What the server gets, and may log, is the verifier of the password.
    verifier = connection.pgconn.encrypt_password(password.encode(), login.encode(), b"scram-sha-256").decode()
    idle = _IDLE_LIMITS.get(role_of(login), "0")
    for statement in (
        "ALTER ROLE {login} LOGIN PASSWORD {verifier} CONNECTION LIMIT {limit}",
        "ALTER ROLE {login} SET idle_session_timeout = {idle}",
        "GRANT USAGE ON SCHEMA public TO {login}",
        "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {login}",
        "GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {login}",
        "REVOKE INSERT, UPDATE, DELETE ON alembic_version FROM {login}",
        f"REVOKE UPDATE{'' if role_of(login) == _PURGES_AUDIT else ', DELETE'} ON audit FROM {{login}}",
    ):
        parts = {"verifier": sql.Literal(verifier), "limit": sql.Literal(limit), "idle": sql.Literal(idle)}
        connection.execute(sql.SQL(statement).format(login=sql.Identifier(login), **parts))


def _withdraw(connection: psycopg.Connection[tuple[str, ...]], login: str) -> None:
    """Take the password away. A program that still has it reads its secret again: NOLOGIN has another message."""
    if _exists(connection, login):
        connection.execute(sql.SQL("ALTER ROLE {} PASSWORD NULL").format(sql.Identifier(login)))


def _exists(connection: psycopg.Connection[tuple[str, ...]], login: str) -> bool:
    """Whether the server has the login. It may, in a new database: roles belong to the server."""
    return bool(connection.execute("SELECT FROM pg_roles WHERE rolname = %s", [login]).fetchall())


def _shown(connection: psycopg.Connection[tuple[str, ...]], setting: str) -> str:
    row = connection.execute("SELECT current_setting(%s)", [setting]).fetchone()
    assert row is not None
    return row[0]
