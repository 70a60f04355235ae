"""Exchange cache: the Valkey of ElastiCache Serverless through which analytics passes rows, while it is used.

It is created on request, within the limits of the deployment, and deleted when it has had no traffic for a while. A
job that still needed its blocks makes them once more, in its other storage.

``FARCALL_CACHE_IDLE_S`` is how many seconds without traffic it is kept.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
from collections.abc import Mapping
from typing import Final, Protocol

from farcall_common.errors import ConfigurationError

#: A cache with more than this holds blocks: a job may be computing between two stages.
_EMPTY_BYTES: Final = 10_000_000
#: So many times as long is a cache that holds blocks kept.
_HOLDING_FACTOR: Final = 4


@dataclasses.dataclass(frozen=True)
class Cache:
    """A cache. ``status`` is ElastiCache's word for it, ``address`` empty until it is available."""

    status: str
    created_at: dt.datetime
    address: str = ""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Traffic of a cache in a period: the processing units that it used, and the most bytes that it held."""

    processing_units: float
    bytes_held: float


class Caches(Protocol):
    """The one cache of a deployment."""

    def find(self) -> Cache | None:
        """The cache, if there is one.

        :raises Unavailable: if ElastiCache does not answer.
        """

    def create(self) -> None:
        """Create the cache; no error if it is there by now.

        :raises Unavailable: if it cannot be created now.
        """

    def delete(self) -> None:
        """Delete the cache; no error if it is gone or being deleted.

        :raises Unavailable: if it cannot be deleted now.
        """


class Measurements(Protocol):
    """Measurements of the cache by CloudWatch."""

    def traffic(self, since: dt.datetime, until: dt.datetime) -> Traffic | None:
        """Return the traffic in a period; None if CloudWatch has no measurements.

        :raises Unavailable: if CloudWatch does not answer.
        """


class Decision(enum.StrEnum):
    """Outcome of a scheduled run, with its reason."""

    NONE = "there is no cache"
    CHANGING = "the cache is being created, changed or deleted"
    YOUNG = "the cache was created less than the idle time ago"
    USED = "the cache has traffic"
    HOLDING = "the cache has no traffic, but holds blocks"
    UNMEASURED = "the cache has no measurements, so it is kept"
    FAILED = "the cache could not be created, and is deleted"
    IDLE = "the cache is idle, and is deleted"


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long a cache is kept without traffic."""

    idle: dt.timedelta

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Limits:
        """:raises ConfigurationError: if the variable is missing or no number."""
        try:
            return cls(dt.timedelta(seconds=float(environ["FARCALL_CACHE_IDLE_S"])))
        except (KeyError, ValueError) as error:
            raise ConfigurationError(f"FARCALL_CACHE_IDLE_S is not set, or no number: {error}") from error


class ExchangeCache:
    """Creates the cache on request, and deletes it when it is idle."""

    def __init__(self, caches: Caches, measurements: Measurements, limits: Limits) -> None:
        self._caches = caches
        self._measurements = measurements
        self._limits = limits

    def start(self) -> Cache | None:
        """Create the cache, unless it is there or still being deleted; returns it as it is now, None if ElastiCache
        does not show it yet."""
        if found := self._caches.find():
            return found
        self._caches.create()
        return self._caches.find()

    def stop(self) -> Cache | None:
        """Delete the cache, if there is one; returns it as it is now."""
        if self._caches.find():
            self._caches.delete()
        return self._caches.find()

    def find(self) -> Cache | None:
        """The cache as it is now."""
        return self._caches.find()

    def delete_if_idle(self, now: dt.datetime) -> Decision:
        """Delete the cache if it has had no traffic for the idle time; four times that while it holds blocks."""
        found = self._caches.find()
        decision = self._decision(found, now)
        if decision in (Decision.IDLE, Decision.FAILED):
            self._caches.delete()
        return decision

    def _decision(self, found: Cache | None, now: dt.datetime) -> Decision:
        if found is None:
            return Decision.NONE
        if found.status == "create-failed":
            return Decision.FAILED
        if found.status != "available":
            return Decision.CHANGING
        idle, age = self._limits.idle, now - found.created_at
        if age < idle:
            return Decision.YOUNG
        recent = self._measurements.traffic(now - idle, now)
        if recent is None:
            return Decision.UNMEASURED
        if recent.processing_units:
            return Decision.USED
        if recent.bytes_held <= _EMPTY_BYTES:
            return Decision.IDLE
        if age < _HOLDING_FACTOR * idle:
            return Decision.HOLDING
        longer = self._measurements.traffic(now - _HOLDING_FACTOR * idle, now)
        return Decision.IDLE if longer and not longer.processing_units else Decision.HOLDING
