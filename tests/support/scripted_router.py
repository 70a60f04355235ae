"""Scripted forwarders: a ROUTER with CURVE in a thread, which does what a test orders."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
import zmq.utils.z85

from farcall_common import wire
from tests.waiting import WAIT_S

_POLL_MS = 1000
_LINGER_MS = 200


class ScriptedRouter:
    """A subclass handles messages in ``_receive`` and sets ``_peer``, which answers go to.

    Its constructor calls :meth:`start` at its end. The public methods may be called from the test's thread, those that
    begin with an underscore from the router's own. With ``checks_keys`` only ``keys`` may connect.
    """

    def __init__(self, *, heartbeat_s: float, checks_keys: bool = False) -> None:
        self.heartbeat_s = heartbeat_s
        self.address = ""
        self.keys: set[str] = set()
        self._checks_keys = checks_keys
        self._public, self._secret = zmq.curve_keypair()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._changed = threading.Condition()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = self._context.socket(zmq.PUSH)
        self._wake.bind("inproc://wake")
        self._socket: zmq.Socket[bytes] | None = None
        self._peer: bytes | None = None
        self._over = False
        self._thread = threading.Thread(target=self._serve, name="scripted forwarder")

    def start(self) -> None:
        self._thread.start()
        self.online()

    def close(self) -> None:
        """End without a message. A second call does nothing."""
        if self._over:
            return
        self._call(self._end)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self._wake.close(linger=0)
        self._context.term()

    @property
    def connection(self) -> dict[str, Any]:
        """The API's answer about this forwarder."""
        return {
            "forwarders": [{"address": self.address, "server_key": self._public.decode()}],
            "ticket": "a-ticket",
            "ticket_expires_at": time.time() + 3600,
            "heartbeat_s": self.heartbeat_s,
        }

    def send(self, message: wire.Message, frames: Sequence[bytes] = ()) -> None:
        """Send any message to the peer that connected last."""
        self._call(lambda: self._send(message, frames))

    def offline(self) -> None:
        """Vanish, as a forwarder that was killed does."""
        self._call(self._vanish)
        self.wait_for(lambda: self._socket is None)

    def online(self) -> None:
        """Listen at a new address."""
        self._call(self._listen)
        self.wait_for(lambda: self._socket is not None)

    def wait_for(self, condition: Callable[[], bool], *, timeout_s: float = WAIT_S) -> None:
        """Wait until a condition holds.

        :raises TimeoutError: if it does not in time.
        """
        with self._changed:
            if not self._changed.wait_for(condition, timeout_s):
                raise TimeoutError(f"not so within {timeout_s} s")

    # -- the router's thread -------------------------------------------------------------------------------------------

    def _receive(self, identity: bytes, envelope: wire.Envelope) -> None:
        raise NotImplementedError

    def _maintain(self) -> float:
        """Do what is due; returns the seconds until it is due again."""
        return _POLL_MS / 1000

    def _call(self, call: Callable[[], None]) -> None:
        self._calls.put(call)
        self._wake.send(b"")

    def _serve(self) -> None:
        wake = self._context.socket(zmq.PULL)
        wake.connect("inproc://wake")
        zap = self._context.socket(zmq.REP)
        if self._checks_keys:
            zap.bind("inproc://zeromq.zap.01")
        due_s = 0.0
        try:
            while not self._over:
                poller = zmq.Poller()
                for socket in (wake, zap, self._socket):
                    if socket is not None:
                        poller.register(socket, zmq.POLLIN)
                ready = dict(poller.poll(max(0, min(_POLL_MS, int(due_s * 1000) + 1))))
                with self._changed:
                    if wake in ready:
                        wake.recv()
                        self._calls.get()()
                    if zap in ready:
                        self._check_key(zap)
                    if self._socket is not None and self._socket in ready:
                        identity, *frames = self._socket.recv_multipart()
                        self._receive(identity, wire.decode(frames))
                    due_s = self._maintain()
                    self._changed.notify_all()
        finally:
            wake.close(linger=0)
            zap.close(linger=0)

    def _check_key(self, zap: zmq.Socket[bytes]) -> None:
        version, request_id, _, _, _, _, key = zap.recv_multipart()
        known = zmq.utils.z85.encode(key).decode() in self.keys
        status = (b"200", b"OK") if known else (b"400", b"unknown key")
        zap.send_multipart([version, request_id, *status, b"agent", b""])

    def _listen(self) -> None:
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = _LINGER_MS
        socket.sndhwm = socket.rcvhwm = 0
        socket.curve_server = True
        socket.curve_secretkey = self._secret
        self.address = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._socket = socket

    def _vanish(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = self._peer = None

    def _end(self) -> None:
        self._vanish()
        self._over = True

    def _send(self, message: wire.Message, frames: Sequence[bytes] = ()) -> None:
        self._send_frames(wire.encode(wire.Envelope(message, tuple(frames))))

    def _send_frames(self, frames: Sequence[bytes]) -> None:
        if self._socket is not None and self._peer is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send_multipart([self._peer, *frames])
