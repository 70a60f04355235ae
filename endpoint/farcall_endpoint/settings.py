"""Exit codes of the commands and the agent. Cheap to import."""

from __future__ import annotations

import os
from typing import Final

from farcall_common.errors import (
    ConfigurationError,
    EndpointInUse,
    FarcallError,
    Forbidden,
    NotFound,
    ProtocolError,
    SessionRefused,
    SpoolOutdated,
    Unauthenticated,
    Unavailable,
)

__all__ = ["EXIT_CODES", "exit_code"]

EXIT_CODES: Final[tuple[tuple[type[FarcallError], int], ...]] = (
    (ConfigurationError, os.EX_CONFIG),
    (EndpointInUse, os.EX_CANTCREAT),
    (SpoolOutdated, os.EX_DATAERR),
    (NotFound, os.EX_NOINPUT),
    (ProtocolError, os.EX_PROTOCOL),
    (Unauthenticated, os.EX_NOPERM),
    (Forbidden, os.EX_NOPERM),
    (SessionRefused, os.EX_NOPERM),
    (Unavailable, os.EX_UNAVAILABLE),
)
"""What the commands and the agent end with (sysexits.h), first match first; everything else is ``EX_SOFTWARE``."""


def exit_code(error: FarcallError) -> int:
    """The process exit code (sysexits.h) that says most about an error."""
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), os.EX_SOFTWARE)
