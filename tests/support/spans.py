"""Spans of this process, as fixtures that a module of tests imports."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@functools.cache
def _exporter() -> InMemorySpanExporter:
    """The exporter of this process: it can set its tracer provider once only, and the calls of other modules have spans
    from then on, too."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """The spans of one test."""
    exporter = _exporter()
    exporter.clear()
    yield exporter
    exporter.clear()
