"""Limits: rate limit and token expiry at admission, room in queues and on the database's disk, quotas."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from farcall_common.errors import (
    QueueFull,
    QuotaExceeded,
    RateLimited,
    StorageLow,
    TooManyTasks,
    Unauthenticated,
    Unavailable,
)
from farcall_common.store.model import Endpoint, TokensTaken
from farcall_common.store.ports import Queue, Records
from farcall_lambdas.identity import Identity
from farcall_lambdas.models.account import Limits, Quota
from farcall_lambdas.settings import ApiSettings

#: How long a caller is told to wait for room in a queue, in seconds.
QUEUE_RETRY_S: Final = 5.0

#: Beside a queue up to this long others are not added up; their sum is believed for so many seconds. So is it that a
#: queue is as short as this, and no more than a part of what it may be.
_SHORT_QUEUE: Final = 1000
_SHORT_PART: Final = 10
_WAITING_GOOD_S: Final = 1.0

#: Each submitter may have this part of what may wait for an endpoint, even if others have filled the queue.
_SHARE_PART: Final = 100

#: Tokens are taken in advance, so many, and are lost if they are not used within so many seconds.
_ADVANCE: Final = 20
_ADVANCE_GOOD_S: Final = 1.0

#: The part of the database's disk that may be in use when something is added: its log of changes needs some as well.
_STORAGE_SHARE: Final = 0.85
#: For how long a measured size counts, in seconds.
_SIZE_GOOD_S: Final = 60.0

#: What an entry of a list takes beside texts, in bytes.
_ENTRY_BYTES: Final = 500

#: How far the clocks of issuers may be behind ours, in seconds.
_LEEWAY_S: Final = 30.0

T = TypeVar("T")

#: Callers whose tokens are kept in this process at once.
_CALLERS: Final = 4096


def check_count(count: int, settings: ApiSettings) -> None:
    """:raises TooManyTasks: for more tasks than one request may name."""
    if count > settings.max_tasks_per_request:
        raise TooManyTasks(f"{count} tasks in one request; {settings.max_tasks_per_request} are allowed.")


def check_quota(what: str, count: int, limit: int) -> None:
    """:raises QuotaExceeded: if a caller with ``count`` of something may not have one more."""
    if count >= limit:
        raise QuotaExceeded(f"You have {count} {what} already; {limit} are allowed.")


def fitting(items: Sequence[T], settings: ApiSettings, *, shown: Callable[[T], object]) -> Sequence[T]:
    """As many of the first items as fit one answer, by what is ``shown`` of them beside ids and times; at least one if
    there are any."""
    room = settings.max_response_bytes
    for count, item in enumerate(items):
        room -= _ENTRY_BYTES + len(json.dumps(shown(item)))
        if room < 0 and count:
            return items[:count]
    return items


class Storage:
    """Whether there is room on the database's disk. What is on it must always find some: the results of what was
    accepted, and the retention, which cannot delete anything on a disk that is full."""

    def __init__(self, records: Records, settings: ApiSettings, *, clock: Callable[[], float]) -> None:
        self._records = records
        self._most = settings.database_bytes * _STORAGE_SHARE
        self._clock = clock
        self._size = 0
        self._good_until = float("-inf")

    def check(self) -> None:
        """:raises StorageLow: when nothing may be added."""
        if not self._most:
            return
        if self._clock() >= self._good_until:
            self._size = self._records.database.size_bytes()
            self._good_until = self._clock() + _SIZE_GOOD_S
        if self._size > self._most:
            raise StorageLow(
                f"The database has {self._size} bytes; nothing is added beyond {self._most:.0f}.",
                retry_after_s=_SIZE_GOOD_S,
            )


class Room:
    """How many tasks may wait for an endpoint, and for all endpoints of its owner: whoever registers endpoints makes
    queues, and one that is never started is never emptied. Submits at the same moment do not see each other.

    One submitter may fill a queue, and must not lock the others out: who has a few tasks there may always add some,
    until the queue is twice as long as it may be.
    """

    def __init__(self, queue: Queue, records: Records, settings: ApiSettings, *, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._records = records
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        #: Tasks that wait for all endpoints of an owner, and until when that is believed.
        self._waiting: dict[str, tuple[int, float]] = {}
        #: The same of an endpoint, as the queue said when this process added to it.
        self._depths: dict[str, tuple[int, float]] = {}

    def check(self, endpoint: Endpoint, count: int, *, submitter_id: str) -> None:
        """Whether ``count`` more tasks of a submitter may wait for an endpoint.

        :raises TooManyTasks: for tasks that would not fit an empty queue.
        :raises QueueFull: for tasks that do not fit now.
        """
        if not count:
            return
        room = self._settings.max_queue_depth
        if count > room:
            raise TooManyTasks(f"{count} tasks in one request; {room} may wait for an endpoint.")
        depth, good_until = self._depths.get(endpoint.endpoint_id, (0, 0.0))
        if depth + count <= min(_SHORT_QUEUE, room // _SHORT_PART) and self._clock() < good_until:
            return
        try:
            depth, own = self._queue.depth_of(endpoint.endpoint_id, submitter_id)
            if own + count <= max(1, room // _SHARE_PART) and depth + count <= 2 * room:
                return
            # Short queues are not added up: all that one identity may have hold no more than a few long ones.
            waiting = self._of_owner(endpoint.owner_id) if depth + count > _SHORT_QUEUE else 0
        except Unavailable:
            return  # What is accepted now is queued when the queue is back.
        for there, most, where in (
            (depth, room, f"endpoint {endpoint.endpoint_id}"),
            (waiting, self._settings.max_waiting, "all endpoints of its owner"),
        ):
            if there + count > most:
                raise QueueFull(
                    f"{there} tasks wait for {where}; with {count} more it would be over {most}.",
                    retry_after_s=QUEUE_RETRY_S,
                )

    def seen(self, endpoint_id: str, depth: int) -> None:
        """How many tasks wait for an endpoint now."""
        with self._lock:
            if len(self._depths) >= _CALLERS:
                self._depths.clear()
            self._depths[endpoint_id] = (depth, self._clock() + _WAITING_GOOD_S)

    def _of_owner(self, owner_id: str) -> int:
        now = self._clock()
        with self._lock:
            waiting, good_until = self._waiting.get(owner_id, (0, 0.0))
        if now < good_until:
            return waiting
        endpoints = self._records.endpoints.list_endpoints(owner_id, limit=self._settings.max_endpoints)
        waiting = self._queue.depth([endpoint.endpoint_id for endpoint in endpoints])
        with self._lock:
            if len(self._waiting) >= _CALLERS:
                self._waiting.clear()
            self._waiting[owner_id] = (waiting, now + _WAITING_GOOD_S)
        return waiting


@dataclasses.dataclass
class _Advance:
    """Tokens that a process has in hand for a caller."""

    tokens: int
    good_until: float


class RateLimit:
    """Requests per second of an identity, over all processes of the API: a token bucket in the queue's store.

    Each process takes some tokens in advance, so that most requests ask nobody. While the store is away nobody is held
    up: the limit protects what stands behind the API, it does not decide who may use it.
    """

    def __init__(self, queue: Queue, settings: ApiSettings, *, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._rate_per_s = settings.rate_per_s
        self._burst = settings.rate_burst
        # Not more than a caller gets in a tenth of a second: what one process holds back must not be felt in another.
        self._advance = max(1, min(_ADVANCE, int(settings.rate_per_s / 10)))
        self._clock = clock
        self._lock = threading.Lock()
        self._in_hand: dict[str, _Advance] = {}

    def spend(self, identity: Identity) -> None:
        """Count one request.

        :raises RateLimited: when it is one too many; the error says when there is room again.
        """
        if self._spend_in_hand(identity.identity_id):
            return
        now = self._clock()
        taken = self._take(identity.identity_id)
        if not taken.tokens:
            raise RateLimited(
                f"You made more than {self._burst} requests, or {self._rate_per_s:g} per second.",
                retry_after_s=taken.wait_s,
            )
        with self._lock:
            if len(self._in_hand) >= _CALLERS:
                self._in_hand.clear()
            self._in_hand[identity.identity_id] = _Advance(taken.tokens - 1, now + _ADVANCE_GOOD_S)

    def _spend_in_hand(self, identity_id: str) -> bool:
        with self._lock:
            advance = self._in_hand.get(identity_id)
            if advance is None or advance.tokens <= 0 or advance.good_until <= self._clock():
                return False
            advance.tokens -= 1
            return True

    def _take(self, identity_id: str) -> TokensTaken:
        try:
            return self._queue.take_tokens(identity_id, self._advance, rate_per_s=self._rate_per_s, burst=self._burst)
        except Unavailable:
            return TokensTaken(self._advance)


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


class AccountService:
    """Limits and quotas of the caller."""

    def __init__(self, records: Records, settings: ApiSettings) -> None:
        self._records = records
        self._settings = settings

    def limits(self, identity: Identity) -> Limits:
        """The limits in force, and how much of each quota is used up."""
        owner_id, settings, records = identity.identity_id, self._settings, self._records
        functions, endpoints, containers = settings.max_functions, settings.max_endpoints, settings.max_containers
        return Limits(
            functions=Quota(used=records.functions.count_functions(owner_id, limit=functions), limit=functions),
            endpoints=Quota(used=records.endpoints.count_endpoints(owner_id, limit=endpoints), limit=endpoints),
            containers=Quota(used=records.functions.count_containers(owner_id, limit=containers), limit=containers),
            max_payload_bytes=settings.max_payload_bytes,
            max_inline_bytes=settings.max_inline_bytes,
            max_request_bytes=settings.max_request_bytes,
            max_tasks_per_request=settings.max_tasks_per_request,
            max_queue_depth=settings.max_queue_depth,
            rate_per_s=settings.rate_per_s,
            rate_burst=settings.rate_burst,
            retention_days=settings.retention_days,
        )
