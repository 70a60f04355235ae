"""``farcall local``: a whole cloud tier on this machine, without an AWS account."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from farcall_common.errors import FarcallError
from farcall_local import control
from farcall_local.state import TierState

__all__ = ["app"]

app = typer.Typer(
    name="local", help="A whole cloud tier on this machine, without an AWS account.", no_args_is_help=True
)
_console = Console(highlight=False)


def _home() -> Path:
    return Path(os.environ.get("FARCALL_HOME") or Path.home() / ".farcall")


def _directory() -> Path:
    return _home() / "local"


@app.command()
def up(
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay until Ctrl-C, then stop the tier.")] = False,
) -> None:
    """Start the tier, and point this user's configuration at it if there is none yet."""
    directory = _directory()
    if control.is_up(directory):
        state = TierState.read(directory)
        _console.print(f"The local tier is up already: {state.api_url if state else directory}")
        return
    began = time.monotonic()
    try:
        supervisor = control.launch(directory, until_eof=foreground)
    except FarcallError as failure:
        _console.print(f"[red]{failure.record.code}[/red] {failure.record.message}", markup=True)
        _console.print(f"{failure.hint}\nLogs: {directory / 'logs'}")
        raise typer.Exit(1) from None
    state = TierState.read(directory)
    assert state is not None
    _console.print(f"The local tier is up at {state.api_url} ({time.monotonic() - began:.1f} s).")
    _configure(state)
    if not foreground:
        return
    _console.print("Press Ctrl-C to stop it.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        supervisor.wait()
    except KeyboardInterrupt:
        control.stop(directory)
        _console.print("Stopped.")


@app.command()
def down(
    wipe: Annotated[bool, typer.Option("--wipe", help="Also remove all data: functions, tasks, results.")] = False,
) -> None:
    """Stop the tier. Its data stays for the next ``up``."""
    directory = _directory()
    stopped = control.stop(directory)
    _console.print("Stopped." if stopped else "The local tier is not running.")
    if wipe:
        control.wipe(directory)
        _console.print(f"Removed {directory}.")


@app.command()
def status(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """Show whether the tier runs, where, and with which processes. Exits with 3 when it does not run."""
    directory = _directory()
    running = control.is_up(directory)
    state = TierState.read(directory)
    if as_json:
        secret = {"token", "tokens", "database_url", "queue_url"}
        shown = {key: value for key, value in dataclasses.asdict(state).items() if key not in secret} if state else {}
        typer.echo(json.dumps({"running": running, "directory": str(directory), **shown}))
    elif running and state:
        table = Table("process", "pid", "restarts", title=f"Local tier, {state.phase}, {state.api_url}")
        for name, process in state.processes.items():
            table.add_row(name, str(process.pid or "down"), str(process.restarts))
        _console.print(table)
        _console.print(f"Logs: {directory / 'logs'}")
    else:
        _console.print("The local tier is not running; `farcall local up` starts it.")
    if not running:
        raise typer.Exit(3)


def _configure(state: TierState) -> None:
    """Write ``config.toml`` unless the user has one that points elsewhere."""
    path = _home() / "config.toml"
    lines = f'# Written by `farcall local up`.\n[default]\napi_url = "{state.api_url}"\ntoken = "{state.token}"\n'
    if not path.exists() or state.token in path.read_text():  # ours: the port may have changed
        path.touch(mode=0o600)
        path.write_text(lines)
        _console.print(f"{path} points at it.")
    else:
        _console.print(f"{path} is left as it is; for this tier: export FARCALL_API_URL={state.api_url}")
