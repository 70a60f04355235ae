"""Environment variables that change with every task, in memory that is used again.

``os.environ[...] = ...`` calls ``setenv``, and glibc never frees a value given to it: a worker would grow with each
task that it runs. ``putenv`` takes the caller's own memory instead, so each variable gets one block, which is written
over.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Final

_LEAST_BYTES: Final = 128


class Variables:
    """The variables that a worker sets for its tasks. Once set, they are used by :data:`os.environ`, by C, and by the
    programs that a task starts."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.malloc.restype = ctypes.c_void_p
        libc.malloc.argtypes = (ctypes.c_size_t,)
        self._malloc = libc.malloc
        # Called for every task: without the look at errno, which takes as long as the call.
        self._putenv = ctypes.CDLL(None).putenv
        self._blocks: dict[str, tuple[bytes, Any]] = {}  # "NAME=", and memory as an array of characters

    def set(self, name: str, value: str) -> None:
        """Set a variable. A value ends at its first NUL, as C would read it."""
        encoded = os.fsencode(value)
        if 0 in encoded:
            encoded = encoded.partition(b"\0")[0]
        start, block = self._blocks.get(name, (b"", b""))
        if len(start) + len(encoded) >= len(block):
            start, block = self._make_block(name, len(encoded))
        block.value = start + encoded
        # Each time: user code may have removed the variable, or put another block in its place.
        if self._putenv(block) != 0:
            raise MemoryError
        os.environ._data[start[:-1]] = encoded  # type: ignore[attr-defined]

    def _make_block(self, name: str, value_bytes: int) -> tuple[bytes, Any]:
        """Memory for a longer value. The former block stays: C code may hold what getenv gave it. Sizes double, so
        these are few."""
        start = os.fsencode(f"{name}=")
        size = max(_LEAST_BYTES, 2 * (len(start) + value_bytes + 1))
        address = self._malloc(size)
        if not address:
            raise MemoryError
        block = (ctypes.c_char * size).from_address(address)
        self._blocks[name] = start, block
        return start, block
