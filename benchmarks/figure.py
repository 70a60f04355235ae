"""What a benchmark tells of one thing that it measured."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured value, what was wished for, and whether it was reached (None: there was no wish)."""

    name: str
    value: float
    unit: str
    wish: str = ""
    reached: bool | None = None
