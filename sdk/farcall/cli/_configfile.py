"""Changing ``config.toml`` without touching what else is in it."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from farcall._settings import find_home
from farcall_common.errors import ConfigurationError
from farcall_common.private import write_private

__all__ = ["KEYS", "config_path", "store"]

#: What can be set, and what it is.
KEYS: Final[Mapping[str, str]] = {
    "api_url": "address of the API",
    "token": "who is calling",
    "endpoint": "where to run unless said otherwise: a name or an id",
}
_HEADER: Final = "[default]"


def config_path() -> Path:
    """Where the settings are kept."""
    return find_home(os.environ) / "config.toml"


def store(values: Mapping[str, str | None]) -> Path:
    """Set settings, or take away those that are None, and return the path of the file: only its owner may read it.

    :raises ConfigurationError: if the file cannot be written, or is written in a way that cannot be changed safely.
    """
    path = config_path()
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        wanted = tomllib.loads(before)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}", hint="Mend the file, or delete it.") from error
    section = wanted.setdefault("default", {})
    text = before
    for name, value in values.items():
        text = _changed(text, name, value)
        if value is None:
            section.pop(name, None)
        else:
            section[name] = value
    if _parsed(text) != wanted:
        raise ConfigurationError(f"{path} is written in an unusual way", hint=f"Edit it by hand: {', '.join(values)}.")
    try:
        write_private(path, text.encode())
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
    return path


def _changed(text: str, name: str, value: str | None) -> str:
    """The text with a line of the table ``default`` changed, added or left out."""
    lines = text.splitlines()
    if _HEADER not in (line.strip() for line in lines):
        lines += ["", _HEADER] if lines else [_HEADER]
    start = next(number for number, line in enumerate(lines) if line.strip() == _HEADER) + 1
    end = next((number for number in range(start, len(lines)) if lines[number].lstrip().startswith("[")), len(lines))
    table = [line for line in lines[start:end] if not re.match(rf"\s*{name}\s*=", line)]
    # A JSON string is a TOML string.
    added = [] if value is None else [f"{name} = {msgspec.json.encode(value).decode()}"]
    return "\n".join([*lines[:start], *added, *table, *lines[end:]]) + "\n"


def _parsed(text: str) -> object:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
