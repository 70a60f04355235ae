"""``farcall functions``."""

from __future__ import annotations

from typing import Annotated

import typer

from farcall import Client
from farcall._client import connection_of
from farcall._task_info import target_of
from farcall.cli._arguments import FunctionName, completes, load_function, remember
from farcall.cli._connect import connected
from farcall.cli._output import AsJson, FullIds, show_json, shown_ids
from farcall.cli._sharing import Shareable, add_sharing
from farcall_common.console import instant, new_group, show_fields, show_table
from farcall_common.environments import Environment
from farcall_common.errors import InvalidRequest

app = new_group("Your registered functions.")
add_sharing(
    app,
    Shareable(
        "function",
        lambda client, name: connection_of(client).ids.function(name, for_change=True).partition("@")[0],
        Client.share_function,
        Client.get_function_shares,
        Client.unshare_function,
        {
            "see": "They read its code, in all versions.",
            "use": "They read its code and run it on endpoints that they may use.",
            "manage": "They change its code for all who run it, and share it with others.",
        },
    ),
)

FunctionId = Annotated[
    str,
    typer.Argument(
        metavar="FUNCTION",
        help="Its id, the first digits of it, its name, or an alias.",
        autocompletion=completes("functions"),
    ),
]
SignWith = Annotated[
    str | None,
    typer.Option(
        metavar="KEY", help="Sign it, with the file of an SSH private key, or of a public key in an ssh-agent."
    ),
]
Container = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|ID",
        help="A container of yours in which calls run unless they name another one.",
        autocompletion=completes("containers"),
    ),
]
Requirement = Annotated[
    list[str] | None,
    typer.Option(metavar="PACKAGE", help="A package that the endpoint installs for calls. Repeatable."),
]
Limit = Annotated[int, typer.Option(min=1, help="How many at most.")]
FunctionIds = Annotated[list[str], typer.Argument(metavar="FUNCTION...", autocompletion=completes("functions"))]


@app.command("ls")
def list_(
    context: typer.Context,
    search_for: Annotated[
        str, typer.Option("--search", help="Only those with this in their name or description.")
    ] = "",
    limit: Limit = 50,
    full_ids: FullIds = False,
    as_json: AsJson = False,
) -> None:
    """List functions, newest first."""
    _list(context, search_for, limit, full_ids=full_ids, as_json=as_json)


@app.command()
def search(
    context: typer.Context,
    text: Annotated[str, typer.Argument(help="Text in their name or description.")],
    limit: Limit = 50,
    full_ids: FullIds = False,
    as_json: AsJson = False,
) -> None:
    """List functions that have a text in their name or description, newest first."""
    _list(context, text, limit, full_ids=full_ids, as_json=as_json)


@app.command()
def show(context: typer.Context, function: FunctionId, as_json: AsJson = False) -> None:
    """Show a function, or one of its versions: FUNCTION@VERSION. Of functions with the same name, the newest."""
    with connected(context) as client:
        found = client.find_function(function)
        whole = client.get_function(found["function_uuid"], version=found["version"])
    if as_json:
        show_json(found | whole)
        return
    metadata = dict(found["metadata"])
    signature, environment = metadata.pop("ssh_signature", None), metadata.pop("task_environment", None)
    target = target_of({"qos": metadata.pop("task_qos", None)})
    show_fields(
        {
            "function": found["function_uuid"],
            "version": found["version"],
            "name": found["function_name"],
            "description": found["description"],
            **{name.replace("_", " "): value for name, value in metadata.items()},
            "environment": Environment.of(environment).label if environment else None,
            "target": target or None,
            "signed": "yes" if signature else "no",
            "size": f"{len(whole['function_code'])} bytes",
        }
    )


@app.command()
def register(
    context: typer.Context,
    function: FunctionName,
    name: Annotated[str | None, typer.Option(help="Its name; default: that of the function.")] = None,
    description: Annotated[str | None, typer.Option(help="Its description; default: the docstring.")] = None,
    public: Annotated[bool, typer.Option("--public", help="All users may run it.")] = False,
    memoize: Annotated[
        bool, typer.Option("--memoize", help="Memoize: answer equal calls with the first result.")
    ] = False,
    container: Container = None,
    requirement: Requirement = None,
    sign_with: SignWith = None,
    as_json: AsJson = False,
) -> None:
    """Register a function and show its id."""
    loaded = load_function(function)
    with connected(context) as client:
        function_id = client.register_function(
            loaded,
            name=name,
            description=description,
            public=public,
            memoize=memoize,
            container=container,
            requirements=requirement or None,
            sign_with=sign_with,
        )
    remember("functions", [function_id])
    if as_json:
        show_json({"function_uuid": function_id})
    else:
        typer.echo(function_id)


