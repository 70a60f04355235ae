"""Schema of an endpoint's ``config.yaml``. Fields are named as in Globus Compute and Parsl where these have them."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from farcall_common.credentials import expanded
from farcall_common.environments import PREFIXES, Environment
from farcall_common.errors import ConfigurationError, did_you_mean
from farcall_common.limits import MAX_KEPT_OUTPUT_BYTES
from farcall_common.payload import DATA_ONLY, DATA_STRATEGIES, parse_allowed
from farcall_common.worker_share import WorkerShare
from farcall_endpoint.config.data import DataConfig
from farcall_endpoint.config.environments import ContainerType, EnvironmentsConfig
from farcall_endpoint.config.files import FilesConfig
from farcall_endpoint.config.providers import KubernetesProviderConfig, LocalProviderConfig, ProviderConfig
from farcall_endpoint.config.qos import QosConfig
from farcall_endpoint.config.section import BYTES_PER_GB, FieldProblem, Section, Walltime, walltime_seconds
from farcall_endpoint.config.settings import EnvironmentSettings
from farcall_endpoint.host.slots import Sharing

_MAX_SECONDS: Final = 7 * 86_400
_MAX_RETENTION_S: Final = 366 * 86_400

SCHEDULING: Final = ("warming-aware", "random", "round-robin", "bin-packing")
"""Policies that come with the endpoint; others are named ``package.module:Class``."""
_CLASS: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")

Gigabytes = Annotated[float, msgspec.Meta(gt=0, le=1_000_000)]
Port = Annotated[int, msgspec.Meta(ge=1024, le=65_535)]


class LimitsConfig(Section, frozen=True, kw_only=True):
    """Upper limits of every task. A task may request lower ones; a task that exceeds a limit fails."""

    walltime: Annotated[Walltime | None, msgspec.Meta(description="Maximum run time of one attempt.")] = None
    memory: Annotated[
        Gigabytes | None, msgspec.Meta(description="Maximum memory of a task with all its processes, in GB.")
    ] = None
    output: Annotated[int, msgspec.Meta(ge=4096, le=2**40, description="Maximum output of a task in bytes.")] = 2**30
    processes: Annotated[
        int,
        msgspec.Meta(
            ge=0,
            le=4_194_304,
            description="Maximum number of processes and threads of a worker, for tasks of other submitters than the "
            "owner; 0: no limit.",
        ),
    ] = 4096

    def __post_init__(self) -> None:
        if self.walltime_s == 0:
            raise FieldProblem("walltime", "no task can run in 00:00:00", fix="remove it for no limit")

    @property
    def walltime_s(self) -> float | None:
        """Seconds; None is no limit."""
        return None if self.walltime is None else walltime_seconds(self.walltime)

    @property
    def memory_bytes(self) -> int | None:
        """None is no limit."""
        return None if self.memory is None else int(self.memory * BYTES_PER_GB)


class InterfaceConfig(Section, frozen=True, kw_only=True):
    """A network interface of the machine that the agent runs on. It is looked up at each start."""

    interface: Annotated[str, msgspec.Meta(min_length=1, description="Its name, such as ib0 or hsn0.")]


class EngineConfig(Section, frozen=True, kw_only=True):
    """How and where tasks are run."""

    type: Annotated[Literal["FarcallEngine"], msgspec.Meta(description="Optional.")] = "FarcallEngine"
    max_workers_per_node: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=4096)] | None,
        msgspec.Meta(
            description="Maximum number of workers, and so of running tasks, on a node; default: one for each core."
        ),
    ] = None
    cores_per_worker: Annotated[
        Annotated[float, msgspec.Meta(gt=0, le=4096)] | None,
        msgspec.Meta(description="Cores of each worker, may be a fraction; limits the number of workers of a node."),
    ] = None
    mem_per_worker: Annotated[
        Gigabytes | None,
        msgspec.Meta(
            description="Memory of each worker in GB; limits the number of workers of a node, and the memory of a task."
        ),
    ] = None
    available_accelerators: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=1024)] | tuple[Annotated[str, msgspec.Meta(min_length=1)], ...],
        msgspec.Meta(
            description="Accelerators of a node: their number, or their names. Each worker gets one and sees no other."
        ),
    ] = 0
    cpu_affinity: Annotated[
        Literal["none", "block", "alternating"],
        msgspec.Meta(description="Cores that a worker is bound to: all, adjacent ones, or every n-th."),
    ] = "none"
    prefetch: Annotated[
        int,
        msgspec.Meta(
            ge=0,
            le=4096,
            description="Maximum number of tasks to prefetch behind each running one. Long tasks are never prefetched.",
        ),
    ] = 256
    graph_memory: Annotated[
        Gigabytes | None,
        msgspec.Meta(
            description="Memory of a node for values between calls of graphs, in GB; default: a quarter of the node's."
        ),
    ] = None
    graph_disk: Annotated[
        Gigabytes | None,
        msgspec.Meta(
            description="Disk of a node for such values beyond that, in GB, in the working directories of tasks; "
            "default: half of what is free, at most 16."
        ),
    ] = None
    max_tasks_per_worker: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None,
        msgspec.Meta(description="A worker ends after so many tasks; 1: a fresh process for each; default: no limit."),
    ] = None
    scheduling: Annotated[
        str,
        msgspec.Meta(
            description="Selection among the nodes with free capacity: warming-aware (where the task's environment is "
            "warm), random, round-robin, bin-packing, or a class of your own, package.module:Class.",
            extra_json_schema={"examples": [*SCHEDULING, "package.module:Class"]},
        ),
    ] = "warming-aware"
    container_type: Annotated[
        ContainerType | None,
        msgspec.Meta(
            description="Technology of the environment for tasks that name none; default: the endpoint's own Python."
        ),
    ] = None
    container_uri: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)] | None,
        msgspec.Meta(description="With container_type: its image, or the directory of its root or of its Python."),
    ] = None
    container_cmd_options: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)] | None,
        msgspec.Meta(
            description="With container_type: further options of its command, as in a shell; for all containers of "
            "that type."
        ),
    ] = None
    allowed_serializers: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] | None,
        msgspec.Meta(
            description="Serialisation strategies that workers read; default: all, but only JSON for arguments if the "
            "endpoint runs certain functions only."
        ),
    ] = None
    isolation: Annotated[
        Literal["none", "process", "landlock", "bubblewrap", "auto"],
        msgspec.Meta(
            description="Separation of submitters: none shares the worker processes among all of them, process gives "
            "each of them processes, a home and a temporary directory of its own, landlock lets them reach no other "
            "files and processes, bubblewrap hides these, auto is the best that works on a node; where neither of the "
            "last two does, and at every level if the endpoint runs as root, tasks of other submitters than the owner "
            "are refused."
        ),
    ] = "auto"
    readable_paths: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1)], ...],
        msgspec.Meta(
            description="Further files and directories that tasks may read with isolation: landlock or bubblewrap."
        ),
    ] = ()
    pass_environment: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1)], ...],
        msgspec.Meta(
            description="Names of further environment variables for tasks of submitters other than the owner; * stands "
            "for any characters."
        ),
    ] = ()
    working_dir: Annotated[
        str, msgspec.Meta(min_length=1, description="Where tasks run; relative to the endpoint's directory.")
    ] = "tasks_working_dir"
    sandbox: Annotated[
        bool, msgspec.Meta(description="Whether each task runs in a separate directory below working_dir.")
    ] = False
    sandbox_retention: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=_MAX_RETENTION_S)] | None,
        msgspec.Meta(
            description="Seconds after the end of a task after which its sandbox is deleted; never if not given."
        ),
    ] = None
    address: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)] | InterfaceConfig | None,
        msgspec.Meta(
            description="Name or IP address at which compute nodes reach this machine, or {interface: ib0} for the "
            "address of an interface; default: detected."
        ),
    ] = None
    worker_port_range: Annotated[
        tuple[Port, Port] | None,
        msgspec.Meta(description="First and last port for connections of managers; default: any free port."),
    ] = None
    heartbeat_period: Annotated[
        float, msgspec.Meta(ge=0.1, le=300, description="Seconds between heartbeats of the agent to its managers.")
    ] = 10.0
    heartbeat_threshold: Annotated[
        float,
        msgspec.Meta(
            ge=1,
            le=3600,
            description="Seconds without a message after which agent and manager regard each other as lost.",
        ),
    ] = 120.0
    drain_period: Annotated[
        float,
        msgspec.Meta(
            ge=0,
            le=_MAX_SECONDS,
            description="Seconds before the end of a block in which no task without walltime starts.",
        ),
    ] = 0.0
    max_idletime: Annotated[
        float,
        msgspec.Meta(ge=0, le=_MAX_SECONDS, description="Seconds without work after which a block is released."),
    ] = 120.0
    max_block_failures: Annotated[
        int,
        msgspec.Meta(ge=1, le=1000, description="Failed blocks in a row before tasks fail, too."),
    ] = 3
    block_failure_period: Annotated[
        float,
        msgspec.Meta(
            ge=0,
            le=_MAX_SECONDS,
            description="Seconds that these failures span at least; 300 s are enough if the scheduler has refused each "
            "of these blocks. Until then tasks wait.",
        ),
    ] = 3600.0
    limits: Annotated[LimitsConfig, msgspec.Meta(description="Upper limits of every task.")] = LimitsConfig()
    environments: Annotated[
        EnvironmentsConfig, msgspec.Meta(description="Containers, Python prefixes and packages for tasks.")
    ] = EnvironmentsConfig()
    provider: Annotated[ProviderConfig, msgspec.Meta(description="The source of nodes.")] = LocalProviderConfig()

    def __post_init__(self) -> None:
        self._check_container()
        if self.scheduling not in SCHEDULING and _CLASS.fullmatch(self.scheduling) is None:
            raise FieldProblem(
                "scheduling",
                f"{self.scheduling!r} is not a policy",
                fix=did_you_mean(self.scheduling, SCHEDULING)
                or f"write {', '.join(SCHEDULING)}, or package.module:Class for one of your own",
            )
        names = self.available_accelerators
        if isinstance(names, tuple) and len(set(names)) < len(names):
            raise FieldProblem("available_accelerators", "an accelerator is listed twice", fix="list each one once")
        if self.allowed_serializers is not None:
            try:
                parse_allowed(self.allowed_serializers)
            except ConfigurationError as error:
                raise FieldProblem("allowed_serializers", error.record.message, fix=error.hint) from error
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
                f"heartbeat_period ({self.heartbeat_period:g}): every pause would count as a loss",
                fix="make it three periods or more",
            )
        lives_s = self.provider.walltime_s
        if lives_s is not None and self.drain_period >= lives_s:
            raise FieldProblem(
                "drain_period",
                f"drain_period ({self.drain_period:g} s) is not less than the lifetime of a block ({lives_s:g} s)",
                fix="lower drain_period, or raise the provider's walltime",
            )
        if lives_s is not None and self.limits.walltime_s is not None and self.limits.walltime_s > lives_s:
            raise FieldProblem(
                "limits",
                f"limits.walltime ({self.limits.walltime}) is longer than the lifetime of a block ({lives_s:g} s)",
                fix="lower limits.walltime, or raise the provider's walltime",
            )

    def _check_container(self) -> None:
        """Refuse a default environment that cannot be.

        :raises FieldProblem: with the field to change.
        """
        if self.container_type is None:
            for field in ("container_uri", "container_cmd_options"):
                if getattr(self, field) is not None:
                    raise FieldProblem(
                        field, f"{field} without container_type", fix="write container_type, such as apptainer"
                    )
            return
        if self.container_uri is None:
            raise FieldProblem(
                "container_type",
                "container_type without container_uri",
                fix="write container_uri: the image, or the absolute path of the directory",
            )
        allowed = self.environments.types
        if allowed is not None and self.container_type not in allowed:
            raise FieldProblem(
                "container_type",
                f"environments.types does not allow {self.container_type}",
                fix=f"add {self.container_type} to environments.types, or remove container_type",
            )
        if isinstance(self.provider, KubernetesProviderConfig):
            raise FieldProblem(
                "container_type", "on Kubernetes, tasks run in the pod's image", fix="write the image as provider.image"
            )
        if self.container_cmd_options is not None:
            if self.container_type in PREFIXES:
                raise FieldProblem(
                    "container_cmd_options", f"{self.container_type} has no command", fix="remove container_cmd_options"
                )
            try:
                shlex.split(self.container_cmd_options)
            except ValueError as error:
                raise FieldProblem(
                    "container_cmd_options", f"not as in a shell: {error}", fix="look at the quotes"
                ) from error
        try:
            self.default_environment  # noqa: B018 - it is checked when it is made
        except ValueError as error:
            raise FieldProblem(
                "container_uri", str(error).removeprefix("environment: "), fix="write what the technology takes"
            ) from error

    @property
    def default_environment(self) -> Environment | None:
        """Environment of tasks that name none; None: the endpoint's own Python.

        :raises ValueError: if the configured environment is invalid.
        """
        if self.container_type is None or self.container_uri is None:
            return None
        return Environment.of({"type": self.container_type, "location": self.container_uri})

    def environment_settings(self, directory: Path) -> EnvironmentSettings:
        """Return the settings of environments for managers.

        :param directory: the endpoint's, below which a relative ``cache_dir`` lies.
        """
        chosen = self.environments
        return EnvironmentSettings(
            types=chosen.types,
            default=self.default_environment,
            options=tuple(shlex.split(self.container_cmd_options or "")),
            locations=chosen.locations,
            binds=chosen.binds,
            network=chosen.network,
            cache_dir=str(directory / expanded(chosen.cache_dir)),
            cache_bytes=int(chosen.cache_size * BYTES_PER_GB),
            idle_s=chosen.idle_time,
            memory_bytes=None if chosen.memory is None else int(chosen.memory * BYTES_PER_GB),
            eviction=chosen.eviction,
            extra_workers=chosen.extra_workers,
            start_limit_s=chosen.start_limit,
            fork=chosen.fork,
            tasks_per_worker=self.max_tasks_per_worker or 0,
            source_builds=chosen.source_builds,
            index_url=chosen.index_url,
        )

    @property
    def slots(self) -> int:
        """The estimated number of workers on a node like this one."""
        return self.sharing.guess(len(os.sched_getaffinity(0)))

    @property
    def accelerators(self) -> tuple[str, ...]:
        """The names of a node's accelerators."""
        named = self.available_accelerators
        return tuple(map(str, range(named))) if isinstance(named, int) else named

    @property
    def sharing(self) -> Sharing:
        """How each node is divided among its workers."""
        return Sharing(
            max_workers=self.max_workers_per_node,
            cores_per_worker=self.cores_per_worker,
            memory_per_worker_bytes=self.mem_per_worker_bytes,
            accelerators=self.accelerators,
            cpu_affinity=self.cpu_affinity,
        )

    @property
    def worker_share(self) -> WorkerShare:
        """Resources of each task, for the usage. A node's cores are estimated if the provider does not know them."""
        provider, gpus = self.provider, self.accelerators
        node_cores = getattr(provider, "cores_per_node", None) or getattr(provider, "cpus_per_node", None)
        each = [len(names.split(",")) for names in gpus]
        return WorkerShare(
            cores=self.cores_per_worker or 1.0,
            gpus=each[0] if each else 0,
            node_cores=node_cores or len(os.sched_getaffinity(0)),
            node_gpus=getattr(provider, "gpus_per_node", None) or sum(each),
            account=(getattr(provider, "account", None) or getattr(provider, "project", None) or "")[:200],
        )

    @property
    def mem_per_worker_bytes(self) -> int | None:
        """None if memory is not divided."""
        return None if self.mem_per_worker is None else int(self.mem_per_worker * BYTES_PER_GB)


