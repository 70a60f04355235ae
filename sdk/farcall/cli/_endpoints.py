"""``farcall endpoints``."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from farcall import Client
from farcall._client import connection_of
from farcall.cli._arguments import EndpointArgument, remember, resolve_endpoint
from farcall.cli._connect import command_environment, connected
from farcall.cli._output import AsJson, FullIds, show_json, show_line, shown_ids
from farcall.cli._sharing import Shareable, add_sharing
from farcall_common.console import duration, instant, new_group, show_fields, show_table
from farcall_common.durations import ago, retry_of
from farcall_common.environments import state_of
from farcall_common.errors import InvalidRequest
from farcall_common.exit_codes import INTERRUPTED

app = new_group("Endpoints that you may use.")
add_sharing(
    app,
    Shareable(
        "endpoint",
        resolve_endpoint,
        Client.share_endpoint,
        Client.get_endpoint_shares,
        Client.unshare_endpoint,
        {
            "see": "They see its status, its settings and its list of functions.",
            "use": "They run code on it as the account of its agent, as far as its isolation and its list of functions "
            "permit: `farcall-endpoint status` shows the isolation.",
            "manage": "They use it, change its settings, list and cancel the tasks of all, and share it with others.",
        },
    ),
)

_WATCH_S: Final = 2.0
#: Clears a terminal.
_CLEAR: Final = "\x1b[2J\x1b[H"

Submitter = Annotated[str | None, typer.Option(help="Only tasks of this identity.")]
Function = Annotated[str | None, typer.Option(help="Only tasks of the function with this id.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not prompt.")]


def _confirm(question: str, *, what: str) -> None:
    """Ask, on a terminal. :raises InvalidRequest: if there is none. :raises Exit: if the answer is no."""
    if not sys.stdin.isatty():
        raise InvalidRequest(f"not a terminal: cannot confirm {what}", hint="Pass --yes.")
    if not typer.confirm(question, err=True):
        raise typer.Exit(INTERRUPTED)


@app.command("ls")
def list_(
    context: typer.Context,
    mine: Annotated[bool, typer.Option("--mine", help="Only those that you own.")] = False,
    full_ids: FullIds = False,
    as_json: AsJson = False,
) -> None:
    """List endpoints, and whether each is online."""
    with connected(context) as client:
        endpoints = client.get_endpoints(role="owner" if mine else "any")
    remember("endpoints", (each["name"] for each in endpoints))
    if as_json:
        show_json(endpoints)
        return
    ids = shown_ids((each[key] for each in endpoints for key in ("uuid", "owner")), full=full_ids)
    rows = [
        (
            each["name"],
            each.get("status", ""),
            ids[each["uuid"]],
            "me" if mine or each.get("owned") else ids[each["owner"]],
            each["display_name"] if each["display_name"] != each["name"] else "",
        )
        for each in endpoints
    ]
    show_table(("name", "state", "endpoint", "owner", "display name"), rows, empty="You may use no endpoint.")


@app.command()
def show(context: typer.Context, endpoint: EndpointArgument, as_json: AsJson = False) -> None:
    """Show an endpoint, and the environments that it has now."""
    with connected(context) as client:
        endpoint_id = resolve_endpoint(client, endpoint)
        found = client.get_endpoint(endpoint_id)
        environments = client.get_endpoint_status(endpoint_id).get("environments") or []
    if as_json:
        show_json({**found, "environments": environments} if environments else found)
        return
    runtime = found.pop("runtime", None) or {}
    found |= {name: runtime.get(name) for name in ("python_version", "platform", "packages")}
    found["environments"] = runtime.get("containers")
    show_fields({name.replace("_", " "): value for name, value in found.items()})
    _show_environments(environments)


@app.command()
def status(
    context: typer.Context,
    endpoint: EndpointArgument,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again every two seconds, until Ctrl-C; with --json a line each.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show whether an endpoint is online, the problem that it reports, and its numbers of workers and tasks."""
    with connected(context) as client:
        endpoint_id = resolve_endpoint(client, endpoint)
        found = client.get_endpoint_status(endpoint_id)
        while watch:
            if as_json:
                show_line(found)
            else:
                typer.echo(_CLEAR if sys.stdout.isatty() else "", nl=False)
                _show_status(found)
            command_environment(context).pause(_WATCH_S)
            found = client.get_endpoint_status(endpoint_id)
    if as_json:
        show_json(found)
    else:
        _show_status(found)


def _show_status(found: Mapping[str, Any]) -> None:
    numbers = {name.replace("_", " "): number for name, number in found["details"].items()}
    age_s = found.get("age_s")
    problem = {"problem": text} if (text := found.get("problem")) else {}
    show_fields({"status": found["status"], **problem, "as of": None if age_s is None else ago(age_s), **numbers})
    _show_environments(found.get("environments") or ())


def _show_environments(environments: Sequence[Mapping[str, Any]]) -> None:
    """The environments of an endpoint by node, if it reports any."""
    if not environments:
        return
    rows = [
        (
            each.get("label") or f"{each['type']} {each['key']}",
            each["node"],
            each["warm"],
            each["busy"],
            each["starting"],
            state_of(each),
            _activity(each),
        )
        for each in environments
    ]
    typer.echo()
    show_table(("environment", "node", "warm", "busy", "starting", "state", "what it does"), rows)


