"""First program of the forwarder's container: download the code bundle, find our address, start the forwarder.

The container image is a stock Python image, so this file uses only the standard library and is part of the task
definition (``python -c``). Its arguments are the command to start, which finds the bundle on its path.

Reads ``FARCALL_BUNDLE_BUCKET``, ``FARCALL_BUNDLE_KEY`` and ``FARCALL_BUNDLE_DIGEST`` (without them the image contains
the code; a bundle whose contents have another digest is not run), the task's
credentials (ECS credentials endpoint, or the usual AWS variables), ``AWS_REGION``, and ``AWS_ENDPOINT_URL`` for an S3
outside of AWS. Sets ``FARCALL_FORWARDER_ADVERTISE`` unless it is set already.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import http.client
import io
import ipaddress
import json
import os
import socket
import sys
import tempfile
import time
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Mapping

Fetch = Callable[..., bytes]
TIMEOUT_S = 60.0
CREDENTIALS_HOST = "http://169.254.170.2"
#: Services of AWS that answer with the address of the caller.
ADDRESS_SERVICES = ("checkip.amazonaws.com", "checkip.global.api.aws")
ADDRESS_TIMEOUT_S = 5.0
#: Seconds until all of these services are asked again; after the last one the task ends, and ECS starts another.
ADDRESS_PAUSES_S = (1.0, 3.0, 9.0)


def credentials(environ: Mapping[str, str], fetch: Fetch) -> tuple[str, str, str]:
    """Access key id, secret and session token of this task."""
    relative = environ.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    if relative is None:
        return environ["AWS_ACCESS_KEY_ID"], environ["AWS_SECRET_ACCESS_KEY"], environ.get("AWS_SESSION_TOKEN", "")
    given = json.loads(fetch(CREDENTIALS_HOST + relative))
    return given["AccessKeyId"], given["SecretAccessKey"], given["Token"]


def object_url(environ: Mapping[str, str], bucket: str, key: str) -> str:
    """The URL of the object; path style for an S3 outside of AWS."""
    quoted = urllib.parse.quote(key)
    if endpoint := environ.get("AWS_ENDPOINT_URL"):
        return f"{endpoint}/{bucket}/{quoted}"
    return f"https://{bucket}.s3.{environ['AWS_REGION']}.amazonaws.com/{quoted}"


def signed_headers(
    url: str, *, region: str, access_key: str, secret: str, token: str, now: datetime.datetime
) -> dict[str, str]:
    """Headers of a GET signed with AWS Signature Version 4 (S3, empty body)."""
    parts = urllib.parse.urlsplit(url)
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    headers = {"host": parts.netloc, "x-amz-content-sha256": hashlib.sha256(b"").hexdigest(), "x-amz-date": stamp}
    if token:
        headers["x-amz-security-token"] = token
    names = ";".join(sorted(headers))
    canonical = "\n".join(
        ["GET", parts.path, "", *(f"{name}:{headers[name]}" for name in sorted(headers)), "", names,
         headers["x-amz-content-sha256"]]
    )  # fmt: skip
    to_sign = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    signing_key = b"AWS4" + secret.encode()
    for part in (stamp[:8], region, "s3", "aws4_request"):
        signing_key = hmac.digest(signing_key, part.encode(), "sha256")
    signature = hmac.digest(signing_key, to_sign.encode(), "sha256").hex()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return headers


def fetch(url: str, headers: Mapping[str, str] | None = None) -> bytes:
    """The body of a successful GET."""
    request = urllib.request.Request(url, headers=dict(headers or {}))  # noqa: S310 - addresses are AWS's
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
        body: bytes = answer.read()
    return body


def ask_over_ipv4(host: str, *, port: int = 443) -> str:
    """The body of a successful GET of ``https://HOST/`` over IPv4, also if this task and the host have IPv6."""
    # A connection from an IPv4 address has no other choice.
    source = ("0.0.0.0", 0)  # noqa: S104 - nothing listens
    connection = http.client.HTTPSConnection(host, port, timeout=ADDRESS_TIMEOUT_S, source_address=source)
    try:
        connection.request("GET", "/")
        answer = connection.getresponse()
        body = answer.read(1000).decode("ascii", errors="replace").strip()
    finally:
        connection.close()
    if answer.status != http.HTTPStatus.OK:
        raise OSError(f"status {answer.status}: {body[:80]}")
    return body


def public_address(ask: Callable[[str], str], pause: Callable[[float], None]) -> str:
    """Our public IPv4 address. AWS maps it one to one, so peers can reach us under it.

    :raises SystemExit: if no service names one.
    """
    for pause_s in (*ADDRESS_PAUSES_S, None):
        for host in ADDRESS_SERVICES:
            try:
                return str(ipaddress.IPv4Address(ask(host)))
            except (OSError, http.client.HTTPException, ValueError) as error:
                sys.stderr.write(f"{host} names no IPv4 address of this task: {error}\n")
        if pause_s is not None:
            pause(pause_s)
    raise SystemExit("The public address of this task is unknown. Set FARCALL_FORWARDER_ADVERTISE to name it.")


def own_address(endpoint: str) -> str:
    """Our address on the route to ``endpoint``: outside of AWS it is not mapped to another one."""
    parts = urllib.parse.urlsplit(endpoint)
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))  # sends nothing
        return str(probe.getsockname()[0])


def fetch_bundle(environ: Mapping[str, str], fetch: Fetch) -> str:
    """Download and unpack the code bundle; returns its directory."""
    access_key, secret, token = credentials(environ, fetch)
    url = object_url(environ, environ["FARCALL_BUNDLE_BUCKET"], environ["FARCALL_BUNDLE_KEY"])
    now = datetime.datetime.now(datetime.UTC)
    region = environ["AWS_REGION"]
    headers = signed_headers(url, region=region, access_key=access_key, secret=secret, token=token, now=now)
    with zipfile.ZipFile(io.BytesIO(fetch(url, headers))) as bundle:
        if (found := digest(bundle)) != environ["FARCALL_BUNDLE_DIGEST"]:
            raise SystemExit(f"The bundle {url} is not the one that was deployed: its digest is {found}.")
        directory = tempfile.mkdtemp(prefix="farcall-bundle-")
        bundle.extractall(directory)
    return directory


def digest(bundle: zipfile.ZipFile) -> str:
    """The SHA-256 of a bundle's contents: of a line for each file, in the order of their names. The deployment makes it
    of the files, because the CDK zips them later."""
    files = sorted((each for each in bundle.infolist() if not each.is_dir()), key=lambda each: each.filename)
    lines = [f"{hashlib.sha256(bundle.read(each)).hexdigest()}  {each.filename}\n" for each in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def main(
    command: list[str],
    environ: Mapping[str, str],
    fetch: Fetch = fetch,
    *,
    ask: Callable[[str], str] = ask_over_ipv4,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Prepare the environment and replace this process by ``command``; never returns."""
    prepared = dict(environ)
    if "FARCALL_BUNDLE_BUCKET" in environ:
        prepared["PYTHONPATH"] = fetch_bundle(environ, fetch)
    if not environ.get("FARCALL_FORWARDER_ADVERTISE"):
        endpoint = environ.get("AWS_ENDPOINT_URL")
        prepared["FARCALL_FORWARDER_ADVERTISE"] = own_address(endpoint) if endpoint else public_address(ask, pause)
    os.execvpe(command[0], command, prepared)  # noqa: S606 - no shell is what we want


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
