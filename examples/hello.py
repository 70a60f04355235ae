"""The smallest function there is: ``farcall run examples/hello.py:hello world``."""

from __future__ import annotations


def hello(name: str) -> str:
    """A greeting, from wherever this runs."""
    import socket

    return f"hello, {name}, from {socket.gethostname()}"
