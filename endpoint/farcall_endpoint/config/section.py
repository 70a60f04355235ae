"""Base classes and types of the configuration's sections."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

BYTES_PER_GB: Final = 1024**3
"""Memory is written in GB as Parsl and the schedulers mean it: 1,024 cubed."""

Walltime = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[0-9]{1,4}:[0-5][0-9]:[0-5][0-9]$", extra={"looks_like": "01:30:00 (hours:minutes:seconds)"}
    ),
]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping in the file."""


class FieldProblem(ValueError):
    """Inconsistent fields. ``field`` is the one to change, ``item`` the number of an item of it, ``fix`` the
    correction."""

    def __init__(self, field: str, message: str, *, fix: str, item: int | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.item = item
        self.fix = fix


def walltime_seconds(walltime: str) -> float:
    """The seconds of a :data:`Walltime`."""
    hours, minutes, seconds = (int(part) for part in walltime.split(":"))
    return float(hours * 3600 + minutes * 60 + seconds)
