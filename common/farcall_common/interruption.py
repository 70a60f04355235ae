"""Interruption: exit status of a command that a signal ends.

SIGINT (Ctrl-C) and SIGTERM end a command in the same way. It cleans up and reports what is still running. Its exit
status is the one that a shell shows for a killed program: 128 plus the signal's number. A service (an endpoint's agent,
a tier in the foreground) that receives a signal ends with 0.
"""

from __future__ import annotations

import signal
from typing import Final, NoReturn

INTERRUPTED: Final = 128 + signal.SIGINT
TERMINATED: Final = 128 + signal.SIGTERM


class Terminated(KeyboardInterrupt):
    """SIGTERM was received. Code that cleans up after Ctrl-C handles this, too."""


def raise_on_sigterm() -> None:
    """Let SIGTERM raise :class:`Terminated` in this process, instead of killing it silently."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)


def exit_status(interruption: KeyboardInterrupt) -> int:
    """Exit status of a command after this interruption."""
    return TERMINATED if isinstance(interruption, Terminated) else INTERRUPTED


def _terminated(_number: int, _frame: object) -> NoReturn:
    raise Terminated
