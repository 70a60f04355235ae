"""The text of pickles that may hold byte code: one line of JSON, then the pickle in base64.

The line has ``python`` when byte code is in it: only the same minor version can run that, and another one may crash on
it, so it is checked before anything is loaded. It may have ``sources`` and ``modules`` (see
:class:`~farcall_common.payload.by_value.ByValue`). Unknown keys are ignored.
"""

from __future__ import annotations

import binascii
import json
import pickle
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from farcall_common.errors import DeserializationError
from farcall_common.payload.foreign import THIS_PYTHON
from farcall_common.payload.source import remember_lines

if TYPE_CHECKING:
    from farcall_common.payload.by_value import ByValue


def dump(value: object, *, with_sources: bool) -> bytes:
    """Pickle a value with the code that the worker cannot import.

    :raises Exception: what pickling it raises.
    """
    # Here, not at the top: cloudpickle costs every command-line start 20 ms, and most calls do not need it.
    from farcall_common.payload.by_value import dump_by_value

    return written(dump_by_value(value), with_sources=with_sources)


def written(dumped: ByValue, *, with_sources: bool) -> bytes:
    """The text of a pickle."""
    head = head_of(dumped)
    if with_sources and dumped.sources:
        head["sources"] = dumped.sources
    return b"%b\n%b" % (json.dumps(head).encode(), binascii.b2a_base64(dumped.pickled, newline=False))


def head_of(dumped: ByValue) -> dict[str, Any]:
    """What a reader must know of a pickle before it loads it."""
    head: dict[str, Any] = {"python": dumped.python} if dumped.python else {}
    if dumped.modules is not None:
        head["modules"] = dumped.modules
    return head


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


def load(text: bytes, *, own_classes: bool = False) -> object:
    """The value of a text that :func:`dump` wrote.

    :param own_classes: whether the reader's classes are taken even if their source differs.
    :raises DeserializationError: if its byte code is of another Python version.
    :raises Exception: what unpickling raises.
    """
    line, _, pickled = text.partition(b"\n")
    head = json.loads(line)
    check(head)
    for filename, first_line, lines in head.get("sources", ()):
        remember_lines(filename, first_line, lines)
    return unpickle(binascii.a2b_base64(pickled, strict_mode=True), head, own_classes=own_classes)


def unpickle(
    pickled: bytes | memoryview, head: Mapping[str, Any], *, own_classes: bool, buffers: Iterable[memoryview] = ()
) -> object:
    """The value of a pickle, with what stands in its head."""
    modules = head.get("modules")
    if modules is None:
        return pickle.loads(pickled, buffers=buffers)
    # Here, not at the top: as in dump.
    from farcall_common.payload.by_value import load_by_value

    return load_by_value(pickled, modules, own_classes=own_classes, buffers=buffers)
