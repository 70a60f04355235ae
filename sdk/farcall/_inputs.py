"""Futures as arguments: found before a call is sent, waited for, and replaced by what they came to."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from farcall_common.errors import TaskError

_Future = concurrent.futures.Future[Any]
_SEQUENCES: Final = (list, tuple, set, frozenset)
_INSIDES: Final = (*_SEQUENCES, dict)


class InputFailed(TaskError):
    """A call was never made: a future that it takes as an argument failed. That failure is the ``__cause__``."""

    code = "INPUT_FAILED"


def inputs_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Future]:
    """The futures among the arguments and directly inside of lists, tuples, sets and dictionaries among them."""
    found: dict[int, _Future] = {}
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, _INSIDES):
            if type(value) in _INSIDES:
                found |= {id(each): each for each in _inside(value) if isinstance(each, concurrent.futures.Future)}
        elif isinstance(value, concurrent.futures.Future):
            found[id(value)] = value
    return list(found.values())


def resolved(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the results of their futures, which are done and did not fail, in the futures' places."""
    return tuple(map(_resolve, args)), {name: _resolve(value) for name, value in kwargs.items()}


def failure_of(inputs: Iterable[_Future]) -> InputFailed | None:
    """The error of a call whose inputs are done, if one of them failed."""
    from farcall_common.payload.hints import message_of  # importing this package loads nothing of pickling

    for future in inputs:
        what = f"task {future.task_id}" if hasattr(future, "task_id") else "a future"
        cause: BaseException | None
        if future.cancelled():
            cause, how = concurrent.futures.CancelledError(), "was cancelled"
        else:
            cause = future.exception()
            how = f"failed: {cause and message_of(cause)}"
        if cause is not None:
            error = InputFailed(f"not called, because {what}, which is one of its arguments, {how}", hint="")
            error.__cause__ = cause
            return error
    return None


def when_all_done(inputs: Sequence[_Future], act: Callable[[], None]) -> None:
    """Call ``act`` once, when the last of the inputs is done: in the thread that learns of it, or here."""
    left = len(inputs)
    lock = threading.Lock()

    def one_done(_: _Future) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            act()

    for future in inputs:
        future.add_done_callback(one_done)


def _inside(value: Any) -> Iterator[Any]:
    return iter(value.values() if type(value) is dict else value)


def _resolve(value: Any) -> Any:
    if isinstance(value, concurrent.futures.Future):
        return value.result()
    kind = type(value)
    if kind is dict:
        return {key: _result_of(item) for key, item in value.items()}
    if kind in _SEQUENCES:
        return kind(map(_result_of, value))
    return value


def _result_of(value: Any) -> Any:
    return value.result() if isinstance(value, concurrent.futures.Future) else value
