"""Isolation: what the processes of one submitter's tasks see of the endpoint, its owner and other submitters."""

from __future__ import annotations

import dataclasses
import enum
from typing import Final

from farcall_common.errors import ConfigurationError


class Isolation(enum.StrEnum):
    """Separation of submitters. Each level includes those before it that the node has.

    ``NONE``: they share the worker processes. ``PROCESS``: a worker process, a home, a temporary directory and an
    environment for each. ``LANDLOCK``: and their tasks can reach no other files and processes. ``BUBBLEWRAP``: and
    these do not exist for them.
    """

    NONE = "none"
    PROCESS = "process"
    LANDLOCK = "landlock"
    BUBBLEWRAP = "bubblewrap"
    #: The best that works; where that is ``PROCESS``, for tasks of the owner only.
    AUTO = "auto"


_HINT: Final = (
    "Landlock needs Linux 6.2 or later with lsm=landlock, bubblewrap needs its package and user namespaces; "
    "`isolation: process` separates submitters without them, but not their files."
)


@dataclasses.dataclass(frozen=True)
class NodeIsolation:
    """What a node does.

    ``level``: the name of it all. ``landlock``, ``bubblewrap``: which of them workers of other submitters than the
    owner use. ``refusal``: why tasks of other submitters are refused, with what the node lacks; empty if they are not.
    """

    level: Isolation
    landlock: bool = False
    bubblewrap: bool = False
    refusal: str = ""


def best_of(wanted: Isolation) -> NodeIsolation:
    """The isolation of this node.

    :raises ConfigurationError: if the wanted level does not work here.
    """
    if wanted in (Isolation.NONE, Isolation.PROCESS):
        return NodeIsolation(wanted)
    from farcall_endpoint.isolation import bubblewrap, landlock

    missing = {Isolation.BUBBLEWRAP: bubblewrap.missing(), Isolation.LANDLOCK: landlock.missing()}  # the best first
    if missing.get(wanted):
        raise ConfigurationError(f"This node cannot do isolation: {wanted} ({missing[wanted]}).", hint=_HINT)
    working = [level for level, reason in missing.items() if not reason]
    level = next(iter(working), Isolation.PROCESS) if wanted is Isolation.AUTO else wanted
    return NodeIsolation(
        level,
        landlock=Isolation.LANDLOCK in working,
        bubblewrap=level is Isolation.BUBBLEWRAP,
        refusal="" if working else "; ".join(missing.values()),
    )
