"""Store settings: read once from the environment; they open the stores.

==============================================  =====================================================================
variable                                        meaning
==============================================  =====================================================================
``FARCALL_DATABASE_URL``                        ``postgresql://user:password@host:port/db``; or instead of it:
``FARCALL_DATABASE_HOST`` ``_PORT`` ``_NAME``   the database's address,
``FARCALL_DATABASE_SECRET_ARN``                 and a secret with ``{"username": …, "password": …}``
``FARCALL_DATABASE_ROLE_SECRET_ARNS``           for the migrator: such secrets of the programs, with commas
``FARCALL_DATABASE_CONNECTIONS``                for the migrator: connections that the programs share
``FARCALL_DATABASE_AUTHORITIES``                a PEM file: the database's certificate must be signed by one of them
                                                and be for its host; a relative path begins where the code is
``FARCALL_QUEUE_URL``                           ``redis://host:port/0``, ``rediss://…`` with TLS; or instead of it:
``FARCALL_QUEUE_HOST`` ``_PORT`` ``_TLS``       the queue's address, and ``true`` or ``false``
``FARCALL_BLOB_BUCKET``                         the S3 bucket for payloads and results; or instead of it:
``FARCALL_BLOB_DIRECTORY`` ``_URL`` ``_KEY``    a directory, the HTTP server on it, the key that signs its addresses
``FARCALL_TICKET_KEY``                          the key of connect and stream tickets, >= 32 bytes; or instead of it:
``FARCALL_TICKET_SECRET_ARN``                   a secret with ``{"key": …}``
==============================================  =====================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from psycopg.conninfo import make_conninfo

from farcall_common.errors import ConfigurationError
from farcall_common.store.actions_postgres import PostgresActions
from farcall_common.store.audit_postgres import PostgresAudit
from farcall_common.store.blobs_files import FileBlobs
from farcall_common.store.blobs_s3 import S3Blobs
from farcall_common.store.endpoints_postgres import PostgresEndpoints
from farcall_common.store.functions_postgres import PostgresFunctions
from farcall_common.store.ports import Blobs, Queue, Records
from farcall_common.store.postgres import ConnectionString, PostgresDatabase
from farcall_common.store.queue_valkey import ValkeyQueue
from farcall_common.store.secrets import Secret, read_pending
from farcall_common.store.shares_postgres import PostgresShares
from farcall_common.store.tasks_postgres import PostgresTasks
from farcall_common.store.tickets import Tickets
from farcall_common.store.tokens_postgres import PostgresTokens
from farcall_common.store.usage_postgres import PostgresUsage

_POSTGRES_PORT: Final = "5432"
_VALKEY_PORT: Final = "6379"
#: The directory that our packages are in: the bundle, where there is one.
_CODE: Final = Path(__file__).resolve().parents[2]
_SWITCH: Final = {"true": True, "false": False}


@dataclasses.dataclass(frozen=True)
class DatabaseSettings:
    """The database: a whole ``url``, or an address without credentials and the secret that holds them.

    With ``authorities``, a PEM file, its certificate must be signed by one of them and be for its host name.
    """

    url: str | None = dataclasses.field(default=None, repr=False)
    host: str = ""
    port: str = _POSTGRES_PORT
    name: str = ""
    secret_arn: str = ""
    authorities: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> DatabaseSettings:
        """Read the ``FARCALL_DATABASE_*`` variables. Raises ConfigurationError when one is missing, or the PEM file."""
        authorities = _authorities(environ)
        if url := environ.get("FARCALL_DATABASE_URL"):
            return cls(url=url, authorities=authorities)
        return cls(
            authorities=authorities,
            host=_required(environ, "FARCALL_DATABASE_HOST", instead_of="FARCALL_DATABASE_URL"),
            port=environ.get("FARCALL_DATABASE_PORT", _POSTGRES_PORT),
            name=_required(environ, "FARCALL_DATABASE_NAME"),
            secret_arn=_required(environ, "FARCALL_DATABASE_SECRET_ARN"),
        )

    @property
    def secret(self) -> Secret:
        """The secret; without a value if there is a ``url``."""
        return Secret(self.secret_arn)

    def source(self) -> ConnectionString:
        """Source of connection strings: the secret is read again when it is old, or when its password is not
        accepted."""
        secret = self.secret
        return lambda fresh: self.conninfo(secret, fresh=fresh)

    def conninfo(self, secret: Secret | None = None, *, fresh: bool = False) -> str:
        """The connection string; reads the secret if there is one. Raises Unavailable when it cannot be read."""
        verified = {"sslmode": "verify-full", "sslrootcert": self.authorities} if self.authorities else {}
        if self.url:
            return make_conninfo(self.url, **verified)
        credentials = (secret or self.secret).read(fresh=fresh)
        return make_conninfo(
            host=self.host,
            port=self.port,
            dbname=self.name,
            user=credentials["username"],
            password=credentials["password"],
            **verified,
        )


@dataclasses.dataclass(frozen=True)
class BlobSettings:
    """The blob store: a ``bucket`` of S3, or a ``directory`` behind an HTTP server at ``url``."""

    bucket: str = ""
    directory: str = ""
    url: str = ""
    key: str = dataclasses.field(default="", repr=False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> BlobSettings:
        """Read the ``FARCALL_BLOB_*`` variables. Raises ConfigurationError when one is missing."""
        if bucket := environ.get("FARCALL_BLOB_BUCKET"):
            return cls(bucket=bucket)
        return cls(
            directory=_required(environ, "FARCALL_BLOB_DIRECTORY", instead_of="FARCALL_BLOB_BUCKET"),
            url=_required(environ, "FARCALL_BLOB_URL"),
            key=_required(environ, "FARCALL_BLOB_KEY"),
        )

    def open(self) -> Blobs:
        """The store."""
        if self.bucket:
            return S3Blobs(self.bucket)
        return FileBlobs(Path(self.directory), url=self.url, key=self.key)


@dataclasses.dataclass(frozen=True)
class StoreSettings:
    """All that :func:`open_stores` needs. The ticket key is given, or is the ``key`` of a secret.

    Without ``blobs`` the program may use neither the blob store nor tickets.
    """

    database: DatabaseSettings
    queue_url: str = dataclasses.field(repr=False)
    blobs: BlobSettings | None
    ticket_key: str | None = dataclasses.field(default=None, repr=False)
    ticket_secret_arn: str = ""

    @classmethod
    def without_blobs(cls, environ: Mapping[str, str]) -> StoreSettings:
        """Read the variables of database and queue only. Raises ConfigurationError as :meth:`from_environment`."""
        return cls(database=DatabaseSettings.from_environment(environ), queue_url=_queue_url(environ), blobs=None)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> StoreSettings:
        """Read the variables above. Raises ConfigurationError, naming the first that is missing or wrong."""
        ticket_key = environ.get("FARCALL_TICKET_KEY")
        return cls(
            database=DatabaseSettings.from_environment(environ),
            queue_url=_queue_url(environ),
            blobs=BlobSettings.from_environment(environ),
            ticket_key=ticket_key,
            ticket_secret_arn=""
            if ticket_key
            else _required(environ, "FARCALL_TICKET_SECRET_ARN", instead_of="FARCALL_TICKET_KEY"),
        )


@dataclasses.dataclass(frozen=True)
class Stores(Records):
    """The open stores of a service."""

    queue: Queue
    blobs: Blobs
    tickets: Tickets

    def close(self) -> None:
        """Close every connection."""
        super().close()
        self.queue.close()


def open_records(
    conninfo: str | ConnectionString,
    *,
    min_connections: int = 1,
    max_connections: int = 4,
    timeout_s: float = 10.0,
    silence_s: float = 30.0,
    answer_s: float = 30.0,
) -> Records:
    """The records in a PostgreSQL database; parameters as of
    :class:`~farcall_common.store.postgres.PostgresDatabase`."""
    database = PostgresDatabase(
        conninfo,
        min_connections=min_connections,
        max_connections=max_connections,
        timeout_s=timeout_s,
        silence_s=silence_s,
        answer_s=answer_s,
    )
    return Records(
        database,
        PostgresFunctions(database),
        PostgresEndpoints(database),
        PostgresShares(database),
        PostgresTasks(database),
        PostgresAudit(database),
        PostgresTokens(database),
        PostgresUsage(database),
        PostgresActions(database),
    )


class _NotGranted:
    """Stand-in for a store that a program has no rights for."""

    def __init__(self, store: str) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        raise ConfigurationError(f"this program may not use {self._store}, and needs {name}")


def open_stores(
    settings: StoreSettings,
    *,
    max_connections: int = 4,
    connection_wait_s: float = 10.0,
    silence_s: float = 30.0,
    answer_s: float = 30.0,
) -> Stores:
    """Connect to the stores. They may be unavailable: calls raise Unavailable until they answer.

    :param max_connections: to the database; a Lambda environment needs one.
    :param connection_wait_s: how long a call waits for one of them before it is Unavailable.
    :param silence_s: how long a call waits for a sign of life from the database before it is Unavailable.
    :param answer_s: how long a call waits for the answer of a database that lives.
    :raises ConfigurationError: when the ticket key is too short.
    :raises Unavailable: when a secret cannot be read.
    """
    if settings.blobs is None:
        blobs, tickets = cast(Blobs, _NotGranted("the blob store")), cast(Tickets, _NotGranted("tickets"))
    else:
        blobs = settings.blobs.open()
        tickets = Tickets(settings.ticket_key or _ticket_key(settings.ticket_secret_arn))
    source = settings.database.source()
    source(False)  # fails now if the secret cannot be read
    records = open_records(
        source,
        max_connections=max_connections,
        timeout_s=connection_wait_s,
        silence_s=silence_s,
        answer_s=answer_s,
    )
    return Stores(
        **vars(records),
        queue=ValkeyQueue(settings.queue_url),
        blobs=blobs,
        tickets=tickets,
    )


def _required(environ: Mapping[str, str], name: str, *, instead_of: str = "") -> str:
    if value := environ.get(name):
        return value
    wanted = f"{instead_of} or {name}" if instead_of else name
    raise ConfigurationError(f"{wanted} is not set")


def _authorities(environ: Mapping[str, str]) -> str:
    name = environ.get("FARCALL_DATABASE_AUTHORITIES")
    if not name:
        return ""
    path = _CODE / name
    if not path.is_file():
        raise ConfigurationError(
            f"FARCALL_DATABASE_AUTHORITIES is {name!r}, and there is no file {path}",
            hint="Bundles contain it; add it to your image, or set an absolute path.",
        )
    return str(path)


def _queue_url(environ: Mapping[str, str]) -> str:
    if url := environ.get("FARCALL_QUEUE_URL"):
        return url
    host = _required(environ, "FARCALL_QUEUE_HOST", instead_of="FARCALL_QUEUE_URL")
    tls = environ.get("FARCALL_QUEUE_TLS", "true").lower()
    if tls not in _SWITCH:
        raise ConfigurationError(f"FARCALL_QUEUE_TLS is {tls!r}; it must be true or false")
    scheme = "rediss" if _SWITCH[tls] else "redis"
    return f"{scheme}://{host}:{environ.get('FARCALL_QUEUE_PORT', _VALKEY_PORT)}/0"


def _ticket_key(arn: str) -> Callable[[], str]:
    secret = Secret(arn)
    secret.read()  # fails now if it cannot be read
    return lambda: str(secret.latest()["key"])


def read_roles(environ: Mapping[str, str]) -> Sequence[Mapping[str, str]]:
    """User names and passwords of the programs' database logins, if configured. During a rotation, a program has two:
    first the one that is about to be the current one.

    :raises Unavailable: when one of the secrets cannot be read.
    """
    arns = [arn.strip() for arn in environ.get("FARCALL_DATABASE_ROLE_SECRET_ARNS", "").split(",") if arn.strip()]
    pending = [read_pending(arn) for arn in arns]
    return [value for value in pending if value] + [Secret(arn).read() for arn in arns]


def read_connections(environ: Mapping[str, str]) -> int | None:
    """The number of connections that the programs' roles share, if configured.

    :raises ConfigurationError: if it is no number.
    """
    text = environ.get("FARCALL_DATABASE_CONNECTIONS", "")
    if text and not (text.isascii() and text.isdigit()):
        raise ConfigurationError(f"FARCALL_DATABASE_CONNECTIONS is {text!r}; expected a number")
    return int(text) if text else None
