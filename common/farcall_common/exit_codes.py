"""Exit codes: one table for all commands of Farcall, and how signals end a command.

Codes from 64 to 78 are those of sysexits.h. SIGINT (Ctrl-C) and SIGTERM end a command in the same way: it cleans up and
reports what is still running. Its exit code is the one that a shell shows for a killed program: 128 plus the signal's
number. A service (an endpoint's agent, a tier in the foreground) that receives a signal ends with 0.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

from farcall_common.errors import (
    ConfigurationError,
    Conflict,
    DeserializationError,
    FarcallError,
    Forbidden,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    ProtocolError,
    SerializationError,
    SessionRefused,
    SpoolOutdated,
    TaskError,
    TaskPending,
    Unauthenticated,
    Unavailable,
)

DONE: Final = 0
FAILED: Final = 1
UNHEALTHY: Final = 3
INTERNAL: Final = 70
INTERRUPTED: Final = 128 + signal.SIGINT
TERMINATED: Final = 128 + signal.SIGTERM
BROKEN_PIPE: Final = 141

#: Each code and its meaning. A command's own table may give :data:`FAILED` another meaning.
EXIT_CODES: Final[Mapping[int, str]] = {
    DONE: "done",
    FAILED: "a task failed, was lost or was cancelled",
    2: "the command line is wrong",
    UNHEALTHY: "the cloud tier is unhealthy, or does not run (`cloud status`, `local status`)",
    65: "a value, file, function or spool cannot be used",
    66: "a function, endpoint, task or group does not exist",
    69: "the service cannot be reached, or has no room",
    INTERNAL: "an error of Farcall",
    73: "in use already",
    75: "not yet: the task has not ended, or the service is busy",
    76: "the other side answered something unknown",
    77: "not logged in, not allowed, or refused",
    78: "a setting is missing or wrong",
    INTERRUPTED: "interrupted",
    BROKEN_PIPE: "the reader of the output has ended",
    TERMINATED: "terminated (SIGTERM)",
}

#: The first class that an error is an instance of decides. systemd starts an endpoint again after some codes and not
#: after others (:mod:`farcall_endpoint.app.systemd`).
_BY_ERROR: Final[Sequence[tuple[type[FarcallError], int]]] = (
    (TaskPending, 75),
    (TaskError, FAILED),
    (Unauthenticated, 77),
    (Forbidden, 77),
    (SessionRefused, 77),
    (Unavailable, 69),
    (LimitExceeded, 75),
    (ConfigurationError, 78),
    (NotFound, 66),
    (SpoolOutdated, 65),
    (Conflict, 73),
    (ProtocolError, 76),
    (InvalidRequest, 65),
    (SerializationError, 65),
    (DeserializationError, 65),
)


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


def exit_code_of(cls: type[FarcallError]) -> int:
    """The exit code for an error class; :data:`INTERNAL` for one that the table does not have."""
    return next((code for known, code in _BY_ERROR if issubclass(cls, known)), INTERNAL)


def exit_code(error: FarcallError) -> int:
    """The exit code after this error. An error with an interruption as its cause has the interruption's code."""
    if isinstance(error.__cause__, KeyboardInterrupt):
        return exit_status(error.__cause__)
    return exit_code_of(type(error))


def epilog(codes: Mapping[int, str]) -> str:
    """The table of exit codes, for a help text."""
    return "Exit codes: " + " · ".join(f"{code} {meaning}" for code, meaning in codes.items())
