"""A manager's way to an agent on another machine. Imported only where there is one: it brings ZeroMQ along."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import zmq

from farcall_endpoint.manager.reach import find_reachable
from farcall_endpoint.transport import CurveKeys, SocketLink, agent_socket


def connect(addresses: Sequence[str], *, manager_id: str, environ: MutableMapping[str, str]) -> SocketLink:
    """Connect to the first of an agent's addresses that can be reached, with the keys in the environment, from which
    they are taken away: tasks need not see them. Without keys (on the agent's own machine) there is no CURVE.

    :raises Unavailable: if none can be reached.
    """
    names = ("FARCALL_FLEET_SERVER_KEY", "FARCALL_FLEET_PUBLIC_KEY", "FARCALL_FLEET_SECRET_KEY")
    server_key, public, secret = (environ.pop(name, "") for name in names)
    socket = agent_socket(
        zmq.Context(),
        address=find_reachable(addresses),
        manager_id=manager_id,
        server_key=server_key,
        keys=CurveKeys(public, secret) if server_key else None,
    )
    return SocketLink(socket)
