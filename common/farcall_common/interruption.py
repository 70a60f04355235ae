"""What a command that is ended in the middle of its work ends with: one rule for all of ours.

SIGINT (Ctrl-C) and SIGTERM end a command in the same way. It tidies up, says what goes on without it, and its exit
status is what a shell shows of a program that the signal killed: 128 and the signal's number. A service that is told to
end (an endpoint's agent, a tier in the foreground) has done what it was told, and ends with 0.
"""

from __future__ import annotations

import signal
from typing import Final, NoReturn

INTERRUPTED: Final = 128 + signal.SIGINT
TERMINATED: Final = 128 + signal.SIGTERM


class Terminated(KeyboardInterrupt):
    """SIGTERM came. Whoever tidies up after Ctrl-C does so after this."""


def raise_on_sigterm() -> None:
    """From now on SIGTERM raises :class:`Terminated` in this process, where it would have killed it without a word."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)


def exit_status(interruption: KeyboardInterrupt) -> int:
    """What a command ends with that was ended like this."""
    return TERMINATED if isinstance(interruption, Terminated) else INTERRUPTED


def _terminated(_number: int, _frame: object) -> NoReturn:
    raise Terminated
