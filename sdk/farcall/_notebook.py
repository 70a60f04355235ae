"""How things look in a notebook: a heading and a few lines, in the notebook's own colours."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, Final

_LONGEST: Final = 200

_short: Final = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = _LONGEST


def card(heading: str, fields: Mapping[str, object]) -> str:
    """HTML that shows a heading and what is known; None and empty text are left out."""
    import html  # here, for those few who have a notebook

    rows = "".join(
        f'<tr><th style="text-align:left">{html.escape(name)}</th>'
        f'<td style="text-align:left">{html.escape(str(value))}</td></tr>'
        for name, value in fields.items()
        if value is not None and value != ""
    )
    return f"<b>{html.escape(heading)}</b><table>{rows}</table>"


def shortened(value: Any) -> str:
    """A value as Python shows it, of a bearable length."""
    return _short.repr(value)
