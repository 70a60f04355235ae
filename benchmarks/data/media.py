"""Media: how tasks pass bytes to one another, each as a connector with ``put``, ``get`` and ``evict``.

The shared file system of the papers is a directory with their latency: Theta's Lustre, by the pieces of Sort (funcX,
2022, section 7.3): 5.32 s for 300 writes of a third of a megabyte, and 41.77 s for 300 reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, Protocol

WRITE_S: Final = 5.32 / 300
READ_S: Final = 41.77 / 300
SHAPED: Final = "shared file system of the paper"
DIRECTORY: Final = "local directory"
VALKEY: Final = "Valkey"
MEMORY: Final = "shared memory"
WORKERS: Final = "peer workers"


class Medium(Protocol):
    """Where bytes are while nobody has them. Travels to workers with the calls."""

    def put(self, data: bytes) -> Any:
        """Write bytes; their key."""

    def get(self, key: Any) -> Any:
        """The bytes, or a view of them; None if they are gone."""

    def evict(self, key: Any) -> None:
        """Delete them."""


class Shaped:
    """A medium with a latency for each operation.

    :param write_s, read_s: seconds that an operation takes at least.
    """

    def __init__(self, medium: Medium, *, write_s: float, read_s: float) -> None:
        self._medium = medium
        self._write_s = write_s
        self._read_s = read_s

    def put(self, data: bytes) -> Any:
        """See :class:`Medium`."""
        return _no_shorter_than(self._write_s, lambda: self._medium.put(data))

    def get(self, key: Any) -> Any:
        """See :class:`Medium`."""
        return _no_shorter_than(self._read_s, lambda: self._medium.get(key))

    def evict(self, key: Any) -> None:
        """See :class:`Medium`."""
        self._medium.evict(key)


class InResult:
    """Bytes travel with the results of calls, from worker to worker."""

    def put(self, data: bytes) -> bytes:
        """See :class:`Medium`."""
        return data

    def get(self, key: bytes) -> bytes:
        """See :class:`Medium`."""
        return key

    def evict(self, key: bytes) -> None:
        """See :class:`Medium`."""


def _no_shorter_than(least_s: float, operation: Callable[[], Any]) -> Any:
    ends_at = time.monotonic() + least_s
    found = operation()
    time.sleep(max(0.0, ends_at - time.monotonic()))
    return found
