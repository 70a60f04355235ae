"""``share``, ``shares`` and ``unshare`` of endpoints and functions; ``farcall shared`` and ``farcall teams``."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from farcall import Client
from farcall._sharing import grantee_of
from farcall.cli._connect import connected
from farcall.cli._output import AsJson, moment, show_json, show_text
from farcall_common.console import instant, new_group, show_table
from farcall_common.errors import InvalidRequest, NotFound
from farcall_common.wire.ids import is_uuid

Grantees = Annotated[
    list[str],
    typer.Option(
        "--with", metavar="WHO", help="user@lab.org, the id of an identity, group:ID or team:NAME; may be repeated."
    ),
]
Name = Annotated[str, typer.Argument(metavar="NAME|ID")]
Limits = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=N",
        help="Of each person on an endpoint, repeatable: max_running, max_waiting, max_walltime_s, "
        "core_hours_per_month, gpu_hours_per_month, weight.",
    ),
]
Team = Annotated[str, typer.Argument(metavar="TEAM", help="Its name or id.")]
Person = Annotated[str, typer.Argument(metavar="PERSON", help="user@lab.org, or the id of an identity.")]


class _Right(enum.StrEnum):
    SEE = "see"
    USE = "use"
    MANAGE = "manage"


@dataclasses.dataclass(frozen=True)
class Shareable:
    """A kind of objects that can be shared: how to find and share one, and what each right means."""

    kind: str
    resolve: Callable[[Client, str], str]
    share: Callable[..., dict[str, Any]]
    shares: Callable[[Client, str], list[dict[str, Any]]]
    unshare: Callable[[Client, str, str], None]
    meaning: Mapping[str, str]


def add_sharing(app: typer.Typer, of: Shareable) -> None:
    """Add the three commands to the group of a kind of objects."""

    @app.command(help=f"Give someone a right to your {of.kind}, in place of what they had.")
    def share(
        context: typer.Context,
        name: Name,
        who: Grantees,
        right: Annotated[_Right, typer.Option(help="Each right includes those before it.")] = _Right.USE,
        until: Annotated[
            str | None, typer.Option(metavar="WHEN", help="The end: a date, a time, or from now like 12h, 30d, 8w.")
        ] = None,
        note: Annotated[str, typer.Option(help="For people.")] = "",
        limits: Limits = None,
        as_json: AsJson = False,
    ) -> None:
        if limits and of.kind != "endpoint":
            raise InvalidRequest("only shares of endpoints have limits", hint="Leave out --limit.")
        ends_at = moment(until, ahead=True)
        allowance = {"allowance": _allowance(limits)} if limits else {}
        with connected(context) as client:
            object_id = of.resolve(client, name)
            grantees = [grantee_of(_with_team_id(client, each)) for each in who]
            made = [
                of.share(
                    client,
                    object_id,
                    f"{each['kind']}:{each['id']}",
                    right.value,
                    until=ends_at,
                    note=note,
                    **allowance,
                )
                for each in grantees
            ]
        if as_json:
            show_json(made[0] if len(made) == 1 else made)
        else:
            for each in made:
                show_text(f"{_text(each['grantee'])} may {right.value} {of.kind} {name}{_end(each)}.")
            show_text(of.meaning[right], err=True)

    @app.command(help=f"List who has rights to one {of.kind} that you manage.")
    def shares(context: typer.Context, name: Name, as_json: AsJson = False) -> None:
        with connected(context) as client:
            found = of.shares(client, of.resolve(client, name))
        if as_json:
            show_json(found)
            return
        rows = [
            (
                each["share_id"],
                _text(each["grantee"]),
                each["right"],
                _ends_at(each),
                " ".join(f"{name}={limit:g}" for name, limit in sorted(each.get("allowance", {}).items())),
                each["granted_by"],
                each["note"],
            )
            for each in found
        ]
        show_table(
            ["share", "with", "right", "until", "limits", "given by", "note"], rows, empty="It is shared with no one."
        )

    @app.command(help=f"Take a right to the {of.kind} back. Open tasks that need it are cancelled.")
    def unshare(
        context: typer.Context,
        name: Name,
        share: Annotated[str | None, typer.Argument(metavar="[SHARE]", help="The id of the share.")] = None,
        who: Annotated[str | None, typer.Option("--with", metavar="WHO", help="Instead of the id.")] = None,
        as_json: AsJson = False,
    ) -> None:
        if (share is None) == (who is None):
            raise InvalidRequest("which share is not clear", hint="Give its id, or --with WHO.")
        with connected(context) as client:
            object_id = of.resolve(client, name)
            of.unshare(client, object_id, share or _with_team_id(client, who or ""))
        if as_json:
            show_json({"unshared": object_id})


def shared(context: typer.Context, as_json: AsJson = False) -> None:
    """Endpoints and functions that others share with you."""
    with connected(context) as client:
        found = client.get_shared()
    if as_json:
        show_json(found)
        return
    rows = [
        (
            each["kind"],
            each["object_id"],
            each["name"],
            each["share"]["right"],
            _ends_at(each["share"]),
            each["share"]["note"],
        )
        for each in found
    ]
    show_table(["kind", "id", "name", "right", "until", "note"], rows, empty="Nothing is shared with you.")


teams = new_group("Teams, to share endpoints and functions with.")


@teams.command("ls")
def list_(context: typer.Context, as_json: AsJson = False) -> None:
    """List your teams, and those in which you are."""
    with connected(context) as client:
        found = client.get_teams()
    if as_json:
        show_json(found)
        return
    rows = [(each["team_id"], each["name"], each["owner_id"]) for each in found]
    show_table(["team", "name", "owner"], rows, empty="You are in no team.")


@teams.command()
def create(
    context: typer.Context,
    name: Annotated[str, typer.Argument()],
    members: Annotated[list[str] | None, typer.Argument(metavar="[PERSON...]")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a team of yours, with these members."""
    with connected(context) as client:
        for member in members or ():
            grantee_of(member)  # before there is a team
        team_id = client.create_team(name)
        for member in members or ():
            client.add_team_member(team_id, member)
    if as_json:
        show_json({"team_id": team_id})
    else:
        show_text(team_id)


