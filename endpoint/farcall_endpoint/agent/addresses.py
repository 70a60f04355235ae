"""Under which addresses other machines may reach this one."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import psutil


def own_addresses(given: str | None) -> Sequence[str]:
    """The given name or address; else this machine's name and the IPv4 addresses of its interfaces, the most likely
    first. Whoever wants to reach it tries them in turn."""
    if given is not None:
        return [given]
    active = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    addresses = [
        address.address
        for name, entries in psutil.net_if_addrs().items()
        if name in active
        for address in entries
        if address.family is socket.AF_INET and not address.address.startswith("127.")
    ]
    return [socket.gethostname(), *addresses]
