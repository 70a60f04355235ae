"""What the queue holds, as bytes: MessagePack of the model's values.

A newer writer's extra fields are ignored and a missing optional field gets its default, so that forwarders and Lambdas
of neighbouring releases share one queue. What says something that this release has no word for, such as a state, is
left alone (:func:`if_known`). User bytes pass through as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from farcall_common.store.model import ForwarderInfo, PeerKey, QueuedTask, SharedEnds, TaskResult

__all__ = ["if_known", "pack", "unpack_forwarder", "unpack_peer", "unpack_result", "unpack_shared", "unpack_task"]

pack: Final = msgspec.msgpack.Encoder().encode
unpack_forwarder: Final = msgspec.msgpack.Decoder(ForwarderInfo).decode
unpack_peer: Final = msgspec.msgpack.Decoder(PeerKey).decode
unpack_result: Final = msgspec.msgpack.Decoder(TaskResult).decode
unpack_shared: Final = msgspec.msgpack.Decoder(SharedEnds).decode
unpack_task: Final = msgspec.msgpack.Decoder(QueuedTask).decode

_logger = logging.getLogger(__name__)
_Value = TypeVar("_Value")


def if_known(unpack: Callable[[bytes], _Value], data: bytes) -> _Value | None:
    """What these bytes say, or None when a later release wrote something into them that this one does not know."""
    try:
        return unpack(data)
    except msgspec.ValidationError as error:
        _logger.warning("left alone what a later release wrote: %s", error)
        return None
