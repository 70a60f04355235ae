"""The REST API as an endpoint uses it. Network errors become errors of ours here."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

import httpx

from farcall_common.credentials import Credentials
from farcall_common.errors import (
    ConfigurationError,
    EndpointUnknown,
    ErrorRecord,
    Fault,
    Unavailable,
)
from farcall_common.http_errors import error_from_response
from farcall_common.login import Bearer, KeptLogin
from farcall_common.wire import Capabilities

_TIMEOUT: Final = httpx.Timeout(10.0, connect=5.0)


@dataclasses.dataclass(frozen=True)
class ConnectAnswer:
    """Live forwarders as (address, server key), a ticket until an epoch second, and the identity of the endpoint's
    owner; empty if the API does not tell it."""

    forwarders: tuple[tuple[str, str], ...]
    ticket: str
    ticket_expires_at: float
    owner_id: str = ""


class Cloud:
    """A client of the API. May be used from several threads."""

    def __init__(self, credentials: Credentials) -> None:
        self._client = httpx.Client(base_url=credentials.api_url, auth=authorization_of(credentials), timeout=_TIMEOUT)

    def close(self) -> None:
        """Give back the connections."""
        self._client.close()

    def register(self, *, name: str, display_name: str, metadata: Mapping[str, object]) -> str:
        """Make a new endpoint known; its id.

        :raises FarcallError: what the API answers, or Unavailable.
        """
        body = {"endpoint_name": name, "display_name": display_name, "multi_user": False, "metadata": dict(metadata)}
        with _believing("POST /v3/endpoints"):
            return str(self._call("POST", "/v3/endpoints", body)["endpoint_id"])

    def connect(self, endpoint_id: str, *, public_key: str, spool_id: str, capabilities: Capabilities) -> ConnectAnswer:
        """Ask for forwarders and a ticket, and let the key speak for the endpoint.

        :raises EndpointUnknown: if there is no such endpoint (any more).
        :raises FarcallError: what the API answers, or Unavailable.
        """
        body = {
            "public_key": public_key,
            "spool_id": spool_id,
            "python_version": capabilities.python_version,
            "packages": capabilities.packages,
            "serializers": list(capabilities.serializers),
            "platform": capabilities.platform,
        }
        with _believing("a connect request"):
            try:
                answer = self._call("POST", f"/v3/endpoints/{endpoint_id}/connect", body)
            except EndpointUnknown as error:
                raise EndpointUnknown(
                    f"The deployment does not know endpoint {endpoint_id}: it was deleted there, or the deployment was "
                    "restored from before it was registered.",
                    hint="Move endpoint.json out of the endpoint's directory and start it: it is registered anew.",
                ) from error
            forwarders = tuple((str(item["address"]), str(item["server_key"])) for item in answer["forwarders"])
            owner_id = str(answer.get("owner_id", ""))
            return ConnectAnswer(forwarders, str(answer["ticket"]), float(answer["ticket_expires_at"]), owner_id)

    def delete(self, endpoint_id: str) -> None:
        """Forget an endpoint.

        :raises FarcallError: what the API answers, or Unavailable.
        """
        self._call("DELETE", f"/v2/endpoints/{endpoint_id}")

    def _call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        try:
            response = self._client.request(method, path, json=body)
        except httpx.InvalidURL as error:
            raise ConfigurationError(f"The address of the API is not a URL: {error}.") from error
        except httpx.HTTPError as error:
            raise _unreachable(f"The API at {self._client.base_url} cannot be reached: {error}.") from error
        if response.is_success:
            return _object(response)
        request = f"{method} {str(response.request.url).partition('?')[0]}"
        raise error_from_response(response.status_code, response.headers, response.content, request=request)


def authorization_of(credentials: Credentials) -> httpx.Auth:
    """What says in each request who asks: a login that is renewed by itself, or a token that is always the same."""
    if credentials.login is not None:
        return KeptLogin(credentials.login, environ=os.environ)
    return Bearer(credentials.token)


@contextlib.contextmanager
def _believing(what: str) -> Iterator[None]:
    """An answer of another shape comes from something that is not the API, or from a much newer one."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise Unavailable(f"The answer to {what} lacks something: {error!r}.") from error


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        answer = response.json() if response.content else {}
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise Unavailable(f"{response.request.url} answered with something that is not a JSON object.")
    return answer


def _unreachable(message: str) -> Unavailable:
    record = ErrorRecord(
        Unavailable.code, message, hint="Check the address and the network.", fault=Fault.NETWORK, retryable=True
    )
    return Unavailable(message, record=record)
