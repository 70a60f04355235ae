"""Routes of sharing: shares of endpoints and functions, what is shared with the caller, and teams."""

from typing import Annotated, Literal

from aws_lambda_powertools.event_handler.openapi.params import Query

from farcall_common.store.allowance import Allowance
from farcall_common.store.model import ObjectKind
from farcall_lambdas.models.fields import Id, instant
from farcall_lambdas.models.functions import Removed
from farcall_lambdas.models.sharing import (
    AddTeam,
    Member,
    MemberEntry,
    MemberList,
    PutShare,
    SharedEntry,
    SharedList,
    ShareEntry,
    ShareList,
    TeamEntry,
    TeamList,
    Who,
    right_of,
)
from farcall_lambdas.routes.call import Call, CurrentCall, new_router

router = new_router()


@router.put("/v3/endpoints/<endpoint_id>/shares", summary="Share an endpoint that you manage", tags=["sharing"])
def share_endpoint(endpoint_id: Id, body: PutShare, call: CurrentCall) -> ShareEntry:
    """The share replaces that with the same grantee."""
    return _share(call, ObjectKind.ENDPOINT, endpoint_id, body)


@router.put("/v3/functions/<function_id>/shares", summary="Share a function that you manage", tags=["sharing"])
def share_function(function_id: Id, body: PutShare, call: CurrentCall) -> ShareEntry:
    """The share replaces that with the same grantee."""
    return _share(call, ObjectKind.FUNCTION, function_id, body)


@router.get("/v3/endpoints/<endpoint_id>/shares", summary="Shares of an endpoint that you manage", tags=["sharing"])
def list_endpoint_shares(endpoint_id: Id, call: CurrentCall) -> ShareList:
    return _shares(call, ObjectKind.ENDPOINT, endpoint_id)


@router.get("/v3/functions/<function_id>/shares", summary="Shares of a function that you manage", tags=["sharing"])
def list_function_shares(function_id: Id, call: CurrentCall) -> ShareList:
    return _shares(call, ObjectKind.FUNCTION, function_id)


@router.delete(
    "/v3/endpoints/<endpoint_id>/shares/<share_id>",
    summary="Take a share of an endpoint that you manage back",
    tags=["sharing"],
)
def unshare_endpoint(endpoint_id: Id, share_id: Id, call: CurrentCall) -> Removed:
    """Open tasks that need it are cancelled."""
    call.services.sharing.unshare(call.identity, ObjectKind.ENDPOINT, endpoint_id, share_id)
    return Removed()


@router.delete(
    "/v3/functions/<function_id>/shares/<share_id>",
    summary="Take a share of a function that you manage back",
    tags=["sharing"],
)
def unshare_function(function_id: Id, share_id: Id, call: CurrentCall) -> Removed:
    """Open tasks that need it are cancelled."""
    call.services.sharing.unshare(call.identity, ObjectKind.FUNCTION, function_id, share_id)
    return Removed()


@router.get("/v3/shared", summary="What others share with you, newest first", tags=["sharing"])
def list_shared(call: CurrentCall) -> SharedList:
    return SharedList(shared=[SharedEntry.of(each) for each in call.services.sharing.shared_with(call.identity)])


@router.post("/v3/teams", summary="Make a team", tags=["sharing"])
def add_team(body: AddTeam, call: CurrentCall) -> TeamEntry:
    return TeamEntry.of(call.services.sharing.add_team(call.identity, body.name))


@router.get("/v3/teams", summary="Your teams, and those in which you are", tags=["sharing"])
def list_teams(call: CurrentCall) -> TeamList:
    return TeamList(teams=[TeamEntry.of(each) for each in call.services.sharing.teams(call.identity)])


@router.delete("/v3/teams/<team_id>", summary="Delete a team of yours", tags=["sharing"])
def delete_team(team_id: Id, call: CurrentCall) -> Removed:
    """Open tasks that need what was shared with it are cancelled."""
    call.services.sharing.delete_team(call.identity, team_id)
    return Removed()


@router.get("/v3/teams/<team_id>/members", summary="Members of a team", tags=["sharing"])
def list_members(team_id: Id, call: CurrentCall) -> MemberList:
    found = call.services.sharing.members(call.identity, team_id)
    return MemberList(team_id=team_id, members=[MemberEntry.of(each) for each in found])


@router.put("/v3/teams/<team_id>/members", summary="Add a member to a team of yours", tags=["sharing"])
def add_member(team_id: Id, body: Member, call: CurrentCall) -> Removed:
    call.services.sharing.add_member(call.identity, team_id, body.text)
    return Removed()


@router.delete(
    "/v3/teams/<team_id>/members",
    summary="Remove a member from a team of yours, or yourself from another",
    tags=["sharing"],
)
def remove_member(
    team_id: Id,
    call: CurrentCall,
    kind: Annotated[Literal["identity", "name"], Query()],
    id: Annotated[Who, Query()],  # noqa: A002 - the field of a member
) -> Removed:
    """Open tasks of the member that need what is shared with the team are cancelled."""
    call.services.sharing.remove_member(call.identity, team_id, Member(kind=kind, id=id).text)
    return Removed()


def _share(call: Call, kind: ObjectKind, object_id: str, body: PutShare) -> ShareEntry:
    share = call.services.sharing.share(
        call.identity,
        kind,
        object_id,
        body.grantee.text,
        right_of(body.right),
        ends_at=instant(body.ends_at),
        note=body.note,
        allowance=Allowance.from_json({name: each for name, each in body.allowance.items() if each is not None}),
    )
    return ShareEntry.of(share)


def _shares(call: Call, kind: ObjectKind, object_id: str) -> ShareList:
    found = call.services.sharing.shares(call.identity, kind, object_id)
    return ShareList(shares=[ShareEntry.of(each) for each in found])
