"""Display of objects in notebooks, and progress bars."""

from __future__ import annotations

import concurrent.futures
import datetime as dt
import importlib
import operator
import reprlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

_LONGEST: Final = 200
_REDRAW_S: Final = 0.1
_ROWS: Final = 100

_short: Final = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = _LONGEST


def card(heading: str, fields: Mapping[str, object]) -> str:
    """HTML with a heading and fields; None and empty text are left out."""
    import html  # here: only notebooks need it

    rows = "".join(
        f'<tr><th style="text-align:left">{html.escape(name)}</th>'
        f'<td style="text-align:left">{html.escape(str(value))}</td></tr>'
        for name, value in fields.items()
        if value is not None and value != ""
    )
    return f"<b>{html.escape(heading)}</b><table>{rows}</table>"


def local_time(at: float | None) -> str:
    """An instant in epoch seconds as local date and time; empty for None."""
    if at is None:
        return ""
    try:
        return dt.datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):  # an endpoint may report anything
        return str(at)


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """HTML with a column for each field that a row has a value for."""
    import html

    def cells(tag: str, texts: Iterable[str]) -> str:
        return "".join(f'<{tag} style="text-align:left">{html.escape(text)}</{tag}>' for text in texts)

    shown = [_readable(row) for row in rows[:_ROWS]]
    names = list(dict.fromkeys(name for row in shown for name in row))
    lines = [cells("th", names), *(cells("td", (row.get(name, "") for name in names)) for row in shown)]
    more = f"<p>and {len(rows) - _ROWS} more</p>" if len(rows) > _ROWS else ""
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>{more}" if rows else "<i>none</i>"


def _readable(fields: Mapping[str, object]) -> dict[str, str]:
    """Fields as text: instants in local time, without those that are empty."""
    readable = {}
    for name, value in fields.items():
        if value is None or value in ("", {}, []):
            continue
        is_instant = isinstance(value, float) and (name == "at" or name.endswith("_at"))
        text = local_time(cast("float", value)) if is_instant else value if isinstance(value, str) else str(value)
        readable[name] = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
    return readable


class Record(dict[str, Any]):
    """A dictionary that notebooks show as a table."""

    def _repr_html_(self) -> str:
        name = next((str(self[name]) for name in ("display_name", "name", "status") if self.get(name)), "")
        return card(name, _readable(self))


class Records(list[dict[str, Any]]):
    """A list of dictionaries that notebooks show as a table."""

    def _repr_html_(self) -> str:
        return table(self)


def shortened(value: Any) -> str:
    """The repr of a value, shortened."""
    return _short.repr(value)


T = TypeVar("T")


def track(
    work: Iterable[T], description: str = "working", *, total: int | None = None, show: bool | None = None
) -> Iterator[T]:
    """Iterate over futures as they complete, or through any other iterable in its own order, under a progress bar.

    ::

        for future in track([executor.submit(f, x) for x in xs], "simulating"):
            use(future.result())
        results = list(track(executor.map(f, xs), "simulating", total=len(xs)))

    :param total: number of items; needed for iterables without a length.
    :param show: whether to draw the bar; default: if standard error is a terminal or a notebook.
    """
    if isinstance(work, list | tuple | set | frozenset) and all(
        isinstance(each, concurrent.futures.Future) for each in work
    ):
        total = len(work)
        futures = cast("Iterable[concurrent.futures.Future[object]]", work)
        work = cast("Iterable[T]", concurrent.futures.as_completed(futures))
    return _drawn(work, description, total, show)


def _drawn(work: Iterable[T], description: str, total: int | None, show: bool | None) -> Iterator[T]:
    # rich takes as long to load as the rest of the package together.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if console.is_jupyter and show is not False:
        yield from _drawn_in_notebook(work, description, total or operator.length_hint(work))
        return
    if show is None:
        show = console.is_terminal
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not show) as progress:
        yield from progress.track(work, total=total, description=description)


def _drawn_in_notebook(work: Iterable[T], description: str, total: int) -> Iterator[T]:
    """A line that is replaced with each step: rich's bar needs ipywidgets, which not every kernel has, and leaves
    nothing in a stored notebook."""
    ipython: Any = importlib.import_module("IPython.display")
    began_at = drawn_at = time.monotonic()
    shown = ipython.display(_bar(description, 0, total, 0.0), raw=True, display_id=True)
    count = 0
    try:
        for each in work:
            yield each
            count += 1
            now = time.monotonic()
            if now - drawn_at >= _REDRAW_S:
                shown.update(_bar(description, count, total, now - began_at), raw=True)
                drawn_at = now
    finally:
        shown.update(_bar(description, count, total, time.monotonic() - began_at), raw=True)


def _bar(description: str, count: int, total: int, elapsed_s: float) -> dict[str, str]:
    """The bar as HTML and as text; without an end if ``total`` is 0."""
    import html

    done = f"{f'{count}/{total}' if total else count}, {elapsed_s:.1f} s"
    value = f' max="{total}" value="{count}"' if total else ""
    return {
        "text/html": f"{html.escape(description)} <progress{value}></progress> {done}",
        "text/plain": f"{description} {done}",
    }
