"""Cost of sealed calls: round trips of 1 kB and transfers of 10 MB, sealed and not, in turns.

    python -m benchmarks.sealed [--round-trips 300] [--transfers 20] [--output FILE]

The whole system on the local tier. A transfer is a call with 10 MB of arguments that returns them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final, Literal

import farcall
from benchmarks.end_to_end import deployment
from benchmarks.report import Figure, figure_table, new_report, parse_options, save

_TIMEOUT_S: Final = 120
_WARM_UP: Final = 5
_Mode = Literal["off", "required"]
_MODES: Final[tuple[_Mode, ...]] = ("off", "required")


def echo(data: bytes) -> bytes:
    """Return the argument."""
    return data


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--round-trips", type=int, default=300)
    parser.add_argument("--transfers", type=int, default=20)
    options = parse_options(parser, "sealed.json")
    with tempfile.TemporaryDirectory() as directory:
        os.environ["FARCALL_HOME"] = str(Path(directory) / "home")
        with deployment(Path(directory)) as (_, endpoint, client):
            endpoint.stop()
            config = endpoint.directory / "config.yaml"
            config.write_text(config.read_text() + "\nsealed: offered\n")
            endpoint.start()
            with farcall.Executor(endpoint.endpoint_id, client) as executor:
                small = _medians_s(executor, 1_000, options.round_trips)
                large = _medians_s(executor, 10_000_000, options.transfers)
    figures = [
        *_figures("round trip of 1 kB", small, goal=0.10),
        *_figures("transfer of 10 MB there and back", large, goal=0.15),
    ]
    save(new_report(figures=[vars(figure) for figure in figures]), options.output, figure_table)


def _medians_s(executor: farcall.Executor, size_bytes: int, count: int) -> dict[_Mode, float]:
    """The median of each mode. Calls take turns, so that both meet the same conditions."""
    took: dict[_Mode, list[float]] = {mode: [] for mode in _MODES}
    for _ in range(_WARM_UP + count):
        for mode in _MODES:
            data = os.urandom(size_bytes)
            began = time.perf_counter()
            assert executor.options(sealed=mode).submit(echo, data).result(_TIMEOUT_S) == data
            took[mode].append(time.perf_counter() - began)
    return {mode: statistics.median(values[_WARM_UP:]) for mode, values in took.items()}


def _figures(what: str, medians_s: dict[_Mode, float], *, goal: float) -> list[Figure]:
    plain, sealed = medians_s["off"], medians_s["required"]
    cost = sealed / plain - 1
    return [
        Figure(f"{what}, not sealed (median)", plain * 1000, "ms"),
        Figure(f"{what}, sealed (median)", sealed * 1000, "ms"),
        Figure(f"{what}: cost of the seal", cost * 100, "%", f"<= {goal:.0%}", cost <= goal),
    ]


if __name__ == "__main__":
    main()
