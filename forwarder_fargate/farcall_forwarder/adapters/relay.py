"""Blob relay: reads and writes of the blob store. They block, and run in a pool's thread.

Unlike other steps these are not repeated while the store is unavailable: the bytes would stay in memory for as long.
The agent receives the error and tries again.
"""

from __future__ import annotations

import hashlib
import logging

from farcall_common.errors import ErrorRecord, FarcallError, Fault, ProtocolError, Unavailable
from farcall_common.store.ports import Blobs
from farcall_forwarder.core.relay import BlobStored, PieceRead, ReadPiece, StoreBlob

_logger = logging.getLogger(__name__)


def read_piece(blobs: Blobs, step: ReadPiece) -> PieceRead:
    """Read a part of a blob; the answer has the bytes or the error."""
    try:
        piece = blobs.read_part(step.blob_key, offset_bytes=step.offset_bytes, length_bytes=step.length_bytes)
    except Exception as error:  # noqa: BLE001 - ends this transfer, not the forwarder
        return PieceRead(step.transfer_id, error=_record(error))
    return PieceRead(step.transfer_id, piece)


def store_blob(blobs: Blobs, step: StoreBlob) -> BlobStored:
    """Store a blob, if its length and hash are the announced ones."""
    data = b"".join(step.pieces)
    if (len(data), hashlib.sha256(data).hexdigest()) != (step.ref.size_bytes, step.ref.sha256):
        error = ErrorRecord(
            code=ProtocolError.code,
            message="The uploaded bytes are not the announced ones: length or SHA-256 differ.",
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
    _logger.error("a blob cannot be relayed", exc_info=error)
    return Unavailable("The blob store failed.").record
