"""Asks the API for ends: the way that always works, and the check on the way that is fast."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from farcall._api import Api
from farcall._collector import Collector
from farcall_common.errors import FarcallError, Forbidden, TaskUnknown, Unauthenticated, Unavailable

__all__ = ["Poller"]

_logger = logging.getLogger(__name__)

_FIRST_DELAY_S: Final = 0.02
_FIRST_ERROR_DELAY_S: Final = 0.1
_GROWTH: Final = 1.5
_LONGEST_DELAY_S: Final = 2.0
_IDS_PER_REQUEST: Final = 500
#: A token that is refused for this long is not coming back.
_AUTH_PATIENCE_S: Final = 30.0


class Poller:
    """Polls ``batch_status``: often while there is no stream, now and then while there is one.

    Without a stream the delay starts small after each submit and grows while nothing ends, and is never less than
    what polling itself takes: a slow API is not asked more for being slow.

    :param stream_is_open: whether ends come in by themselves.
    :param safety_s: how often to look behind an open stream, in seconds.
    :param patience_s: after how many seconds without any contact waiting futures fail.
    """

    def __init__(
        self,
        api: Api,
        collector: Collector,
        *,
        stream_is_open: Callable[[], bool],
        safety_s: float,
        patience_s: float,
    ) -> None:
        self._api = api
        self._collector = collector
        self._stream_is_open = stream_is_open
        self._safety_s = safety_s
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._delay_s = _FIRST_DELAY_S
        self._catch_up = False

    def expect(self) -> None:
        """There are new tasks to wait for."""
        if self._stream_is_open():
            return  # they will be pushed; the safety poll needs no reminder
        self.hurry()

    def hurry(self) -> None:
        """Poll soon, even while the stream is open: something may have been missed."""
        with self._changed:
            self._delay_s = _FIRST_DELAY_S
            self._catch_up = True
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stop.set()
            self._changed.notify()

    def run(self) -> None:
        """Poll until :meth:`stop`. The body of a thread."""
        polled_at = contact_at = time.monotonic()
        took_s = 0.0
        while True:
            with self._changed:
                due_at = polled_at + self._pause_s(took_s)
                while not self._stop.is_set() and (left_s := due_at - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                    due_at = polled_at + self._pause_s(took_s)
                if self._stop.is_set():
                    return
                behind_stream = self._stream_is_open() and not self._catch_up
                self._catch_up = False
            started_at = time.monotonic()
            if behind_stream:
                contact_at = started_at
            due = self._collector.accepted(before=time.time() - self._safety_s if behind_stream else None)
            if not due:
                contact_at = started_at
            else:
                try:
                    ended = self._poll(due)
                    contact_at = time.monotonic()
                    self._delay_s = _FIRST_DELAY_S if ended else min(self._delay_s * _GROWTH, _LONGEST_DELAY_S)
                except FarcallError as error:
                    self._delay_s = min(max(2 * self._delay_s, _FIRST_ERROR_DELAY_S), _LONGEST_DELAY_S)
                    if not self._stop.is_set():
                        self._weigh(error, time.monotonic() - contact_at)
            polled_at = time.monotonic()
            took_s = polled_at - started_at

    def _pause_s(self, took_s: float) -> float:
        """How long to wait between two polls."""
        if self._catch_up:
            return max(_FIRST_DELAY_S, took_s)
        if self._stream_is_open() or not self._collector.accepted():
            return self._safety_s
        return max(self._delay_s, 2 * took_s)

    def _poll(self, due: list[str]) -> int:
        ended = 0
        for start in range(0, len(due), _IDS_PER_REQUEST):
            asked = due[start : start + _IDS_PER_REQUEST]
            while asked and not self._stop.is_set():
                found = self._api.batch_status(asked, patience_s=0, stop=self._stop)
                if not found:  # an answer leaves out what is too much for it, but never everything
                    ended += len(asked)
                    for task_id in asked:
                        self._collector.fail([task_id], TaskUnknown(f"the API does not know task {task_id} any more"))
                ended += self._collector.take_polled(found.values())
                asked = [task_id for task_id in asked if found and task_id not in found]
        return ended

    def _weigh(self, error: FarcallError, silent_s: float) -> None:
        """Decide whether a failed poll is the last straw."""
        final = isinstance(error, Unauthenticated | Forbidden)
        _logger.debug("polling failed, %.0f s without contact: %s", silent_s, error)
        if silent_s < (min(_AUTH_PATIENCE_S, self._patience_s) if final else self._patience_s):
            return
        hint = "The tasks go on without you; Client.get_batch_result reads their results by task id."
        raised: FarcallError = (
            error if final else Unavailable(f"no contact with the API for {silent_s:.0f} s: {error}", hint=hint)
        )
        self._collector.fail(self._collector.accepted(), raised)
