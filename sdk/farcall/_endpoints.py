"""Endpoint cache: what the API says about endpoints, requested once every few minutes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from farcall._api import Api
from farcall_common.errors import FarcallError, Forbidden, NotFound
from farcall_common.forks import fork_safe_lock

#: How long an answer is cached, and how long no request is made after one that failed.
_CACHED_S: Final = 300.0
_RETRY_AFTER_S: Final = 30.0


@dataclasses.dataclass(frozen=True)
class EndpointRuntime:
    """Runtime that an endpoint reported when it connected. ``python`` is a version like "3.12", empty if unknown.
    ``strategies`` are None if unknown."""

    python: str = ""
    strategies: frozenset[str] | None = None


@dataclasses.dataclass(frozen=True)
class _Known:
    """``owned``: whether the API says that the endpoint is the caller's; None if it did not answer. ``sealing``: its
    public key for sealed calls, as the API reports it; ``shown``: whether the API has ever reported the endpoint."""

    until: float = 0.0
    runtime: EndpointRuntime = EndpointRuntime()
    owned: bool | None = None
    sealing: Mapping[str, Any] | None = None
    shown: bool = False


class EndpointCache:
    """Facts about endpoints. May be used from any thread."""

    def __init__(self, api: Api, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._lock = fork_safe_lock()
        self._known: dict[str, _Known] = {}

    def runtime(self, endpoint_id: str) -> EndpointRuntime:
        """The runtime of an endpoint, as far as known: a failed request is not repeated here."""
        known = self._get(endpoint_id)
        if self._clock() >= known.until:
            try:
                known = self._request(endpoint_id, retry_timeout_s=0)
            except FarcallError:  # nothing is known; the submit reports the error
                known = self._put(endpoint_id, known, valid_s=_RETRY_AFTER_S)
        return known.runtime

    def sealing(self, endpoint_id: str) -> Mapping[str, Any] | None:
        """The public key for sealed calls that the API reports for an endpoint; None if it has none.

        :raises FarcallError: if nothing is known, and the API does not answer.
        """
        known = self._get(endpoint_id)
        if not known.shown or self._clock() >= known.until:
            try:
                known = self._request(endpoint_id)
            except FarcallError:
                if known.sealing is None:
                    raise
        return known.sealing

    def opens_no_seals(self, endpoint_id: str) -> bool:
        """Whether an endpoint has no key for sealed calls, by an answer of the last minutes. Makes no request."""
        known = self._get(endpoint_id)
        return known.shown and known.sealing is None and self._clock() < known.until

    def owned(self, endpoint_id: str) -> bool | None:
        """Whether an endpoint is the caller's; None if that is not known without a request."""
        known = self._get(endpoint_id)
        # The owner of an endpoint does not change; that of one which could not be seen may become known.
        return known.owned if known.owned or self._clock() < known.until else None

    def is_own(self, endpoint_id: str) -> bool:
        """Whether the API says that an endpoint is the caller's. An endpoint that the caller cannot see is not.

        :raises FarcallError: if the API does not answer.
        """
        owned = self.owned(endpoint_id)
        if owned is None:
            try:
                owned = bool(self._request(endpoint_id).owned)
            except (Forbidden, NotFound):
                owned = False
                self._put(endpoint_id, _Known(owned=owned), valid_s=_CACHED_S)
        return owned

    def _request(self, endpoint_id: str, *, retry_timeout_s: float | None = None) -> _Known:
        answer = self._api.get_endpoint(endpoint_id, retry_timeout_s=retry_timeout_s)
        sealing = found if isinstance(found := answer.get("sealing"), dict) else None
        known = _Known(runtime=_runtime_of(answer), owned=answer.get("owned") is True, sealing=sealing, shown=True)
        return self._put(endpoint_id, known, valid_s=_CACHED_S)

    def _get(self, endpoint_id: str) -> _Known:
        with self._lock:
            return self._known.get(endpoint_id, _Known())

    def _put(self, endpoint_id: str, known: _Known, *, valid_s: float) -> _Known:
        known = dataclasses.replace(known, until=self._clock() + valid_s)
        with self._lock:
            self._known[endpoint_id] = known
        return known


def _runtime_of(endpoint: Mapping[str, Any]) -> EndpointRuntime:
    reported: Mapping[str, Any] = endpoint.get("runtime") or {}
    strategies = reported.get("serializers")
    version = ".".join(str(reported.get("python_version") or "").split(".")[:2])
    return EndpointRuntime(version, frozenset(strategies) if strategies else None)
