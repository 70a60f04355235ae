"""The blob store's side of relayed blobs. They block; run them in a pool's thread.

Unlike other steps these are not repeated while the store is away: the bytes would stay in memory for as long. The agent
hears of it and comes again.
"""

from __future__ import annotations

import hashlib
import logging

from farcall_common.errors import ErrorRecord, FarcallError, Fault, ProtocolError, Unavailable
from farcall_common.store.ports import Blobs
from farcall_forwarder.core.relay import BlobStored, PieceRead, ReadPiece, StoreBlob

__all__ = ["read_piece", "store_blob"]

_logger = logging.getLogger(__name__)


def read_piece(blobs: Blobs, step: ReadPiece) -> PieceRead:
    """A part of a blob, or why it cannot be had."""
    try:
        piece = blobs.read_part(step.blob_key, offset_bytes=step.offset_bytes, length_bytes=step.length_bytes)
    except Exception as error:  # noqa: BLE001 - ends this transfer, not the forwarder
        return PieceRead(step.transfer_id, error=_record(error))
    return PieceRead(step.transfer_id, piece)


def store_blob(blobs: Blobs, step: StoreBlob) -> BlobStored:
    """Store a blob, unless it is another one than was announced."""
    data = b"".join(step.pieces)
    if (len(data), hashlib.sha256(data).hexdigest()) != (step.ref.size_bytes, step.ref.sha256):
        error = ErrorRecord(
            code=ProtocolError.code,
            message="What came is not what was announced: length or SHA-256 differ.",
            hint="Begin the upload again.",
            fault=Fault.PEER,
            retryable=True,
        )
        return BlobStored(step.transfer_id, error)
    try:
        blobs.write(step.ref.blob_key, data)
    except Exception as error:  # noqa: BLE001 - ends this transfer, not the forwarder
        return BlobStored(step.transfer_id, _record(error))
    return BlobStored(step.transfer_id)


def _record(error: Exception) -> ErrorRecord:
    if isinstance(error, FarcallError):
        return error.record
    _logger.error("a blob cannot be passed on", exc_info=error)
    return Unavailable("The blob store failed.").record
