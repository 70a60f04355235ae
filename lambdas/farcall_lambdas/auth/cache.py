"""Authentication cache: decisions about tokens, so that most requests need no call to the provider."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import threading
from collections.abc import Callable

from farcall_common.errors import ErrorRecord, Unauthenticated, UserNotAllowed, error_from_record
from farcall_lambdas.identity import Identity, IdentityProvider


@dataclasses.dataclass(frozen=True)
class _Decision:
    """An identity, or the record of a refusal."""

    outcome: Identity | ErrorRecord
    good_until: float


class CachedProvider:
    """An LRU of decisions in front of another provider.

    A token that was accepted is accepted for ``ttl_s`` (or until it expires, if that is sooner): for this time a
    revoked token still works. A refusal is kept for ``refusal_ttl_s``, apart from the others: a flood of refused tokens
    does not displace those that are accepted. ``size`` bounds the number of each.

    Outages are never kept: a decision that is cached is served until it is too old, after that the provider's
    ``Unavailable`` reaches the caller. Tokens are kept as SHA-256 only.
    """

    def __init__(
        self,
        provider: IdentityProvider,
        *,
        clock: Callable[[], float],
        ttl_s: float = 300.0,
        refusal_ttl_s: float = 10.0,
        size: int = 4096,
    ) -> None:
        self._provider = provider
        self._clock = clock
        self._ttl_s = ttl_s
        self._refusal_ttl_s = refusal_ttl_s
        self._size = size
        self._accepted: collections.OrderedDict[bytes, _Decision] = collections.OrderedDict()
        self._refused: collections.OrderedDict[bytes, _Decision] = collections.OrderedDict()
        self._lock = threading.Lock()

    def authenticate(self, token: str) -> Identity:
        key = hashlib.sha256(token.encode(errors="surrogatepass")).digest()
        decision = self._read(key)
        if decision is None:
            decision = self._decide(token)
            self._keep(key, decision)
        if isinstance(decision.outcome, ErrorRecord):
            raise error_from_record(decision.outcome)
        return decision.outcome

    def _decide(self, token: str) -> _Decision:
        try:
            identity = self._provider.authenticate(token)
        except (Unauthenticated, UserNotAllowed) as refusal:
            return _Decision(refusal.record, self._clock() + self._refusal_ttl_s)
        good_until = self._clock() + self._ttl_s
        if identity.expires_at is not None:
            good_until = min(good_until, identity.expires_at)
        return _Decision(identity, good_until)

    def _read(self, key: bytes) -> _Decision | None:
        with self._lock:
            for decisions in (self._accepted, self._refused):
                decision = decisions.get(key)
                if decision is not None and decision.good_until > self._clock():
                    decisions.move_to_end(key)
                    return decision
            return None

    def _keep(self, key: bytes, decision: _Decision) -> None:
        is_refusal = isinstance(decision.outcome, ErrorRecord)
        with self._lock:
            decisions, others = (self._refused, self._accepted) if is_refusal else (self._accepted, self._refused)
            others.pop(key, None)
            decisions[key] = decision
            decisions.move_to_end(key)
            while len(decisions) > self._size:
                decisions.popitem(last=False)
