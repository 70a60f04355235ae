"""``farcall functions``."""

from __future__ import annotations

from typing import Annotated

import typer

from farcall._client import Client
from farcall.cli._output import AsJson, instant, show_fields, show_json, show_table

__all__ = ["app"]

app = typer.Typer(help="Your registered functions.", no_args_is_help=True)


@app.command("ls")
def list_(
    search: Annotated[str, typer.Option(help="Only those with this in their name or description.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List functions, newest first."""
    with Client() as client:
        functions = client.get_functions(search=search, limit=limit)
    if as_json:
        show_json(functions)
        return
    rows = [
        (each["function_uuid"], each["function_name"], instant(each["created_at"]), _first_line(each["description"]))
        for each in functions
    ]
    show_table(("function", "name", "registered", "description"), rows, empty="You have no such functions.")


@app.command()
def show(function_id: Annotated[str, typer.Argument(metavar="FUNCTION")], as_json: AsJson = False) -> None:
    """Show a function."""
    with Client() as client:
        function = client.get_function(function_id)
    if as_json:
        show_json(function)
        return
    show_fields(
        {
            "function": function["function_uuid"],
            "name": function["function_name"],
            "description": function["description"],
            **{name.replace("_", " "): value for name, value in function["metadata"].items()},
            "size": f"{len(function['function_code'])} bytes",
        }
    )


@app.command()
def delete(function_ids: Annotated[list[str], typer.Argument(metavar="FUNCTION...")], as_json: AsJson = False) -> None:
    """Delete functions. Tasks that were submitted keep running."""
    with Client() as client:
        for function_id in function_ids:
            client.delete_function(function_id)
    if as_json:
        show_json({"deleted": function_ids})


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]
