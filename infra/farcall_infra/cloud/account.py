"""Data types for the AWS resources that ``farcall cloud`` reads."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Caller:
    """The owner of the credentials."""

    account: str
    arn: str


@dataclasses.dataclass(frozen=True)
class Stack:
    """A CloudFormation stack. ``reason`` is CloudFormation's explanation of the status, ``changed_at`` the time of the
    last creation or update."""

    name: str
    status: str
    outputs: Mapping[str, str]
    is_protected: bool
    reason: str = ""
    parameters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    changed_at: dt.datetime | None = None


@dataclasses.dataclass(frozen=True)
class Resource:
    """A resource of a stack: its type, and its physical id."""

    kind: str
    physical_id: str


@dataclasses.dataclass(frozen=True)
class Tasks:
    """The tasks of an ECS service: their desired and running count, whether the service may scale to zero when it is
    idle, and ECS's last event."""

    desired: int
    running: int
    may_sleep: bool = False
    last_event: str = ""


@dataclasses.dataclass(frozen=True)
class Database:
    """A database instance. ``storage_gib`` is the size of its disk, and the largest billed size of its final
    snapshot. With ``needs_restart``, its parameter group has values that the server takes only at a restart."""

    status: str
    storage_gib: int
    is_protected: bool
    version: str = ""
    needs_restart: bool = False

    @property
    def major_version(self) -> str:
        """For ``postgres 16.9`` this is 16; empty if the version is unknown."""
        return self.version.rpartition(" ")[2].partition(".")[0]


@dataclasses.dataclass(frozen=True)
class Queue:
    """A replication group of ElastiCache."""

    status: str
    nodes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Metric:
    """A CloudWatch metric, its statistic for one minute, and the name and value of its dimension."""

    namespace: str
    name: str
    statistic: str
    dimension: tuple[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class Sample:
    """A metric's value in the minute that starts ``at``."""

    value: float
    at: dt.datetime


@dataclasses.dataclass(frozen=True)
class LeftBehind:
    """A resource that outlives its deployment, with its size in GiB, and the command that deletes it."""

    what: str
    storage_gib: int
    delete: str
