"""Serialisation: values, functions and calls as buffers of text that Globus Compute reads and writes, too.

::

    buffer  = id (2 characters) + newline + text        one value or one function
    packed  = length + newline + buffer, repeated       a function: 1 buffer, a call: 2 (args, kwargs), or 1 with both
    result  = buffer

All of it is UTF-8 text, because it travels in JSON; only buffers in the blob store may be bytes, for readers that know
them (:mod:`farcall_common.payload.data`). Strategies are chosen when writing, and named in front of each buffer
for the reader. Only clients and workers open buffers; the parts between them copy bytes.
"""

from farcall_common.payload.code import (
    AllCodeStrategies,
    CloudPickleCode,
    CombinedCode,
    DillCode,
    DillCodeSource,
    DillCodeTextInspect,
    PickleCode,
    PureSourceDill,
    PureSourceTextInspect,
)
from farcall_common.payload.data import (
    AllDataStrategies,
    CloudPickleDataBase64,
    DillDataBase64,
    JSONData,
    PickleDataBase64,
    PickleOutOfBand,
)
from farcall_common.payload.framing import Piece, is_text
from farcall_common.payload.report import describe_exception, load_user_data, pack_exception, task_error
from farcall_common.payload.serializer import (
    BINARY_DATA,
    DATA_ONLY,
    DATA_STRATEGIES,
    DEFAULT_CODE,
    DEFAULT_DATA,
    PORTABLE_DATA,
    STRATEGIES,
    Serializer,
    ids_written,
    is_binary,
    packed,
    parse_allowed,
    refused_strategy,
    strategy_named,
)
from farcall_common.payload.strategy import Strategy

__all__ = [
    "BINARY_DATA",
    "DATA_ONLY",
    "DATA_STRATEGIES",
    "DEFAULT_CODE",
    "DEFAULT_DATA",
    "PORTABLE_DATA",
    "STRATEGIES",
    "AllCodeStrategies",
    "AllDataStrategies",
    "CloudPickleCode",
    "CloudPickleDataBase64",
    "CombinedCode",
    "DillCode",
    "DillCodeSource",
    "DillCodeTextInspect",
    "DillDataBase64",
    "JSONData",
    "PickleCode",
    "PickleDataBase64",
    "PickleOutOfBand",
    "Piece",
    "PureSourceDill",
    "PureSourceTextInspect",
    "Serializer",
    "Strategy",
    "describe_exception",
    "ids_written",
    "is_binary",
    "is_text",
    "load_user_data",
    "pack_exception",
    "packed",
    "parse_allowed",
    "refused_strategy",
    "strategy_named",
    "task_error",
]
