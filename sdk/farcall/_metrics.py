"""Metrics of OpenTelemetry: latencies of an endpoint's functions, in programs with a meter provider."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from farcall._version import __version__

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider, _Gauge

    from farcall._latencies import LatencyReport

#: Programs that record metrics have imported it.
_LOADED: Final = "opentelemetry.metrics"

#: Name, unit and description of each.
_GAUGES: Final = (
    ("farcall.qos.tasks", "{task}", "Tasks of a function that ended within the window."),
    ("farcall.qos.violations", "{task}", "Those of them that took longer than their latency target."),
    ("farcall.qos.latency", "ms", "Their latency at the endpoint, by quantile."),
    ("farcall.qos.target", "ms", "The latency that they are to hold."),
    ("farcall.qos.weight", "1", "Weight of the processors of their workers."),
)
_QUANTILES: Final = ((0.5, "p50_ms"), (0.75, "p75_ms"), (0.9, "p90_ms"), (0.99, "p99_ms"))


def record_latencies(report: LatencyReport) -> None:
    """Record the numbers of a report, as gauges by function. Does nothing in programs without OpenTelemetry."""
    if _LOADED not in sys.modules:
        return
    from opentelemetry import metrics

    gauges = _gauges(metrics.get_meter_provider())
    for each in report.functions:
        about: dict[str, str | float] = {
            "farcall.endpoint_id": report.endpoint_id,
            "farcall.function": each.function,
            "farcall.function_id": each.function_id,
            "farcall.submitter": each.submitter,
        }
        within = about | {"farcall.window": report.window}
        gauges["farcall.qos.tasks"].set(each.tasks, within)
        gauges["farcall.qos.violations"].set(each.violations, within)
        for part, name in _QUANTILES:
            if (value := getattr(each, name)) is not None:
                gauges["farcall.qos.latency"].set(value, within | {"quantile": part})
        for name, value in (("farcall.qos.target", each.target_ms), ("farcall.qos.weight", each.weight)):
            if value is not None:
                gauges[name].set(value, about)


@functools.lru_cache(maxsize=1)
def _gauges(provider: MeterProvider) -> Mapping[str, _Gauge]:
    """The gauges of a provider, which has each once."""
    meter = provider.get_meter("farcall", __version__)
    return {name: meter.create_gauge(name, unit, description) for name, unit, description in _GAUGES}
