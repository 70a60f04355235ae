"""Connection checks for a diagnosis: the API and the forwarder."""

from __future__ import annotations

import dataclasses
import re
import socket
import time
from typing import Final
from urllib.parse import urlsplit

import httpx

from farcall_common.credentials import Credentials
from farcall_common.errors import FarcallError
from farcall_common.http_client import http_client
from farcall_common.http_errors import error_from_response
from farcall_endpoint.services.cloud import authorization_of

_TIMEOUT_S: Final = 5.0
_ADDRESS: Final = re.compile(r"connecting to (tcp://\S+?:\d+)")


@dataclasses.dataclass(frozen=True)
class Reached:
    """``good`` is None if it is unknown."""

    good: bool | None
    text: str


def check_api(credentials: Credentials, endpoint_id: str | None) -> Reached:
    """Send a read-only request: for the endpoint's status, or the API's version."""
    path = f"/v2/endpoints/{endpoint_id}/status" if endpoint_id else "/v2/version"
    started_at = time.monotonic()
    try:
        with http_client(auth=authorization_of(credentials), timeout=_TIMEOUT_S) as client:
            answer = client.get(credentials.api_url + path)
    except (httpx.HTTPError, httpx.InvalidURL, FarcallError) as error:
        return Reached(False, f"cannot be reached: {error}")
    took_ms = (time.monotonic() - started_at) * 1000
    if answer.is_success:
        return Reached(True, f"answers (HTTP {answer.status_code} in {took_ms:.0f} ms)")
    refused = error_from_response(answer.status_code, answer.headers, answer.content, request=f"GET {path}")
    return Reached(False, f"{refused.record.message} (HTTP {answer.status_code} in {took_ms:.0f} ms)")


def check_port(address: str) -> Reached:
    """Open a TCP connection to a forwarder's port and close it again."""
    parts = urlsplit(address)
    if parts.hostname is None or parts.port is None:
        return Reached(None, "is not an address of a host and a port")
    started_at = time.monotonic()
    try:
        with socket.create_connection((parts.hostname, parts.port), timeout=_TIMEOUT_S):
            took_ms = (time.monotonic() - started_at) * 1000
    except OSError as error:
        return Reached(False, f"cannot be reached: {error.strerror or error}")
    return Reached(True, f"its port is open ({took_ms:.0f} ms)")


def last_address(log: str) -> str | None:
    """The forwarder that the agent has connected to last, by its log."""
    found = _ADDRESS.findall(log)
    return found[-1] if found else None
