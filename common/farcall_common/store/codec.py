"""What the queue holds, as bytes: MessagePack of the model's values.

A newer writer's extra fields are ignored and a missing optional field gets its default, so that forwarders and Lambdas
of neighbouring releases share one queue. User bytes pass through as they are.
"""

from __future__ import annotations

from typing import Final

import msgspec

from farcall_common.store.model import ForwarderInfo, PeerKey, QueuedTask, SharedEnds, TaskResult

__all__ = ["pack", "unpack_forwarder", "unpack_peer", "unpack_result", "unpack_shared", "unpack_task"]

pack: Final = msgspec.msgpack.Encoder().encode
unpack_forwarder: Final = msgspec.msgpack.Decoder(ForwarderInfo).decode
unpack_peer: Final = msgspec.msgpack.Decoder(PeerKey).decode
unpack_result: Final = msgspec.msgpack.Decoder(TaskResult).decode
unpack_shared: Final = msgspec.msgpack.Decoder(SharedEnds).decode
unpack_task: Final = msgspec.msgpack.Decoder(QueuedTask).decode
