"""Names and shortened ids: which endpoint, task, group or function a user means."""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from farcall._arguments import as_reference, as_uuid
from farcall_common.credentials import config_path, known_home, read_settings
from farcall_common.errors import (
    ConfigurationError,
    EndpointUnknown,
    FunctionUnknown,
    InvalidRequest,
    NotFound,
    ProtocolError,
    TaskGroupUnknown,
    TaskUnknown,
    did_you_mean,
)

if TYPE_CHECKING:
    from farcall._api import Api

_ID_BEGINS: Final = re.compile(r"[0-9a-f]{4}[0-9a-f-]{0,32}")
_UNKNOWN: Final = {"task": TaskUnknown, "group": TaskGroupUnknown}
_MOST_FUNCTIONS: Final = 1000
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
        self._meanings: dict[str, set[str]] = {}
        #: Names of the endpoints that were listed last.
        self.seen: Sequence[str] = ()

    def find(self, wanted: str | uuid.UUID | None) -> str:
        """The id of an endpoint: by its id, by its name, or by the beginning of its id (4 digits or more). Without any
        of them, ``FARCALL_ENDPOINT``, else ``endpoint`` in ``config.toml``, else the user's only one.

        The user's own endpoints come first: others choose the names of theirs.

        :raises EndpointUnknown: if there is no such endpoint.
        :raises ConfigurationError: if several are meant, or there is none at all.
        """
        text, source = (str(wanted), "") if wanted is not None else self._configured()
        if text and (endpoint_id := as_uuid(text)):
            return endpoint_id
        known = self._known.get(text)
        if known is None or not 0 <= time.monotonic() - known[1] < _KNOWN_S:
            known = self._known[text] = self._choose(text, source), time.monotonic()
            self._meanings.setdefault(known[0], set()).add(_normal(text or ""))
        return known[0]

    def meanings(self, endpoint_id: str) -> frozenset[str]:
        """Return the texts that the service says mean an endpoint: names, first digits, or the empty one."""
        return frozenset(self._meanings.get(endpoint_id, ()))

    def _configured(self) -> tuple[str | None, str]:
        """The configured endpoint, and for messages, where it is configured."""
        if given := self._environ.get("FARCALL_ENDPOINT"):
            return given, ", which FARCALL_ENDPOINT names"
        home = known_home(self._environ)
        return read_settings(home).get("endpoint") or None, f", which {config_path(home)} names"

    def _choose(self, wanted: str | None, source: str) -> str:
        for role in ("owner", "any") if wanted is not None else ("owner",):
            endpoints = self._list(role)
            self.seen = [str(each["name"]) for each in endpoints]
            found = endpoints if wanted is None else _meant(endpoints, wanted)
            if len(found) == 1:
                return _checked("an endpoint", str(found[0]["uuid"]))
            if found:
                ids = ", ".join(f"{each['name']} ({each['uuid']})" for each in found[:_SHOWN])
                which = f"which endpoint is {wanted!r}{source}" if wanted else "which endpoint"
                raise ConfigurationError(f"{which}? There are {len(found)}: {ids}", hint="Give the name or id.")
        if wanted is None:
            raise ConfigurationError("you have no endpoint of your own, and name none", hint=_NO_ENDPOINT)
        raise EndpointUnknown(f"there is no endpoint named {wanted!r}{source}", hint=did_you_mean(wanted, self.seen))


def _meant(endpoints: Endpoints, wanted: str) -> Endpoints:
    """The endpoints that a text means: by name, or by the beginning of an id. Others choose the names of theirs, which
    may look like digits."""
    is_beginning = _ID_BEGINS.fullmatch(wanted.lower()) is not None
    begins = set(_beginning_with(wanted, (str(each["uuid"]) for each in endpoints))) if is_beginning else set()
    return [
        each
        for each in endpoints
        if (wanted and wanted in (each["name"], each["display_name"])) or each["uuid"] in begins
    ]


