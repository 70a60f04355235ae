"""What the fakes share: one lock, a switch that cuts them off, and the order of instants."""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
from collections.abc import Iterator

from farcall_common.errors import Unavailable


class Reach:
    """A store that answers one call at a time, or none while ``reachable`` is False."""

    def __init__(self) -> None:
        self.reachable = True
        self._lock = threading.RLock()

    def ping(self) -> None:
        with self._call():
            pass

    def close(self) -> None:
        self.reachable = False

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        with self._lock:
            if not self.reachable:
                raise Unavailable(f"{type(self).__name__} was cut off")
            yield


def moment(at: dt.datetime | None) -> dt.datetime:
    """An instant to compare; None is before all others."""
    return at or dt.datetime.min.replace(tzinfo=dt.UTC)
