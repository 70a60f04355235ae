"""Batching of store steps: with thousands of endpoints, a round trip for each step would be most of the work."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from farcall_forwarder.core.actions import StoreStep
from farcall_forwarder.core.events import Event


class Batcher:
    """Performs a step at once if none is under way. Steps that are added meanwhile form the next batch.

    :param perform: performs a batch of steps; returns the events that answer them.
    :param limit: most steps in one batch, so that the first of them does not wait long for the last.
    """

    def __init__(self, perform: Callable[[Sequence[StoreStep]], Awaitable[Sequence[Event]]], *, limit: int) -> None:
        self._perform = perform
        self._limit = limit
        self._waiting: deque[StoreStep] = deque()
        self._is_filled = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def add(self, step: StoreStep) -> None:
        """Add a step to the next batch."""
        self._waiting.append(step)
        self._is_filled.set()
        self._is_idle.clear()

    async def run(self, handle: Callable[[Sequence[Event]], None]) -> None:
        """Perform steps until cancelled; ``handle`` receives the events."""
        while True:
            await self._is_filled.wait()
            while self._waiting:
                steps = [self._waiting.popleft() for _ in range(min(self._limit, len(self._waiting)))]
                handle(await self._perform(steps))
            self._is_filled.clear()
            self._is_idle.set()

    async def settle(self) -> None:
        """Wait until no step waits or is under way."""
        await self._is_idle.wait()
