"""Names of endpoints: which one a user means."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from farcall._arguments import as_uuid
from farcall_common.credentials import find_home, read_settings
from farcall_common.errors import ConfigurationError, EndpointUnknown

_ID_BEGINS: Final = re.compile(r"[0-9a-f]{4}[0-9a-f-]{0,32}")
_KNOWN_S: Final = 60.0
_SHOWN: Final = 5
_NO_ENDPOINT: Final = "`farcall-endpoint configure NAME` and `farcall-endpoint start NAME` make this machine one."

Endpoints = Sequence[Mapping[str, Any]]


class EndpointNames:
    """Finds endpoints by what users write. May be used from any thread.

    :param list_endpoints: the endpoints of a role, "owner" or "any", with ``uuid``, ``name`` and ``display_name``.
    """

    def __init__(self, list_endpoints: Callable[[str], Endpoints], *, environ: Mapping[str, str] = os.environ) -> None:
        self._list = list_endpoints
        self._environ = environ
        self._known: dict[str | None, tuple[str, float]] = {}
        #: Names of the endpoints that were listed last.
        self.seen: Sequence[str] = ()

    def find(self, wanted: str | uuid.UUID | None) -> str:
        """The id of an endpoint: by its id, by its name, or by the beginning of its id (4 digits or more). Without any
        of them, ``FARCALL_ENDPOINT``, else ``endpoint`` in ``config.toml``, else the only one.

        The user's own endpoints come first: others choose the names of theirs.

        :raises EndpointUnknown: if there is no such endpoint.
        :raises ConfigurationError: if several are meant, or there is none at all.
        """
        text = None if wanted is None else str(wanted)
        if text is None:
            text = (
                self._environ.get("FARCALL_ENDPOINT") or read_settings(find_home(self._environ)).get("endpoint") or None
            )
        if text and (endpoint_id := as_uuid(text)):
            return endpoint_id
        known = self._known.get(text)
        if known is None or not 0 <= time.monotonic() - known[1] < _KNOWN_S:
            known = self._known[text] = self._choose(text), time.monotonic()
        return known[0]

    def _choose(self, wanted: str | None) -> str:
        for role in ("owner", "any"):
            endpoints = self._list(role)
            self.seen = [str(each["name"]) for each in endpoints]
            found = endpoints if wanted is None else _meant(endpoints, wanted)
            if len(found) == 1:
                return str(found[0]["uuid"])
            if found:
                ids = ", ".join(f"{each['name']} ({each['uuid']})" for each in found[:_SHOWN])
                raise ConfigurationError(f"which endpoint? There are {len(found)}: {ids}", hint="Give the name or id.")
        if wanted is None:
            raise ConfigurationError("you have no endpoint", hint=_NO_ENDPOINT)
        raise EndpointUnknown(f"there is no endpoint named {wanted!r}")


def _meant(endpoints: Endpoints, wanted: str) -> Endpoints:
    named = [each for each in endpoints if wanted and wanted in (each["name"], each["display_name"])]
    if named or not _ID_BEGINS.fullmatch(wanted.lower()):
        return named
    return [each for each in endpoints if str(each["uuid"]).startswith(wanted.lower())]
