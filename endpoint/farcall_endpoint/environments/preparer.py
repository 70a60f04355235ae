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
from farcall_endpoint import outcomes, process_reaper
from farcall_endpoint.environments import preparation, preparation_process
from farcall_endpoint.environments.preparation import Failed, PreparationReport, PreparationSettings, Prepared

_logger = logging.getLogger(__name__)

_ORDERS_BYTES: Final = 2**20
"""So many orders may wait for the process, which takes them at once unless it hangs."""
_STOP_LIMIT_S: Final = 40.0


class Preparer:
    """The process of preparations, which starts with the first order. Not for use in several threads.

    :param settings: of a process that starts.
    """

    def __init__(self, settings: Callable[[], PreparationSettings]) -> None:
        self._settings = settings
        self._epoll = select.epoll()
        self._process: subprocess.Popen[bytes] | None = None
        self._pending: dict[str, Environment] = {}
        self._ordered_at: dict[str, float] = {}
        self._heard_at = 0.0
        self._lost: list[PreparationReport] = []  # to be reported by the next call of read
        self._stops: dict[str, preparation.Started] = {}
        self._unread = b""

    def fileno(self) -> int:
        """Readable when :meth:`read` has something to do."""
        return self._epoll.fileno()

    @property
    def pid(self) -> int | None:
        """Of the process; None if there is none."""
        return None if self._process is None else self._process.pid

    def next_deadline(self) -> float:
        """When :meth:`read` must be called in any case, in monotonic seconds."""
        return 0.0 if self._lost else math.inf

    def prepare(self, environment: Environment, *, trusted: bool) -> None:
        """Prepare an environment; :meth:`read` answers.

        :param trusted: whether the owner of the endpoint has named it.
        """
        key = environment.key
        if self._pending.pop(key, None) is not None and self._heard_at < self._ordered_at[key]:
            # The time for the same order before is over, and there was no word of this or any other one.
            _logger.error("the preparation of environments hangs: it is replaced")
            if self._process is not None:
                process_reaper.kill_trees({self._process.pid})
                self._lost += self._lost_process()
        self._pending[key] = environment
        self._ordered_at[key] = time.monotonic()
        self.order(preparation.Prepare(environment, trusted))

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
        self._epoll.register(self._process.stdout.fileno(), select.EPOLLIN)
        for started in self._stops.values():  # it replaces another one
            self._write(started)

    def read(self) -> list[PreparationReport]:
        """What it has reported, and what was lost with a process that ended."""
        lost, self._lost = self._lost, []
        return lost if self._process is None else [*lost, *self._read()]

    def _read(self) -> list[PreparationReport]:
        assert self._process is not None
        assert self._process.stdout is not None
        reports: list[PreparationReport] = []
        has_ended = False
        while True:
            try:
                data = os.read(self._process.stdout.fileno(), 2**16)
            except BlockingIOError:
                break
            if has_ended := not data:
                break
            *lines, self._unread = (self._unread + data).split(b"\n")
            reports += [msgspec.json.decode(line, type=PreparationReport) for line in lines]
            self._heard_at = time.monotonic()
        for report in reports:
            if isinstance(report, Prepared | Failed):
                self._pending.pop(report.key, None)
                self._ordered_at.pop(report.key, None)
        return [*reports, *self._lost_process()] if has_ended else reports

    def _lost_process(self) -> list[PreparationReport]:
        """The process of preparations was killed: what it was doing is lost, and the next order starts another."""
        assert self._process is not None
        code = self._close_process()
        _logger.error("the preparation of environments ended with exit code %d", code)
        lost, self._pending, self._unread = self._pending, {}, b""
        self._ordered_at.clear()
        return [
            Failed(key, _retryable(outcomes.environment_failed(each.label, "the process that prepared it was killed")))
            for key, each in lost.items()
        ]

    def close(self) -> None:
        """End the process: what it started ends with it, within a limited time."""
        if self._process is not None:
            self._close_process(_STOP_LIMIT_S)
        self._epoll.close()

    def _close_process(self, limit_s: float | None = None) -> int:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            self._epoll.unregister(process.stdout.fileno())
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process_reaper.kill_trees({process.pid})
            code = process.wait()
        process.stdout.close()
        self._process = None
        return code


def _retryable(record: ErrorRecord) -> ErrorRecord:
    return dataclasses.replace(record, retryable=True)
