"""``python -m benchmarks.sdk_bursts CONTESTANT``: bursts of calls on a peer, as JSON on standard output.

Runs with the peer's own interpreter (see :mod:`benchmarks.engine.contestants`).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any, Final

from benchmarks.engine.contestants import CONTESTANTS, Contestant
from benchmarks.engine.functions import noop

WORKERS: Final = 2
#: How many calls are in hand at once, and how often that is measured.
ROUNDS: Final = {1: 300, 10: 100, 100: 40, 1000: 12}
_WARM_UP: Final = 200


def measured(contestant: Contestant, size: int) -> dict[str, float]:
    """From the first submit to the last result of ``size`` no-ops: milliseconds, and tasks per second."""
    took_ms = []
    for _ in range(ROUNDS[size]):
        began = time.perf_counter()
        contestant.gather([contestant.submit(noop) for _ in range(size)])
        took_ms.append((time.perf_counter() - began) * 1000)
    cuts = statistics.quantiles(took_ms, n=100)
    return {"p50_ms": cuts[49], "p99_ms": cuts[98], "per_s": 1000 * size / cuts[49]}


def main(name: str) -> None:
    """Measure, print, stop."""
    contestant = CONTESTANTS[name][1](WORKERS)
    contestant.gather([contestant.submit(noop) for _ in range(_WARM_UP)])
    figures: dict[str, Any] = {str(size): measured(contestant, size) for size in ROUNDS}
    contestant.stop()
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
