"""Experiments of the papers: ``python -m benchmarks.engine.papers`` writes figures and pictures into ``results/``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from benchmarks.engine.papers import shapes
from benchmarks.engine.papers.failure import REPLACED_AT_S, failure
from benchmarks.engine.papers.plots import draw
from benchmarks.engine.papers.table import as_tables
from benchmarks.report import new_report, parse_options, save


def _failures() -> list[dict[str, Any]]:
    return [failure(lasts_s=7.0), failure(lasts_s=11.0, replaced_at_s=REPLACED_AT_S)]


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
    options = parse_options(parser, "engine_papers.json")
    report = new_report()
    for name in options.only:
        began = time.monotonic()
        report[name] = _EXPERIMENTS[name]()
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    draw(report, options.output)
    save(report, options.output, as_tables)


if __name__ == "__main__":
    main()
