"""Credentials and settings of a user: the home directory, ``config.toml``, and which API to call with which token.

Arguments have precedence over environment variables, these over a login, and a login over ``config.toml``. Standard
library only: every command loads this module when it starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

from farcall_common.addresses import check_address
from farcall_common.errors import ConfigurationError
from farcall_common.files import warn_if_shared, write_private

#: The settings in ``config.toml``, and the environment variable that overrides each.
VARIABLES: Final[Mapping[str, str]] = {
    "api_url": "FARCALL_API_URL",
    "token": "FARCALL_TOKEN",
    "endpoint": "FARCALL_ENDPOINT",
    "trust": "FARCALL_TRUST",
    "sealed": "FARCALL_SEALED",
}
#: Variables with a client's id and secret: ours first, then those of Globus Compute.
CLIENT_VARIABLES: Final = (
    ("FARCALL_CLIENT_ID", "FARCALL_CLIENT_SECRET"),
    ("GLOBUS_COMPUTE_CLIENT_ID", "GLOBUS_COMPUTE_CLIENT_SECRET"),
)
#: Variables with id and secret of a client of Globus Transfer: ours first, then those of the Globus CLI.
GLOBUS_CLIENT_VARIABLES: Final = (
    ("FARCALL_GLOBUS_CLIENT_ID", "FARCALL_GLOBUS_CLIENT_SECRET"),
    ("GLOBUS_CLI_CLIENT_ID", "GLOBUS_CLI_CLIENT_SECRET"),
)
#: The file of the login in ``$FARCALL_HOME``; :mod:`farcall_common.login`, which loads HTTP, has its content.
LOGIN_FILE: Final = "login.json"
_NO_HOME: Final = "The home directory is not known: HOME is not set, and the user has no entry in the password database"
_TABLE: Final = "default"
_HEADER: Final = f"[{_TABLE}]"


@dataclasses.dataclass(frozen=True)
class Credentials:
    """The API to call, and the token to call it with. The token is left out of the repr, and so out of logs.

    :param login: the file of a login at this API, whose token is used and renewed instead of ``token``.
    """

    api_url: str
    token: str = dataclasses.field(repr=False)
    login: Path | None = None

    @classmethod
    def resolve(
        cls,
        api_url: str | None = None,
        token: str | None = None,
        *,
        environ: Mapping[str, str] = os.environ,
        home: Path | None = None,
    ) -> Self:
        """Take each setting from the first place that has it.

        The places are the argument, ``FARCALL_API_URL`` / ``FARCALL_TOKEN``, and in ``home`` (``$FARCALL_HOME``, or
        ``~/.farcall`` unless set) the login at that API in ``login.json``, if there is one, and the ``[default]`` table
        of ``config.toml``. Space around a value does not count.

        :raises ConfigurationError: if a setting is missing or invalid, or if the address is ``http`` of another machine
            and ``FARCALL_ALLOW_HTTP`` is not 1.
        """
        home = known_home(environ) if home is None else home
        api_url = _value(api_url) or from_environment("api_url", environ)
        token = _value(token) or from_environment("token", environ)
        stored = {} if api_url and token else read_settings(home)
        api_url = api_url or _value(stored.get("api_url"))
        login = login_at(api_url, home) if api_url and not token and home is not None else None
        token = "" if login else token or _value(stored.get("token"))
        if api_url is None or token is None:
            raise ConfigurationError(
                f"{'the address of the API' if api_url is None else 'the token'} is not set",
                hint="Run `farcall local up` for a local tier or `farcall login` for another deployment, set "
                f"FARCALL_API_URL and FARCALL_TOKEN, or write {config_path(home)}.",
            )
        if not _is_http(api_url):
            raise ConfigurationError(
                f"api_url is not an http(s) address: {api_url!r}",
                hint="Write it as https://HOST, or http://127.0.0.1:PORT for a local tier, where it comes from: an "
                f"argument, FARCALL_API_URL, or {config_path(home)}.",
            )
        where = f" (it comes from an argument, FARCALL_API_URL, or {config_path(home)})"
        check_address(api_url, what="api_url", where=where, environ=environ)
        return cls(api_url.rstrip("/"), token, login)


def login_at(api_url: str, home: Path) -> Path | None:
    """The file with the login, if it is for this API: other APIs must not receive its token.

    :raises ConfigurationError: if it cannot be read.
    """
    path = home / LOGIN_FILE
    try:
        login = json.loads(path.read_bytes())
        warn_if_shared(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}", hint="Delete it, and log in again.") from error
    return path if isinstance(login, dict) and login.get("api_url") == api_url.rstrip("/") else None


def find_home(environ: Mapping[str, str]) -> Path:
    """The directory of Farcall's files for a user.

    :raises ConfigurationError: if the user has no home directory.
    """
    home = known_home(environ)
    if home is None:
        raise ConfigurationError(_NO_HOME, hint="Set HOME, or FARCALL_HOME to a directory for Farcall's files.")
    return home


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path of the user's; a ``~`` at its start is the home directory.

    :raises ConfigurationError: if that is not known.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigurationError(f"{path}: {_NO_HOME}", hint="Set HOME, or write the whole path.") from error


def known_home(environ: Mapping[str, str]) -> Path | None:
    """The directory of Farcall's files for a user; None for a user without a home directory."""
    try:
        return Path(environ.get("FARCALL_HOME") or "~/.farcall").expanduser()
    except RuntimeError:
        return None


