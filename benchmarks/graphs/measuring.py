"""Measuring that all systems share: what they run, how often, and what is made of the times. Needs psutil only."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import psutil

from benchmarks.graphs.functions import Stops, corpus, count_words, join

T = TypeVar("T")
Figures = dict[str, float]
"""By experiment, arm and unit: ``edge/returned/1 KB/p50_us``."""

SIZES: Final = {"1 KB": 1_000, "64 KB": 64_000, "1 MB": 1_000_000, "10 MB": 10_000_000}
WORKERS: Final = 2
STAGES: Final = 6
"""Of a chain; its edges are one less, and with those from and to the client one more."""
SMALL: Final = bytes(range(250)) * 4
FAN_OUT: Final = 1_000
LAYERS: Final = 100
WIDTH: Final = 100
NODES: Final = LAYERS * WIDTH
PIECES: Final = 8
LINES: Final = 800
PAUSE_S: Final = 0.002
LOAD_S: Final = 0.3
"""Longer than an import of NumPy."""
TIMEOUT_S: Final = 120


class Results:
    """Figures of one round of a system; ``missing`` says why experiments have none."""

    def __init__(self) -> None:
        self.figures: Figures = {}
        self.missing: dict[str, str] = {}

    def add(self, name: str, experiment: Callable[[], Figures]) -> None:
        """Run an experiment. One that fails has no figures, and the others run."""
        try:
            self.figures |= experiment()
        except Exception as error:  # noqa: BLE001 - what a system lacks shows in its own way
            first, *_ = str(error).strip().splitlines() or [""]
            self.missing[name] = f"{type(error).__name__}: {first[:300]}"


@dataclasses.dataclass(frozen=True)
class Counts:
    """How often each experiment is run."""

    edges: int = 60
    large_edges: int = 25
    chains: int = 300
    fan_outs: int = 12
    applications: int = 150
    layers: int = 4
    slow_layers: int = 1


QUICK: Final = Counts(edges=8, large_edges=4, chains=20, fan_outs=2, applications=10, layers=1)


def edges_us(stops: Stops) -> list[float]:
    """From the return of each function to the beginning of the next."""
    return [(after[1] - before[2]) / 1000 for before, after in itertools.pairwise(stops)]


def crossings(stops: Stops) -> list[bool]:
    """Which of these edges are between two processes."""
    return [before[0] != after[0] for before, after in itertools.pairwise(stops)]


def timed_us(run: Callable[[], T], count: int, *, check: Callable[[T], object]) -> list[float]:
    """How long a function takes, after once without a clock; each result is checked, outside of the time."""
    check(run())
    took: list[float] = []
    for _ in range(count):
        began = time.perf_counter_ns()
        result = run()
        took.append((time.perf_counter_ns() - began) / 1000)
        check(result)
    return took


def expect(wanted: object) -> Callable[[object], None]:
    """A check for one result."""

    def check(result: object) -> None:
        if result != wanted:
            raise AssertionError(f"a result of {str(result)[:200]}, not {str(wanted)[:200]}")

    return check


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of them is."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def chain_figures(
    arm: str, run: Callable[[], tuple[Stops, bytes]], count: int, *, between: bool | None = None
) -> Figures:
    """A chain of :data:`STAGES` that passes :data:`SMALL` on, again and again: each edge inside, and the whole divided
    by all edges.

    :param between: as of :func:`size_figures`.
    """
    inside: list[float] = []

    def check(result: tuple[Stops, bytes]) -> None:
        stops, value = result
        assert len(stops) == STAGES
        assert value == SMALL
        found = zip(edges_us(stops), crossings(stops), strict=True)
        inside.extend(edge for edge, crosses in found if between is None or crosses == between)

    check(run())
    inside.clear()
    took = timed_us(run, count, check=check)
    if not inside:
        raise ValueError("none of the edges is one to measure")
    return {
        f"again/{arm}/edge_us": statistics.median(inside),
        f"again/{arm}/edge_p90_us": quantile(inside, 0.9),
        f"again/{arm}/run_us": statistics.median(took) / (STAGES + 1),
    }


def size_figures(arm: str, run: Callable[[int, int], Stops], counts: Counts, *, between: bool | None) -> Figures:
    """One edge with values of each size.

    :param run: makes one edge, with a size and a mark.
    :param between: only edges between different processes, or only those inside one; None: all.
    """
    figures: Figures = {}
    for name, size in SIZES.items():
        count = counts.edges if size < 10**6 else counts.large_edges
        took: list[float] = []
        first: float | None = None
        for number in range(count + 1):
            stops = run(size, number % 251)
            [crosses] = crossings(stops)
            if between is not None and crosses != between:
                continue
            [edge] = edges_us(stops)
            if first is None:
                first = edge
            else:
                took.append(edge)
        if first is not None and took:
            figures[f"edge/{arm}/{name}/first_us"] = first
            figures[f"edge/{arm}/{name}/p50_us"] = statistics.median(took)
            figures[f"edge/{arm}/{name}/p90_us"] = quantile(took, 0.9)
    return figures


def fan_out_figures(run: Callable[[], int], count: int) -> Figures:
    """Edges per second: each call of a fan-out gets one value and gives one."""
    took = timed_us(run, count, check=expect(sum(range(1, FAN_OUT + 1))))
    per_run_s = statistics.median(took) / 1e6
    return {"fan_out/edges_per_s": 2 * FAN_OUT / per_run_s, "fan_out/call_us": per_run_s * 1e6 / FAN_OUT}


def nested_figures(run: Callable[[], int], count: int) -> Figures:
    """Calls per second that one running function makes."""
    took = timed_us(run, count, check=expect(sum(range(1, FAN_OUT + 1))))
    return {"nested/calls_per_s": FAN_OUT / (statistics.median(took) / 1e6)}


def application_figures(name: str, run: Callable[[], Any], count: int, wanted: object) -> Figures:
    """How long an application takes."""
    return {f"{name}/run_us": statistics.median(timed_us(run, count, check=expect(wanted)))}


def chain(pass_on: Callable[[Any], Any]) -> Any:
    """Stages one after the other, the first with :data:`SMALL`; the last one.

    :param pass_on: makes a call of :func:`~benchmarks.graphs.functions.pass_on` in a system.
    """
    value: Any = ((), SMALL)
    for _ in range(STAGES):
        value = pass_on(value)
    return value


def layers(join: Callable[[Any, Any], T]) -> list[T]:
    """Calls in layers, of which each but those of the first joins two of the layer before it; the last layer.

    :param join: makes a call of :func:`~benchmarks.graphs.functions.join` in a system.
    """
    values = [join(place, 1) for place in range(WIDTH)]
    for _ in range(LAYERS - 1):
        values = [join(values[place], values[(place + 1) % WIDTH]) for place in range(WIDTH)]
    return values


def layers_result() -> list[int]:
    """The values of the last layer."""
    return layers(join)


def text() -> str:
    """The text whose words are counted."""
    return corpus(LINES)


def words_result() -> dict[str, int]:
    """How often its words are in it."""
    return count_words(text())


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """Processor time of processes that are there."""
    total = 0.0
    for process in processes:
        try:
            times: Any = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total
