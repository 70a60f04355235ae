"""Inbox of a worker: packets of its manager, also those that came while a call waited for values of other workers."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

from farcall_endpoint.shared_memory import Bytes, FrameList, SharedBytes
from farcall_endpoint.worker.channel import Channel, Order, Packet, Peer, Sync, Synced
from farcall_endpoint.worker.edges import Edges
from farcall_endpoint.worker.inputs import Recalled


class Inbox:
    """One per worker."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.edges = Edges(channel.fileno())
        self._kept: collections.deque[tuple[Packet, Bytes | FrameList]] = collections.deque()

    def next(self) -> tuple[Packet, Bytes | FrameList] | None:
        """The next packet; None if the manager is gone."""
        if self._kept:
            return self._kept.popleft()
        while (received := self.channel.receive()) is not None and isinstance(received[0], Peer):
            self._connect(*received)
        return received

    def sync(self) -> None:
        """Answer a Sync: nothing that came before is started any more."""
        self.edges.forget()
        self.channel.send(Synced())

    def arrived(self, order: Order) -> Callable[[], Sequence[Bytes]] | None:
        """What waits for the values that other workers send for a call; None if they send none. It takes the call's
        claim, or raises :class:`Recalled`."""
        if order.call is None:
            return None
        keys = [(order.task_id, number) for number, each in enumerate(order.call.inputs) if each.awaited]
        return (lambda: self._wait(keys)) if keys else None

    def _wait(self, keys: Sequence[tuple[str, int]]) -> Sequence[Bytes]:
        while (values := self.edges.wait(keys)) is None:
            received = self.channel.receive()
            if received is None:
                raise Recalled
            if isinstance(received[0], Peer):
                self._connect(*received)
                continue
            self._kept.append(received)
            if isinstance(received[0], Sync):
                raise Recalled
        if not self.channel.claim():
            raise Recalled
        return values

    def _connect(self, packet: Packet, body: Bytes | FrameList) -> None:
        assert isinstance(packet, Peer)
        frames = body.frames if isinstance(body, FrameList) else ()
        memories = [frame.memory for frame in frames if isinstance(frame, SharedBytes)]
        self.edges.connect(packet.number, memories, first=packet.first)
