"""Delays: why tasks wait longer than a few seconds, asked and reported while they wait."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from farcall._future import record_of
from farcall._task_info import Why
from farcall_common.errors import FarcallError

if TYPE_CHECKING:
    from farcall._api import Api
    from farcall._results import Collector

#: Age of a task that is asked about, in seconds: most tasks are faster.
DELAY_S: Final = 3.0
#: Seconds between two questions about one endpoint.
_AGAIN_S: Final = 30.0
#: The same while a worker starts.
_SOON_S: Final = 2.0
_STARTING: Final = "ENVIRONMENT_STARTING"
"""It may take minutes, so it is reported once."""
_CHECK_S: Final = 0.5
#: Open tasks that are looked at, oldest first: a check of 100,000 tasks would slow submits.
_OLDEST: Final = 1_000

_logger = logging.getLogger("farcall")


def log_delay(why: Why) -> None:
    """Report a delay as a warning of the logger ``farcall``, which Python writes to stderr unless it is configured."""
    _logger.warning("task %s waits: %s", why.task_id, why)


class DelayWatch:
    """Asks the API why the oldest task of an endpoint waits, and reports it once if the endpoint runs no tasks.

    :param clock: monotonic seconds.
    """

    def __init__(self, api: Api, collector: Collector, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._collector = collector
        self._clock = clock
        #: Called with each delay, in the thread of the watch.
        self.report: Callable[[Why], None] = log_delay
        self._added = threading.Event()
        self._stop = threading.Event()
        #: By endpoint: when it is asked about again, in monotonic seconds, and the last delay.
        self._ask_at: dict[str, float] = {}
        self._delays: dict[str, Why] = {}

    def tasks_added(self) -> None:
        """There are new tasks to wait for."""
        self._added.set()

    def stop(self) -> None:
        """Let :meth:`run` return soon."""
        self._stop.set()
        self._added.set()

    def run(self) -> None:
        """Look after open tasks until :meth:`stop`. The body of a thread."""
        while self._added.wait() and not self._stop.wait(_CHECK_S):
            self._added.clear()
            if self.check():
                self._added.set()

    def cause(self, endpoint_id: str) -> str:
        """Why no task of an endpoint starts, as far as it is known, without a full stop; empty if nothing is known."""
        why = self._delays.get(endpoint_id)
        if why is None:
            return ""
        text = str(why)
        # The last part of the sentence is about the task that was asked about.
        return (text.rpartition("; ")[0] or text).rstrip(".")

    def check(self) -> bool:
        """Ask about what is due. Returns whether tasks are open."""
        now = self._clock()
        futures = self._collector.unsettled()
        waiting: dict[str, str] = {}
        for future in itertools.islice(futures, _OLDEST):
            accepted_at = record_of(future).accepted_mono
            if accepted_at is not None and now - accepted_at >= DELAY_S:
                waiting.setdefault(future.endpoint_id, future.task_id)
        for endpoint_id in self._ask_at.keys() - waiting.keys():
            del self._ask_at[endpoint_id]
            self._delays.pop(endpoint_id, None)
        for endpoint_id, task_id in waiting.items():
            if now >= self._ask_at.get(endpoint_id, now):
                self._ask_at[endpoint_id] = now + _AGAIN_S
                self._ask(endpoint_id, task_id)
        return bool(futures)

    def _ask(self, endpoint_id: str, task_id: str) -> None:
        try:
            why = Why.from_json(self._api.why(task_id, retry_timeout_s=0, stop=self._stop))
        except FarcallError:
            return  # the poller reports what holds for all requests
        if not (why.is_blocked or why.reason == _STARTING):
            if why.reason == "STARTING":  # the endpoint may not have reported yet that it prepares the environment
                self._ask_at[endpoint_id] = self._clock() + _SOON_S
            self._delays.pop(endpoint_id, None)
            return
        known = self._delays.get(endpoint_id)
        self._delays[endpoint_id] = why
        if known is None or known.reason != why.reason:
            self.report(why)
