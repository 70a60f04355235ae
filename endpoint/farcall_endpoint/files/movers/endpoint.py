"""Mover of files of other endpoints: ``endpoint://ENDPOINT/path``. The agent requests pieces of them; they come through
the blob store of the deployment.

The agent of the other endpoint reads the file with the rights of the task's submitter there. Several pieces are
requested ahead. Each is checked, and a file of which one piece has another version than the others is not copied.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import hashlib
import itertools
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

import httpx

from farcall_common.backoff import Backoff
from farcall_common.errors import ErrorRecord
from farcall_common.file_arguments import local_name, shown, source_of, source_path
from farcall_common.http_client import http_client
from farcall_common.object_keys import is_key
from farcall_common.wire import FileReason
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.files import orders
from farcall_endpoint.files.movers import DraftWriter, Found, MoveCancelled, MoveError, ReadOnlyMover
from farcall_endpoint.files.orders import Piece, Report

SCHEME: Final = "endpoint"
_WINDOW: Final = 4
"""Pieces of one file that are requested ahead."""
_LOOK_S: Final = 0.2
"""How often a mover that waits looks whether the file is still needed."""
_TIMEOUT: Final = httpx.Timeout(30.0, connect=5.0)
_TRIES: Final = 3
_FIRST_WAIT_S: Final = 0.4
_LONGEST_WAIT_S: Final = 1.6

_DENIED: Final = {
    FileReason.NOT_PERMITTED: "the task's submitter may not read it at its endpoint",
    FileReason.SWITCHED_OFF: "the owner of its endpoint has switched files off",
    FileReason.NO_RIGHT: "the task's submitter may not use its endpoint, or not any more",
    FileReason.NOT_A_SOURCE: "the task was not submitted with this file",
    FileReason.NOT_LEASED: "the task has ended",
}
_UNSUPPORTED: Final = {
    FileReason.NOT_A_FILE: "it is a directory, a device, or a file whose size is not known, as in /proc",
    FileReason.TOO_LARGE: "it is larger than the deployment passes on (FARCALL_MAX_RELAY_BYTES)",
    orders.SEALED: "the call is sealed, and the file would not be: it passes through the deployment",
    orders.FORWARDER_TOO_OLD: "the deployment is too old to pass files on",
}
_UNREACHABLE: Final = {
    FileReason.NOT_READ: "its endpoint could not read or send it",
    FileReason.NO_ANSWER: "its endpoint does not answer",
    FileReason.BUSY: "its endpoint has too many requests",
    FileReason.QUOTA: "the task's submitter has stored too much in a day; there is room again within hours",
    orders.NOT_CONNECTED: "this endpoint is not connected",
    orders.BLOBS_UNREACHABLE: "the blob store of the deployment",
}


class _Request:
    """A request for a piece, and its answer."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.answer: concurrent.futures.Future[Piece] = concurrent.futures.Future()


class PieceRequests:
    """The requests of a transfer process. May be used from several threads.

    :param report: sends a report to the agent.
    """

    def __init__(self, report: Callable[[Report], None]) -> None:
        self._report = report
        self._numbers = itertools.count(1)
        self._open: dict[int, _Request] = {}
        self._lock = threading.Lock()

    def want(
        self, submitter: str, task_ids: tuple[str, ...], endpoint_id: str, path: str, offset_bytes: int, max_bytes: int
    ) -> _Request:
        """Request a piece of a file."""
        request = _Request(next(self._numbers))
        with self._lock:
            self._open[request.number] = request
        self._report(
            orders.PieceWanted(request.number, submitter, task_ids, endpoint_id, path, offset_bytes, max_bytes)
        )
        return request

    def relay(self, request: _Request, problem: str) -> None:
        """Request the bytes of a piece, as the blob store cannot be reached."""
        request.answer = concurrent.futures.Future()
        self._report(orders.PieceUnreachable(request.number, problem))

    def take(self, request: _Request) -> None:
        """The piece is not needed any more."""
        with self._lock:
            self._open.pop(request.number, None)
        self._report(orders.PieceTaken(request.number))

    def answered(self, piece: Piece) -> None:
        """The agent has answered."""
        with self._lock:
            request = self._open.get(piece.number)
        if request is not None and not request.answer.done():
            request.answer.set_result(piece)


