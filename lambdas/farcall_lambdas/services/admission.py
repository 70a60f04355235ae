"""Who gets in: the first thing that is looked at, before anything of a request is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from farcall_common.errors import Unauthenticated
from farcall_lambdas.identity import Identity
from farcall_lambdas.services.limits import RateLimit

#: How far the clocks of issuers may be behind ours, in seconds.
_LEEWAY_S: Final = 30.0


class Admission:
    """Lets callers in whose token is still good, as often as they may come. Requests that will turn out to be wrong
    count like others: reading them is work, too."""

    def __init__(self, rate_limit: RateLimit, *, clock: Callable[[], float]) -> None:
        self._rate_limit = rate_limit
        self._clock = clock

    def admit(self, context: Mapping[str, Any] | None, *, source_ip: str = "") -> Identity:
        """The caller, by what the authorizer said. API Gateway keeps that for minutes, a token may end before.

        :raises Unauthenticated: if no authorizer has run, or the token has ended since.
        :raises RateLimited: if the request is one too many.
        """
        identity = Identity.from_context(context, source_ip=source_ip)
        if identity.expires_at is not None and self._clock() > identity.expires_at + _LEEWAY_S:
            raise Unauthenticated("The token has ended.", hint="Log in again: `farcall login`.")
        self.count(identity)
        return identity

    def count(self, identity: Identity) -> None:
        """Count one more request, such as a part of one that is as much work as a whole one.

        :raises RateLimited: if it is one too many.
        """
        self._rate_limit.spend(identity)
