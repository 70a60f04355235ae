"""The task that runs: what a function may call while it runs."""

from __future__ import annotations

import importlib
from typing import Any

from farcall_common.errors import ConfigurationError


def current() -> Any:
    """The running task, for calls on its own endpoint::

        def driver(n):
            from farcall import current
            return sum(current().map(work, range(n)))

    :raises ConfigurationError: where no task runs: in the program that submits, for instance.
    """
    try:
        running = importlib.import_module("farcall_common.running")  # here: only workers need it
    except ModuleNotFoundError:
        raise ConfigurationError("current() is for functions that run as a task, and no task runs here") from None
    return running.current()
