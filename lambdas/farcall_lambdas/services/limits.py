"""Limits: rate limit and token expiry at admission, room in queues and on the database's disk, quotas."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from farcall_common.errors import (
    QueueFull,
    QuotaExceeded,
    RateLimited,
    StorageLow,
    TooManyTasks,
    Unauthenticated,
    Unavailable,
)
from farcall_common.limits import KIB, MIB
from farcall_common.store import Stores
from farcall_common.store.model import Endpoint, QueueMemory, TokensTaken
from farcall_common.store.ports import Queue, Records
from farcall_lambdas.identity import Identity
from farcall_lambdas.recent import Recent
from farcall_lambdas.settings import ApiSettings

#: Retry-After for a full queue, in seconds.
QUEUE_RETRY_S: Final = 5.0

#: For a queue up to this length, and up to this part of its limit, the other queues of its owner are not added up. Sums
#: and short depths are valid for this many seconds.
_SHORT_QUEUE: Final = 1000
_SHORT_PART: Final = 10
_WAITING_GOOD_S: Final = 1.0

#: Part of an endpoint's queue that each submitter may use even if others have filled it.
_SHARE_PART: Final = 100

#: Tokens that are taken in advance, and the seconds within which they must be used.
_ADVANCE: Final = 20
_ADVANCE_GOOD_S: Final = 1.0

#: Entries that a request names or gets for one token; each as many more are one token more.
ENTRIES_PER_TOKEN: Final = 100

#: Part of the database's disk that may be used when something is added: its write-ahead log needs room, too.
_STORAGE_SHARE: Final = 0.85
#: How long a measured size is valid, in seconds.
_SIZE_GOOD_S: Final = 60.0

_DAY_S: Final = 86_400.0

#: How far the clocks of issuers may be behind ours, in seconds.
_LEEWAY_S: Final = 30.0

#: Callers whose tokens are kept in this process at once.
_CALLERS: Final = 4096


def check_count(count: int, settings: ApiSettings) -> None:
    """:raises TooManyTasks: for more tasks than one request may name."""
    if count > settings.max_tasks_per_request:
        raise TooManyTasks(f"{count} tasks in one request; {settings.max_tasks_per_request} are allowed.")


def check_quota(what: str, count: int, limit: int) -> None:
    """:raises QuotaExceeded: if ``count`` has reached the limit."""
    if count >= limit:
        raise QuotaExceeded(f"You have {count} {what} already; {limit} are allowed.")


class Storage:
    """Room on the database's disk. Results of accepted tasks and the retention must always find some: nothing can be
    deleted on a full disk."""

    def __init__(self, records: Records, queue: Queue, settings: ApiSettings, *, clock: Callable[[], float]) -> None:
        self._records = records
        self._most = settings.database_bytes * _STORAGE_SHARE
        self._added = _Added(queue, "stored", settings.max_stored_bytes_per_day)
        self._added_rows = _Added(queue, "rows", settings.database_bytes * settings.max_identity_storage_percent / 100)
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

    def add(self, identity: Identity, *, row_bytes: int = 0, blob_bytes: int = 0) -> None:
        """Count payloads that the caller is about to store: in the database, and in the blob store.

        :raises QuotaExceeded: if the caller has stored too much in the last day.
        """
        self._added_rows.count(identity.payer_id, row_bytes)
        self._added.count(identity.payer_id, row_bytes + blob_bytes)


class _Added:
    """Bytes that each identity adds: a token bucket of ``most_bytes`` that fills in a day, or no limit for 0. Each
    process counts up to a MiB by itself."""

    def __init__(self, queue: Queue, name: str, most_bytes: float) -> None:
        self._queue = queue
        self._name = name
        self._most = int(most_bytes / KIB)
        self._lock = threading.Lock()
        self._uncounted: dict[str, int] = {}

    def count(self, identity_id: str, size_bytes: int) -> None:
        if not self._most or not size_bytes:
            return
        with self._lock:
            if len(self._uncounted) >= _CALLERS:
                self._uncounted.clear()
            size_bytes += self._uncounted.get(identity_id, 0)
            self._uncounted[identity_id] = size_bytes if size_bytes < MIB else 0
        if size_bytes < MIB:
            return
        take = functools.partial(
            self._queue.take_tokens,
            f"{self._name}:{identity_id}",
            rate_per_s=self._most / _DAY_S,
            burst=self._most,
        )
        with contextlib.suppress(Unavailable):
            if not take(1).tokens:
                with self._lock:
                    self._uncounted[identity_id] = MIB  # the next one asks again
                raise QuotaExceeded(
                    f"You have stored {self._most // 1024} MiB of arguments in a day, all that is allowed.",
                    hint="Wait, or send less: arguments that many tasks share can be a file that the endpoint reads.",
                )
            take(size_bytes // KIB, in_debt=True)


@dataclasses.dataclass
class _Failures:
    """Calls that failed in a row: when the first one did, and the last one."""

    since: float
    last: float


class Memory:
    """Memory of the queue's server: some is always left for what is not a submit, and for other submitters. Each
    process reads once a second how much is used, and adds what it has accepted since."""

    def __init__(self, queue: Queue, settings: ApiSettings, *, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._memory = QueueMemory(0, 0)
        self._good_until = float("-inf")
        self._failures: _Failures | None = None

    def check(self, payer_id: str, size_bytes: int) -> None:
        """Whether tasks of so many bytes may be queued.

        :raises TooManyTasks: for tasks that would not fit an empty queue.
        :raises QueueFull: for tasks that do not fit now.
        :raises Unavailable: after an outage of the queue that is too long to go on without it.
        """
        try:
            memory = self._read()
            most = memory.max_bytes * self._settings.max_identity_memory_percent / 100
            # The tasks of one submitter take no more than what is used.
            is_asked = most > 0 and memory.used_bytes + size_bytes > most
            held = self._queue.bytes_of(payer_id) if is_asked else 0
        except Unavailable:
            self._check_outage()
            return
        self._failures = None
        if not memory.max_bytes:
            return
        if size_bytes > most:
            raise TooManyTasks(f"Tasks of {size_bytes} bytes in one request; {most:.0f} bytes of you may wait.")
        if memory.used_bytes + size_bytes > memory.max_bytes * self._settings.max_memory_percent / 100:
            raise QueueFull("The queue's memory is nearly full.", retry_after_s=QUEUE_RETRY_S)
        if held + size_bytes > most:
            raise QueueFull(
                f"Your tasks take {held} bytes of the queue; {size_bytes} more exceed the limit of {most:.0f}.",
                retry_after_s=QUEUE_RETRY_S,
            )
        with self._lock:
            self._memory = dataclasses.replace(self._memory, used_bytes=self._memory.used_bytes + size_bytes)

    def _read(self) -> QueueMemory:
        if self._clock() >= self._good_until:
            memory = self._queue.memory()
            with self._lock:
                self._memory, self._good_until = memory, self._clock() + _WAITING_GOOD_S
        return self._memory

    def _check_outage(self) -> None:
        now, most_s = self._clock(), self._settings.max_queue_outage_s
        failures = self._failures
        if failures is None or now - failures.last > most_s:  # what was in between is not known
            failures = _Failures(now, now)
        failures.last, self._failures = now, failures
        if now - failures.since > most_s:
            raise Unavailable("The queue does not answer; no tasks are accepted.", retry_after_s=QUEUE_RETRY_S)


class Room:
    """Limits of waiting tasks, for an endpoint and for all endpoints of its owner: the queue of an endpoint that never
    starts is never emptied. Concurrent submits do not see each other.

    One submitter may fill a queue, and must not lock the others out: a submitter with few tasks there may always add
    some, until the queue is twice as long as its limit.
    """

    def __init__(self, stores: Stores, settings: ApiSettings, *, clock: Callable[[], float]) -> None:
        self._queue = stores.queue
        self._endpoints = stores.endpoints
        self._tokens = stores.tokens
        self._settings = settings
        #: Tasks that wait for all endpoints of an owner.
        self._waiting: Recent[str, int] = Recent(clock, good_s=_WAITING_GOOD_S)
        #: The same for an endpoint, from the last enqueue of this process.
        self._depths: Recent[str, int] = Recent(clock, good_s=_WAITING_GOOD_S)

    def check(self, endpoint: Endpoint, count: int, *, quota_key: str) -> None:
        """Whether ``count`` more tasks of a submitter may wait for an endpoint.

        :raises TooManyTasks: for tasks that would not fit an empty queue.
        :raises QueueFull: for tasks that do not fit now.
        """
        if not count:
            return
        room = self._settings.max_queue_depth
        if count > room:
            raise TooManyTasks(f"{count} tasks in one request; {room} may wait for an endpoint.")
        known = self._depths.get(endpoint.endpoint_id)
        if known is not None and known + count <= min(_SHORT_QUEUE, room // _SHORT_PART):
            return
        try:
            depth, own = self._queue.depth_of(endpoint.endpoint_id, quota_key)
            if own + count <= max(1, room // _SHARE_PART) and depth + count <= 2 * room:
                return
            # Short queues are not added up: all that one identity may have hold no more than a few long ones.
            waiting = self._of_owner(endpoint.owner_id) if depth + count > _SHORT_QUEUE else 0
        except Unavailable:
            return  # Tasks that are accepted now are queued when the queue is back.
        for waiting_now, most, where in (
            (depth, room, f"endpoint {endpoint.endpoint_id}"),
            (waiting, self._settings.max_waiting, "all endpoints of its owner and the owner's service accounts"),
        ):
            if waiting_now + count > most:
                raise QueueFull(
                    f"{waiting_now} tasks wait for {where}; {count} more exceed the limit of {most}.",
                    retry_after_s=QUEUE_RETRY_S,
                )

    def note(self, endpoint_id: str, depth: int) -> None:
        """Remember how many tasks wait for an endpoint now."""
        self._depths.set(endpoint_id, depth)

    def _of_owner(self, owner_id: str) -> int:
        return self._waiting.get_or_read(owner_id, self._read_waiting)

    def _read_waiting(self, owner_id: str) -> int:
        payer_id = self._tokens.quota_group(owner_id)[0]
        owners = [payer_id, *(account.account_id for account in self._tokens.list_accounts([payer_id]))]
        found = (self._endpoints.list_endpoints(each, limit=self._settings.max_endpoints) for each in owners)
        return self._queue.depth([endpoint.endpoint_id for endpoints in found for endpoint in endpoints])


@dataclasses.dataclass
class _Advance:
    """Tokens that a process holds for a caller."""

    tokens: int
    good_until: float


class RateLimit:
    """Requests per second of an identity, or of an endpoint's credential, over all processes of the API: a token bucket
    in the queue's store.

    Each process takes some tokens in advance, so that most requests need no call. While the store is unavailable no
    request is refused: the limit protects the stores, it is no authorization.
    """

    def __init__(self, queue: Queue, settings: ApiSettings, *, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._rate_per_s = settings.rate_per_s
        self._burst = settings.rate_burst
        # At most the tokens of a tenth of a second: one process must not take them from the others.
        self._advance = max(1, min(_ADVANCE, int(settings.rate_per_s / 10)))
        self._clock = clock
        self._lock = threading.Lock()
        self._in_hand: dict[str, _Advance] = {}

    def spend(self, identity: Identity) -> None:
        """Count one request.

        :raises RateLimited: over the limit; the error says when to try again.
        """
        if self._spend_in_hand(identity.rate_key):
            return
        now = self._clock()
        taken = self._take(identity.rate_key)
        if not taken.tokens:
            raise RateLimited(
                f"You made more than {self._burst} requests, or {self._rate_per_s:g} per second.",
                retry_after_s=taken.wait_s,
            )
        with self._lock:
            if len(self._in_hand) >= _CALLERS:
                self._in_hand.clear()
            self._in_hand[identity.rate_key] = _Advance(taken.tokens - 1, now + _ADVANCE_GOOD_S)

    def charge(self, identity: Identity, tokens: int) -> None:
        """Count more for a request that is under way. It is not refused; those after it may be."""
        owed = tokens - self._spend_in_hand(identity.rate_key, tokens)
        if not owed:
            return
        with contextlib.suppress(Unavailable):
            self._queue.take_tokens(
                identity.rate_key, owed, rate_per_s=self._rate_per_s, burst=self._burst, in_debt=True
            )

    def _spend_in_hand(self, identity_id: str, tokens: int = 1) -> int:
        """Spend up to so many of the tokens in hand; returns how many."""
        with self._lock:
            advance = self._in_hand.get(identity_id)
            if advance is None or advance.good_until <= self._clock():
                return 0
            spent = min(tokens, advance.tokens)
            advance.tokens -= spent
            return spent

    def _take(self, identity_id: str) -> TokensTaken:
        try:
            return self._queue.take_tokens(identity_id, self._advance, rate_per_s=self._rate_per_s, burst=self._burst)
        except Unavailable:
            return TokensTaken(self._advance)


class Admission:
    """Admits callers with a valid token, within their rate limit. Invalid requests count like others: reading them is
    work, too."""

    def __init__(self, rate_limit: RateLimit, *, clock: Callable[[], float]) -> None:
        self._rate_limit = rate_limit
        self._clock = clock

    def admit(self, context: Mapping[str, Any] | None, *, source_ip: str = "") -> Identity:
        """The caller, from the authorizer's context. API Gateway caches it for minutes; the token may expire before.

        :raises Unauthenticated: without an authorizer's context, or if the token has expired since.
        :raises RateLimited: over the limit.
        """
        identity = Identity.from_context(context, source_ip=source_ip)
        if identity.expires_at is not None and self._clock() > identity.expires_at + _LEEWAY_S:
            way = "Make another: `farcall tokens create`." if identity.token_id else "Log in again: `farcall login`."
            raise Unauthenticated("The token has expired.", hint=way)
        self.count(identity)
        return identity

    def count(self, identity: Identity) -> None:
        """Count one more request, such as a part of one that is as much work as a whole one.

        :raises RateLimited: over the limit.
        """
        self._rate_limit.spend(identity)

    def count_entries(self, identity: Identity, entries: int) -> None:
        """Count a request by its size, after the first token: a request about thousands of tasks is as much work as
        many others."""
        tokens = max(0, entries - 1) // ENTRIES_PER_TOKEN
        if tokens:
            self._rate_limit.charge(identity, tokens)
