"""OpenID Connect provider: verifies JWTs of any issuer with the keys that the issuer publishes."""

from __future__ import annotations

import threading
import uuid
from typing import Any, Final

import jwt
import requests

from farcall_common.errors import Unauthenticated, Unavailable
from farcall_lambdas.identity import Identity
from farcall_lambdas.settings import is_safe_address

#: Signatures with a public key only: everyone can verify them, only the issuer can make them.
_ALGORITHMS: Final = ("RS256", "ES256")
_REQUIRED: Final = ("exp", "iss", "aud", "sub")
_LEEWAY_S: Final = 30.0
_TIMEOUT_S: Final = 5.0
_RETRY_S: Final = 5.0


class OidcProvider:
    """Accepts access or id tokens of one issuer.

    A token must be signed by one of the issuer's keys (RS256 or ES256), be meant for ``audience``, and be valid now,
    give or take half a minute. The keys are looked up by the issuer's discovery document, fetched again every five
    minutes, and for a key id that is not known; that at most once in ``cooldown_s`` seconds, however many such tokens
    come.
    """

    def __init__(self, issuer: str, *, audience: str, cooldown_s: float = 10.0) -> None:
        self._issuer = issuer
        self._audience = audience
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
        subject = str(claims["sub"])
        names = (claims.get(claim) for claim in ("preferred_username", "email"))
        return Identity(
            identity_id=identity_id_of(self._issuer, subject),
            username=next((name for name in names if isinstance(name, str) and name), subject),
            expires_at=float(claims["exp"]),
            provider="oidc",
        )

    def _claims(self, token: str) -> dict[str, Any]:
        key = self._key_client().get_signing_key_from_jwt(token)
        if key.algorithm_name not in _ALGORITHMS:
            raise jwt.InvalidAlgorithmError(f"keys for {key.algorithm_name} are not for signing tokens")
        return jwt.decode(
            token,
            key,
            algorithms=list(_ALGORITHMS),
            issuer=self._issuer,
            audience=self._audience,
            leeway=_LEEWAY_S,
            options={"require": list(_REQUIRED)},
        )

    def _key_client(self) -> jwt.PyJWKClient:
        with self._lock:
            if self._keys is None:
                self._keys = jwt.PyJWKClient(
                    self._keys_address(), timeout=_TIMEOUT_S, cooldown_duration=self._cooldown_s
                )
            return self._keys

    def _keys_address(self) -> str:
        """Where the issuer's keys are, by its own document (OpenID Connect Discovery 1.0, section 4)."""
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


def identity_id_of(issuer: str, subject: str) -> str:
    """The identity of a subject of an issuer: always the same, and of no other subject or issuer."""
    return str(uuid.uuid5(uuid.uuid5(uuid.NAMESPACE_URL, issuer), subject))
