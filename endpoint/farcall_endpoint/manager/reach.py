"""Which of an agent's addresses can be reached from this node. A login node has several, and not all lead to it."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from farcall_common.errors import Unavailable

_TRY_S: Final = 3.0


def find_reachable(addresses: Sequence[str], *, patience_s: float = 30.0) -> str:
    """The first address (``tcp://host:port``) that takes a connection; of other kinds there is only one.

    :raises Unavailable: if none does for so long; names them all, and why.
    """
    if len(addresses) == 1 and not addresses[0].startswith("tcp:"):
        return addresses[0]
    deadline = time.monotonic() + patience_s
    while True:
        reasons = []
        for address in addresses:
            parts = urlsplit(address)
            began = time.monotonic()
            try:
                socket.create_connection((parts.hostname or "", parts.port or 0), timeout=_TRY_S).close()
            except OSError as error:
                reasons.append(f"{address} ({error})")
                left_s = deadline - time.monotonic()
                time.sleep(max(0.0, min(1.0 - (time.monotonic() - began), left_s)))  # it may be busy: not all at once
            else:
                return address
        if time.monotonic() >= deadline:
            raise Unavailable(
                f"This node ({socket.gethostname()}) cannot reach the agent at {', '.join(reasons)}.",
                hint="Set engine.address to a name of the agent's machine that compute nodes can reach, and open "
                "engine.worker_port_range between them.",
            )
