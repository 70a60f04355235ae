"""The task that runs: what a function may call while it runs."""

from __future__ import annotations

import importlib
from typing import Any


def current() -> Any:
    """The running task, for calls on its own endpoint::

        def driver(n):
            from farcall import current
            return sum(current().map(work, range(n)))

    :raises RuntimeError: where no task runs: in the program that submits, for instance.
    """
    try:
        running = importlib.import_module("farcall_common.running")  # here: only workers need it
    except ModuleNotFoundError:
        raise RuntimeError("no task runs here: current() is for functions that run on an endpoint") from None
    return running.current()
