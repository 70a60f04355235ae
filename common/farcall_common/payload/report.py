"""Exceptions of user code: their conversion to a record, and from a record to the error of a task.

The record has the exception as text, with the user's frames only. The exception itself may be included, as a buffer in
the record or (native only) behind it. Reading it runs its code, as reading a result does: only the client does that.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import traceback
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any, Final

from farcall_common.errors import (
    DeserializationError,
    ErrorRecord,
    ResultRefused,
    TaskError,
    TaskFailed,
    TaskUnknown,
    builtin_type_of,
    error_from_record,
)
from farcall_common.limits import MAX_EXCEPTION_BYTES
from farcall_common.payload.data import PickledData
from farcall_common.payload.strategy import Strategy, hint_for, message_of
from farcall_common.plain_text import plain

_MAX_MESSAGE_CHARACTERS = 4_000
_MAX_TRACEBACK_CHARACTERS = 64_000
_EXCEPTION_DATA: Final = (PickledData(),)
_OWN_PACKAGES = frozenset({"farcall_common", "farcall_endpoint"})
_SHOWN_ATTRIBUTES: Final = ("errno", "strerror", "filename", "filename2")


def describe_exception(
    error: BaseException,
    *,
    attempt: int | None = None,
    endpoint_id: str | None = None,
    stdout_tail: str | None = None,
    stderr_tail: str | None = None,
    own_packages: Collection[str] = _OWN_PACKAGES,
) -> ErrorRecord:
    """The failure record of a task whose function raised ``error``.

    The traceback starts where the user's code starts: frames of ``own_packages`` (top-level names) above it are left
    out, in causes, contexts and members of groups too. Never raises, whatever the exception does when it is looked at.
    Long texts lose their middle; every text is UTF-8 without NUL, so that any store takes it.
    """
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    message = message_of(error)
    text = f"{name}: {message}" if message else name
    try:
        hint, remote_traceback = hint_for(error), _format(error, own_packages)
        if isinstance(error, TaskError) and kind.__module__ == TaskError.__module__:
            # Of a call that the function made: ten calls in one another end with one sentence.
            is_raised = error.record.code == TaskFailed.code
            text = f"{'' if is_raised else f'[{error.record.code}] '}{error.record.message}"
            hint = f"{error.record.hint}"
    except BaseException as failure:  # noqa: BLE001 - attributes of user exceptions may be properties that raise
        hint, remote_traceback = "", f"{name}: {message}\n(its traceback cannot be shown: {type(failure).__name__})\n"
    return ErrorRecord(
        code=TaskFailed.code,
        message=_storable(text, _MAX_MESSAGE_CHARACTERS),
        hint=_storable(hint, _MAX_MESSAGE_CHARACTERS),
        fault=TaskFailed.fault,
        retryable=TaskFailed.retryable,
        exception_type=_storable(name, _MAX_MESSAGE_CHARACTERS),
        traceback=_storable(remote_traceback, _MAX_TRACEBACK_CHARACTERS),
        stdout_tail=stdout_tail,
        stderr_tail=stderr_tail,
        attempt=attempt,
        endpoint_id=endpoint_id,
        builtin_type=builtin_type_of(error),
    )


def pack_exception(error: BaseException, strategies: Sequence[Strategy] = _EXCEPTION_DATA) -> str | None:
    """The exception itself as a buffer of text, by the first strategy that can write it; None if none can, or if it
    is too large for a record. Its traceback stays here."""
    BaseException.with_traceback(error, None)  # not by assignment: a class may forbid that
    for strategy in strategies:
        with contextlib.suppress(BaseException):  # reduce methods are user code
            text = b"".join(strategy.write(error)).decode()
            return text if len(text) <= MAX_EXCEPTION_BYTES else None
    return None


def load_user_data(load: Callable[[], Any]) -> Any:
    """The value of a buffer. ``load`` runs the user's code, which must not end the thread that receives results:
    SystemExit and the like count as errors too. Only Ctrl-C, which comes to the main thread, passes.

    :raises DeserializationError: if the value cannot be read here; the reason is its ``__cause__``.
    """
    try:
        return load()
    except DeserializationError:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        message = f"Cannot be read here: {type(error).__name__}: {message_of(error)}"
        raise DeserializationError(message, hint=hint_for(error)) from error


def task_error(
    record: ErrorRecord, *, expected: type[TaskError], load_original: Callable[[], Any] | None = None
) -> TaskError | TaskUnknown:
    """The error of a task that did not succeed: of the class of its code, or of the ``expected`` one if that is none of
    its kind.

    Its notes have the remote traceback, which Python prints below the local one. What the function raised is its
    ``__cause__`` if ``load_original`` makes an exception; a note says so if that may not be read.
    """
    error = error_from_record(record, default=expected)
    if isinstance(error, TaskUnknown):
        return error
    if not isinstance(error, expected):
        error = expected(record.message, record=record)
    note = _remote_report(record)
    if note:
        error.add_note(note)
    if load_original and isinstance(error, TaskFailed):
        try:
            load_user_data(functools.partial(_take_original, error, load_original))
        except ResultRefused as refused:
            error.add_note(f"The exception itself was not read: {refused.record.message}.")
        except DeserializationError:  # it cannot be read here: its text is enough
            pass
    return error


def _take_original(error: TaskFailed, load_original: Callable[[], Any]) -> None:
    """Attributes of the original may be properties, which are code of the user's too."""
    original = load_original()
    if isinstance(original, BaseException):
        error.__cause__ = original
        if isinstance(error, OSError) and isinstance(original, OSError):
            for name in _SHOWN_ATTRIBUTES:
                setattr(error, name, getattr(original, name))


