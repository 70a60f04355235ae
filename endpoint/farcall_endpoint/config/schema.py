"""The fields of an endpoint's ``config.yaml``. Words are those of Globus Compute and Parsl wherever they have one."""

from __future__ import annotations

import os
from typing import Annotated, Final, Literal

import msgspec

from farcall_endpoint.config.providers import LocalProviderConfig, ProviderConfig
from farcall_endpoint.config.section import BYTES_PER_GB, FieldProblem, Section, Walltime, walltime_seconds
from farcall_endpoint.manager.slots import Sharing

_MAX_SECONDS: Final = 7 * 86_400
_MAX_RETENTION_S: Final = 366 * 86_400

Gigabytes = Annotated[float, msgspec.Meta(gt=0, le=1_000_000)]
Port = Annotated[int, msgspec.Meta(ge=1024, le=65_535)]


class LimitsConfig(Section, frozen=True, kw_only=True):
    """What no task may exceed. A task that asks for less gets less; a breach ends that task alone."""

    walltime: Annotated[Walltime | None, msgspec.Meta(description="Longest run of one attempt.")] = None
    memory: Annotated[
        Gigabytes | None, msgspec.Meta(description="Most memory of a task with all its processes, in GB.")
    ] = None
    output: Annotated[int, msgspec.Meta(ge=4096, le=2**40, description="Most bytes that a task may print.")] = 2**30

    def __post_init__(self) -> None:
        if self.walltime_s == 0:
            raise FieldProblem("walltime", "no task can run in 00:00:00", fix="leave it out for no limit")

    @property
    def walltime_s(self) -> float | None:
        """Seconds; None is no limit."""
        return None if self.walltime is None else walltime_seconds(self.walltime)

    @property
    def memory_bytes(self) -> int | None:
        """None is no limit."""
        return None if self.memory is None else int(self.memory * BYTES_PER_GB)


class EngineConfig(Section, frozen=True, kw_only=True):
    """How and where tasks are run."""

    type: Annotated[Literal["FarcallEngine"], msgspec.Meta(description="May be left out.")] = "FarcallEngine"
    max_workers_per_node: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=4096)] | None,
        msgspec.Meta(description="Most workers of a node, so most tasks at a time; one for each core if not given."),
    ] = None
    cores_per_worker: Annotated[
        Annotated[float, msgspec.Meta(gt=0, le=4096)] | None,
        msgspec.Meta(description="Cores of each worker, may be a fraction; limits how many workers a node gets."),
    ] = None
    mem_per_worker: Annotated[
        Gigabytes | None,
        msgspec.Meta(description="Memory of each worker in GB; limits how many a node gets, and what a task may use."),
    ] = None
    available_accelerators: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=1024)] | tuple[Annotated[str, msgspec.Meta(min_length=1)], ...],
        msgspec.Meta(
            description="Accelerators of a node: their number, or their names. Each worker gets one and sees no other."
        ),
    ] = 0
    cpu_affinity: Annotated[
        Literal["none", "block", "alternating"],
        msgspec.Meta(description="Which cores a worker is bound to: any, neighbours, or every n-th."),
    ] = "none"
    prefetch: Annotated[
        int,
        msgspec.Meta(
            ge=0,
            le=4096,
            description="Most tasks to keep ready behind each running one; 0 is none. Long tasks are never prefetched.",
        ),
    ] = 256
    scheduling: Annotated[
        Literal["random", "round-robin"], msgspec.Meta(description="Which of the nodes with room gets a task.")
    ] = "random"
    working_dir: Annotated[
        str, msgspec.Meta(min_length=1, description="Where tasks run; relative to the endpoint's directory.")
    ] = "tasks_working_dir"
    sandbox: Annotated[
        bool, msgspec.Meta(description="Whether each task runs in a directory of its own, below working_dir.")
    ] = False
    sandbox_retention: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=_MAX_RETENTION_S)] | None,
        msgspec.Meta(
            description="Seconds after the end of a task after which its sandbox is deleted; never if not given."
        ),
    ] = None
    address: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)] | None,
        msgspec.Meta(
            description="Name or IP address at which compute nodes reach this machine; found out if not given."
        ),
    ] = None
    worker_port_range: Annotated[
        tuple[Port, Port] | None,
        msgspec.Meta(description="First and last port on which managers may be awaited; any free one if not given."),
    ] = None
    heartbeat_period: Annotated[
        float, msgspec.Meta(ge=0.1, le=300, description="Seconds between signs of life that the agent gives managers.")
    ] = 10.0
    heartbeat_threshold: Annotated[
        float,
        msgspec.Meta(ge=1, le=3600, description="Seconds of silence after which agent and manager give each other up."),
    ] = 120.0
    drain_period: Annotated[
        float,
        msgspec.Meta(
            ge=0,
            le=_MAX_SECONDS,
            description="Seconds before the end of a block in which no task without a limit starts.",
        ),
    ] = 0.0
    max_idletime: Annotated[
        float,
        msgspec.Meta(ge=0, le=_MAX_SECONDS, description="Seconds without work after which a block is given back."),
    ] = 120.0
    max_block_failures: Annotated[
        int,
        msgspec.Meta(
            ge=1, le=1000, description="Blocks in a row that may fail to bring a manager before tasks fail too."
        ),
    ] = 3
    limits: Annotated[LimitsConfig, msgspec.Meta(description="What no task may exceed.")] = LimitsConfig()
    provider: Annotated[ProviderConfig, msgspec.Meta(description="Where nodes come from.")] = LocalProviderConfig()

    def __post_init__(self) -> None:
        names = self.available_accelerators
        if isinstance(names, tuple) and len(set(names)) < len(names):
            raise FieldProblem("available_accelerators", "an accelerator is listed twice", fix="list each one once")
        if self.sandbox_retention is not None and not self.sandbox:
            raise FieldProblem(
                "sandbox_retention", "there are no sandboxes to delete", fix="set sandbox: true, or remove it"
            )
        if self.worker_port_range is not None and self.worker_port_range[0] > self.worker_port_range[1]:
            raise FieldProblem("worker_port_range", "the first port is above the last", fix="swap them")
        if self.heartbeat_threshold <= self.heartbeat_period:
            raise FieldProblem(
                "heartbeat_threshold",
                f"heartbeat_threshold ({self.heartbeat_threshold:g}) is not more than "
                f"heartbeat_period ({self.heartbeat_period:g}): every pause would be taken for a death",
                fix="make it three periods or more",
            )
        lives_s = self.provider.walltime_s
        if lives_s is not None and self.drain_period >= lives_s:
            raise FieldProblem(
                "drain_period",
                f"drain_period ({self.drain_period:g} s) is not less than the life of a block ({lives_s:g} s)",
                fix="lower drain_period, or raise the provider's walltime",
            )
        if lives_s is not None and self.limits.walltime_s is not None and self.limits.walltime_s > lives_s:
            raise FieldProblem(
                "limits",
                f"limits.walltime ({self.limits.walltime}) is longer than the life of a block ({lives_s:g} s)",
                fix="lower limits.walltime, or raise the provider's walltime",
            )

    @property
    def slots(self) -> int:
        """Workers of a node like this one, as far as that can be said here."""
        return self.sharing.guess(len(os.sched_getaffinity(0)))

    @property
    def accelerators(self) -> tuple[str, ...]:
        """The names of a node's accelerators."""
        named = self.available_accelerators
        return tuple(map(str, range(named))) if isinstance(named, int) else named

    @property
    def sharing(self) -> Sharing:
        """How each node is shared among its workers."""
        return Sharing(
            max_workers=self.max_workers_per_node,
            cores_per_worker=self.cores_per_worker,
            memory_per_worker_bytes=self.mem_per_worker_bytes,
            accelerators=self.accelerators,
            cpu_affinity=self.cpu_affinity,
        )

    @property
    def mem_per_worker_bytes(self) -> int | None:
        """None if workers have no share of their own."""
        return None if self.mem_per_worker is None else int(self.mem_per_worker * BYTES_PER_GB)


