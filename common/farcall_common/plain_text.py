"""Text of other people for a terminal: without the control characters that steer it."""

from __future__ import annotations

import re
from typing import Final

#: Colors and styles, which carry no text.
_STYLES: Final = re.compile(r"\x1b\[[0-9;:]*m")
#: C0 and C1 without newline and tab, DEL, separators of lines, overrides of the direction of text, and halves of
#: surrogate pairs, which no output can encode.
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """The text with control characters written out (``\\x1b``), except newline and tab. Colors are left out, and a
    carriage return is a newline."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROLS.sub(_written, _STYLES.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))


def escaped(json_text: str) -> str:
    """JSON of the same value, with escapes for the control characters that JSON lets through."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", json_text)


def _written(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
