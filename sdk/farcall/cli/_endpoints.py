"""``farcall endpoints``."""

from __future__ import annotations

from typing import Annotated

import typer

from farcall._client import Client
from farcall.cli._output import AsJson, show_fields, show_json, show_table
from farcall.cli._resolve import resolve_endpoint

__all__ = ["app"]

app = typer.Typer(help="Endpoints that you may use.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME|ID")]


@app.command("ls")
def list_(
    mine: Annotated[bool, typer.Option("--mine", help="Only those that you own.")] = False, as_json: AsJson = False
) -> None:
    """List endpoints."""
    with Client() as client:
        endpoints = client.get_endpoints(role="owner" if mine else "any")
    if as_json:
        show_json(endpoints)
        return
    rows = [(each["uuid"], each["name"], each["display_name"], each["owner"]) for each in endpoints]
    show_table(("endpoint", "name", "display name", "owner"), rows, empty="There is no endpoint that you may use.")


@app.command()
def show(endpoint: Name, as_json: AsJson = False) -> None:
    """Show an endpoint."""
    with Client() as client:
        found = client.get_endpoint(resolve_endpoint(client, endpoint))
    if as_json:
        show_json(found)
    else:
        show_fields({name.replace("_", " "): value for name, value in found.items()})


@app.command()
def status(endpoint: Name, as_json: AsJson = False) -> None:
    """Show whether an endpoint is online, and what it is doing."""
    with Client() as client:
        found = client.get_endpoint_status(resolve_endpoint(client, endpoint))
    if as_json:
        show_json(found)
        return
    numbers = {name.replace("_", " "): number for name, number in found["details"].items()}
    show_fields({"status": found["status"], **numbers})
