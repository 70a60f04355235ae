"""Authentication: identities of callers, the port of identity providers, and bearer tokens."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import quote, unquote

from farcall_common.errors import Unauthenticated
from farcall_common.fairness import PAYS_FOR

if TYPE_CHECKING:  # the authorizer needs no store
    from farcall_common.store.model import Task

#: Characters of a user name that a context has as they are: printable ASCII but the percent sign.
_PLAIN: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


#: The endpoint in the context of a token. A release without tokens takes the caller for the agent of this endpoint, and
#: refuses each request: API Gateway keeps contexts for minutes, also after a rollback.
_NO_ENDPOINT: Final = "token"


@dataclasses.dataclass(frozen=True)
class TokenGrant:
    """Rights of a token: operations with one of ``scopes``, only on ``endpoints`` and ``functions`` (ids). None: on
    all of them."""

    name: str
    scopes: Set[str]
    endpoints: Set[str] | None = None
    functions: Set[str] | None = None


@dataclasses.dataclass(frozen=True)
class Identity:
    """A caller. ``identity_set`` holds every identity of that person, the primary one included.

    What the caller makes belongs to ``identity_id``; what any identity of the set owns, the caller owns.
    ``expires_at`` (epoch seconds) is when the token expires, None if unknown. ``provider`` names the identity
    provider. ``is_admin`` tells the administrators of the deployment. ``verified`` is what the provider has verified
    and can decide who may use the deployment: texts such as ``domain example.org``. ``source_ip`` is the client's
    address, if API Gateway reports it.

    With ``endpoint_id`` the caller is the agent of this endpoint of the identity, with the credential
    ``credential_id``: it may connect the endpoint, and nothing else. With ``token_id`` the caller has that token, which
    permits what ``grant`` says; the API reads it from the token's record. ``creator`` is the person who
    owns the identity, if it is a service account.
    """

    identity_id: str
    username: str
    identity_set: Set[str] = frozenset()
    expires_at: float | None = None
    provider: str = ""
    is_admin: bool = False
    verified: Set[str] = dataclasses.field(default=frozenset(), compare=False)
    endpoint_id: str = ""
    credential_id: str = ""
    token_id: str = ""
    grant: TokenGrant | None = dataclasses.field(default=None, compare=False)
    creator: Identity | None = dataclasses.field(default=None, compare=False)
    source_ip: str = dataclasses.field(default="", compare=False)

    @property
    def rate_key(self) -> str:
        """Key of the rate limits that requests count against. The credential of an endpoint has its own limits."""
        return f"endpoint:{self.endpoint_id}" if self.endpoint_id else self.payer_id

    @property
    def payer_id(self) -> str:
        """Identity whose quotas the caller uses: a service account counts for the person who made it."""
        return self.creator.identity_id if self.creator else self.identity_id

    def quota_key(self, endpoint_owner_id: str) -> str:
        """Name of the caller's share of an endpoint; see :attr:`farcall_common.store.model.Task.quota_key`."""
        if self.creator is not None and (self.creator.owns(endpoint_owner_id) or self.owns(endpoint_owner_id)):
            return f"{self.payer_id}{PAYS_FOR}{self.identity_id}"
        return self.payer_id

    def __post_init__(self) -> None:
        object.__setattr__(self, "identity_set", frozenset(self.identity_set) | {self.identity_id})

    def owns(self, owner_id: str) -> bool:
        """Whether something that belongs to ``owner_id`` belongs to the caller."""
        return owner_id in self.identity_set

    def owns_task(self, task: Task) -> bool:
        """Whether a task is the caller's, and within the limits of the caller's token."""
        return (
            self.owns(task.owner_id)
            and self.permits_endpoint(task.endpoint_id)
            and self.permits_function(task.function_id)
        )

    def has_scope(self, scope: str) -> bool:
        """Whether the caller's token permits operations of this scope; always without a token."""
        return not self.token_id or (self.grant is not None and scope in self.grant.scopes)

    def permits_endpoint(self, endpoint_id: str) -> bool:
        """Whether the caller's token permits operations on an endpoint."""
        if not self.token_id:
            return True
        return self.grant is not None and (self.grant.endpoints is None or endpoint_id in self.grant.endpoints)

    def permits_function(self, function_id: str) -> bool:
        """Whether the caller's token permits operations on a function."""
        if not self.token_id:
            return True
        return self.grant is not None and (self.grant.functions is None or function_id in self.grant.functions)

    def to_context(self) -> dict[str, str]:
        """The identity as an authorizer's context: API Gateway passes flat strings only. They are ASCII: it is not
        documented how others pass, and they are signed."""
        return {
            "identity_id": self.identity_id,
            "username": quote(self.username, safe=_PLAIN),
            "identity_set": " ".join(sorted(self.identity_set)),
            "provider": self.provider,
            "is_admin": "true" if self.is_admin else "",
            "expires_at": "" if self.expires_at is None else f"{self.expires_at:.0f}",
            "verified": json.dumps(sorted(self.verified)),
            "endpoint_id": _NO_ENDPOINT if self.token_id else self.endpoint_id,
            "credential_id": self.credential_id,
            "token_id": self.token_id,
            "creator": json.dumps(self.creator.to_context()) if self.creator else "",
        }

    @classmethod
    def from_context(cls, context: Mapping[str, Any] | None, *, source_ip: str = "") -> Identity:
        """Read what :meth:`to_context` wrote.

        :raises Unauthenticated: without an authorizer's context.
        """
        if not context or not context.get("identity_id"):
            raise Unauthenticated("The request has no identity.")
        identities = frozenset(str(context.get("identity_set", "")).split())
        token_id, creator = str(context.get("token_id", "")), str(context.get("creator", ""))
        return cls(
            str(context["identity_id"]),
            unquote(str(context.get("username", ""))),
            identities,
            expires_at=float(context["expires_at"]) if context.get("expires_at") else None,
            provider=str(context.get("provider", "")),
            is_admin=context.get("is_admin") == "true",
            verified=frozenset(json.loads(context.get("verified") or "[]")),
            endpoint_id="" if token_id else str(context.get("endpoint_id", "")),
            credential_id=str(context.get("credential_id", "")),
            token_id=token_id,
            creator=cls.from_context(json.loads(creator)) if creator else None,
            source_ip=source_ip,
        )


def same_case(name: str) -> str:
    """A name or a domain as it is compared. Only ASCII has small letters that no other character becomes."""
    return name.lower() if name.isascii() else name


class IdentityProvider(Protocol):
    """Authenticates bearer tokens."""

    def authenticate(self, token: str) -> Identity:
        """The identity behind a token.

        :raises Unauthenticated: when the token is not valid (any more).
        :raises UserNotAllowed: when it is valid, but its identity may not use the deployment.
        :raises Unavailable: when the provider is unavailable.
        """


class Authorizer:
    """Authenticates the Authorization header with the identity provider."""

    def __init__(self, provider: IdentityProvider) -> None:
        self._provider = provider

    def identify(self, authorization: str | None) -> Identity:
        """The identity behind ``Bearer <token>``.

        :raises Unauthenticated: without a token, or with one that is not accepted.
        :raises UserNotAllowed: if the identity may not use the deployment.
        :raises Unavailable: when the provider is unavailable.
        """
        scheme, _, token = (authorization or "").strip().partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("The request has no bearer token.")
        return self._provider.authenticate(token)
