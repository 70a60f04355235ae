"""Endpoints as people name them."""

from __future__ import annotations

import os
import uuid
from typing import Annotated

import typer

from farcall._client import Client
from farcall.cli._cache import completes, remember
from farcall_common.credentials import find_home, read_settings
from farcall_common.errors import ConfigurationError, EndpointUnknown

EndpointName = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        "-e",
        envvar="FARCALL_ENDPOINT",
        metavar="NAME|ID",
        help="Where to run; else the one in the configuration, or the only one that you have.",
        autocompletion=completes("endpoints"),
    ),
]
EndpointArgument = Annotated[str, typer.Argument(metavar="NAME|ID", autocompletion=completes("endpoints"))]


def resolve_endpoint(client: Client, name: str | None) -> str:
    """The id of an endpoint that is given by id or name, is configured, or is the only one.

    :raises EndpointUnknown: if none has that name.
    :raises ConfigurationError: if several could be meant.
    """
    if name is None:
        name = read_settings(find_home(os.environ)).get("endpoint")
    if name is not None and _is_id(name):
        return str(uuid.UUID(name))
    endpoints = client.get_endpoints()
    remember("endpoints", (each["name"] for each in endpoints))
    if name is not None:
        endpoints = [each for each in endpoints if name in (each["name"], each["display_name"])]
        if not endpoints:
            raise EndpointUnknown(f"there is no endpoint named {name!r}")
    match endpoints:
        case [only]:
            return str(only["uuid"])
        case []:
            raise ConfigurationError(
                "you have no endpoint",
                hint="`farcall-endpoint configure NAME` and `farcall-endpoint start NAME` make this machine one.",
            )
    ids = ", ".join(f"{each['name']} ({each['uuid']})" for each in endpoints[:5])
    raise ConfigurationError(f"which endpoint? There are {len(endpoints)}: {ids}", hint="Choose one with --endpoint.")


def _is_id(text: str) -> bool:
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True
