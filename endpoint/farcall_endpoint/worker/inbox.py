"""Inbox of a worker: packets of its manager, also of those that came while a task was running.

The main thread reads packets between tasks. While a task has calls under way, a thread of
:mod:`~farcall_endpoint.worker.nested` does, and keeps orders for later.
"""

from __future__ import annotations

import _thread
import collections
import os
from typing import TYPE_CHECKING, NamedTuple

from farcall_common import running
from farcall_endpoint.shared_memory import Bytes, FrameList
from farcall_endpoint.worker.channel import Channel, Order, Packet, Synced

if TYPE_CHECKING:
    from farcall_endpoint.worker.nested import CallsOfTask, Sent


class Received(NamedTuple):
    """A packet with its body; ``syncs``: the number of Sync packets that were answered before it came."""

    packet: Packet
    body: Bytes | FrameList
    syncs: int


class Inbox:
    """One per worker. Owns the channel."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.syncs = 0
        """Of orders that came before the last Sync, none may be started."""
        self.order: Order | None = None
        """The task that runs."""
        self.calls: CallsOfTask | None = None
        """Of the running task, if it has asked for them."""
        self._kept: collections.deque[Received] = collections.deque()
        self._pid = os.getpid()
        self._lock = _thread.allocate_lock()
        self._sent: Sent | None = None

    def next(self) -> Received | None:
        """The next packet; None if the manager is gone."""
        if self._kept:
            return self._kept.popleft()
        received = self.channel.receive()
        return None if received is None else Received(*received, self.syncs)

    def keep(self, packet: Packet, body: Bytes | FrameList) -> None:
        """Keep a packet that came while a task runs, for :meth:`next`."""
        self._kept.append(Received(packet, body, self.syncs))

    def sync(self) -> None:
        """Answer a Sync: orders that came before are not started any more."""
        self.syncs += 1
        self.channel.send(Synced())

    def end_calls(self) -> None:
        """The function of the task has ended. What it has called is not waited for."""
        calls, self.calls = self.calls, None
        if calls is not None:
            calls.end()

    def offer(self) -> None:
        """Let the functions of tasks make calls."""
        running.offer(self._caller)

    def _caller(self) -> CallsOfTask:
        if os.getpid() != self._pid:
            raise running.not_in_this_process()
        with self._lock:
            order, calls = self.order, self.calls
            if order is None:  # a thread of the task may outlive its function
                raise running.has_ended()
            if calls is None or calls.order is not order:
                # Here, not at the top: most tasks make no calls, and it takes a part of a worker's start.
                from farcall_endpoint.worker.nested import CallsOfTask, Sent

                if self._sent is None:
                    self._sent = Sent()
                calls = self.calls = CallsOfTask(self, order, self._sent)
            return calls
