"""The text of pickles that may hold byte code: one line of JSON, then the pickle in base64.

The line has ``python`` when byte code is in it: only the same minor version can run that, and another one may crash on
it, so it is checked before anything is loaded. It may have ``sources`` (see
:class:`~farcall_common.payload.by_value.ByValue`). Unknown keys are ignored.
"""

from __future__ import annotations

import binascii
import json
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from farcall_common.errors import DeserializationError
from farcall_common.payload.foreign import THIS_PYTHON
from farcall_common.payload.source import remember_lines

__all__ = ["check", "dump", "load", "written"]


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
