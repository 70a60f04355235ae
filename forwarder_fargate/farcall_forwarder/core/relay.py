"""Blob relay: transfers blobs in pieces for agents that can reach the forwarder and not the blob store.

A download is stateless for the agent: it requests piece after piece, at any offset, and may continue at another
forwarder. An upload is collected here and stored whole, because only then its length and hash can be checked; after a
lost connection it starts again. Either way one message of a transfer is answered before the next is sent, and memory
is reserved before the first piece: transfers without room wait in the order of arrival.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Sequence
from typing import Final

from farcall_common.errors import ErrorRecord, Fault, LimitExceeded, ProtocolError, TaskUnknown
from farcall_common.store.model import BlobRef
from farcall_common.wire import BlobPiece, BlobPull, BlobPush, BlobRequest, BlobTaken
from farcall_forwarder.core import uploads
from farcall_forwarder.core.actions import Action, StoreStep
from farcall_forwarder.core.events import Event
from farcall_forwarder.core.policy import Instant, Policy
from farcall_forwarder.core.results import blob_key
from farcall_forwarder.core.sessions import PeerSession

_MAX_PER_SESSION: Final = 16


class ReadPiece(StoreStep, frozen=True):
    """Read a part of a blob. Answered by PieceRead."""

    transfer_id: int
    blob_key: str
    offset_bytes: int
    length_bytes: int


class StoreBlob(StoreStep, frozen=True):
    """Store a blob, if its length and hash are right. Answered by BlobStored."""

    transfer_id: int
    ref: BlobRef
    pieces: Sequence[bytes]


class PieceRead(Event, frozen=True):
    """A part of a blob, or the error of the read."""

    transfer_id: int
    piece: bytes = b""
    error: ErrorRecord | None = None


class BlobStored(Event, frozen=True):
    """A blob was stored, or the error."""

    transfer_id: int
    error: ErrorRecord | None = None


@dataclasses.dataclass(slots=True, eq=False)
class _Transfer:
    """A transfer. ``at_bytes`` is its progress; ``due_at`` is when the transfer of a silent agent ends."""

    transfer_id: int
    session: PeerSession
    message: BlobPull | BlobPush
    ref: BlobRef
    room_bytes: int
    due_at: float
    at_bytes: int = 0
    pieces: list[bytes] = dataclasses.field(default_factory=list)
    has_room: bool = False
    #: Whether a store step is under way, and whether the transfer has ended, so that its answer is dropped.
    is_busy: bool = False
    is_over: bool = False

    @property
    def key(self) -> tuple[str, str, type]:
        """One transfer of a task each way, in a session."""
        return self.session.session_id, self.message.task_id, type(self.message)


class Relay:
    """All transfers of a process. They hold at most ``policy.relay_bytes`` of blobs at once."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._free_bytes = max(policy.relay_bytes, policy.max_result_bytes)
        self._ids = itertools.count(1)
        self._transfers: dict[tuple[str, str, type], _Transfer] = {}
        self._busy: dict[int, _Transfer] = {}
        self._waiting: deque[_Transfer] = deque()

    def __len__(self) -> int:
        return len(self._transfers)

    # -- messages of agents --------------------------------------------------------------------------------------------

    def pull(self, session: PeerSession, message: BlobPull, ref: BlobRef | None, now: Instant) -> list[Action]:
        """Send a piece of a blob that is for this endpoint: the payload of a task that it leases, or a part of a file
        that it has pulled."""
        if ref is None:
            return self._send(session, _piece(message, error=_not_leased(message)), now)
        transfer = self._transfers.get((session.session_id, message.task_id, BlobPull))
        if transfer is None:
            if message.offset_bytes >= ref.size_bytes:
                return []
            room_bytes = min(ref.size_bytes, self._policy.relay_piece_bytes)
            return self._begin(session, message, ref, room_bytes, now)
        if transfer.is_busy or not transfer.has_room:
            return []  # A store step is under way, or the transfer waits for room.
        transfer.message = message
        return self._read_piece(transfer) if message.offset_bytes < ref.size_bytes else self._end(transfer, now)

    def push(
        self, session: PeerSession, message: BlobPush, frames: Sequence[bytes], owner_id: str | None, now: Instant
    ) -> list[Action]:
        """Take a piece of a blob that this endpoint may upload for ``owner_id``, such as the result of a task that it
        leases. A message without a piece requests room."""
        former = self._transfers.get((session.session_id, message.task_id, BlobPush))
        if message.piece is not None:
            return self._take(former, session, message, frames[message.piece], now)
        error = (
            _not_leased(message)
            if owner_id is None
            else uploads.refusal(_as_request(message), is_leased=True, policy=self._policy)
        )
        ended = self._end(former, now) if former else []
        if error or owner_id is None:
            return [*ended, *self._send(session, _taken(message, error=error), now)]
        ref = BlobRef(blob_key(owner_id, message.sha256), message.size_bytes, message.sha256)
        return [*ended, *self._begin(session, message, ref, message.size_bytes, now)]

    def close(self, session: PeerSession, now: Instant) -> list[Action]:
        """End the transfers of a session that is over."""
        ended = [transfer for transfer in self._transfers.values() if transfer.session is session]
        return [action for transfer in ended for action in self._end(transfer, now)]

    # -- the blob store's answers, and time ----------------------------------------------------------------------------

    def on_read(self, event: PieceRead, now: Instant) -> list[Action]:
        """Send a piece to an agent."""
        transfer = self._busy.pop(event.transfer_id)
        transfer.is_busy = False
        if transfer.is_over:
            return self._release_room(transfer, now)
        transfer.due_at = now.mono + self._policy.relay_timeout_s
        frames = () if event.error else (event.piece,)
        actions = self._send(transfer.session, _piece(transfer.message, error=event.error), now, frames=frames)
        return [*actions, *(self._end(transfer, now) if event.error else [])]

    def on_stored(self, event: BlobStored, now: Instant) -> list[Action]:
        """Answer the agent after its result was stored, or was not."""
        transfer = self._busy.pop(event.transfer_id)
        transfer.is_busy = False
        if transfer.is_over:
            return self._release_room(transfer, now)
        key = "" if event.error else transfer.ref.blob_key
        answer = _taken(transfer.message, at_bytes=transfer.at_bytes, blob_key=key, error=event.error)
        return [*self._send(transfer.session, answer, now), *self._end(transfer, now)]

    def tick(self, now: Instant) -> list[Action]:
        """End the transfers of agents that stopped in the middle. They may begin again."""
        late = [t for t in self._transfers.values() if t.has_room and not t.is_busy and now.mono >= t.due_at]
        return [action for transfer in late for action in self._end(transfer, now)]

    # -- inside --------------------------------------------------------------------------------------------------------

    def _begin(
        self, session: PeerSession, message: BlobPull | BlobPush, ref: BlobRef, room_bytes: int, now: Instant
    ) -> list[Action]:
        if sum(1 for transfer in self._transfers.values() if transfer.session is session) >= _MAX_PER_SESSION:
            error = LimitExceeded(f"more than {_MAX_PER_SESSION} blobs of one agent at once").record
            failed = _piece(message, error=error) if isinstance(message, BlobPull) else _taken(message, error=error)
            return self._send(session, failed, now)
        transfer = _Transfer(next(self._ids), session, message, ref, room_bytes, due_at=now.mono)
        self._transfers[transfer.key] = transfer
        self._waiting.append(transfer)
        return self._admit(now)

    def _admit(self, now: Instant) -> list[Action]:
        """Start waiting transfers that have room, in their order."""
        actions: list[Action] = []
        while self._waiting and (self._waiting[0].is_over or self._waiting[0].room_bytes <= self._free_bytes):
            transfer = self._waiting.popleft()
            if transfer.is_over:
                continue
            self._free_bytes -= transfer.room_bytes
            transfer.has_room = True
            if isinstance(transfer.message, BlobPull):
                actions += self._read_piece(transfer)
            else:
                transfer.due_at = now.mono + self._policy.relay_timeout_s
                actions += self._send(transfer.session, _taken(transfer.message), now)
        return actions

    def _read_piece(self, transfer: _Transfer) -> list[Action]:
        offset_bytes = transfer.message.offset_bytes
        length_bytes = min(self._policy.relay_piece_bytes, transfer.ref.size_bytes - offset_bytes)
        return self._perform(
            transfer, ReadPiece(transfer.transfer_id, transfer.ref.blob_key, offset_bytes, length_bytes)
        )

    def _take(
        self, transfer: _Transfer | None, session: PeerSession, message: BlobPush, piece: bytes, now: Instant
    ) -> list[Action]:
        promised = None if transfer is None else (transfer.ref.size_bytes, transfer.ref.sha256, transfer.at_bytes)
        if (
            transfer is None
            or not transfer.has_room
            or transfer.is_busy
            or promised != (message.size_bytes, message.sha256, message.offset_bytes)
            or len(piece) > min(self._policy.relay_piece_bytes, message.size_bytes - message.offset_bytes)
        ):
            ended = self._end(transfer, now) if transfer else []
            return [*ended, *self._send(session, _taken(message, error=_out_of_step(message)), now)]
        transfer.pieces.append(piece)
        transfer.at_bytes += len(piece)
        transfer.message = message
        transfer.due_at = now.mono + self._policy.relay_timeout_s
        if transfer.at_bytes < transfer.ref.size_bytes:
            return self._send(session, _taken(message, at_bytes=transfer.at_bytes), now)
        pieces, transfer.pieces = transfer.pieces, []
        return self._perform(transfer, StoreBlob(transfer.transfer_id, transfer.ref, pieces))

    def _perform(self, transfer: _Transfer, step: StoreStep) -> list[Action]:
        transfer.is_busy = True
        self._busy[transfer.transfer_id] = transfer
        return [step]

    def _end(self, transfer: _Transfer, now: Instant) -> list[Action]:
        self._transfers.pop(transfer.key, None)
        transfer.is_over = True
        # The bytes of a store step stay in memory until it has answered.
        return [] if transfer.is_busy else self._release_room(transfer, now)

    def _release_room(self, transfer: _Transfer, now: Instant) -> list[Action]:
        transfer.pieces.clear()
        if transfer.has_room:
            transfer.has_room = False
            self._free_bytes += transfer.room_bytes
        return self._admit(now)

    @staticmethod
    def _send(
        session: PeerSession, message: BlobPiece | BlobTaken, now: Instant, *, frames: tuple[bytes, ...] = ()
    ) -> list[Action]:
        return [session.send(message, now, frames=frames)] if session.may_send(type(message)) else []


