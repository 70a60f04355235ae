"""Analytics: ``python -m benchmarks.analytics [--quick]``: methods of exchange by the model, a sort beside peers."""

from __future__ import annotations

import argparse
from typing import Final

from benchmarks.analytics import peers, shaped
from benchmarks.analytics.table import as_tables
from benchmarks.report import new_report, parse_options, save

_QUICK: Final = tuple(each for each in shaped.POINTS if each.size == shaped.SIZES[0] and each.parts == shaped.PARTS[0])


def main() -> None:
    """Measure, write the results, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few points and a small sort, for a test")
    options = parse_options(parser, "analytics.json")
    report = new_report(
        shaped=shaped.measure(_QUICK if options.quick else shaped.POINTS, repetitions=1 if options.quick else 3),
        peers=peers.measure(records=100_000 if options.quick else peers.RECORDS, repetitions=1 if options.quick else 3),
    )
    save(report, options.output, as_tables)


if __name__ == "__main__":
    main()
