"""The conversation of a launcher with its process of preparations: orders, reports, and another process if it ends.

Nothing here waits, but for the end of that process when it is closed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

import msgspec

from farcall_common.environments import Environment
from farcall_common.errors import ErrorRecord
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.environments.prepare import preparation, preparation_process
from farcall_endpoint.environments.prepare.preparation import (
    Failed,
    Located,
    PreparationReport,
    PreparationSettings,
    Prepared,
    Report,
)
from farcall_endpoint.host import process_reaper

_logger = logging.getLogger(__name__)

_ORDERS_BYTES: Final = 2**20
"""Maximum size of the orders that wait for the process, which reads them at once unless it hangs."""
_STOP_LIMIT_S: Final = 40.0
_KILL_LIMIT_S: Final = 0.25
"""Time to wait for the end of a killed process. If its file system hangs, the process may exist for longer."""
_FIRST_WORD_S: Final = 120.0
"""Longest start of the process: its Python may be on a file system under load."""
_QUIET_S: Final = 15.0
"""Silence, while an answer is due, until the process gets a Ping. After the same time again, the process is
replaced."""
_MOST_TRIES: Final = 3
"""Maximum look-ups of a location if the process ends meanwhile."""


@dataclasses.dataclass
class _LookUp:
    due_at: float
    tries: int = 1


class Preparer:
    """The process of preparations, which starts with the first order. Not for use in several threads.

    :param settings: of a process that starts.
    :param limit_s: longest look-up of a location.
    :param clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: Callable[[], PreparationSettings],
        *,
        limit_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._limit_s = limit_s
        self._epoll = select.epoll()
        self._process: subprocess.Popen[bytes] | None = None
        self._pending: dict[str, Environment] = {}
        self._look_ups: dict[Environment, _LookUp] = {}
        self._killed: list[subprocess.Popen[bytes]] = []  # that have not ended yet
        self._quiet_since = 0.0
        self._has_spoken = False
        self._is_asked = False  # for a sign of life
        self._stops: dict[str, preparation.Started] = {}
        self._unread = b""

    def fileno(self) -> int:
        """Readable when :meth:`read` has something to do."""
        return self._epoll.fileno()

    @property
    def pid(self) -> int | None:
        """Process id of the process; None if there is none."""
        return None if self._process is None else self._process.pid

    def next_deadline(self) -> float:
        """When :meth:`read` must be called in any case, in monotonic seconds."""
        due = [each.due_at for each in self._look_ups.values()]
        return min([self._silent_at(), *due])

    def _silent_at(self) -> float:
        if self._process is None or not (self._pending or self._look_ups):
            return math.inf
        return self._quiet_since + (_QUIET_S if self._has_spoken else _FIRST_WORD_S)

    def prepare(self, environment: Environment, *, trusted: bool) -> None:
        """Prepare an environment; :meth:`read` answers.

        :param trusted: whether the owner of the endpoint has named it.
        """
        self._expect_answer()
        self._pending[environment.key] = environment
        self.order(preparation.Prepare(environment, trusted))

    def locate(self, environment: Environment) -> None:
        """Look up what an environment names on the node, unless that is being done; :meth:`read` answers."""
        if environment not in self._look_ups:
            self._expect_answer()
            self._look_ups[environment] = _LookUp(self._clock() + self._limit_s)
            self.order(preparation.Locate(environment))

    def _expect_answer(self) -> None:
        if not (self._pending or self._look_ups):  # else it is quiet since earlier
            self._quiet_since, self._is_asked = self._clock(), False

    def order(self, order: preparation.Order) -> None:
        """Give an order that has no answer."""
        if self._process is None:
            self._start_process()
        if isinstance(order, preparation.Started):
            self._stops[order.name] = order
        elif isinstance(order, preparation.Ended):
            self._stops.pop(order.name, None)
        self._write(order)

    def _write(self, order: preparation.Order) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        line = msgspec.json.encode(order) + b"\n"
        written = 0
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            written = os.write(self._process.stdin.fileno(), line)
        # It hangs, or it has ended: its end is about to be read, and another one gets the order.
        if written < len(line):
            process_reaper.kill_trees({self._process.pid})

    def _start_process(self) -> None:
        command = [
            sys.executable,
            "-P",
            "-m",
            preparation_process.__name__,
            msgspec.json.encode(self._settings()).decode(),
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        with contextlib.suppress(OSError):  # the user has too many pipes: then fewer orders may wait
            fcntl.fcntl(self._process.stdin.fileno(), fcntl.F_SETPIPE_SZ, _ORDERS_BYTES)
        os.set_blocking(self._process.stdout.fileno(), False)
        self._quiet_since, self._has_spoken, self._is_asked = self._clock(), False, False
        self._epoll.register(self._process.stdout.fileno(), select.EPOLLIN)
        for started in self._stops.values():  # it replaces another one
            self._write(started)

    def read(self) -> list[PreparationReport | Located]:
        """Return the process's reports, and failures for orders that were lost with a process that ended."""
        reports = [] if self._process is None else self._read()
        now = self._clock()
        if now >= self._silent_at():  # after what it may have said
            reports += self._break_silence(now)
        return [*reports, *self._overdue(now)]

    def _break_silence(self, now: float) -> list[PreparationReport | Located]:
        assert self._process is not None
        if self._has_spoken and not self._is_asked:
            self._quiet_since, self._is_asked = now, True
            self._write(preparation.Ping())
            return []
        _logger.error("the process of preparations does not answer: it is replaced")
        process_reaper.kill_trees({self._process.pid})
        return self._lost_process()

    def _overdue(self, now: float) -> list[PreparationReport | Located]:
        """Answers for locations that were not looked up in time."""
        overdue = [environment for environment, each in self._look_ups.items() if now >= each.due_at]
        return [self._not_located(each, f"has not answered for {self._limit_s:g} s") for each in overdue]

    def _not_located(self, environment: Environment, what: str) -> Located:
        del self._look_ups[environment]
        words = f"{environment.location} {what}: does its file system hang?"
        return Located(environment, record=_retryable(outcomes.environment_failed(environment.label, words)))

    def _read(self) -> list[PreparationReport | Located]:
        assert self._process is not None
        assert self._process.stdout is not None
        reports: list[PreparationReport | Located] = []
        has_ended = False
        while True:
            try:
                data = os.read(self._process.stdout.fileno(), 2**16)
            except BlockingIOError:
                break
            if has_ended := not data:
                break
            *lines, self._unread = (self._unread + data).split(b"\n")
            said = [msgspec.json.decode(line, type=Report) for line in lines]
            reports += [each for each in said if not isinstance(each, preparation.Alive)]
            self._quiet_since, self._has_spoken, self._is_asked = self._clock(), True, False
        for report in reports:
            if isinstance(report, Prepared | Failed):
                self._pending.pop(report.key, None)
            elif isinstance(report, Located):
                self._look_ups.pop(report.environment, None)
        return [*reports, *self._lost_process()] if has_ended else reports

    def _lost_process(self) -> list[PreparationReport | Located]:
        """The process of preparations was killed: what it was preparing is lost, and the next order starts another. For
        what it was looking up, another one starts at once."""
        assert self._process is not None
        code = self._close_process(_KILL_LIMIT_S)
        _logger.error("the process of preparations ended with exit code %s", code)
        lost, self._pending, self._unread = self._pending, {}, b""
        reports: list[PreparationReport | Located] = [
            Failed(key, _retryable(outcomes.environment_failed(each.label, "the process that prepared it was killed")))
            for key, each in lost.items()
        ]
        for environment, look_up in list(self._look_ups.items()):
            look_up.tries += 1
            if look_up.tries > _MOST_TRIES:
                reports.append(self._not_located(environment, "cannot be looked up"))
            else:
                self.order(preparation.Locate(environment))
        return reports

    def close(self) -> None:
        """End the process: what it started ends with it, within a limited time."""
        if self._process is not None:
            self._close_process(_STOP_LIMIT_S)
        for process in self._killed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_LIMIT_S)
        self._epoll.close()

    def _close_process(self, limit_s: float) -> int | None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            self._epoll.unregister(process.stdout.fileno())
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(limit_s)
        if code is None:
            process_reaper.kill_trees({process.pid})
            self._killed.append(process)
        self._killed = [each for each in self._killed if each.poll() is None]
        process.stdout.close()
        self._process = None
        return code


def _retryable(record: ErrorRecord) -> ErrorRecord:
    return dataclasses.replace(record, retryable=True)
