"""``python -m benchmarks.cloud_scale``: simulate, and put the figures into ``docs/scale.md``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.cloud_scale.inputs import Inputs, deployment, read_inputs
from benchmarks.cloud_scale.load import (
    Load,
    database_gib,
    forwarders_needed,
    most_endpoints,
    most_tasks,
    uses,
)
from benchmarks.cloud_scale.queueing import latency
from benchmarks.cloud_scale.storm import storm
from benchmarks.report import filled
from farcall_infra.prices import load_prices

PAGE: Final = Path(__file__).parents[2] / "docs" / "scale.md"
_PROFILE: Final = "facility"
_SCENARIOS: Final[Mapping[str, Load]] = {
    "1,000 endpoints": Load(1_000, 0),
    "100,000 endpoints": Load(100_000, 0),
    "1,000,000 endpoints": Load(1_000_000, 0),
    "10,000 tasks/s": Load(1_000, 10_000),
}
#: What a unit of a load balancer's price carries.
_CONNECTIONS_PER_UNIT: Final = 100_000
_RATES: Final = (100, 1_000, 10_000, 20_000, 30_000, 40_000)

#: Why a part ends where it does, and what to do about it.
_CAUSES: Final[Mapping[str, tuple[str, str]]] = {
    "forwarders' connections": (
        "a forwarder was shown to hold so many and no more",
        "more of them: `-c forwarder.tasks=…`",
    ),
    "forwarders' processors": (
        "heartbeats, upkeep and sweeps of each endpoint; each task's messages",
        "more of them; one uses one processor at most",
    ),
    "forwarders' memory": (
        "a CURVE connection and its session",
        "more of them, or larger: `-c forwarder.memory_mib=…`",
    ),
    "load balancer's ports": (
        "to each forwarder it has so many ports, because peers' addresses are not passed on",
        "more forwarders, long before",
    ),
    "database's commits": (
        "each forwarder records twice a second who is there, and ends in batches; each commit reaches the disk",
        "a volume with more IOPS; beyond that, cells",
    ),
    "database's processor, for hours": (
        "a burstable size may use a part of its processors for good; the rest is credit",
        "a size that is not burstable: `-c database.instance_type=…`",
    ),
    "database's processor, for minutes": (
        "each task is a row with indexes and some events; each presence is an update",
        "a larger size",
    ),
    "database's disk, after 30 days": (
        "a task stays for 30 days after its end",
        "keep tasks for a shorter time (`-c limits.retention_days=…`), a larger `database.storage_gib`",
    ),
    "queue's memory, what has ended": (
        "an end is remembered for two minutes, so that nobody queues its task again",
        "larger nodes: `-c queue.node_type=…`",
    ),
    "queue's memory, an hour behind": (
        "tasks wait in memory while their endpoints are away or full",
        "larger nodes: `-c queue.node_type=…`; lower `limits.max_queue_depth`",
    ),
    "queue's processor": (
        "Valkey runs scripts on one thread",
        "cells: an endpoint's queue is one slot, so it could be sharded",
    ),
    "requests to the API": ("API Gateway's throttle", "`-c api.throttle_rate_per_s=…`, and a quota of the account"),
}


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True) -> str:
    rule = ["---", *["--:" if numbers else "---"] * (len(head) - 1)]
    lines = [" | ".join(head), " | ".join(rule), *(" | ".join(row) for row in rows)]
    return "".join(f"| {line} |\n" for line in lines)


def _shown(share: float) -> str:
    return f"**{share:,.0%}**" if share > 1 else f"{share:.0%}"


def _shares(inputs: Inputs) -> str:
    """How full each part of the facility profile is."""
    size = deployment(_PROFILE)
    by_scenario = [{use.resource: use for use in uses(load, size, inputs)} for load in _SCENARIOS.values()]
    order = sorted(by_scenario[0], key=lambda name: -max(found[name].share for found in by_scenario))
    rows = [(name, *(_shown(found[name].share) for found in by_scenario)) for name in order]
    return _table(["of what there is", *_SCENARIOS], rows)


def _breaks(inputs: Inputs) -> str:
    """What breaks first, second, … and why."""
    size = deployment(_PROFILE)
    rows = [
        (scenario, use.resource, f"{use.used:,.1f} of {use.available:,.1f} {use.unit}", *_CAUSES[use.resource])
        for scenario, load in _SCENARIOS.items()
        for use in uses(load, size, inputs)
        if use.share > 1
    ]
    return _table(["at", "limit", "wanted", "cause", "remedy"], rows, numbers=False)


def _sizes(inputs: Inputs) -> str:
    """What it takes instead."""
    size, prices = deployment(_PROFILE), load_prices()
    rows = []
    for scenario, load in _SCENARIOS.items():
        count = forwarders_needed(load, size, inputs)
        found = {use.resource: use for use in uses(load, dataclasses.replace(size, forwarders=count), inputs)}
        processor, commits = found["database's processor, for minutes"], found["database's commits"]
        hourly = size.forwarder_vcpus * prices.fargate.cpu_usd_per_hour
        hourly += size.forwarder_mib / 1024 * prices.fargate.memory_usd_per_gib_hour
        units = max(1, math.ceil(load.endpoints / _CONNECTIONS_PER_UNIT))
        balancer_hourly = prices.network.balancer_usd_per_hour + units * prices.network.balancer_unit_usd_per_hour
        rows.append(
            (
                scenario,
                f"{count:,}",
                f"{count * hourly * prices.hours_per_month:,.0f}",
                f"{balancer_hourly * prices.hours_per_month:,.0f}",
                f"{count * size.forwarder_vcpus / inputs.limits['fargate_vcpus']:.1f}",
                f"{processor.used:.2f}",
                f"{commits.used:,.0f}",
                f"{database_gib(load, inputs):,.0f}",
            )
        )
    head = [
        "",
        "forwarders",
        "their US$ a month",
        "the load balancer's",
        "times the Fargate quota",
        "database's vCPUs",
        "its commits/s",
        "its GiB for 30 days",
    ]
    return _table(head, rows)


def _profiles(inputs: Inputs) -> str:
    """How far each profile goes as it is."""
    rows = []
    for name in ("hobby", "lab", "facility"):
        size = deployment(name)
        endpoints, first = most_endpoints(size, inputs)
        passing, then = most_tasks(size, inputs, passing=True)
        lasting, last = most_tasks(size, inputs, passing=False)
        rows.append((name, f"{endpoints:,}", first, f"{passing:,}", then, f"{lasting:,}", last))
    head = [
        "profile",
        "endpoints",
        "bounded by",
        "tasks/s for minutes",
        "bounded by",
        "tasks/s day and night",
        "bounded by",
    ]
    return _table(head, rows)


def _storms(inputs: Inputs) -> str:
    """All endpoints come back at once."""
    size = deployment(_PROFILE)
    rows = []
    for scenario, load in list(_SCENARIOS.items())[:3]:
        sized = dataclasses.replace(size, forwarders=max(size.forwarders, forwarders_needed(load, size, inputs)))
        behind = storm(load.endpoints, sized, inputs, asks_api=False)
        anew = storm(load.endpoints, sized, inputs, asks_api=True)
        rows.append(
            (
                scenario,
                f"{sized.forwarders}",
                f"{behind.settled_s:.1f} s",
                f"{anew.most_s:,.0f} s",
                f"{anew.settled_s:,.0f} s",
                f"{anew.turned_away / load.endpoints:.1f}",
            )
        )
    head = [
        "",
        "forwarders",
        "same address: all back",
        "new addresses: 99 % back",
        "all back",
        "requests refused, for each endpoint",
    ]
    return _table(head, rows)


def _latencies(inputs: Inputs) -> str:
    """A task's time in the shared parts."""
    size = deployment(_PROFILE)
    rows = []
    for rate in _RATES:
        found = latency(rate, size, inputs)
        shown = (f"{found.p50_ms:.0f} ms", f"{found.p99_ms:.0f} ms") if found.settled else ("grows", "grows")
        rows.append((f"{rate:,}", *shown))
    return _table(["tasks/s", "p50", "p99"], rows)


SECTIONS: Final[Mapping[str, Callable[[Inputs], str]]] = {
    "profiles": _profiles,
    "breaks": _breaks,
    "shares": _shares,
    "sizes": _sizes,
    "storms": _storms,
    "latencies": _latencies,
}


def with_figures(text: str) -> str:
    """The page with what the simulation gives in the places for it."""
    inputs = read_inputs()
    for name, make in SECTIONS.items():
        text = filled(text, name, make(inputs))
    return text


if __name__ == "__main__":
    PAGE.write_text(with_figures(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
