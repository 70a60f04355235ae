"""Graph benchmark driver: runs the experiments on one system, and prints the figures as JSON.

    python -m benchmarks.graphs.driver SYSTEM [--quick]

Runs with the interpreter of the system's environment, so it needs only the system and psutil.
"""

from __future__ import annotations

import argparse
import importlib
import json
from typing import Final

from benchmarks.graphs.measuring import QUICK, Counts, Results

#: Environment (a file of requirements in ``benchmarks/engine/peers``, or None for ours) and module of each system.
SYSTEMS: Final[dict[str, tuple[str | None, str]]] = {
    "farcall": (None, "ours"),
    "Ray": ("ray", "ray_peer"),
    "Dask": ("dask", "dask_peer"),
    "Flask": ("flask", "flask_peer"),
    "farcall, cloud": (None, "cloud"),
    "farcall, two managers": (None, "managers"),
}


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--quick", action="store_true", help="each experiment a few times, to try it out")
    options = parser.parse_args()
    results = Results()
    module = importlib.import_module(f"benchmarks.graphs.{SYSTEMS[options.system][1]}")
    module.measure(results, QUICK if options.quick else Counts())
    print(json.dumps({"figures": results.figures, "missing": results.missing}))


if __name__ == "__main__":
    main()
