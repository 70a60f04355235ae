"""ZeroMQ sockets between an agent and its managers, CURVE keys, and functions to send and receive frames.

The socket to a forwarder is made by :mod:`farcall_common.sockets`."""

from __future__ import annotations

import dataclasses
import hmac
import socket
import time
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import zmq

from farcall_common.errors import ConfigurationError, Unavailable
from farcall_endpoint.host.shared_memory import Bytes, Frame, copy_of

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

_MORE: Final = int(zmq.SNDMORE)  # a plain number: enums are slow to combine
_COPY_BYTES: Final = 64 * 1024
_HANDSHAKE_MS: Final = 10_000
_RECONNECT_MS: Final = 2_000
_FLEET_DOMAIN: Final = "fleet"
#: The agent's public key, and the key pair of its managers, in a manager's environment.
FLEET_VARIABLES: Final = ("FARCALL_FLEET_SERVER_KEY", "FARCALL_FLEET_PUBLIC_KEY", "FARCALL_FLEET_SECRET_KEY")
_EPHEMERAL_PORTS: Final = (49152, 65535)
_CONNECT_TIMEOUT_S: Final = 3.0


@dataclasses.dataclass(frozen=True)
class CurveKeys:
    """A CURVE key pair in Z85."""

    public: str
    secret: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class FleetKeys:
    """The keys of an agent and of its managers on other machines; new ones at each start of an agent."""

    agent: CurveKeys
    managers: CurveKeys


def new_curve_keys() -> CurveKeys:
    """A fresh key pair."""
    public, secret = zmq.curve_keypair()
    return CurveKeys(public.decode(), secret.decode())


def fleet_socket(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """The agent's ROUTER for its managers; not yet bound."""
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    socket.sndhwm = 0  # bounded by slots and prefetch
    socket.rcvhwm = 0
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnect replaces a broken connection that is not yet noticed
    return socket


def bind_to_network(
    socket: zmq.Socket[bytes],
    *,
    keys: FleetKeys,
    ports: tuple[int, int] | None = None,
    max_frame_bytes: int | None = None,
) -> tuple[int, ThreadAuthenticator]:
    """Let managers on other machines reach a fleet's socket, with CURVE, if they have the managers' key: the port, and
    the thread that checks keys until it is stopped. Existing bindings of the socket are kept.

    :param max_frame_bytes: a longer frame ends its connection; ZeroMQ takes memory for a frame by the length that it
        announces, even before it knows the key. None permits any length.
    :raises ConfigurationError: if no port in the range is free.
    """
    from zmq.auth.thread import ThreadAuthenticator  # it imports asyncio, which is not needed otherwise

    authenticator = ThreadAuthenticator(socket.context)
    authenticator.start()
    authenticator.configure_curve_callback(_FLEET_DOMAIN, _SingleKey(keys.managers.public))
    socket.maxmsgsize = -1 if max_frame_bytes is None else max_frame_bytes
    socket.setsockopt(zmq.ZAP_DOMAIN, _FLEET_DOMAIN.encode())
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.curve_secretkey = keys.agent.secret.encode()
    socket.curve_publickey = keys.agent.public.encode()
    socket.curve_server = True
    socket.ipv6 = True  # and IPv4
    first, last = ports or _EPHEMERAL_PORTS
    try:
        return socket.bind_to_random_port("tcp://*", min_port=first, max_port=last + 1), authenticator
    except zmq.ZMQBindError as error:
        authenticator.stop()
        raise ConfigurationError(
            f"No port between {first} and {last} is free for managers on other machines.",
            hint="Set another worker_port_range, or stop the programs that use these ports.",
        ) from error


class _SingleKey:
    """Accepts one key."""

    def __init__(self, public: str) -> None:
        self._public = public.encode()

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 - as pyzmq calls it
        return hmac.compare_digest(key, self._public)


def agent_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    *,
    address: str,
    manager_id: str,
    server_key: str = "",
    keys: CurveKeys | None = None,
) -> zmq.Socket[bytes]:
    """A manager's DEALER to its agent; with CURVE where there are keys."""
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.sndhwm = 0
    socket.rcvhwm = 0
    socket.setsockopt(zmq.RECONNECT_IVL, 5)
    socket.setsockopt(zmq.ROUTING_ID, manager_id.encode())
    if keys is not None:
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        socket.curve_publickey = keys.public.encode()
        socket.curve_secretkey = keys.secret.encode()
        socket.curve_serverkey = server_key.encode()
    socket.ipv6 = "[" in address
    socket.connect(address)
    return socket


