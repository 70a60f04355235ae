"""Turns a machine into a Farcall endpoint: agent, managers and workers. :class:`Engine` is the same without a cloud."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from farcall_common import later

if TYPE_CHECKING:
    from farcall_common.chains import chain
    from farcall_common.file_arguments import File
    from farcall_common.graph_builder import Graph
    from farcall_endpoint.engine import Engine

__all__ = ["Engine", "File", "Graph", "chain"]

#: Loaded at the first use: workers belong to this package too, and start without them.
_PLACES: Final = {
    "Engine": "farcall_endpoint.engine",
    "File": "farcall_common.file_arguments",
    "Graph": "farcall_common.graph_builder",
    "chain": "farcall_common.chains",
}


def __getattr__(name: str) -> Any:
    return later(__name__, _PLACES, name)
