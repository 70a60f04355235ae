"""Ranges of large objects: several requests at a time, since a storage limits what it sends on each connection.

Each transfer reads in its own thread, and waits for no other one. Once bytes come, it may have helpers, which get
ranges in advance. All transfers share the helpers, which bounds their memory: submitters have equal shares, and so have
the transfers of each. Without a free helper, a transfer reads on alone.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import obstore

RANGE_BYTES: Final = 8 * 2**20
_HELPERS: Final = 16
_FEW: Final = 2
_MANY: Final = 7
_FAST_S: Final = 2.0
"""Ranges in advance: few, or many once a range has come within this time."""
_LOOK_S: Final = 1.0
"""Longest time until a reader that waits for a helper looks whether it is still needed."""

Chunk = bytes | obstore.Bytes


class Helpers:
    """Threads that get ranges for transfers.

    :param most: their number. Each has memory for one range, until its transfer has taken it.
    """

    def __init__(self, most: int = _HELPERS) -> None:
        self._most = most
        self._free = most
        self._lock = threading.Lock()
        self._transfers: collections.Counter[str] = collections.Counter()  # on their way, by submitter

    @contextlib.contextmanager
    def share_of(self, submitter: str) -> Iterator[Share]:
        """The share of one transfer, while it is on its way."""
        with self._lock:
            self._transfers[submitter] += 1
        try:
            yield Share(self, submitter)
        finally:
            with self._lock:
                self._transfers[submitter] -= 1
                if not self._transfers[submitter]:
                    del self._transfers[submitter]

    def take(self, submitter: str, taken: int) -> bool:
        """Take a helper for a transfer that has this number of them; False if there is none for it now."""
        with self._lock:
            share = self._most // len(self._transfers) // self._transfers[submitter]
            if not self._free or taken >= max(1, share):
                return False
            self._free -= 1
            return True

    def give_back(self) -> None:
        """A helper is free again."""
        with self._lock:
            self._free += 1


class Share:
    """The helpers of one transfer. Its methods may be called from any thread."""

    def __init__(self, helpers: Helpers, submitter: str) -> None:
        self._helpers = helpers
        self._submitter = submitter
        self._lock = threading.Lock()
        self._taken = 0

    def start(self, work: Callable[[], None]) -> bool:
        """Let a helper work; False if there is none for this transfer now. It has to be given back."""
        with self._lock:
            if not self._helpers.take(self._submitter, self._taken):
                return False
            self._taken += 1
        threading.Thread(target=work, daemon=True).start()
        return True

    def give_back(self) -> None:
        """A helper has ended, and its range was taken."""
        with self._lock:
            self._taken -= 1
        self._helpers.give_back()


@dataclasses.dataclass(slots=True, eq=False)
class _Range:
    """A range that a helper gets. ``holders``: the helper and the reader; the last one gives the helper back."""

    start: int
    end: int
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    is_done: bool = False
    error: Exception | None = None
    holders: int = 2


class RangeReader:
    """Reads an object in order, for one transfer.

    :param get: yields the bytes of a range as they come; called from several threads.
    """

    def __init__(self, size_bytes: int, get: Callable[[int, int], Iterator[Chunk]], share: Share) -> None:
        self._size_bytes = size_bytes
        self._get = get
        self._share = share
        self._changed = threading.Condition()
        self._received_bytes = 0
        self._is_over = False
        self._ahead: collections.deque[_Range] = collections.deque()
        self._most_ahead = _FEW
        self._next = 0

    def chunks(self) -> Iterator[tuple[Chunk, int]]:
        """The bytes in order, each with the number of all bytes that have come so far, also those in advance. While a
        helper is awaited, empty ones now and then."""
        try:
            while self._ahead or self._next < self._size_bytes:
                if self._ahead:
                    yield from self._helped(self._ahead.popleft())
                else:
                    start, self._next = self._next, min(self._next + RANGE_BYTES, self._size_bytes)
                    yield from self._own(start, self._next)
        finally:
            with self._changed:
                self._is_over = True
            for each in self._ahead:
                self._let_go(each)

    def _own(self, start: int, end: int) -> Iterator[tuple[Chunk, int]]:
        began = time.monotonic()
        for chunk in self._get(start, end):
            with self._changed:
                self._received_bytes += len(chunk)
                received_bytes = self._received_bytes
            yield chunk, received_bytes
            self._look_ahead()  # not before: a storage that sends nothing needs no helpers
        self._range_came(time.monotonic() - began)

    def _helped(self, awaited: _Range) -> Iterator[tuple[Chunk, int]]:
        try:
            is_done = False
            while not is_done:
                self._look_ahead()
                with self._changed:
                    if not awaited.chunks and not awaited.is_done:
                        self._changed.wait(_LOOK_S)
                    chunks, awaited.chunks = awaited.chunks, []
                    is_done, received_bytes = awaited.is_done, self._received_bytes
                for chunk in chunks or [b""]:
                    yield chunk, received_bytes
            if awaited.error is not None:
                raise awaited.error
        finally:
            self._let_go(awaited)

    def _look_ahead(self) -> None:
        while len(self._ahead) < self._most_ahead and self._next < self._size_bytes:
            wanted = _Range(self._next, min(self._next + RANGE_BYTES, self._size_bytes))
            if not self._share.start(lambda wanted=wanted: self._fill(wanted)):  # type: ignore[misc]
                return
            self._next = wanted.end
            self._ahead.append(wanted)

    def _fill(self, wanted: _Range) -> None:
        began = time.monotonic()
        error: Exception | None = None
        try:
            for chunk in self._get(wanted.start, wanted.end):
                with self._changed:
                    if self._is_over:
                        return
                    wanted.chunks.append(chunk)
                    self._received_bytes += len(chunk)
                    self._changed.notify()
            self._range_came(time.monotonic() - began)
        except Exception as problem:  # noqa: BLE001 - the reader raises it
            error = problem
        finally:
            with self._changed:
                wanted.is_done, wanted.error = True, error
                self._changed.notify()
            self._let_go(wanted)

    def _range_came(self, seconds: float) -> None:
        self._most_ahead = _MANY if seconds < _FAST_S else _FEW

    def _let_go(self, held: _Range) -> None:
        with self._changed:
            held.holders -= 1
            is_last = not held.holders
        if is_last:
            self._share.give_back()
