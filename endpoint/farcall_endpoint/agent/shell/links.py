"""Connections of the agent: a pipe to each manager on its own machine, one socket for all others, one to a forwarder.

Messages to and from managers on other machines are numbered in either direction (see
:mod:`farcall_endpoint.contracts.agent_manager`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from farcall_common.sockets import CONNECTION_LOST, client_socket
from farcall_common.wire import Envelope, decode, encode
from farcall_endpoint.agent.core.connection import Address
from farcall_endpoint.contracts import agent_manager
from farcall_endpoint.host.pipe import Pipe
from farcall_endpoint.host.shared_memory import Frame
from farcall_endpoint.host.transport import (
    CurveKeys,
    FleetKeys,
    bind_to_network,
    fleet_socket,
    receive_frames,
    send_frames,
    tcp_address,
)

_logger = logging.getLogger(__name__)

HANDSHAKE_DONE: Final = "handshake succeeded"
_CONNECTION_EVENTS: Final[Mapping[int, str]] = {zmq.EVENT_HANDSHAKE_SUCCEEDED: HANDSHAKE_DONE, **CONNECTION_LOST}
_MOST_PER_TURN: Final = 64


@dataclasses.dataclass(frozen=True)
class Network:
    """How managers on other machines reach the agent: names or addresses to try, and the ports to choose from. A longer
    frame than ``max_frame_bytes`` ends its connection; None permits any."""

    addresses: Sequence[str]
    keys: FleetKeys
    ports: tuple[int, int] | None = None
    max_frame_bytes: int | None = None


class Gap:
    """In place of a message: some messages of a manager were lost."""


@dataclasses.dataclass(frozen=True)
class Malformed:
    """In place of a message: bytes that are none."""

    reason: str


ManagerMessage = tuple[str, agent_manager.FromManager | Gap | Malformed, list[Frame]]


class Links:
    """Owns the socket, and what is waited for at the pipes.

    :param network: lets managers on other machines reach the agent. Without it there is no socket: a task on this
        machine could pretend there to be a manager.
    :param address: of a socket without keys; for simulated managers.
    :raises ConfigurationError: if no port can be had.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        poller: zmq.Poller,
        network: Network | None,
        address: str | None = None,
    ) -> None:
        self._poller = poller
        self._socket: zmq.Socket[bytes] | None = None
        self._guard = None
        #: Options for the commands of managers, and variables for their environment.
        self.options: list[str] = []
        self.variables: dict[str, str] = {}
        if address is not None:
            self._socket = fleet_socket(context)
            self._socket.bind(address)
            self.options = ["--agent", address]
        if network is not None:
            self._socket = fleet_socket(context)
            try:
                port, self._guard = bind_to_network(
                    self._socket, keys=network.keys, ports=network.ports, max_frame_bytes=network.max_frame_bytes
                )
            except BaseException:
                self._socket.close(linger=0)
                raise
            self.options = ["--agent", ",".join(tcp_address(name, port) for name in network.addresses)]
            self.variables = {
                "FARCALL_FLEET_SERVER_KEY": network.keys.agent.public,
                "FARCALL_FLEET_PUBLIC_KEY": network.keys.managers.public,
                "FARCALL_FLEET_SECRET_KEY": network.keys.managers.secret,
            }
        self._received_numbers: dict[str, int] | None = None if network is None else {}
        self._sent_numbers: dict[str, int] = {}
        self._pipes: dict[int, Pipe] = {}
        self._names: dict[int, str] = {}
        self._by_name: dict[str, Pipe] = {}
        self._congested: set[int] = set()
        if self._socket is not None:
            poller.register(self._socket, zmq.POLLIN)

    def attach(self, pipe: Pipe) -> None:
        """Also read a pipe, until its other end is closed."""
        self._pipes[pipe.fileno()] = pipe
        self._poller.register(pipe.fileno(), zmq.POLLIN)

    def detach(self, pipe: Pipe) -> None:
        """Read a pipe no more: it is going to be closed."""
        if self.is_attached(pipe):
            self._detach(pipe.fileno())

    def is_attached(self, pipe: Pipe) -> bool:
        """Whether something may still come through a pipe."""
        return pipe.fileno() in self._pipes

    def receive(self, ready: Collection[object]) -> Iterator[ManagerMessage]:
        """Messages of managers: the manager's id, its message, and the bodies.

        :param ready: what the poller found readable.
        """
        if self._socket is not None and self._socket in ready:
            yield from self._from_socket(self._socket)
        for descriptor in [descriptor for descriptor in self._pipes if descriptor in ready]:
            yield from self._from_pipe(descriptor)

    def send(self, manager_id: str, message: agent_manager.FromAgent, bodies: Sequence[Frame] = ()) -> None:
        """Send a message to a manager; lost if it cannot be reached."""
        pipe = self._by_name.get(manager_id)
        if pipe is not None:
            pipe.send(agent_manager.encode(message, bodies))
            self._watch(pipe)
            return
        if self._socket is None:  # its pipe is closed
            return
        number = 0
        if self._received_numbers is not None:
            number = self._sent_numbers[manager_id] = self._sent_numbers.get(manager_id, 0) + 1
        try:
            send_frames(self._socket, [manager_id.encode(), *agent_manager.encode(message, bodies, number=number)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            _logger.debug("manager %s cannot be reached now", manager_id)

    def is_here(self, manager_id: str) -> bool:
        """Whether a manager is on this machine, and gets files as they are."""
        return manager_id in self._by_name

    def forget(self, manager_id: str) -> None:
        """A manager was given up; its messages are numbered from 1 again, so it detects a gap."""
        self._sent_numbers.pop(manager_id, None)
        if self._received_numbers is not None:
            self._received_numbers.pop(manager_id, None)

    def close(self) -> None:
        """Close the socket. The pipes belong to their blocks."""
        for descriptor in self._pipes:
            self._poller.unregister(descriptor)
        if self._guard is not None:
            self._guard.stop()
        if self._socket is not None:
            self._poller.unregister(self._socket)
            self._socket.close(linger=0)

    def _from_socket(self, socket: zmq.Socket[bytes]) -> Iterator[ManagerMessage]:
        for _ in range(_MOST_PER_TURN):
            try:
                identity, *frames = receive_frames(socket)
            except zmq.Again:
                return
            manager_id = bytes(identity).decode(errors="replace")
            if not frames:
                yield manager_id, Malformed("it is empty"), []
            elif self._has_gap(manager_id, agent_manager.number_of(frames)):
                yield manager_id, Gap(), []
            else:
                yield manager_id, *_decoded(frames)

    def _has_gap(self, manager_id: str, number: int) -> bool:
        if self._received_numbers is None:
            return False
        expected = self._received_numbers.get(manager_id, 0) + 1
        self._received_numbers[manager_id] = number
        return number != expected

    def _from_pipe(self, descriptor: int) -> Iterator[ManagerMessage]:
        pipe = self._pipes[descriptor]
        if descriptor in self._congested:
            pipe.flush()
            self._watch(pipe)
        for _ in range(_MOST_PER_TURN):
            try:
                frames = pipe.receive_shared()
            except BlockingIOError:
                return
            except ValueError as error:
                yield self._names.get(descriptor, ""), Malformed(str(error)), []
                continue
            if frames is None:
                self._detach(descriptor)
                return
            message, bodies = _decoded(frames)
            if isinstance(message, agent_manager.Registered):
                self._names[descriptor] = message.manager_id
                self._by_name[message.manager_id] = pipe
            yield self._names.get(descriptor, ""), message, bodies

    def _detach(self, descriptor: int) -> None:
        self._poller.unregister(descriptor)
        del self._pipes[descriptor]
        self._by_name.pop(self._names.pop(descriptor, ""), None)
        self._congested.discard(descriptor)

    def _watch(self, pipe: Pipe) -> None:
        """Wait for room in a pipe, while something waits for that."""
        descriptor = pipe.fileno()
        if descriptor in self._pipes and pipe.is_congested != (descriptor in self._congested):
            self._congested.symmetric_difference_update({descriptor})
            self._poller.modify(descriptor, zmq.POLLIN | zmq.POLLOUT if pipe.is_congested else zmq.POLLIN)


def _decoded(frames: Sequence[Frame]) -> tuple[agent_manager.FromManager | Malformed, list[Frame]]:
    try:
        return agent_manager.decode_from_manager(frames)
    except ValueError as error:
        return Malformed(str(error)), []


class Uplink:
    """The socket to a forwarder with its monitor; at most one at a time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys, poller: zmq.Poller) -> None:
        self._context = context
        self._keys = keys
        self._poller = poller
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """The sockets to poll."""
        return () if self._socket is None or self._monitor is None else (self._socket, self._monitor)

    def open_socket(self, to: Address) -> None:
        """Open a socket to a forwarder.

        :raises zmq.ZMQError: if the address or the key cannot be one.
        """
        self._socket = client_socket(
            self._context, server_key=to.server_key, public_key=self._keys.public, secret_key=self._keys.secret
        )
        self._monitor = self._socket.get_monitor_socket(sum(_CONNECTION_EVENTS))
        self._monitor.linger = 0
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(to.address)

    def close(self, *, linger_ms: int = 0) -> None:
        """Close the socket, if there is one; what was sent before gets ``linger_ms`` to leave."""
        if self._socket is None or self._monitor is None:
            return
        self._poller.unregister(self._socket)
        self._poller.unregister(self._monitor)
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger=linger_ms)
        self._socket = self._monitor = None

    def send(self, envelope: Envelope) -> None:
        """Send; never blocks. Lost if the connection has ended, which :meth:`connection_events` reports next."""
        assert self._socket is not None
        with contextlib.suppress(zmq.Again):  # a socket that has lost its one connection takes nothing any more
            send_frames(self._socket, encode(envelope), flags=int(zmq.NOBLOCK))

    def receive(self) -> Iterator[Envelope]:
        """The messages that have arrived, up to a limit for one turn.

        :raises ProtocolError: if a message cannot be decoded.
        """
        for _ in range(_MOST_PER_TURN):
            if self._socket is None:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield decode(frames)

    def connection_events(self) -> Iterator[str]:
        """Events of the connection: HANDSHAKE_DONE, KEY_REFUSED, or another reason why it ended."""
        while self._monitor is not None:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            name = _CONNECTION_EVENTS.get(event["event"])
            if name is not None:
                _logger.debug("forwarder %s: %s", event["endpoint"].decode(), name)
                yield name
