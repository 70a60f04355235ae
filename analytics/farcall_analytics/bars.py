"""Bars: the progress of a job on a terminal, a bar for each stage."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, its tasks that are done, and all of them."""


@contextlib.contextmanager
def shown(progress: Progress | None) -> Iterator[Progress]:
    """What shows the progress of a job: the given function; if there is none, bars where the standard error is a
    terminal, which are gone at the end."""
    if progress is not None or not sys.stderr.isatty():
        yield progress or (lambda *_: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        known = {}

        def update(name: str, done: int, tasks: int) -> None:
            if name not in known:
                known[name] = bars.add_task(name, total=tasks)
            bars.update(known[name], completed=done, total=tasks)

        yield update
