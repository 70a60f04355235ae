"""Settings: how the jobs of a dataset are run."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from farcall_analytics.job_plans import Limits
from farcall_analytics.model import Method
from farcall_analytics.parquet import COMPRESSIONS
from farcall_analytics.passing import CODECS, Way
from farcall_analytics.planner import Objective
from farcall_common.errors import ConfigurationError
from farcall_common.objects.node_blocks import SCHEME, is_on_nodes

METHODS: Final = (
    Method.SLOW,
    Method.COMBINED,
    Method.TWO_LEVEL,
    Method.FAST,
    Method.HYBRID,
    Method.DIRECT,
    Method.MERGED,
)
"""Methods of exchange that jobs can use."""
_NEEDS_MEMORY: Final = {Method.FAST, Method.HYBRID}
ON_NODES: Final = {Method.DIRECT, Method.MERGED}
"""Methods that use the memory of nodes."""
_LEAST_MEMORY: Final = 10_000
"""Minimum bytes of memory for a task: with less, DataFusion may never end."""
_MORE_THAN_NOTHING: Final = (
    "partitions",
    "most_partitions",
    "share_bytes",
    "tasks_per_call",
    "partition_bytes",
    "task_memory",
    "fast_bytes",
    "deadline_s",
    "budget",
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a job is run.

    :param storage: the address by which tasks pass rows on, which all of them reach.
    :param fast_storage: that of a memory, for the methods ``fast`` and ``hybrid``; of ``direct`` and ``merged``,
        ``node:BYTES`` if the blocks on a node are to take so many at most. What has no room there goes to ``storage``.
    :param method: of all exchanges: ``slow``, ``combined``, ``two-level``, ``fast``, ``hybrid``, ``direct`` or
        ``merged``. None: the model chooses, for each of them.
    :param fast_bytes: of memory for ``hybrid``; None: the model chooses.
    :param pipelined: whether two rounds of ``hybrid`` are done at the same time, in half of that memory each; None: the
        model chooses.
    :param codec: of blocks: ``none``, ``lz4`` or ``zstd``; None: the model chooses.
    :param compression: of the files that are written: ``none``, ``snappy``, ``gzip``, ``lz4`` or ``zstd``.
    :param share_bytes: of a file that one task reads, about.
    :param partition_bytes: of rows that one task puts together, about, from which the number of partitions follows.
    :param partitions: of each exchange. Without these two the model chooses.
    :param most_partitions: of an exchange.
    :param objective: what the model looks for: the ``cheapest`` plan, or the ``fastest``.
    :param deadline_s: for the whole job, which the plan keeps in 95 % of cases. ``budget``: in dollars.
    :param tasks_per_call: that one call runs one after the other: while one computes, the next one reads, and the one
        before it writes. None: up to 8, if workers were measured and there are so many more tasks.
    :param task_memory: bytes from which a task uses the disk.
    :param copies_after: the part of a stage after which tasks that still run are started once more; None: never.
    :param retries: of a task that failed for another reason than the query or its input.
    :raises ConfigurationError: for a method that is none of these, or whose storage or size is missing, and for numbers
        that cannot be.
    :raises ValueError: for a storage or a codec that cannot be; see :class:`~farcall_analytics.passing.Way`.
    """

    storage: str = dataclasses.field(repr=False)  # it may have a password
    fast_storage: str = dataclasses.field(default="", repr=False)
    method: str | None = None
    fast_bytes: float | None = None
    pipelined: bool | None = None
    codec: str | None = None
    compression: str = "snappy"
    share_bytes: float = 64e6
    partition_bytes: float | None = None
    partitions: int | None = None
    most_partitions: int = 1_000
    tasks_per_call: int | None = None
    task_memory: float | None = None
    copies_after: float | None = 0.75
    retries: int = 2
    objective: Objective = "cheapest"
    deadline_s: float | None = None
    budget: float | None = None

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in METHODS:
            raise ConfigurationError(
                f"method: unknown method of exchange {self.method!r}.", hint=f"Choose one of: {', '.join(METHODS)}."
            )
        if self.codec is not None and self.codec not in CODECS:
            raise ConfigurationError(
                f"codec: unknown value {self.codec!r}.", hint=f"Choose one of: {', '.join(CODECS)}."
            )
        if self.compression not in COMPRESSIONS:
            raise ConfigurationError(
                f"compression: unknown value {self.compression!r}.", hint=f"Choose one of: {', '.join(COMPRESSIONS)}."
            )
        if self.objective not in ("cheapest", "fastest"):
            raise ConfigurationError(f"objective: unknown value {self.objective!r}.", hint="Write cheapest or fastest.")
        for name in _MORE_THAN_NOTHING:
            value = getattr(self, name)
            if not (value is None or (isinstance(value, (int, float)) and value > 0)):
                raise ConfigurationError(f"{name}: expected a number above 0, got {value!r}.")
        if self.pipelined not in (None, True, False):
            raise ConfigurationError(f"pipelined: expected True, False or None, got {self.pipelined!r}.")
        if any(isinstance(value, float) for value in (self.partitions, self.most_partitions, self.tasks_per_call)):
            raise ConfigurationError("partitions, most_partitions, tasks_per_call: expected whole numbers.")
        if self.task_memory is not None and self.task_memory < _LEAST_MEMORY:
            raise ConfigurationError(f"task_memory: expected at least {_LEAST_MEMORY:,} bytes.")
        retries: Any = self.retries
        part: Any = self.copies_after
        is_part = part is None or (isinstance(part, (int, float)) and 0 < part <= 1)
        if not (isinstance(retries, int) and retries >= 0 and is_part):
            raise ConfigurationError(
                "retries: expected a whole number from 0 on; copies_after: a number between 0 and 1, or None."
            )
        if self.method in _NEEDS_MEMORY and not self.fast_storage:
            raise ConfigurationError(f"{self.method} needs memory.", hint="Set fast_storage='valkey://HOST:PORT/0'.")
        uses_nodes = self.method in ON_NODES
        if is_on_nodes(self.storage) or (self.fast_storage and is_on_nodes(self.fast_storage) != uses_nodes):
            raise ConfigurationError("node: is the fast_storage of the methods direct and merged, which have no other.")
        self.ways("")

    def ways(self, job: str) -> tuple[Way, ...]:
        """The storages of a job: the first one, the memory of nodes, and the fast one if there is one."""
        nodes = self.fast_storage if is_on_nodes(self.fast_storage) else SCHEME
        ways = Way(self.storage, job=job), Way(nodes, job=job)
        return ways if self.fast_storage in ("", nodes) else (*ways, Way(self.fast_storage, combines=False, job=job))

    def limits(self, tier: str, fast_tier: str, node_tier: str) -> Limits:
        """Return the limits of a plan. ``tier``, ``fast_tier``, ``node_tier``: names of the storages."""
        return Limits(
            tier,
            fast_tier,
            node_tier,
            method=None if self.method is None else Method(self.method),
            codec=self.codec,
            partitions=self.partitions,
            partition_bytes=self.partition_bytes,
            most_partitions=self.most_partitions,
            fast_bytes=self.fast_bytes,
            pipelined=self.pipelined,
            tasks_per_call=self.tasks_per_call,
            copies_after=self.copies_after,
            objective=self.objective,
            deadline_s=self.deadline_s,
            budget=self.budget,
        )
