"""Inbox of a worker: packets of its manager, including packets that arrived while a task was running.

The main thread reads packets between tasks. While a task has calls under way, a thread of
:mod:`~farcall_endpoint.worker.nested` does, and keeps orders for later.
"""

from __future__ import annotations

import _thread
import collections
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from farcall_common import running
from farcall_common.payload.shipped_modules import ShippedModules
from farcall_common.running import RunningTask
from farcall_endpoint.contracts.manager_worker import MALFORMED, CallOrder, Channel, Order, Packet, Peer, Sync, Synced
from farcall_endpoint.host.shared_memory import Bytes, FrameList, SharedBytes
from farcall_endpoint.worker.current_task import CurrentTask
from farcall_endpoint.worker.edges import Edges
from farcall_endpoint.worker.inputs import Recalled
from farcall_endpoint.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from farcall_endpoint.worker.nested import CallsOfTask, Sent
    from farcall_endpoint.worker.places import TaskPlaces


class Received(NamedTuple):
    """A packet with its body; ``syncs``: the number of Sync packets that were answered before it came."""

    packet: Packet
    body: Bytes | FrameList
    syncs: int


class Inbox:
    """One per worker. Owns the channel."""

    def __init__(self, channel: Channel, *, settings: WorkerSettings | None = None) -> None:
        self.channel = channel
        self._settings = WorkerSettings() if settings is None else settings
        # Now: a task may change both.
        self._root = os.getcwd()  # noqa: PTH109 - in each worker: pathlib takes longer
        self._worker_id = os.environ.get("FARCALL_WORKER_ID", "")
        self.edges = Edges(channel.fileno())
        self.syncs = 0
        """Number of Sync packets answered. No order that came before the last Sync may be started."""
        self.order: Order | None = None
        """The running task."""
        self.calls: CallsOfTask | None = None
        """Calls of the running task, if it has made any."""
        self.failure: BaseException | None = None
        """Why a packet or a value could not be received during a task: the worker ends after it."""
        self.modules: tuple[Order, ShippedModules] | None = None
        """Modules of the last task that came with modules."""
        self._kept: collections.deque[Received] = collections.deque()
        self._pid = os.getpid()
        self._lock = _thread.allocate_lock()
        self._sent: Sent | None = None
        self._current: CurrentTask | None = None  # if the task has asked for it
        self.places: TaskPlaces | None = None
        """Directories of the last task, if it has asked for any."""

    def next(self) -> Received | None:
        """Return the next packet; None if the manager is gone.

        :raises BaseException: the failure to receive an earlier packet, whose contents would be missing.
        """
        while True:
            if self.failure is not None:
                raise self.failure
            if self._kept:
                received = self._kept.popleft()
            elif (packet := self.channel.receive()) is None:
                return None
            else:
                received = Received(*packet, self.syncs)
            if type(received.packet) is not Peer:
                return received
            self._connect(received.packet, received.body)

    def keep(self, packet: Packet, body: Bytes | FrameList) -> None:
        """Keep a packet that came while a task runs, for :meth:`next`."""
        self._kept.append(Received(packet, body, self.syncs))

    def sync(self) -> None:
        """Answer a Sync: orders that came before are not started any more."""
        self.syncs += 1
        self.edges.forget()
        self.channel.send(Synced())

    def buffer(self, size: int) -> memoryview:
        """Memory for a value of the running task."""
        return self.edges.buffer(size)

    def arrived(self, task_id: str, call: CallOrder) -> Callable[[], Sequence[Bytes]] | None:
        """What waits for the values that other workers send for a call; None if they send none. It takes the call's
        claim, or raises :class:`Recalled`."""
        keys = [(task_id, number) for number, each in enumerate(call.inputs) if each.awaited]
        return (lambda: self._wait(keys)) if keys else None

    def _wait(self, keys: Sequence[tuple[str, int]]) -> Sequence[Bytes]:
        try:
            while (values := self.edges.wait(keys)) is None:
                received = self.channel.receive()
                if received is None:
                    raise Recalled
                packet, body = received
                if isinstance(packet, Peer):
                    self._connect(packet, body)
                elif isinstance(packet, Sync):
                    self.sync()
                    raise Recalled
                else:
                    self.keep(packet, body)
        except (OSError, *MALFORMED) as error:
            self.failure = error
            raise Recalled from error
        if not self.channel.claim():
            raise Recalled
        return values

    def _connect(self, packet: Peer, body: Bytes | FrameList) -> None:
        frames = body.frames if isinstance(body, FrameList) else ()
        memories = [frame.memory for frame in frames if isinstance(frame, SharedBytes)]
        self.edges.connect(packet.number, memories, first=packet.first)

    def end_task(self) -> None:
        """The function of the task has ended. What it has called is not waited for."""
        with self._lock:  # a thread of the task may ask for it now
            current, calls, self.order, self._current, self.calls = self._current, self.calls, None, None, None
            if current is not None:
                running.forget()
        if current is not None:
            current.end()
        if calls is not None:
            calls.end()

    def offer(self) -> None:
        """Let the functions of tasks make calls, and say how far they are."""
        running.offer(self._find)

    def _find(self) -> RunningTask:
        """The running task, which is remembered until it has ended."""
        if os.getpid() != self._pid:
            raise running.not_in_this_process()
        with self._lock:
            order, current = self.order, self._current
            if order is None:  # a thread of the task may outlive its function
                raise running.has_ended()
            if current is None or current.order is not order:
                current = self._current = CurrentTask(
                    self.channel, order, lambda: self._calls(order), lambda: self._places(order)
                )
            task = RunningTask(current)
            running.remember(task)
            return task

    def _places(self, order: Order) -> TaskPlaces:
        """The directories of a task."""
        with self._lock:
            if self.order is not order:
                raise running.has_ended()
            if self.places is None:
                # Here, not at the top: most tasks ask for none.
                from farcall_endpoint.worker.places import TaskPlaces

                self.places = TaskPlaces(order, root=self._root, worker_id=self._worker_id, settings=self._settings)
            return self.places

    def remove_scratch(self) -> None:
        """Remove the scratch directory of the last task, after its result was sent."""
        places, self.places = self.places, None
        if places is not None:
            places.remove_scratch()

    def _calls(self, order: Order) -> CallsOfTask:
        """What makes the calls of a task."""
        if os.getpid() != self._pid:
            raise running.not_in_this_process()
        with self._lock:
            calls = self.calls
            if self.order is not order:
                raise running.has_ended()
            if calls is None or calls.order is not order:
                # Here, not at the top: most tasks make no calls, and it takes a part of a worker's start.
                from farcall_endpoint.worker.nested import CallsOfTask, Sent

                modules = self.modules[1] if self.modules is not None and self.modules[0] is order else None
                if self._sent is None:
                    self._sent = Sent()
                calls = self.calls = CallsOfTask(self.channel, order, self._sent, self, modules)
            return calls