def config_path(home: Path | None) -> Path:
    """The file of the settings."""
    return Path("~/.farcall" if home is None else home) / "config.toml"


def from_environment(name: str, environ: Mapping[str, str]) -> str | None:
    """A setting from its environment variable; None if it is not set, or blank."""
    return _value(environ.get(VARIABLES[name]))


def read_settings(home: Path | None) -> dict[str, str]:
    """The settings in ``config.toml``; none without the file, or without a home directory.

    :raises ConfigurationError: if it cannot be read, or a setting is not a string.
    """
    if home is None:
        return {}
    path = config_path(home)
    table = _table(_read(path)[1], path)
    for name in VARIABLES:
        if not isinstance(table.get(name, ""), str):
            raise ConfigurationError(f"{name} in {path} is not a string", hint="Put its value between quotes.")
    if table.get("token"):
        warn_if_shared(path)
    return {name: value for name, value in table.items() if isinstance(value, str)}


def write_settings(home: Path, values: Mapping[str, str | None], *, comment: str = "") -> Path:
    """Set settings in ``config.toml``, or remove those that are None; the rest of the file stays.

    :param comment: the first line of the file, if it is a new one.
    :returns: the path of the file, which only its owner may read.
    :raises ConfigurationError: if the file cannot be written, or has a form that cannot be changed safely.
    """
    path = config_path(home)
    text, wanted = _read(path)
    table = _table(wanted, path)
    if comment and not text:
        text = f"# {comment}\n"
    for name, value in values.items():
        text = _changed(text, name, value)
        if value is None:
            table.pop(name, None)
        else:
            table[name] = value
    import tomllib  # here, because managers need the names of variables alone

    try:
        as_wanted = tomllib.loads(text) == wanted
    except tomllib.TOMLDecodeError:
        as_wanted = False
    if not as_wanted:
        raise ConfigurationError(f"{path} has an unusual form", hint=f"Edit it by hand: {', '.join(values)}.")
    try:
        write_private(path, text.encode())
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
    return path


def stored_values(home: Path) -> list[tuple[str, str]]:
    """Names and values in all tables of ``config.toml``, and the tokens of the login; none of a file that cannot be
    read. For a search for secrets.
    """
    found: list[tuple[str, Any]] = []
    with contextlib.suppress(ConfigurationError):
        tables = _read(config_path(home))[1].values()
        found += [each for table in tables if isinstance(table, dict) for each in table.items()]
    with contextlib.suppress(OSError, ValueError):
        login = json.loads((home / LOGIN_FILE).read_bytes())
        found += [(name, login.get(name)) for name in ("access_token", "refresh_token") if isinstance(login, dict)]
    return [(name, str(value)) for name, value in found]


def _value(text: str | None) -> str | None:
    return (text or "").strip() or None


def _is_http(api_url: str) -> bool:
    try:
        parts = urlsplit(api_url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # half an IPv6 address, or an invalid port
        return False


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of the file, and its content; empty without the file."""
    import tomllib

    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except FileNotFoundError:
        return "", {}
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}", hint="Fix the file, or delete it.") from error


def _table(settings: dict[str, Any], path: Path) -> dict[str, Any]:
    table = settings.setdefault(_TABLE, {})
    if not isinstance(table, dict):
        raise ConfigurationError(f"{_TABLE} in {path} is not a table", hint=f"Write the settings below {_HEADER}.")
    return table


def _changed(text: str, name: str, value: str | None) -> str:
    """The text with a line of the table ``default`` changed, added or left out."""
    lines = text.splitlines()
    if _HEADER not in (line.strip() for line in lines):
        lines += ["", _HEADER] if lines else [_HEADER]
    start = next(number for number, line in enumerate(lines) if line.strip() == _HEADER) + 1
    end = next((number for number in range(start, len(lines)) if lines[number].lstrip().startswith("[")), len(lines))
    table = [line for line in lines[start:end] if not re.match(rf"\s*{name}\s*=", line)]
    # A JSON string is a TOML string.
    added = [] if value is None else [f"{name} = {json.dumps(value, ensure_ascii=False)}"]
    return "\n".join([*lines[:start], *added, *table, *lines[end:]]) + "\n"
