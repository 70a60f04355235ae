"""``python -m tests.chaos``: everything that can break breaks while tasks are submitted and run; the counts are exact.

A phase that was in order in an earlier run with the same folder is not run again, unless it is named. The exit status
is 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from farcall_local.postgres_files import forget_database
from tests.chaos.harness import Lab, PhaseResult, Scale
from tests.chaos.phases import PHASES

_COLUMNS = ("accepted", "ended", "unended", "lost", "lost_unstarted", "once_twice", "aborted", "differing")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.chaos")
    parser.add_argument("phases", nargs="*", choices=[[], *PHASES], help=f"all if none is named: {' '.join(PHASES)}")
    parser.add_argument("--tasks", type=int, default=200_000, help="of all phases together")
    parser.add_argument("--directory", type=Path, default=Path("build/chaos"), help="logs, and the results by phase")
    parser.add_argument("--short", action="store_true", help="hangs and outages of seconds, each fault once")
    options = parser.parse_args(arguments)
    directory: Path = options.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    done = {} if options.phases else _earlier(directory)
    results = run_phases(
        [name for name in options.phases or PHASES if name not in done],
        directory=directory,
        tasks=options.tasks,
        short=options.short,
    )
    results = [*done.values(), *results]
    print(table(results))
    return int(any(result.broken for result in results))


def run_phases(names: Sequence[str], *, directory: Path, tasks: int, short: bool) -> list[PhaseResult]:
    """Run some phases, each each with its own tier, and keep the results in ``directory``."""
    results = []
    for name in names:
        phase, percent = PHASES[name]
        scale = Scale(max(100, tasks * percent // 100))
        if short:
            scale = dataclasses.replace(scale, hang_s=3.0, silence_s=5.0, rounds=1, big_results=20, backlog=500)
        result, began = PhaseResult(name), time.monotonic()
        print(f"{time.strftime('%H:%M:%S')} {name}: {scale.tasks} tasks", file=sys.stderr, flush=True)
        place = directory / name
        if place.exists():  # of a run that was cut short: its tasks would be delivered in this one
            forget_database(place / "tier")
            shutil.rmtree(place)
        place.mkdir()
        try:
            with Lab(place, scale) as lab:
                phase(lab, result)
            result.judge()
        except Exception as error:  # noqa: BLE001 - the other phases run
            traceback.print_exc()
            result.broken.append(f"{type(error).__name__}: {str(error).splitlines()[:1]}")
        result.seconds = time.monotonic() - began
        (directory / f"{name}.json").write_text(json.dumps(dataclasses.asdict(result), indent=2))
        results.append(result)
    return results


def _earlier(directory: Path) -> dict[str, PhaseResult]:
    found = {}
    for name in PHASES:
        with contextlib.suppress(FileNotFoundError):
            found[name] = PhaseResult(**json.loads((directory / f"{name}.json").read_text()))
    return {name: result for name, result in found.items() if not result.broken}


def _outcome(result: PhaseResult) -> str:
    if result.broken:
        return "BROKEN"
    return "skipped" if result.skipped else "ok"


def table(results: Sequence[PhaseResult]) -> str:
    """A line for each phase, then what there is to say of it."""
    heads = ("phase", *(column.replace("_", " ") for column in _COLUMNS), "back s (median/max)", "s", "")
    rows = [heads]
    for result in results:
        back = f"{statistics.median(result.back_s):.1f}/{max(result.back_s):.1f}" if result.back_s else "-"
        counts = (str(getattr(result, column)) for column in _COLUMNS)
        rows.append((result.name, *counts, back, f"{result.seconds:.0f}", _outcome(result)))
    totals = (str(sum(getattr(result, column) for result in results)) for column in _COLUMNS)
    rows.append(("all", *totals, "", f"{sum(result.seconds for result in results):.0f}", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for result in results:
        lines += [f"{result.name}: {note}" for note in result.notes]
        lines += [f"{result.name}: {count} ended with {what}" for what, count in result.unexpected.items()]
        lines += [f"{result.name}: BROKEN: {promise}" for promise in result.broken]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
