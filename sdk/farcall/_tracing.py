"""Spans of calls, where the program makes spans.

Whoever has a span, or wants some, has loaded OpenTelemetry: for others it is not imported, installed or not.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from farcall._future import ComputeFuture

_LOADED: Final = "opentelemetry.trace"


def trace_call(future: ComputeFuture[Any], function_name: str) -> None:
    """Let a span begin with this call, below the current one, and end with its future."""
    if _LOADED in sys.modules:
        from farcall._spans import trace_call as begin

        begin(future, function_name)


def current_traceparent() -> str | None:
    """The current span, as it travels with a task; None if there is none."""
    if _LOADED not in sys.modules:
        return None
    from farcall._spans import traceparent

    return traceparent()
