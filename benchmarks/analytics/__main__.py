"""Analytics: ``python -m benchmarks.analytics [--quick]``: methods of exchange by the model, a sort beside peers."""

from __future__ import annotations

import argparse
from typing import Any, Final

from benchmarks.analytics import direct, experiments, paper, peers, plot, shaped, unshaped
from benchmarks.analytics.table import as_tables
from benchmarks.report import Report, new_report, parse_options, save

_SMALL: Final[dict[str, Any]] = {"size": 1e6, "parts": 8}
_QUICK: Final = tuple(each for each in shaped.POINTS if each.size == 30e6 and each.parts == 8)


def measure(*, quick: bool, repetitions: int = 1) -> Report:
    """All of it; the many sorts on shaped storages half as often."""
    return new_report(
        shaped=shaped.measure(_QUICK if quick else shaped.POINTS, repetitions=max(1, repetitions // 2)),
        unshaped=unshaped.measure(repetitions=repetitions, scale=0.02 if quick else 1.0),
        direct=direct.measure(1, **(_SMALL if quick else {})),
        experiments=experiments.measure(repetitions=repetitions, scale=0.1 if quick else 1.0),
        paper={"sorts": paper.predictions(), "wider": paper.wider()},
        peers=peers.measure(
            records=100_000 if quick else peers.RECORDS,
            repetitions=repetitions,
            peers=peers.INSTALLED if quick else peers.PEERS,
        ),
    )


def main() -> None:
    """Measure, write the results, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few points and a small sort, for a test")
    parser.add_argument("--repetitions", type=int, default=4)
    options = parse_options(parser, "analytics.json")
    report = measure(quick=options.quick, repetitions=1 if options.quick else options.repetitions)
    plot.draw(report, options.output.with_suffix(".png"))
    save(report, options.output, as_tables)


if __name__ == "__main__":
    main()
