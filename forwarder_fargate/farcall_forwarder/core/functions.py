"""Cache of function bodies, bounded by their size. Bodies are opaque bytes."""

from __future__ import annotations

from collections import OrderedDict


class FunctionCache:
    """Names and bodies by function hash. The least recently used are evicted first."""

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._functions: OrderedDict[str, tuple[str, bytes]] = OrderedDict()

    def get(self, function_hash: str) -> tuple[str, bytes] | None:
        """Name and body, or None if they must be fetched."""
        found = self._functions.get(function_hash)
        if found is not None:
            self._functions.move_to_end(function_hash)
        return found

    def add(self, function_hash: str, name: str, body: bytes) -> None:
        """Add a function; others are evicted if the cache is full."""
        if function_hash not in self._functions:
            self._functions[function_hash] = (name, body)
            self._size_bytes += len(body)
        while self._size_bytes > self._limit_bytes:
            _, (_, dropped) = self._functions.popitem(last=False)
            self._size_bytes -= len(dropped)
