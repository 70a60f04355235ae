"""JSON calls: the payload of a call whose arguments are JSON, and results that are JSON.

This is the strategy :class:`~farcall_common.payload.JSONData` without the others: reading it runs no code, so the API
may use it. A payload is the packed buffers of the positional and of the keyword arguments, each the strategy's prefix
and JSON; a result is one such buffer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

JSON_PREFIX: Final = b"11\n"
"""The first bytes of a buffer of this strategy, in Globus Compute too."""

_decode = msgspec.json.Decoder().decode


def pack_json_call(args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """The payload of a call, in ASCII.

    :raises ValueError: for a number that JSON does not have.
    """
    buffers = [JSON_PREFIX.decode() + json.dumps(each, allow_nan=False) for each in (list(args), dict(kwargs))]
    return "".join(f"{len(buffer)}\n{buffer}" for buffer in buffers)


def read_json_result(buffer: bytes) -> object:
    """The value of a result.

    :raises ValueError: if it is in another format, or not JSON: NaN, too deep, half of a surrogate pair.
    """
    if not buffer.startswith(JSON_PREFIX):
        raise ValueError("the result is not JSON")
    try:
        return _decode(buffer[len(JSON_PREFIX) :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the result is not JSON: {error}") from error
