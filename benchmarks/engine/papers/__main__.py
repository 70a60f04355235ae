"""``python -m benchmarks.engine.papers``: the papers' experiments; figures and plots into ``results/``."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.engine.papers import shapes
from benchmarks.engine.papers.failure import RETURNS_AT_S, failure
from benchmarks.engine.papers.plots import draw
from benchmarks.engine.papers.table import as_tables
from benchmarks.machine import facts

_RESULTS: Final = Path(__file__).parents[2] / "results"


def _failures() -> list[dict[str, Any]]:
    return [failure(lasts_s=7.0), failure(lasts_s=11.0, returns_at_s=RETURNS_AT_S)]


_EXPERIMENTS: Final[Mapping[str, Callable[[], Sequence[Mapping[str, Any]]]]] = {
    "batching": shapes.batching,
    "prefetching": shapes.prefetching,
    "strong_scaling": shapes.strong_scaling,
    "weak_scaling": shapes.weak_scaling,
    "failure": _failures,
}


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=_EXPERIMENTS, default=list(_EXPERIMENTS))
    parser.add_argument("--output", type=Path, default=_RESULTS / "engine_papers.json")
    options = parser.parse_args()
    report: dict[str, Any] = {
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": facts(),
    }
    for name in options.only:
        began = time.monotonic()
        report[name] = _EXPERIMENTS[name]()
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    draw(report, options.output)
    print(as_tables(report))


if __name__ == "__main__":
    main()
