"""Result stream: task results that a forwarder pushes over a CURVE socket."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from farcall._answers import Forwarder
from farcall._api import Api
from farcall._results import Collector
from farcall_common.backoff import Backoff
from farcall_common.errors import ErrorRecord, FarcallError, ForwarderWaking, Unavailable, error_from_record
from farcall_common.sockets import CONNECTION_LOST, client_socket
from farcall_common.waking import WakeNotices
from farcall_common.wire import (
    PROTOCOL_VERSION,
    Envelope,
    Goodbye,
    Heartbeat,
    Message,
    OpenStream,
    Redirect,
    Refused,
    ResultsReady,
    Role,
    Session,
    StreamOpened,
    Subscribe,
    decode,
    encode,
)

_logger = logging.getLogger(__name__)
#: A generator of our own: programs seed the module's.
_random = random.SystemRandom()

#: How long a forwarder may take from the first packet to StreamOpened.
_OPEN_TIMEOUT_S: Final = 10.0
#: Number of messages that are read between two checks of the deadlines.
_MESSAGES_PER_TURN: Final = 100
_FIRST_WAIT_S: Final = 0.2
_LONGEST_WAIT_S: Final = 15.0
#: Messages that wait here while the program keeps this thread from reading. More wait at the forwarder, which closes
#: the stream of a slow consumer; the API has the results.
_HIGH_WATER_MARK: Final = 10_000
_LINGER_MS: Final = 200


class Stream:
    """Keeps a stream open for task groups, and passes results to a collector.

    Socket events report a lost connection at once, missing heartbeats a silent peer. Then the stream is opened again
    after a random back-off, at the position of the last one (``cursor``).

    :param on_gap: called when results may have been missed and must be polled.
    """

    def __init__(
        self,
        api: Api,
        collector: Collector,
        *,
        task_group_id: str,
        on_gap: Callable[[], None],
        backoff: Backoff | None = None,
    ) -> None:
        self._api = api
        self._collector = collector
        self._groups = [task_group_id]
        self._on_gap = on_gap
        self._backoff = backoff or Backoff(first_s=_FIRST_WAIT_S, most_s=_LONGEST_WAIT_S, jitter=_random.random)
        self._open = False
        self._stopping = False
        self._cursor: str | None = None
        self._wake_notices = WakeNotices()
        self._public_key, self._secret_key = zmq.curve_keypair()
        self._wake_receiver, self._wake_sender = socket.socketpair()

    def is_open(self) -> bool:
        """Whether a forwarder pushes results now."""
        return self._open

    def subscribe(self, task_group_id: str) -> None:
        """Receive the results of one more group too. May be called from any thread."""
        self._groups.append(task_group_id)
        self._wake()

    def stop(self) -> None:
        """Let :meth:`run` return soon. May be called from any thread, and more than once."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it has returned already
            self._wake_sender.send(b"!")

    def run(self) -> None:
        """Keep the stream open until :meth:`stop`. The body of a thread, which owns the socket."""
        with self._wake_receiver, self._wake_sender, zmq.Context() as context:
            while not self._stopping:
                wait_s = 0.0
                try:
                    wait_s = self._run_once(context)
                except FarcallError as error:
                    _logger.debug("the result stream is down: %s", error)
                    if isinstance(error, ForwarderWaking):
                        _warn(self._wake_notices.on_waking(now=time.monotonic()))
                    wait_s = error.record.retry_after_s or 0.0
                if self._open:
                    self._open = False
                    self._backoff.reset()
                    self._on_gap()
                if not self._stopping:
                    self._wake_receiver.settimeout(wait_s + self._backoff.next_s())
                    with contextlib.suppress(TimeoutError, BlockingIOError):
                        self._wake_receiver.recv(1)

    def _run_once(self, context: zmq.Context[zmq.Socket[bytes]]) -> float:
        """Open a stream at the first forwarder that accepts it, and receive until it ends.

        Returns the delay that the forwarder requests before the next attempt, in seconds.

        :raises FarcallError: if there is none, or the connection was lost.
        """
        grant = self._api.open_stream(self._public_key.decode())
        error: FarcallError = Unavailable("the API named no forwarder")
        for forwarder in grant.forwarders:
            try:
                with self._connected(context, forwarder) as (dealer, monitor):
                    return self._receive(dealer, monitor, ticket=grant.ticket, heartbeat_s=grant.heartbeat_s)
            except FarcallError as failure:
                error = failure
                if self._open or self._stopping:
                    break
        raise error

    @contextlib.contextmanager
    def _connected(
        self, context: zmq.Context[zmq.Socket[bytes]], forwarder: Forwarder
    ) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
        try:
            with (
                client_socket(
                    context,
                    server_key=forwarder.server_key,
                    public_key=self._public_key.decode(),
                    secret_key=self._secret_key.decode(),
                    linger_ms=_LINGER_MS,
                    high_water_mark=_HIGH_WATER_MARK,
                ) as dealer,
                dealer.get_monitor_socket(sum(CONNECTION_LOST)) as monitor,
            ):
                try:
                    dealer.connect(forwarder.address)
                    yield dealer, monitor
                finally:
                    dealer.disable_monitor()
        except zmq.ZMQError as error:
            raise Unavailable(f"the stream to {forwarder.address}: {error}") from error

    def _receive(
        self, dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes], *, ticket: str, heartbeat_s: float
    ) -> float:
        session = Session(Role.CLIENT, heartbeat_s=heartbeat_s, now=time.monotonic())

        def send(message: Message) -> None:
            session.sent(message, now=time.monotonic())
            dealer.send_multipart(encode(Envelope(message)), zmq.NOBLOCK)

        groups = tuple(self._groups)
        send(
            OpenStream(
                ticket=ticket,
                protocol_versions=(PROTOCOL_VERSION,),
                heartbeat_s=heartbeat_s,
                task_group_ids=groups,
                cursor=self._cursor,
            )
        )
        open_by = time.monotonic() + _OPEN_TIMEOUT_S
        poller = zmq.Poller()
        for readable in (dealer, monitor, self._wake_receiver):
            poller.register(readable, zmq.POLLIN)
        while True:
            now = time.monotonic()
            deadline = session.next_deadline() if self._open else min(open_by, session.next_deadline())
            ready = {source for source, _ in poller.poll(max(0, math.ceil((deadline - now) * 1000)))}
            if self._stopping:
                send(Goodbye(reason="done"))
                return 0.0
            if ready - {dealer, monitor}:
                self._drain_wake_ups()
            if dealer in ready:
                for envelope in _received(dealer):
                    session.received(envelope.message, now=time.monotonic())
                    if isinstance(envelope.message, Redirect):
                        send(Goodbye(reason="moving"))
                        return envelope.message.retry_after_s
                    self._handle(envelope)
            elif monitor in ready:  # messages that arrived before have been read by now
                raise Unavailable(CONNECTION_LOST[parse_monitor_message(monitor.recv_multipart())["event"]])
            if self._open and len(self._groups) > len(groups):
                added = tuple(self._groups[len(groups) :])
                groups += added
                send(Subscribe(task_group_ids=added))
                self._on_gap()  # results from before the subscription may not be pushed
            now = time.monotonic()
            if session.is_dead(now=now) or (not self._open and now >= open_by):
                raise Unavailable("the forwarder is silent")
            if session.heartbeat_due(now=now):
                send(Heartbeat(at=time.time()))

    def _drain_wake_ups(self) -> None:
        """Discard the bytes of :meth:`_wake`."""
        self._wake_receiver.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            self._wake_receiver.recv(4096)

    def _handle(self, envelope: Envelope) -> None:
        match envelope.message:
            case ResultsReady(cursor=cursor, results=results):
                polls = self._collector.take_pushed(results, envelope.frames)
                self._cursor = cursor
                if polls:
                    self._on_gap()
            case StreamOpened(cursor=cursor, resumed=resumed):
                self._cursor = cursor
                self._open = True
                _warn(self._wake_notices.on_awake(now=time.monotonic()))
                if not resumed:
                    self._on_gap()
            case Refused(error=error):
                raise error_from_record(ErrorRecord.from_json(error))
            case _:
                pass  # a heartbeat: the session has noted it


def _warn(notice: str | None) -> None:
    """Log a notice as a warning, which Python writes to standard error if logging is not set up, as in a notebook or a
    shell: a program that prints nothing for a minute looks broken."""
    if notice is not None:
        _logger.warning(notice)


def _received(dealer: zmq.Socket[bytes]) -> Iterator[Envelope]:
    """The messages that wait in the socket, up to a limit."""
    for _ in range(_MESSAGES_PER_TURN):
        try:
            frames = dealer.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield decode(frames)
