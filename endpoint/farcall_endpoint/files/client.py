"""The agent's end of the transfer process: orders, reports, and another process if it ends. Nothing here waits, but for
the end of that process when it is closed.

The process starts with the first order, and ends after a while without work.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import zmq

from farcall_common.backoff import Backoff
from farcall_endpoint.files import orders
from farcall_endpoint.files.orders import Order, Report, frame, frames_of
from farcall_endpoint.files.settings import TransferSettings
from farcall_endpoint.host import process_reaper

_logger = logging.getLogger(__name__)

_PROCESS: Final = "farcall_endpoint.files.process"
"""Module of the transfer process. The agent does not import it: without files, it needs no transfer library."""
_IDLE_S: Final = 60.0
_FIRST_WORD_S: Final = 120.0
"""Longest start of a process: its Python may be on a file system under load."""
_QUIET_S: Final = 15.0
"""Silence, while an answer is due, until the process gets a Ping. After the same time again, the process is
replaced."""
_KILL_LIMIT_S: Final = 2.0
_decode: Final = msgspec.msgpack.Decoder(Report).decode


class TransferClient:
    """One per agent. Not for use in several threads. Instants are monotonic seconds.

    :param settings: of a process that starts.
    :param poller: wakes the agent when the process reports.
    :param owner_or: returns a submitter, empty if it is the endpoint's owner.
    :param environment: of the process; None: that of this one.
    :param idle_s: a process without work ends after so long.
    """

    def __init__(
        self,
        settings: Callable[[], TransferSettings],
        *,
        poller: zmq.Poller,
        owner_or: Callable[[str], str] = lambda submitter: submitter,
        environment: Mapping[str, str] | None = None,
        idle_s: float = _IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._poller = poller
        self._owner_or = owner_or
        self._environment = environment
        self._idle_s = idle_s
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._unsent = bytearray()
        self._unread = bytearray()
        self._due: set[tuple[str, object]] = set()  # answers
        self._heard_at = self._idle_since = 0.0
        self._has_spoken = self._is_asked = False
        self._unusable = self._not_started = ""
        #: What was reported last; None before.
        self.cache_use: orders.CacheUse | None = None
        self._backoff = Backoff(first_s=1.0, most_s=60.0)
        self._start_at = 0.0

    @property
    def pid(self) -> int | None:
        """The process, if there is one."""
        return None if self._process is None else self._process.pid

    def order(self, given: Sequence[Order]) -> None:
        """Give orders."""
        if not given:
            return
        now = self._clock()
        if not self._due:
            self._heard_at, self._is_asked = now, False
        for each in given:
            match each:
                case orders.Fetch(number=number) | orders.Store(number=number):
                    self._due.add(("transfer", number))
                case orders.Cancel(number=number):
                    self._due.discard(("transfer", number))
                case orders.Make(task_id=task_id):
                    self._due.add(("made", task_id))
                case orders.Remove(task_id=task_id):
                    self._due.add(("removed", task_id))
                case orders.Tidy():
                    self._due.add(("tidied", ""))
            if isinstance(each, orders.Make | orders.Fetch | orders.Store | orders.Remove):
                each = msgspec.structs.replace(each, submitter=self._owner_or(each.submitter))
            self._unsent += frame(each)
        if self._process is not None:
            self._send()
        elif now >= self._start_at:
            self._start()

    def answer(self, piece: orders.Piece) -> None:
        """Give the process a piece of a file, or why there is none; nothing if it has ended."""
        if self._process is not None:
            self._unsent += frame(piece)
            self._send()

    def _start(self) -> None:
        command = [sys.executable, "-P", "-m", _PROCESS]
        with contextlib.ExitStack() as opened:
            try:
                here, there = map(opened.enter_context, socket.socketpair())
                self._process = subprocess.Popen(
                    command,
                    stdin=there.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=self._environment,
                    start_new_session=True,
                )
            except OSError as error:  # too many processes or open files: other tasks run
                self._not_started = f"the transfer process cannot be started: {error.strerror}"
                return
            opened.pop_all()
            there.close()
        here.setblocking(False)
        self._socket = here
        self._unusable = ""
        self._unsent[:0] = frame(self._settings())
        self._heard_at, self._has_spoken, self._is_asked = self._clock(), False, False
        self._poller.register(here, zmq.POLLIN)
        self._send()

    def _send(self) -> None:
        """Send as much as the process takes; the poller says when it takes more."""
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        self._poller.modify(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._unsent else 0))

    def receive(self) -> tuple[list[Report], str]:
        """Return the process's reports, and the reason if the process was lost: then send all unanswered orders again.
        Call this in each turn."""
        if self._socket is None and not self._unsent:
            return [], ""
        reports: list[Report] = []
        lost, self._not_started = self._not_started, ""
        now = self._clock()
        if self._socket is not None:
            has_ended = self._read(reports)
            self._note(reports, now)
            if has_ended:
                code = self._close()
                lost = self._unusable or f"the transfer process ended with exit code {code}"
            elif now >= self._silent_at():
                if self._has_spoken and not self._is_asked:
                    self._heard_at, self._is_asked = now, True
                    self._unsent += frame(orders.Ping())
                    self._send()
                else:
                    self._close()
                    lost = "the transfer process did not answer"
            elif self._unsent:
                self._send()
        elif lost:
            self._unsent.clear()
        if lost:
            if not self._due:
                return reports, ""
            _logger.error("%s: another one is started", lost)
            self._due.clear()
            self._start_at = now + self._backoff.next_s()
            return reports, lost
        if self._socket is not None and not self._due and now >= self._idle_since + self._idle_s:
            self._close()
        elif self._socket is None and self._unsent and now >= self._start_at:
            self._start()
        return reports, ""

    def _read(self, reports: list[Report]) -> bool:
        """Whether the process has ended."""
        assert self._socket is not None
        try:
            while received := self._socket.recv(2**18):
                self._unread += received
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True
        finally:
            reports += [_decode(each) for each in frames_of(self._unread)]
        return True

    def _note(self, reports: Sequence[Report], now: float) -> None:
        if not reports:
            return
        self._heard_at, self._has_spoken, self._is_asked = now, True, False
        had_work = bool(self._due)
        for each in reports:
            match each:
                case orders.Fetched(number=number) | orders.Stored(number=number) | orders.Failed(number=number):
                    self._due.discard(("transfer", number))
                    self._backoff.reset()
                case orders.Made(task_id=task_id):
                    self._due.discard(("made", task_id))
                case orders.Removed(task_id=task_id):
                    self._due.discard(("removed", task_id))
                case orders.Tidied():
                    self._due.discard(("tidied", ""))
                case orders.CacheUse():
                    self.cache_use = each
                case orders.Unusable(reason=reason):
                    self._unusable = reason
        if had_work and not self._due:
            self._idle_since = now

    def _silent_at(self) -> float:
        if not self._due:
            return float("inf")
        return self._heard_at + (_QUIET_S if self._has_spoken else _FIRST_WORD_S)

    def next_deadline(self) -> float | None:
        """When :meth:`receive` has something to do without a report."""
        if self._not_started:
            return self._heard_at
        if self._socket is None:
            return self._start_at if self._unsent else None
        return self._silent_at() if self._due else self._idle_since + self._idle_s

    def close(self) -> None:
        """End the process with all that it does."""
        if self._socket is not None:
            self._close()

    def _close(self) -> int | None:
        assert self._socket is not None
        assert self._process is not None
        self._poller.unregister(self._socket)
        self._socket.close()
        process_reaper.kill_trees({self._process.pid})
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):  # in a file system that hangs it may be there for longer
            code = self._process.wait(_KILL_LIMIT_S)
        self._process = self._socket = None
        self._unsent.clear()
        self._unread.clear()
        return code
