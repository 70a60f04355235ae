"""PostgreSQL connections: pool, conversion of values, mapping of the driver's errors."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Self, TypeVar

import msgspec
import psycopg
from psycopg.abc import PQGen
from psycopg.errors import ReadOnlySqlTransaction, _WaitTimeout
from psycopg.rows import DictRow, dict_row
from psycopg.types.json import set_json_loads
from psycopg_pool import ConnectionPool, PoolTimeout

from farcall_common.errors import Conflict, DatabaseUntrusted, InvalidRequest, Unavailable

#: Detection of a lost server, in seconds.
_SOCKET: Final = {"connect_timeout": 5, "keepalives_idle": 30, "keepalives_interval": 10}

#: How long a connection that worked is lent again without a check, in seconds.
_TRUSTED_S: Final = 5.0

#: The table of tasks grows from nothing to millions of rows between two looks of the statistics collector: a plan that
#: was cached while it was small scans it whole for ever. A plan per call costs a fraction of a millisecond. Indexes are
#: on solid-state disks, where a random page costs about as much as the next one.
_PLANNER: Final = "-c plan_cache_mode=force_custom_plan -c random_page_cost=1.1"

#: Making a plan takes the server longer than finding a row by its key. Where nothing else is to be done, a plan that
#: goes by keys is right whatever the tables hold, and is made once for a connection.
_PLANS: Final = {True: ("force_generic_plan", "off"), False: ("force_custom_plan", "on")}
_SET_PLANS: Final = b"SELECT set_config('plan_cache_mode', %s, false), set_config('enable_seqscan', %s, false)"

#: API Gateway gives up after 29 s: no statement must run longer.
_TIMEOUT: Final = "-c statement_timeout=28000"


#: When to retry after the server has refused a connection because there are too many.
_RETRY_AFTER_S: Final = 2.0

#: Messages of the server then, and for a wrong password.
_REFUSED: Final = re.compile(r"too many (?:connections|clients)|remaining connection slots")
_WRONG_PASSWORD: Final = "password authentication failed"  # noqa: S105 - a message

#: The first and the longest wait for a connection, in seconds. Refusals are looked for between two waits.
_FIRST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 1.0

#: Seconds after which a wait for an answer looks for Ctrl-C.
_WAIT_INTERVAL_S: Final = 0.1

T = TypeVar("T")

#: Source of a connection string; with True, it is read again, because the password was not accepted.
ConnectionString = Callable[[bool], str]


#: Messages of the driver, after the address, when it does not trust the server.
_DISTRUST: Final = re.compile(r".* failed: (.*(?:certificate|does not support SSL).*)")


@dataclasses.dataclass
class _Attempts:
    """The failure of the newest attempt to connect, if it failed: the pool reports only that it has waited."""

    refused_s: float
    failure: psycopg.OperationalError | None = None
    #: When the server last had too many connections of ours, in monotonic seconds.
    refused_at: float = float("-inf")

    @property
    def is_refused(self) -> bool:
        """Whether that was so shortly before that the server is not asked for another connection."""
        return self.refused_since(time.monotonic() - self.refused_s)

    def refused_since(self, instant: float) -> bool:
        return self.refused_at > instant


class _Refused(PoolTimeout):
    """The server has too many connections of ours."""


class _Connection(psycopg.Connection[DictRow]):
    """A connection that knows when it last worked, and how its statements are planned.

    The time is that of the wall clock: the monotonic one stands still while Lambda has frozen the process. The limits
    of time are in seconds: ``answer_s`` for each answer of the server, ``silence_s`` for that to a check.
    """

    used_at = 0.0
    by_keys = False
    answer_s: float | None = None
    silence_s: float | None = None

    @classmethod
    def connect(cls, *_args: Any, **kwargs: Any) -> Self:
        attempts: _Attempts = kwargs.pop("attempts")
        source: ConnectionString = kwargs.pop("source")
        answer_s, silence_s = kwargs.pop("answer_s"), kwargs.pop("silence_s")
        if attempts.failure and attempts.is_refused:
            raise attempts.failure
        try:
            try:
                connection = super().connect(known := source(False), **kwargs)
            except psycopg.OperationalError as error:
                if _WRONG_PASSWORD not in str(error) or (latest := source(True)) == known:
                    raise
                connection = super().connect(latest, **kwargs)
        except psycopg.OperationalError as error:
            attempts.failure = error
            if _REFUSED.search(str(error)):
                attempts.refused_at = time.monotonic()
            raise
        except Unavailable as error:  # the secret's store; the pool knows the driver's errors
            attempts.failure = psycopg.OperationalError(str(error))
            raise attempts.failure from error
        attempts.failure = None
        connection.answer_s, connection.silence_s = answer_s, silence_s
        return connection

    def wait(self, gen: PQGen[T], interval: float = _WAIT_INTERVAL_S, timeout: float | None = None) -> T:
        """Wait for an answer, for a limited time: a server that hangs still acknowledges what it gets."""
        limit_s = self.answer_s if timeout is None else timeout
        try:
            return super().wait(gen, interval, limit_s)
        except _WaitTimeout:
            self.pgconn.finish()
            raise psycopg.OperationalError(f"no answer within {limit_s:g} s") from None

    def check(self) -> None:
        """Ask the server for a sign of life.

        :raises psycopg.OperationalError: if it gives none within ``silence_s``.
        """
        answer_s, self.answer_s = self.answer_s, self.silence_s
        try:
            ConnectionPool.check_connection(self)
        finally:
            self.answer_s = answer_s


_TRY_LOCK: Final = """
    INSERT INTO turn (name, until) VALUES (%(name)s, now() + %(ttl_s)s * interval '1 second')
    ON CONFLICT (name) DO UPDATE SET until = excluded.until WHERE turn.until < now()
