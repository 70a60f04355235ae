"""Provider and launcher sections of ``config.yaml``. Fields are named as in Parsl."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from farcall_endpoint.config.section import FieldProblem, Section, Walltime, walltime_seconds

Blocks = Annotated[int, msgspec.Meta(ge=0, le=100_000)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Text = Annotated[str, msgspec.Meta(min_length=1)]

_QUEUE: Final = msgspec.Meta(description="Queue to submit to; the scheduler's default if not given.")
_ACCOUNT: Final = msgspec.Meta(description="Account or project that pays.")


# -- launchers ---------------------------------------------------------------------------------------------------------


class _Launcher(Section, frozen=True, kw_only=True, tag_field="type"):
    pass


class _MPILauncher(_Launcher, frozen=True, kw_only=True):
    overrides: Annotated[str, msgspec.Meta(description="More options for the launcher's own command.")] = ""


class SimpleLauncherConfig(_Launcher, frozen=True, kw_only=True, tag="SimpleLauncher"):
    """The block's script runs the manager as it is."""


class SingleNodeLauncherConfig(_Launcher, frozen=True, kw_only=True, tag="SingleNodeLauncher"):
    """One manager on the first node of a block."""

    fail_on_any: Annotated[bool, msgspec.Meta(description="Whether one failing command fails the block.")] = False


class WrappedLauncherConfig(_Launcher, frozen=True, kw_only=True, tag="WrappedLauncher"):
    """The manager behind a command of the site."""

    prepend: Annotated[str, msgspec.Meta(min_length=1, description="Command line to put before the manager's command.")]


class GnuParallelLauncherConfig(_Launcher, frozen=True, kw_only=True, tag="GnuParallelLauncher"):
    """One manager on each node, by GNU parallel and ssh."""


class MpiExecLauncherConfig(_MPILauncher, frozen=True, kw_only=True, tag="MpiExecLauncher"):
    """One manager on each node, by mpiexec."""

    bind_cmd: Annotated[str, msgspec.Meta(description="The option that binds to cores.")] = "--bind-to"


class MpiRunLauncherConfig(_MPILauncher, frozen=True, kw_only=True, tag="MpiRunLauncher"):
    """One manager on each node, by mpirun."""

    bash_location: Annotated[str, msgspec.Meta(description="Where bash is on the nodes.")] = "/bin/bash"


class SrunLauncherConfig(_MPILauncher, frozen=True, kw_only=True, tag="SrunLauncher"):
    """One manager on each node, by srun."""


class SrunMPILauncherConfig(_MPILauncher, frozen=True, kw_only=True, tag="SrunMPILauncher"):
    """One manager on each node, by several srun of one block."""


class AprunLauncherConfig(_MPILauncher, frozen=True, kw_only=True, tag="AprunLauncher"):
    """One manager on each node, by Cray's aprun."""


class JsrunLauncherConfig(_MPILauncher, frozen=True, kw_only=True, tag="JsrunLauncher"):
    """One manager on each node, by IBM's jsrun."""


LauncherConfig = (
    SimpleLauncherConfig
    | SingleNodeLauncherConfig
    | WrappedLauncherConfig
    | GnuParallelLauncherConfig
    | MpiExecLauncherConfig
    | MpiRunLauncherConfig
    | SrunLauncherConfig
    | SrunMPILauncherConfig
    | AprunLauncherConfig
    | JsrunLauncherConfig
)


# -- providers ---------------------------------------------------------------------------------------------------------


class _Provider(Section, frozen=True, kw_only=True, tag_field="type"):
    """Number of blocks. A block is one job of the scheduler."""

    init_blocks: Annotated[
        Blocks | None, msgspec.Meta(description="Blocks to request at the start; 1, or min_blocks if that is more.")
    ] = None
    min_blocks: Annotated[Blocks, msgspec.Meta(description="Minimum number of blocks, also when idle.")] = 0
    max_blocks: Annotated[Count, msgspec.Meta(description="Maximum number of blocks at a time.")] = 1
    parallelism: Annotated[
        float,
        msgspec.Meta(
            gt=0,
            le=1,
            description="Workers for each task that waits or runs: 1 is one worker per task, up to max_blocks.",
        ),
    ] = 1.0

    def __post_init__(self) -> None:
        if self.min_blocks > self.max_blocks:
            raise FieldProblem(
                "min_blocks",
                f"min_blocks ({self.min_blocks}) is more than max_blocks ({self.max_blocks})",
                fix="raise max_blocks, or lower min_blocks",
            )
        if not self.min_blocks <= self.first_blocks <= self.max_blocks:
            raise FieldProblem(
                "init_blocks",
                f"init_blocks ({self.first_blocks}) is not between min_blocks ({self.min_blocks}) and "
                f"max_blocks ({self.max_blocks})",
                fix="leave init_blocks out, or choose a number between the two",
            )

    @property
    def first_blocks(self) -> int:
        """Blocks to request at the start."""
        return max(1, self.min_blocks) if self.init_blocks is None else self.init_blocks

    @property
    def walltime_s(self) -> float | None:
        """Lifetime of a block in seconds; None for no limit."""
        return None


