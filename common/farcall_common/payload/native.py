"""Native buffers, between processes of one owner on one cluster: plain pickle.

Buffers in the cloud are text (see :mod:`farcall_common.payload`), because they travel in JSON and are read by other
programs and later versions. Between an :class:`~farcall_endpoint.Engine` and its own workers neither matters, and text
would take a third more bytes and two more copies.
"""

from __future__ import annotations

import functools
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
"""Prefix of a native buffer; no other buffer has it."""
_PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes})
_LARGE: Final = 16 * 1024
"""Above this size pickle writes a value directly into a file, which is ten times as fast as ``pickle.dumps``."""


def dump_native(value: object) -> bytes:
    """The buffer of a value.

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
        raise _refusal(f"A value of type {type(value).__qualname__}", error) from error
    return file.getvalue()


def _refusal(what: str, reason: BaseException) -> SerializationError:
    text = f"{what} cannot be pickled: {type(reason).__name__}: {message_of(reason)}."
    return SerializationError(text, hint=hint_for(reason) or SEND_DATA)


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
        # Here, not at the top: workers need it for errors only.
        from farcall_common.payload.parts import failing_part, named_arguments

        fails = functools.partial(_fails, reason=_reason(error))
        for name, value in named_arguments(args, kwargs):
            if fails(value):
                part = failing_part(value, fails)
                where = f"{name} ({type(value).__qualname__}){part and ', '}{part}"
                raise _refusal(f"{where}: the value", error.__cause__ or error) from error.__cause__
        raise


def _fails(value: object, *, reason: str) -> bool:
    """Whether a value cannot be pickled for this reason. With another one, it may be pickled only once."""
    try:
        dump_native(value)
    except SerializationError as error:
        return _reason(error) == reason
    return False


def _reason(error: SerializationError) -> str:
    return message_of(error.__cause__ or error)


def load_call(buffer: bytes | memoryview) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a :func:`dump_call`.

    :raises Exception: anything, if an argument cannot be read here.
    """
    if buffer == _EMPTY_CALL:
        return (), {}
    args, kwargs = load_native(buffer)
    return args, kwargs


_EMPTY_CALL: Final = dump_native(((), {}))
