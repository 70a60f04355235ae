"""Sharing: rights to endpoints and functions for people, groups and teams; and the teams.

The owner of an object gives any right but its own; a manager gives up to *use*. A right that is taken back, lowered or
ended is withdrawn from waiting tasks, too.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Sequence

from farcall_common.errors import Conflict, Forbidden, InvalidRequest, NotFound
from farcall_common.store.allowance import NO_LIMITS, Allowance
from farcall_common.store.model import (
    AuditEntry,
    Endpoint,
    Function,
    ObjectKind,
    Quota,
    Quotable,
    Right,
    Share,
    SharedObject,
    Team,
    TeamMember,
    Withdrawal,
)
from farcall_common.wire.ids import new_id
from farcall_lambdas.identity import Identity
from farcall_lambdas.services.allowances import AllowanceService
from farcall_lambdas.services.base import Context, Service
from farcall_lambdas.services.withdrawal import WithdrawalService


class SharingService(Service):
    """Shares of the caller's objects, objects that are shared with the caller, and teams."""

    def __init__(self, context: Context, withdrawals: WithdrawalService, allowances: AllowanceService) -> None:
        super().__init__(context)
        self._withdrawals = withdrawals
        self._allowances = allowances

    def share(
        self,
        identity: Identity,
        kind: ObjectKind,
        object_id: str,
        grantee: str,
        right: Right,
        *,
        ends_at: dt.datetime | None = None,
        note: str = "",
        allowance: Allowance = NO_LIMITS,
    ) -> Share:
        """Give ``grantee`` a right to an object that the caller manages. It replaces the former share with this
        grantee. ``allowance`` limits each person who uses an endpoint by this share.

        :raises Forbidden: if the caller may not give this right, or may not replace the former one.
        :raises InvalidRequest: for an end that is in the past, or an allowance for anything but the use of an endpoint.
        :raises NotFound: for a team that the caller does not know.
        :raises QuotaExceeded: over the number of shares of the object.
        """
        shared = self._access.shared_object(identity, kind, object_id, Right.MANAGE)
        former = self._stores.shares.find_share(object_id, grantee)
        _require_greater(identity, shared, max(right, former.right) if former else right)
        if ends_at is not None and ends_at <= self._now():
            raise InvalidRequest("The share would end before it begins.", hint="Give an end in the future.")
        limits = allowance.to_json()
        if limits and (kind is not ObjectKind.ENDPOINT or right < Right.USE):
            raise InvalidRequest("An allowance limits the use of an endpoint.", hint="Leave out its limits.")
        what, _, team_id = grantee.partition(" ")
        if what == "team":
            self.team(identity, team_id)
        if kind is ObjectKind.FUNCTION and right >= Right.MANAGE:
            self._require_fixed(identity, object_id)
        share = Share(
            new_id(),
            kind,
            object_id,
            grantee,
            right,
            identity.identity_id,
            self._now(),
            ends_at=ends_at,
            note=note,
            allowance=limits,
        )
        done = self._entry(
            identity,
            "share.put",
            object_id,
            owner_id=shared.owner_id,
            grantee=grantee,
            right=right.word,
            ends_at=None if ends_at is None else ends_at.timestamp(),
            allowance=limits,
        )
        self._storage.check()
        withdrawal = None
        if former is not None and former.right >= Right.USE > right:
            withdrawal = self._withdrawals.begin(identity, shared)
        quota = Quota(Quotable.SHARE, object_id, self._settings.max_shares, but=grantee)
        share = self._stores.shares.audited(done, quota=quota).put_share(share)
        self._carry_out(withdrawal)
        if kind is ObjectKind.ENDPOINT:
            self._allowances.renew(object_id, grantee)
        return share

    def shares(self, identity: Identity, kind: ObjectKind, object_id: str) -> Sequence[Share]:
        """Shares of an object that the caller manages, the oldest first: all of them, without notes if they do not fit
        an answer with them."""
        self._access.shared_object(identity, kind, object_id, Right.MANAGE)
        found = self._stores.shares.list_shares(object_id, limit=self._settings.max_shares)
        fitting = self._fitting(found, shown=lambda each: (each.grantee, each.note, each.allowance))
        return found if len(fitting) == len(found) else [dataclasses.replace(each, note="") for each in found]

    def unshare(self, identity: Identity, kind: ObjectKind, object_id: str, share_id: str) -> None:
        """Take a share of an object that the caller manages back. Open tasks that need it are cancelled.

        :raises NotFound: if the object has no such share.
        """
        shared = self._access.shared_object(identity, kind, object_id, Right.MANAGE)
        share = self._stores.shares.get_share(object_id, share_id)
        if share is None:
            raise NotFound(
                f"There is no share {share_id} of this {kind}.", hint=f"farcall {kind}s shares {object_id} lists them."
            )
        _require_greater(identity, shared, share.right)
        done = self._entry(
            identity, "share.delete", object_id, owner_id=shared.owner_id, grantee=share.grantee, right=share.right.word
        )
        withdrawal = self._withdrawals.begin(identity, shared)
        self._stores.shares.audited(done).delete_share(object_id, share_id)
        self._carry_out(withdrawal)
        if kind is ObjectKind.ENDPOINT:
            self._allowances.renew(object_id, share.grantee)

    def shared_with(self, identity: Identity) -> Sequence[SharedObject]:
        """Shares that give the caller rights to objects of others, newest first; as many as fit an answer."""
        found = self._stores.shares.find_objects(self._access.principals_of(identity))
        return self._fitting(
            found, shown=lambda each: (each.name, each.share.grantee, each.share.note, each.share.allowance)
        )

    def end_shares(self, *, until: float) -> int:
        """Delete shares whose time has ended, and withdraw their rights from open tasks, until ``until`` (epoch
        seconds). Returns how many shares. The reconciler cancels the tasks."""
        ended = 0
        while self._clock() < until and (found := self._stores.shares.list_ended_shares()):
            for share in found:
                self._withdraw(share, share.granted_by)
                done = AuditEntry(
                    self._now(),
                    share.granted_by,
                    "share.end",
                    share.object_id,
                    self._owner_of(share),
                    {"grantee": share.grantee, "right": share.right.word},
                )
                self._stores.shares.audited(done).delete_share(share.object_id, share.share_id, if_ended=True)
                ended += 1
        return ended

    # teams

    def add_team(self, identity: Identity, name: str) -> Team:
        """Make a team of the caller, without members.

        :raises Conflict: if the caller has one with that name already.
        :raises QuotaExceeded: over the number of teams.
        """
        if any(each.name == name and identity.owns(each.owner_id) for each in self.teams(identity)):
            raise Conflict(f"You have a team {name} already.", hint="Choose another name.")
        team = Team(new_id(), identity.identity_id, name, self._now())
        done = self._entry(identity, "team.add", team.team_id, name=name)
        self._storage.check()
        quota = Quota(Quotable.TEAM, identity.identity_id, self._settings.max_teams)
        self._stores.shares.audited(done, quota=quota).add_team(team)
        return team

    def teams(self, identity: Identity) -> Sequence[Team]:
        """Teams of the caller, and those of which the caller is a member, by name; as many as fit an answer."""
        found = self._stores.shares.list_teams(identity.identity_id, self._access.principals_of(identity))
        return self._fitting(found, shown=lambda each: each.name)

    def team(self, identity: Identity, team_id: str) -> Team:
        """A team of the caller, or of which the caller is a member.

        :raises NotFound: if there is none: of other teams, callers do not learn that they exist.
        """
        team = self._stores.shares.get_team(team_id)
        if team is not None and (identity.owns(team.owner_id) or self._is_member(identity, team_id)):
            return team
        raise NotFound(f"You have no team {team_id}.", hint="farcall teams ls lists yours.")

    def members(self, identity: Identity, team_id: str) -> Sequence[TeamMember]:
        """Members of such a team, by name."""
        self.team(identity, team_id)
        return self._stores.shares.list_members(team_id, limit=self._settings.max_members)

    def add_member(self, identity: Identity, team_id: str, member: str) -> None:
        """Add a member to a team of the caller. Repeating it is harmless.

        :raises QuotaExceeded: over the number of members.
        """
        team = self._own_team(identity, team_id)
        done = self._entry(identity, "team.member.add", team_id, owner_id=team.owner_id, member=member)
        self._storage.check()
        quota = Quota(Quotable.MEMBER, team_id, self._settings.max_members, but=member)
        self._stores.shares.audited(done, quota=quota).put_member(TeamMember(team_id, member, self._now()))

    def remove_member(self, identity: Identity, team_id: str, member: str) -> None:
        """Remove a member from a team of the caller, or the caller from a team of another. What is shared with the team
        is withdrawn from the member's open tasks.

        :raises NotFound: if the team has no such member.
        """
        is_self = member in self._access.principals_of(identity)
        team = self.team(identity, team_id) if is_self else self._own_team(identity, team_id)
        if all(each.member != member for each in self._stores.shares.list_members(team_id)):
            raise NotFound(f"{member} is not in the team.", hint=f"farcall teams members {team_id} lists who is.")
        done = self._entry(identity, "team.member.remove", team_id, owner_id=team.owner_id, member=member)
        self._withdraw_from_team(identity, team_id)
        self._stores.shares.audited(done).delete_member(team_id, member)

    def delete_team(self, identity: Identity, team_id: str) -> None:
        """Delete a team of the caller. What was shared with it is withdrawn."""
        team = self._own_team(identity, team_id)
        done = self._entry(identity, "team.delete", team_id, owner_id=team.owner_id, name=team.name)
        self._withdraw_from_team(identity, team_id)
        self._stores.shares.audited(done).delete_team(team_id)

    def _require_fixed(self, identity: Identity, function_id: str) -> None:
        """A manager adds versions of a function, which an endpoint that allows all of them would run.

        :raises InvalidRequest: if an endpoint of the caller allows the function without naming a version.
        """
        endpoints = self._stores.endpoints
        for owner_id in sorted(identity.identity_set):
            for each in endpoints.list_endpoints(owner_id, limit=self._settings.max_endpoints):
                endpoint = endpoints.get_endpoint(each.endpoint_id)
                if endpoint is not None and function_id in (endpoint.allowed_functions or ()):
                    raise InvalidRequest(
                        f"Endpoint {each.endpoint_id} allows every version of the function; managers add versions.",
                        hint=f"Let the endpoint allow {function_id}@VERSION first.",
                    )

    def _own_team(self, identity: Identity, team_id: str) -> Team:
        team = self.team(identity, team_id)
        if not identity.owns(team.owner_id):
            raise Forbidden(f"Team {team_id} belongs to someone else.", hint="Only its owner may do this.").of(
                team_id, owner_id=team.owner_id
            )
        return team

    def _is_member(self, identity: Identity, team_id: str) -> bool:
        found = self._stores.shares.list_teams(identity.identity_id, self._access.principals_of(identity))
        return any(each.team_id == team_id for each in found)

    def _withdraw_from_team(self, identity: Identity, team_id: str) -> None:
        for share in self._stores.shares.list_shares_with([f"team {team_id}"]):
            self._withdraw(share, identity.identity_id)

    def _owner_of(self, share: Share) -> str:
        """The owner of a shared object."""
        shared = (
            self._stores.endpoints.get_endpoint(share.object_id)
            if share.kind is ObjectKind.ENDPOINT
            else self._stores.functions.get_functions([share.object_id], with_bodies=False).get(share.object_id)
        )
        return share.granted_by if shared is None else shared.owner_id

    def _withdraw(self, share: Share, identity_id: str) -> None:
        """Record that a share's right is withdrawn, before the change; the reconciler cancels the tasks."""
        self._stores.endpoints.put_withdrawal(Withdrawal(share.object_id, identity_id, (), self._now()))

    def _carry_out(self, withdrawal: Withdrawal | None) -> None:
        if withdrawal is not None:
            self._withdrawals.carry_out(withdrawal)


def _require_greater(identity: Identity, shared: Endpoint | Function, right: Right) -> None:
    """:raises Forbidden: if this right to an object is for its owner alone to give and to take."""
    if right >= Right.MANAGE and not identity.owns(shared.owner_id):
        object_id = shared.endpoint_id if isinstance(shared, Endpoint) else shared.function_id
        raise Forbidden("Only the owner names managers.", hint="You may give and take back: see, use.").of(
            object_id, owner_id=shared.owner_id
        )
