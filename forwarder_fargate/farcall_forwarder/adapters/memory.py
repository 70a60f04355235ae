"""Memory that the allocator keeps although nobody uses it goes back to the machine."""

from __future__ import annotations

import ctypes

__all__ = ["release_free_memory"]


def release_free_memory() -> None:
    """Return pages that hold nothing. Each connection has tens of KiB in libzmq, strewn among those of others: when
    thousands have left, glibc gives none of it back by itself. Other C libraries do, or have no such call.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
