"""Encoding of the queue's values: MessagePack.

A newer writer's extra fields are ignored and a missing optional field gets its default, so that forwarders and Lambdas
of neighbouring releases share one queue. A value that this release does not know, such as a state, is
left alone (:func:`if_known`). User bytes pass through as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from farcall_common.store.model import (
    FileMessage,
    ForwarderInfo,
    OutputAnswer,
    OutputAsk,
    PeerKey,
    QueuedTask,
    SharedResults,
    TaskResult,
)

pack: Final = msgspec.msgpack.Encoder().encode
unpack_task: Final = msgspec.msgpack.Decoder(QueuedTask).decode
unpack_forwarder: Final = msgspec.msgpack.Decoder(ForwarderInfo).decode
unpack_peer: Final = msgspec.msgpack.Decoder(PeerKey).decode
unpack_result: Final = msgspec.msgpack.Decoder(TaskResult).decode
unpack_ask: Final = msgspec.msgpack.Decoder(OutputAsk).decode
unpack_answer: Final = msgspec.msgpack.Decoder(OutputAnswer).decode
unpack_file_message: Final = msgspec.msgpack.Decoder(FileMessage).decode
unpack_shared: Final = msgspec.msgpack.Decoder(SharedResults).decode

_logger = logging.getLogger(__name__)
_Value = TypeVar("_Value")


def if_known(unpack: Callable[[bytes], _Value], data: bytes) -> _Value | None:
    """The decoded value, or None when a later release wrote something into it that this one does not know."""
    try:
        return unpack(data)
    except msgspec.ValidationError as error:
        _logger.warning("left alone a value of a later release: %s", error)
        return None
