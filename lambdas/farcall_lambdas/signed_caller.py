"""Signature of the caller's identity on its way from the authorizer to the API.

API Gateway passes the authorizer's context to the API's function inside the event. A program that may invoke the
function can write any event; an identity in it counts only with the signature of the authorizer, or of the canary for
its own.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from farcall_common.errors import ConfigurationError, Unauthenticated, Unavailable
from farcall_lambdas.aws_secret import secret_field

#: The identity of the canary. No provider issues it.
CANARY_ID: Final = "fa2ca11c-0000-4000-8000-ca0a2700ca0a"
_SIGNATURE: Final = "signature"
_MIN_KEY_CHARACTERS: Final = 32
#: Retry-After for a context that is not signed, in seconds.
_RETRY_S: Final = 30.0
#: What API Gateway adds.
_ADDED: Final = frozenset({"principalId", "integrationLatency"})


class CallerKey:
    """A key that signs contexts with HMAC-SHA256; ``read`` returns it."""

    def __init__(self, read: Callable[[], str]) -> None:
        self._read = read

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> CallerKey:
        """The key in the field ``key`` of the secret FARCALL_CALLER_SECRET_ARN, or the text FARCALL_CALLER_KEY.

        :raises ConfigurationError: if neither is set.
        """
        if arn := environ.get("FARCALL_CALLER_SECRET_ARN"):
            return cls(secret_field(arn, "key"))
        if key := environ.get("FARCALL_CALLER_KEY"):
            return cls(lambda: key)
        raise ConfigurationError("FARCALL_CALLER_SECRET_ARN or FARCALL_CALLER_KEY is not set.")

    def derived(self, purpose: str) -> CallerKey:
        """A key for another purpose: what one of them signs, the other one refuses."""
        return CallerKey(lambda: hmac.digest(self._checked().encode(), purpose.encode(), "sha256").hex())

    def sign(self, context: Mapping[str, str]) -> dict[str, str]:
        """The context with its signature.

        :raises Unavailable: if the key cannot be read.
        """
        return {**context, _SIGNATURE: self._signature(context)}

    def has_signed(self, context: Mapping[str, Any]) -> bool:
        """Whether the context is as it was signed with this key.

        :raises Unavailable: if the key cannot be read.
        """
        found = context.get(_SIGNATURE)
        signed = {name: value for name, value in context.items() if name != _SIGNATURE and name not in _ADDED}
        return isinstance(found, str) and hmac.compare_digest(_bytes(found), self._signature(signed).encode())

    def _signature(self, context: Mapping[str, Any]) -> str:
        return hmac.digest(self._checked().encode(), json.dumps(dict(context), sort_keys=True).encode(), "sha256").hex()

    def _checked(self) -> str:
        key = self._read()
        if len(key) < _MIN_KEY_CHARACTERS:
            raise ConfigurationError(f"The key that signs callers has less than {_MIN_KEY_CHARACTERS} characters.")
        return key


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


class CallerKeys:
    """The keys whose signatures the API accepts: ``authorizer`` for any identity, ``canary`` for the canary's."""

    def __init__(self, authorizer: CallerKey, canary: CallerKey | None = None) -> None:
        self._authorizer = authorizer
        self._canary = canary

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> CallerKeys:
        """The authorizer's key, and if there is a canary, its own, in the secret FARCALL_CANARY_SECRET_ARN.

        :raises ConfigurationError: without the authorizer's key.
        """
        arn = environ.get("FARCALL_CANARY_SECRET_ARN")
        return cls(CallerKey.from_environment(environ), CallerKey(secret_field(arn, "key")) if arn else None)

    def require(self, context: Mapping[str, Any] | None) -> None:
        """:raises Unauthenticated: for a wrong signature.
        :raises Unavailable: without one, as API Gateway keeps contexts for minutes that a release made which did not
            sign; or if a key cannot be read.
        """
        if not context:
            return  # it has no identity
        if self._canary and context.get("identity_id") == CANARY_ID and self._canary.has_signed(context):
            return
        if _SIGNATURE not in context:
            raise Unavailable("The request's identity is not signed.", retry_after_s=_RETRY_S)
        if not self._authorizer.has_signed(context):
            raise Unauthenticated("The request's identity is not signed by the authorizer.")
