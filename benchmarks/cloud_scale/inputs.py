"""Inputs of the simulation: the tables of ``inputs.toml``, and the sizes of the profiles."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any, Final

from farcall_common.database_logins import connection_limit
from farcall_infra.profiles import load_profile

INPUTS: Final = Path(__file__).with_name("inputs.toml")
#: Processors of each database size, and the share of them that a burstable size sustains.
_DATABASE_VCPUS: Final = {
    "t4g.micro": (2, 0.10),
    "t4g.small": (2, 0.20),
    "t4g.medium": (2, 0.20),
    "t4g.large": (2, 0.30),
}
_GIB: Final = {"cache.t4g.micro": 0.5, "cache.t4g.small": 1.37, "cache.m7g.large": 6.38}
_VALKEY_SHARE: Final = 0.75
"""Share of a node's memory for data: the rest is for replication and snapshots."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The tables of ``inputs.toml``, numbers by name."""

    per_task: dict[str, float]
    per_endpoint: dict[str, float]
    forwarder: dict[str, float]
    policy: dict[str, float]
    limits: dict[str, float]


def read_inputs(path: Path = INPUTS) -> Inputs:
    """Read the tables."""
    tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    return Inputs(**tables)


@dataclasses.dataclass(frozen=True)
class Deployment:
    """The size of a deployment. A processor counts as one of those that the costs were measured on.

    ``database_connections`` is the forwarders' share, ``forwarder_connections`` those of one forwarder during a rolling
    deployment, when there are two in its place.
    """

    forwarders: int
    forwarder_vcpus: float
    forwarder_mib: float
    database_vcpus: float
    database_share: float
    database_gib: float
    database_connections: int
    forwarder_connections: int
    queue_gib: float
    requests_per_s: int


def deployment(profile: str) -> Deployment:
    """The deployment of a profile without changes."""
    size = load_profile(profile)
    vcpus, share = _DATABASE_VCPUS[size.database.instance_type]
    return Deployment(
        forwarders=size.forwarder.tasks,
        forwarder_vcpus=min(1.0, size.forwarder.cpu_units / 1024),  # one process uses at most one processor
        forwarder_mib=size.forwarder.memory_mib,
        database_vcpus=vcpus,
        database_share=share,
        database_gib=size.database.storage_gib,
        database_connections=connection_limit("farcall_forwarder", size.database.connections),
        forwarder_connections=size.forwarder.most_database_connections // size.forwarder.tasks,
        queue_gib=_GIB[size.queue.node_type] * _VALKEY_SHARE,
        requests_per_s=size.api.throttle_rate_per_s,
    )
