"""Shell: feeds events to the core and performs its actions, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import logging
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from farcall_common.errors import ProtocolError
from farcall_common.store.model import FileMessage, ForwarderInfo, OutputAsk, SharedResults
from farcall_common.wire import decode, encode
from farcall_forwarder.adapters.health import Report
from farcall_forwarder.adapters.pool import Batcher, StorePool
from farcall_forwarder.adapters.router import Inbound, Router, SendFailure
from farcall_forwarder.adapters.zap import Authenticator
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.event_log import EventLog
from farcall_forwarder.core.files import FileMessagesHeard
from farcall_forwarder.core.forwarder import Forwarder
from farcall_forwarder.core.policy import Instant

#: Messages that are received from the socket before they are handled.
_BATCH: Final = 500
#: Period of the retries for slow peers: a ROUTER does not report which peer can take more.
_BACKLOG_RETRY_S: Final = 0.005
#: Time for store steps that are still under way after a drain.
_LAST_STEPS_S: Final = 5.0

_logger = logging.getLogger(__name__)


class IdSource:
    """Session ids and random fractions. With the seed of an event log they are the same again."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = random.SystemRandom().getrandbits(64) if seed is None else seed
        self._random = random.Random(self.seed)  # noqa: S311 -- names sessions and spreads reconnects, guards nothing

    def new_id(self) -> str:
        return str(uuid.UUID(int=self._random.getrandbits(128), version=4))

    def fraction(self) -> float:
        return self._random.random()


