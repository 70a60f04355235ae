"""Memoization benchmark: completion time by the share of repeated requests (HPDC 2020, table 3).

    python -m benchmarks.memoization [--requests 10000] [--task-ms 10] [--output FILE]

The whole system on the local tier, with an endpoint of two workers. The paper has 100,000 requests of one second on a
cluster; two workers need about a minute for 10,000 of 10 ms.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import farcall
from benchmarks.end_to_end import deployment
from benchmarks.report import Report, heading, new_report, page, parse_options, save, table

SHARES: Final = (0, 25, 50, 75, 100)
POOL: Final = 1000
_TIMEOUT_S: Final = 900


def echo(number: int, seconds: float) -> int:
    """Return the number after a delay."""
    import time

    time.sleep(seconds)
    return number


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--task-ms", type=float, default=10.0)
    options = parse_options(parser, "memoization.json")
    report = new_report(requests=options.requests, task_ms=options.task_ms, seconds={})
    with (
        tempfile.TemporaryDirectory() as directory,
        deployment(Path(directory)) as (_, endpoint, client),
        farcall.Executor(endpoint.endpoint_id, client, batch_size=1000) as executor,
    ):
        executor.memoize = True
        task_s = options.task_ms / 1000
        _run(executor, range(POOL), task_s)  # the results that later requests repeat
        fresh = POOL
        for share in SHARES:
            repeats = options.requests * share // 100
            new = range(fresh, fresh + options.requests - repeats)
            fresh = new.stop
            report["seconds"][share] = _run(executor, _mixed(new, repeats), task_s)
    save(report, options.output, as_table)


def _mixed(new: range, repeats: int) -> list[int]:
    rng = random.Random(1)
    numbers = [*new, *(rng.randrange(POOL) for _ in range(repeats))]
    rng.shuffle(numbers)
    return numbers


def _run(executor: farcall.Executor, numbers: Sequence[int], task_s: float) -> float:
    began = time.perf_counter()
    futures = [executor.submit(echo, number, task_s) for number in numbers]
    assert [future.result(_TIMEOUT_S) for future in futures] == list(numbers)
    return time.perf_counter() - began


def as_table(report: Report) -> str:
    """The times as Markdown."""
    seconds = {int(share): value for share, value in report["seconds"].items()}
    return page(
        heading(report, f"{report['requests']:,} requests of {report['task_ms']:g} ms, 2 workers"),
        table(
            ["repeated requests", *(f"{share} %" for share in seconds)],
            [
                ["seconds", *(f"{value:.1f}" for value in seconds.values())],
                ["share of the time without repeats", *(f"{value / seconds[0]:.0%}" for value in seconds.values())],
            ],
        ),
    )


if __name__ == "__main__":
    main()
