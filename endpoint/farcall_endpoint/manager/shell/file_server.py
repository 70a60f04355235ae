"""Copies of files from node to node: the server of a manager, and how another one gets a copy there.

A manager that asks for a copy proves that it has the key of the agent, which tasks never get: the server sends random
bytes, and gets an HMAC of these and the request back. The request names the server's address, so that no other node can
pass the proof on. The server proves the same: the request has random bytes, too, and the answer ends with an HMAC of
request, size and blocks. What is sent is not encrypted. Bytes of files are not in the HMAC: their receiver checks the
SHA-256.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator
from typing import BinaryIO, Final, NamedTuple

import msgspec

from farcall_common.errors import FarcallError
from farcall_endpoint.contracts.agent_manager import BlocksWanted, FileContent
from farcall_endpoint.host.logs import RepeatedLines

_logger = logging.getLogger(__name__)

SILENCE_LIMIT_S: Final = 30.0
"""Seconds for which the peer may neither send nor receive."""
PIECE_BYTES: Final = 2**18
_MOST_READERS: Final = 16
"""Maximum number of managers served concurrently, each by a thread."""
_MOST_HANDSHAKES: Final = 32
"""Maximum number of connections that have not yet proved to be managers', each with a thread."""
_MOST_REQUEST_BYTES: Final = 2**15
_CONNECT_LIMIT_S: Final = 5.0
_HANDSHAKE_LIMIT_S: Final = 5.0
_COPY_LIMIT_S: Final = 60.0
_LEAST_BYTES_PER_S: Final = 1e6
"""Least rate of a copy: it fails after ``_COPY_LIMIT_S`` plus the time that its bytes take at this rate."""
_ROOM_LIMIT_S: Final = 20.0
"""Seconds for which a request waits for a free reader before its connection is closed."""
_PAUSE_S: Final = 1.0
_END_LIMIT_S: Final = 2.0
_CHALLENGE_BYTES: Final = 32
_ANSWER: Final = b"answer"
"""First bytes of the HMAC of an answer. They keep an answer from being the proof of a request."""
_MAC_BYTES: Final = 32
_LENGTH_BYTES: Final = 2
_SIZE_BYTES: Final = 8
_MISSING: Final = 2**64 - 1
"""Size in an answer that means: the node has no such copy."""
_encode: Final = msgspec.msgpack.Encoder().encode


class _Request(msgspec.Struct, frozen=True, array_like=True):
    """A manager's request to the server at ``address`` (``host:port``), for a copy of a file or for blocks."""

    address: str
    content: FileContent | None
    blocks: BlocksWanted | None = None
    nonce: bytes = b""


_decode: Final = msgspec.msgpack.Decoder(_Request).decode


Wanted = FileContent | BlocksWanted


class Range(NamedTuple):
    """Bytes of a file that is sent."""

    file: BinaryIO
    start: int
    size: int


Answered = Generator[Range | bytes | memoryview, None, None]
"""Parts of an answer: ranges of files, or blocks in pieces."""


class SourceFailed(Exception):
    """A copy could not be had from a source."""

    def __init__(self, reason: str, *, reached: bool = True) -> None:
        super().__init__(reason)
        self.reached = reached


