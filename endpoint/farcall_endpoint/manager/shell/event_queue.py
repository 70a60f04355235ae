"""Events from threads, for the one thread that waits for many things: a queue with a descriptor."""

from __future__ import annotations

import contextlib
import os
import queue
from typing import Generic, TypeVar

E = TypeVar("E")


class EventQueue(Generic[E]):
    """Events in their order. :meth:`put` may be called from any thread."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[E] = queue.SimpleQueue()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable when :meth:`take` has some."""
        return self._waker

    def put(self, event: E) -> None:
        """Add an event."""
        self._events.put(event)
        os.eventfd_write(self._waker, 1)

    def take(self) -> list[E]:
        """All that have come since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._waker)
        found: list[E] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._events.get_nowait())
        return found

    def close(self) -> None:
        """Close the descriptor. No thread may put an event after that."""
        os.close(self._waker)
