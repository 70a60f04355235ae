"""OpenID Connect provider: verifies JWTs of any issuer with the keys that the issuer publishes."""

from __future__ import annotations

import functools
import threading
import uuid
from collections.abc import Mapping, Set
from typing import Any, Final

import jwt
import requests

from farcall_common.addresses import is_safe_address
from farcall_common.errors import Unauthenticated, Unavailable
from farcall_lambdas.allowed_users import AllowedUsers
from farcall_lambdas.identity import Identity

#: Signatures with a public key only: everyone can verify them, only the issuer can make them.
_ALGORITHMS: Final = ("RS256", "ES256")
_REQUIRED: Final = ("exp", "iss", "sub")
#: The client that a token was issued to: OpenID Connect and Entra, RFC 9068, Okta.
_CLIENT_CLAIMS: Final = ("azp", "client_id", "cid")
#: RFC 9068; Okta and Entra.
_SCOPE_CLAIMS: Final = ("scope", "scp")
#: Among the clients: any.
ANY_CLIENT: Final = "*"
_GOOGLE: Final = "https://accounts.google.com"
_LEEWAY_S: Final = 30.0
_TIMEOUT_S: Final = 5.0
_RETRY_S: Final = 5.0


class OidcProvider:
    """Accepts access or id tokens of one issuer.

    A token must be signed by one of the issuer's keys (RS256 or ES256), be meant for ``audience``, and be valid now,
    give or take half a minute. It must have been issued to one of ``clients`` (unless that has ``*``), and carry
    ``scope``: each if it is given. Its user must be among ``allowed``; ``groups_claim`` has the user's groups. An
    access token of Amazon Cognito (claim ``token_use``) may have no audience: then ``audience`` is the client that it
    was issued to.

    The keys are looked up by the issuer's discovery document, fetched again every five minutes, and for a key id that
    is not known; that at most once in ``cooldown_s`` seconds, however many such tokens come.
    """

    def __init__(
        self,
        issuer: str,
        *,
        audience: str,
        allowed: AllowedUsers,
        clients: Set[str] = frozenset(),
        scope: str = "",
        groups_claim: str = "groups",
        cooldown_s: float = 10.0,
    ) -> None:
        self._issuer = issuer
        self._audience = audience
        self._allowed = allowed
        self._clients = clients
        self._scope = scope
        self._groups_claim = groups_claim
        self._cooldown_s = cooldown_s
        self._lock = threading.Lock()
        self._keys: jwt.PyJWKClient | None = None

    def authenticate(self, token: str) -> Identity:
        try:
            claims = self._claims(token)
        except jwt.ExpiredSignatureError as error:
            raise Unauthenticated("The token has expired.", hint="Log in again: `farcall login`.") from error
        except jwt.InvalidAudienceError as error:
            raise Unauthenticated("The token is meant for another service.") from error
        except jwt.PyJWKClientConnectionError as error:
            raise Unavailable("The issuer's keys cannot be fetched at the moment.", retry_after_s=_RETRY_S) from error
        except (jwt.PyJWTError, ValueError) as error:  # ValueError: text that is not even ASCII
            raise Unauthenticated("The token is not accepted.") from error
        self._require_client(claims)
        subject = str(claims["sub"])
        names = (claims.get(claim) for claim in ("preferred_username", "email", "username"))
        identity = Identity(
            identity_id=identity_id_of(self._issuer, subject),
            username=next((name for name in names if isinstance(name, str) and name), subject),
            expires_at=float(claims["exp"]),
            provider="oidc",
        )
        hosted = claims.get("hd")
        return self._allowed.require(
            identity,
            names=verified_names(self._issuer, claims),
            domains=[hosted] if isinstance(hosted, str) and hosted else [],
            groups=lambda: _texts(claims.get(self._groups_claim)),
        )

    def _require_client(self, claims: Mapping[str, Any]) -> None:
        """:raises Unauthenticated: for a token of another client, or without the scope. An issuer makes tokens for
        several programs, which may share the audience."""
        if self._clients and ANY_CLIENT not in self._clients:
            found = {claims[claim] for claim in _CLIENT_CLAIMS if isinstance(claims.get(claim), str)}
            if not found or not found <= self._clients:
                raise Unauthenticated("The token was issued to another program.")
        if self._scope:
            carried = {part for claim in _SCOPE_CLAIMS for text in _texts(claims.get(claim)) for part in text.split()}
            if self._scope not in carried:
                raise Unauthenticated(f"The token lacks the scope {self._scope}.")

    def _claims(self, token: str) -> dict[str, Any]:
        key = self._key_client().get_signing_key_from_jwt(token)
        if key.algorithm_name not in _ALGORITHMS:
            raise jwt.InvalidAlgorithmError(f"keys for {key.algorithm_name} are not for signing tokens")
        decode = functools.partial(
            jwt.decode, token, key, algorithms=list(_ALGORITHMS), issuer=self._issuer, leeway=_LEEWAY_S
        )
        try:
            return decode(audience=self._audience, options={"require": [*_REQUIRED, "aud"]})
        except jwt.MissingRequiredClaimError as error:
            if error.claim != "aud":
                raise
        claims = decode(options={"require": list(_REQUIRED)})
        if claims.get("token_use") != "access" or claims.get("client_id") != self._audience:
            raise jwt.InvalidAudienceError("The token names no audience.")
        return claims

    def _key_client(self) -> jwt.PyJWKClient:
        with self._lock:
            if self._keys is None:
                self._keys = jwt.PyJWKClient(
                    self._keys_address(), timeout=_TIMEOUT_S, cooldown_duration=self._cooldown_s
                )
            return self._keys

    def _keys_address(self) -> str:
        """Read the address of the issuer's keys from its own document (OpenID Connect Discovery 1.0, section 4)."""
        try:
            # Redirects are not followed, as PyJWKClient does not: they could lead to an address that is not secure.
            answer = requests.get(
                f"{self._issuer.rstrip('/')}/.well-known/openid-configuration",
                timeout=_TIMEOUT_S,
                allow_redirects=False,
            )
            answer.raise_for_status()
            if answer.is_redirect:
                raise Unavailable("The issuer redirects to another address, which is not followed.")
            document = answer.json()
            name, keys = document["issuer"], str(document["jwks_uri"])
        except (requests.RequestException, ValueError, KeyError, TypeError) as error:
            raise Unavailable("The issuer is unavailable.", retry_after_s=_RETRY_S) from error
        if name != self._issuer:
            raise Unavailable("The issuer's name differs from the configured one.")
        if not is_safe_address(keys):
            raise Unavailable("The issuer's keys are at an insecure address: it must be https.")
        return keys


def verified_names(issuer: str, claims: Mapping[str, Any]) -> list[str]:
    """The names in a token that its issuer has verified: the e-mail address, if the token says so.

    Never ``preferred_username``, which users of some issuers choose. Google also verifies addresses of others' domains
    (a private account under an address at work, which outlives the job), and vouches only for its own and for those of
    an organisation's account (claim ``hd``).
    """
    email = claims.get("email")
    if not isinstance(email, str) or claims.get("email_verified") not in (True, "true"):
        return []
    if issuer == _GOOGLE and not (claims.get("hd") or email.lower().endswith("@gmail.com")):
        return []
    return [email]


def _texts(value: object) -> list[str]:
    """A claim that is a text or a list of texts, as a list."""
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]


def identity_id_of(issuer: str, subject: str) -> str:
    """The identity of a subject of an issuer: always the same, and of no other subject or issuer."""
    return str(uuid.uuid5(uuid.uuid5(uuid.NAMESPACE_URL, issuer), subject))
