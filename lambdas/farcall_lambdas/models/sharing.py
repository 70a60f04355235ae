"""Shapes of sharing: shares, and teams with their members."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from farcall_common.store.model import ObjectKind, Right, Share, SharedObject, Team, TeamMember
from farcall_lambdas.identity import same_case
from farcall_lambdas.models.fields import Instant, Maybe, Shape, SmallJsonObject, Text, Title

GivenRight = Literal["see", "use", "manage"]

#: A name, or an id as the identity provider writes it.
Who = Annotated[Text, Field(min_length=1, max_length=200, pattern=r"^[^\s]+$")]


class Member(Shape):
    """A person: an identity by its id, or by a name that the identity provider has verified, such as
    ``user@lab.org``."""

    kind: Literal["identity", "name"]
    id: Who

    @property
    def text(self) -> str:
        """The person as the store writes it."""
        return _text(self.kind, self.id)


class Grantee(Shape):
    """Grantee of a share: an ``identity`` by its id, a verified ``name``, a ``group`` of the identity
    provider, or a ``team`` of this deployment by its id."""

    kind: Literal["identity", "name", "group", "team"]
    id: Who

    @property
    def text(self) -> str:
        """The grantee as the store writes it."""
        return _text(self.kind, self.id)

    @classmethod
    def read(cls, text: str) -> Grantee:
        """Read a grantee as the store writes it."""
        kind, _, id_ = text.partition(" ")
        return cls.model_validate({"kind": kind, "id": id_})


def _text(kind: str, id_: str) -> str:
    return f"{kind} {same_case(id_) if kind == 'name' else id_}"


class PutShare(Shape):
    """``ends_at``: epoch seconds; the right ends then, or with null when it is taken back. ``note`` is for people.
    ``allowance``: limits of each person who uses an endpoint by this share: ``max_running`` and ``max_waiting`` tasks,
    ``max_walltime_s`` of one, ``core_hours_per_month`` and ``gpu_hours_per_month`` (UTC), and the ``weight`` of turns,
    1 to 1000; null or left out: no limit."""

    grantee: Grantee
    right: GivenRight
    ends_at: Instant | None = None
    note: Title = ""
    allowance: SmallJsonObject = Field(default_factory=dict)


class ShareEntry(Shape):
    """Times are epoch seconds; ``granted_by`` is an identity."""

    share_id: str
    grantee: Grantee
    right: GivenRight
    granted_by: str
    granted_at: float
    ends_at: Maybe[float] = None
    note: str = ""
    allowance: dict[str, int | float] = Field(default_factory=dict)

    @classmethod
    def of(cls, share: Share) -> ShareEntry:
        return cls.model_validate(
            {
                "share_id": share.share_id,
                "grantee": Grantee.read(share.grantee),
                "right": share.right.word,
                "granted_by": share.granted_by,
                "granted_at": share.granted_at.timestamp(),
                "ends_at": None if share.ends_at is None else share.ends_at.timestamp(),
                "note": share.note,
                "allowance": share.allowance,
            }
        )


class ShareList(Shape):
    shares: list[ShareEntry]


class SharedEntry(Shape):
    """An endpoint or a function of another owner, and a share of it that the caller has."""

    kind: ObjectKind
    object_id: str
    name: str
    owner_id: str
    share: ShareEntry

    @classmethod
    def of(cls, shared: SharedObject) -> SharedEntry:
        share = shared.share
        return cls(
            kind=share.kind,
            object_id=share.object_id,
            name=shared.name,
            owner_id=shared.owner_id,
            share=ShareEntry.of(share),
        )


class SharedList(Shape):
    shared: list[SharedEntry]


class AddTeam(Shape):
    name: Annotated[Title, Field(min_length=1)]


class TeamEntry(Shape):
    team_id: str
    name: str
    owner_id: str
    created_at: float

    @classmethod
    def of(cls, team: Team) -> TeamEntry:
        return cls(team_id=team.team_id, name=team.name, owner_id=team.owner_id, created_at=team.created_at.timestamp())


class TeamList(Shape):
    teams: list[TeamEntry]


class MemberEntry(Shape):
    member: Member
    added_at: float

    @classmethod
    def of(cls, member: TeamMember) -> MemberEntry:
        kind, _, id_ = member.member.partition(" ")
        return cls(member=Member.model_validate({"kind": kind, "id": id_}), added_at=member.added_at.timestamp())


class MemberList(Shape):
    team_id: str
    members: list[MemberEntry]


def right_of(word: GivenRight) -> Right:
    """A right by its word."""
    return Right[word.upper()]
