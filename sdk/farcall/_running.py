"""The task that runs: what a function may call while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farcall_common.running import RunningTask

_running: Callable[[], RunningTask] | None = None


def current() -> RunningTask:
    """The running task, for functions that call other functions on their own endpoint::

        def driver(n):
            from farcall import current
            return sum(current().map(work, range(n)))

    and for those that say how far they are::

        def fit(steps):
            from farcall import current
            for step in range(steps):
                current().progress(step, steps, "fitting")

    :raises ConfigurationError: where no task runs: in the program that submits, for instance.
    """
    global _running
    if _running is None:
        from farcall_common.running import current as running  # here: only workers need it

        _running = running
    return _running()
