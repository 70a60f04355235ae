"""Files of this endpoint for tasks at other endpoints: reads what a forwarder requests, and uploads it.

Reading takes as long as the file system does, so it has threads of its own, and few requests are under way at a time;
no payer waits for another one's. Nothing is kept over the end of a session: the reader asks again.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection
from typing import Final

import zmq

from farcall_common.fairness import FairQueue
from farcall_common.wire import BlobGrant, BlobLocation, BlobRequest, FileRead, FileReason, FileWanted, Message
from farcall_endpoint.agent.shell.blobs import Blobs
from farcall_endpoint.agent.shell.transfers import Background
from farcall_endpoint.files.reading import NotReadable, ReadableFiles, ReadPiece

_logger = logging.getLogger(__name__)

_AT_ONCE: Final = 4
"""Pieces in memory: as many threads read and upload them."""
_AT_ONCE_OF_ONE: Final = 2
"""The others are for payers without any: a file system of one may hang."""


@dataclasses.dataclass(slots=True, eq=False)
class _Request:
    message: FileWanted
    submitter: str
    piece: ReadPiece | None = None
    is_over: bool = False


def _payer(message: FileWanted) -> str:
    return message.payer or message.submitter


class FilesForOthers:
    """The requests that forwarders have made.

    :param readable: what may be read here; None: nothing.
    :param send: sends a message to the forwarder, if there is a session.
    :param owner_or: returns a submitter, empty if it is the endpoint's owner.
    """

    def __init__(
        self,
        readable: ReadableFiles | None,
        *,
        blobs: Blobs,
        send: Callable[[Message], None],
        owner_or: Callable[[str], str],
        poller: zmq.Poller,
    ) -> None:
        self._readable = readable
        self._blobs = blobs
        self._send = send
        self._owner_or = owner_or
        self._poller = poller
        self._background: Background | None = None  # most endpoints need none
        self._queue: FairQueue[_Request] = FairQueue()
        self._taken = 0
        self._open: dict[str, _Request] = {}

    # -- the loop ------------------------------------------------------------------------------------------------------

    def finish(self, ready: Collection[object]) -> None:
        """Do what threads have left to be done."""
        if self._background is not None and self._background.fileno() in ready:
            self._background.finish()

    def close(self) -> None:
        """The agent ends."""
        if self._background is not None:
            self._background.close()

    # -- the forwarder -------------------------------------------------------------------------------------------------

    def requested(self, message: FileWanted) -> None:
        """Read a piece of a file as soon as there is a thread for it."""
        if self._readable is None:
            self._send(FileRead(request_id=message.request_id, reason=FileReason.SWITCHED_OFF))
            return
        if message.request_id in self._open:
            return
        request = _Request(message, self._owner_or(message.submitter))
        self._open[message.request_id] = request
        self._queue.add(_payer(message), request)
        self._begin(self._readable)

    def granted(self, grant: BlobGrant) -> bool:
        """The forwarder grants the upload of a piece. False if it is another one's."""
        request = self._open.get(grant.task_id)
        if request is None or request.piece is None:
            return False
        if grant.error is not None:
            self._end(request, FileReason.NOT_READ)
        else:
            self._upload(request, grant)
        return True

    def closed(self) -> None:
        """The session has ended."""
        self._queue.clear()
        for request in self._open.values():
            if request.piece is not None and not request.is_over:
                self._release(request)  # no grant will come
            request.is_over = True
        self._open.clear()

    # -- requests ------------------------------------------------------------------------------------------------------

    def _begin(self, readable: ReadableFiles) -> None:
        while self._taken < _AT_ONCE:
            taken = self._queue.take(new_submitters_only=self._taken >= _AT_ONCE_OF_ONE)
            if taken is None:
                break
            self._taken += 1
            self._work().submit(functools.partial(self._read, readable, taken[1]))

    def _work(self) -> Background:
        if self._background is None:
            self._background = Background(threads=_AT_ONCE)
            self._poller.register(self._background.fileno(), zmq.POLLIN)
        return self._background

    def _read(self, readable: ReadableFiles, request: _Request) -> Callable[[], None]:
        """In a thread."""
        wanted = request.message
        try:
            piece = readable.read(
                request.submitter, wanted.path, offset_bytes=wanted.offset_bytes, max_bytes=wanted.max_bytes
            )
        except NotReadable as refusal:
            return functools.partial(self._was_refused, request, refusal.reason, str(refusal))
        except Exception as error:  # noqa: BLE001 - a defect is the end of one request
            return functools.partial(self._was_refused, request, FileReason.NOT_READ, repr(error))
        return functools.partial(self._was_read, request, piece)

    def _was_refused(self, request: _Request, reason: FileReason, text: str) -> None:
        wanted = request.message
        _logger.info("a task of %s at another endpoint cannot read %r: %s", wanted.submitter, wanted.path, text)
        self._end(request, reason)

    def _was_read(self, request: _Request, piece: ReadPiece) -> None:
        if request.is_over:
            self._release(request)
            return
        request.piece = piece
        wanted = request.message
        if not wanted.max_bytes:  # once for each file that a task reads
            _logger.info("a task of %s at another endpoint reads %r", wanted.submitter, wanted.path)
        if not piece.data:
            self._end(request)
        elif self._blobs.is_relayed:
            self._upload(request, None)
        else:
            asked = BlobRequest(
                task_id=request.message.request_id, attempt=0, size_bytes=len(piece.data), sha256=piece.sha256
            )
            self._send(asked)

    def _upload(self, request: _Request, grant: BlobGrant | None) -> None:
        piece = request.piece
        assert piece is not None
        location = BlobLocation(blob_key="", size_bytes=len(piece.data), sha256=piece.sha256)
        request.piece = None  # what follows is not granted again, and does not end with the session
        uploaded = functools.partial(self._uploaded, request, piece)
        self._blobs.upload_piece(
            request.message.request_id, location, piece.data, grant, uploaded, background=self._work()
        )

    def _uploaded(self, request: _Request, piece: ReadPiece, problem: str) -> None:
        request.piece = piece
        self._end(request, FileReason.NOT_READ if problem else None)

    def _end(self, request: _Request, reason: FileReason | None = None) -> None:
        self._release(request)
        if request.is_over:
            return
        request.is_over = True
        self._open.pop(request.message.request_id, None)
        piece = request.piece
        if reason is not None or piece is None:
            answer = FileRead(request_id=request.message.request_id, reason=reason or FileReason.NOT_READ)
        else:
            answer = FileRead(
                request_id=request.message.request_id,
                size_bytes=piece.size_bytes,
                version=piece.version,
                piece_bytes=len(piece.data),
                sha256=piece.sha256,
            )
        self._send(answer)

    def _release(self, request: _Request) -> None:
        """Memory and a thread are free for another request."""
        self._taken -= 1
        self._queue.done(_payer(request.message))
        if self._readable is not None:
            self._begin(self._readable)