def _activity(environment: Mapping[str, Any]) -> str:
    since, text = environment.get("since"), environment.get("text") or ""
    if problem := environment.get("problem"):
        age = f", {ago(time.time() - since)}" if since else ""
        return f"problem{age}: {problem}{retry_of(environment.get('retry_at'), now=time.time())}"
    return f"{text}, {duration(max(0.0, time.time() - since))} so far" if text and since else text


@app.command()
def tasks(
    context: typer.Context,
    endpoint: EndpointArgument,
    submitter: Submitter = None,
    function: Function = None,
    full_ids: FullIds = False,
    as_json: AsJson = False,
) -> None:
    """List the open tasks of an endpoint of yours, of all submitters."""
    with connected(context) as client:
        endpoint_id = resolve_endpoint(client, endpoint)
        found = list(client.iter_endpoint_tasks(endpoint_id, submitter=submitter, function_id=function))
    if as_json:
        show_json(found)
        return
    ids = shown_ids((each["task_id"] for each in found), full=full_ids, least=13)
    others = shown_ids((each[key] for each in found for key in ("submitter", "function_id")), full=full_ids)
    rows = [
        (
            ids[each["task_id"]],
            others[each["submitter"]],
            others[each["function_id"]],
            each["status"],
            duration(each["age_s"]),
        )
        for each in found
    ]
    show_table(("task", "submitter", "function", "state", "age"), rows, empty="The endpoint has no open task.")


@app.command()
def cancel(
    context: typer.Context,
    endpoint: EndpointArgument,
    task_ids: Annotated[list[str] | None, typer.Argument(metavar="[TASK]...", help="Ids of tasks.")] = None,
    submitter: Submitter = None,
    function: Function = None,
    all_: Annotated[bool, typer.Option("--all", help="Cancel all of its open tasks.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Cancel open tasks of an endpoint of yours, of any submitters: those named, those of a submitter or a function, or
    all. Their submitters read in the error and in the audit that you did it."""
    if sum((bool(task_ids), bool(submitter or function), all_)) != 1:
        raise InvalidRequest(
            "which tasks to cancel is not clear", hint="Name tasks, or pass --submitter or --function, or --all."
        )
    with connected(context) as client:
        endpoint_id = resolve_endpoint(client, endpoint)
        if all_:
            task_ids = [each["task_id"] for each in client.iter_endpoint_tasks(endpoint_id)]
    if all_ and task_ids and not yes:
        _confirm(f"Cancel {len(task_ids)} tasks of {endpoint}?", what=f"the end of {len(task_ids)} tasks")
    outcomes: dict[str, dict[str, Any]] = {}
    if task_ids or not all_:
        with connected(context) as client:
            outcomes = client.cancel_endpoint_tasks(endpoint_id, task_ids, submitter=submitter, function_id=function)
    if as_json:
        show_json(outcomes)
        return
    rows = [[task_id, outcome["outcome"]] for task_id, outcome in outcomes.items()]
    show_table(["task", "outcome"], rows, empty="The endpoint has no such open task.")


@app.command()
def keys(context: typer.Context, endpoint: EndpointArgument, as_json: AsJson = False) -> None:
    """List the keys with which the agent of an endpoint of yours may connect."""
    with connected(context) as client:
        found = client.get_endpoint_keys(resolve_endpoint(client, endpoint))
    if as_json:
        show_json(found)
        return
    rows = [[each["public_key"], instant(each["added_at"])] for each in found]
    show_table(["public key", "added"], rows, empty="The endpoint has never connected.")


@app.command("revoke-key")
def revoke_key(
    context: typer.Context,
    endpoint: EndpointArgument,
    public_key: Annotated[str, typer.Argument(help="The key, as `farcall endpoints keys` shows it.")],
    as_json: AsJson = False,
) -> None:
    """Revoke a key of an endpoint of yours: the session of an agent with it ends. An agent with a login or a credential
    makes a new one; see `farcall-endpoint revoke-credential`."""
    with connected(context) as client:
        client.revoke_endpoint_key(resolve_endpoint(client, endpoint), public_key)
    if as_json:
        show_json({"revoked": public_key})


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
        connection = connection_of(client)
        sealer, names = connection.sealer, connection.names.meanings(endpoint_id)
        key = sealer.reported(endpoint_id)
    if accept and key is None:
        sealer.known.forget(endpoint_id, names=names)
    elif accept and key is not None:
        sealer.known.put(endpoint_id, key.fingerprint, created_at=key.created_at, names=names)
    found, made_at = (None, None) if key is None else (key.fingerprint, key.created_at)
    known, newest = sealer.known.get(endpoint_id), sealer.known.newest(endpoint_id) or None
    if as_json:
        shown = {"endpoint_id": endpoint_id, "reported": found, "known": known}
        show_json(shown | {"reported_key_made_at": made_at, "newest_key_made_at": newest})
    else:
        fields = {"reported": found or "opens no sealed calls", "known": known or "not used yet"}
        show_fields(fields | {"key made": instant(made_at), "newest known": instant(newest)})


@app.command("rm")
def remove(
    context: typer.Context,
    endpoint: EndpointArgument,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete the registration of an endpoint of yours. A running agent is refused from then on."""
    with connected(context) as client:
        endpoint_id = resolve_endpoint(client, endpoint)
    if not yes:
        _confirm(f"Delete endpoint {endpoint} ({endpoint_id})?", what=f"the deletion of {endpoint_id}")
    with connected(context) as client:
        client.delete_endpoint(endpoint_id)
    if as_json:
        show_json({"deleted": endpoint_id})
