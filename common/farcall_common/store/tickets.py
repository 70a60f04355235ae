"""Tickets: issued by ``connect`` and ``stream``, and verified by forwarders without a call to the API.

A ticket is a JWT signed with HMAC-SHA-256 under a key that the API and the forwarders share. It admits a CURVE key for
an endpoint (``agent``) or for an owner (``client``) until it expires.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Final

import jwt

from farcall_common.errors import ConfigurationError, Unauthenticated
from farcall_common.store.model import PeerKey, PeerKind

_ALGORITHM: Final = "HS256"
_MIN_KEY_BYTES: Final = 32
_CLAIMS: Final = ("kind", "sub", "key", "exp")


@dataclasses.dataclass(frozen=True)
class Ticket:
    """A ticket's content. ``expires_at`` is in epoch seconds."""

    peer: PeerKey
    expires_at: float


class Tickets:
    """Issues and verifies tickets.

    :param key: the shared secret, at least 32 bytes; or a function that returns it, for one that may be replaced.
    :raises ConfigurationError: for a shorter one.
    """

    def __init__(self, key: str | Callable[[], str]) -> None:
        self._source: Callable[[], str] = functools.partial(str, key) if isinstance(key, str) else key
        self._key  # noqa: B018 - checked now

    @property
    def _key(self) -> str:
        key = self._source()
        if len(key.encode()) < _MIN_KEY_BYTES:
            raise ConfigurationError(f"the ticket key is shorter than {_MIN_KEY_BYTES} bytes")
        return key

    def issue(self, peer: PeerKey, *, expires_at: float) -> str:
        """A ticket for a peer, good until ``expires_at`` (epoch seconds)."""
        claims = {"kind": str(peer.kind), "sub": peer.subject, "key": peer.public_key, "exp": int(expires_at)}
        return jwt.encode(claims, self._key, algorithm=_ALGORITHM)

    def verify(self, ticket: str, *, now: float) -> Ticket:
        """The ticket's content.

        :raises Unauthenticated: when its signature is wrong, it is damaged, or it has expired.
        """
        try:
            # The library would use the machine's clock; ours is `now`.
            claims = jwt.decode(
                ticket,
                self._key,
                algorithms=[_ALGORITHM],
                options={"require": list(_CLAIMS), "verify_exp": False, "verify_iat": False},
            )
            peer = PeerKey(str(claims["key"]), PeerKind(claims["kind"]), str(claims["sub"]))
            expires_at = float(claims["exp"])
        except (jwt.InvalidTokenError, ValueError, TypeError) as error:
            raise Unauthenticated("the ticket is not valid", hint="Request a new one from the API.") from error
        if now >= expires_at:
            raise Unauthenticated(
                f"the ticket expired {now - expires_at:.0f} s ago", hint="Request a new one from the API."
            )
        return Ticket(peer, expires_at)
