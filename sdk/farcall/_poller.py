"""Asks the API for ends: the way that always works, and the check on the way that is fast."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from farcall._api import Api
from farcall._collector import Collector
from farcall._pace import Pace
from farcall._silence import Silence
from farcall_common.errors import FarcallError, Forbidden, TaskUnknown, Unauthenticated, Unavailable

_logger = logging.getLogger(__name__)

_IDS_PER_REQUEST: Final = 500
#: An end that is younger than this may still be on its way through the stream.
_SAMPLE_AGE_S: Final = 1.0
#: A token that is refused for this long is not coming back.
_AUTH_PATIENCE_S: Final = 30.0


class Poller:
    """Polls ``batch_status`` at the rhythm of a :class:`Pace`.

    :param stream_is_open: whether ends come in by themselves.
    :param patience_s: after how many seconds without any contact waiting futures fail.
    """

    def __init__(
        self,
        api: Api,
        collector: Collector,
        *,
        stream_is_open: Callable[[], bool],
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._collector = collector
        self._stream_is_open = stream_is_open
        self._patience_s = patience_s
        self._clock = clock
        self._changed = threading.Condition()
        self._stop = threading.Event()
        now = self._clock()
        self._silence = Silence(now=now)
        self._pace = Pace(now=now)
        self._sampled = 0

    def expect(self) -> None:
        """There are new tasks to wait for."""
        with self._changed:
            if not self._pace.samples(stream_is_open=self._stream_is_open(), now=self._clock()):
                self._pace.hurry()
            self._changed.notify()

    def hurry(self) -> None:
        """Poll soon, even while the stream is open: something may have been missed."""
        with self._changed:
            self._pace.hurry()
            self._changed.notify()

    def stop(self) -> None:
        """Let :meth:`run` return soon."""
        with self._changed:
            self._stop.set()
            self._changed.notify()

    def run(self) -> None:
        """Poll until :meth:`stop`. The body of a thread."""
        while self._wait_until_due():
            started_at = self._clock()
            sampling = self._pace.samples(stream_is_open=self._stream_is_open(), now=started_at)
            self._pace.begun()
            if sampling:
                self._silence.end(now=started_at)
            try:
                ended = self._poll(self._sample() if sampling else self._collector.accepted())
            except FarcallError as error:
                now = self._clock()
                self._pace.failed(took_s=now - started_at, now=now)
                if not self._stop.is_set():
                    self._weigh(error, self._silence.lasts(now=now))
            else:
                now = self._clock()
                self._silence.end(now=now)
                note = self._pace.sampled if sampling else self._pace.polled
                note(ended=ended, took_s=now - started_at, now=now)

    def _wait_until_due(self) -> bool:
        """Wait for the next poll. False if there is to be none."""
        with self._changed:
            while not self._stop.is_set():
                now = self._clock()
                if not self._collector.accepted():
                    self._silence.end(now=now)  # nobody waits, nobody is let down
                    self._changed.wait()
                    continue
                left_s = self._pace.due_at(stream_is_open=self._stream_is_open(), now=now) - now
                if left_s <= 0:
                    return True
                self._changed.wait(left_s)
            return False

    def _sample(self) -> Sequence[str]:
        """Some of the tasks that are not young, others each time."""
        known = self._collector.accepted(before=time.monotonic() - _SAMPLE_AGE_S)
        if self._sampled >= len(known):
            self._sampled = 0
        sample = known[self._sampled : self._sampled + _IDS_PER_REQUEST]
        self._sampled += len(sample)
        return sample

    def _poll(self, task_ids: Sequence[str]) -> int:
        """Ask for tasks and settle what has ended. Returns how many had."""
        ended = 0
        for start in range(0, len(task_ids), _IDS_PER_REQUEST):
            asked = task_ids[start : start + _IDS_PER_REQUEST]
            while asked and not self._stop.is_set():
                found = self._api.batch_status(asked, patience_s=0, stop=self._stop)
                ended += self._collector.take_polled(found.values())
                if not found:  # an answer leaves out what is too much for it, but never everything
                    ended += len(asked)
                    self._collector.fail(asked, TaskUnknown(f"the API knows nothing of {len(asked)} tasks"))
                    break
                asked = [task_id for task_id in asked if task_id not in found]
        return ended

    def _weigh(self, error: FarcallError, silent_s: float) -> None:
        """Decide whether a failed poll is the last straw."""
        final = isinstance(error, Unauthenticated | Forbidden)
        _logger.debug("polling failed, %.0f s without contact: %s", silent_s, error)
        if silent_s < (min(_AUTH_PATIENCE_S, self._patience_s) if final else self._patience_s):
            return
        hint = "The tasks go on without you; Client.get_batch_result reads their results by task id."
        raised: FarcallError
        if final:
            record = dataclasses.replace(error.record, hint=f"{error.hint} {hint}".strip())
            raised = type(error)(record.message, record=record)
        else:
            raised = Unavailable(f"no contact with the API for {silent_s:.0f} s: {error}", hint=hint)
        self._collector.fail(self._collector.accepted(), raised)
