"""Where the API is and who is calling: argument, then environment, then a login, then ``config.toml``."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from farcall_common.errors import ConfigurationError
from farcall_common.login_file import login_at

__all__ = ["Settings", "find_home", "read_stored"]

_HINT: Final = (
    "Run `farcall local up` for a tier of your own or `farcall login` for another one, set FARCALL_API_URL and "
    "FARCALL_TOKEN, or write {config}."
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a client must know. The token is left out of the repr, so that it does not end up in a log.

    :param login: the file with a login at this API, whose token is used and renewed instead of ``token``.
    """

    api_url: str
    token: str = dataclasses.field(repr=False)
    login: pathlib.Path | None = None

    @classmethod
    def resolve(
        cls, api_url: str | None = None, token: str | None = None, *, environ: Mapping[str, str] = os.environ
    ) -> Settings:
        """Take each setting from the first place that has it.

        The places are the argument, ``FARCALL_API_URL`` / ``FARCALL_TOKEN``, and in ``$FARCALL_HOME`` (``~/.farcall``
        unless set) the login at that API in ``login.json``, if there is one, and the ``[default]`` table of
        ``config.toml``.

        :raises ConfigurationError: if a setting is nowhere to be found, or is not usable.
        """
        api_url = api_url or environ.get("FARCALL_API_URL")
        token = token or environ.get("FARCALL_TOKEN")
        config = find_home(environ) / "config.toml"
        stored = {} if api_url and token else read_stored(config)
        api_url = api_url or stored.get("api_url")
        login = None
        if api_url and not token:
            login = login_at(api_url, config.parent)
            token = "" if login else stored.get("token")
        if not api_url or (not token and login is None):
            missing = "the token" if api_url else "the address of the API"
            raise ConfigurationError(f"{missing} is not set", hint=_HINT.format(config=config))
        if urlsplit(api_url).scheme not in ("http", "https") or not urlsplit(api_url).netloc:
            raise ConfigurationError(
                f"api_url is not an http(s) address: {api_url!r}", hint=_HINT.format(config=config)
            )
        return cls(api_url.rstrip("/"), (token or "").strip(), login)


def find_home(environ: Mapping[str, str]) -> pathlib.Path:
    """The directory for everything that Farcall keeps for a user."""
    given = environ.get("FARCALL_HOME")
    return pathlib.Path(given).expanduser() if given else pathlib.Path.home() / ".farcall"


def read_stored(config: pathlib.Path) -> dict[str, str]:
    """The settings in a configuration file; none if there is no such file.

    :raises ConfigurationError: if it cannot be read.
    """
    try:
        table = tomllib.loads(config.read_text(encoding="utf-8")).get("default", {})
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigurationError(f"{config} cannot be read: {error}", hint="Mend the file, or delete it.") from error
    return {name: value for name, value in table.items() if isinstance(value, str)}
