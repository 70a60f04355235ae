"""API in memory: the real routes and services over fake stores, called with proxy events."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Mapping
from typing import Any, Final

from aws_lambda_powertools.utilities.typing import LambdaContext

from farcall_common.limits import MAX_LAMBDA_ANSWER_BYTES, MAX_LAMBDA_EVENT_BYTES
from farcall_common.store import Stores
from farcall_lambdas.allowed_users import AllowedUsers
from farcall_lambdas.app import Application
from farcall_lambdas.auth import DevProvider
from farcall_lambdas.fleet import Fleet
from farcall_lambdas.identity import Authorizer, Identity
from farcall_lambdas.issued_credentials import IssuedCredentials, ProviderWithCredentials
from farcall_lambdas.proxy_event import proxy_event
from farcall_lambdas.route_access import SCOPES
from farcall_lambdas.settings import ApiSettings
from farcall_lambdas.signed_caller import CallerKey
from tests.support.stores import fake_stores

ALICE: Final = Identity("a11ce000-0000-4000-8000-000000000001", "alice@example.org")
BOB: Final = Identity("b0b00000-0000-4000-8000-000000000002", "bob@example.org")
CREDENTIALS: Final = IssuedCredentials(CallerKey(lambda: "c" * 32))


@dataclasses.dataclass
class Clock:
    """Epoch seconds, moved by the test."""

    now: float = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer of the API, its body read as JSON."""

    status: int
    body: Any
    headers: Mapping[str, str]


def invocation() -> LambdaContext:
    """The context of an invocation, as Lambda gives it to a handler."""
    context = LambdaContext()
    context._aws_request_id = "an-invocation"
    return context


class MemoryApi:
    """Calls the API as API Gateway would, with the limits of Lambda. Its stores are fakes unless others are given."""

    def __init__(
        self,
        *,
        settings: ApiSettings | None = None,
        stores: Stores | None = None,
        fleet: Fleet | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or Clock()
        self.stores = stores or fake_stores(self.clock)
        self.application = Application.over(
            self.stores,
            settings or ApiSettings(),
            clock=self.clock,
            fleet=fleet,
            credentials=CREDENTIALS,
        )
        self._one_at_a_time = threading.RLock()

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        caller: Identity | None = ALICE,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """One request. A ``body`` of text or bytes is sent as it is, any other as JSON; ``path`` may have a query."""
        sent = body if isinstance(body, str | bytes) or body is None else json.dumps(body)
        event = proxy_event(method, path, sent, caller=caller, headers=headers)
        if _json_bytes(event) > MAX_LAMBDA_EVENT_BYTES:
            return Answer(413, {"code": "REQUEST_TOO_LARGE"}, {})  # the gateway's answer
        with self._one_at_a_time:  # as a Lambda does; a test may call while it answers
            answer = self.application.answer(event, LambdaContext())
        assert _json_bytes(answer) <= MAX_LAMBDA_ANSWER_BYTES, (method, path)
        flat = {name: values[0] for name, values in answer["multiValueHeaders"].items()}
        return Answer(answer["statusCode"], json.loads(answer["body"]), flat)

    def function(self, *, caller: Identity = ALICE, **fields: object) -> str:
        """The id of a new function; ``fields`` are those of the request."""
        body = {"function_name": "f", "function_code": "4\n01\nf", **fields}
        return str(self._ok("/v3/functions", body, caller)["function_uuid"])

    def endpoint(self, *, caller: Identity = ALICE, **fields: object) -> str:
        """The id of a new endpoint; ``fields`` are those of the request."""
        return str(self._ok("/v3/endpoints", {"endpoint_name": "laptop", **fields}, caller)["endpoint_id"])

    def share(
        self, path: str, grantee: Identity | str, right: str = "use", *, caller: Identity = ALICE, **fields: object
    ) -> Any:
        """The share of the object at a path like ``endpoints/<id>`` with a person, or with a grantee in the store's
        words."""
        kind, _, id_ = (f"identity {grantee.identity_id}" if isinstance(grantee, Identity) else grantee).partition(" ")
        body = {"grantee": {"kind": kind, "id": id_}, "right": right, **fields}
        return self._ok(f"/v3/{path}/shares", body, caller, method="PUT")

    def _ok(self, path: str, body: object, caller: Identity, *, method: str = "POST") -> Any:
        answer = self.call(method, path, body, caller=caller)
        assert answer.status == 200, answer.body
        return answer.body

    def token(self, *, caller: Identity = ALICE, **fields: object) -> str:
        """The secret of a new token with every scope; ``fields`` are those of the request."""
        return str(self._ok("/v3/tokens", {"name": "ci", "scopes": list(SCOPES), **fields}, caller)["token"])


def _json_bytes(value: object) -> int:
    """Size of an event or an answer, as Lambda's runtime writes it."""
    return len(json.dumps(value, ensure_ascii=False).encode())


def admitted(credential: str, allowed: AllowedUsers | None = None) -> Identity:
    """The caller that the authorizer makes of a credential or a token."""
    allowed = allowed or AllowedUsers.everyone()
    provider = ProviderWithCredentials(DevProvider({}, allowed=allowed), CREDENTIALS, allowed=allowed)
    identity = Authorizer(provider).identify(f"Bearer {credential}")
    return Identity.from_context(json.loads(json.dumps(identity.to_context())))
