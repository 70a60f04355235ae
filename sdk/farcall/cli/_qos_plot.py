"""Plots of a latency report: densities of the latencies by function, and weights over time."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farcall._latencies import FunctionLatency, LatencyReport
from farcall_common.errors import ConfigurationError
from farcall_common.plain_text import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write_png(report: LatencyReport, path: Path) -> None:
    """Write an image of a report: on the left the density of latencies of each function, with its target as a line; on
    the right the weights.

    :raises ConfigurationError: if matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("Plots need the package matplotlib.", hint="Run `pip install matplotlib`.") from error
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    latencies, weights = figure.subplots(1, 2)
    colors = [f"C{number % 10}" for number in range(len(report.functions))]
    for each, color in zip(report.functions, colors, strict=True):
        _draw_latencies(latencies, each, color)
        _draw_weights(weights, each, color)
    latencies.set(xscale="log", xlabel="latency, ms", ylabel="density", title="Latencies, 10 minutes")
    weights.set(xlabel="time", ylabel="weight", title="Weights")
    for axes in (latencies, weights):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.autofmt_xdate() if report.functions else None
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}") from error


def density(histogram: Sequence[tuple[float, float]]) -> list[tuple[float, float, float]]:
    """Buckets of a histogram as ``(from_ms, to_ms, density)``, by the logarithm of the latency: the areas over a
    logarithmic axis add up to 1. Buckets with no tasks between others are those of the next one."""
    known = sorted((upper, count) for upper, count in histogram if upper > 0 and count > 0)
    total = sum(count for _, count in known)
    found = []
    # The first bucket is as wide as the second, or a tenth.
    lower = known[0][0] ** 2 / known[1][0] if len(known) > 1 else (known[0][0] * 0.9 if known else 0.0)
    for upper, count in known:
        width = math.log10(upper) - math.log10(lower) if upper > lower else 0.0
        if width > 0:
            found.append((lower, upper, count / total / width))
        lower = upper
    return found


def _draw_latencies(axes: Axes, latency: FunctionLatency, color: str) -> None:
    label: Any = plain(latency.function) or latency.function_id
    if buckets := density(latency.histogram):
        edges = [buckets[0][0], *(upper for _, upper, _ in buckets)]
        axes.stairs([each for *_, each in buckets], edges, color=color, fill=True, alpha=0.35, label=label)
    if latency.target_ms:
        axes.axvline(latency.target_ms, color=color, linestyle="--", label=f"target of {label}")


def _draw_weights(axes: Axes, latency: FunctionLatency, color: str) -> None:
    if latency.weights:
        at = [dt.datetime.fromtimestamp(at).astimezone() for at, _ in latency.weights]
        values = [weight for _, weight in latency.weights]
        label: Any = plain(latency.function) or latency.function_id
        axes.step(at, values, where="post", color=color, label=label)  # type: ignore[arg-type]
