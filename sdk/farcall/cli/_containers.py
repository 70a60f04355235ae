"""``farcall containers``."""

from __future__ import annotations

from typing import Annotated

import typer

from farcall.cli._arguments import completes, remember
from farcall.cli._connect import connected
from farcall.cli._output import AsJson, show_json
from farcall_common.console import instant, new_group, show_fields, show_table
from farcall_common.environments import TYPES

app = new_group("Environments for your tasks.")

Container = Annotated[str, typer.Argument(metavar="NAME|ID", autocompletion=completes("containers"))]


@app.command("ls")
def list_(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at most.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List containers, newest first."""
    with connected(context) as client:
        found = client.get_containers(limit=limit)
    remember("containers", (each["name"] for each in found))
    if as_json:
        show_json(found)
        return
    rows = [
        (
            *(each[key] for key in ("container_uuid", "name", "type")),
            each["location"] or " ".join(each.get("requirements", ())),
            instant(each["created_at"]),
        )
        for each in found
    ]
    columns = ("container", "name", "type", "image or packages", "registered")
    show_table(columns, rows, empty="You have no containers.")


@app.command()
def register(
    context: typer.Context,
    image: Annotated[
        str,
        typer.Argument(
            help="The image: a reference, or an absolute path on the endpoint's nodes. None with --requirement."
        ),
    ] = "",
    type_: Annotated[
        str,
        typer.Option(
            "--type",
            help=f"{', '.join(TYPES)}; default: docker, with --requirement uv.",
            autocompletion=lambda incomplete: [each for each in TYPES if each.startswith(incomplete)],
        ),
    ] = "",
    name: Annotated[
        str, typer.Option(help="Its name: up to 100 letters, digits, hyphens, dots and underscores; default: its id.")
    ] = "",
    description: Annotated[str, typer.Option(help="Its description.")] = "",
    preload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE", help="A module that templates import, for the workers forked from them. Repeatable."
        ),
    ] = None,
    requirement: Annotated[
        list[str] | None,
        typer.Option(metavar="PACKAGE", help="A package that the endpoint installs, as pip takes it. Repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Register an environment for tasks and functions, and show its id. The same again shows the same id; a name cannot
    have two different environments."""
    type_ = type_ or ("uv" if requirement else "docker")
    with connected(context) as client:
        container_id = client.register_container(
            image, type_, name, description, preload=preload or None, requirements=requirement or None
        )
    remember("containers", [name or container_id])
    if as_json:
        show_json({"container_id": container_id})
    else:
        typer.echo(container_id)


@app.command()
def show(context: typer.Context, container: Container, as_json: AsJson = False) -> None:
    """Show a container."""
    with connected(context) as client:
        found = client.get_container(container)
    if as_json:
        show_json(found)
        return
    found["created_at"] = instant(found["created_at"])
    show_fields({name.replace("_", " "): value for name, value in found.items()})


@app.command("rm")
def remove(context: typer.Context, container: Container, as_json: AsJson = False) -> None:
    """Delete a container. Its image stays, and functions and tasks that name it keep their copy of its definition."""
    with connected(context) as client:
        client.delete_container(container)
    if as_json:
        show_json({"deleted": container})
