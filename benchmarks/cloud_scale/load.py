"""Utilisation of each part of a deployment under a steady load."""

from __future__ import annotations

import dataclasses
import math
from typing import Final

from benchmarks.cloud_scale.inputs import Deployment, Inputs

#: Most utilisation of the forwarders that a load needs.
_FULLEST: Final = 0.8
_S_PER_MONTH: Final = 86_400 * 30
_MIB: Final = 2**20
_GIB: Final = 2**30


@dataclasses.dataclass(frozen=True)
class Load:
    """Connected endpoints, and tasks per second of all of them."""

    endpoints: int
    tasks_per_s: float


@dataclasses.dataclass(frozen=True)
class Use:
    """The used and the available amount of a resource, in the same unit."""

    resource: str
    used: float
    available: float
    unit: str

    @property
    def share(self) -> float:
        """The utilisation; above 1 the deployment is too small."""
        return self.used / self.available


def uses(load: Load, size: Deployment, inputs: Inputs) -> list[Use]:
    """The resources of a deployment in descending order of utilisation."""
    task, endpoint, limits = inputs.per_task, inputs.per_endpoint, inputs.limits
    presences_per_s = load.endpoints / inputs.policy["presence_s"]
    # A forwarder records the presences that come due in one interval in one transaction, up to a size.
    due = presences_per_s / size.forwarders * inputs.policy["presence_tick_s"]
    presences_in_one = min(max(due, 1.0), inputs.policy["presence_batch"])
    commits_per_s = presences_per_s / presences_in_one + load.tasks_per_s * task["transactions"]
    database = load.tasks_per_s * task["postgres_us"] + presences_per_s * endpoint["presence_postgres_us"]
    forwarder = load.tasks_per_s * task["forwarder_us"] + load.endpoints * inputs.forwarder["resting_us_per_s"]
    memory_mib = load.endpoints * inputs.forwarder["endpoint_kib"] / 1024
    # The forwarders that the load needs, however many the deployment has.
    needed = max(
        load.endpoints / inputs.forwarder["endpoints"],
        forwarder / 1e6 / size.forwarder_vcpus,
        memory_mib / size.forwarder_mib,
    )
    connections = needed / _FULLEST * size.forwarder_connections
    # A submit and a read for each batch; a request lasts as long as the handler and the database work for it.
    requests_per_s = 2 * load.tasks_per_s / inputs.policy["batch"]
    request_s = inputs.policy["batch"] * (task["api_us"] + task["postgres_us"]) / 1e6
    found = [
        Use("forwarders' connections", load.endpoints, size.forwarders * inputs.forwarder["endpoints"], "endpoints"),
        Use("forwarders' processors", forwarder / 1e6, size.forwarders * size.forwarder_vcpus, "vCPU"),
        Use("forwarders' memory", memory_mib, size.forwarders * size.forwarder_mib, "MiB"),
        Use("database's processor, for hours", database / 1e6, size.database_vcpus * size.database_share, "vCPU"),
        Use("database's processor, for minutes", database / 1e6, size.database_vcpus, "vCPU"),
        Use("database's connections", connections, size.database_connections, "connections"),
        Use("database's commits", commits_per_s, limits["volume_iops"], "/s"),
        Use("database's log", load.tasks_per_s * task["wal_bytes"] / _MIB, limits["volume_mib_per_s"], "MiB/s"),
        Use("queue's processor", load.tasks_per_s * task["valkey_us"] / 1e6, 1.0, "vCPU"),
        Use("requests to the API", requests_per_s, size.requests_per_s, "/s"),
        Use("Lambda's concurrency", requests_per_s * request_s, limits["lambda_concurrency"], "functions"),
        Use("database's disk, after 30 days", database_gib(load, inputs), size.database_gib, "GiB"),
        Use(
            "queue's memory, ended tasks",
            load.tasks_per_s * inputs.policy["marker_s"] * task["marker_bytes"] / _GIB,
            size.queue_gib,
            "GiB",
        ),
        Use(
            "queue's memory, one hour of backlog",
            3600 * load.tasks_per_s * task["waiting_bytes"] / _GIB,
            size.queue_gib,
            "GiB",
        ),
    ]
    return sorted(found, key=lambda use: -use.share)


def forwarders_needed(load: Load, size: Deployment, inputs: Inputs) -> int:
    """The number of forwarders of that size for a load, none of them above 80 % utilisation."""
    by_name = {use.resource: use.share for use in uses(load, dataclasses.replace(size, forwarders=1), inputs)}
    fullest = max(share for name, share in by_name.items() if name.startswith("forwarders'"))
    return max(1, math.ceil(fullest / _FULLEST))


def database_gib(load: Load, inputs: Inputs) -> float:
    """Disk space for the tasks of 30 days, the time for which they are kept."""
    return load.tasks_per_s * _S_PER_MONTH * inputs.per_task["database_bytes"] / _GIB


def most_endpoints(size: Deployment, inputs: Inputs) -> tuple[int, str]:
    """The most idle endpoints of a deployment, and the resource that bounds them."""
    fullest = uses(Load(1_000_000, 0), size, inputs)[0]
    return int(1_000_000 / fullest.share), fullest.resource


def most_tasks(size: Deployment, inputs: Inputs, *, passing: bool) -> tuple[int, str]:
    """The most tasks per second of a deployment, and the resource that bounds them; ``passing``: for minutes, without
    backlog and with a disk that is large enough."""
    lasting = (
        "database's disk, after 30 days",
        "database's processor, for hours",
        "queue's memory, one hour of backlog",
    )
    found = [use for use in uses(Load(0, 1000), size, inputs) if not (passing and use.resource in lasting)]
    return int(1000 / found[0].share), found[0].resource
