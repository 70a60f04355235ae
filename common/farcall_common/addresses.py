"""Addresses of services that receive secrets: over TLS, or on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

from farcall_common.errors import ConfigurationError

#: Set to 1, it allows ``http`` to any host.
ALLOW_HTTP: Final = "FARCALL_ALLOW_HTTP"
#: The whole address is matched: parsers differ in what they take for the host of an odd one.
_LOOPBACK: Final = re.compile(
    r"http://([\w.~%!$&'()*+,;=:-]*@)?(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{0,5})?([/?][\x21-\x5b\x5d-\x7e]*)?",
    re.ASCII | re.IGNORECASE,
)


def is_safe_address(address: str) -> bool:
    """Whether a secret may be sent to an address: with ``https``, or to this machine."""
    return address.lower().startswith("https://") or _LOOPBACK.fullmatch(address) is not None


def check_address(address: str, *, what: str, where: str = "", environ: Mapping[str, str] = os.environ) -> None:
    """Make sure that a secret may be sent to an address.

    :param what: the subject of the error's message; ``where`` says where the address can be changed.
    :raises ConfigurationError: if it is not safe, and ``FARCALL_ALLOW_HTTP`` is not 1.
    """
    if not is_safe_address(address) and environ.get(ALLOW_HTTP) != "1":
        raise ConfigurationError(
            f"{what} is not https: {address!r}; your token would be readable on the network",
            hint=f"Use its https address{where}. Only on a network that you trust, or through a tunnel, set "
            f"{ALLOW_HTTP}=1, which allows http.",
        )
