"""Pace of requests: as many at a time as a storage answers.

A storage that has too many requests refuses some ("503 SlowDown"), or does not answer in time. Each refusal halves how
many go on at the same time, and each answer adds a little (additive increase, multiplicative decrease; Chiu and Jain,
1989). A refused request is made again after a random time, whose limit doubles (exponential back-off, full jitter).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from farcall_common.errors import StoreBusy, StoreUnavailable

T = TypeVar("T")

MOST: Final = 8
"""Requests of a process to a storage that go on at the same time."""
_ADDED: Final = 0.1
"""What as many answers as requests go on at the same time add to these. With four processes at two to four times the
rate of a storage, it refuses 1 to 5 % of the requests then, and 10 to 22 % with 1."""
_FIRST_WAIT_S: Final = 0.1
_LONGEST_WAIT_S: Final = 5.0
_DOUBLINGS: Final = 10


class Window:
    """How many requests may go on at the same time. It has no clock and no lock.

    :param most: of them; it begins with so many.
    """

    def __init__(self, most: int = MOST) -> None:
        self.size = float(most)
        self.running = 0
        self._most = most
        self._halvings = 0

    @property
    def is_open(self) -> bool:
        """Whether another request may begin."""
        return self.running < math.floor(self.size)

    def begin(self) -> int:
        """Begin a request; a number for its end."""
        self.running += 1
        return self._halvings

    def answer(self) -> None:
        """End a request that was answered."""
        self.running -= 1
        self.size = min(self._most, self.size + _ADDED / self.size)

    def refuse(self, begun: int) -> None:
        """End a request that was refused. Requests that were begun before the last halving do not halve once more: all
        that go on at the same time are often refused together."""
        self.running -= 1
        if begun == self._halvings:
            self._halvings += 1
            self.size = max(1.0, self.size / 2)


class Pace:
    """The requests of this process to a storage. May be used from any thread.

    :param limit_s: seconds after its first refusal at which a request is given up.
    :param random: numbers from 0 to 1, by which waits are multiplied.
    """

    def __init__(
        self,
        *,
        limit_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        random: Callable[[], float] = random.random,
    ) -> None:
        self.window = Window()
        self._changed = threading.Condition()
        self._limit_s = limit_s
        self._clock = clock
        self._sleep = sleep
        self._random = random

    def run(self, request: Callable[[], T]) -> T:
        """Make a request, again and again while the storage is busy. It waits for its turn each time.

        :param request: raises :class:`StoreBusy` if it is to be made again.
        :raises StoreUnavailable: if the storage is still busy at the limit.
        """
        refused_at = None
        for tries in itertools.count(1):
            try:
                with self._turn():
                    return request()
            except StoreBusy as error:
                now = self._clock()
                refused_at = now if refused_at is None else refused_at
                wait_s = self._random() * min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** min(tries - 1, _DOUBLINGS))
                if now + wait_s > refused_at + self._limit_s:
                    message = f"{error.record.message} It was tried {tries} times in {now - refused_at:.0f} s."
                    raise StoreUnavailable(message) from error
                self._sleep(wait_s)
        raise AssertionError

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait until a request may begin, and be it."""
        window = self.window
        with self._changed:
            self._changed.wait_for(lambda: window.is_open)
            begun = window.begin()
        is_busy = False
        try:
            yield
        except StoreBusy:
            is_busy = True
            raise
        finally:
            with self._changed:
                if is_busy:
                    window.refuse(begun)
                else:
                    window.answer()
                self._changed.notify_all()


PACES: Final[dict[str, Pace]] = {}
"""Paces of this process, by storage."""
_PACES_LOCK: Final = threading.Lock()


def pace_of(storage: str) -> Pace:
    """The pace of this process for a storage."""
    with _PACES_LOCK:
        return PACES.setdefault(storage, Pace())
