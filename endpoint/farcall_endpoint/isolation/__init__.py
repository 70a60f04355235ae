"""Isolation: what the processes of one submitter's tasks see of the endpoint, its owner and other submitters."""

from __future__ import annotations

import enum

from farcall_common.errors import ConfigurationError


class Isolation(enum.StrEnum):
    """Separation of submitters. Each level includes those before it.

    ``NONE``: they share the worker processes. ``PROCESS``: a worker process, a home, a temporary directory and an
    environment for each. ``LANDLOCK``: and their tasks can reach no other files and processes.
    """

    NONE = "none"
    PROCESS = "process"
    LANDLOCK = "landlock"
    #: ``LANDLOCK`` where it works; elsewhere ``PROCESS``, for tasks of the owner only.
    AUTO = "auto"


def best_of(wanted: Isolation) -> Isolation:
    """The level for a node.

    :raises ConfigurationError: if it is not available here.
    """
    if wanted in (Isolation.NONE, Isolation.PROCESS):
        return wanted
    from farcall_endpoint.isolation.landlock import is_available

    if is_available():
        return Isolation.LANDLOCK
    if wanted is Isolation.AUTO:
        return Isolation.PROCESS
    raise ConfigurationError(
        "This node has no Landlock, which engine.isolation requires.",
        hint="It needs Linux 6.2 or later with lsm=landlock; `isolation: process` separates submitters without it.",
    )
