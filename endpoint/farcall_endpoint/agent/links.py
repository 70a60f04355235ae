"""The ways between an agent and its managers: a pipe to each on its own machine, one socket for all others.

Messages over the network are numbered in either direction (see :mod:`farcall_endpoint.protocol`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import Final

import zmq

from farcall_endpoint import protocol
from farcall_endpoint.pipe import Pipe
from farcall_endpoint.shared_memory import Bytes, Frame
from farcall_endpoint.transport import FleetKeys, bind_to_network, fleet_socket, receive_frames, send_frames

_logger = logging.getLogger(__name__)

_MOST_PER_TURN: Final = 64


@dataclasses.dataclass(frozen=True)
class Network:
    """How managers on other machines reach the agent: names or addresses to try, and the ports to choose from."""

    addresses: Sequence[str]
    keys: FleetKeys
    ports: tuple[int, int] | None = None


class Gap:
    """In place of a message: some of a manager's were lost on the way."""


Heard = tuple[str, protocol.FromManager | Gap, list[Bytes]]


class Links:
    """Owns the socket, and what is waited for at the pipes.

    :param address: of the socket, for managers on this machine that have no pipe.
    :param network: lets managers on other machines reach it too.
    :raises ConfigurationError: if no port for that can be had.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        address: str,
        poller: zmq.Poller,
        network: Network | None,
    ) -> None:
        self._poller = poller
        self._socket = fleet_socket(context)
        self._socket.bind(address)
        self._guard = None
        #: What the commands of managers need to be told, and their environment.
        self.options = ["--agent", address]
        self.variables: dict[str, str] = {}
        if network is not None:
            try:
                port, self._guard = bind_to_network(self._socket, keys=network.keys, ports=network.ports)
            except BaseException:
                self._socket.close(linger=0)
                raise
            self.options = ["--agent", ",".join(f"tcp://{name}:{port}" for name in network.addresses)]
            self.variables = {
                "FARCALL_FLEET_SERVER_KEY": network.keys.agent.public,
                "FARCALL_FLEET_PUBLIC_KEY": network.keys.managers.public,
                "FARCALL_FLEET_SECRET_KEY": network.keys.managers.secret,
            }
        self._heard: dict[str, int] | None = None if network is None else {}
        self._said: dict[str, int] = {}
        self._pipes: dict[int, Pipe] = {}
        self._names: dict[int, str] = {}
        self._by_name: dict[str, Pipe] = {}
        self._congested: set[int] = set()
        poller.register(self._socket, zmq.POLLIN)

    def attach(self, pipe: Pipe) -> None:
        """Listen to a pipe as well, until nobody is at its other end."""
        self._pipes[pipe.fileno()] = pipe
        self._poller.register(pipe.fileno(), zmq.POLLIN)

    def is_attached(self, pipe: Pipe) -> bool:
        """Whether something may still come through a pipe."""
        return pipe.fileno() in self._pipes

    def receive(self, ready: Collection[object]) -> Iterator[Heard]:
        """What managers say: the manager's id, its message, and the bodies of that.

        :param ready: what the poller found readable.
        """
        if self._socket in ready:
            yield from self._from_socket()
        for descriptor in [descriptor for descriptor in self._pipes if descriptor in ready]:
            yield from self._from_pipe(descriptor)

    def send(self, manager_id: str, message: protocol.FromAgent, bodies: Sequence[Frame] = ()) -> None:
        """Say something to a manager; lost if it cannot be reached."""
        pipe = self._by_name.get(manager_id)
        if pipe is not None:
            pipe.send(protocol.encode(message, bodies))
            self._watch(pipe)
            return
        number = 0
        if self._heard is not None:
            number = self._said[manager_id] = self._said.get(manager_id, 0) + 1
        try:
            send_frames(self._socket, [manager_id.encode(), *protocol.encode(message, bodies, number=number)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            _logger.debug("manager %s cannot be reached now", manager_id)

    def forget(self, manager_id: str) -> None:
        """A manager is not believed any more; its messages are numbered anew, so it will notice a gap."""
        self._said.pop(manager_id, None)
        if self._heard is not None:
            self._heard.pop(manager_id, None)

    def close(self) -> None:
        """Give everything back but the pipes, which belong to their blocks."""
        self._poller.unregister(self._socket)
        for descriptor in self._pipes:
            self._poller.unregister(descriptor)
        if self._guard is not None:
            self._guard.stop()
        self._socket.close(linger=0)

    def _from_socket(self) -> Iterator[Heard]:
        for _ in range(_MOST_PER_TURN):
            try:
                identity, *frames = receive_frames(self._socket)
            except zmq.Again:
                return
            manager_id = bytes(identity).decode()
            if self._has_gap(manager_id, protocol.number_of(frames)):
                yield manager_id, Gap(), []
            else:
                yield manager_id, *protocol.decode_from_manager(frames)

    def _has_gap(self, manager_id: str, number: int) -> bool:
        if self._heard is None:
            return False
        expected = self._heard.get(manager_id, 0) + 1
        self._heard[manager_id] = number
        return number != expected

    def _from_pipe(self, descriptor: int) -> Iterator[Heard]:
        pipe = self._pipes[descriptor]
        if descriptor in self._congested:
            pipe.flush()
            self._watch(pipe)
        for _ in range(_MOST_PER_TURN):
            try:
                frames = pipe.receive()
            except BlockingIOError:
                return
            if frames is None:
                self._detach(descriptor)
                return
            message, bodies = protocol.decode_from_manager(frames)
            if isinstance(message, protocol.Registered):
                self._names[descriptor] = message.manager_id
                self._by_name[message.manager_id] = pipe
            yield self._names[descriptor], message, bodies

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
