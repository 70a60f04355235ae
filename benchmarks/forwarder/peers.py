"""Simulated endpoints and clients with real sockets, CURVE encryption and the real protocol.

Each has its own DEALER socket and key pair, as on its own machine. All of them share one thread, which waits for their
file descriptors. A simulated endpoint reports each task as finished at once.
"""

from __future__ import annotations

import collections
import dataclasses
import select
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import zmq

from farcall_common import wire
from farcall_common.sockets import client_socket
from farcall_common.store.model import ForwarderInfo, PeerKey, PeerKind
from farcall_common.store.tickets import Tickets

_HEARTBEAT_S = 30.0
_TICKET_S = 3600.0
_RESULT = b"01\nnothing"


@dataclasses.dataclass(eq=False)
class SimulatedPeer:
    """One connection. ``is_open`` means that the forwarder has answered the first message."""

    subject: str
    kind: PeerKind
    keys: tuple[bytes, bytes] = dataclasses.field(default_factory=zmq.curve_keypair)
    is_open: bool = False
    socket: zmq.Socket[bytes] | None = None

    @property
    def key(self) -> PeerKey:
        return PeerKey(self.keys[0].decode(), self.kind, self.subject)

    def send(self, message: wire.Message, *frames: bytes) -> None:
        assert self.socket is not None
        self.socket.send_multipart(wire.encode(wire.Envelope(message, frames)), zmq.NOBLOCK)

    def send_hello(self, ticket: str) -> None:
        raise NotImplementedError

    def receive(self, message: wire.Message) -> None:
        raise NotImplementedError


@dataclasses.dataclass
class Tally:
    """Number of recorded results of all endpoints, in one place because it is read after every message."""

    recorded: int = 0


@dataclasses.dataclass(eq=False)
class SimulatedEndpoint(SimulatedPeer):
    """An agent that finishes tasks at once. While ``is_holding`` it accepts tasks and does not finish them."""

    credit: int = 0
    is_holding: bool = False
    instance_id: str = dataclasses.field(default_factory=wire.new_id)
    spool_id: str = dataclasses.field(default_factory=wire.new_id)
    spool: dict[str, int] = dataclasses.field(default_factory=dict)
    starts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    tally: Tally = dataclasses.field(default_factory=Tally)

    def send_hello(self, ticket: str) -> None:
        held = tuple(wire.HeldTask(task_id=task_id, attempt=attempt) for task_id, attempt in self.spool.items())
        self.send(
            wire.Hello(
                endpoint_id=self.subject,
                ticket=ticket,
                instance_id=self.instance_id,
                spool_id=self.spool_id,
                protocol_versions=(wire.PROTOCOL_VERSION,),
                heartbeat_s=_HEARTBEAT_S,
                held=held,
            )
        )

    def receive(self, message: wire.Message) -> None:
        match message:
            case wire.Welcome(forget=forget):
                self.is_open = True
                for ref in forget:
                    self.spool.pop(ref.task_id, None)
                    self.tally.recorded += 1
                if self.credit:
                    self.send(wire.Credit(tasks=self.credit))
            case wire.RunTasks(tasks=tasks):
                self.starts.update(spec.task_id for spec in tasks if spec.task_id not in self.spool)
                self.spool |= {spec.task_id: spec.attempt for spec in tasks}
                self.send(wire.TasksAccepted(tasks=_refs((spec.task_id, spec.attempt) for spec in tasks)))
                if not self.is_holding:
                    self.finish([(spec.task_id, spec.attempt) for spec in tasks])
            case wire.ResultsRecorded(tasks=refs):
                for ref in refs:
                    self.tally.recorded += self.spool.pop(ref.task_id, None) is not None
            case wire.Refused(error=error):
                raise RuntimeError(f"refused: {error}")
            case _:
                pass

    def give_credit(self, tasks: int) -> None:
        """Give the forwarder credit for this number of tasks."""
        self.credit = tasks
        self.send(wire.Credit(tasks=tasks))

    def finish(self, tasks: Sequence[tuple[str, int]]) -> None:
        """Report success, and return the credit."""
        results = tuple(
            wire.ResultSpec(task_id=task_id, attempt=attempt, state=wire.TaskState.SUCCESS, result=index)
            for index, (task_id, attempt) in enumerate(tasks)
        )
        self.send(wire.TaskResults(results=results), *[_RESULT] * len(tasks))
        self.send(wire.Credit(tasks=len(tasks)))


