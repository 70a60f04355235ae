"""What user code raised, as a value that can travel: text only, with the user's frames only."""

from __future__ import annotations

import traceback
from collections.abc import Collection
from types import TracebackType

from farcall_common.errors import ErrorRecord, TaskFailed
from farcall_common.payload.hints import hint_for, message_of

__all__ = ["describe_exception"]

_MAX_MESSAGE_CHARACTERS = 4_000
_MAX_TRACEBACK_CHARACTERS = 64_000
_OWN_PACKAGES = frozenset({"farcall_common", "farcall_endpoint"})


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
    try:
        hint, remote_traceback = hint_for(error), _format(error, own_packages)
    except Exception as failure:  # noqa: BLE001 - attributes of user exceptions may be properties that raise
        hint, remote_traceback = "", f"{name}: {message}\n(its traceback cannot be shown: {type(failure).__name__})\n"
    return ErrorRecord(
        code=TaskFailed.code,
        message=_storable(f"{name}: {message}" if message else name, _MAX_MESSAGE_CHARACTERS),
        hint=_storable(hint, _MAX_MESSAGE_CHARACTERS),
        fault=TaskFailed.fault,
        retryable=TaskFailed.retryable,
        exception_type=_storable(name, _MAX_MESSAGE_CHARACTERS),
        traceback=_storable(remote_traceback, _MAX_TRACEBACK_CHARACTERS),
        stdout_tail=stdout_tail,
        stderr_tail=stderr_tail,
        attempt=attempt,
        endpoint_id=endpoint_id,
    )


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
    """How many frames at the top are ours."""
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
