"""The span of whoever submitted a task, as the parent of the spans that the task makes.

A worker makes no spans and exports none: what a function does with the context is up to the function. Without
OpenTelemetry in the worker's environment only the variable is set, which programs that the task starts may read.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, Final

from farcall_endpoint.worker.variables import Variables

#: As OpenTelemetry's specification names it for programs that are started.
_VARIABLE: Final = "TRACEPARENT"


@contextlib.contextmanager
def below(traceparent: str, variables: Variables) -> Iterator[None]:
    """Run what is inside below that span."""
    former = os.environ.get(_VARIABLE)  # of whoever started the endpoint
    variables.set(_VARIABLE, traceparent)
    attach, detach = _switch()
    token = attach(traceparent)
    try:
        yield
    finally:
        detach(token)
        if former is None:
            os.environ.pop(_VARIABLE, None)
        else:
            variables.set(_VARIABLE, former)


@functools.cache
def _switch() -> tuple[Callable[[str], Any], Callable[[Any], None]]:
    """What makes a span the current one, and what ends that. Loaded by the first traced task, and never by others."""
    try:
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:
        return lambda _: None, lambda _: None
    extract = TraceContextTextMapPropagator().extract
    return lambda traceparent: context.attach(extract({"traceparent": traceparent})), context.detach
