"""Who may vouch for the database: the certificates of a PEM file, which travel in the bundles.

RDS signs with authorities of its own, which no system trusts by itself and AWS publishes as a file.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import ssl
from pathlib import Path
from typing import Final

from farcall_common.errors import ConfigurationError

__all__ = ["AUTHORITIES_FILE", "FETCH_AUTHORITIES", "Authorities", "read_authorities"]

#: The name of the file in the bundles.
AUTHORITIES_FILE: Final = "database-authorities.pem"
#: The command that brings those of RDS.
FETCH_AUTHORITIES: Final = "curl -fO https://truststore.pki.rds.amazonaws.com/global/global-bundle.pem"


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