@dataclasses.dataclass(eq=False)
class SimulatedClient(SimulatedPeer):
    """A client with a result stream."""

    def send_hello(self, ticket: str) -> None:
        versions = (wire.PROTOCOL_VERSION,)
        self.send(wire.OpenStream(ticket=ticket, protocol_versions=versions, heartbeat_s=_HEARTBEAT_S))

    def receive(self, message: wire.Message) -> None:
        if isinstance(message, wire.StreamOpened):
            self.is_open = True
        elif isinstance(message, wire.Refused):
            raise RuntimeError(f"refused: {message.error}")


class PeerLoop:
    """All peers of one measurement, and the thread that they share."""

    def __init__(self, tickets: Tickets) -> None:
        self._tickets = tickets
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.max_sockets = 2 * 16384
        self._poll = select.epoll()
        self._peers: dict[int, SimulatedPeer] = {}
        self._heartbeat_at = time.monotonic() + _HEARTBEAT_S / 2

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()
        self._poll.close()
        self._context.term()

    def disconnect(self, peers: Sequence[SimulatedPeer] | None = None) -> None:
        """Close the sockets of these peers, or of all, without a message."""
        closing = None if peers is None else set(map(id, peers))
        for descriptor, peer in list(self._peers.items()):
            if closing is None or id(peer) in closing:
                self._poll.unregister(descriptor)
                assert peer.socket is not None
                peer.socket.close()
                peer.socket, peer.is_open = None, False
                del self._peers[descriptor]

    def connect(self, peers: Sequence[SimulatedPeer], forwarder: ForwarderInfo) -> None:
        """Connect all at once; the handshakes happen while :meth:`until` waits."""
        expires_at = time.time() + _TICKET_S
        for peer in peers:
            public_key, secret_key = map(bytes.decode, peer.keys)
            socket = client_socket(
                self._context, server_key=forwarder.server_key, public_key=public_key, secret_key=secret_key
            )
            socket.connect(forwarder.address)
            peer.socket = socket
            peer.send_hello(self._tickets.issue(peer.key, expires_at=expires_at))
            descriptor = int(socket.getsockopt(zmq.FD))
            self._poll.register(descriptor, select.EPOLLIN)
            self._peers[descriptor] = peer
            self.drain(peer)

    def until(self, condition: Callable[[], bool], what: str, *, within_s: float) -> None:
        """Serve the peers until a condition holds.

        :raises TimeoutError: if it does not hold in time.
        """
        deadline = time.monotonic() + within_s
        for peer in list(self._peers.values()):
            self.drain(peer)  # a send may have consumed the edge of the descriptor
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {within_s} s: {what}")
            self.serve(0.05)

    def serve(self, timeout_s: float) -> None:
        """Receive and answer messages until the time is over, and send heartbeats when they are due."""
        if (now := time.monotonic()) >= self._heartbeat_at:
            self._heartbeat_at = now + _HEARTBEAT_S / 2
            for peer in list(self._peers.values()):
                if peer.is_open:
                    peer.send(wire.Heartbeat(at=time.time()))
                self.drain(peer)
        for descriptor, _ in self._poll.poll(timeout_s):
            self.drain(self._peers[descriptor])

    @staticmethod
    def drain(peer: SimulatedPeer) -> None:
        """Receive and answer the messages that have arrived."""
        assert peer.socket is not None
        while True:
            try:
                frames = peer.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            peer.receive(wire.decode(frames).message)


def _refs(tasks: Iterator[tuple[str, int]]) -> tuple[wire.TaskRef, ...]:
    return tuple(wire.TaskRef(task_id=task_id, attempt=attempt) for task_id, attempt in tasks)
