"""Standard streams that are closed or take no bytes: cron jobs and wrappers start programs without them."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Final

from farcall_common.errors import ErrorRecord, Fault, Unavailable

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def open_missing_streams() -> None:
    """Open ``/dev/null`` in place of closed standard streams. Otherwise the next file or pipe gets such a number, and a
    child's standard stream then replaces it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def replace_missing_streams() -> None:
    """Open missing streams, also those of Python, which has None in place of streams that are closed at its start."""
    open_missing_streams()
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def drop_output() -> None:
    """Discard buffered output whose reader is gone or whose disk is full: flushing it would raise again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            with contextlib.suppress(ValueError):  # it is closed
                stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def output_error(error: BaseException) -> Unavailable | None:
    """The error of a stream that takes no more bytes; None if an exception is another one.

    An error of a named file has its name.
    """
    if not isinstance(error, OSError) or error.errno not in _NO_ROOM or error.filename is not None:
        return None
    message = f"The output cannot be written: {error.strerror}."
    hint = "Free some space, or write the output to another disk."
    return Unavailable(message, record=ErrorRecord(Unavailable.code, message, hint, Fault.CALLER))
