"""Where Farcall keeps a user's files, and which API to ask. Cheap to import."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farcall_common.errors import ConfigurationError
from farcall_common.login_file import login_at

__all__ = ["Credentials", "find_home", "read_credentials", "stored_values"]


@dataclasses.dataclass(frozen=True)
class Credentials:
    """Which API, and who asks."""

    api_url: str
    token: str = dataclasses.field(repr=False)
    #: The file with a login, whose token is used and renewed instead.
    login: Path | None = None


def find_home(environ: Mapping[str, str]) -> Path:
    """The directory for everything that Farcall keeps for a user."""
    return Path(environ.get("FARCALL_HOME") or "~/.farcall").expanduser()


def read_credentials(environ: Mapping[str, str], *, home: Path) -> Credentials:
    """Environment before a login at that API before ``config.toml`` in the home directory.

    :raises ConfigurationError: if none of them says it, or a file cannot be read.
    """
    path = home / "config.toml"
    stored: dict[str, Any] = {}
    if path.exists():
        try:
            stored = tomllib.loads(path.read_text()).get("default", {})
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{path} cannot be read: {error}.") from error
    api_url = environ.get("FARCALL_API_URL") or stored.get("api_url")
    token = environ.get("FARCALL_TOKEN")
    login = login_at(str(api_url), home) if api_url and not token else None
    token = token or ("" if login else stored.get("token"))
    if not api_url or (not token and login is None):
        missing = "address of the API" if not api_url else "token"
        raise ConfigurationError(
            f"The {missing} is not known.",
            hint=f"Set FARCALL_API_URL and FARCALL_TOKEN, write {path}, or run `farcall login` or `farcall local up`.",
        )
    return Credentials(str(api_url).rstrip("/"), str(token), login)


def stored_values(home: Path) -> list[tuple[str, str]]:
    """Names and values in ``config.toml``; none if it cannot be read."""
    try:
        data = tomllib.loads((home / "config.toml").read_text())
    except (OSError, ValueError):
        return []
    sections = [section for section in data.values() if isinstance(section, dict)]
    return [(name, str(value)) for section in sections for name, value in section.items()]