class Shell:
    """Runs a core on a socket and a pool of threads. Only the pool's steps run outside of the event loop.

    :param about_core: how the core was made, for the reader of its event log.
    """

    def __init__(
        self,
        core: Forwarder,
        router: Router,
        authenticator: Authenticator,
        pool: StorePool,
        *,
        about_core: Mapping[str, Any],
    ) -> None:
        self._event_log = EventLog()
        self._about_core = about_core
        self._core = core
        self._router = router
        self._authenticator = authenticator
        self._pool = pool
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rearm = asyncio.Event()
        self._has_backlog = asyncio.Event()
        self._deadline = 0.0
        self._batcher: Batcher | None = None
        self._is_over = False

    @property
    def info(self) -> ForwarderInfo:
        """Entry of this forwarder in the registry."""
        return self._core.info(_now())

    async def run(self) -> None:
        """Serve until the core has drained. An error in any part ends all of them."""
        async with asyncio.TaskGroup() as group:
            loops = (
                self._authenticator.run(),
                self._router.limiter.run(),
                self._serve_peers(),
                self._serve_backlogs(),
                self._keep_time(),
            )
            batcher = self._batcher = Batcher(group, self._pool.perform, self._handle)
            tasks = [group.create_task(loop) for loop in loops]
            try:
                await self._end
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LAST_STEPS_S):
                        await batcher.settle()
            finally:
                self._is_over = True  # later events are ignored
            for task in tasks:
                task.cancel()
            batcher.cancel()

    # -- events --------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Redirect all peers, then end; at once if :meth:`run` has not begun."""
        if self._batcher is not None:
            self._handle([ev.DrainOrdered()])
        elif not self._end.done():
            self._end.set_result(None)

    def work_available(self, endpoint_ids: Sequence[str]) -> None:
        """Wake-ups: endpoints have work."""
        self._handle([ev.WorkAvailable(endpoint_ids)])

    def results_heard(self, shared_results: Sequence[SharedResults]) -> None:
        """Other forwarders have recorded results."""
        self._handle([ev.ResultsHeard(shared_results)])

    def output_requested(self, asks: Sequence[OutputAsk]) -> None:
        """The API requests output of tasks."""
        self._handle([ev.OutputRequested(asks)])

    def file_messages_heard(self, messages: Sequence[FileMessage]) -> None:
        """Forwarders request pieces of files of endpoints, or answer."""
        self._handle([FileMessagesHeard(messages)])

    def pubsub_lost(self) -> None:
        """Wake-ups and shared results may have been missed."""
        self._handle([ev.PubSubLost()])

    def fail(self, error: BaseException) -> None:
        """End :meth:`run` with an error of another thread."""
        if not self._end.done():
            self._end.set_exception(error)

    async def _serve_peers(self) -> None:
        while True:
            if batch := self._router.receive(limit=_BATCH):
                received_bytes = sum(len(frame) for message in batch for frame in message.frames)
                self._handle([_event(message) for message in batch], received_bytes=received_bytes)
                await asyncio.sleep(0)  # let the other tasks run
            else:
                await self._router.readiness.wait()

    async def _serve_backlogs(self) -> None:
        while True:
            await self._has_backlog.wait()
            await asyncio.sleep(_BACKLOG_RETRY_S)
            self._handle(list(map(_failure_event, self._router.retry())))
            if not self._router.has_backlog:
                self._has_backlog.clear()

    async def _keep_time(self) -> None:
        while True:
            self._rearm.clear()
            self._deadline = self._core.next_deadline()
            try:
                async with asyncio.timeout(self._deadline - time.monotonic()):
                    await self._rearm.wait()
            except TimeoutError:
                self._handle([ev.Tick()])

    # -- actions -------------------------------------------------------------------------------------------------------

    def _handle(self, events: Sequence[ev.Event], *, received_bytes: int = 0) -> None:
        """Give events to the core and perform its actions. Failures of these are events, too."""
        if self._is_over:
            return
        while events:
            now = _now()
            self._event_log.add(events, now, size=received_bytes)
            try:
                actions = self._core.handle(events, now)
            except Exception:
                self.write_event_log()
                raise
            events = [_failure_event(failure) for action in actions if (failure := self._perform(action))]
        self._router.readiness.poke()
        if self._router.has_backlog:
            self._has_backlog.set()
        if self._core.next_deadline() < self._deadline:
            self._rearm.set()
        if self._core.is_drained and not self._end.done():
            self._end.set_result(None)

    def _perform(self, action: do.Action) -> SendFailure | None:
        match action:
            case do.Send(routing_id=routing_id, envelope=envelope):
                return self._router.send(routing_id, encode(envelope))
            case do.DropBacklog(routing_id=routing_id):
                self._router.drop(routing_id)
            case do.StoreStep():
                assert self._batcher is not None, "the core acts only during run()"
                self._batcher.add(action)
            case do.ReleaseMemory():
                _release_free_memory()
            case do.Log(message=message, fields=fields):
                _logger.info(message, extra=dict(fields))
            case _:
                raise TypeError(f"no rule for {type(action).__name__}")
        return None

    def write_event_log(self) -> None:
        """Write the core's last events to the log, a line for each turn."""
        head = {"turns": len(self._event_log), "dropped_turns": self._event_log.dropped_turns, **self._about_core}
        _logger.warning("event log", extra=head)
        for record in self._event_log.records():
            _logger.warning("event log turn", extra=record)

    def liveness(self) -> Report:
        """Positive as long as the event loop, which makes this report, runs. ECS replaces a task without this answer:
        a new process would not help while a store is away."""
        return True, {"status": "ok"}

    def readiness(self) -> Report:
        """Positive until the drain begins, also while a store is away: peers are connected, and keep their sessions."""
        is_draining = self._core.is_draining
        return not is_draining, {"status": "draining" if is_draining else "ok"}

    def health(self) -> Report:
        """Positive while the stores answer and no drain has begun. The numbers are for people."""
        status = self._core.status()
        is_degraded = self._pool.is_degraded
        status_text = "draining" if status.draining else "degraded" if is_degraded else "ok"
        limiter = self._router.limiter
        refused = {
            "keys": self._authenticator.refused,
            "routing_ids": self._router.dropped,
            "silent": limiter.silenced,
            "evicted": limiter.evicted,
            "endless": limiter.endless,
        }
        return status_text == "ok", {"status": status_text, "refused": refused, **dataclasses.asdict(status)}


def _now() -> Instant:
    return Instant(time.monotonic(), time.time())


def _event(message: Inbound) -> ev.Event:
    try:
        return ev.Received(message.routing_id, message.peer, decode(message.frames))
    except ProtocolError as error:
        return ev.MalformedReceived(message.routing_id, message.peer, error)


def _failure_event(failure: SendFailure) -> ev.Event:
    return ev.SlowConsumer(failure.routing_id) if failure.is_slow else ev.PeerDisconnected(failure.routing_id)


def _release_free_memory() -> None:
    """Return empty pages. Each connection has tens of KiB in libzmq, scattered among those of others: after thousands
    have closed, glibc returns none of it unless it is requested. Other C libraries do, or lack this call.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
