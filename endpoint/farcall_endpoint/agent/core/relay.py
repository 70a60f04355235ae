"""Relay of blobs through the forwarder, for sites where an endpoint reaches nothing else. No I/O.

Of each transfer one message is on its way at a time (``PROTOCOL.md``, section 4), and few are under way at once,
so that tasks and results are not held up behind them. A download continues after a broken session; an upload
ends with the session, and is requested again in the next one like every result that the cloud does not have yet.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable
from typing import Final

from farcall_common.backoff import Backoff
from farcall_common.errors import ErrorRecord
from farcall_common.wire import BlobLocation, BlobPiece, BlobPull, BlobPush, BlobTaken, Message
from farcall_endpoint.host.shared_memory import Frame, piece_of

_AT_ONCE: Final = 2
_TRIES: Final = 5
_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 4.0
#: The forwarder may have many others to serve first.
_ANSWER_LIMIT_S: Final = 120.0
_TOO_OLD: Final = "the forwarder passes no blobs on; it is older than this endpoint"


class TransferFailed(Exception):
    """A transfer did not work. ``retryable`` with a fresh URL; ``is_unreachable`` if no connection could be made."""

    def __init__(self, reason: str, *, retryable: bool, is_unreachable: bool = False) -> None:
        super().__init__(reason)
        self.retryable = retryable
        self.is_unreachable = is_unreachable


Send = Callable[[Message, tuple[bytes, ...]], None]
Done = Callable[[Frame | TransferFailed], None]


def _new_backoff() -> Backoff:
    return Backoff(first_s=_FIRST_WAIT_S, most_s=_LONGEST_WAIT_S)


@dataclasses.dataclass(slots=True, eq=False)
class _Download:
    task_id: str
    attempt: int
    blob: BlobLocation
    done: Done
    due_at: float = 0.0
    backoff: Backoff = dataclasses.field(default_factory=_new_backoff)
    is_asked: bool = False
    data: bytearray = dataclasses.field(default_factory=bytearray)


@dataclasses.dataclass(slots=True, eq=False)
class _Upload:
    task_id: str
    attempt: int
    blob: BlobLocation
    done: Done
    body: Frame
    due_at: float = 0.0


class Relay:
    """All relayed transfers of an agent. Instants are monotonic seconds.

    :param send: sends a message to the forwarder; called while a session is open only.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._piece_bytes: int | None = None  # None without a session
        self._waiting: deque[_Download | _Upload] = deque()
        self._active: dict[tuple[str, bool], _Download | _Upload] = {}

    # -- the session ---------------------------------------------------------------------------------------------------

    def opened(self, piece_bytes: int, *, now: float) -> None:
        """A session is open, in which pieces may have so many bytes; 0: the forwarder relays nothing."""
        self._piece_bytes = piece_bytes
        self._continue(now)

    def closed(self) -> None:
        """The session is gone."""
        self._piece_bytes = None
        downloads = [each for each in (*self._active.values(), *self._waiting) if isinstance(each, _Download)]
        for download in downloads:
            download.is_asked = False
        self._active.clear()
        self._waiting = deque(downloads)

    def received(self, message: BlobPiece | BlobTaken, frames: tuple[bytes, ...], *, now: float) -> None:
        """The forwarder answered."""
        match message:
            case BlobPiece():
                download = self._active.get((message.task_id, False))
                if isinstance(download, _Download) and download.is_asked and message.attempt == download.attempt:
                    self._piece(download, message, frames, now)
            case BlobTaken():
                upload = self._active.get((message.task_id, True))
                if isinstance(upload, _Upload) and message.attempt == upload.attempt:
                    self._taken(upload, message, now)

    # -- transfers -----------------------------------------------------------------------------------------------------

    def download(self, task_id: str, attempt: int, blob: BlobLocation, done: Done, *, now: float) -> None:
        """Get a payload; ``done`` gets its bytes, or why it cannot be had."""
        self._waiting.append(_Download(task_id, attempt, blob, done))
        self._continue(now)

    def upload(self, task_id: str, attempt: int, blob: BlobLocation, body: Frame, done: Done, *, now: float) -> None:
        """Put a result; ``done`` gets its bytes back, or why they cannot be stored."""
        self._waiting.append(_Upload(task_id, attempt, blob, done, body))
        self._continue(now)

    def tick(self, *, now: float) -> None:
        """Time has passed."""
        for transfer in [each for each in self._active.values() if now >= each.due_at]:
            if isinstance(transfer, _Download) and not transfer.is_asked:
                self._pull(transfer, now)
            else:
                self._failed(transfer, "the forwarder did not answer in time", now, retryable=True)

    def next_deadline(self) -> float | None:
        """When :meth:`tick` may have something to do."""
        return min((each.due_at for each in self._active.values()), default=None)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _continue(self, now: float) -> None:
        while self._piece_bytes is not None and self._waiting and len(self._active) < _AT_ONCE:
            transfer = self._waiting.popleft()
            key = (transfer.task_id, isinstance(transfer, _Upload))
            if key in self._active:
                continue  # asked for twice
            self._active[key] = transfer
            if not self._piece_bytes:
                self._end(transfer, TransferFailed(_TOO_OLD, retryable=False), now)
            elif isinstance(transfer, _Download):
                self._pull(transfer, now)
            else:
                self._push(transfer, now)

    def _pull(self, download: _Download, now: float) -> None:
        download.is_asked, download.due_at = True, now + _ANSWER_LIMIT_S
        self._send(
            BlobPull(task_id=download.task_id, attempt=download.attempt, offset_bytes=len(download.data)),
            (),
        )

    def _piece(self, download: _Download, message: BlobPiece, frames: tuple[bytes, ...], now: float) -> None:
        if message.error is not None or message.piece is None or message.offset_bytes != len(download.data):
            self._refused(download, message.error, now)
            return
        download.data += frames[message.piece]
        if frames[message.piece] and len(download.data) < download.blob.size_bytes:
            self._pull(download, now)
            return
        data, download.data = bytes(download.data), bytearray()
        if len(data) != download.blob.size_bytes or hashlib.sha256(data).hexdigest() != download.blob.sha256:
            self._failed(download, "what came is not what was uploaded (length or SHA-256 differ)", now, retryable=True)
            return
        self._send(BlobPull(task_id=download.task_id, attempt=download.attempt, offset_bytes=len(data)), ())
        self._end(download, data, now)

    def _push(self, upload: _Upload, now: float, *, at_bytes: int | None = None) -> None:
        upload.due_at = now + _ANSWER_LIMIT_S
        piece = None if at_bytes is None else piece_of(upload.body, at_bytes, self._piece_bytes or 0)
        self._send(
            BlobPush(
                task_id=upload.task_id,
                attempt=upload.attempt,
                size_bytes=upload.blob.size_bytes,
                sha256=upload.blob.sha256,
                offset_bytes=at_bytes or 0,
                piece=None if piece is None else 0,
            ),
            () if piece is None else (piece,),
        )

    def _taken(self, upload: _Upload, message: BlobTaken, now: float) -> None:
        if message.error is not None:
            self._refused(upload, message.error, now)
        elif message.blob_key:
            self._end(upload, upload.body, now)
        elif message.offset_bytes < len(upload.body):
            self._push(upload, now, at_bytes=message.offset_bytes)
        else:
            self._failed(upload, "the forwarder wants more than there is", now, retryable=True)

    def _refused(self, transfer: _Download | _Upload, error: dict[str, object] | None, now: float) -> None:
        if error is None:
            self._failed(transfer, "the forwarder sent another piece than was asked for", now, retryable=True)
        else:
            record = ErrorRecord.from_json(error)
            self._failed(transfer, record.message, now, retryable=record.retryable)

    def _failed(self, transfer: _Download | _Upload, reason: str, now: float, *, retryable: bool) -> None:
        if isinstance(transfer, _Download) and retryable and transfer.backoff.failures + 1 < _TRIES:
            transfer.due_at = now + transfer.backoff.next_s()
            transfer.is_asked = False
        else:
            self._end(transfer, TransferFailed(reason, retryable=retryable), now)

    def _end(self, transfer: _Download | _Upload, outcome: Frame | TransferFailed, now: float) -> None:
        self._active.pop((transfer.task_id, isinstance(transfer, _Upload)), None)
        transfer.done(outcome)
        self._continue(now)
