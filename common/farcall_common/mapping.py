"""Maps of executors and engines: chunks of calls, and their results in order."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def check_sizes(chunksize: int, buffersize: int | None) -> None:
    """:raises ValueError: for sizes that ``map`` cannot have."""
    if chunksize < 1:
        raise ValueError("chunksize must be at least 1")
    if buffersize is not None and buffersize < 1:
        raise ValueError("buffersize must be at least 1, or None")


def chunks_of(rows: Iterable[T], size: int) -> Iterator[list[T]]:
    """Rows in lists of ``size``; the last one may be shorter."""
    rows = iter(rows)
    while chunk := list(itertools.islice(rows, size)):
        yield chunk


def results_in_order(
    submit: Callable[[Any], concurrent.futures.Future[T]],
    calls: Iterator[Any],
    *,
    timeout_s: float | None,
    ahead: int | None,
    keep_after_interrupt: bool = False,
) -> Generator[T, None, None]:
    """Submit ``calls``, all of them now or ``ahead`` of the consumed results, and yield the results in order.

    When the iterator ends, by an error, a timeout or because it is closed, calls that are not done are cancelled.

    :param keep_after_interrupt: whether they continue after Ctrl-C: their executor reports them, and cancels them after
        a second one.
    :raises TimeoutError: from the iterator, once ``timeout_s`` seconds from now are over.
    """
    give_up_at = None if timeout_s is None else time.monotonic() + timeout_s
    futures: deque[concurrent.futures.Future[T]] = deque()
    try:
        futures.extend(map(submit, calls if ahead is None else itertools.islice(calls, ahead)))
    except BaseException as error:
        if not (keep_after_interrupt and isinstance(error, KeyboardInterrupt)):
            _cancel(futures)
        raise

    def next_result() -> T:
        result = _result(futures[0], give_up_at)
        futures.popleft()
        if ahead is not None:
            futures.extend(map(submit, itertools.islice(calls, 1)))
        return result

    def results() -> Generator[T, None, None]:
        try:
            while futures:
                yield next_result()  # in no variable: no reference is kept to a result that was yielded
        except KeyboardInterrupt:
            if keep_after_interrupt:
                futures.clear()
            raise
        finally:
            _cancel(futures)

    return results()


def flattened(chunks: Generator[list[T], None, None]) -> Generator[T, None, None]:
    """The results in chunks of results. Closing it closes the inner iterator."""
    with contextlib.closing(chunks):
        for chunk in chunks:
            chunk.reverse()
            while chunk:  # no reference is kept to a result that was yielded
                yield chunk.pop()


def _result(future: concurrent.futures.Future[T], give_up_at: float | None) -> T:
    return future.result(None if give_up_at is None else give_up_at - time.monotonic())


def _cancel(futures: Iterable[concurrent.futures.Future[Any]]) -> None:
    for future in futures:
        future.cancel()
