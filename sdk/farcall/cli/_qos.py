"""``farcall qos``."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer

from farcall._latencies import COLUMNS, LatencyReport, Window, infeasible_lines, row_of
from farcall.cli._arguments import completes, resolve_endpoint
from farcall.cli._connect import command_environment, connected
from farcall.cli._output import AsJson, show_json, show_line, show_text
from farcall_common.console import new_group, show_table
from farcall_common.durations import ago

app = new_group("Latency targets.")

_WATCH_S: Final = 2.0
#: Clears a terminal.
_CLEAR: Final = "\x1b[2J\x1b[H"

OfEndpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        "-e",
        metavar="NAME|ID",
        help="The endpoint; default: as for `farcall run`.",
        autocompletion=completes("endpoints"),
    ),
]
OfWindow = Annotated[str, typer.Option("--window", metavar="1m|10m", help="The window of time of the numbers.")]


@app.command()
def report(
    context: typer.Context,
    endpoint: OfEndpoint = None,
    window: OfWindow = "10m",
    png: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write plots of latencies and weights to this file, too; needs matplotlib."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how an endpoint holds latency targets, by function: tasks, violations, quantiles of the latency, the time
    until tasks start, cold starts, targets and weights; and which targets cannot be met.

    Of an endpoint that is not yours, your own functions.
    """
    with connected(context) as client:
        found = client.qos.report(_endpoint(client, endpoint), window=cast("Window", window))
    if png is not None:
        from farcall.cli._qos_plot import write_png

        write_png(found, png)
    if as_json:
        show_json(_json(found))
    else:
        _show(found)


@app.command()
def watch(
    context: typer.Context,
    endpoint: OfEndpoint = None,
    window: OfWindow = "1m",
    as_json: AsJson = False,
) -> None:
    """Show the report again every two seconds, until Ctrl-C; with --json a line each.

    Under `opentelemetry-instrument` the numbers are recorded as metrics.
    """
    with connected(context, doing=None) as client:
        endpoint_id = _endpoint(client, endpoint)
        while True:
            found = client.qos.report(endpoint_id, window=cast("Window", window))
            if as_json:
                show_line(_json(found))
            else:
                typer.echo(_CLEAR if sys.stdout.isatty() else "", nl=False)
                _show(found)
            command_environment(context).pause(_WATCH_S)


def _endpoint(client: Any, name: str | None) -> str | None:
    return None if name is None else resolve_endpoint(client, name)


def _json(report: LatencyReport) -> dict[str, Any]:
    shown = dataclasses.asdict(report)
    for each, function in zip(shown["functions"], report.functions, strict=True):
        each["violated"] = function.violated
    return shown


def _show(report: LatencyReport) -> None:
    show_table(COLUMNS, map(row_of, report.functions), empty="No calls of functions in the last ten minutes.")
    for line in infeasible_lines(report):
        show_text(line, err=not sys.stdout.isatty())
    if sys.stdout.isatty():
        parts = [f"window {report.window}", f"policy {report.policy}" if report.policy else ""]
        parts += [f"actuator {report.actuator}" if report.actuator else ""]
        parts += ["" if report.reported_at is None else f"as of {ago(max(0.0, time.time() - report.reported_at))}"]
        show_text(", ".join(filter(None, parts)))