class LocalProviderConfig(_Provider, frozen=True, kw_only=True, tag="LocalProvider"):
    """Workers on the machine that the agent runs on, in the agent's own environment."""

    min_blocks: Annotated[Blocks, msgspec.Meta(description="Minimum number of blocks, also when idle.")] = 1

    @property
    def nodes_per_block(self) -> int:
        """A block is one manager on this machine."""
        return 1


class _NodeProvider(_Provider, frozen=True, kw_only=True):
    worker_init: Annotated[
        str, msgspec.Meta(description="Shell lines to run on each node before the manager: modules, environments.")
    ] = ""


class BatchProviderConfig(_NodeProvider, frozen=True, kw_only=True):
    """Common fields of batch schedulers."""

    nodes_per_block: Annotated[Count, msgspec.Meta(description="Nodes of one block (one job).")] = 1
    walltime: Annotated[Walltime, msgspec.Meta(description="Lifetime of a block.")] = "00:30:00"
    scheduler_options: Annotated[
        str, msgspec.Meta(description="Lines for the head of the job script, such as '#SBATCH --reservation=x'.")
    ] = ""
    launcher: Annotated[
        LauncherConfig, msgspec.Meta(description="The command that starts the manager on the nodes of a block.")
    ] = SingleNodeLauncherConfig()
    cmd_timeout: Annotated[
        int, msgspec.Meta(ge=1, le=3600, description="Timeout of a scheduler command in seconds.")
    ] = 60

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.walltime_s == 0:
            raise FieldProblem(
                "walltime", "a block with walltime 00:00:00 ends immediately", fix="give it a longer walltime"
            )
        if self.nodes_per_block > 1 and isinstance(self.launcher, SingleNodeLauncherConfig):
            raise FieldProblem(
                "nodes_per_block",
                f"SingleNodeLauncher uses the first of a block's {self.nodes_per_block} nodes only",
                fix="choose a launcher for all nodes, such as SrunLauncher or MpiExecLauncher",
            )

    @property
    def walltime_s(self) -> float:
        """Lifetime of a block in seconds."""
        return walltime_seconds(self.walltime)


class SlurmProviderConfig(BatchProviderConfig, frozen=True, kw_only=True, tag="SlurmProvider"):
    """Blocks from Slurm, by sbatch."""

    partition: Annotated[
        Text | None, msgspec.Meta(description="Partition to submit to; the default one if not given.")
    ] = None
    account: Annotated[Text | None, _ACCOUNT] = None
    qos: Annotated[Text | None, msgspec.Meta(description="Quality of service.")] = None
    constraint: Annotated[Text | None, msgspec.Meta(description="Features that nodes must have.")] = None
    clusters: Annotated[Text | None, msgspec.Meta(description="Clusters to submit to.")] = None
    cores_per_node: Annotated[Count | None, msgspec.Meta(description="Cores to request on each node.")] = None
    mem_per_node: Annotated[Count | None, msgspec.Meta(description="Memory to request on each node, in GB.")] = None
    gpus_per_node: Annotated[Count | None, msgspec.Meta(description="GPUs to request on each node.")] = None
    gres: Annotated[Text | None, msgspec.Meta(description="Generic resources, such as gpu:a100:4.")] = None
    exclusive: Annotated[bool, msgspec.Meta(description="Whether to request whole nodes.")] = True
    regex_job_id: Annotated[
        Text, msgspec.Meta(description="Regular expression for the job id in the output of sbatch (group 'id').")
    ] = r"Submitted batch job (?P<id>\S*)"


class PBSProProviderConfig(BatchProviderConfig, frozen=True, kw_only=True, tag="PBSProProvider"):
    """Blocks from PBS Pro or OpenPBS, by qsub."""

    account: Annotated[Text | None, _ACCOUNT] = None
    queue: Annotated[Text | None, _QUEUE] = None
    select_options: Annotated[
        str, msgspec.Meta(description="Additional parts of the select statement, such as ngpus=4.")
    ] = ""
    cpus_per_node: Annotated[Count, msgspec.Meta(description="Cores to request on each node.")] = 1


class TorqueProviderConfig(BatchProviderConfig, frozen=True, kw_only=True, tag="TorqueProvider"):
    """Blocks from Torque, by qsub."""

    account: Annotated[Text | None, _ACCOUNT] = None
    queue: Annotated[Text | None, _QUEUE] = None


