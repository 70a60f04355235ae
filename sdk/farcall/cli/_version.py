"""``farcall version``."""

from __future__ import annotations

from typing import Annotated

import typer

from farcall._version import __version__
from farcall.cli._connect import connected
from farcall.cli._output import AsJson, show_json


def version(
    context: typer.Context,
    server: Annotated[bool, typer.Option("--server", help="Ask the API for its version too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show versions."""
    versions: dict[str, object] = {"farcall": __version__}
    if server:
        with connected(context) as client:
            versions |= client.version_check()
    if as_json:
        show_json(versions)
    else:
        for name, value in versions.items():
            typer.echo(f"{name} {value}")
