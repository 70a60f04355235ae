"""Login file: its path. Its content and the renewal of tokens are in :mod:`farcall_common.login`, which loads HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from farcall_common.errors import ConfigurationError

#: Its name in ``$FARCALL_HOME``.
LOGIN_FILE: Final = "login.json"


def login_at(api_url: str, home: Path) -> Path | None:
    """The file with the login, if it is for this API: other APIs must not receive its token.

    :raises ConfigurationError: if it cannot be read.
    """
    path = home / LOGIN_FILE
    try:
        login = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}", hint="Delete it, and log in again.") from error
    return path if isinstance(login, dict) and login.get("api_url") == api_url.rstrip("/") else None