class LSFProviderConfig(BatchProviderConfig, frozen=True, kw_only=True, tag="LSFProvider"):
    """Blocks from LSF, by bsub."""

    project: Annotated[Text | None, _ACCOUNT] = None
    queue: Annotated[Text | None, _QUEUE] = None
    cores_per_block: Annotated[Count | None, msgspec.Meta(description="Cores of a block, instead of nodes.")] = None
    cores_per_node: Annotated[Count | None, msgspec.Meta(description="Cores to request on each node.")] = None
    bsub_redirection: Annotated[
        bool, msgspec.Meta(description="Whether bsub reads the script from its standard input.")
    ] = False
    request_by_nodes: Annotated[bool, msgspec.Meta(description="Whether to request nodes; false requests cores.")] = (
        True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.request_by_nodes and self.cores_per_block is None and self.cores_per_node is None:
            raise FieldProblem(
                "request_by_nodes",
                "request_by_nodes: false requests cores, and no field gives their number",
                fix="set cores_per_block or cores_per_node",
            )


class CondorProviderConfig(BatchProviderConfig, frozen=True, kw_only=True, tag="CondorProvider"):
    """Blocks from HTCondor, by condor_submit."""

    project: Annotated[str, _ACCOUNT] = ""
    cores_per_slot: Annotated[Count | None, msgspec.Meta(description="Cores to request.")] = None
    mem_per_slot: Annotated[
        Annotated[float, msgspec.Meta(gt=0)] | None, msgspec.Meta(description="Memory to request, in GB.")
    ] = None
    requirements: Annotated[str, msgspec.Meta(description="Expression that a machine must match.")] = ""
    environment: Annotated[dict[str, str] | None, msgspec.Meta(description="Variables of the job's environment.")] = (
        None
    )
    transfer_input_files: Annotated[tuple[str, ...], msgspec.Meta(description="Files to transfer to the job.")] = ()


class GridEngineProviderConfig(BatchProviderConfig, frozen=True, kw_only=True, tag="GridEngineProvider"):
    """Blocks from (Sun, Univa, Son of) Grid Engine, by qsub."""

    queue: Annotated[Text | None, _QUEUE] = None


class KubernetesProviderConfig(_NodeProvider, frozen=True, kw_only=True, tag="KubernetesProvider"):
    """Blocks are pods. The image must contain farcall-endpoint in the agent's version."""

    image: Annotated[Text, msgspec.Meta(description="Container image of the pods.")]
    namespace: Annotated[Text, msgspec.Meta(description="Namespace of the pods.")] = "default"
    max_cpu: Annotated[float, msgspec.Meta(gt=0, description="CPU limit of a pod.")] = 2.0
    max_mem: Annotated[Text, msgspec.Meta(description="Memory limit of a pod.")] = "500Mi"
    init_cpu: Annotated[float, msgspec.Meta(gt=0, description="CPU request of a pod.")] = 1.0
    init_mem: Annotated[Text, msgspec.Meta(description="Memory request of a pod.")] = "250Mi"
    extra_requests: Annotated[dict[str, str] | None, msgspec.Meta(description="Additional requests of a pod.")] = None
    extra_limits: Annotated[dict[str, str] | None, msgspec.Meta(description="Additional limits of a pod.")] = None
    pod_name: Annotated[Text | None, msgspec.Meta(description="Prefix of pod names.")] = None
    user_id: Annotated[Text | None, msgspec.Meta(description="User id of the pods, in quotes.")] = None
    group_id: Annotated[Text | None, msgspec.Meta(description="Group id of the pods, in quotes.")] = None
    run_as_non_root: Annotated[
        bool, msgspec.Meta(description="Whether the pods must not run as root. Pods of root refuse tasks of others.")
    ] = False
    secret: Annotated[Text | None, msgspec.Meta(description="Secret for pulling the image.")] = None
    persistent_volumes: Annotated[
        tuple[tuple[str, str], ...], msgspec.Meta(description="Pairs of a volume claim and its mount point.")
    ] = ()
    service_account_name: Annotated[Text | None, msgspec.Meta(description="Service account of the pods.")] = None
    annotations: Annotated[dict[str, str] | None, msgspec.Meta(description="Annotations of the pods.")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init_cpu > self.max_cpu:
            raise FieldProblem(
                "init_cpu",
                f"init_cpu ({self.init_cpu:g}) is more than max_cpu ({self.max_cpu:g})",
                fix="raise max_cpu, or lower init_cpu",
            )

    @property
    def nodes_per_block(self) -> int:
        """A block is one pod."""
        return 1


ProviderConfig = (
    LocalProviderConfig
    | SlurmProviderConfig
    | PBSProProviderConfig
    | TorqueProviderConfig
    | LSFProviderConfig
    | CondorProviderConfig
    | GridEngineProviderConfig
    | KubernetesProviderConfig
)
