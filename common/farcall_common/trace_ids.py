"""Trace ids for logs: the traces of the tasks in one message, of which a log has one line."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final

_MOST: Final = 10
_START: Final = len("00-")
_LENGTH: Final = 32


def trace_ids(traceparents: Iterable[str | None]) -> str:
    """Return the ids of the first ten traces of W3C's ``traceparents``, separated by spaces; empty if there are none.
    Empty texts and None are left out."""
    ids = (each[_START : _START + _LENGTH] for each in traceparents if each)
    return " ".join(itertools.islice(dict.fromkeys(ids), _MOST))
