"""The task that runs: what a function may call while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farcall_common.running import RunningTask


def current() -> RunningTask:
    """The running task, for functions that call other functions on their own endpoint::

        def driver(n):
            from farcall import current
            return sum(current().map(work, range(n)))

    :raises ConfigurationError: where no task runs: in the program that submits, for instance.
    """
    from farcall_common.running import current as running  # here: only workers need it

    return running()
