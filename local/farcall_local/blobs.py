"""Blob server of the local tier: uploads and downloads by signed URLs, directly to and from files. It deletes old
blobs, as the lifecycle rule of a bucket does."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import socket
import time
import urllib.parse
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, Final

import uvicorn
import uvloop

from farcall_common.errors import BlobUnknown, FarcallError, InvalidRequest, Unavailable
from farcall_common.http_errors import status_of
from farcall_common.http_limits import LimitedHttp
from farcall_common.store.blobs_files import FileBlobs
from farcall_common.store.model import BlobRef

_PIECE_BYTES: Final = 256 * 1024
#: Like ``retention.blob_days`` of the cloud's profiles: the maximum wait of a task, its retention, and a day.
_KEPT_S: Final = 61 * 86_400.0
_PIECES_KEPT_S: Final = 86_400.0
_EXPIRE_EVERY_S: Final = 3600.0
#: Failures of one kind are logged this often.
_LOG_EVERY_S: Final = 60.0

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_logger = logging.getLogger(__name__)


class _ClientDisconnected(Exception):
    """The client disconnected before the end of its body."""


class BlobServer:
    """An ASGI application: ``PUT`` and ``GET`` with a URL that was signed for this method and blob."""

    def __init__(self, blobs: FileBlobs, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._blobs = blobs
        self._clock = clock
        self._logged_at = -_LOG_EVERY_S

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            blob_key = scope["path"].removeprefix("/")
            query = dict(urllib.parse.parse_qsl(scope["query_string"].decode("ascii", "replace")))
            if scope["method"] == "PUT":
                self._blobs.check("PUT", blob_key, query)
                await self._put(BlobRef(blob_key, int(query["size_bytes"]), query["sha256"]), receive)
                await _answer(send, 200, b"")
            elif scope["method"] == "GET":
                self._blobs.check("GET", blob_key, query)
                await self._get(blob_key, send)
            else:
                await _answer(send, 405, b"Blobs are read by GET and written by PUT.")
        except FarcallError as error:
            if isinstance(error, Unavailable):
                self._log(error)
            await _refuse(send, error)
        except _ClientDisconnected:
            pass

    def _log(self, error: Unavailable) -> None:
        if self._clock() >= self._logged_at + _LOG_EVERY_S:
            self._logged_at = self._clock()
            _logger.warning("uploads fail: %s", error)

    async def _put(self, ref: BlobRef, receive: Receive) -> None:
        with self._blobs.new(ref.blob_key) as blob:
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _ClientDisconnected
                blob.write(message.get("body", b""))
                if blob.size_bytes > ref.size_bytes:
                    raise InvalidRequest(
                        f"The body is longer than the {ref.size_bytes} bytes that the URL was signed for."
                    )
                more = message.get("more_body", False)
            if blob.ref != ref:
                raise InvalidRequest("The body differs from what the URL was signed for: another length or SHA-256.")
            await asyncio.to_thread(blob.commit)

    async def _get(self, blob_key: str, send: Send) -> None:
        try:
            file = self._blobs.path(blob_key).open("rb")
        except FileNotFoundError:
            raise BlobUnknown(f"There is no blob {blob_key}.") from None
        with file:
            size_bytes = os.fstat(file.fileno()).st_size
            await send(_head(200, size_bytes, b"application/octet-stream"))
            left = size_bytes
            while piece := file.read(_PIECE_BYTES):
                left -= len(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": left > 0})
            if not size_bytes:
                await send({"type": "http.response.body", "body": b""})


async def _answer(send: Send, status: int, text: bytes) -> None:
    await send(_head(status, len(text), b"text/plain; charset=utf-8"))
    await send({"type": "http.response.body", "body": text})


async def _refuse(send: Send, error: FarcallError) -> None:
    """Send an error in the API's format."""
    text = json.dumps(error.record.to_json()).encode()
    await send(_head(status_of(type(error)), len(text), b"application/json", retry_after_s=error.record.retry_after_s))
    await send({"type": "http.response.body", "body": text})


def _head(status: int, size_bytes: int, content_type: bytes, *, retry_after_s: float | None = None) -> Message:
    headers = [(b"content-length", str(size_bytes).encode()), (b"content-type", content_type)]
    if retry_after_s is not None:
        headers.append((b"retry-after", f"{retry_after_s:.0f}".encode()))
    return {"type": "http.response.start", "status": status, "headers": headers}


async def _expire(blobs: FileBlobs) -> None:
    while True:
        try:
            if expired := await asyncio.to_thread(
                blobs.expire, older_than_s=_KEPT_S, pieces_older_than_s=_PIECES_KEPT_S
            ):
                _logger.info("expired %d blobs", expired)
        except OSError as error:
            _logger.warning("cannot delete old blobs: %s", error)
        await asyncio.sleep(_EXPIRE_EVERY_S)


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listener", type=int, required=True, help="file descriptor of an inherited listening socket")
    parser.add_argument("--directory", type=Path, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    listener = socket.socket(fileno=arguments.listener)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    blobs = FileBlobs(arguments.directory, url=url, key=os.environ["FARCALL_BLOB_KEY"])
    blobs.remove_unfinished()
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve(blobs, listener))


async def _serve(blobs: FileBlobs, listener: socket.socket) -> None:
    # No access log: it would contain signed URLs.
    config = uvicorn.Config(
        BlobServer(blobs),
        http=LimitedHttp,
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
    )
    async with asyncio.TaskGroup() as group:
        expiring = group.create_task(_expire(blobs))
        await uvicorn.Server(config).serve(sockets=[listener])
        expiring.cancel()


if __name__ == "__main__":
    main()
