"""``farcall local``: commands that start, stop and show a cloud tier on this machine, without an AWS account."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import time
import urllib.parse
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from farcall_common.console import new_group, show_fields, show_table
from farcall_common.credentials import config_path, find_home, read_settings, write_settings
from farcall_common.errors import ConfigurationError, FarcallError, error_from_record
from farcall_common.exit_codes import DONE, EXIT_CODES, UNHEALTHY, epilog
from farcall_local import control
from farcall_local.state import TierState

#: The exit codes of these commands.
_EXIT_CODES = {
    **{code: EXIT_CODES[code] for code in (DONE, 2, UNHEALTHY, 69, 70, 78, 130)},
    UNHEALTHY: "the tier does not run (`status`)",
}

app = new_group("A whole cloud tier on this machine, without an AWS account.", name="local", epilog=epilog(_EXIT_CODES))
_console = Console(highlight=False)

#: ``status`` warns if the tier's disk has less free space. A blob has 10 MiB at most.
_LITTLE_BYTES = 256 * 2**20

AsJson = Annotated[bool, typer.Option("--json", help="Write JSON for programs.")]


def _directory() -> Path:
    return find_home(os.environ) / "local"


@app.command()
def up(
    foreground: Annotated[bool, typer.Option("--foreground", help="Run until Ctrl-C, then stop the tier.")] = False,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the API. [default: the last one, or a free one]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Start the tier, and point this user's configuration at it if there is none yet."""
    directory = _directory()
    if control.is_up(directory):
        state = TierState.read(directory)
        if port is not None and state and state.api_url and urllib.parse.urlsplit(state.api_url).port != port:
            raise ConfigurationError(
                f"The local tier is already running at {state.api_url}; its port cannot change while it runs.",
                hint=f"Run `farcall local down`, then `farcall local up --port {port}`.",
            )
        if as_json:
            _show_up(state, directory, was_up=True)
        else:
            _console.print(f"The local tier is already running: {state.api_url if state else directory}")
        return
    began = time.monotonic()
    try:
        supervisor = control.launch(directory, until_eof=foreground, port=port)
    except FarcallError as failure:
        hint = f"{failure.hint} Logs: {directory / 'logs'}".lstrip()
        record = dataclasses.replace(failure.record, hint=hint)
        raise error_from_record(record) from None
    state = TierState.read(directory)
    assert state is not None
    lines = [f"The local tier is up at {state.api_url} ({time.monotonic() - began:.1f} s).", _configure(state)]
    if as_json:
        _show_up(state, directory, was_up=False)
    else:
        _console.print("\n".join(lines), soft_wrap=True)
    if not foreground:
        return
    if not as_json:
        _console.print("Press Ctrl-C to stop it.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        supervisor.wait()
    except KeyboardInterrupt:
        control.stop(directory)
        if not as_json:
            _console.print("Stopped.")


@app.command()
def down(
    wipe: Annotated[bool, typer.Option("--wipe", help="Also remove all data: functions, tasks, results.")] = False,
    as_json: AsJson = False,
) -> None:
    """Stop the tier. Its data remains for the next ``up``."""
    directory = _directory()
    stopped = control.stop(directory)
    if wipe:
        control.wipe(directory)
    if as_json:
        typer.echo(json.dumps({"was_running": stopped, "wiped": wipe, "directory": str(directory)}))
        return
    _console.print("Stopped." if stopped else "The local tier is not running.")
    if wipe:
        _console.print(f"Removed {directory}.")


@app.command()
def status(as_json: AsJson = False) -> None:
    """Show whether the tier runs, its address and its processes. Exits with 3 if it does not run."""
    directory = _directory()
    running = control.is_up(directory)
    state = TierState.read(directory)
    if as_json:
        secret = {"token", "tokens", "database_url", "queue_url"}
        shown = {key: value for key, value in dataclasses.asdict(state).items() if key not in secret} if state else {}
        if directory.exists():
            shown["free_bytes"] = shutil.disk_usage(directory).free
        typer.echo(json.dumps({"running": running, "directory": str(directory), **shown}))
    elif running and state:
        show_fields({"state": state.phase, "address": state.api_url, "logs": directory / "logs"})
        rows = [(name, process.pid or "down", process.restarts) for name, process in state.processes.items()]
        show_table(("process", "pid", "restarts"), rows, title="\nProcesses")
        if (free_bytes := shutil.disk_usage(directory).free) < _LITTLE_BYTES:
            _console.print(
                f"The disk of {directory} is almost full: {free_bytes // 2**20} MiB are free. Large arguments and"
                " results cannot be stored, and without space for PostgreSQL no tasks. Free some space.",
                soft_wrap=True,
            )
    else:
        _console.print("The local tier is not running; `farcall local up` starts it.")
    if not running:
        raise typer.Exit(UNHEALTHY)


def _show_up(state: TierState | None, directory: Path, *, was_up: bool) -> None:
    api_url = state.api_url if state else None
    typer.echo(json.dumps({"api_url": api_url, "was_running": was_up, "directory": str(directory)}))


def _configure(state: TierState) -> str:
    """Write ``config.toml`` unless the user has one for another API; returns a message for the user."""
    home = find_home(os.environ)
    path = config_path(home)
    values = {"api_url": state.api_url, "token": state.token}
    try:
        # Ours, if it has the token: the port may have changed.
        if not path.exists() or read_settings(home).get("token") == state.token:
            write_settings(home, values, comment="Written by `farcall local up`.")
            return f"{path} points at it."
        reason = f"{path} is unchanged"
    except ConfigurationError as error:
        reason = error.record.message
    return f"{reason}; to use this tier: export FARCALL_API_URL={state.api_url}"