class FileServer:
    """Gives copies of files, or blocks, to other managers.

    :param read: gives what is wanted in parts, or raises KeyError; called in several threads.
    :raises OSError: if no port is free.
    """

    def __init__(self, host: str, *, read: Callable[[Wanted], Answered]) -> None:
        self._read = read
        self._key = b""
        self._repeated = RepeatedLines(_logger)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=_MOST_HANDSHAKES)
        #: ``host:port``
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._room = threading.BoundedSemaphore(_MOST_READERS)
        self._connections: set[socket.socket] = set()
        self._handshakes: dict[socket.socket, None] = {}  # those of the connections; the oldest first
        self._lock = threading.Lock()  # of these
        self._threads: set[threading.Thread] = set()
        self._accepting: threading.Thread | None = None
        self._is_closed = threading.Event()

    def start(self, key: bytes) -> None:
        """Serve those who have this key, if that is not done yet."""
        self._key = key
        if self._accepting is None:
            self._accepting = started(self._accept, "farcall-file-server")

    def close(self) -> None:
        """End all connections."""
        self._is_closed.set()
        for each in (self._socket, *self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        if self._accepting is not None:
            self._accepting.join()
        for thread in list(self._threads):
            thread.join(_END_LIMIT_S)
        self._socket.close()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if not self._is_closed.is_set():
                    self._repeated.log(logging.WARNING, "the server of files cannot accept a connection: %s", error)
                    self._is_closed.wait(_PAUSE_S)  # too many open files, for instance
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="farcall-file-reader", daemon=True)
            self._connections.add(connection)
            self._threads.add(thread)
            with self._lock:
                self._handshakes[connection] = None
                oldest = next(iter(self._handshakes)) if len(self._handshakes) > _MOST_HANDSHAKES else None
            if oldest is not None:  # who lacks the key cannot keep managers out: their handshake takes a moment
                self._end_handshake(oldest)
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            try:
                thread.start()
            except RuntimeError as error:
                self._repeated.log(logging.ERROR, "%s cannot run: %s", thread.name, error)
                self._forget(connection, thread)
                connection.close()
                self._is_closed.wait(_PAUSE_S)

    def _end_handshake(self, connection: socket.socket) -> None:
        with self._lock:
            self._handshakes.pop(connection, None)

    def _forget(self, connection: socket.socket, thread: threading.Thread) -> None:
        self._end_handshake(connection)
        self._connections.discard(connection)
        self._threads.discard(thread)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                requested = self._requested(connection)
                self._end_handshake(connection)
                if requested is None or not self._room.acquire(timeout=_ROOM_LIMIT_S):
                    return
                try:
                    self._answer(connection, *requested)
                finally:
                    self._room.release()
        except (OSError, ValueError, FarcallError) as error:  # it has ended, or is no manager, or a block is damaged
            _logger.debug("a reader of files: %s", error)
        finally:
            self._forget(connection, threading.current_thread())

    def _requested(self, connection: socket.socket) -> tuple[Wanted, hmac.HMAC] | None:
        """A request, and the HMAC of its answer as it begins; None if the peer is not a manager of this agent, or
        wants something of another node."""
        ends_at = time.monotonic() + _HANDSHAKE_LIMIT_S
        challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        _limit(connection, ends_at)
        connection.sendall(challenge)
        length = int.from_bytes(_received(connection, _LENGTH_BYTES, ends_at))
        if length > _MOST_REQUEST_BYTES:
            raise ValueError(f"a request of {length:,} bytes")
        request = _received(connection, length, ends_at)
        proof = _received(connection, _MAC_BYTES, ends_at)
        if not hmac.compare_digest(proof, hmac.digest(self._key, challenge + request, "sha256")):
            self._repeated.log(logging.WARNING, "a request for a file without the key of this endpoint's agent")
            return None
        wanted = _decode(request)
        if wanted.address != self.address:
            message = "a request for a file that was meant for the node at %s"
            self._repeated.log(logging.WARNING, message, wanted.address)
            return None
        content = wanted.content or wanted.blocks
        return None if content is None else (content, _mac_of_answer(self._key, challenge, request))

    def _answer(self, connection: socket.socket, content: Wanted, mac: hmac.HMAC) -> None:
        connection.settimeout(SILENCE_LIMIT_S)
        with contextlib.closing(self._read(content)) as parts:
            try:
                part = next(parts, None)
                size = content.size_bytes.to_bytes(_SIZE_BYTES)
            except (KeyError, OSError, FarcallError, OverflowError):
                part, size = None, _MISSING.to_bytes(_SIZE_BYTES)
            mac.update(size)
            connection.sendall(size)
            while part is not None:
                if isinstance(part, Range):
                    connection.sendfile(*part)
                else:
                    mac.update(part)
                    connection.sendall(part)
                part = next(parts, None)
            connection.sendall(mac.digest())


