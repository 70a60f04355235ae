"""Codec: envelopes to frames and back. Frame 0 is a version byte and the message in MessagePack; the others are user
bytes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from farcall_common.errors import FrameMalformed, VersionUnsupported
from farcall_common.limits import MAX_FRAME_BYTES, MAX_FRAMES, MAX_HEADER_BYTES
from farcall_common.wire import messages
from farcall_common.wire.messages import Envelope, Message, frame_indexes

PROTOCOL_VERSION: Final = 1

_VERSION_BYTE: Final = bytes([PROTOCOL_VERSION])
_KINDS: Final = {cls.__name__: cls for cls in Message.__subclasses__()}

_logger = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()
_decoders: Final = {kind: msgspec.msgpack.Decoder(cls) for kind, cls in _KINDS.items()}


class _Kind(msgspec.Struct):
    """The field of a header that chooses its decoder."""

    kind: str


_kind_decoder: Final = msgspec.msgpack.Decoder(_Kind)


def encode(envelope: Envelope) -> list[bytes]:
    """The frames of an envelope, ready for a multipart send."""
    return [_VERSION_BYTE + _encoder.encode(envelope.message), *envelope.frames]


def decode(frames: Sequence[bytes]) -> Envelope:
    """Read an envelope that a peer sent. Unknown fields are ignored (and logged at debug), so that old readers work.

    :raises VersionUnsupported: for another protocol version.
    :raises FrameMalformed: for anything else that PROTOCOL.md does not allow.
    """
    if not frames or not frames[0]:
        raise FrameMalformed("an envelope without a header")
    if len(frames) > MAX_FRAMES or len(frames[0]) > MAX_HEADER_BYTES or max(map(len, frames)) > MAX_FRAME_BYTES:
        raise FrameMalformed("an envelope over the limits of frames or bytes")
    header, user_frames = frames[0], tuple(frames[1:])
    if header[0] != PROTOCOL_VERSION:
        raise VersionUnsupported(f"protocol version {header[0]}; this side has version {PROTOCOL_VERSION}")
    body = memoryview(header)[1:]
    try:
        kind = _kind_decoder.decode(body).kind
        message = _decoders[kind].decode(body)
    except KeyError as error:
        raise FrameMalformed(f"an unknown kind of message: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameMalformed(f"a header that cannot be read: {error}") from error
    if max(frame_indexes(message), default=-1) >= len(user_frames):
        raise FrameMalformed(f"{kind} refers to a missing frame")
    if _logger.isEnabledFor(logging.DEBUG):
        _log_unknown_fields(kind, body)
    return Envelope(message, user_frames)


def _log_unknown_fields(kind: str, body: memoryview) -> None:
    known = {field.encode_name for field in msgspec.structs.fields(_KINDS[kind])} | {"kind"}
    unknown = set(msgspec.msgpack.decode(body)) - known
    if unknown:
        _logger.debug("%s: ignored unknown fields %s", kind, sorted(unknown))


assert all(getattr(messages, kind) for kind in _KINDS)
