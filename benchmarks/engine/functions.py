"""Functions that all systems run; a module, because most peers send functions by name."""

from __future__ import annotations

import time


def noop() -> None:
    """A no-op."""


def hello(event: dict[str, str]) -> str:
    """The function for latency in the papers."""
    return f"hello {event['name']}"


def sleep_1ms() -> None:
    """A short task of known length."""
    time.sleep(0.001)


def echo(data: bytes) -> bytes:
    """The argument, for round trips of large values."""
    return data
