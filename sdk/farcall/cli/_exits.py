"""How the command line reports errors."""

from __future__ import annotations

import msgspec
import typer

from farcall_common.errors import ErrorRecord, FarcallError


def internal(error: Exception) -> FarcallError:
    """An unexpected exception as an error that can be shown."""
    message = f"{type(error).__name__}: {error}"
    record = ErrorRecord(FarcallError.code, message, "This is a mistake in Farcall; `farcall --debug ...` shows where.")
    return FarcallError(message, record=record)


def show_error(error: FarcallError, *, as_json: bool) -> None:
    """Write an error to standard error: what happened on the worker, if it did, then one line."""
    if as_json:
        typer.echo(msgspec.json.encode({"error": error.record.to_json()}).decode(), err=True)
        return
    for note in getattr(error, "__notes__", ()):
        typer.echo(note, err=True)
    typer.secho("Error:", fg="red", err=True, nl=False)
    typer.echo(f" {' '.join(str(error).split())}", err=True)