@app.command()
def update(
    context: typer.Context,
    function_id: FunctionId,
    function: Annotated[
        str | None, typer.Argument(metavar="FILE.py:FUNCTION", help="The new version of the function.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Its name.")] = None,
    description: Annotated[str | None, typer.Option(help="Its description.")] = None,
    public: Annotated[bool | None, typer.Option("--public/--private", help="Whether all users may run it.")] = None,
    memoize: Annotated[
        bool | None,
        typer.Option("--memoize/--no-memoize", help="Whether equal calls are answered with the first result."),
    ] = None,
    container: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|ID",
            help="The container in which calls run; '' for none.",
            autocompletion=completes("containers"),
        ),
    ] = None,
    requirement: Requirement = None,
    sign_with: SignWith = None,
    as_json: AsJson = False,
) -> None:
    """Change a function, and show the number of its newest version. Calls of older versions still run those."""
    loaded = None if function is None else load_function(function)
    with connected(context) as client:
        version = client.update_function(
            function_id,
            loaded,
            name=name,
            description=description,
            public=public,
            memoize=memoize,
            container=container,
            requirements=requirement or None,
            sign_with=sign_with,
        )
    if as_json:
        show_json({"function_uuid": function_id, "version": version})
    else:
        typer.echo(version)


@app.command("sign")
def sign_(
    context: typer.Context,
    function_id: FunctionId,
    key: Annotated[
        str, typer.Option(metavar="KEY", help="File of an SSH private key, or of a public key in an ssh-agent.")
    ],
    as_json: AsJson = False,
) -> None:
    """Sign the newest version of a function, for endpoints that run signed functions only. Read what you sign:
    `farcall functions show FUNCTION --json`. Shows the number of the version that has the signature."""
    with connected(context) as client:
        version = client.update_function(function_id, sign_with=key)
    if as_json:
        show_json({"function_uuid": function_id, "version": version})
    else:
        typer.echo(version)


@app.command()
def versions(context: typer.Context, function_id: FunctionId, limit: Limit = 50, as_json: AsJson = False) -> None:
    """List the versions of a function, newest first. ID@VERSION calls one of them."""
    with connected(context) as client:
        found = client.get_function_versions(function_id, limit=limit)
    if as_json:
        show_json(found)
        return
    rows = [(each["version"], instant(each["created_at"]), each["function_hash"][:12]) for each in found]
    show_table(("version", "registered", "hash"), rows)


@app.command()
def alias(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The alias.")],
    function: Annotated[
        str | None, typer.Argument(metavar="FUNCTION", help="An id, for its newest version, or ID@VERSION.")
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the alias instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Set or delete an alias of a function. An existing alias is moved to this function."""
    if delete == (function is not None):
        raise InvalidRequest("either a function or --delete is needed", hint="`farcall functions aliases` lists names.")
    with connected(context) as client:
        if function is None:
            client.delete_alias(name)
        else:
            function_id, _, version = function.partition("@")
            client.set_alias(name, function_id, version=int(version) if version else None)
    if as_json:
        show_json({"name": name, "function": function})


@app.command()
def aliases(context: typer.Context, as_json: AsJson = False) -> None:
    """List your aliases."""
    with connected(context) as client:
        found = client.get_aliases()
    if as_json:
        show_json(found)
        return
    rows = [(each["name"], each["function_uuid"], each["version"] or "newest") for each in found]
    show_table(("alias", "function", "version"), rows, empty="You have no aliases.")


@app.command("rm")
def remove(context: typer.Context, function_ids: FunctionIds, as_json: AsJson = False) -> None:
    """Delete functions. Tasks that were submitted keep running."""
    with connected(context) as client:
        for function_id in function_ids:
            client.delete_function(function_id)
    if as_json:
        show_json({"deleted": function_ids})


def _list(context: typer.Context, text: str, limit: int, *, full_ids: bool, as_json: bool) -> None:
    with connected(context) as client:
        functions = client.get_functions(search=text, limit=limit)
    remember("functions", (each["function_uuid"] for each in functions))
    if as_json:
        show_json(functions)
        return
    ids = shown_ids((each["function_uuid"] for each in functions), full=full_ids)
    rows = [
        (
            ids[each["function_uuid"]],
            each["function_name"],
            each["version"],
            instant(each["created_at"]),
            (each["description"] or "").strip().partition("\n")[0],
        )
        for each in functions
    ]
    columns = ("function", "name", "version", "registered", "description")
    show_table(columns, rows, empty="You have no such functions.", cut=True)
