"""Identity providers: ``dev`` (tokens from the settings) and ``globus`` (Globus Auth introspection), and the choice of
one by the settings."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Final

import globus_sdk
from globus_sdk.transport import RequestsTransport, RetryConfig

from farcall_common.errors import Unauthenticated, Unavailable
from farcall_lambdas.allowed_users import AllowedUsers
from farcall_lambdas.auth.cache import CachedProvider
from farcall_lambdas.auth.oidc import OidcProvider
from farcall_lambdas.aws_secret import MAX_AGE_S, secret_field
from farcall_lambdas.identity import Identity, IdentityProvider
from farcall_lambdas.settings import AuthSettings

#: Seconds. An authorizer that waits for longer is ended, and keeps others from being run meanwhile.
_TIMEOUT_S: Final = 4.0
_RETRY_S: Final = 5.0
#: How long Globus is not asked after it has limited us, if it does not say so, and at most.
_PAUSE_S: Final = 10.0
_MAX_PAUSE_S: Final = 60.0
#: The caller tries again.
_ONE_ATTEMPT: Final = RetryConfig(max_retries=0)


def _transport() -> RequestsTransport:
    return RequestsTransport(http_timeout=_TIMEOUT_S)


class DevProvider:
    """Accepts configured tokens. For tests and for local deployments."""

    def __init__(self, identities: Mapping[str, Identity], *, allowed: AllowedUsers) -> None:
        self._allowed = allowed
        # A lookup by digest: its time reveals nothing about the token.
        self._identities = {_digest(token): identity for token, identity in identities.items()}

    def authenticate(self, token: str) -> Identity:
        identity = self._identities.get(_digest(token))
        if identity is None:
            raise Unauthenticated("The token is not accepted.")
        return self._allowed.require(identity, names=[identity.username])


class GlobusProvider:
    """Introspects tokens with Globus Auth, by the client that ``client`` returns.

    The token must be active, meant for this service (its client id is in ``aud``), carry the service's scope and not
    have expired, and its user must be among ``allowed``. Globus Auth verifies user names; if groups are allowed,
    Globus Groups is asked for the user's groups, with a token that depends on this one. An answer other than a decision
    (an error, no network) is :class:`Unavailable`, never a refusal.
    """

    def __init__(
        self,
        client: Callable[[], globus_sdk.ConfidentialAppAuthClient],
        *,
        client_id: str,
        scope: str,
        allowed: AllowedUsers,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._allowed = allowed
        self._client_id = client_id
        self._scope = scope
        self._clock = clock
        self._limited_until = 0.0

    def authenticate(self, token: str) -> Identity:
        if (wait_s := self._limited_until - self._clock()) > 0:
            raise Unavailable("Globus limits the requests of this service.", retry_after_s=wait_s)
        try:
            answer = self._client().oauth2_token_introspect(token, include="identity_set").data
        except globus_sdk.GlobusError as error:
            raise self._outage(error) from error
        if not answer.get("active"):
            raise Unauthenticated("The token is not active: log in again.")
        if self._client_id not in answer.get("aud", ()):
            raise Unauthenticated("The token is meant for another service.")
        if self._scope not in answer.get("scope", "").split():
            raise Unauthenticated(f"The token lacks the scope {self._scope}.")
        expires_at = float(answer.get("exp", 0))
        if expires_at <= self._clock():
            raise Unauthenticated("The token has expired: log in again.")
        username = str(answer.get("username") or "")
        identity = Identity(
            identity_id=str(answer["sub"]),
            username=username,
            identity_set=frozenset(map(str, answer.get("identity_set") or ())),
            expires_at=expires_at,
            provider="globus",
        )
        return self._allowed.require(identity, names=[username], groups=lambda: self._groups(token))

    def _groups(self, token: str) -> list[str]:
        """The ids of the groups in which the token's user is an active member.

        :raises Unauthenticated: if the user has not consented to that.
        :raises Unavailable: if Globus does not answer, or the service's scope does not depend on that of Globus Groups.
        """
        try:
            answer = self._client().oauth2_get_dependent_tokens(token)
        except globus_sdk.AuthAPIError as error:
            if error.http_status in (400, 403):
                raise Unauthenticated("The token does not permit to read your groups: log in again.") from error
            raise self._outage(error) from error
        except globus_sdk.GlobusError as error:
            raise self._outage(error) from error
        try:
            dependent = answer.by_resource_server.get(globus_sdk.GroupsClient.resource_server)
            if dependent is None:
                raise Unavailable("The deployment's scope in Globus Auth does not include Globus Groups.")
            authorizer = globus_sdk.AccessTokenAuthorizer(dependent["access_token"])
            client = globus_sdk.GroupsClient(authorizer=authorizer, transport=_transport(), retry_config=_ONE_ATTEMPT)
            found = list(client.get_my_groups())
        except globus_sdk.GlobusError as error:
            raise self._outage(error) from error
        return [
            str(group["id"])
            for group in found
            if any(membership.get("status") == "active" for membership in group.get("my_memberships", ()))
        ]

    def _outage(self, error: globus_sdk.GlobusError) -> Unavailable:
        """Convert an error for the caller. After a 429, pause requests to Globus for its ``Retry-After`` seconds."""
        retry_after_s = _RETRY_S
        if isinstance(error, globus_sdk.GlobusAPIError) and error.http_status == 429:
            wanted = str(error.headers.get("Retry-After", ""))
            retry_after_s = min(float(wanted), _MAX_PAUSE_S) if wanted.isdecimal() else _PAUSE_S
            self._limited_until = self._clock() + retry_after_s
        return Unavailable("Globus is unavailable.", retry_after_s=retry_after_s)


def provider_from_settings(
    settings: AuthSettings, *, clock: Callable[[], float] = time.time, secret_max_age_s: int = MAX_AGE_S
) -> IdentityProvider:
    """The provider that the settings name, with a cache in front of it where a call is expensive. A secret from Secrets
    Manager is read again when it is ``secret_max_age_s`` old."""
    if settings.provider == "dev":
        return DevProvider(settings.dev_identities, allowed=settings.allowed)
    if settings.provider == "oidc":
        return OidcProvider(
            settings.oidc_issuer,
            audience=settings.oidc_audience,
            allowed=settings.allowed,
            clients=settings.oidc_clients,
            scope=settings.oidc_scope,
            groups_claim=settings.oidc_groups_claim,
        )
    globus = GlobusProvider(
        _globus_client(settings, secret_max_age_s),
        client_id=settings.globus_client_id,
        scope=settings.globus_scope,
        allowed=settings.allowed,
        clock=clock,
    )
    return CachedProvider(globus, clock=clock)


def _globus_client(settings: AuthSettings, secret_max_age_s: int) -> Callable[[], globus_sdk.ConfidentialAppAuthClient]:
    """Makes the client, and makes another one when the secret has changed in Secrets Manager."""
    client = functools.lru_cache(maxsize=1)(
        functools.partial(
            globus_sdk.ConfidentialAppAuthClient,
            settings.globus_client_id,
            transport=_transport(),
            retry_config=_ONE_ATTEMPT,
        )
    )
    if not settings.globus_secret_arn:
        return lambda: client(settings.globus_client_secret)
    secret = secret_field(settings.globus_secret_arn, "client_secret", max_age_s=secret_max_age_s)
    return lambda: client(secret())


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()