"""

#: Something to do with a connection.
#: SQL for the identity whose quotas ``owner_id`` uses, and for the rows of it and of its service accounts.
PAYER: Final = "coalesce((SELECT owner_id FROM service_account WHERE account_id = %(owner_id)s), %(owner_id)s)"
OF_PAYER: Final = (
    f"(owner_id = {PAYER} OR owner_id IN (SELECT account_id FROM service_account WHERE owner_id = {PAYER}))"  # noqa: S608
)

_Step = Callable[[psycopg.Connection[DictRow]], object]


class PostgresDatabase:
    """:class:`~farcall_common.store.ports.Database` on psycopg 3: a pool of autocommitting connections whose rows are
    dictionaries.

    :param conninfo: a libpq connection string or URL, or its source.
    :param min_connections: kept open while idle.
    :param max_connections: lent at once; further callers wait up to ``timeout_s`` seconds, then get Unavailable.
    :param silence_s: a connection is lost if the server's machine acknowledges nothing for so long, or the server
        does not answer a check.
    :param answer_s: a connection is lost if the server does not answer a statement for so long. The server itself
        ends statements after 28 seconds.
    :param refused_s: for so long after the server has refused a connection because there are too many, none is tried
        again: each attempt costs the server a process and the check of a password.
    """

    def __init__(
        self,
        conninfo: str | ConnectionString,
        *,
        min_connections: int = 1,
        max_connections: int = 4,
        timeout_s: float = 10.0,
        silence_s: float = 30.0,
        answer_s: float = 30.0,
        refused_s: float = 1.0,
    ) -> None:
        self._attempts = _Attempts(refused_s)
        self._timeout_s = timeout_s
        self._pool: ConnectionPool[_Connection] = ConnectionPool(
            "",
            min_size=min_connections,
            max_size=max_connections,
            timeout=timeout_s,
            # Each request for a connection tries again: the pool's own attempts come ever more rarely.
            reconnect_timeout=0,
            connection_class=_Connection,
            kwargs={
                **_SOCKET,
                "tcp_user_timeout": int(silence_s * 1000),
                "options": f"{_PLANNER} {_TIMEOUT}",
                "autocommit": True,
                "row_factory": dict_row,
                "attempts": self._attempts,
                "answer_s": answer_s,
                "silence_s": silence_s,
                "source": (lambda _: conninfo) if isinstance(conninfo, str) else conninfo,
            },
            configure=_configure,
            check=_check,
            num_workers=1,
            open=True,
            name="farcall-records",
        )
        self._first: _Step | None = None
        self._last: _Step | None = None

    def between(self, first: _Step | None, last: _Step) -> PostgresDatabase:
        """The same database; each use of a connection starts and finishes with these steps, as one transaction."""
        between = copy.copy(self)
        between._first, between._last = first, last
        return between

    def ping(self) -> None:
        self.rows("SELECT 1", {})

    def close(self) -> None:
        self._pool.close()

    def size_bytes(self) -> int:
        [row] = self.rows("SELECT pg_database_size(current_database()) AS bytes", {})
        return int(row["bytes"])

    def try_lock(self, name: str, *, ttl_s: float) -> bool:
        return self.run(_TRY_LOCK, {"name": name, "ttl_s": ttl_s}) > 0

    def unlock(self, name: str) -> None:
        self.run("DELETE FROM turn WHERE name = %(name)s", {"name": name})

    @contextlib.contextmanager
    def connection(self, *, by_keys: bool = False) -> Iterator[psycopg.Connection[DictRow]]:
        """Lend a connection. Each statement commits; ``connection.transaction()`` combines several.

        :param by_keys: the statements do nothing but find rows by their keys, or add some.
        :raises Unavailable: when the database cannot be reached, or fails meanwhile (DatabaseUntrusted: what is
            reached is not accepted as the database).
        :raises InvalidRequest: for values that a column cannot hold, such as a NUL in a text.
        :raises Conflict: when the values contradict what is stored.
        """
        try:
            with self._lent() as connection:
                if connection.by_keys is not by_keys:
                    connection.execute(_SET_PLANS, _PLANS[by_keys])
                    connection.by_keys = by_keys
                if self._last is None:
                    yield connection
                else:
                    with connection.transaction():
                        if self._first:
                            self._first(connection)
                        yield connection
                        self._last(connection)
                connection.used_at = time.time()
        except (psycopg.OperationalError, psycopg.InterfaceError, ReadOnlySqlTransaction) as error:
            # The pool's own errors are among them, and those of a server with a full disk or of a former primary.
            cause = self._attempts.failure if isinstance(error, PoolTimeout) else None
            raise unavailable(error, cause=cause, refused=isinstance(error, _Refused)) from error
        except (psycopg.DataError, UnicodeEncodeError) as error:
            raise InvalidRequest(f"the database cannot hold this value: {error}") from error
        except psycopg.IntegrityError as error:
            raise Conflict(f"the database holds something else already: {error}") from error

    @contextlib.contextmanager
    def _lent(self) -> Iterator[_Connection]:
        """A connection of the pool. A caller that waits for one gives up when the server has refused one meanwhile."""
        began = time.monotonic()
        give_up_at = began + self._timeout_s
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                connection = self._pool.getconn(timeout=min(wait_s, max(give_up_at - time.monotonic(), 0.0)))
                break
            except PoolTimeout as error:
                if self._attempts.is_refused or self._attempts.refused_since(began):
                    raise _Refused(str(error)) from error
                if time.monotonic() >= give_up_at:
                    raise
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        try:
            with connection:
                yield connection
        finally:
            self._pool.putconn(connection)

    def rows(self, query: str, parameters: Mapping[str, Any], *, by_keys: bool = False) -> list[DictRow]:
        """Run one statement and fetch its rows, in the binary format."""
        with self.connection(by_keys=by_keys) as connection, connection.cursor(binary=True) as cursor:
            return cursor.execute(query.encode(), parameters).fetchall()

    def run(self, query: str, parameters: Mapping[str, Any]) -> int:
        """Run one statement. Returns the number of rows that it touched."""
        with self.connection() as connection:
            return connection.execute(query.encode(), parameters).rowcount

    def count(self, table: str, owner_id: str, limit: int) -> int:
        """The rows in a table, or in a join, that count for an owner; counting stops at ``limit``."""
        [row] = self.rows(
            f"SELECT count(*) FROM (SELECT FROM {table} WHERE {OF_PAYER} LIMIT %(limit)s) AS owned",  # noqa: S608 - of constants
            {"owner_id": owner_id, "limit": limit},
        )
        return int(row["count"])


def unavailable(
    error: psycopg.Error,
    *,
    cause: psycopg.Error | None = None,
    what: str = "the database does not answer",
    refused: bool = False,
) -> Unavailable:
    """The driver's error as ours. The message has the ``cause`` of a time-out if the operator has to act on it;
    ``refused``: the server has no connection left for this program."""
    if refused:
        return Unavailable(f"the database has no connection left: {error}", retry_after_s=_RETRY_AFTER_S)
    if distrust := _DISTRUST.search(str(cause or error)):
        return DatabaseUntrusted(f"the database is not trusted: {distrust[1]}")
    return Unavailable(f"{what}: {error}", retry_after_s=_RETRY_AFTER_S if isinstance(error, PoolTimeout) else None)


def _check(connection: _Connection) -> None:
    """Check a connection, if in doubt: a call to the server each time would double every round trip.

    A connection that the server closed is readable; an idle one is not. A server that vanished leaves no trace; the
    longer ago the connection worked, the likelier that is.
    """
    readable = select.poll()
    readable.register(connection.fileno(), select.POLLIN)
    if readable.poll(0) or abs(time.time() - connection.used_at) > _TRUSTED_S:
        connection.check()


def _configure(connection: psycopg.Connection[DictRow]) -> None:
    set_json_loads(msgspec.json.decode, connection)


def to_json(value: object) -> str | None:
    """A value as JSON text for a column; None stays NULL."""
    return None if value is None else msgspec.json.encode(value).decode()


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows turned into the arrays that a batch statement unnests. There must be a row."""
    return {name: [row[name] for row in rows] for name in rows[0]}
