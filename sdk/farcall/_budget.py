"""A bound on memory, kept by making those wait who would go over it."""

from __future__ import annotations

import threading


class Budget:
    """So many bytes. One taker is always let in, however much it takes: then nobody waits for ever."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._taken_bytes = 0
        self._lifted = False
        self._given_back = threading.Condition()

    def take(self, size_bytes: int, *, wait: bool = True) -> None:
        """Take bytes, waiting until there is room (unless told not to)."""
        with self._given_back:
            if wait:
                self._given_back.wait_for(
                    lambda: (
                        self._lifted or self._taken_bytes == 0 or self._taken_bytes + size_bytes <= self._limit_bytes
                    )
                )
            self._taken_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Make room."""
        with self._given_back:
            self._taken_bytes -= size_bytes
            self._given_back.notify_all()

    def lift(self) -> None:
        """Let everyone in from now on: what made room is gone."""
        with self._given_back:
            self._lifted = True
            self._given_back.notify_all()
