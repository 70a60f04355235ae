"""``farcall audit``."""

from __future__ import annotations

from typing import Final

import typer

from farcall.cli._connect import connected
from farcall.cli._export import AsLines, Since, Until, moment, write

app = typer.Typer(help="Who did what, and when.", no_args_is_help=True)

_EXPORTED: Final = ("at", "identity_id", "action", "object_id", "owner_id", "detail")


@app.callback()
def _audit() -> None:
    """Who did what, and when."""


@app.command()
def export(context: typer.Context, since: Since = None, until: Until = None, as_json: AsLines = True) -> None:
    """Write what you did, and what others did to what is yours, oldest first: a JSON object a line, or CSV.

    Functions, containers, endpoints and their keys that were registered, changed or deleted; batches that were
    submitted; tasks that were cancelled, retried or discarded. Instants are epoch seconds.
    """
    first, last = moment(since), moment(until)
    with connected(context, doing=None) as client:
        write(client.iter_audit(since=first, until=last), _EXPORTED, as_json=as_json)
