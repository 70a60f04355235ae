"""Memory trimming: returns the allocator's unused memory to the operating system."""

from __future__ import annotations

import ctypes


def release_free_memory() -> None:
    """Return empty pages. Each connection has tens of KiB in libzmq, scattered among those of others: after thousands
    have closed, glibc returns none of it by itself. Other C libraries do, or have no such call.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
