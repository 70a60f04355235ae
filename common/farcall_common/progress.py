"""Progress of a task: how far its function is, as the function itself says. What other programs wrote is cleaned and
limited."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final

PROGRESS: Final = "progress"
"""In the details of a result: the last progress of the task, as :meth:`Progress.to_json` writes it."""
MAX_TEXT: Final = 200
"""Characters of a text."""
_MAX_INTEGER: Final = 2**53
_MAX_SKEW_S: Final = 366 * 86400.0
"""A clock may be off, but not so far that the time makes no sense."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a task is, as its function last said with ``farcall.current().progress``.

    :param done: what is done, in a unit of the function's own.
    :param total: of how much; None if the function did not say.
    :param text: what it is doing, of at most 200 characters; empty if it did not say.
    :param at: epoch seconds, by the clock of the node where the task runs, when the node learned of it.
    """

    done: int | float
    total: int | float | None = None
    text: str = ""
    at: float = 0.0

    def __str__(self) -> str:
        parts = [_in_words(self.done)]
        if self.total is not None:
            parts.append(f"of {_in_words(self.total)}")
            if self.total > 0 and 0 <= self.done <= self.total:
                percent = round(100 * (self.done / self.total), 9)  # 0.29 of 1 are 28.999999999999996
                parts.append(f"({math.floor(percent)} %)")
        shown = " ".join(parts)
        return f"{shown}: {self.text}" if self.text else shown

    def to_json(self) -> dict[str, Any]:
        """The fields that are not empty."""
        found: dict[str, Any] = {"done": self.done, "at": self.at}
        if self.total is not None:
            found["total"] = self.total
        if self.text:
            found["text"] = self.text
        return found


def clean_progress(done: Any, total: Any, text: Any, at: Any) -> Progress | None:
    """Progress of values that a peer may have chosen; None if ``done`` is not a finite number, or ``at`` no instant.
    A ``total`` that is not one is left out."""
    number, instant = _finite(done), _finite(at)
    if number is None or instant is None:
        return None
    return Progress(number, _finite(total), clean_text(text) if isinstance(text, str) else "", float(instant))


def read_progress(value: Any, *, now: float | None = None) -> Progress | None:
    """Progress from JSON that a peer wrote; None if it cannot be read.

    :param now: epoch seconds; an instant more than a year away from it becomes this.
    """
    if not isinstance(value, Mapping):
        return None
    found = clean_progress(value.get("done"), value.get("total"), value.get("text"), value.get("at", now))
    if found is not None and now is not None and abs(found.at - now) > _MAX_SKEW_S:
        return dataclasses.replace(found, at=now)
    return found


def clean_text(text: str, *, most: int = MAX_TEXT) -> str:
    """One line of at most ``most`` characters without control characters and others that cannot be printed, such as
    overrides of the direction of text."""
    text = text[: 4 * most]  # before more is done with it
    if not text.isprintable():
        text = "".join([each if each.isprintable() else " " for each in text])
    return " ".join(text.split())[:most]


def _in_words(number: int | float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.10g}"


def _finite(value: Any) -> int | float | None:
    """A number that JSON, MessagePack and a database can hold; None if it is none."""
    if type(value) is int:
        try:
            return value if abs(value) <= _MAX_INTEGER else float(value)
        except OverflowError:
            return None
    return value if type(value) is float and math.isfinite(value) else None
