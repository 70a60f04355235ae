"""A forwarder that does what a test says: a CURVE ROUTER that opens streams and pushes ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import zmq

from farcall_common.wire import (
    Envelope,
    Goodbye,
    Heartbeat,
    Message,
    OpenStream,
    ResultsReady,
    StreamOpened,
    StreamResult,
    decode,
    encode,
)
from tests.waiting import WAIT_S


class ScriptedForwarder:
    """Opens every stream that is asked for, unless ``silent``. Once ``mute`` it sends no heartbeat, as if the way
    were cut where neither side sees it. All methods may be called from the test's thread."""

    def __init__(self, *, heartbeat_s: float = 30.0, silent: bool = False) -> None:
        self.heartbeat_s = heartbeat_s
        self.silent = silent
        self.mute = False
        #: What clients said, in order.
        self.heard: list[Message] = []
        self.streams_opened = 0
        self._changed = threading.Condition()
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._client: bytes | None = None
        public_key, secret_key = zmq.curve_keypair()
        self.server_key = public_key.decode()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 200)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.CURVE_SERVER, 1)
        self._router.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
        self.address = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> ScriptedForwarder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.die()

    @property
    def way(self) -> dict[str, Any]:
        """What the API says of this forwarder."""
        return {
            "forwarders": [{"address": self.address, "server_key": self.server_key}],
            "ticket": "a-ticket",
            "ticket_expires_at": 4e9,
            "heartbeat_s": self.heartbeat_s,
        }

    def push(self, results: Sequence[StreamResult], frames: Sequence[bytes] = (), *, cursor: str = "1") -> None:
        """Push ends to the client that came last."""
        self.send(ResultsReady(cursor=cursor, results=tuple(results)), frames)

    def send(self, message: Message, frames: Sequence[bytes] = ()) -> None:
        """Send anything to the client that came last."""
        self.send_raw(encode(Envelope(message, tuple(frames))))

    def send_raw(self, frames: Sequence[bytes]) -> None:
        """Send bytes that may be no message."""

        def order() -> None:
            assert self._client is not None
            self._router.send_multipart([self._client, *frames])

        self._orders.put(order)

    def die(self) -> None:
        """Close the socket without a word."""
        self._orders.put(None)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def wait_for(self, condition: Callable[[ScriptedForwarder], bool]) -> None:
        """Wait until something was heard."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), WAIT_S), f"heard only {self.heard}"

    def said(self, kind: type[Message]) -> list[Message]:
        """What was heard of one kind."""
        return [message for message in self.heard if isinstance(message, kind)]

    def _run(self) -> None:
        try:
            while True:
                if self._router.poll(5):
                    self._hear()
                while not self._orders.empty():
                    order = self._orders.get()
                    if order is None:
                        return
                    order()
        finally:
            self._router.close()
            self._context.term()

    def _hear(self) -> None:
        client, *frames = self._router.recv_multipart()
        message = decode(frames).message
        if isinstance(message, OpenStream):
            self._client = client
        if isinstance(message, OpenStream) and not self.silent:
            opened = StreamOpened(
                session_id="a-session",
                protocol_version=1,
                heartbeat_s=self.heartbeat_s,
                cursor=message.cursor or "0",
                resumed=message.cursor is not None,
            )
            self._router.send_multipart([client, *encode(Envelope(opened))])
        if isinstance(message, Heartbeat) and not self.mute:
            self._router.send_multipart([client, *encode(Envelope(Heartbeat(at=0.0)))])
        if isinstance(message, Goodbye):
            self._client = None
        with self._changed:
            self.heard.append(message)
            self.streams_opened += isinstance(message, OpenStream)
            self._changed.notify_all()
