"""What the command line ends with, and how it tells of an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import typer

from farcall_common.errors import (
    ConfigurationError,
    Conflict,
    DeserializationError,
    ErrorRecord,
    FarcallError,
    Forbidden,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    ProtocolError,
    SerializationError,
    SessionRefused,
    TaskError,
    TaskPending,
    Unauthenticated,
    Unavailable,
)
from farcall_common.interruption import INTERRUPTED, TERMINATED, exit_status

__all__ = ["BROKEN_PIPE", "EXIT_CODES", "FAILED", "INTERRUPTED", "epilog", "exit_code", "internal", "show_error"]

FAILED: Final = 1
_INTERNAL: Final = 70
BROKEN_PIPE: Final = 141

#: Code, and what it says; those from 64 to 78 are of sysexits.h, and ``farcall-endpoint`` uses them alike.
EXIT_CODES: Final[Sequence[tuple[int, str]]] = (
    (0, "done"),
    (FAILED, "a task failed, was lost or was cancelled"),
    (2, "the command line is wrong"),
    (65, "a value, file or function cannot be used"),
    (66, "there is no such function, endpoint, task or group"),
    (69, "the service cannot be reached"),
    (_INTERNAL, "an error of Farcall"),
    (73, "in use already"),
    (75, "not yet: the task has not ended, or the service is busy"),
    (76, "the other side answered something unknown"),
    (77, "not logged in, or not allowed"),
    (78, "a setting is missing or wrong"),
    (INTERRUPTED, "interrupted"),
    (BROKEN_PIPE, "the reader of the output went away"),
    (TERMINATED, "told to end"),
)

#: The first that an error is an instance of counts.
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
    (Conflict, 73),
    (ProtocolError, 76),
    (InvalidRequest, 65),
    (SerializationError, 65),
    (DeserializationError, 65),
)


def epilog() -> str:
    """The table of exit codes, for help texts."""
    return "Exit codes: " + " · ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES)


def exit_code(error: FarcallError) -> int:
    """The exit code that tells of an error. One that an interruption caused ends as that does."""
    if isinstance(error.__cause__, KeyboardInterrupt):
        return exit_status(error.__cause__)
    return next((code for cls, code in _BY_ERROR if isinstance(error, cls)), _INTERNAL)


def internal(error: Exception) -> FarcallError:
    """An error that nobody foresaw, as one that can be shown."""
    message = f"{type(error).__name__}: {error}"
    record = ErrorRecord(FarcallError.code, message, "This is a mistake in Farcall; `farcall --debug ...` shows where.")
    return FarcallError(message, record=record)


def show_error(error: FarcallError, *, as_json: bool) -> None:
    """Write an error to standard error: what happened on the worker, if it did, then one line."""
    if as_json:
        typer.echo(msgspec.json.encode({"error": error.record.to_json()}).decode(), err=True)
        return
    for note in getattr(error, "__notes__", ()):
        typer.echo(note, err=True)
    typer.secho("Error:", fg="red", err=True, nl=False)
    typer.echo(f" {' '.join(str(error).split())}", err=True)
