"""``farcall functions``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from farcall.cli._cache import completes, remember
from farcall.cli._connect import connected
from farcall.cli._load import FunctionName, load_function
from farcall.cli._output import AsJson, instant, show_fields, show_json, show_table

__all__ = ["app"]

app = typer.Typer(help="Your registered functions.", no_args_is_help=True)

Limit = Annotated[int, typer.Option(min=1, help="How many at most.")]
FunctionIds = Annotated[list[str], typer.Argument(metavar="FUNCTION...", autocompletion=completes("functions"))]


@app.command("ls")
def list_(
    context: typer.Context,
    search_for: Annotated[
        str, typer.Option("--search", help="Only those with this in their name or description.")
    ] = "",
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """List functions, newest first."""
    _list(context, search_for, limit, as_json=as_json)


@app.command()
def search(
    context: typer.Context,
    text: Annotated[str, typer.Argument(help="What is in their name or description.")],
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """List functions that have a text in their name or description, newest first."""
    _list(context, text, limit, as_json=as_json)


@app.command()
def show(
    context: typer.Context,
    function_id: Annotated[str, typer.Argument(metavar="FUNCTION", autocompletion=completes("functions"))],
    as_json: AsJson = False,
) -> None:
    """Show a function."""
    with connected(context) as client:
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
def register(
    context: typer.Context,
    function: FunctionName,
    name: Annotated[str | None, typer.Option(help="What to call it, if not by its own name.")] = None,
    description: Annotated[str | None, typer.Option(help="What it does, if not its docstring.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Everybody may run it.")] = False,
    memoize: Annotated[bool, typer.Option("--memoize", help="Answer equal calls from memory.")] = False,
    as_json: AsJson = False,
) -> None:
    """Register a function and show its id."""
    loaded = load_function(function)
    with connected(context) as client:
        function_id = client.register_function(
            loaded, name=name, description=description, public=public, memoize=memoize
        )
    remember("functions", [function_id])
    if as_json:
        show_json({"function_uuid": function_id})
    else:
        typer.echo(function_id)


@app.command("rm")
@app.command("delete", hidden=True)
def remove(context: typer.Context, function_ids: FunctionIds, as_json: AsJson = False) -> None:
    """Delete functions. Tasks that were submitted keep running."""
    with connected(context) as client:
        for function_id in function_ids:
            client.delete_function(function_id)
    if as_json:
        show_json({"deleted": function_ids})


def _list(context: typer.Context, text: str, limit: int, *, as_json: bool) -> None:
    with connected(context) as client:
        functions = client.get_functions(search=text, limit=limit)
    remember("functions", (each["function_uuid"] for each in functions))
    if as_json:
        show_json(functions)
        return
    columns = ("function", "name", "registered", "description")
    show_table(columns, map(_row, functions), empty="You have no such functions.")


def _row(function: dict[str, Any]) -> tuple[str, ...]:
    first_line = (function["description"] or "").strip().partition("\n")[0]
    return function["function_uuid"], function["function_name"], instant(function["created_at"]), first_line
