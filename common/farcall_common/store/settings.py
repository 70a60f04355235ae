"""Where the stores are, read once from the environment, and the stores themselves.

==============================================  =====================================================================
variable                                        meaning
==============================================  =====================================================================
``FARCALL_DATABASE_URL``                        ``postgresql://user:password@host:port/db``; or instead of it:
``FARCALL_DATABASE_HOST`` ``_PORT`` ``_NAME``   the database's address,
``FARCALL_DATABASE_SECRET_ARN``                 and a secret with ``{"username": …, "password": …}``
``FARCALL_DATABASE_AUTHORITIES``                a PEM file: the database's certificate must be signed by one of them
                                                and be for its host; a relative path begins where the code is
``FARCALL_QUEUE_URL``                           ``redis://host:port/0``, ``rediss://…`` with TLS; or instead of it:
``FARCALL_QUEUE_HOST`` ``_PORT`` ``_TLS``       the queue's address, and ``true`` or ``false``
``FARCALL_BLOB_BUCKET``                         the bucket for payloads and results
``FARCALL_TICKET_KEY``                          the key of connect and stream tickets, >= 32 bytes; or instead of it:
``FARCALL_TICKET_SECRET_ARN``                   a secret with ``{"key": …}``
==============================================  =====================================================================
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from psycopg.conninfo import make_conninfo

from farcall_common.errors import ConfigurationError, Unavailable
from farcall_common.store.blobs_s3 import S3Blobs
from farcall_common.store.ports import Blobs, Queue, Records
from farcall_common.store.queue_valkey import ValkeyQueue
from farcall_common.store.records_postgres import PostgresRecords
from farcall_common.store.tickets import Tickets

__all__ = ["DatabaseSettings", "StoreSettings", "Stores", "open_stores"]

_POSTGRES_PORT: Final = "5432"
_VALKEY_PORT: Final = "6379"
#: The directory that our packages are in: the bundle, where there is one.
_CODE: Final = Path(__file__).resolve().parents[2]
_SWITCH: Final = {"true": True, "false": False}


@dataclasses.dataclass(frozen=True)
class DatabaseSettings:
    """The database: a whole ``url``, or an address without credentials and the secret that holds them.

    With ``authorities``, a PEM file, it is spoken to only if one of them has signed a certificate for its host name.
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

    def conninfo(self) -> str:
        """The connection string; reads the secret if there is one. Raises Unavailable when it cannot be read."""
        verified = {"sslmode": "verify-full", "sslrootcert": self.authorities} if self.authorities else {}
        if self.url:
            return make_conninfo(self.url, **verified)
        secret = _secret(self.secret_arn)
        return make_conninfo(
            host=self.host,
            port=self.port,
            dbname=self.name,
            user=secret["username"],
            password=secret["password"],
            **verified,
        )


@dataclasses.dataclass(frozen=True)
class StoreSettings:
    """All that :func:`open_stores` needs. The ticket key is given, or is the ``key`` of a secret."""

    database: DatabaseSettings
    queue_url: str = dataclasses.field(repr=False)
    blob_bucket: str
    ticket_key: str | None = dataclasses.field(default=None, repr=False)
    ticket_secret_arn: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> StoreSettings:
        """Read the variables above. Raises ConfigurationError, naming the first that is missing or wrong."""
        ticket_key = environ.get("FARCALL_TICKET_KEY")
        return cls(
            database=DatabaseSettings.from_environment(environ),
            queue_url=_queue_url(environ),
            blob_bucket=_required(environ, "FARCALL_BLOB_BUCKET"),
            ticket_key=ticket_key,
            ticket_secret_arn=""
            if ticket_key
            else _required(environ, "FARCALL_TICKET_SECRET_ARN", instead_of="FARCALL_TICKET_KEY"),
        )


@dataclasses.dataclass(frozen=True)
class Stores:
    """The open stores of a service."""

    records: Records
    queue: Queue
    blobs: Blobs
    tickets: Tickets

    def close(self) -> None:
        """Give back every connection."""
        self.records.close()
        self.queue.close()


def open_stores(settings: StoreSettings, *, max_connections: int = 4) -> Stores:
    """Connect to the stores. They may still be away: calls raise Unavailable until they answer.

    :param max_connections: to the database; a Lambda environment needs one.
    :raises ConfigurationError: when the ticket key is too short.
    :raises Unavailable: when a secret cannot be read.
    """
    tickets = Tickets(settings.ticket_key or str(_secret(settings.ticket_secret_arn)["key"]))
    return Stores(
        records=PostgresRecords(settings.database.conninfo(), max_connections=max_connections),
        queue=ValkeyQueue(settings.queue_url),
        blobs=S3Blobs(settings.blob_bucket),
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
            hint="Bundles have it by themselves; put it into an image of your own, or give an absolute path.",
        )
    return str(path)


def _queue_url(environ: Mapping[str, str]) -> str:
    if url := environ.get("FARCALL_QUEUE_URL"):
        return url
    host = _required(environ, "FARCALL_QUEUE_HOST", instead_of="FARCALL_QUEUE_URL")
    tls = environ.get("FARCALL_QUEUE_TLS", "true").lower()
    if tls not in _SWITCH:
        raise ConfigurationError(f"FARCALL_QUEUE_TLS is {tls!r}; it is either true or false")
    scheme = "rediss" if _SWITCH[tls] else "redis"
    return f"{scheme}://{host}:{environ.get('FARCALL_QUEUE_PORT', _VALKEY_PORT)}/0"


def _secret(arn: str) -> dict[str, str]:
    # Imported here because a deployment without secrets has no need of boto3, which is slow to import.
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        answer = boto3.client("secretsmanager").get_secret_value(SecretId=arn)
    except (BotoCoreError, ClientError) as error:
        raise Unavailable(f"the secret {arn} cannot be read: {error}") from error
    secret: dict[str, str] = json.loads(answer["SecretString"])
    return secret