class FileClient:
    """Gets copies from other managers, in several threads."""

    def __init__(self) -> None:
        self._key = b""
        self._sockets: set[socket.socket] = set()
        self._is_closed = threading.Event()

    def set_key(self, key: bytes) -> None:
        """Ask with this key from now on."""
        self._key = key

    def close(self) -> None:
        """End all connections."""
        self._is_closed.set()
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def read(self, content: Wanted, address: str) -> Generator[memoryview, None, None]:
        """A copy, or blocks, of the manager at ``address``, in pieces; each is valid until the next one. The pieces
        count when the generator has ended: then the server has proved that it has the key.

        :raises SourceFailed: if it cannot be had there.
        """
        host, _, port = address.rpartition(":")
        buffer = memoryview(bytearray(PIECE_BYTES))
        ends_at = time.monotonic() + _COPY_LIMIT_S + content.size_bytes / _LEAST_BYTES_PER_S
        try:
            connection = socket.create_connection((host, int(port)), timeout=_CONNECT_LIMIT_S)
        except (OSError, ValueError, OverflowError) as error:  # the last: a port above 65,535
            raise SourceFailed(f"it cannot be reached: {error}", reached=False) from error
        with connection:
            self._sockets.add(connection)
            try:
                if self._is_closed.is_set():  # it may not have seen this socket
                    raise SourceFailed("the manager ends")
                challenge = _received(connection, _CHALLENGE_BYTES, ends_at)
                nonce = secrets.token_bytes(_CHALLENGE_BYTES)
                if isinstance(content, FileContent):
                    request = _encode(_Request(address, content, nonce=nonce))
                else:
                    request = _encode(_Request(address, None, content, nonce))
                if len(request) > _MOST_REQUEST_BYTES:
                    raise SourceFailed(f"a request of {len(request):,} bytes")
                proof = hmac.digest(self._key, challenge + request, "sha256")
                connection.sendall(len(request).to_bytes(_LENGTH_BYTES) + request + proof)
                mac = _mac_of_answer(self._key, challenge, request)
                size = _received(connection, _SIZE_BYTES, ends_at)
                mac.update(size)
                has_it = int.from_bytes(size) == content.size_bytes
                left = content.size_bytes if has_it else 0
                while left:
                    _limit(connection, ends_at)
                    count = connection.recv_into(buffer, min(left, PIECE_BYTES))
                    if not count:
                        raise SourceFailed("the connection was closed in the middle")
                    left -= count
                    if isinstance(content, BlocksWanted):
                        mac.update(buffer[:count])
                    yield buffer[:count]
                if not hmac.compare_digest(_received(connection, _MAC_BYTES, ends_at), mac.digest()):
                    raise SourceFailed("the answer was made without the key of this endpoint's agent")
                if not has_it:
                    raise SourceFailed("it does not have it")
            except OSError as error:
                raise SourceFailed(f"the connection has failed: {error}") from error
            finally:
                self._sockets.discard(connection)


def _mac_of_answer(key: bytes, challenge: bytes, request: bytes) -> hmac.HMAC:
    return hmac.new(key, _ANSWER + challenge + request, "sha256")


def started(run: Callable[[], None], name: str) -> threading.Thread | None:
    """A thread that runs; None if this process may have no more."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        _logger.error("%s cannot run: %s", name, error)
        return None
    return thread


def _limit(connection: socket.socket, ends_at: float) -> None:
    """Let the next call wait until an instant of :func:`time.monotonic`, and at most ``SILENCE_LIMIT_S`` seconds.

    :raises OSError: if the instant has passed.
    """
    left_s = ends_at - time.monotonic()
    if left_s <= 0:
        raise TimeoutError(errno.ETIMEDOUT, "the time limit has passed")
    connection.settimeout(min(left_s, SILENCE_LIMIT_S))


def _received(connection: socket.socket, count: int, ends_at: float) -> bytes:
    """Receive ``count`` bytes.

    :raises OSError: if the connection ends before, or the bytes have not arrived by ``ends_at``.
    """
    received = bytearray()
    while len(received) < count:
        _limit(connection, ends_at)
        if not (piece := connection.recv(count - len(received))):
            raise ConnectionResetError(errno.ECONNRESET, "the peer closed the connection")
        received += piece
    return bytes(received)
