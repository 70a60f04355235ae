"""Token shapes: tokens and service accounts. (Tasks are in :mod:`~farcall_lambdas.models.tasks`.)"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, Field, WithJsonSchema

from farcall_lambdas.models.fields import Id, Ids, Maybe, Name, Shape, Text
from farcall_lambdas.route_access import SCOPES

_DAY_S: Final = 86_400
#: Ids that a token is limited to, of each kind.
_MAX_IDS: Final = 100


def _known(scope: str) -> str:
    if scope not in SCOPES:
        raise ValueError(f"expected one of: {', '.join(SCOPES)}")
    return scope


Scope = Annotated[str, AfterValidator(_known), WithJsonSchema({"type": "string", "enum": list(SCOPES)})]


class CreateToken(Shape):
    """``endpoints`` and ``functions`` limit the token to these ids. Without ``expires_in_s`` the token expires in 90
    days, or in 30 where a group admits its owner, which is as long as it may have then. ``account_id`` makes a token of
    that service account of yours."""

    name: Annotated[Text, Field(min_length=1, max_length=100)]
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=len(SCOPES), fail_fast=True)]
    endpoints: Annotated[Ids | None, Field(min_length=1, max_length=_MAX_IDS)] = None
    functions: Annotated[Ids | None, Field(min_length=1, max_length=_MAX_IDS)] = None
    expires_in_s: Annotated[int | None, Field(ge=60, le=366 * _DAY_S)] = None
    account_id: Id | None = None


class TokenEntry(Shape):
    """A token of ``identity_id``, without its secret; times in epoch seconds. ``last_used_at`` may be an hour old."""

    token_id: str
    name: str
    identity_id: str
    scopes: list[str]
    endpoints: Maybe[list[str]] = None
    functions: Maybe[list[str]] = None
    created_at: float
    expires_at: float
    revoked_at: Maybe[float] = None
    last_used_at: Maybe[float] = None


class TokenCreated(TokenEntry):
    """``token`` is the secret, which no other answer has."""

    token: str


class TokenList(Shape):
    tokens: list[TokenEntry]


class CreateAccount(Shape):
    name: Name


class AccountEntry(Shape):
    """``created_at`` in epoch seconds; ``owner_id`` is the person who owns the account."""

    account_id: str
    name: str
    owner_id: str
    created_at: float


class AccountList(Shape):
    accounts: list[AccountEntry]
