"""Guarded futures: their callbacks cannot end the thread that settles them."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures._base import FINISHED, PENDING
from typing import Any, Final, NoReturn, TypeVar

T = TypeVar("T")

#: Of futures and of calls in a forked child.
OF_PARENT: Final = "it belongs to the parent process. Make an executor after the fork"

_logger = logging.getLogger("concurrent.futures")  # where the standard library reports callbacks that raise


class GuardedFuture(concurrent.futures.Future[T]):
    """A future whose callbacks may raise anything.

    The standard library logs an Exception. Other exceptions, such as the SystemExit of a ``sys.exit()``, would skip
    the next callbacks, and end the thread that settles all other futures. Here they are logged as well, except in the
    main thread, which must receive a user's Ctrl-C.
    """

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        """Add a callback (see :meth:`concurrent.futures.Future.add_done_callback`)."""
        super().add_done_callback(functools.partial(_call, fn))

    def end_after_fork(self, error: BaseException) -> None:
        """End the future in a forked child: only the parent has the thread that settles it. Callbacks are not called.

        No lock is taken: a thread of the parent may have held it.
        """
        self._condition = threading.Condition()
        if self._state == PENDING:
            self._exception, self._state = error, FINISHED

    def __reduce__(self) -> NoReturn:
        raise TypeError("a future cannot be sent; pass its result()")


def _call(fn: Callable[[concurrent.futures.Future[Any]], object], future: concurrent.futures.Future[Any]) -> None:
    try:
        fn(future)
    except Exception:
        raise  # the standard library logs it
    except BaseException:
        if threading.current_thread() is threading.main_thread():
            raise
        _logger.exception("exception calling callback for %r", future)
