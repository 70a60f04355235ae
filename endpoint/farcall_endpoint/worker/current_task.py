"""The running task of a worker, as ``farcall.current()`` finds it: its progress goes to the manager from here, and its
calls by way of :mod:`~farcall_endpoint.worker.nested`, which is loaded at the first of them."""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from farcall_common import running
from farcall_endpoint.contracts.manager_worker import Channel, Order, Progressed

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    from farcall_common.running import Arguments, NodeMemory
    from farcall_common.task_options import TaskOptions
    from farcall_endpoint.worker.nested import CallsOfTask
    from farcall_endpoint.worker.places import TaskPlaces

_PERIOD_S: Final = 0.2
"""Between packets of numbers alone, so that there is room for one with another text."""
_WINDOW_S: Final = 1.0
MOST_PACKETS: Final = 10
"""In each window."""


class CurrentTask:
    """The :class:`~farcall_common.running.Caller` of a task.

    :param calls: returns what makes calls of this task; raises ConfigurationError once it has ended.
    :param places: returns its directories; raises ConfigurationError once it has ended.
    :param clock: monotonic seconds.
    """

    def __init__(
        self,
        channel: Channel,
        order: Order,
        calls: Callable[[], CallsOfTask],
        places: Callable[[], TaskPlaces],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.task_id = order.task_id
        self.attempt = order.attempt
        self.order = order
        self._channel = channel
        self._calls = calls
        self._places = places
        self._clock = clock
        self._pid = os.getpid()
        self._lock = _thread.RLock()  # a handler of a signal may interrupt what holds it
        self._ended = False
        self._latest: tuple[int | float, int | float | None, str] | None = None  # if it was not sent
        self._text = ""  # as sent
        self._next_at = -math.inf  # from then on a call sends
        self._text_at = -math.inf  # from then on, if it has news
        self._window_until = -math.inf
        self._packets = 0  # in the window

    def submit(
        self, function: Callable[..., Any] | str, calls: Sequence[Arguments], options: TaskOptions | None
    ) -> Sequence[Future[Any]]:
        """See :meth:`farcall_common.running.RunningTask.submit`."""
        return self._calls().submit(function, calls, options)

    def buffer(self, size: int) -> memoryview:
        """See :meth:`farcall_common.running.RunningTask.buffer`."""
        return self._calls().buffer(size)

    def scratch(self) -> Path:
        """See :attr:`farcall_common.running.RunningTask.scratch`."""
        return self._places().scratch()

    def shared_dir(self) -> Path:
        """See :attr:`farcall_common.running.RunningTask.shared_dir`."""
        return self._places().shared_dir()

    def memory_dir(self) -> Path | None:
        """See :attr:`farcall_common.running.RunningTask.memory_dir`."""
        return self._places().memory_dir()

    def node_memory(self) -> NodeMemory:
        """See :meth:`farcall_common.running.RunningTask.node_memory`."""
        from farcall_endpoint.worker.node_memory import WorkerNodeMemory  # here: few tasks ask for it

        places = self._places()
        return WorkerNodeMemory(
            places.blocks_dir(), self._calls(), has_other_nodes=places.has_other_nodes, key=places.block_key
        )

    def valkey_url(self) -> str:
        """See :meth:`farcall_common.running.RunningTask.valkey_url`."""
        return self._calls().valkey_url()

    def progress(self, done: int | float, total: int | float | None, text: str) -> None:
        """See :meth:`farcall_common.running.RunningTask.progress`. Most calls end here, without a system call."""
        self._latest = done, total, text
        now = self._clock()
        if now >= self._next_at or ((done == total or text != self._text) and now >= self._text_at):
            self._send(now)

    def end(self) -> None:
        """The function has ended: send what was not sent."""
        with self._lock:
            self._flush(self._clock())
            self._ended = True
            self._next_at = self._text_at = -math.inf  # what the task left running hears of it

    def _send(self, now: float) -> None:
        if os.getpid() != self._pid:
            raise running.not_in_this_process()
        with self._lock:
            if self._ended:
                raise running.has_ended()
            self._flush(now)

    def _flush(self, now: float) -> None:
        latest, self._latest = self._latest, None
        if latest is None:  # another thread has sent it
            return
        # Here: most tasks say nothing, and a worker starts without it.
        from farcall_common.progress import clean_progress

        done, total, text = latest
        if now >= self._window_until:
            self._window_until = now + _WINDOW_S
            self._packets = 0
        self._packets += 1
        is_full = self._packets >= MOST_PACKETS
        self._next_at = self._window_until if is_full else now + _PERIOD_S
        self._text_at = self._window_until if is_full else -math.inf
        self._text = text
        progress = clean_progress(done, total, text, 0.0)
        if progress is not None:  # not an integer that no float can be
            with contextlib.suppress(OSError):  # the manager is gone
                self._channel.send(Progressed(self.task_id, progress.done, progress.total, progress.text))
