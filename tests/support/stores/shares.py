"""Fake shares, in memory."""

from __future__ import annotations

import dataclasses
import datetime as dt
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from farcall_common.errors import NotFound
from farcall_common.store.model import Right, Share, SharedObject, Team, TeamMember
from tests.support.stores.endpoints import FakeEndpoints


class FakeShares(FakeEndpoints):
    """:class:`~farcall_common.store.ports.Shares` in memory; a part of FakeDatabase."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self._shares: dict[tuple[str, str], Share] = {}
        self._teams: dict[str, Team] = {}
        self._members: dict[tuple[str, str], TeamMember] = {}
        self._persons: dict[str, tuple[frozenset[str], float]] = {}

    def delete_endpoint(self, endpoint_id: str) -> bool:
        self._forget(endpoint_id)
        return super().delete_endpoint(endpoint_id)

    def delete_function(self, function_id: str) -> bool:
        self._forget(function_id)
        return super().delete_function(function_id)

    def _forget(self, object_id: str) -> None:
        with self._call():
            self._shares = {key: each for key, each in self._shares.items() if each.object_id != object_id}

    def put_share(self, share: Share) -> Share:
        with self._call():
            key = share.object_id, share.grantee
            former = self._shares.get(key)
            self._shares[key] = share if former is None else dataclasses.replace(share, share_id=former.share_id)
            return self._shares[key]

    def get_share(self, object_id: str, share_id: str) -> Share | None:
        return next((each for each in self.list_shares(object_id) if each.share_id == share_id), None)

    def find_share(self, object_id: str, grantee: str) -> Share | None:
        with self._call():
            return self._shares.get((object_id, grantee))

    def list_shares(self, object_id: str, *, limit: int = 1000) -> Sequence[Share]:
        with self._call():
            found = [each for each in self._shares.values() if each.object_id == object_id]
            return sorted(found, key=lambda each: (each.granted_at, each.share_id))[:limit]

    def delete_share(self, object_id: str, share_id: str, *, if_ended: bool = False) -> bool:
        with self._call():
            found = self.get_share(object_id, share_id)
            if found is None or (if_ended and not self._has_ended(found)):
                return False
            return self._shares.pop((object_id, found.grantee), None) is not None

    def _has_ended(self, share: Share) -> bool:
        return share.ends_at is not None and share.ends_at <= dt.datetime.fromtimestamp(self._clock(), dt.UTC)

    def list_ended_shares(self, *, limit: int = 100) -> Sequence[Share]:
        with self._call():
            ended = [(each.ends_at, each.share_id, each) for each in self._shares.values() if each.ends_at]
            return [each for _, _, each in sorted(ended) if self._has_ended(each)][:limit]

    def _open_shares(self, principals: Collection[str]) -> Sequence[Share]:
        with self._call():
            grantees = self._with_teams(principals)
            return [each for each in self._shares.values() if each.grantee in grantees and not self._has_ended(each)]

    def find_rights(self, object_ids: Collection[str], principals: Collection[str]) -> Mapping[str, Right]:
        rights: dict[str, Right] = {}
        for share in self._open_shares(principals):
            if share.object_id in object_ids:
                rights[share.object_id] = max(share.right, rights.get(share.object_id, share.right))
        return rights

    def find_allowances(self, object_id: str, principals: Collection[str]) -> Sequence[Mapping[str, Any]]:
        found = self._open_shares(principals)
        return [each.allowance for each in found if each.object_id == object_id and each.right >= Right.USE]

    def get_principals(self, identity_id: str, *, groups_since: dt.datetime) -> frozenset[str]:
        with self._call():
            principals, seen_at = self._persons.get(identity_id, (frozenset(), 0.0))
            is_new = seen_at >= groups_since.timestamp()
            return frozenset(
                {f"identity {identity_id}", *(each for each in principals if is_new or not each.startswith("group "))}
            )

    def find_objects(self, principals: Collection[str], *, limit: int = 1000) -> Sequence[SharedObject]:
        found = []
        for share in self._open_shares(principals):
            shared = self.get_functions([share.object_id]).get(share.object_id) or self.get_endpoint(share.object_id)
            if shared is not None:
                found.append(SharedObject(share, shared.name, shared.owner_id))
        return sorted(found, key=lambda each: (-each.share.granted_at.timestamp(), each.share.share_id))[:limit]

    def list_shares_with(self, grantees: Collection[str]) -> Sequence[Share]:
        with self._call():
            found = [each for each in self._shares.values() if each.grantee in self._with_teams(grantees)]
            return sorted(found, key=lambda each: (each.object_id, each.share_id))

    def _with_teams(self, principals: Collection[str]) -> frozenset[str]:
        return frozenset(principals) | {
            f"team {each.team_id}" for each in self._members.values() if each.member in principals
        }

    def put_person(self, identity_id: str, principals: Collection[str]) -> frozenset[str]:
        with self._call():
            former, _ = self._persons.get(identity_id, (frozenset(), 0.0))
            self._persons[identity_id] = frozenset(principals), self._clock()
            return former - frozenset(principals)

    # teams

    def add_team(self, team: Team) -> None:
        with self._call():
            self._teams[team.team_id] = team

    def get_team(self, team_id: str) -> Team | None:
        with self._call():
            return self._teams.get(team_id)

    def list_teams(self, owner_id: str, principals: Collection[str], *, limit: int = 1000) -> Sequence[Team]:
        with self._call():
            of = {each.team_id for each in self._members.values() if each.member in principals}
            found = [each for each in self._teams.values() if each.owner_id == owner_id or each.team_id in of]
            return sorted(found, key=lambda each: (each.owner_id != owner_id, each.name, each.team_id))[:limit]

    def delete_team(self, team_id: str) -> bool:
        with self._call():
            self._members = {key: each for key, each in self._members.items() if each.team_id != team_id}
            self._shares = {key: each for key, each in self._shares.items() if each.grantee != f"team {team_id}"}
            return self._teams.pop(team_id, None) is not None

    def put_member(self, member: TeamMember) -> None:
        with self._call():
            if member.team_id not in self._teams:
                raise NotFound(f"There is no team {member.team_id}.")
            self._members.setdefault((member.team_id, member.member), member)

    def list_members(self, team_id: str, *, limit: int = 1000) -> Sequence[TeamMember]:
        with self._call():
            found = [each for each in self._members.values() if each.team_id == team_id]
            return sorted(found, key=lambda each: each.member)[:limit]

    def delete_member(self, team_id: str, member: str) -> bool:
        with self._call():
            return self._members.pop((team_id, member), None) is not None
