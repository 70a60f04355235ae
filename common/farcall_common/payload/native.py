"""Native buffers, between processes of one owner on one cluster: plain pickle.

Buffers in the cloud are text (see :mod:`farcall_common.payload`), because they travel in JSON and are read by other
programs and later versions. Between an :class:`~farcall_endpoint.Engine` and its own workers neither matters, and text
would take a third more bytes and two more copies.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any, Final

from farcall_common.errors import SerializationError
from farcall_common.payload.pickler import NativePickler
from farcall_common.payload.pickling import PROTOCOL
from farcall_common.payload.strategy import SEND_DATA, hint_for, message_of

#: Requests a native buffer in a list of strategy names.
NATIVE: Final = ("native",)

NATIVE_PREFIX: Final = b"p5\n"
"""Of a native buffer; no other starts so."""
_PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes})
_LARGE: Final = 16 * 1024
"""Above this size pickle writes a value directly into a file, which is ten times as fast as ``pickle.dumps``."""


def dump_native(value: object, subject: str = "A value") -> bytes:
    """The buffer of a value.

    :param subject: what it is, in the error.
    :raises SerializationError: if it cannot be pickled.
    """
    if is_plain(value):
        return NATIVE_PREFIX + pickle.dumps(value, PROTOCOL)
    file = io.BytesIO()
    file.write(NATIVE_PREFIX)
    try:
        NativePickler(file, PROTOCOL).dump(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # reduce methods may even call sys.exit
        raise SerializationError(
            f"{subject} of type {type(value).__qualname__} cannot be pickled: {type(error).__name__}: "
            f"{message_of(error)}.",
            hint=hint_for(error) or SEND_DATA,
        ) from error
    return file.getvalue()


def is_plain(value: object) -> bool:
    """Whether a value is small data of a type that everything reads: ``pickle.dumps`` is quickest then."""
    return type(value) in _PLAIN and not (isinstance(value, bytes | str) and len(value) > _LARGE)


def load_native(buffer: bytes | memoryview) -> Any:
    """The value in a buffer; runs code from it.

    :raises Exception: anything, if the value cannot be read here.
    """
    return pickle.loads(memoryview(buffer)[len(NATIVE_PREFIX) :])


def is_native(buffer: bytes | memoryview) -> bool:
    """Whether a buffer is native; no other starts so."""
    return bytes(buffer[: len(NATIVE_PREFIX)]) == NATIVE_PREFIX


def dump_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """The buffer of a call's arguments.

    :raises SerializationError: if one of them cannot be pickled; with its position or name.
    """
    if not (args or kwargs):
        return _EMPTY_CALL
    try:
        return dump_native((args, kwargs))
    except SerializationError as error:
        named = [(f"Positional argument {number}", value) for number, value in enumerate(args, start=1)]
        for name, value in [*named, *((f"Keyword argument {name!r}", value) for name, value in kwargs.items())]:
            try:
                dump_native(value, name)
            except SerializationError as of_one:
                if _reason(of_one) == _reason(error):  # else it may be pickled only once
                    raise of_one from error.__cause__
        raise


def _reason(error: SerializationError) -> str:
    return "" if error.__cause__ is None else message_of(error.__cause__)


def load_call(buffer: bytes | memoryview) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a :func:`dump_call`.

    :raises Exception: anything, if an argument cannot be read here.
    """
    if buffer == _EMPTY_CALL:
        return (), {}
    args, kwargs = load_native(buffer)
    return args, kwargs


_EMPTY_CALL: Final = dump_native(((), {}))
