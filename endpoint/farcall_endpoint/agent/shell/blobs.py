"""Blob transfers: payloads and results too large for a message, to the blob store or through the forwarder."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Final, Literal, Protocol

from farcall_common.event_log import UserBytes
from farcall_common.wire import BlobGrant, BlobLocation, BlobPiece, BlobTaken, Message
from farcall_endpoint.agent.core import events as ev
from farcall_endpoint.agent.core.events import Event
from farcall_endpoint.agent.core.relay import Relay, TransferFailed
from farcall_endpoint.agent.core.tasks import Stage, Task, TaskResult
from farcall_endpoint.agent.shell.transfers import Background, Transfers
from farcall_endpoint.host.shared_memory import Frame, copy_of

_logger = logging.getLogger(__name__)

BlobsMode = Literal["auto", "direct", "relay"]

#: After so many seconds the blob store is tried again: what could not be reached may have been away.
_REMEMBER_S: Final = 600.0
_UP: Final = "upload"
_DOWN: Final = "download"


class _Clock(Protocol):
    def monotonic(self) -> float: ...


@dataclasses.dataclass(frozen=True)
class _Transfer:
    """One that waits for memory. ``is_wanted``: whether it still has a purpose when its turn comes."""

    key: tuple[str, str]
    size_bytes: int
    is_wanted: Callable[[], bool]
    start: Callable[[], None]


class Blobs:
    """Carries blobs for an agent; the outcomes are events for its core.

    Payloads and results are in memory only while they are on their way. Further ones wait, payloads in the blob store
    and results in the spool, until those are through, so that memory is bounded however many there are.

    :param mode: ``direct`` by URL only, ``relay`` by the forwarder only, ``auto`` by the forwarder while the blob store
        cannot be reached.
    :param send: sends a message to the forwarder.
    :param emit: takes the events for the core, during a turn and before :meth:`settle`.
    :param memory_bytes: what all transfers may take together; a single one is always let through.
    """

    def __init__(
        self,
        mode: BlobsMode,
        *,
        background: Background,
        transfers: Transfers,
        clock: _Clock,
        send: Callable[[Message, tuple[bytes, ...]], None],
        emit: Callable[[Event], None],
        memory_bytes: int,
    ) -> None:
        self._mode = mode
        self._background = background
        self._transfers = transfers
        self._clock = clock
        self._relay = Relay(send)
        self._emit = emit
        self._memory_bytes = memory_bytes
        self._waiting: collections.deque[_Transfer] = collections.deque()
        self._under_way: dict[tuple[str, str], int] = {}  # bytes in memory, by kind and task
        self._relayed_uploads: set[tuple[str, str]] = set()
        self._relayed_pieces: dict[str, Callable[[str], None]] = {}
        self._over: list[tuple[str, str]] = []  # their memory is free at the end of the turn
        self._relayed_until = 0.0
        self._unreachable = ""  # why, as long as it counts

    # -- the session ---------------------------------------------------------------------------------------------------

    def opened(self, piece_bytes: int) -> None:
        """A session is open; its forwarder relays pieces of so many bytes, or nothing."""
        self._relay.opened(piece_bytes, now=self._clock.monotonic())

    def closed(self) -> None:
        """The session has ended, and with it relayed uploads; the core requests other uploads again."""
        self._relay.closed()
        self._waiting = collections.deque(each for each in self._waiting if each.key[0] == _DOWN)
        dropped, self._relayed_uploads = self._relayed_uploads, set()
        for key in dropped:
            self._release(key)
        pieces, self._relayed_pieces = self._relayed_pieces, {}
        for done in pieces.values():
            done("the session has ended")

    def received(self, message: BlobPiece | BlobTaken, frames: tuple[bytes, ...]) -> None:
        """A message of the forwarder about a relayed blob."""
        self._relay.received(message, frames, now=self._clock.monotonic())

    def tick(self) -> None:
        """Time has passed."""
        self._relay.tick(now=self._clock.monotonic())

    def next_deadline(self) -> float | None:
        """The monotonic second at which :meth:`tick` may have something to do."""
        return self._relay.next_deadline()

    # -- actions of the core -------------------------------------------------------------------------------------------

    def fetch(self, task: Task) -> None:
        """Get a payload, as soon as there is memory for it."""
        blob = task.spec.payload_blob
        assert blob is not None
        start = functools.partial(self._fetch, task, blob)
        self._enqueue(_Transfer((_DOWN, task.task_id), blob.size_bytes, lambda: task.stage is Stage.FETCHING, start))

    def upload(self, task: Task, grant: BlobGrant, body: Callable[[], Frame]) -> None:
        """Put a result where it was granted, as soon as there is memory for it; only then ``body`` is called."""
        result = task.result
        assert result is not None
        start = functools.partial(self._upload, task, grant, result, body)
        is_wanted = functools.partial(_needs_upload, task)
        self._enqueue(_Transfer((_UP, task.task_id), result.size_bytes, is_wanted, start))

    def settle(self) -> None:
        """A turn has ended, and what it brought is in the spool: free the memory for other transfers."""
        over, self._over = self._over, []
        for key in over:
            self._release(key)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _enqueue(self, transfer: _Transfer) -> None:
        self._waiting.append(transfer)
        self._start_waiting()

    def _release(self, key: tuple[str, str]) -> None:
        self._under_way.pop(key, None)
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting:
            transfer = self._waiting[0]
            if transfer.is_wanted() and transfer.key not in self._under_way:
                taken_bytes = sum(self._under_way.values())
                if taken_bytes and taken_bytes + transfer.size_bytes > self._memory_bytes:
                    return
                self._under_way[transfer.key] = transfer.size_bytes
                self._waiting.popleft()
                transfer.start()
            else:
                self._waiting.popleft()  # the core asks again for one that was under way and failed

    # -- by URL --------------------------------------------------------------------------------------------------------

    def _fetch(self, task: Task, blob: BlobLocation) -> None:
        if self.is_relayed:
            self._pull(task, blob)
            return

        def job() -> Callable[[], None]:
            try:
                if blob.url is None:
                    raise TransferFailed("no address came with them", retryable=False)
                payload = self._transfers.download(blob.url, sha256=blob.sha256, size_bytes=blob.size_bytes)
            except TransferFailed as failure:
                if self._may_relay(failure):
                    return functools.partial(self._fall_back, str(failure), functools.partial(self._pull, task, blob))
                return functools.partial(self._not_fetched, task, str(failure))
            return functools.partial(self._arrived, task, payload)

        self._background.submit(job)

    def _upload(self, task: Task, grant: BlobGrant, result: TaskResult, read: Callable[[], Frame]) -> None:
        body = read()
        location = BlobLocation(blob_key=grant.blob_key, size_bytes=result.size_bytes, sha256=result.sha256)
        if self.is_relayed:
            self._push(task, location, body)
            return

        def job() -> Callable[[], None]:
            try:
                self._transfers.upload(grant.upload_url, body, headers=grant.headers)
            except TransferFailed as failure:
                if self._may_relay(failure):
                    proceed = functools.partial(self._push, task, location, body)
                    return functools.partial(self._fall_back, str(failure), proceed)
                return self._not_uploaded(task, failure)
            return functools.partial(self._stored, task, location)

        self._background.submit(job)

    def _arrived(self, task: Task, payload: bytes) -> None:
        self._unreachable = ""
        self._fetched(task, payload)

    def _fetched(self, task: Task, payload: bytes) -> None:
        self._emit(ev.PayloadFetched(task.task_id, task.seq, UserBytes([payload])))
        self._over.append((_DOWN, task.task_id))

    def _not_fetched(self, task: Task, reason: str) -> None:
        self._emit(ev.FetchFailed(task.task_id, task.seq, reason))
        self._over.append((_DOWN, task.task_id))

    def _stored(self, task: Task, location: BlobLocation) -> None:
        self._unreachable = ""
        self._uploaded(task, location)

    def _uploaded(self, task: Task, location: BlobLocation) -> None:
        self._emit(ev.ResultUploaded(task.task_id, task.seq, location))
        self._over.append((_UP, task.task_id))

    # -- pieces of files -----------------------------------------------------------------------------------------------

    def upload_piece(
        self,
        request_id: str,
        location: BlobLocation,
        body: bytes,
        grant: BlobGrant | None,
        done: Callable[[str], None],
        *,
        background: Background,
    ) -> None:
        """Put a piece of a file that a forwarder has requested.

        :param grant: None: by the forwarder.
        :param done: gets why it could not be put, or an empty text.
        :param background: its threads do it.
        """
        if grant is None or self.is_relayed:
            self._push_piece(request_id, location, body, done)
            return

        def job() -> Callable[[], None]:
            try:
                self._transfers.upload(grant.upload_url, body, headers=grant.headers)
            except TransferFailed as failure:
                if self._may_relay(failure):
                    proceed = functools.partial(self._push_piece, request_id, location, body, done)
                    return functools.partial(self._fall_back, str(failure), proceed)
                return functools.partial(done, str(failure))
            return functools.partial(done, "")

        background.submit(job)

    def _push_piece(self, request_id: str, location: BlobLocation, body: bytes, done: Callable[[str], None]) -> None:
        def ended(outcome: Frame | TransferFailed) -> None:
            self._relayed_pieces.pop(request_id, None)
            done(self._why(outcome) if isinstance(outcome, TransferFailed) else "")

        self._relayed_pieces[request_id] = done
        self._relay.upload(request_id, 0, location, body, ended, now=self._clock.monotonic())

    def store_unreachable(self, reason: str) -> bool:
        """The transfer process cannot reach the blob store; whether the forwarder relays for it."""
        if self._mode != "auto":
            return self._mode == "relay"
        self._fall_back(reason, lambda: None)
        return True

    def pull_piece(self, request_id: str, location: BlobLocation, done: Callable[[bytes, str], None]) -> None:
        """Get a piece of a file by the forwarder; ``done`` gets its bytes, or why they cannot be had."""

        def ended(outcome: Frame | TransferFailed) -> None:
            if isinstance(outcome, TransferFailed):
                done(b"", self._why(outcome))
            else:
                done(bytes(copy_of(outcome)), "")

        self._relay.download(request_id, 0, location, ended, now=self._clock.monotonic())

    # -- by the forwarder ----------------------------------------------------------------------------------------------

    @property
    def is_relayed(self) -> bool:
        """Whether blobs go by the forwarder at the moment."""
        return self._mode == "relay" or (self._mode == "auto" and self._clock.monotonic() < self._relayed_until)

    def _may_relay(self, failure: TransferFailed) -> bool:
        return self._mode == "auto" and failure.is_unreachable

    def _fall_back(self, reason: str, proceed: Callable[[], None]) -> None:
        if reason and not self._unreachable:
            _logger.warning("the blob store cannot be reached (%s): blobs go by the forwarder from now on", reason)
        self._unreachable = reason
        self._relayed_until = self._clock.monotonic() + _REMEMBER_S
        proceed()

    def _why(self, failure: TransferFailed) -> str:
        return (
            f"{failure}; the blob store cannot be reached: {self._unreachable}" if self._unreachable else str(failure)
        )

    def _pull(self, task: Task, blob: BlobLocation) -> None:
        def done(outcome: Frame | TransferFailed) -> None:
            if isinstance(outcome, TransferFailed):
                self._not_fetched(task, self._why(outcome))
            else:
                self._fetched(task, bytes(copy_of(outcome)))

        self._relay.download(task.task_id, task.attempt, blob, done, now=self._clock.monotonic())

    def _push(self, task: Task, location: BlobLocation, body: Frame) -> None:
        key = (_UP, task.task_id)

        def done(outcome: Frame | TransferFailed) -> None:
            self._relayed_uploads.discard(key)
            if isinstance(outcome, TransferFailed):
                self._not_uploaded(task, outcome)()
            else:
                self._uploaded(task, location)

        self._relayed_uploads.add(key)
        self._relay.upload(task.task_id, task.attempt, location, body, done, now=self._clock.monotonic())

    def _not_uploaded(self, task: Task, failure: TransferFailed) -> Callable[[], None]:
        reason, retryable = self._why(failure), failure.retryable

        def report() -> None:
            self._emit(ev.UploadFailed(task.task_id, task.seq, reason, retryable))
            self._over.append((_UP, task.task_id))

        return report


def _needs_upload(task: Task) -> bool:
    return task.stage is Stage.FINISHED and task.result is not None and task.result.needs_upload