@teams.command()
def members(context: typer.Context, team: Team, as_json: AsJson = False) -> None:
    """List the members of a team."""
    with connected(context) as client:
        found = client.get_team_members(_team_id(client, team))
    if as_json:
        show_json(found)
        return
    rows = [(_text(each["member"]), instant(each["added_at"])) for each in found]
    show_table(["member", "since"], rows, empty="The team has no members.")


@teams.command()
def add(context: typer.Context, team: Team, person: Person, as_json: AsJson = False) -> None:
    """Add a person to a team of yours."""
    with connected(context) as client:
        client.add_team_member(_team_id(client, team), person)
    if as_json:
        show_json({"added": person})


@teams.command()
def remove(context: typer.Context, team: Team, person: Person, as_json: AsJson = False) -> None:
    """Remove a person from a team of yours, or yourself from another. Open tasks that need it are cancelled."""
    with connected(context) as client:
        client.remove_team_member(_team_id(client, team), person)
    if as_json:
        show_json({"removed": person})


@teams.command("rm")
def delete(context: typer.Context, team: Team, as_json: AsJson = False) -> None:
    """Delete a team of yours. What was shared with it is taken back."""
    with connected(context) as client:
        team_id = _team_id(client, team)
        client.delete_team(team_id)
    if as_json:
        show_json({"deleted": team_id})


def _allowance(limits: list[str]) -> dict[str, float]:
    """:raises InvalidRequest: for anything but names with numbers."""
    found: dict[str, float] = {}
    for limit in limits:
        name, _, number = limit.partition("=")
        try:
            value = float(number)
        except ValueError:
            raise InvalidRequest(f"{limit!r} is not a limit", hint="Like --limit max_running=4.") from None
        if not math.isfinite(value):
            raise InvalidRequest(f"{limit!r} is not a limit", hint="Leave the limit out for none.")
        found[name] = int(value) if value.is_integer() else value
    return found


def _team_id(client: Client, name: str) -> str:
    """A team by its id, or one of the caller's own by its name: others choose the names of theirs, and who is in them.

    :raises NotFound: if there is none.
    :raises InvalidRequest: if several have the name, or only teams of others.
    """
    teams = client.get_teams()
    if any(each["team_id"] == name for each in teams):
        return name
    own_id = client.whoami()["identity_id"]
    named = [each for each in teams if each["name"] == name]
    found = [each["team_id"] for each in named if each["owner_id"] == own_id]
    if not named:
        raise NotFound(f"you are in no team {name!r}", hint="`farcall teams ls` lists your teams.")
    if not found:
        others = ", ".join(f"{each['team_id']} of {each['owner_id']}" for each in named[:5])
        raise InvalidRequest(f"team {name!r} belongs to someone else", hint=f"Give an id: {others}.")
    if len(found) > 1:
        raise InvalidRequest(f"{len(found)} teams have the name {name!r}", hint=f"Give an id: {', '.join(found[:5])}.")
    return str(found[0])


def _with_team_id(client: Client, who: str) -> str:
    kind, _, name = who.partition(":")
    return f"team:{_team_id(client, name)}" if kind == "team" and not is_uuid(name) else who


def _text(grantee: Mapping[str, str]) -> str:
    return grantee["id"] if grantee["kind"] == "name" else f"{grantee['kind']}:{grantee['id']}"


def _ends_at(share: Mapping[str, Any]) -> str:
    return instant(share["ends_at"]) if share.get("ends_at") is not None else ""


def _end(share: Mapping[str, Any]) -> str:
    return f" until {_ends_at(share)}" if share.get("ends_at") is not None else ""