def _normal(wanted: str) -> str:
    """A name, or the digits of the beginning of an id in one form."""
    return wanted.lower().replace("-", "") if _ID_BEGINS.fullmatch(wanted.lower()) else wanted


class Ids:
    """Finds ids of tasks, groups and functions by their first digits: four or more, with or without hyphens. May be
    used from any thread. A whole id needs no request.

    :param may_be_completed: whether the service's word is enough that a task's first digits mean this id.
    """

    def __init__(self, api: Api, *, may_be_completed: Callable[[str], bool] = lambda _: True) -> None:
        self._api = api
        self._may_be_completed = may_be_completed

    def task(self, wanted: str | uuid.UUID) -> str:
        """:raises TaskUnknown: if no task of the user has such an id.

        :raises InvalidRequest: if several have, if these are not the first digits of an id, or if the service could
            have chosen a task that is not sealed in the place of one that is.
        """
        found = self._find("task", str(wanted))
        if as_uuid(str(wanted)) or self._may_be_completed(found):
            return found
        raise InvalidRequest(
            f"the service says that {wanted} is task {found}, which was not sealed",
            hint="Give the whole id: the service could have chosen the task. Or read it with sealed='off'.",
        )

    def group(self, wanted: str | uuid.UUID) -> str:
        """:raises TaskGroupUnknown, InvalidRequest: as for :meth:`task`."""
        return self._find("group", str(wanted))

    def function(self, wanted: str | uuid.UUID, *, for_change: bool = False) -> str:
        """``<id>`` or ``<id>@<version>`` of a function, also by an alias, or by the name of a function of the user: of
        the newest one with this name, or with ``for_change`` of the only one.

        :raises FunctionUnknown, InvalidRequest: as for :meth:`task`.
        """
        text = str(wanted)
        if reference := as_reference(text):
            return reference
        name, at, version = text.partition("@")
        if not at:
            with contextlib.suppress(NotFound, InvalidRequest):  # also of something that cannot be an alias
                return str(self._api.find_function(name)["reference"])
        functions = self._api.list_functions(search="", limit=_MOST_FUNCTIONS)
        found = [str(each["function_uuid"]) for each in functions if each["function_name"] == name]
        if not found and _ID_BEGINS.fullmatch(name.lower()):
            found = _beginning_with(name, (str(each["function_uuid"]) for each in functions))
            for_change = True
        if not found:
            alike = did_you_mean(name, (str(each["function_name"]) for each in functions))
            raise FunctionUnknown(f"there is no function {name!r}", hint=alike)
        return f"{found[0] if not for_change else _only('function', name, found)}{at}{version}"

    def _find(self, kind: str, text: str) -> str:
        if whole := as_uuid(text):
            return whole
        if not _ID_BEGINS.fullmatch(text.lower()):
            raise InvalidRequest(f"{text!r} is not the id of a {kind}", hint="Its first digits are enough, 4 or more.")
        found = _beginning_with(text, self._api.find_ids(kind, text.lower()))
        if not found:
            raise _UNKNOWN[kind](f"there is no {kind} with an id that begins with {text}")
        return _only(kind, text, found)


def _beginning_with(text: str, ids: Iterable[str]) -> list[str]:
    digits = text.lower().replace("-", "")
    return [
        _checked("a task, group, function or endpoint", each)
        for each in ids
        if each.replace("-", "").startswith(digits)
    ]


def _checked(kind: str, found: str) -> str:
    """An id from the service, which may end up in files and addresses.

    :raises ProtocolError: if it is not an id.
    """
    if as_uuid(found) != found:
        raise ProtocolError(
            f"the service answered with {found!r}; expected the id of {kind}",
            hint="Check api_url, and report this to the deployment's operator.",
        )
    return found


def _only(kind: str, text: str, found: Sequence[str]) -> str:
    """:raises InvalidRequest: if several are found."""
    if len(found) > 1:
        shown = ", ".join(found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
        raise InvalidRequest(f"which {kind} is {text}? There are several: {shown}", hint="Give more digits of the id.")
    return found[0]
