"""Blocking work (HTTP) beside the agent's loop: a few threads, and a descriptor that says when something is done."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import Final

Job = Callable[[], Callable[[], None]]
"""Runs in a thread; what it returns runs in the loop's thread afterwards."""

_THREADS: Final = 4


class Background:
    """Threads are daemons: an agent that ends does not wait for a server that does not answer."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[Callable[[], None] | BaseException] = queue.SimpleQueue()
        self._readable, self._writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(_THREADS)]
        for thread in self._threads:
            thread.start()

    def fileno(self) -> int:
        """Readable when :meth:`finish` has something to do."""
        return self._readable

    def submit(self, job: Job) -> None:
        """Run a job when a thread is free."""
        self._jobs.put(job)

    def wake(self) -> None:
        """Make the descriptor readable. May be called from anywhere, also from a signal handler."""
        with contextlib.suppress(BlockingIOError):  # full: it is readable already
            os.write(self._writable, b"!")

    def finish(self) -> None:
        """Run what finished jobs left to be done.

        :raises Exception: what a job raised; jobs handle what they expect, so that is a defect.
        """
        with contextlib.suppress(BlockingIOError):
            os.read(self._readable, 4096)
        while True:
            try:
                finished = self._finished.get_nowait()
            except queue.Empty:
                return
            if isinstance(finished, BaseException):
                raise finished
            finished()

    def close(self) -> None:
        """Let the threads end when they are done. The descriptor stays open for those that are not."""
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._finished.put(job())
            except BaseException as error:  # noqa: BLE001 - raised again in the loop's thread
                self._finished.put(error)
            self.wake()
