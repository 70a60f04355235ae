"""What remembering results saves: requests of which a share repeats earlier ones (HPDC 2020, table 3).

    python -m benchmarks.memoization [--requests 10000] [--task-ms 10] [--output FILE]

The whole system on the local tier, with an endpoint of two workers. The paper has 100,000 requests of a second each on
a cluster; two workers need about a minute for 10,000 of 10 ms.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import farcall
from benchmarks.end_to_end import deployment
from benchmarks.machine import circumstances, facts

SHARES: Final = (0, 25, 50, 75, 100)
POOL: Final = 1000
_WITHIN_S: Final = 900


def echo(number: int, seconds: float) -> int:
    """Gives back its argument, after a while."""
    import time

    time.sleep(seconds)
    return number


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--task-ms", type=float, default=10.0)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "memoization.json")
    options = parser.parse_args()
    report: dict[str, Any] = {
        "measured_at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": facts(),
        "requests": options.requests,
        "task_ms": options.task_ms,
        "seconds": {},
    }
    with (
        tempfile.TemporaryDirectory() as directory,
        deployment(Path(directory)) as (_, endpoint, client),
        farcall.Executor(endpoint.endpoint_id, client, batch_size=1000) as executor,
    ):
        executor.memoize = True
        task_s = options.task_ms / 1000
        _run(executor, range(POOL), task_s)  # what repeats will repeat
        fresh = POOL
        for share in SHARES:
            repeats = options.requests * share // 100
            new = range(fresh, fresh + options.requests - repeats)
            fresh = new.stop
            report["seconds"][share] = _run(executor, _mixed(new, repeats), task_s)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(as_table(report))


def _mixed(new: range, repeats: int) -> list[int]:
    rng = random.Random(1)
    numbers = [*new, *(rng.randrange(POOL) for _ in range(repeats))]
    rng.shuffle(numbers)
    return numbers


def _run(executor: farcall.Executor, numbers: Sequence[int], task_s: float) -> float:
    began = time.perf_counter()
    futures = [executor.submit(echo, number, task_s) for number in numbers]
    assert [future.result(_WITHIN_S) for future in futures] == list(numbers)
    return time.perf_counter() - began


def as_table(report: dict[str, Any]) -> str:
    """Markdown."""
    machine, seconds = report["machine"], {int(share): value for share, value in report["seconds"].items()}
    where = f"{machine['cores']} cores of {machine['cpu']}, {circumstances(machine)}"
    what = f"{report['requests']:,} requests of {report['task_ms']:g} ms, 2 workers"
    of_all = [f"{value / seconds[0]:.0%}" for value in seconds.values()]
    lines = [
        f"Measured at {report['measured_at']} on {where}; {what}.",
        "",
        "| repeated requests | " + " | ".join(f"{share} %" for share in seconds) + " |",
        "|---|" + "--:|" * len(seconds),
        "| seconds | " + " | ".join(f"{value:.1f}" for value in seconds.values()) + " |",
        "| share of the time without repeats | " + " | ".join(of_all) + " |",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
