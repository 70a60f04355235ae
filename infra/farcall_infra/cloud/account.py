"""What there is in an account, as ``farcall cloud`` sees it."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping

__all__ = ["Caller", "Database", "LeftBehind", "Metric", "Queue", "Resource", "Sample", "Stack", "Tasks"]


@dataclasses.dataclass(frozen=True)
class Caller:
    """Who the credentials belong to."""

    account: str
    arn: str


@dataclasses.dataclass(frozen=True)
class Stack:
    """A stack of CloudFormation; ``reason`` is its word on how it came to its status, ``changed_at`` when it was last
    made or updated."""

    name: str
    status: str
    outputs: Mapping[str, str]
    is_protected: bool
    reason: str = ""
    parameters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    changed_at: dt.datetime | None = None


@dataclasses.dataclass(frozen=True)
class Resource:
    """What a stack made: its type, and its physical id."""

    kind: str
    physical_id: str


@dataclasses.dataclass(frozen=True)
class Tasks:
    """How many tasks of a service should run, and do; whether they sleep while nobody needs them, and what ECS said
    last about them."""

    desired: int
    running: int
    may_sleep: bool = False
    last_event: str = ""


@dataclasses.dataclass(frozen=True)
class Database:
    """A database instance; ``storage_gib`` is its disk now, and what its final snapshot will be billed for at most."""

    status: str
    storage_gib: int
    is_protected: bool
    version: str = ""

    @property
    def major_version(self) -> str:
        """That of ``postgres 16.9`` is 16; empty if the version is not known."""
        return self.version.rpartition(" ")[2].partition(".")[0]


@dataclasses.dataclass(frozen=True)
class Queue:
    """A replication group of ElastiCache."""

    status: str
    nodes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric of CloudWatch, how the values of a minute become one, and the name and value of its dimension."""

    namespace: str
    name: str
    statistic: str
    dimension: tuple[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class Sample:
    """A metric's value in the minute that began ``at``."""

    value: float
    at: dt.datetime


@dataclasses.dataclass(frozen=True)
class LeftBehind:
    """Something of a deployment that outlives it, with its size in GiB, and the command that deletes it."""

    what: str
    storage_gib: int
    delete: str