def _remote_report(record: ErrorRecord) -> str:
    """A failure on the worker, as text."""
    place = [f"endpoint {record.endpoint_id}"] if record.endpoint_id else []
    place += [f"attempt {record.attempt}"] if record.attempt else []
    place += [f"after {_times(record.retries_used)}"] if record.retries_used else []
    where = f" ({', '.join(place)})" if place else ""
    parts = []
    if record.traceback:
        parts.append(f"Remote traceback{where}:\n{record.traceback.rstrip()}")
    elif record.retries_used:
        parts.append(f"It failed after {_times(record.retries_used)}.")
    if record.reasons:
        ends = "\n".join(f"  {number}. {reason}" for number, reason in enumerate(record.reasons, start=1))
        parts.append(f"How its attempts ended:\n{ends}")
    for name, tail in (("stdout", record.stdout_tail), ("stderr", record.stderr_tail)):
        if tail:
            parts.append(f"Last {name} of the task:\n{tail.rstrip()}")
    return plain("\n\n".join(parts))


def _times(retries: int) -> str:
    return "1 retry" if retries == 1 else f"{retries} retries"


def _format(error: BaseException, own_packages: Collection[str]) -> str:
    summary = traceback.TracebackException(type(error), error, error.__traceback__, compact=True)
    pairs: list[tuple[traceback.TracebackException | None, BaseException | None]] = [(summary, error)]
    while pairs:
        part, source = pairs.pop()
        if part is None or source is None:
            continue
        del part.stack[: _own_frames(source.__traceback__, own_packages)]
        pairs += [(part.__cause__, source.__cause__), (part.__context__, source.__context__)]
        if isinstance(source, BaseExceptionGroup):
            pairs += zip(part.exceptions or (), source.exceptions, strict=False)
    return "".join(summary.format())


def _own_frames(frames: TracebackType | None, own_packages: Collection[str]) -> int:
    """Number of our own frames at the top."""
    count = 0
    while frames is not None and _package(frames) in own_packages:
        count += 1
        frames = frames.tb_next
    return count


def _package(frame: TracebackType) -> str:
    names = frame.tb_frame.f_globals
    if frame.tb_frame.f_code.co_filename != names.get("__file__"):
        return ""  # made by exec, or sent by value: dill gives the functions of a user's __main__ those of the worker's
    spec = names.get("__spec__")  # knows the name of a module that runs as __main__
    return str(spec.name if spec else names.get("__name__", "")).partition(".")[0]


def _storable(text: str, limit: int) -> str:
    if len(text) > limit:
        left_out = len(text) - limit
        text = f"{text[: limit // 2]}\n... {left_out} characters left out ...\n{text[-(limit // 2) :]}"
    return text.encode(errors="backslashreplace").decode().replace("\x00", "\\x00")
