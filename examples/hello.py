"""Smallest example: ``farcall run examples/hello.py:hello world``."""

from __future__ import annotations


def hello(name: str) -> str:
    """A greeting with the name of the host."""
    import socket

    return f"hello, {name}, from {socket.gethostname()}"
