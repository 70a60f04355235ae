"""Identity providers: ``dev`` (tokens from the settings) and ``globus`` (Globus Auth introspection), and the choice of
one by the settings."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Mapping

import globus_sdk

from farcall_common.errors import ConfigurationError, Unauthenticated, Unavailable
from farcall_lambdas.auth.cache import CachedProvider
from farcall_lambdas.auth.oidc import OidcProvider
from farcall_lambdas.identity import Identity, IdentityProvider
from farcall_lambdas.settings import AuthSettings


class DevProvider:
    """Accepts configured tokens. For tests and for local deployments."""

    def __init__(self, identities: Mapping[str, Identity]) -> None:
        # A lookup by digest: its time reveals nothing about the token.
        self._identities = {_digest(token): identity for token, identity in identities.items()}

    def authenticate(self, token: str) -> Identity:
        identity = self._identities.get(_digest(token))
        if identity is None:
            raise Unauthenticated("The token is not accepted.")
        return identity


class GlobusProvider:
    """Introspects tokens with Globus Auth, by the client that ``client`` returns.

    The token must be active, meant for this service (its client id is in ``aud``), carry the service's scope and not
    have expired. An answer other than a decision (an error, no network) is :class:`Unavailable`, never a refusal.
    """

    def __init__(
        self,
        client: Callable[[], globus_sdk.ConfidentialAppAuthClient],
        *,
        client_id: str,
        scope: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._client_id = client_id
        self._scope = scope
        self._clock = clock

    def authenticate(self, token: str) -> Identity:
        try:
            answer = self._client().oauth2_token_introspect(token, include="identity_set").data
        except globus_sdk.GlobusError as error:
            raise Unavailable("Globus Auth is unavailable.", retry_after_s=5.0) from error
        if not answer.get("active"):
            raise Unauthenticated("The token is not active: log in again.")
        if self._client_id not in answer.get("aud", ()):
            raise Unauthenticated("The token is meant for another service.")
        if self._scope not in answer.get("scope", "").split():
            raise Unauthenticated(f"The token lacks the scope {self._scope}.")
        expires_at = float(answer.get("exp", 0))
        if expires_at <= self._clock():
            raise Unauthenticated("The token has expired: log in again.")
        return Identity(
            identity_id=str(answer["sub"]),
            username=str(answer.get("username", "")),
            identity_set=frozenset(map(str, answer.get("identity_set") or ())),
            expires_at=expires_at,
            provider="globus",
        )


def provider_from_settings(
    settings: AuthSettings, *, clock: Callable[[], float] = time.time, secret_max_age_s: int = 300
) -> IdentityProvider:
    """The provider that the settings name, with a cache in front of it where a call is expensive. A secret from Secrets
    Manager is read again when it is ``secret_max_age_s`` old."""
    if settings.provider == "dev":
        return DevProvider(settings.dev_identities)
    if settings.provider == "oidc":
        return OidcProvider(settings.oidc_issuer, audience=settings.oidc_audience)
    globus = GlobusProvider(
        _globus_client(settings, secret_max_age_s),
        client_id=settings.globus_client_id,
        scope=settings.globus_scope,
        clock=clock,
    )
    return CachedProvider(globus, clock=clock)


def _globus_client(settings: AuthSettings, secret_max_age_s: int) -> Callable[[], globus_sdk.ConfidentialAppAuthClient]:
    """Makes the client, and makes another one when the secret has changed in Secrets Manager."""
    client = functools.lru_cache(maxsize=1)(
        functools.partial(globus_sdk.ConfidentialAppAuthClient, settings.globus_client_id)
    )
    if not settings.globus_secret_arn:
        return lambda: client(settings.globus_client_secret)
    # Imported here because only this case needs boto3, which is slow to import. The stores' own reader of secrets would
    # import their drivers, too.
    from aws_lambda_powertools.utilities.parameters import SecretsProvider
    from aws_lambda_powertools.utilities.parameters.exceptions import GetParameterError, TransformParameterError
    from botocore.config import Config

    secrets = SecretsProvider(boto_config=Config(connect_timeout=2, read_timeout=3, retries={"total_max_attempts": 2}))

    def current() -> globus_sdk.ConfidentialAppAuthClient:
        arn = settings.globus_secret_arn
        try:
            secret = secrets.get(arn, max_age=secret_max_age_s, transform="json")
        except (GetParameterError, TransformParameterError) as error:
            raise Unavailable(f"the secret {arn} cannot be read: {type(error.__cause__ or error).__name__}") from error
        if not isinstance(secret, dict) or not secret.get("client_secret"):
            raise ConfigurationError(f"the secret {arn} has no client_secret")
        return client(str(secret["client_secret"]))

    return current


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()
