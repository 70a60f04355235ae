"""Sharing: rights to endpoints and functions for people, groups and teams; and the teams."""

from __future__ import annotations

import datetime as dt
import re
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from farcall._arguments import as_uuid
from farcall_common.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from farcall._api import Api

Json = dict[str, Any]
Right = Literal["see", "use", "manage"]

_KINDS: Final = ("identity", "name", "group", "team")


def grantee_of(text: str | uuid.UUID) -> Json:
    """``kind`` and ``id`` of a grantee: a user name such as ``user@lab.org``, the UUID of an identity, ``group:ID``,
    ``team:ID``, or the others with their kind (``identity:…``, ``name:…``).

    :raises InvalidRequest: for anything else.
    """
    text = str(text)
    kind, colon, rest = text.partition(":")
    is_named = bool(colon) and kind in _KINDS
    if not is_named:
        kind, rest = "identity" if as_uuid(text) else "name", text
    is_valid = {
        "identity": as_uuid(rest) is not None,
        "team": as_uuid(rest) is not None,
        "group": bool(rest),
        "name": not re.search(r"[\s,;]", rest) and ("@" in rest or (is_named and rest != "")),
    }[kind]
    if not is_valid:
        raise InvalidRequest(
            f"{text!r} is not a grantee",
            hint="Give one of user@lab.org, the id of an identity, group:ID, team:ID or name:NAME.",
        )
    return {"kind": kind, "id": as_uuid(rest) or rest if kind in ("identity", "team") else rest}


class Sharing:
    """Methods of :class:`farcall.Client` for shares and teams.

    A share has ``share_id, grantee, right, granted_by, granted_at, note`` and, if it ends, ``ends_at``; times are epoch
    seconds. Rights are "see" (status, settings, code), "use" (run tasks) and "manage" (change it, list and cancel its
    tasks, share it); each includes those before it.
    """

    _api: Api

    def share_endpoint(
        self,
        endpoint_id: str | uuid.UUID,
        grantee: str | uuid.UUID,
        right: Right = "use",
        *,
        until: dt.datetime | float | None = None,
        note: str = "",
        allowance: Mapping[str, float] | None = None,
    ) -> Json:
        """Give someone a right to an endpoint that you manage, in place of what that grantee had. Returns the share.

        Who may use an endpoint runs code as its account, as far as its isolation and list of functions permit.

        :param grantee: ``user@lab.org`` as the identity provider has verified it, the UUID of an identity,
            ``group:ID`` or ``team:ID``.
        :param until: when the right ends, and open tasks that need it are cancelled; else when it is taken back.
        :param allowance: limits of each person who uses the endpoint by this share: ``max_running`` and ``max_waiting``
            tasks, ``max_walltime_s`` of one, ``core_hours_per_month`` and ``gpu_hours_per_month`` (UTC), ``weight`` of
            turns (1 to 1000). Of several shares the most generous limit counts; a public endpoint has none.
        :raises Forbidden: if you may not; only owners name managers.
        """
        share = _share(grantee, right, until, note) | {"allowance": dict(allowance or {})}
        return self._api.put_share("endpoints", str(endpoint_id), share)

    def share_function(
        self,
        function_id: str | uuid.UUID,
        grantee: str | uuid.UUID,
        right: Right = "use",
        *,
        until: dt.datetime | float | None = None,
        note: str = "",
    ) -> Json:
        """The same for a function. Who may see it, reads its code."""
        return self._api.put_share("functions", str(function_id), _share(grantee, right, until, note))

    def get_endpoint_shares(self, endpoint_id: str | uuid.UUID) -> list[Json]:
        """Shares of an endpoint that you manage, the oldest first."""
        return self._api.list_shares("endpoints", str(endpoint_id))

    def get_function_shares(self, function_id: str | uuid.UUID) -> list[Json]:
        """Shares of a function that you manage, the oldest first."""
        return self._api.list_shares("functions", str(function_id))

    def unshare_endpoint(self, endpoint_id: str | uuid.UUID, share: str | uuid.UUID) -> None:
        """Take a share back: by its id, or by its grantee as in :meth:`share_endpoint`. Open tasks that need it are
        cancelled.

        :raises NotFound: if there is no such share.
        """
        self._unshare("endpoints", str(endpoint_id), str(share))

    def unshare_function(self, function_id: str | uuid.UUID, share: str | uuid.UUID) -> None:
        """The same for a function."""
        self._unshare("functions", str(function_id), str(share))

    def get_shared(self) -> list[Json]:
        """What others share with you, newest first: ``kind`` ("endpoint", "function"), ``object_id``, ``name``,
        ``owner_id`` and the ``share``."""
        return self._api.list_shared()

    def _unshare(self, objects: str, object_id: str, share: str) -> None:
        for each in self._api.list_shares(objects, object_id):
            if each["share_id"] == share or _is_of(each, share):
                self._api.delete_share(objects, object_id, each["share_id"])
                return
        lists = "`farcall endpoints shares`" if objects == "endpoints" else "`farcall functions shares`"
        raise NotFound(f"there is no share {share} of {object_id}", hint=f"{lists} lists them.")

    # teams

    def create_team(self, name: str) -> str:
        """Make a team of yours, and return its id. Share with ``team:ID``."""
        return str(self._api.add_team(name)["team_id"])

    def get_teams(self) -> list[Json]:
        """``team_id, name, owner_id, created_at`` of your teams, and of those in which you are."""
        return self._api.list_teams()

    def delete_team(self, team_id: str | uuid.UUID) -> None:
        """Delete a team of yours. What was shared with it is taken back."""
        self._api.delete_team(str(team_id))

    def get_team_members(self, team_id: str | uuid.UUID) -> list[Json]:
        """``member`` and ``added_at`` of each member of a team."""
        return self._api.list_members(str(team_id))

    def add_team_member(self, team_id: str | uuid.UUID, member: str | uuid.UUID) -> None:
        """Add a person to a team of yours: ``user@lab.org``, or the UUID of an identity."""
        self._api.add_member(str(team_id), grantee_of(member))

    def remove_team_member(self, team_id: str | uuid.UUID, member: str | uuid.UUID) -> None:
        """Remove a person from a team of yours, or yourself from another. Open tasks that need it are cancelled."""
        self._api.delete_member(str(team_id), grantee_of(member))


def _share(grantee: str | uuid.UUID, right: str, until: dt.datetime | float | None, note: str) -> Json:
    ends_at = until.timestamp() if isinstance(until, dt.datetime) else until
    return {"grantee": grantee_of(grantee), "right": right, "ends_at": ends_at, "note": note}


def _is_of(share: Json, grantee: str) -> bool:
    try:
        wanted = grantee_of(grantee)
    except InvalidRequest:
        return False
    name = wanted["id"].lower() if wanted["kind"] == "name" else wanted["id"]
    found: Json = share["grantee"]
    return found == {"kind": wanted["kind"], "id": name}