class Config(Section, frozen=True, kw_only=True):
    """The whole file."""

    display_name: Annotated[
        str | None, msgspec.Meta(description="The name shown to others; default: the endpoint's name.")
    ] = None
    engine: Annotated[EngineConfig, msgspec.Meta(description="How and where tasks are run.")] = EngineConfig()
    data: Annotated[
        DataConfig, msgspec.Meta(description="Shared directories of tasks, and Valkey servers for them.")
    ] = DataConfig()
    qos: Annotated[QosConfig, msgspec.Meta(description="Latency targets of functions.")] = QosConfig()
    allowed_functions: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] | None,
        msgspec.Meta(
            description="The only functions that run here: ids, or SHA-256 hashes of their bodies; default: all."
        ),
    ] = None
    allowed_signers: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)] | None,
        msgspec.Meta(
            description="File of the only keys whose functions run here, in the format of ssh-keygen(1), ALLOWED "
            "SIGNERS; relative to the endpoint's directory; default: functions need no signature."
        ),
    ] = None
    sealed: Annotated[
        Literal["off", "offered", "required"],
        msgspec.Meta(
            description="Sealed calls, which only this endpoint can open, and answers that only their submitters can "
            "open: off opens none, offered opens them, required runs no other calls."
        ),
    ] = "off"
    fair_share: Annotated[
        dict[Annotated[str, msgspec.Meta(min_length=1)], Annotated[int, msgspec.Meta(ge=1, le=1000)]],
        msgspec.Meta(
            max_length=1000,
            description="Weights by identity for sharing the endpoint among submitters; default: 1.",
        ),
    ] = msgspec.field(default_factory=dict)
    heartbeat_period: Annotated[
        float, msgspec.Meta(ge=0.1, le=300, description="Seconds between heartbeats to the cloud.")
    ] = 30.0
    blobs: Annotated[
        Literal["auto", "direct", "relay"],
        msgspec.Meta(
            description="Route of large arguments and results: direct to the blob store, relay through the forwarder "
            "where the site blocks the blob store, auto detects it."
        ),
    ] = "auto"
    transfer_memory: Annotated[
        int,
        msgspec.Meta(
            ge=16,
            le=1_000_000,
            description="Memory for large arguments and results in transfer through the agent, in MB; others wait.",
        ),
    ] = 256
    kept_output_bytes: Annotated[
        int,
        msgspec.Meta(
            ge=0,
            le=MAX_KEPT_OUTPUT_BYTES,
            description="Most bytes of each stream of a task's output that are kept after its end, for a day; tasks "
            "request 16384 unless they say otherwise. 0: none, and output of running tasks is not shown.",
        ),
    ] = MAX_KEPT_OUTPUT_BYTES
    output_storage: Annotated[
        int,
        msgspec.Meta(
            ge=0,
            le=1_000_000,
            description="Disk space for the kept output of all tasks, in MB; the oldest is deleted first.",
        ),
    ] = 256
    files: Annotated[FilesConfig, msgspec.Meta(description="Files that tasks read and write in storage.")] = (
        FilesConfig()
    )
    shutdown_grace: Annotated[
        float,
        msgspec.Meta(ge=0, le=3600, description="Seconds for running tasks to finish when the endpoint stops."),
    ] = 5.0
    log_format: Annotated[
        Literal["text", "json"], msgspec.Meta(description="Format of log lines: for people or for programs.")
    ] = "text"
    log_max_bytes: Annotated[
        int, msgspec.Meta(ge=10_000, le=2**40, description="Size at which a log file is rotated.")
    ] = 10 * 2**20
    log_backups: Annotated[int, msgspec.Meta(ge=1, le=100, description="Number of rotated files kept of each log.")] = 4
    debug: Annotated[bool, msgspec.Meta(description="Log more.")] = False

    def __post_init__(self) -> None:
        names = self.engine.allowed_serializers
        if self.allowed_signers is None or names is None:
            return
        if not parse_allowed(names) & DATA_STRATEGIES <= DATA_ONLY:
            raise FieldProblem(
                "allowed_signers",
                "engine.allowed_serializers lets arguments run code when they are read, which no one has signed",
                fix='remove engine.allowed_serializers, or write ["*Code", JSONData]',
            )

    @property
    def files_refusal(self) -> str:
        """Why no files are copied for tasks; empty if they are."""
        if not self.files.enabled:
            return "its owner has switched files off (files.enabled)"
        provider = self.engine.provider
        if isinstance(provider, KubernetesProviderConfig) and not provider.persistent_volumes:
            return "its pods share no volume with it (engine.provider.persistent_volumes)"
        return ""

    @property
    def data_only(self) -> bool:
        """Whether arguments must be data, which runs no code when it is read: only certain functions run here."""
        return self.allowed_functions is not None or self.allowed_signers is not None
