"""A manager's connection to an agent on another machine. Imported only for such an agent: it loads ZeroMQ."""

from __future__ import annotations

import socket
import time
from collections.abc import MutableMapping, Sequence
from typing import Final
from urllib.parse import urlsplit

import zmq

from farcall_common.errors import Unavailable
from farcall_endpoint.transport import CurveKeys, SocketLink, agent_socket

_CONNECT_TIMEOUT_S: Final = 3.0


def connect(addresses: Sequence[str], *, manager_id: str, environ: MutableMapping[str, str]) -> SocketLink:
    """Connect to the first reachable address of an agent, with the CURVE keys in the environment. The keys are removed
    from there, because tasks must not see them. Without keys (on the agent's own machine) CURVE is off.

    :raises Unavailable: if no address is reachable.
    """
    names = ("FARCALL_FLEET_SERVER_KEY", "FARCALL_FLEET_PUBLIC_KEY", "FARCALL_FLEET_SECRET_KEY")
    server_key, public, secret = (environ.pop(name, "") for name in names)
    link = agent_socket(
        zmq.Context(),
        address=find_reachable(addresses),
        manager_id=manager_id,
        server_key=server_key,
        keys=CurveKeys(public, secret) if server_key else None,
    )
    return SocketLink(link)


def find_reachable(addresses: Sequence[str], *, timeout_s: float = 30.0) -> str:
    """The first address (``tcp://host:port``) that accepts a connection; a single address of another kind is returned
    unchecked. A login node has several addresses, and not all are reachable from compute nodes.

    :raises Unavailable: if none does within ``timeout_s``; lists all of them with the reasons.
    """
    if len(addresses) == 1 and not addresses[0].startswith("tcp:"):
        return addresses[0]
    deadline = time.monotonic() + timeout_s
    while True:
        reasons = []
        for address in addresses:
            parts = urlsplit(address)
            began = time.monotonic()
            try:
                socket.create_connection((parts.hostname or "", parts.port or 0), timeout=_CONNECT_TIMEOUT_S).close()
            except OSError as error:
                reasons.append(f"{address} ({error})")
                left_s = deadline - time.monotonic()
                # Back off: the agent may be busy with many managers at once.
                time.sleep(max(0.0, min(1.0 - (time.monotonic() - began), left_s)))
            else:
                return address
        if time.monotonic() >= deadline:
            raise Unavailable(
                f"This node ({socket.gethostname()}) cannot reach the agent at {', '.join(reasons)}.",
                hint="Set engine.address to a name of the agent's machine that compute nodes can reach, and open "
                "engine.worker_port_range between them.",
            )
