"""Tokens and service accounts: making, revoking, and what a caller with a token is permitted."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
from collections.abc import Sequence
from typing import Any, Final

from farcall_common.errors import (
    Conflict,
    EndpointUnknown,
    FunctionUnknown,
    InvalidRequest,
    NotFound,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from farcall_common.store.model import ApiToken, Quota, Quotable, ServiceAccount
from farcall_common.wire.ids import new_id
from farcall_lambdas.allowed_users import BY_GROUP
from farcall_lambdas.identity import Identity, TokenGrant
from farcall_lambdas.issued_credentials import IssuedCredentials
from farcall_lambdas.models.tokens import CreateToken
from farcall_lambdas.recent import Recent
from farcall_lambdas.services.base import Context, Service
from farcall_lambdas.services.endpoints import EndpointService

#: How long a record is used without reading it again: after this time, a revoked token is refused.
_GOOD_S: Final = 10.0
_DAY_S: Final = 86_400
_EXPIRES_IN_S: Final = 90 * _DAY_S
#: A token keeps the groups that its maker had: not for longer than this, if one of them admits the maker.
_MAX_BY_GROUP_S: Final = 30 * _DAY_S
#: How old ``last_used_at`` may be.
_USE_NOTED_S: Final = 3600.0
_NEW_TOKEN: Final = "Make another token: `farcall tokens create`."  # noqa: S105 - a hint


class TokenService(Service):
    """Tokens and service accounts of the caller."""

    def __init__(
        self, context: Context, endpoints: EndpointService, credentials: IssuedCredentials | None = None
    ) -> None:
        super().__init__(context)
        self._endpoints = endpoints
        self._credentials = credentials
        self._tokens: Recent[str, ApiToken | None] = Recent(context.clock, good_s=_GOOD_S)
        self._accounts: Recent[str, ServiceAccount | None] = Recent(context.clock, good_s=_GOOD_S)

    def admit(self, identity: Identity) -> Identity:
        """The caller, with what the caller's token permits.

        :raises Unauthenticated: with a token that was revoked or has expired, or if the service account was deleted.
        """
        store = self._stores.tokens
        if identity.creator is not None and self._accounts.get_or_read(identity.identity_id, store.get_account) is None:
            raise Unauthenticated(
                "The service account was deleted.", hint="Make another one: `farcall accounts create`."
            )
        if not identity.token_id:
            return identity
        token = self._tokens.get_or_read(identity.token_id, self._read_used)
        if token is None or token.revoked_at is not None or token.identity_id != identity.identity_id:
            raise Unauthenticated("The token was revoked.", hint=_NEW_TOKEN)
        if token.expires_at <= self._now():
            raise Unauthenticated(f"The token {token.name!r} has expired.", hint=_NEW_TOKEN)
        grant = TokenGrant(
            token.name,
            frozenset(token.scopes),
            None if token.endpoints is None else frozenset(token.endpoints),
            None if token.functions is None else frozenset(token.functions),
        )
        return dataclasses.replace(identity, grant=grant)

    def create(self, identity: Identity, wanted: CreateToken) -> tuple[ApiToken, str]:
        """Make a token of the caller, or of a service account of the caller. Returns its record and the secret.

        :raises NotFound: for an account, endpoint or function that does not exist.
        :raises InvalidRequest: for a time that is too long.
        :raises QuotaExceeded: over the number of tokens.
        :raises Unsupported: if this API makes none.
        """
        if self._credentials is None:
            raise Unsupported("This API makes no tokens.", hint="Use your login.")
        for endpoint_id in wanted.endpoints or ():
            if self._stores.endpoints.get_endpoint(endpoint_id) is None:
                raise EndpointUnknown(f"There is no endpoint {endpoint_id}.")
        functions = wanted.functions or ()
        known = self._stores.functions.get_functions(functions, with_bodies=False) if functions else {}
        for function_id in functions:
            if function_id not in known:
                raise FunctionUnknown(f"There is no function {function_id}.")
        subject = identity
        if wanted.account_id is not None:
            account = self._account(identity, wanted.account_id)
            subject = Identity(account.account_id, account.name, provider="farcall", creator=_person(identity))
        token = ApiToken(
            token_id=new_id(),
            identity_id=subject.identity_id,
            owner_id=identity.identity_id,
            name=wanted.name,
            scopes=sorted(set(wanted.scopes)),
            endpoints=wanted.endpoints,
            functions=wanted.functions,
            created_at=self._now(),
            expires_at=self._now() + dt.timedelta(seconds=_lifetime_s(identity, wanted.expires_in_s)),
        )
        secret = self._credentials.issue_token(
            subject, token_id=token.token_id, expires_at=token.expires_at.timestamp()
        )
        about: dict[str, Any] = {"name": token.name, "of": token.identity_id, "scopes": token.scopes}
        limits = {"endpoints": token.endpoints, "functions": token.functions}
        about |= {kind: ids for kind, ids in limits.items() if ids is not None}
        done = self._entry(identity, "token.create", token.token_id, **about)
        self._storage.check()
        quota = Quota(Quotable.TOKEN, identity.identity_id, self._settings.max_tokens)
        self._access.note_person(identity)
        self._stores.tokens.audited(done, quota=quota).add_token(token)
        return token, secret

    def tokens(self, identity: Identity) -> Sequence[ApiToken]:
        """Tokens that the caller made, newest first; as many as fit an answer."""
        found = self._stores.tokens.list_tokens(identity.identity_set)
        return self._fitting(found, shown=lambda each: (each.name, each.scopes, each.endpoints, each.functions))

    def revoke(self, identity: Identity, token_id: str) -> None:
        """Revoke a token that the caller made; an administrator, any. Repeating it is harmless.

        :raises NotFound: if there is none.
        """
        token = self._stores.tokens.get_token(token_id)
        if token is None or not (identity.owns(token.owner_id) or identity.is_admin):
            raise NotFound(f"You have no token {token_id}.", hint="`farcall tokens ls` lists yours.")
        done = self._entry(identity, "token.revoke", token_id, owner_id=token.owner_id, name=token.name)
        if token.revoked_at is None:
            self._stores.tokens.audited(done).revoke_token(token_id, at=self._now())

    def create_account(self, identity: Identity, name: str) -> ServiceAccount:
        """Create a service account of the caller.

        :raises Conflict: if the caller has one with that name already.
        :raises QuotaExceeded: over the number of accounts.
        """
        account = ServiceAccount(new_id(), identity.identity_id, name, created_at=self._now())
        done = self._entry(identity, "account.create", account.account_id, name=name)
        self._storage.check()
        quota = Quota(Quotable.ACCOUNT, identity.identity_id, self._settings.max_accounts)
        try:
            self._stores.tokens.audited(done, quota=quota).add_account(account)
        except Conflict as error:
            raise Conflict(f"You have a service account {name} already.", hint="Choose another name.") from error
        return account

    def accounts(self, identity: Identity) -> Sequence[ServiceAccount]:
        """Service accounts of the caller, by name."""
        return self._stores.tokens.list_accounts(identity.identity_set)

    def delete_account(self, identity: Identity, account_id: str) -> None:
        """Delete a service account of the caller (an administrator, any) with its tokens and endpoints. Its functions
        stay, for those who have rights to them.

        :raises NotFound: if there is none.
        """
        account = self._account(identity, account_id, by_admin=True)
        done = self._entry(identity, "account.delete", account_id, owner_id=account.owner_id, name=account.name)
        owner = dataclasses.replace(identity, identity_set=identity.identity_set | {account_id})
        for endpoint in self._stores.endpoints.list_endpoints(account_id):
            self._endpoints.delete(owner, endpoint.endpoint_id)
        self._stores.tokens.audited(done).delete_account(account_id)

    def _account(self, identity: Identity, account_id: str, *, by_admin: bool = False) -> ServiceAccount:
        account = self._stores.tokens.get_account(account_id)
        if account is None or not (identity.owns(account.owner_id) or (by_admin and identity.is_admin)):
            raise NotFound(f"You have no service account {account_id}.", hint="`farcall accounts ls` lists yours.")
        return account

    def _read_used(self, token_id: str) -> ApiToken | None:
        """A token that is used now, which is noted once an hour."""
        token = self._stores.tokens.get_token(token_id)
        now = self._now()
        if token is not None and (
            token.last_used_at is None or (now - token.last_used_at).total_seconds() > _USE_NOTED_S
        ):
            with contextlib.suppress(Unavailable):
                self._stores.tokens.note_token_use(token_id, at=now)
        return token


def _person(identity: Identity) -> Identity:
    """The caller, as the credentials of a service account name its creator."""
    return dataclasses.replace(identity, expires_at=None, is_admin=False)


def _lifetime_s(identity: Identity, wanted_s: int | None) -> int:
    """How long a new token of the caller lasts, in seconds.

    :raises InvalidRequest: if that is too long for a caller who is admitted by a group.
    """
    if BY_GROUP not in identity.verified:
        return wanted_s or _EXPIRES_IN_S
    if wanted_s is not None and wanted_s > _MAX_BY_GROUP_S:
        raise InvalidRequest(
            "A group admits you: your tokens last for 30 days at most, because you may leave it.",
            hint="Send a smaller expires_in_s.",
        )
    return wanted_s or _MAX_BY_GROUP_S