def _as_request(message: BlobPush) -> BlobRequest:
    return BlobRequest(
        task_id=message.task_id, attempt=message.attempt, size_bytes=message.size_bytes, sha256=message.sha256
    )


def _piece(message: BlobPull | BlobPush, *, error: ErrorRecord | None) -> BlobPiece:
    return BlobPiece(
        task_id=message.task_id,
        attempt=message.attempt,
        offset_bytes=message.offset_bytes,
        piece=None if error else 0,
        error=error.to_json() if error else None,
    )


def _taken(
    message: BlobPull | BlobPush, *, at_bytes: int = 0, blob_key: str = "", error: ErrorRecord | None = None
) -> BlobTaken:
    return BlobTaken(
        task_id=message.task_id,
        attempt=message.attempt,
        offset_bytes=at_bytes,
        blob_key=blob_key,
        error=error.to_json() if error else None,
    )


def _not_leased(message: BlobPull | BlobPush) -> ErrorRecord:
    return ErrorRecord(
        code=TaskUnknown.code,
        message=f"This endpoint has no task {message.task_id} with such a blob.",
        hint="Drop the task from the spool.",
        fault=Fault.PEER,
    )


def _out_of_step(message: BlobPush) -> ErrorRecord:
    return ErrorRecord(
        code=ProtocolError.code,
        message=f"A piece at byte {message.offset_bytes} was not expected.",
        hint="Begin the upload again.",
        fault=Fault.PEER,
        retryable=True,
    )
