"""Database roles: one per program, each with its own limit of connections.

The owner of the tables, who migrates them, makes the roles. They may read and write rows, and nothing else. They
may add entries of the audit and read them; only the reconciler may delete them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import psycopg
from psycopg import sql

from farcall_common.errors import ConfigurationError
from farcall_common.store.postgres import unavailable

#: Share of each role in the connections for programs, in percent; and its minimum.
_SHARES: Final = {"farcall_api": 60, "farcall_forwarder": 30, "farcall_reconciler": 5}
_LEAST: Final = 4

#: The role of the program that deletes old entries of the audit.
_PURGES_AUDIT: Final = "farcall_reconciler"

#: Connections reserved for the server, the migrator and an administrator.
_KEPT: Final = 10


def connection_limit(role: str, max_connections: int) -> int:
    """How many connections a role may have on a server that permits so many.

    :raises ConfigurationError: for a role that no program has.
    """
    if role not in _SHARES:
        raise ConfigurationError(f"Unknown database role {role!r}; known roles are {', '.join(_SHARES)}.")
    return max(_LEAST, (max_connections - _KEPT) * _SHARES[role] // 100)


def prepare_roles(database_url: str, credentials: Sequence[Mapping[str, str]]) -> None:
    """Make roles, or bring them up to date: password, connection limit, and rights to all tables that there are.

    :param database_url: of the owner of the tables.
    :param credentials: ``username`` and ``password`` of each role.
    :raises ConfigurationError: for a role that no program has.
    :raises Unavailable: when the database cannot be reached.
    """
    try:
        with psycopg.connect(database_url, connect_timeout=10) as connection:
            for each in credentials:
                _prepare(connection, each["username"], each["password"])
    except psycopg.OperationalError as error:
        raise unavailable(error, what="cannot prepare the database's roles") from error


def _prepare(connection: psycopg.Connection[tuple[str, ...]], role: str, password: str) -> None:
    limit = connection_limit(role, int(_shown(connection, "max_connections")))
    # Roles belong to the server: another of its databases may have made this one.
    if not connection.execute("SELECT FROM pg_roles WHERE rolname = %s", [role]).fetchall():
        connection.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(role)))
    # What the server gets, and may log, is the verifier of the password.
    verifier = connection.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256").decode()
    for statement in (
        "ALTER ROLE {role} LOGIN PASSWORD {verifier} CONNECTION LIMIT {limit}",
        "GRANT USAGE ON SCHEMA public TO {role}",
        "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}",
        "GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {role}",
        "REVOKE INSERT, UPDATE, DELETE ON alembic_version FROM {role}",
        f"REVOKE UPDATE{'' if role == _PURGES_AUDIT else ', DELETE'} ON audit FROM {{role}}",
    ):
        parts = {"role": sql.Identifier(role), "verifier": sql.Literal(verifier), "limit": sql.Literal(limit)}
        connection.execute(sql.SQL(statement).format(**parts))


def _shown(connection: psycopg.Connection[tuple[str, ...]], setting: str) -> str:
    row = connection.execute("SELECT current_setting(%s)", [setting]).fetchone()
    assert row is not None
    return row[0]
