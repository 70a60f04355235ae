"""Who may vouch for the database: the certificates of a PEM file, which travel in the bundles.

RDS signs with authorities of its own, which no system trusts by itself and AWS publishes as a file.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import http.client
import ssl
import urllib.request
from pathlib import Path
from typing import Final

from farcall_common.errors import ConfigurationError

__all__ = [
    "AUTHORITIES_FILE",
    "FETCH_AUTHORITIES",
    "Authorities",
    "fetch_authorities",
    "is_address",
    "read_authorities",
]

#: The name of the file in the bundles.
AUTHORITIES_FILE: Final = "database-authorities.pem"
#: The command that brings those of RDS.
FETCH_AUTHORITIES: Final = "curl -fO https://truststore.pki.rds.amazonaws.com/global/global-bundle.pem"


_TIMEOUT_S: Final = 20.0


@dataclasses.dataclass(frozen=True)
class Authorities:
    """The certificates of the file at ``path`` as ``pem``, without whatever else is in it; ``valid`` of them have not
    expired, the last one of which does at ``expires_at``."""

    path: Path
    pem: str
    valid: int
    expires_at: dt.datetime


def read_authorities(path: Path, *, now: dt.datetime) -> Authorities:
    """Read a PEM file.

    :raises ConfigurationError: if it cannot be read, or holds no certificate of an authority that is valid at ``now``.
    """
    hint = f"database.authorities is a PEM file, from the working directory on. That of RDS: `{FETCH_AUTHORITIES}`"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cafile=path)
    except OSError as error:  # also when it holds no certificate, or a broken one
        raise ConfigurationError(f"the database's authorities in {path} cannot be read: {error}", hint=hint) from error
    ends = [
        dt.datetime.fromtimestamp(ssl.cert_time_to_seconds(str(each["notAfter"])), dt.UTC)
        for each in context.get_ca_certs()
    ]
    if not ends:
        raise ConfigurationError(f"{path} has certificates, but none of an authority", hint=hint)
    if max(ends) <= now:
        raise ConfigurationError(f"every authority in {path} has expired, the last on {max(ends):%Y-%m-%d}", hint=hint)
    return Authorities(
        path=path.resolve(),
        pem="".join(sorted(map(ssl.DER_cert_to_PEM_cert, context.get_ca_certs(binary_form=True)))),
        valid=sum(end > now for end in ends),
        expires_at=max(ends),
    )


def is_address(value: str) -> bool:
    """Whether a ``database.authorities`` is an address to fetch, and not a path."""
    return value.startswith("https://")


def fetch_authorities(url: str, directory: Path, *, now: dt.datetime) -> Authorities:
    """Fetch a PEM file over TLS, from a server that this machine trusts, into ``directory``.

    :raises ConfigurationError: if it cannot be fetched, or is not what :func:`read_authorities` accepts.
    """
    path = directory / AUTHORITIES_FILE
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - is_address admits https only
            if not is_address(answer.url):
                raise OSError(f"it redirects to {answer.url}, which is not encrypted")
            path.write_bytes(answer.read())
    except (OSError, http.client.HTTPException) as error:
        raise ConfigurationError(
            f"the database's certificate authorities cannot be fetched from {url}: {getattr(error, 'reason', error)}",
            hint=f"Fetch them on a machine that reaches it (`{FETCH_AUTHORITIES}`), and pass the file:"
            " -c database.authorities=global-bundle.pem",
        ) from error
    return read_authorities(path, now=now)
