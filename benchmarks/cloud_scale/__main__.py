"""Figures of ``docs/scale.md``: ``python -m benchmarks.cloud_scale`` runs the simulation and writes them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from benchmarks.cloud_scale.inputs import Inputs, deployment, read_inputs
from benchmarks.cloud_scale.load import Load, database_gib, forwarders_needed, most_endpoints, most_tasks, uses
from benchmarks.cloud_scale.queueing import latency
from benchmarks.cloud_scale.storm import storm
from benchmarks.report import table, with_section
from farcall_infra.prices import load_prices

PAGE: Final = Path(__file__).parents[2] / "docs" / "scale.md"
_PROFILE: Final = "facility"
_SCENARIOS: Final[Mapping[str, Load]] = {
    "1,000 endpoints": Load(1_000, 0),
    "100,000 endpoints": Load(100_000, 0),
    "1,000,000 endpoints": Load(1_000_000, 0),
    "10,000 tasks/s": Load(1_000, 10_000),
}
#: Connections for one unit of a load balancer's price.
_CONNECTIONS_PER_UNIT: Final = 100_000
_RATES: Final = (100, 1_000, 10_000, 20_000, 30_000, 40_000)

#: The cause of each limit, and its remedy.
_CAUSES: Final[Mapping[str, tuple[str, str]]] = {
    "forwarders' connections": (
        "the number that a forwarder was measured with",
        "more forwarders: `-c forwarder.tasks=…`",
    ),
    "forwarders' processors": (
        "heartbeats, maintenance and sweeps of each endpoint; messages of each task",
        "more forwarders; one uses at most one processor",
    ),
    "forwarders' memory": (
        "a CURVE connection and its session",
        "more or larger forwarders: `-c forwarder.memory_mib=…`",
    ),
    "database's connections": (
        "those of the forwarders that this needs, twice while a deployment replaces them; their share is 30 %",
        "`-c database.connections=…`, on a size with 10 MiB for each; `-c forwarder.database_connections=3`",
    ),
    "database's commits": (
        "each forwarder records presence twice a second, and results in batches; each commit reaches the disk",
        "a volume with more IOPS; beyond that, cells",
    ),
    "database's processor, for hours": (
        "a burstable size sustains a part of its processors; the rest is credit",
        "a size that is not burstable: `-c database.instance_type=…`",
    ),
    "database's processor, for minutes": (
        "each task is a row with indexes and some events; each presence is an update",
        "a larger size",
    ),
    "database's disk, after 30 days": (
        "a task stays for 30 days after its end",
        "a shorter retention (`-c limits.retention_days=…`), a larger `database.storage_gib`",
    ),
    "queue's memory, ended tasks": (
        "an ended task is remembered for two minutes, so that it is not queued again",
        "larger nodes: `-c queue.node_type=…`",
    ),
    "queue's memory, one hour of backlog": (
        "tasks wait in memory while their endpoints are offline or full",
        "larger nodes: `-c queue.node_type=…`; lower `limits.max_queue_depth`",
    ),
    "queue's processor": (
        "Valkey runs scripts on one thread",
        "cells: the queue could be sharded, because each endpoint's is one slot",
    ),
    "requests to the API": ("API Gateway's throttle", "`-c api.throttle_rate_per_s=…`, and a quota of the account"),
}


def _shown(share: float) -> str:
    return f"**{share:,.0%}**" if share > 1 else f"{share:.0%}"


def _shares(inputs: Inputs) -> str:
    """Utilisation of each part of the facility profile."""
    size = deployment(_PROFILE)
    by_scenario = [{use.resource: use for use in uses(load, size, inputs)} for load in _SCENARIOS.values()]
    order = sorted(by_scenario[0], key=lambda name: -max(found[name].share for found in by_scenario))
    rows = [(name, *(_shown(found[name].share) for found in by_scenario)) for name in order]
    return table(["utilisation", *_SCENARIOS], rows)


def _breaks(inputs: Inputs) -> str:
    """The limits that each scenario exceeds, with cause and remedy."""
    size = deployment(_PROFILE)
    rows = [
        (scenario, use.resource, f"{use.used:,.1f} of {use.available:,.1f} {use.unit}", *_CAUSES[use.resource])
        for scenario, load in _SCENARIOS.items()
        for use in uses(load, size, inputs)
        if use.share > 1
    ]
    return table(["at", "limit", "required", "cause", "remedy"], rows, numbers=False)


def _sizes(inputs: Inputs) -> str:
    """The sizes that each scenario requires."""
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
                f"{count * size.forwarder_connections:,}",
                f"{count * size.forwarder_vcpus / inputs.limits['fargate_vcpus']:.1f}",
                f"{processor.used:.2f}",
                f"{commits.used:,.0f}",
                f"{database_gib(load, inputs):,.0f}",
            )
        )
    head = (
        "|forwarders|forwarders, US$ a month|load balancer, US$ a month|forwarders' database connections"
        "|multiple of the Fargate quota|database vCPUs|database commits/s|database GiB for 30 days"
    )
    return table(head.split("|"), rows)


def _profiles(inputs: Inputs) -> str:
    """The capacity of each profile."""
    rows = []
    for name in ("hobby", "lab", "facility"):
        size = deployment(name)
        endpoints, first = most_endpoints(size, inputs)
        passing, then = most_tasks(size, inputs, passing=True)
        lasting, last = most_tasks(size, inputs, passing=False)
        rows.append((name, f"{endpoints:,}", first, f"{passing:,}", then, f"{lasting:,}", last))
    head = "profile|endpoints|bounded by|tasks/s for minutes|bounded by|tasks/s day and night|bounded by"
    return table(head.split("|"), rows)


def _storms(inputs: Inputs) -> str:
    """A reconnect storm: all endpoints reconnect at once."""
    size = deployment(_PROFILE)
    rows = []
    for scenario, load in list(_SCENARIOS.items())[:3]:
        sized = dataclasses.replace(size, forwarders=max(size.forwarders, forwarders_needed(load, size, inputs)))
        direct = storm(load.endpoints, sized, inputs, uses_api=False)
        by_api = storm(load.endpoints, sized, inputs, uses_api=True)
        rows.append(
            (
                scenario,
                f"{sized.forwarders}",
                f"{direct.settled_s:.1f} s",
                f"{by_api.most_s:,.0f} s",
                f"{by_api.settled_s:,.0f} s",
                f"{by_api.refused / load.endpoints:.1f}",
            )
        )
    head = (
        "|forwarders|same address: all connected|new addresses: 99 % connected|all connected"
        "|refused requests per endpoint"
    )
    return table(head.split("|"), rows)


def _latencies(inputs: Inputs) -> str:
    """The time of a task in the shared parts."""
    size = deployment(_PROFILE)
    rows = []
    for rate in _RATES:
        found = latency(rate, size, inputs)
        shown = (f"{found.p50_ms:.0f} ms", f"{found.p99_ms:.0f} ms") if found.settled else ("grows", "grows")
        rows.append((f"{rate:,}", *shown))
    return table(["tasks/s", "p50", "p99"], rows)


SECTIONS: Final[Mapping[str, Callable[[Inputs], str]]] = {
    "profiles": _profiles,
    "breaks": _breaks,
    "shares": _shares,
    "sizes": _sizes,
    "storms": _storms,
    "latencies": _latencies,
}


def with_figures(text: str) -> str:
    """The page with the figures of the simulation in its sections."""
    inputs = read_inputs()
    for name, make in SECTIONS.items():
        text = with_section(text, name, make(inputs) + "\n")
    return text


if __name__ == "__main__":
    PAGE.write_text(with_figures(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
