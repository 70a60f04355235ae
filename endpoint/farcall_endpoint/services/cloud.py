"""Client of the REST API for endpoints. It maps network errors to Farcall's errors."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import httpx
import msgspec

from farcall_common.credentials import Credentials
from farcall_common.errors import (
    ConfigurationError,
    EndpointUnknown,
    ErrorRecord,
    Fault,
    Unavailable,
)
from farcall_common.http_client import http_client
from farcall_common.http_errors import REQUEST_ID, error_from_response, is_answer_to
from farcall_common.login import Bearer, KeptLogin
from farcall_common.wire import Capabilities
from farcall_common.worker_share import WorkerShare

if TYPE_CHECKING:
    from farcall_common.sealing import SealingKey

_TIMEOUT: Final = httpx.Timeout(10.0, connect=5.0)


@dataclasses.dataclass(frozen=True)
class ConnectAnswer:
    """Live forwarders as (address, server key), a ticket until an epoch second, and the identity of the endpoint's
    owner; empty if the API does not report it."""

    forwarders: tuple[tuple[str, str], ...]
    ticket: str
    ticket_expires_at: float
    owner_id: str = ""


class Cloud:
    """A client of the API. May be used from several threads."""

    def __init__(self, credentials: Credentials, environ: Mapping[str, str] = os.environ) -> None:
        auth = authorization_of(credentials, environ)
        self._client = http_client(base_url=credentials.api_url, auth=auth, timeout=_TIMEOUT)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def register(self, *, name: str, display_name: str, metadata: Mapping[str, object]) -> str:
        """Register a new endpoint; its id.

        :raises FarcallError: the error in the API's answer, or Unavailable.
        """
        body = {"endpoint_name": name, "display_name": display_name, "multi_user": False, "metadata": dict(metadata)}
        with _parsing("POST /v3/endpoints"):
            return str(self._call("POST", "/v3/endpoints", body)["endpoint_id"])

    def connect(
        self,
        endpoint_id: str,
        *,
        public_key: str,
        spool_id: str,
        capabilities: Capabilities,
        worker_share: WorkerShare,
        sealing: SealingKey | None = None,
    ) -> ConnectAnswer:
        """Request forwarders and a ticket, and register the key as the endpoint's. ``sealing``: the public key to which
        clients seal calls; None takes a former one away.

        :raises EndpointUnknown: if the endpoint does not exist.
        :raises FarcallError: the error in the API's answer, or Unavailable.
        """
        body = {
            "public_key": public_key,
            "spool_id": spool_id,
            "python_version": capabilities.python_version,
            "packages": capabilities.packages,
            "serializers": list(capabilities.serializers),
            "platform": capabilities.platform,
            "containers": list(capabilities.containers),
            "worker_share": msgspec.to_builtins(worker_share),
            **({} if sealing is None else {"sealing": sealing.to_json()}),
        }
        with _parsing("a connect request"):
            try:
                answer = self._call("POST", f"/v3/endpoints/{endpoint_id}/connect", body)
            except EndpointUnknown as error:
                raise EndpointUnknown(
                    f"The deployment does not know endpoint {endpoint_id}: it was deleted there, or the deployment was "
                    "restored from before it was registered.",
                    hint="Move endpoint.json out of the endpoint's directory and start it: it registers again.",
                ) from error
            forwarders = tuple((str(item["address"]), str(item["server_key"])) for item in answer["forwarders"])
            owner_id = str(answer.get("owner_id", ""))
            return ConnectAnswer(forwarders, str(answer["ticket"]), float(answer["ticket_expires_at"]), owner_id)

    def make_credential(self, endpoint_id: str) -> str:
        """A new credential of the endpoint, which replaces the former one.

        :raises FarcallError: the error in the API's answer, or Unavailable.
        """
        with _parsing("a request for a credential"):
            return str(self._call("POST", f"/v3/endpoints/{endpoint_id}/credential")["credential"])

    def revoke_credential(self, endpoint_id: str) -> None:
        """Revoke the credential of the endpoint, and end the session of its agent.

        :raises FarcallError: the error in the API's answer, or Unavailable.
        """
        self._call("DELETE", f"/v3/endpoints/{endpoint_id}/credential")

    def delete(self, endpoint_id: str) -> None:
        """Delete the registration of an endpoint.

        :raises FarcallError: the error in the API's answer, or Unavailable.
        """
        self._call("DELETE", f"/v2/endpoints/{endpoint_id}")

    def _call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        request_id = uuid.uuid4().hex
        try:
            response = self._client.request(method, path, json=body, headers={REQUEST_ID: request_id})
        except httpx.InvalidURL as error:
            raise ConfigurationError(f"The address of the API is not a URL: {error}.") from error
        except httpx.UnsupportedProtocol as error:
            raise ConfigurationError(str(error)) from error
        except httpx.HTTPError as error:
            raise _unreachable(f"The API at {self._client.base_url} cannot be reached: {error}.") from error
        if not is_answer_to(request_id, response.headers):
            raise _unreachable(f"A proxy sent the answer to another request instead of the one to {method} {path}.")
        if response.is_success:
            return _object(response)
        request = f"{method} {str(response.request.url).partition('?')[0]}"
        raise error_from_response(response.status_code, response.headers, response.content, request=request)


def authorization_of(credentials: Credentials, environ: Mapping[str, str] = os.environ) -> httpx.Auth:
    """Authentication of requests: a login that renews itself, or a fixed token."""
    if credentials.login is not None:
        return KeptLogin(credentials.login, environ=environ)
    return Bearer(credentials.token)


@contextlib.contextmanager
def _parsing(what: str) -> Iterator[None]:
    """An answer of another shape is not from the API, or from a much newer one."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise Unavailable(f"The answer to {what} lacks a field: {error!r}.") from error


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
