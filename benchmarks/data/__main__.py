"""Data benchmarks: ``python -m benchmarks.data [SUBJECT ...] [--quick] [--full] [--rounds N]``.

Each subject is a module of this package with ``measure``, one round of it, ``as_table``, and ``draw``
if it has a picture.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Final

from benchmarks.report import RESULTS, new_report, save

SUBJECTS: Final = ("files", "nodes", "objects", "communication")


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one short round, which is printed and not written")
    parser.add_argument("--full", action="store_true", help="add what takes minutes")
    options = parser.parse_args()
    if unknown := set(options.subjects) - set(SUBJECTS):
        parser.error(f"no subject {', '.join(sorted(unknown))}; there are {', '.join(SUBJECTS)}")
    for name in options.subjects or SUBJECTS:
        subject = importlib.import_module(f"benchmarks.data.{name}")
        rounds = []
        for number in range(1 if options.quick else options.rounds):
            print(f"{name}, round {number + 1} …", file=sys.stderr, flush=True)
            rounds.append(subject.measure(quick=options.quick, full=options.full and number == 0))
        report = new_report(rounds=rounds)
        if options.quick:
            print(subject.as_table(report))
        else:
            path = RESULTS / f"{name}.json"
            if hasattr(subject, "draw"):
                subject.draw(report, path.with_suffix(".png"))
            save(report, path, subject.as_table)


if __name__ == "__main__":
    main()
