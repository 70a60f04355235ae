"""API connection of a command, and its progress display."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

import typer

from farcall._client import Client

if TYPE_CHECKING:
    from rich.console import Console

#: Short, because a user at a terminal waits for the error.
_RETRY_S: Final = 15.0
_SHOWN_AFTER_S: Final = 1.0


def _connect(api_url: str | None, token: str | None) -> Client:
    return Client(api_url, token, retry_timeout_s=_RETRY_S)


@dataclasses.dataclass
class CommandEnvironment:
    """Environment of a command: how it connects to the API, whether errors are shown with tracebacks, and how it pauses
    for some seconds."""

    connect: Callable[[str | None, str | None], Client] = _connect
    debug: bool = False
    pause: Callable[[float], None] = time.sleep


def command_environment(context: Any) -> CommandEnvironment:
    """The environment of the command of this context."""
    found = context.find_root().ensure_object(CommandEnvironment)
    assert isinstance(found, CommandEnvironment)
    return found


@contextlib.contextmanager
def connected(
    context: typer.Context,
    *,
    api_url: str | None = None,
    token: str | None = None,
    doing: str | None = "calling the API",
) -> Iterator[Client]:
    """A client, with a status line if it takes long; none with ``doing=None``."""
    connect = command_environment(context).connect
    with contextlib.nullcontext() if doing is None else waiting(doing), connect(api_url, token) as client:
        yield client


class _Shown(Protocol):
    def start(self) -> None: ...
    def stop(self) -> None: ...


class _Display:
    """A status line or a progress bar, which is hidden while something else is written. May be used from any thread."""

    def __init__(self, make: Callable[[], _Shown]) -> None:
        self._make = make
        self._shown: _Shown | None = None
        self._lock = threading.RLock()

    def show(self) -> None:
        with self._lock:
            self._shown = self._make()  # here, because it imports rich: most commands end before
            if not _open_line:
                self._shown.start()

    def end(self) -> None:
        with self._lock:
            if self._shown is not None:
                self._shown.stop()
                self._shown = None

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        with self._lock:
            if self._shown is not None:
                self._shown.stop()
            try:
                yield
            finally:
                if self._shown is not None and not _open_line:
                    sys.stdout.flush()
                    self._shown.start()


#: What is shown now; a command shows one thing at a time.
_displays: Final[list[_Display]] = []
#: Not empty while the last line of the terminal has no end: a status line there would erase it.
_open_line: Final[list[str]] = []


@contextlib.contextmanager
def above() -> Iterator[None]:
    """Hide the status line or the progress bar while something is written, so that they never share a line."""
    with _displays[-1].hidden() if _displays else contextlib.nullcontext():
        end_line()
        yield


def write_part(write: Callable[[], None], text: str) -> None:
    """Write text that may end within a line: the next part continues it, and anything else begins a new line."""
    with _displays[-1].hidden() if _displays else contextlib.nullcontext():
        write()
        _open_line[:] = [text] if text and not text.endswith("\n") and sys.stderr.isatty() else []


def end_line() -> None:
    """End the line that a part of an output has left open on the terminal."""
    if _open_line:
        _open_line.clear()
        typer.echo(err=True)


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show a status line after one second, on standard error, if that is a terminal."""

    def make() -> _Shown:
        return _console().status(text)

    with _after_a_second(make):
        yield


@contextlib.contextmanager
def bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar that shows up like :func:`waiting`; call the value with the number of items that are done."""
    done = 0
    draw: Callable[[int], None] | None = None

    def make() -> _Shown:
        nonlocal draw
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        progress = Progress(*columns, console=_console(), transient=True, redirect_stdout=False, redirect_stderr=False)
        drawn = progress.add_task(description, total=total, completed=done)
        draw = functools.partial(_draw, progress, drawn)
        return progress

    def update(count: int) -> None:
        nonlocal done
        done = count
        if draw is not None:
            draw(count)

    with _after_a_second(make):
        yield update


def _draw(progress: Any, drawn: Any, count: int) -> None:
    progress.update(drawn, completed=count)


@contextlib.contextmanager
def _after_a_second(make: Callable[[], _Shown]) -> Iterator[None]:
    if not sys.stderr.isatty():
        yield
        return
    display = _Display(make)
    timer = threading.Timer(_SHOWN_AFTER_S, display.show)
    timer.daemon = True
    _displays.append(display)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        _displays.remove(display)
        display.end()


@functools.cache
def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)
