"""Text of other people for a terminal: without the control characters that steer it."""

from __future__ import annotations

import codecs
import re
from typing import Final

#: Colors and styles, which carry no text.
_STYLES: Final = re.compile(r"\x1b\[[0-9;:]*m")
#: C0 and C1 without newline and tab, DEL, separators of lines, marks and overrides of the direction of text, invisible
#: characters but for the joiners that ordinary text has, and halves of surrogate pairs, which no output can encode.
_CONTROLS: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\ud800-\udfff\U000e0000-\U000e007f]"
)


def plain(text: str) -> str:
    """The text with control characters written out (``\\x1b``), except newline and tab. Colors are left out, and a
    carriage return is a newline."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROLS.sub(_written, _STYLES.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))


def is_plain_line(text: str) -> bool:
    """Whether a text has no control characters, also no newline and tab."""
    return not any(each in text for each in "\n\t") and plain(text) == text


def escaped(json_text: str) -> str:
    """JSON of the same value, with escapes for the control characters that JSON lets through."""
    if json_text.isascii() and "\x7f" not in json_text:  # as most is; JSON demands escapes for the others
        return json_text
    return _CONTROLS.sub(_escape, json_text)


class PlainStream:
    """Makes the output of a program :func:`plain`, piece by piece. Bytes that are not UTF-8 are written out, too."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def write(self, data: bytes) -> bytes:
        """Return the plain form of the next piece; empty bytes end the output."""
        return plain(self._decoder.decode(data, final=not data)).encode()


def _escape(found: re.Match[str]) -> str:
    code = found[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{code[at : at + 4]}" for at in range(0, len(code), 4))


def _written(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code > 0xFFFF:
        return f"\\U{code:08x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
