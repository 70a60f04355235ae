"""Connections to PostgreSQL: a pool, values to columns and back, errors of the driver to ours."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
import select
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, Self

import msgspec
import psycopg
from psycopg.rows import DictRow, dict_row
from psycopg.types.json import set_json_loads
from psycopg_pool import ConnectionPool, PoolTimeout

from farcall_common.errors import Conflict, DatabaseUntrusted, InvalidRequest, Unavailable

__all__ = ["Database", "to_json", "unavailable"]

#: How a connection finds out that the server is gone, in milliseconds or seconds, instead of waiting for ever.
_SOCKET: Final = {"connect_timeout": 5, "keepalives_idle": 30, "keepalives_interval": 10, "tcp_user_timeout": 30_000}

#: How long a connection that worked is lent again without a look, in seconds.
_TRUSTED_S: Final = 5.0

#: The table of tasks grows from nothing to millions of rows between two looks of the statistics collector: a plan that
#: was cached while it was small scans it whole for ever. A plan per call costs a fraction of a millisecond. Indexes are
#: on solid-state disks, where a random page costs about as much as the next one.
_PLANNER: Final = "-c plan_cache_mode=force_custom_plan -c random_page_cost=1.1"

#: Making a plan takes the server longer than finding a row by its key. Where nothing else is to be done, a plan that
#: goes by keys is right whatever the tables hold, and is made once for a connection.
_PLANS: Final = {True: ("force_generic_plan", "off"), False: ("force_custom_plan", "on")}
_SET_PLANS: Final = b"SELECT set_config('plan_cache_mode', %s, false), set_config('enable_seqscan', %s, false)"

#: Nobody waits longer than API Gateway, whose 29 s are over then; what is asked for must not go on without anybody.
_PATIENCE: Final = "-c statement_timeout=28000"


#: What the driver says, after the address, when it does not go on because of whom it would speak to.
_DISTRUST: Final = re.compile(r".* failed: (.*(?:certificate|does not support SSL).*)")


@dataclasses.dataclass
class _Attempts:
    """Why the newest attempt to connect failed, None if it did not: the pool says no more than that it has waited."""

    failure: psycopg.OperationalError | None = None


class _Connection(psycopg.Connection[DictRow]):
    """A connection that knows when it last worked, in monotonic seconds, and how its statements are planned."""

    used_at = 0.0
    by_keys = False

    @classmethod
    def connect(cls, *args: Any, **kwargs: Any) -> Self:
        attempts: _Attempts = kwargs.pop("attempts")
        try:
            connection = super().connect(*args, **kwargs)
        except psycopg.OperationalError as error:
            attempts.failure = error
            raise
        attempts.failure = None
        return connection


class Database:
    """A pool of autocommitting connections whose rows are dictionaries."""

    def __init__(self, conninfo: str, *, min_connections: int, max_connections: int, timeout_s: float) -> None:
        self._attempts = _Attempts()
        self._pool: ConnectionPool[_Connection] = ConnectionPool(
            conninfo,
            min_size=min_connections,
            max_size=max_connections,
            timeout=timeout_s,
            connection_class=_Connection,
            kwargs={
                **_SOCKET,
                "options": f"{_PLANNER} {_PATIENCE}",
                "autocommit": True,
                "row_factory": dict_row,
                "attempts": self._attempts,
            },
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
    def connection(self, *, by_keys: bool = False) -> Iterator[psycopg.Connection[DictRow]]:
        """Lend a connection. Each statement commits by itself; ``connection.transaction()`` makes several one.

        :param by_keys: the statements do nothing but find rows by their keys, or add some.
        :raises Unavailable: when the database cannot be reached, or goes away meanwhile (DatabaseUntrusted: what is
            reached is not accepted as the database).
        :raises InvalidRequest: for values that a column cannot hold, such as a NUL in a text.
        :raises Conflict: when the values contradict what is stored.
        """
        try:
            with self._pool.connection() as connection:
                if connection.by_keys is not by_keys:
                    connection.execute(_SET_PLANS, _PLANS[by_keys])
                    connection.by_keys = by_keys
                if self._sequel is None:
                    yield connection
                else:
                    with connection.transaction():
                        yield connection
                        connection.execute(*self._sequel)
                connection.used_at = time.monotonic()
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:  # also the pool's own
            cause = self._attempts.failure if isinstance(error, PoolTimeout) else None
            raise unavailable(error, cause=cause) from error
        except (psycopg.DataError, UnicodeEncodeError) as error:
            raise InvalidRequest(f"the database cannot hold this value: {error}") from error
        except psycopg.IntegrityError as error:
            raise Conflict(f"the database holds something else already: {error}") from error

    def rows(self, query: str, parameters: Mapping[str, Any], *, by_keys: bool = False) -> list[DictRow]:
        """Run one statement and fetch its rows, in the binary format."""
        with self.connection(by_keys=by_keys) as connection, connection.cursor(binary=True) as cursor:
            return cursor.execute(query.encode(), parameters).fetchall()

    def run(self, query: str, parameters: Mapping[str, Any]) -> int:
        """Run one statement. Returns the number of rows that it touched."""
        with self.connection() as connection:
            return connection.execute(query.encode(), parameters).rowcount


def unavailable(
    error: psycopg.Error, *, cause: psycopg.Error | None = None, what: str = "the database does not answer"
) -> Unavailable:
    """The driver's error as ours. The ``cause`` of a time-out is told if the operator has to do something about it."""
    if distrust := _DISTRUST.search(str(cause or error)):
        return DatabaseUntrusted(f"the database is not trusted: {distrust[1]}")
    return Unavailable(f"{what}: {error}")


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
