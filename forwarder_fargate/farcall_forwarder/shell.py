"""Between the core and the world: events are handed in, what comes out is performed. Owns the event loop's time."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from farcall_common.errors import ProtocolError
from farcall_common.store.model import ForwarderInfo, SharedEnds
from farcall_common.wire import decode, encode, new_id
from farcall_forwarder.adapters.memory import release_free_memory
from farcall_forwarder.adapters.pool import StorePool
from farcall_forwarder.adapters.router import Inbound, Router, Trouble
from farcall_forwarder.adapters.together import Together
from farcall_forwarder.adapters.zap import Authenticator
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.forwarder import Forwarder
from farcall_forwarder.core.policy import Instant

__all__ = ["Chance", "Shell"]

#: Messages that are taken from the socket before anything is done about them.
_BATCH: Final = 500
#: Steps that many endpoints have at once, and how many of them are done in one.
_TOGETHER: Final[Mapping[type[do.StoreStep], int]] = {
    do.ClaimEndpoint: 64,
    do.RecordGeneration: 256,
    do.ReadLeases: 64,
    do.RestoreQueue: 64,
    do.ReadTasks: 64,
    do.SetPresence: 256,
    do.LeaseTasks: 64,
    do.ReadCancels: 64,
    do.KeepEndpoint: 64,
}
#: A ROUTER does not say which peer can take more; those that could not are tried again this often.
_BACKLOG_RETRY_S: Final = 0.005
#: After a drain, store steps that are still under way have this long.
_LAST_STEPS_S: Final = 5.0

_logger = logging.getLogger(__name__)


class Chance:
    """Ids and random spreads."""

    def new_id(self) -> str:
        return new_id()

    def fraction(self) -> float:
        return random.random()  # noqa: S311 -- spreads reconnects, guards nothing


class Shell:
    """Runs a core on a socket and a pool of threads. Everything but the pool's steps happens in one event loop."""

    def __init__(self, core: Forwarder, router: Router, authenticator: Authenticator, pool: StorePool) -> None:
        self._core = core
        self._router = router
        self._authenticator = authenticator
        self._pool = pool
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._steps: set[asyncio.Task[None]] = set()
        self._together = {kind: Together(pool.perform_together, limit=limit) for kind, limit in _TOGETHER.items()}
        self._rearm = asyncio.Event()
        self._has_backlog = asyncio.Event()
        self._deadline = 0.0
        self._group: asyncio.TaskGroup | None = None
        self._is_over = False

    @property
    def info(self) -> ForwarderInfo:
        """How this forwarder is announced."""
        return self._core.info(_now())

    async def run(self) -> None:
        """Serve until the core has drained. An error in any part ends all of them."""
        async with asyncio.TaskGroup() as group:
            loops = (
                self._authenticator.run(),
                self._router.door.run(),
                self._serve_peers(),
                self._serve_backlogs(),
                self._keep_time(),
                *(together.run(self._handle) for together in self._together.values()),
            )
            self._group = group
            tasks = [group.create_task(loop) for loop in loops]
            try:
                await self._end
                settling = [group.create_task(together.settle()) for together in self._together.values()]
                tasks += settling
                await asyncio.wait([*self._steps, *settling], timeout=_LAST_STEPS_S)
            finally:
                self._is_over = True  # what is heard from now on begins nothing
            for task in (*tasks, *self._steps):
                task.cancel()

    # -- what happens --------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Send all peers away, then end; at once when nothing has begun."""
        if self._group is not None:
            self._handle([ev.DrainOrdered()])
        elif not self._end.done():
            self._end.set_result(None)

    def woken(self, endpoint_ids: Sequence[str]) -> None:
        """Endpoints have work."""
        self._handle([ev.Woken(endpoint_ids)])

    def heard(self, shared: Sequence[SharedEnds]) -> None:
        """Other forwarders have recorded ends."""
        self._handle([ev.EndsHeard(shared)])

    def cut_off(self) -> None:
        """Other forwarders may have said something unheard."""
        self._handle([ev.CutOff()])

    def fail(self, error: BaseException) -> None:
        """Something that must not die has died."""
        if not self._end.done():
            self._end.set_exception(error)

    async def _serve_peers(self) -> None:
        while True:
            if batch := self._router.receive(limit=_BATCH):
                self._handle([_event(message) for message in batch])
                await asyncio.sleep(0)  # the others' turn
            else:
                await self._router.readiness.wait()

    async def _serve_backlogs(self) -> None:
        while True:
            await self._has_backlog.wait()
            await asyncio.sleep(_BACKLOG_RETRY_S)
            self._handle(list(map(_trouble_event, self._router.retry())))
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

    # -- what is done --------------------------------------------------------------------------------------------------

    def _handle(self, events: Iterable[ev.Event]) -> None:
        """Hand events to the core and perform what it answers; troubles in doing so are events too."""
        if self._is_over:
            return
        while events:
            actions = self._core.handle(events, _now())
            events = [_trouble_event(trouble) for action in actions if (trouble := self._act(action))]
        self._router.readiness.poke()
        if self._router.has_backlog:
            self._has_backlog.set()
        if self._core.next_deadline() < self._deadline:
            self._rearm.set()
        if self._core.is_drained and not self._end.done():
            self._end.set_result(None)

    def _act(self, action: do.Action) -> Trouble | None:
        match action:
            case do.Send(routing_id=routing_id, envelope=envelope):
                return self._router.send(routing_id, encode(envelope))
            case do.DropBacklog(routing_id=routing_id):
                self._router.drop(routing_id)
            case do.StoreStep() if together := self._together.get(type(action)):
                together.add(action)
            case do.StoreStep():
                assert self._group is not None, "nothing happens before run() does"
                task = self._group.create_task(self._step(action))
                self._steps.add(task)
                task.add_done_callback(self._steps.discard)
            case do.ReleaseMemory():
                release_free_memory()
            case do.Note(message=message, fields=fields):
                _logger.info(message, extra=dict(fields))
            case _:
                raise TypeError(f"no rule for {action}")
        return None

    async def _step(self, step: do.StoreStep) -> None:
        if (event := await self._pool.perform(step)) is not None:
            self._handle([event])

    def health(self) -> tuple[bool, Mapping[str, Any]]:
        """Whether all is well, and numbers."""
        status = self._core.status()
        is_degraded = self._pool.is_degraded
        word = "draining" if status.draining else "degraded" if is_degraded else "ok"
        door = self._router.door
        refused = {
            "keys": self._authenticator.refused,
            "routing_ids": self._router.dropped,
            "silent": door.silenced,
            "crowded_out": door.crowded_out,
            "endless": door.endless,
        }
        return word == "ok", {"status": word, "refused": refused, **dataclasses.asdict(status)}


def _now() -> Instant:
    return Instant(time.monotonic(), time.time())


def _event(message: Inbound) -> ev.Event:
    try:
        return ev.Received(message.routing_id, message.peer, decode(message.frames))
    except ProtocolError as error:
        return ev.Garbled(message.routing_id, message.peer, error)


def _trouble_event(trouble: Trouble) -> ev.Event:
    return ev.PeerBehind(trouble.routing_id) if trouble.is_behind else ev.PeerGone(trouble.routing_id)