class EndpointMover(ReadOnlyMover):
    """Gets one file, for tasks of one submitter.

    :param cancelled: whether the file is not needed any more.
    """

    def __init__(
        self,
        requests: PieceRequests,
        *,
        submitter: str,
        task_ids: tuple[str, ...],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._requests = requests
        self._submitter = submitter
        self._task_ids = task_ids
        self._cancelled = cancelled
        self._most_bytes = 0

    def stat(self, url: str) -> Found:
        """See :class:`~farcall_endpoint.files.movers.Mover`."""
        request = self._want(url, 0, 0)
        try:
            answer = _wait(request, self._cancelled)
        finally:
            self._requests.take(request)
        self._check(url, answer)
        self._most_bytes = answer.most_bytes
        return Found(answer.size_bytes, answer.version)

    def fetch(
        self, url: str, draft: Path, found: Found, report: Callable[[int], None], cancelled: Callable[[], bool]
    ) -> str:
        """See :class:`~farcall_endpoint.files.movers.Mover`."""
        size_bytes = found.size_bytes or 0
        wanted_bytes = 0
        on_way: collections.deque[tuple[_Request, int]] = collections.deque()
        try:
            with DraftWriter(draft) as file:
                while file.size_bytes < size_bytes:
                    while len(on_way) < _WINDOW and wanted_bytes < size_bytes:
                        length = min(self._most_bytes, size_bytes - wanted_bytes)
                        on_way.append((self._want(url, wanted_bytes, length), length))
                        wanted_bytes += length
                    request, length = on_way[0]
                    file.write(self._data(url, request, length, found.version, cancelled))
                    report(file.size_bytes)
                    self._requests.take(on_way.popleft()[0])
        finally:
            for request, _ in on_way:
                self._requests.take(request)
        return file.sha256()

    def _want(self, url: str, offset_bytes: int, max_bytes: int) -> _Request:
        endpoint_id, path = endpoint_and_path(url)
        if not endpoint_id:
            reason = "its URL names the endpoint by another word than its id; Farcall's client replaces names"
            raise MoveError(outcomes.file_unsupported(shown(url), reason))
        return self._requests.want(self._submitter, self._task_ids, endpoint_id, path, offset_bytes, max_bytes)

    def _data(self, url: str, request: _Request, length: int, version: str, cancelled: Callable[[], bool]) -> bytes:
        """The bytes of a piece."""
        answer = _wait(request, cancelled)
        self._check(url, answer)
        if answer.version != version or answer.piece_bytes != length:
            raise MoveError(outcomes.file_changed(shown(url)))
        data = answer.data
        if not data:
            try:
                data = _download(answer.url, length)
            except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
                self._requests.relay(request, f"{type(error).__name__}: {error}")
                answer = _wait(request, cancelled)
                self._check(url, answer)
                data = answer.data
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem = str(error) or type(error).__name__
                raise MoveError(_record(url, orders.BLOBS_UNREACHABLE, problem)) from error
        if len(data) != length or hashlib.sha256(data).hexdigest() != answer.sha256:
            raise MoveError(_record(url, orders.BLOBS_UNREACHABLE, "a piece is not what was sent"))
        return data

    def _check(self, url: str, answer: Piece) -> None:
        if answer.reason:
            raise MoveError(_record(url, answer.reason, answer.problem))


def endpoint_and_path(url: str) -> tuple[str, str]:
    """The endpoint's id, and the absolute path there, of an ``endpoint://`` URL; the id is empty if it is none."""
    try:
        return str(uuid.UUID(source_of(url))), source_path(url)
    except ValueError:
        return "", ""


@functools.cache
def _client() -> httpx.Client:
    """For all pieces: made when the first one comes."""
    return http_client(timeout=_TIMEOUT, follow_redirects=True, is_local_direct=False)


def _download(url: str, most_bytes: int) -> bytes:
    """The bytes behind a URL of the blob store, and no more than were announced, or a little more.

    :raises httpx.HTTPError, httpx.InvalidURL: if they cannot be had.
    """
    backoff = Backoff(first_s=_FIRST_WAIT_S, most_s=_LONGEST_WAIT_S)
    while True:
        try:
            with _client().stream("GET", url, headers={"accept-encoding": "identity"}) as response:
                if not response.is_success:
                    # Its own words would have the URL, and with it a signature.
                    raise httpx.HTTPError(f"HTTP status {response.status_code}")
                received = bytearray()
                for chunk in response.iter_raw():
                    received += chunk
                    if len(received) > most_bytes:
                        break
                return bytes(received)
        except httpx.HTTPError:
            if backoff.failures + 1 >= _TRIES:
                raise
            time.sleep(backoff.next_s())


def _wait(request: _Request, cancelled: Callable[[], bool]) -> Piece:
    while True:
        if cancelled():
            raise MoveCancelled
        try:
            return request.answer.result(_LOOK_S)
        except TimeoutError:
            continue


def _record(url: str, reason: str, problem: str = "") -> ErrorRecord:
    if reason == FileReason.NOT_FOUND:
        missing = outcomes.object_gone if is_key(local_name(url)) else outcomes.file_not_found
        return missing(shown(url))
    if reason == FileReason.OFFLINE:
        return outcomes.file_endpoint_offline(shown(url))
    if reason in _DENIED:
        return outcomes.file_denied(shown(url), _DENIED[FileReason(reason)])
    if reason in _UNSUPPORTED:
        return outcomes.file_unsupported(shown(url), _UNSUPPORTED[reason])
    text = _UNREACHABLE.get(reason, reason)
    return outcomes.file_unreachable(shown(url), f"{text}: {problem}" if problem else text)
