"""``farcall tokens`` and ``farcall accounts``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from farcall.cli._connect import connected
from farcall.cli._output import AsJson, show_json
from farcall_common.console import instant, new_group, show_table
from farcall_common.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from farcall import Client

tokens = new_group("Tokens for programs, which permit some operations.")
accounts = new_group("Your service accounts: identities for programs.")

_UNITS_S: Final = {"h": 3600, "d": 86_400, "w": 7 * 86_400}
_MAX_S: Final = 366 * 86_400

AccountArgument = Annotated[str, typer.Argument(metavar="NAME|ID")]


@tokens.command()
def create(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="What the token is for, as lists and the audit log show it.")],
    scope: Annotated[
        list[str],
        typer.Option("--scope", metavar="SCOPE", help="An operation family such as tasks:submit; may be repeated."),
    ],
    endpoint: Annotated[
        list[str] | None, typer.Option("--endpoint", metavar="NAME|ID", help="Only this endpoint; may be repeated.")
    ] = None,
    function: Annotated[
        list[str] | None, typer.Option("--function", metavar="ID", help="Only this function; may be repeated.")
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="AGE", help="When it expires, like 12h, 30d or 8w; default 90d, at most 366d.")
    ] = None,
    account: Annotated[
        str | None, typer.Option(metavar="NAME|ID", help="A service account of yours, for which it is.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a token and show its secret, this once. A program gets it as FARCALL_TOKEN."""
    expires_in_s = _seconds(expires)
    with connected(context) as client:
        made = client.create_token(
            name,
            scopes=scope,
            endpoints=endpoint,
            functions=function,
            expires_in_s=expires_in_s,
            account_id=None if account is None else _account_id(client, account),
        )
    if as_json:
        show_json(made)
        return
    typer.echo(made["token"])
    typer.echo(f"It expires on {instant(made['expires_at'])}. It is not shown again.", err=True)


@tokens.command("ls")
def list_tokens(context: typer.Context, as_json: AsJson = False) -> None:
    """List your tokens, and those of your service accounts, newest first."""
    with connected(context) as client:
        found = client.get_tokens()
    if as_json:
        show_json(found)
        return
    rows = [
        (
            each["token_id"],
            each["name"],
            " ".join(each["scopes"]),
            instant(each["expires_at"]),
            instant(each.get("last_used_at")),
            "revoked" if "revoked_at" in each else "",
        )
        for each in found
    ]
    show_table(("token", "name", "scopes", "expires", "last used", ""), rows, empty="You have no tokens.")


@tokens.command()
def revoke(
    context: typer.Context,
    token: Annotated[str, typer.Argument(metavar="NAME|ID", help="Its id, or its name if no other token has it.")],
    as_json: AsJson = False,
) -> None:
    """Revoke a token: it is refused within 10 seconds."""
    with connected(context) as client:
        usable = [each for each in client.get_tokens() if "revoked_at" not in each]
        token_id = _id_of(token, usable, key="token_id", what="token")
        client.revoke_token(token_id)
    if as_json:
        show_json({"revoked": token_id})


@accounts.command("create")
def create_account(context: typer.Context, name: str, as_json: AsJson = False) -> None:
    """Create a service account and show its id."""
    with connected(context) as client:
        made = client.create_account(name)
    if as_json:
        show_json(made)
    else:
        typer.echo(made["account_id"])


@accounts.command("ls")
def list_accounts(context: typer.Context, as_json: AsJson = False) -> None:
    """List your service accounts."""
    with connected(context) as client:
        found = client.get_accounts()
    if as_json:
        show_json(found)
        return
    rows = [(each["account_id"], each["name"], instant(each["created_at"])) for each in found]
    show_table(("account", "name", "created"), rows, empty="You have no service accounts.")


@accounts.command("rm")
def remove_account(context: typer.Context, account: AccountArgument, as_json: AsJson = False) -> None:
    """Delete a service account with its tokens and its endpoints."""
    with connected(context) as client:
        account_id = _account_id(client, account)
        client.delete_account(account_id)
    if as_json:
        show_json({"deleted": account_id})


def _account_id(client: Client, account: str) -> str:
    return _id_of(account, client.get_accounts(), key="account_id", what="service account")


def _id_of(reference: str, found: list[dict[str, Any]], *, key: str, what: str) -> str:
    """The id of one of these, by its id or name.

    :raises NotFound: if there is none, or several have that name.
    """
    ids = [str(each[key]) for each in found if reference in (each[key], each["name"])]
    if len(ids) != 1:
        raise NotFound(
            f"you have {len(ids) or 'no'} {what}{'s' * (len(ids) > 1)} {reference}",
            hint="Use the id." if ids else "",
        )
    return ids[0]


def _seconds(text: str | None) -> int | None:
    """:raises InvalidRequest: for a text that is no age."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,6})([hdw])", text)
    if found is None:
        raise InvalidRequest(f"{text!r} is not an age", hint="Write 12h, 30d or 8w.")
    seconds = int(found[1]) * _UNITS_S[found[2]]
    if not 60 <= seconds <= _MAX_S:
        raise InvalidRequest(f"a token may not last for {text}", hint=f"Write {_MAX_S // _UNITS_S['d']}d at most.")
    return seconds
