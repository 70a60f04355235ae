"""Scripted forwarder for result streams: it opens streams and pushes results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from farcall_common import wire
from tests.support.scripted_router import ScriptedRouter


class ScriptedForwarder(ScriptedRouter):
    """Opens every requested stream, unless ``silent``. Once ``mute`` it sends no heartbeat, as if the connection were
    cut where neither side sees it."""

    def __init__(self, *, heartbeat_s: float = 30.0, silent: bool = False) -> None:
        super().__init__(heartbeat_s=heartbeat_s)
        self.silent = silent
        self.mute = False
        #: The clients' messages, in order.
        self.heard: list[wire.Message] = []
        self.streams_opened = 0
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def push(self, results: Sequence[wire.StreamResult], frames: Sequence[bytes] = (), *, cursor: str = "1") -> None:
        """Push results to the client that connected last."""
        self.send(wire.ResultsReady(cursor=cursor, results=tuple(results)), frames)

    def send_raw(self, frames: Sequence[bytes]) -> None:
        """Send bytes that may be no message."""
        self._call(lambda: self._send_frames(frames))

    def said(self, kind: type[wire.Message]) -> list[wire.Message]:
        """The received messages of one kind."""
        return [message for message in self.heard if isinstance(message, kind)]

    def _receive(self, identity: bytes, envelope: wire.Envelope) -> None:
        message = envelope.message
        match message:
            case wire.OpenStream(cursor=cursor):
                self._peer = identity
                self.streams_opened += 1
                if not self.silent:
                    opened = wire.StreamOpened(
                        session_id="a-session",
                        protocol_version=1,
                        heartbeat_s=self.heartbeat_s,
                        cursor=cursor or "0",
                        resumed=cursor is not None,
                    )
                    self._send(opened)
            case wire.Heartbeat() if not self.mute:
                self._send(wire.Heartbeat(at=0.0))
            case wire.Goodbye():
                self._peer = None
        self.heard.append(message)
