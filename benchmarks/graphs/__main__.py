"""Graph benchmark: ``python -m benchmarks.graphs [--quick] [--rounds N]``: all systems in turn, table and picture.

Measures edges from one function to the next, repeated graphs, fan-outs, nested calls, large graphs, and two
applications, beside Ray, Dask and functions behind HTTP; then calls through the cloud on the local tier. Each peer has
an environment of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any, Final

from benchmarks.engine.environments import interpreter, run_driver
from benchmarks.graphs.driver import SYSTEMS
from benchmarks.graphs.plot import draw
from benchmarks.graphs.table import as_tables
from benchmarks.report import RESULTS, new_report, parse_options, save

_RESULTS: Final = "graphs.json"


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round, which is printed and not written")
    options = parse_options(parser, _RESULTS)
    report = new_report(rounds={name: [] for name in options.only})
    for _ in range(1 if options.quick else options.rounds):
        for name in options.only:
            found = _run(name, quick=options.quick)
            if found is not None:
                report["rounds"][name].append(found)
    if options.quick and options.output == RESULTS / _RESULTS:
        print(as_tables(report))
        return
    draw(report, options.output.with_suffix(".png"))
    save(report, options.output, as_tables)


def _run(name: str, *, quick: bool) -> dict[str, Any] | None:
    """One round of one system; None, and a line on standard error, if it failed."""
    print(f"{name} …", file=sys.stderr, flush=True)
    arguments = [name, "--quick"] if quick else [name]
    try:
        return run_driver(interpreter(SYSTEMS[name][0]), *arguments, driver="benchmarks.graphs.driver")
    except (subprocess.SubprocessError, ValueError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return None


if __name__ == "__main__":
    main()