def tcp_address(host: str, port: int) -> str:
    """``tcp://host:port``, with the brackets that an IPv6 address needs; they may be given."""
    host = host.strip("[]")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Frame], *, flags: int = 0) -> None:
    """Send a message whose frames are many and small, or few and large; faster than ``send_multipart`` for both.

    :raises zmq.ZMQError: as ``send`` does.
    """
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        socket.send(copy_of(frame), flags | (_MORE if index < last else 0), copy=len(frame) < _COPY_BYTES)


def receive_frames(socket: zmq.Socket[bytes]) -> list[Bytes]:
    """The next message, without waiting for it; large frames are not copied.

    :raises zmq.Again: if there is none.
    """
    frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
    return [frame.bytes if len(frame) < _COPY_BYTES else frame.buffer for frame in frames]


class SocketLink:
    """A ZeroMQ socket with the interface of a :class:`~farcall_endpoint.host.pipe.Pipe`. ZeroMQ's thread sends."""

    is_congested = False

    def __init__(self, socket: zmq.Socket[bytes], *, host: str = "") -> None:
        self._socket = socket
        #: Where the agent is, if that is known.
        self.host = host
        self._is_refused = False

    def fileno(self) -> int:
        """Edge-triggered: check :attr:`has_unread` before waiting for it."""
        return int(self._socket.fileno())

    @property
    def has_unread(self) -> bool:
        """Whether :meth:`receive` has something."""
        return bool(self._socket.get(zmq.EVENTS) & zmq.POLLIN)  # type: ignore[operator, arg-type]

    def receive_shared(self) -> list[Frame] | None:
        """The next message; None when the other side refuses this one's key.

        :raises BlockingIOError: if there is none now.
        """
        if self._is_refused:
            return None
        try:
            return [*receive_frames(self._socket)]
        except zmq.Again as error:
            raise BlockingIOError from error

    def send(self, frames: Sequence[Frame]) -> None:
        """Send a message. As the queue is unlimited, this would block only if the key was refused."""
        try:
            send_frames(self._socket, frames, flags=int(zmq.NOBLOCK))
        except zmq.Again:
            self._is_refused = True

    def flush(self) -> None:
        """No operation: ZeroMQ's thread sends."""

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close the socket and its context, after waiting messages were sent or ``linger_s`` has passed."""
        context = self._socket.context
        self._socket.close(linger=int(linger_s * 1000))
        context.term()


def connect_to_agent(addresses: Sequence[str], *, manager_id: str, environ: MutableMapping[str, str]) -> SocketLink:
    """Connect to the first reachable address of an agent, with the CURVE keys in the environment. The keys are removed
    from there, because tasks must not see them. Without keys (on the agent's own machine) CURVE is off.

    :raises Unavailable: if no address is reachable.
    """
    server_key, public, secret = (environ.pop(name, "") for name in FLEET_VARIABLES)
    address = find_reachable(addresses)
    link = agent_socket(
        zmq.Context(),
        address=address,
        manager_id=manager_id,
        server_key=server_key,
        keys=CurveKeys(public, secret) if server_key else None,
    )
    return SocketLink(link, host=urlsplit(address).hostname or "")


def find_reachable(addresses: Sequence[str], *, timeout_s: float = 30.0) -> str:
    """The first address (``tcp://host:port``) that accepts a connection; a single address of another kind is returned
    unchecked. A login node has several addresses, and not all are reachable from compute nodes. A name that was reached
    by IPv6 is replaced by that address, because ZeroMQ uses one of the two families.

    :raises Unavailable: if none does within ``timeout_s``; lists all of them with the reasons.
    """
    if len(addresses) == 1 and not addresses[0].startswith("tcp:"):
        return addresses[0]
    deadline = time.monotonic() + timeout_s
    while True:
        reasons = []
        for address in addresses:
            began = time.monotonic()
            try:
                parts = urlsplit(address)
                where = (parts.hostname or "", parts.port or 0)
                with socket.create_connection(where, timeout=_CONNECT_TIMEOUT_S) as connection:
                    reached, family = connection.getpeername()[0], connection.family
            except (OSError, ValueError) as error:
                reasons.append(f"{address} ({error})")
                left_s = deadline - time.monotonic()
                # Back off: the agent may be busy with many managers at once.
                time.sleep(max(0.0, min(1.0 - (time.monotonic() - began), left_s)))
            else:
                is_name = family is socket.AF_INET6 and "[" not in address
                return tcp_address(reached, where[1]) if is_name else address
        if time.monotonic() >= deadline:
            raise Unavailable(
                f"This node ({socket.gethostname()}) cannot reach the agent at {', '.join(reasons)}.",
                hint="Set engine.address to a name of the agent's machine that compute nodes can reach, and open "
                "engine.worker_port_range between them.",
            )
