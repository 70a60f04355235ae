"""``farcall endpoints``."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Final

import typer

from farcall._client import connection_of
from farcall.cli._arguments import EndpointArgument, remember, resolve_endpoint
from farcall.cli._connect import connected
from farcall.cli._output import AsJson, show_fields, show_json, show_table
from farcall_common.errors import InvalidRequest
from farcall_common.exit_codes import INTERRUPTED

app = typer.Typer(help="Endpoints that you may use.", no_args_is_help=True)

_PARALLEL: Final = 8


@app.command("ls")
def list_(
    context: typer.Context,
    mine: Annotated[bool, typer.Option("--mine", help="Only those that you own.")] = False,
    status_too: Annotated[bool, typer.Option("--status", help="Show for each whether it is online.")] = False,
    as_json: AsJson = False,
) -> None:
    """List endpoints."""
    with connected(context) as client:
        endpoints = client.get_endpoints(role="owner" if mine else "any")
        if status_too:
            with ThreadPoolExecutor(_PARALLEL) as pool:
                statuses = pool.map(client.get_endpoint_status, [each["uuid"] for each in endpoints])
                endpoints = [
                    each | {"status": found["status"]} for each, found in zip(endpoints, statuses, strict=True)
                ]
    remember("endpoints", (each["name"] for each in endpoints))
    if as_json:
        show_json(endpoints)
        return
    keys = ("uuid", "name", "display_name", "owner", *(("status",) if status_too else ()))
    columns = ["endpoint", *(key.replace("_", " ") for key in keys[1:])]
    rows = [[each[key] for key in keys] for each in endpoints]
    show_table(columns, rows, empty="You may use no endpoint.")


@app.command()
def show(context: typer.Context, endpoint: EndpointArgument, as_json: AsJson = False) -> None:
    """Show an endpoint."""
    with connected(context) as client:
        found = client.get_endpoint(resolve_endpoint(client, endpoint))
    if as_json:
        show_json(found)
    else:
        show_fields({name.replace("_", " "): value for name, value in found.items()})


@app.command()
def status(context: typer.Context, endpoint: EndpointArgument, as_json: AsJson = False) -> None:
    """Show whether an endpoint is online, and its numbers of workers and tasks."""
    with connected(context) as client:
        found = client.get_endpoint_status(resolve_endpoint(client, endpoint))
    if as_json:
        show_json(found)
        return
    numbers = {name.replace("_", " "): number for name, number in found["details"].items()}
    show_fields({"status": found["status"], **numbers})


@app.command()
def fingerprint(
    context: typer.Context,
    endpoint: EndpointArgument,
    accept: Annotated[bool, typer.Option("--accept", help="Trust this identity from now on.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the identity to which calls of an endpoint are sealed: as the API reports it, and as you know it."""
    with connected(context) as client:
        endpoint_id = resolve_endpoint(client, endpoint)
        sealer = connection_of(client).sealer
        found = sealer.fingerprint(endpoint_id)
    if accept and found is None:
        sealer.known.forget(endpoint_id)
    elif accept and found is not None:
        sealer.known.put(endpoint_id, found)
    known = sealer.known.get(endpoint_id)
    if as_json:
        show_json({"endpoint_id": endpoint_id, "reported": found, "known": known})
    else:
        show_fields({"reported": found or "opens no sealed calls", "known": known or "not used yet"})


@app.command("rm")
def remove(
    context: typer.Context,
    endpoint: EndpointArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not prompt.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete the registration of an endpoint of yours. A running agent is refused from then on."""
    with connected(context) as client:
        endpoint_id = resolve_endpoint(client, endpoint)
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidRequest(f"not a terminal: cannot confirm the deletion of {endpoint_id}", hint="Pass --yes.")
        if not typer.confirm(f"Delete endpoint {endpoint} ({endpoint_id})?", err=True):
            raise typer.Exit(INTERRUPTED)
    with connected(context) as client:
        client.delete_endpoint(endpoint_id)
    if as_json:
        show_json({"deleted": endpoint_id})
