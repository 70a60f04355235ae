"""Connections to PostgreSQL: a pool, values to columns and back, errors of the driver to ours."""

from __future__ import annotations

import contextlib
import copy
import select
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import psycopg
from psycopg.rows import DictRow, dict_row
from psycopg.types.json import set_json_loads
from psycopg_pool import ConnectionPool

from farcall_common.errors import Conflict, InvalidRequest, Unavailable

__all__ = ["Database", "to_json"]

#: How a connection finds out that the server is gone, in milliseconds or seconds, instead of waiting for ever.
_SOCKET: Final = {"connect_timeout": 5, "keepalives_idle": 30, "keepalives_interval": 10, "tcp_user_timeout": 30_000}

#: How long a connection that worked is lent again without a look, in seconds.
_TRUSTED_S: Final = 5.0

#: The table of tasks grows from nothing to millions of rows between two looks of the statistics collector: a plan that
#: was cached while it was small scans it whole for ever. A plan per call costs a fraction of a millisecond. Indexes are
#: on solid-state disks, where a random page costs about as much as the next one.
_PLANNER: Final = "-c plan_cache_mode=force_custom_plan -c random_page_cost=1.1"

#: Nobody waits longer than API Gateway, whose 29 s are over then; what is asked for must not go on without anybody.
_PATIENCE: Final = "-c statement_timeout=28000"


class _Connection(psycopg.Connection[DictRow]):
    """A connection that knows when it last worked, in monotonic seconds."""

    used_at = 0.0


class Database:
    """A pool of autocommitting connections whose rows are dictionaries."""

    def __init__(self, conninfo: str, *, min_connections: int, max_connections: int, timeout_s: float) -> None:
        self._pool: ConnectionPool[_Connection] = ConnectionPool(
            conninfo,
            min_size=min_connections,
            max_size=max_connections,
            timeout=timeout_s,
            connection_class=_Connection,
            kwargs={**_SOCKET, "options": f"{_PLANNER} {_PATIENCE}", "autocommit": True, "row_factory": dict_row},
            configure=_configure,
            check=_check,
            num_workers=1,
            open=True,
            name="farcall-records",
        )
        self._sequel: tuple[bytes, Mapping[str, Any]] | None = None

    def followed_by(self, statement: str, parameters: Mapping[str, Any]) -> Database:
        """The same database, where whatever is done with a connection ends with this statement, as one transaction."""
        followed = copy.copy(self)
        followed._sequel = (statement.encode(), parameters)
        return followed

    def close(self) -> None:
        """Close every connection."""
        self._pool.close()

    @contextlib.contextmanager
    def connection(self) -> Iterator[psycopg.Connection[DictRow]]:
        """Lend a connection. Each statement commits by itself; ``connection.transaction()`` makes several one.

        :raises Unavailable: when the database cannot be reached, or goes away meanwhile.
        :raises InvalidRequest: for values that a column cannot hold, such as a NUL in a text.
        :raises Conflict: when the values contradict what is stored.
        """
        try:
            with self._pool.connection() as connection:
                if self._sequel is None:
                    yield connection
                else:
                    with connection.transaction():
                        yield connection
                        connection.execute(*self._sequel)
                connection.used_at = time.monotonic()
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:  # also the pool's own
            raise Unavailable(f"the database does not answer: {error}") from error
        except (psycopg.DataError, UnicodeEncodeError) as error:
            raise InvalidRequest(f"the database cannot hold this value: {error}") from error
        except psycopg.IntegrityError as error:
            raise Conflict(f"the database holds something else already: {error}") from error

    def rows(self, query: str, parameters: Mapping[str, Any]) -> list[DictRow]:
        """Run one statement and fetch its rows, in the binary format."""
        with self.connection() as connection, connection.cursor(binary=True) as cursor:
            return cursor.execute(query.encode(), parameters).fetchall()

    def run(self, query: str, parameters: Mapping[str, Any]) -> int:
        """Run one statement. Returns the number of rows that it touched."""
        with self.connection() as connection:
            return connection.execute(query.encode(), parameters).rowcount


def _check(connection: _Connection) -> None:
    """Look whether a connection still works, if there is a doubt: asking the server each time doubles every round trip.

    A server that ended the connection has said so, and an idle connection is else never readable. One that vanished
    has said nothing; the longer ago it worked, the likelier that is.
    """
    readable = select.poll()
    readable.register(connection.fileno(), select.POLLIN)
    if readable.poll(0) or time.monotonic() - connection.used_at > _TRUSTED_S:
        ConnectionPool.check_connection(connection)


def _configure(connection: psycopg.Connection[DictRow]) -> None:
    set_json_loads(msgspec.json.decode, connection)


def to_json(value: object) -> str | None:
    """A value as JSON text for a column; None stays NULL."""
    return None if value is None else msgspec.json.encode(value).decode()
