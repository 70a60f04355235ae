"""What all contestants run; a module, because most peers send functions by name."""

from __future__ import annotations

import time


def noop() -> None:
    """Nothing."""


def hello(event: dict[str, str]) -> str:
    """The papers' measure of latency."""
    return f"hello {event['name']}"


def nap() -> None:
    """A short task of known length: 1 ms."""
    time.sleep(0.001)


def echo(data: bytes) -> bytes:
    """Bytes there and back."""
    return data
