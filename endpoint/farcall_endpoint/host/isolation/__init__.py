"""Isolation: what the processes of one submitter's tasks see of the endpoint, its owner and other submitters."""

from __future__ import annotations

import dataclasses
import enum
import os
from typing import Final

from farcall_common.errors import ConfigurationError


class Isolation(enum.StrEnum):
    """Separation of submitters. Each level includes those before it that the node has.

    ``NONE``: they share the worker processes. ``PROCESS``: a worker process, a home, a temporary directory, a session
    keyring and an environment for each. ``LANDLOCK``: and their tasks can reach no other files, processes, keys and
    kernel objects. ``BUBBLEWRAP``: and these do not exist for them.
    """

    NONE = "none"
    PROCESS = "process"
    LANDLOCK = "landlock"
    BUBBLEWRAP = "bubblewrap"
    #: The best that works; where that is ``PROCESS``, for tasks of the owner only.
    AUTO = "auto"


_HINT: Final = (
    "Landlock needs Linux 6.12 or later with lsm=landlock and seccomp, bubblewrap needs its package and user "
    "namespaces; `isolation: process` separates submitters without them, but not their files."
)


_OF_ROOT: Final = (
    "this endpoint runs as root, and root owns the devices and settings of the machine: run it as an ordinary user"
)


@dataclasses.dataclass(frozen=True)
class NodeIsolation:
    """Isolation of a node.

    ``level``: its name. ``landlock``, ``bubblewrap``: which of them workers of other submitters than the owner use.
    ``refusal``: why tasks of other submitters are refused, with what the node lacks; empty if they are not.
    """

    level: Isolation
    landlock: bool = False
    bubblewrap: bool = False
    refusal: str = ""


def best_of(wanted: Isolation) -> NodeIsolation:
    """The isolation of this node.

    :raises ConfigurationError: if the wanted level does not work here.
    """
    of_root = _OF_ROOT if os.geteuid() == 0 else ""
    if wanted in (Isolation.NONE, Isolation.PROCESS):
        return NodeIsolation(wanted, refusal=of_root)
    from farcall_endpoint.host.isolation import bubblewrap, landlock

    missing = {Isolation.BUBBLEWRAP: bubblewrap.missing(), Isolation.LANDLOCK: landlock.missing_alone()}  # best first
    if missing.get(wanted):
        raise ConfigurationError(f"This node cannot do isolation: {wanted} ({missing[wanted]}).", hint=_HINT)
    working = [level for level, reason in missing.items() if not reason]
    level = next(iter(working), Isolation.PROCESS) if wanted is Isolation.AUTO else wanted
    if level is Isolation.BUBBLEWRAP:
        return NodeIsolation(level, landlock=not landlock.missing(), bubblewrap=True, refusal=of_root)
    refusal = of_root or ("" if working else "; ".join(missing.values()))
    return NodeIsolation(level, landlock=level is Isolation.LANDLOCK, refusal=refusal)
