"""Steps of one kind that travel together: with thousands of endpoints, a round trip for each is most of the work."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from farcall_forwarder.core.actions import StoreStep
from farcall_forwarder.core.events import Event

__all__ = ["Together"]


class Together:
    """Performs a step at once when none is under way; what comes in meanwhile is performed together, next.

    :param perform: does steps; its events answer them.
    :param limit: of steps that are done together, so that the first of them need not wait long for the last.
    """

    def __init__(self, perform: Callable[[Sequence[StoreStep]], Awaitable[Sequence[Event]]], *, limit: int) -> None:
        self._perform = perform
        self._limit = limit
        self._waiting: deque[StoreStep] = deque()
        self._is_filled = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def add(self, step: StoreStep) -> None:
        """Have this step performed."""
        self._waiting.append(step)
        self._is_filled.set()
        self._is_idle.clear()

    async def run(self, handle: Callable[[Sequence[Event]], None]) -> None:
        """Perform steps until cancelled; ``handle`` is given the events."""
        while True:
            await self._is_filled.wait()
            while self._waiting:
                steps = [self._waiting.popleft() for _ in range(min(self._limit, len(self._waiting)))]
                handle(await self._perform(steps))
            self._is_filled.clear()
            self._is_idle.set()

    async def settle(self) -> None:
        """Wait until nothing waits or is under way."""
        await self._is_idle.wait()