class Config(Section, frozen=True, kw_only=True):
    """The whole file."""

    display_name: Annotated[
        str | None, msgspec.Meta(description="What others see; the endpoint's name if not given.")
    ] = None
    engine: Annotated[EngineConfig, msgspec.Meta(description="How and where tasks are run.")] = EngineConfig()
    fair_share: Annotated[
        dict[Annotated[str, msgspec.Meta(min_length=1)], Annotated[int, msgspec.Meta(ge=1, le=1000)]],
        msgspec.Meta(
            max_length=1000,
            description="Weights by identity: how many tasks a submitter gets for each one of another, while several "
            "have tasks here; 1 for those not named.",
        ),
    ] = msgspec.field(default_factory=dict)
    heartbeat_period: Annotated[
        float, msgspec.Meta(ge=0.1, le=300, description="Seconds between signs of life to the cloud.")
    ] = 30.0
    blobs: Annotated[
        Literal["auto", "direct", "relay"],
        msgspec.Meta(
            description="How large arguments and results travel: direct to the blob store, relay through the forwarder "
            "where the site allows nothing else, auto finds out."
        ),
    ] = "auto"
    transfer_memory: Annotated[
        int,
        msgspec.Meta(
            ge=16,
            le=1_000_000,
            description="Memory for large arguments and results on their way through the agent, in MB; others wait.",
        ),
    ] = 256
    shutdown_grace: Annotated[
        float,
        msgspec.Meta(ge=0, le=3600, description="Seconds that running tasks get to finish when the endpoint stops."),
    ] = 5.0
    log_format: Annotated[
        Literal["text", "json"], msgspec.Meta(description="Log lines for people, or for programs.")
    ] = "text"
    log_max_bytes: Annotated[
        int, msgspec.Meta(ge=10_000, le=2**40, description="Size at which a log file is put aside.")
    ] = 10 * 2**20
    log_backups: Annotated[
        int, msgspec.Meta(ge=1, le=100, description="How many files put aside are kept of each log.")
    ] = 4
    debug: Annotated[bool, msgspec.Meta(description="Log more.")] = False
