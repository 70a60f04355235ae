"""The text of pickles that may hold byte code: one line of JSON, then the pickle in base64.

The line has ``python`` when byte code is in it: only the same minor version can run that, and another one may crash on
it, so it is checked before anything is loaded. It may have ``sources`` (see
:class:`~farcall_common.payload.by_value.ByValue`). Unknown keys are ignored.
"""

from __future__ import annotations

import binascii
import dis
import json
import opcode
import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from farcall_common.errors import DeserializationError
from farcall_common.payload.source import remember_lines

__all__ = ["THIS_PYTHON", "check", "dump", "is_foreign", "load", "written"]

THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

_BEFORE_RESUME = frozenset(
    {"CACHE", "COPY_FREE_VARS", "EXTENDED_ARG", "MAKE_CELL", "NOP", "POP_TOP", "RETURN_GENERATOR"}
)


def dump(value: object, *, with_sources: bool) -> bytes:
    """Pickle a value with the code that the worker cannot import.

    :raises Exception: what pickling it raises.
    """
    # Here, not at the top: cloudpickle costs every command-line start 20 ms, and most calls do not need it.
    from farcall_common.payload.by_value import dump_by_value

    dumped = dump_by_value(value)
    return written(dumped.pickled, python=dumped.python, sources=dumped.sources if with_sources else ())


def written(pickled: bytes, *, python: str | None, sources: Sequence[tuple[str, int, str]] = ()) -> bytes:
    """The text of a pickle; ``python`` is the version of the byte code in it, if there is any."""
    head: dict[str, Any] = {"python": python} if python else {}
    if sources:
        head["sources"] = sources
    return b"%b\n%b" % (json.dumps(head).encode(), binascii.b2a_base64(pickled, newline=False))


def check(head: Mapping[str, Any]) -> None:
    """Make sure that this Python may load what stands behind a head.

    :raises DeserializationError: if there is byte code of another version.
    """
    python = head.get("python", THIS_PYTHON)
    if python != THIS_PYTHON:
        raise DeserializationError(
            f"This is byte code of Python {python}, and here runs Python {THIS_PYTHON}.",
            hint=f"Use an endpoint with Python {python}, or let the function travel as source: "
            "no closures, no decorators, no classes of the script, imports inside the function.",
        )


def load(text: bytes) -> object:
    """The value of a text that :func:`dump` wrote.

    :raises DeserializationError: if its byte code is of another Python version.
    :raises Exception: what unpickling raises.
    """
    line, _, pickled = text.partition(b"\n")
    head = json.loads(line)
    check(head)
    for filename, first_line, lines in head.get("sources", ()):
        remember_lines(filename, first_line, lines)
    return pickle.loads(binascii.a2b_base64(pickled, strict_mode=True))


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
