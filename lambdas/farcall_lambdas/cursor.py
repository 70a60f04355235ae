"""Pagination cursors: time and id of the last entry of a page, as opaque text.

The shapes of the API accept nothing else (:data:`~farcall_lambdas.models.fields.Cursor`).
"""

from __future__ import annotations

import datetime as dt
from typing import Final

_EPOCH: Final = dt.datetime.fromtimestamp(0, dt.UTC)
_MICROSECOND: Final = dt.timedelta(microseconds=1)


def encode(at: dt.datetime, entry_id: str | int) -> str:
    """The cursor behind an entry."""
    return f"{(at - _EPOCH) // _MICROSECOND}:{entry_id}"


def decode(cursor: str | None) -> tuple[dt.datetime, str] | None:
    """Time and id of the entry after which a page starts; None for the first page."""
    if cursor is None:
        return None
    microseconds, _, entry_id = cursor.partition(":")
    return _EPOCH + int(microseconds) * _MICROSECOND, entry_id


def instant(at: float | None) -> dt.datetime | None:
    """Epoch seconds as a date."""
    return None if at is None else dt.datetime.fromtimestamp(at, dt.UTC)
