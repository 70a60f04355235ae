"""The CA bundle of the database: a PEM file of certificate authorities, which the code bundles contain.

RDS signs with its own certificate authorities. No operating system trusts them by default; AWS publishes them as a
file.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import http.client
import shutil
import ssl
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Final

from farcall_common.errors import ConfigurationError

#: The name of the file in the bundles.
CA_BUNDLE_FILE: Final = "database-authorities.pem"
#: The command that downloads the CA bundle of RDS.
FETCH_CA_BUNDLE: Final = "curl -fO https://truststore.pki.rds.amazonaws.com/global/global-bundle.pem"


_TIMEOUT_S: Final = 20.0


@dataclasses.dataclass(frozen=True)
class CaBundle:
    """The certificates of the file at ``path`` as ``pem``, without the file's other contents. ``valid`` counts those
    that have not expired; the last of them expires at ``expires_at``."""

    path: Path
    pem: str
    valid: int
    expires_at: dt.datetime


def read_ca_bundle(path: Path, *, now: dt.datetime) -> CaBundle:
    """Read a PEM file.

    :raises ConfigurationError: if it cannot be read, or has no CA certificate that is valid at ``now``.
    """
    hint = f"database.authorities is a PEM file, relative to the working directory. For RDS: `{FETCH_CA_BUNDLE}`"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cafile=path)
    except OSError as error:  # also when it holds no certificate, or a broken one
        raise ConfigurationError(f"cannot read the database's CA bundle {path}: {error}", hint=hint) from error
    expiries = [
        dt.datetime.fromtimestamp(ssl.cert_time_to_seconds(str(each["notAfter"])), dt.UTC)
        for each in context.get_ca_certs()
    ]
    if not expiries:
        raise ConfigurationError(f"{path} has certificates, but no CA certificate", hint=hint)
    if max(expiries) <= now:
        raise ConfigurationError(
            f"every CA certificate in {path} has expired, the last on {max(expiries):%Y-%m-%d}", hint=hint
        )
    return CaBundle(
        path=path.resolve(),
        pem="".join(sorted(map(ssl.DER_cert_to_PEM_cert, context.get_ca_certs(binary_form=True)))),
        valid=sum(expiry > now for expiry in expiries),
        expires_at=max(expiries),
    )


def is_https_url(value: str) -> bool:
    """Whether a ``database.authorities`` is a URL to fetch, and not a path."""
    return value.startswith("https://")


def fetch_ca_bundle(url: str, directory: Path, *, now: dt.datetime) -> CaBundle:
    """Download a PEM file over TLS, from a server that this machine trusts, into ``directory``.

    :raises ConfigurationError: if it cannot be downloaded, or :func:`read_ca_bundle` refuses it.
    """
    path = directory / CA_BUNDLE_FILE
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - is_https_url admits https only
            if not is_https_url(answer.url):
                raise OSError(f"it redirects to {answer.url}, which is not encrypted")
            path.write_bytes(answer.read())
    except (OSError, http.client.HTTPException) as error:
        raise ConfigurationError(
            f"cannot download the database's CA bundle from {url}: {getattr(error, 'reason', error)}",
            hint=f"Download it on a machine that reaches the server (`{FETCH_CA_BUNDLE}`), and pass the file:"
            " -c database.authorities=global-bundle.pem",
        ) from error
    return read_ca_bundle(path, now=now)


def keep_ca_bundle(url: str, directory: Path, *, now: dt.datetime, echo: Callable[[str], None]) -> CaBundle:
    """The CA bundle that ``directory`` has, downloaded from ``url`` if it has none; ``echo`` prints which one it is.

    :raises ConfigurationError: as :func:`fetch_ca_bundle` and :func:`read_ca_bundle`.
    """
    kept = directory / CA_BUNDLE_FILE
    if not kept.exists():
        with tempfile.TemporaryDirectory(prefix="farcall-ca-bundle-") as temporary:
            shutil.copyfile(fetch_ca_bundle(url, Path(temporary), now=now).path, kept)
        echo(f"Downloaded the database's CA bundle from {url}.")
    found = read_ca_bundle(kept, now=now)
    echo(f"The bundles contain the CA bundle {found.path}. Delete the file to download it again.")
    return found
