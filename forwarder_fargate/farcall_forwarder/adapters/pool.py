"""Threads for the steps that block, and patience with stores that are away."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from farcall_common.errors import Unavailable
from farcall_common.store.model import PeerKey
from farcall_forwarder.adapters.steps import StoreSteps
from farcall_forwarder.core import actions as do
from farcall_forwarder.core.events import Event
from farcall_forwarder.core.outbox import MAX_FLUSHES
from farcall_forwarder.core.relay import ReadPiece, StoreBlob

__all__ = ["StorePool"]

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 5.0
#: What a waiting agent waits for has threads of its own, so that slow database work does not delay it.
_QUEUE_STEPS: Final = (do.LeaseTasks, do.ReadCancels, do.ClaimEndpoint, do.ReadLeases, do.RequeueTasks)
#: Megabytes at a time, which nobody else should wait behind.
_RELAY_STEPS: Final = (ReadPiece, StoreBlob)

_logger = logging.getLogger(__name__)
_Asked = TypeVar("_Asked")
_Found = TypeVar("_Found")


class StorePool:
    """Runs store steps in threads. A step whose store is away is repeated, with full jitter, until it succeeds."""

    def __init__(self, steps: StoreSteps) -> None:
        self._steps = steps
        self._flushes = ThreadPoolExecutor(MAX_FLUSHES, "flush")
        self._queue = ThreadPoolExecutor(2, "queue")
        self._others = ThreadPoolExecutor(3, "store")
        self._lookups = ThreadPoolExecutor(2, "zap")
        self._relays = ThreadPoolExecutor(4, "relay")
        self._failing: dict[int, object] = {}

    @property
    def is_degraded(self) -> bool:
        """Whether a store did not answer when it was last asked."""
        return bool(self._failing)

    async def perform(self, step: do.StoreStep) -> Event | None:
        """Do a step, however long it takes; its event. An Announce is not repeated: the next one is newer."""
        return await self._patiently(self._steps.perform, step, like=step)

    async def perform_together(self, steps: Sequence[do.StoreStep]) -> Sequence[Event]:
        """Do steps of one kind in one, however long it takes; their events."""
        return await self._patiently(self._steps.perform_together, steps, like=steps[0]) or ()

    async def _patiently(self, call: Callable[[_Asked], _Found], asked: _Asked, *, like: do.StoreStep) -> _Found | None:
        is_repeated = not isinstance(like, do.Announce)
        marker: object = asked if is_repeated else do.Announce
        pause_s = _FIRST_PAUSE_S
        try:
            while True:
                try:
                    found = await self._run(self._threads_for(like), call, asked)
                except Unavailable as error:
                    _logger.warning("%s waits: %s", type(like).__name__, error)
                    self._failing[id(marker)] = marker
                    if not is_repeated:
                        return None
                else:
                    self._failing.pop(id(marker), None)
                    return found
                # Nothing to wait for but time: a store does not say when it is back.
                await asyncio.sleep(random.uniform(0, pause_s))  # noqa: S311 -- spreads retries, guards nothing
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            if is_repeated:
                self._failing.pop(id(marker), None)

    async def look_up(
        self, find: Callable[[Sequence[str]], Mapping[str, PeerKey | None]], public_keys: Sequence[str]
    ) -> Mapping[str, PeerKey | None]:
        """Find the owners of keys; once."""
        return await self._run(self._lookups, find, public_keys)

    def _threads_for(self, step: do.StoreStep) -> ThreadPoolExecutor:
        if isinstance(step, do.FlushResults):
            return self._flushes
        if isinstance(step, _RELAY_STEPS):
            return self._relays
        return self._queue if isinstance(step, _QUEUE_STEPS) else self._others

    @staticmethod
    async def _run(threads: ThreadPoolExecutor, call: Callable[[_Asked], _Found], asked: _Asked) -> _Found:
        return await asyncio.get_running_loop().run_in_executor(threads, call, asked)

    def close(self) -> None:
        """Start nothing more, and wait for the calls under way: the stores are closed next, and a call that came later
        would open a connection again. Each call has its store's timeout."""
        pools = (self._flushes, self._queue, self._others, self._lookups, self._relays)
        for threads in pools:
            threads.shutdown(wait=False, cancel_futures=True)
        for threads in pools:
            threads.shutdown()
