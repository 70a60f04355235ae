"""Byte code of other versions of Python: what this one is, and how to tell that instructions are not its own."""

from __future__ import annotations

import dis
import opcode
import sys
from typing import Any

#: The minor version, which byte code is bound to.
THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

_BEFORE_RESUME = frozenset(
    {"CACHE", "COPY_FREE_VARS", "EXTENDED_ARG", "MAKE_CELL", "NOP", "POP_TOP", "RETURN_GENERATOR"}
)


def is_foreign(code: bytes) -> bool:
    """Whether instructions are plainly not of this Python version. Merely making a code object of such ones can
    overwrite memory, so they are looked at before that.

    For byte code that does not name its version. It is a sieve, not a proof: every code object starts with RESUME,
    whose number changes between versions, holds no operation that this version lacks, and has room for exactly the
    caches that this version keeps behind each operation.
    """
    operations = code[::2]
    started = False
    position = 0
    while position < len(operations):
        name = dis.opname[operations[position]]
        behind = position + 1 + _caches_behind(name)
        if name.startswith("<") or behind > len(operations) or any(operations[position + 1 : behind]):
            return True
        if not started and name not in _BEFORE_RESUME:
            if name != "RESUME":
                return True
            started = True
        position = behind
    return not started


def _caches_behind(name: str) -> int:
    """How many units of cache follow an operation. The table changed from numbers to names in Python 3.13."""
    table: Any = getattr(opcode, "_inline_cache_entries", {})
    return int(table.get(name, 0) if isinstance(table, dict) else table[opcode.opmap.get(name, 0)])
