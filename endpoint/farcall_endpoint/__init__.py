"""Turns a machine into a Farcall endpoint: agent, managers and workers. :class:`Engine` is the same without a cloud."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farcall_endpoint.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    """Load the engine at its first use: workers belong to this package too, and start without it."""
    if name != "Engine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from farcall_endpoint.engine import Engine

    return Engine
