"""Schedulers: batch systems by Parsl's providers; the only module that imports Parsl.

Only ``parsl.providers`` and ``parsl.launchers`` are used: they write the job's script, submit and cancel. Slurm is
polled here directly: Parsl drops the reason why a job waits, reports a failed job as completed, and a job that Slurm
has forgotten as running for ever.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from farcall_common.errors import ConfigurationError
from farcall_endpoint.config.providers import (
    KubernetesProviderConfig,
    LauncherConfig,
    LocalProviderConfig,
    ProviderConfig,
    SlurmProviderConfig,
)
from farcall_endpoint.providers.base import BlockStatus, Phase
from farcall_endpoint.providers.batch import Scheduler, SchedulerError

_OF_ANOTHER_JOB: Final = re.compile(
    r"(?!SLURM_(?:CONF|CONF_SERVER|CLUSTERS|JWT)$)(?:SLURMD?|SBATCH|SRUN|SALLOC|SQUEUE|PALS)_"
    r"|PMI|LSB_(?!DEFAULT)|LS_|PBS_(?:ARRAY|DPREFIX|ENVIRONMENT|JOB|NODE|O_|QUEUE|TASK)"
)
"""Variables of the job in which an endpoint was started, and variables that override the options in a job's script. A
scheduler's command would give them to new jobs."""
_JOB_NAME: Final = re.compile(r"(#(?:SBATCH --job-name=|PBS -N |BSUB -J ))\$\{jobname\}")
_SLURM_ENDED: Final = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "REVOKED", "TIMEOUT"}
)
"""A preempted job is not among these: Slurm may queue it again. If not, Slurm forgets it after some minutes."""
_SLURM_RUNNING: Final = frozenset({"RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "RESIZING"})


def make_scheduler(config: ProviderConfig, *, script_dir: Path) -> Scheduler:
    """The scheduler of a configuration.

    :raises ConfigurationError: if its commands or its library are missing.
    """
    import parsl.launchers
    import parsl.providers

    if isinstance(config, LocalProviderConfig):
        raise TypeError("LocalProvider has no scheduler")
    name = type(config).__struct_config__.tag
    arguments = _arguments(config)
    launcher = getattr(config, "launcher", None)
    if launcher is not None:
        arguments["launcher"] = _launcher(launcher, parsl.launchers)
    try:
        provider = _without_job(getattr(parsl.providers, str(name)))(**arguments)
    except Exception as error:  # each raises its own kinds
        raise ConfigurationError(f"{name} cannot be used here: {error}") from error
    provider.script_dir = str(script_dir)
    if isinstance(config, SlurmProviderConfig):
        return SlurmScheduler(provider, clusters=config.clusters, timeout_s=config.cmd_timeout)
    if isinstance(config, KubernetesProviderConfig):
        return KubernetesScheduler(provider)
    return ParslScheduler(provider)


class ParslScheduler:
    """A :class:`Scheduler` that uses one of Parsl's providers.

    :param provider: a ``parsl.providers.base.ExecutionProvider`` whose ``script_dir`` is set.
    """

    shares_files = True

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._job_name = ""
        if (write := getattr(provider, "_write_submit_script", None)) is not None:
            provider._write_submit_script = functools.partial(self._write_script, write)

    def _write_script(self, write: Callable[..., None], template: str, *arguments: Any) -> None:
        """Write a script as Parsl does, whose job has the given name: Parsl adds the time of the submit."""
        write(_JOB_NAME.sub(lambda found: found[1] + self._job_name, template), *arguments)

    def submit(self, command: str, *, name: str, secrets: Mapping[str, str] | None = None, image: str = "") -> str:
        assert not secrets, "these are in a file"
        assert not image, "its jobs are no pods"
        self._job_name = name
        with _ErrorLog() as errors:
            try:
                job_id = self._provider.submit(command, tasks_per_node=1, job_name=name)
            except Exception as error:
                raise SchedulerError(_reason(error)) from error
        if not job_id:
            raise SchedulerError(errors.text or "no job id and no reason given")
        return str(job_id)

    def statuses(self, job_ids: Sequence[str]) -> Mapping[str, BlockStatus]:
        from parsl.jobs.states import JobState

        phases = {JobState.PENDING: Phase.WAITING, JobState.HELD: Phase.WAITING, JobState.UNKNOWN: Phase.WAITING}
        phases[JobState.RUNNING] = Phase.RUNNING
        try:
            statuses = self._provider.status(list(job_ids))
        except Exception as error:
            raise SchedulerError(_reason(error)) from error
        return {
            job_id: BlockStatus(phases.get(status.state, Phase.ENDED), _described(status))
            for job_id, status in zip(job_ids, statuses, strict=True)
        }

    def cancel(self, job_ids: Sequence[str]) -> None:
        resources = self._provider.resources
        for job_id in job_ids:
            resources.setdefault(job_id, {})  # one of an earlier agent
        try:
            done = self._provider.cancel(list(job_ids))
        except Exception as error:
            raise SchedulerError(_reason(error)) from error
        if not all(done):
            raise SchedulerError(f"it did not cancel {', '.join(job_ids)}")


class SlurmScheduler(ParslScheduler):
    """Slurm; states come from ``squeue``, which every Slurm has, with or without accounting."""

    def __init__(self, provider: Any, *, clusters: str | None, timeout_s: float) -> None:
        super().__init__(provider)
        self._options = [f"--clusters={clusters}"] if clusters else []
        self._timeout_s = timeout_s

    def statuses(self, job_ids: Sequence[str]) -> Mapping[str, BlockStatus]:
        command = ["squeue", *self._options, "--states=all", "--noheader", "--format=%i|%T|%r"]
        command.append(f"--jobs={','.join(job_ids)}")
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=self._timeout_s,
                check=False,
                env=_command_environment(),
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SchedulerError(str(error)) from error
        if done.returncode and "Invalid job id" not in done.stderr:
            raise SchedulerError(done.stderr.strip() or f"squeue ended with {done.returncode}")
        statuses = {}
        for line in done.stdout.splitlines():
            job_id, state, reason = [*line.strip().split("|", 2), "", ""][:3]
            if job_id in job_ids:
                statuses[job_id] = BlockStatus(_slurm_phase(state), _slurm_text(job_id, state, reason))
        return statuses


class KubernetesScheduler(ParslScheduler):
    """Kubernetes: a pod for each block. Its variables that are secret are in a Secret with the pod's name, which
    Kubernetes deletes with the pod: users who may read pods do not see them."""

    shares_files = False

    def __init__(self, provider: Any) -> None:
        super().__init__(provider)
        self._pods = provider.kube_client = _PodsWithSecrets(provider.kube_client)
        self._image = provider.image

    def submit(self, command: str, *, name: str, secrets: Mapping[str, str] | None = None, image: str = "") -> str:
        self._pods.secrets = secrets or {}
        self._provider.image = image or self._image
        return super().submit(command, name=name)


class _PodsWithSecrets:
    """The client of Parsl's provider. A pod that it creates gets ``secrets`` as variables."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.secrets: Mapping[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def create_namespaced_pod(self, *, namespace: str, body: Any) -> Any:
        from kubernetes import client as kube

        if not self.secrets:
            return self._client.create_namespaced_pod(namespace=namespace, body=body)
        name = body.metadata.name
        variables = [
            kube.V1EnvVar(
                name=variable,
                value_from=kube.V1EnvVarSource(secret_key_ref=kube.V1SecretKeySelector(name=name, key=variable)),
            )
            for variable in self.secrets
        ]
        for container in body.spec.containers:
            container.env = [*(container.env or ()), *variables]
        # First the pod, which owns the Secret: its containers start when that is there.
        pod = self._client.create_namespaced_pod(namespace=namespace, body=body)
        owner = kube.V1OwnerReference(api_version="v1", kind="Pod", name=name, uid=pod.metadata.uid)
        secret = kube.V1Secret(
            metadata=kube.V1ObjectMeta(name=name, owner_references=[owner]),
            string_data=dict(self.secrets),
            immutable=True,
        )
        try:
            self._client.create_namespaced_secret(namespace=namespace, body=secret)
        except BaseException:
            self._client.delete_namespaced_pod(name=name, namespace=namespace)
            raise
        return pod


def _command_environment() -> dict[str, str]:
    """Environment of a scheduler's commands: that of this process, without the variables of a job that it is part of,
    and without variables that override the options of a job."""
    return {name: value for name, value in os.environ.items() if not _OF_ANOTHER_JOB.match(name)}


def _without_job(provider: Any) -> Any:
    """A class of Parsl whose commands run in :func:`_command_environment`."""
    from parsl.providers.cluster_provider import ClusterProvider

    if not issubclass(provider, ClusterProvider):
        return provider

    class CleanCommands(ClusterProvider):  # type: ignore[misc]
        def execute_wait(self, cmd: str, timeout: float | None = None) -> Any:
            names = [name for name in os.environ if name.isidentifier() and _OF_ANOTHER_JOB.match(name)]
            return super().execute_wait(f"unset {' '.join(names)}; {cmd}" if names else cmd, timeout)

    # Behind the provider: some providers call the method of their base class.
    return type(provider.__name__, (provider, CleanCommands), {})


def _slurm_phase(state: str) -> Phase:
    """A job in a state that is not known here waits, as each release of Slurm may add states."""
    return Phase.ENDED if state in _SLURM_ENDED else Phase.RUNNING if state in _SLURM_RUNNING else Phase.WAITING


def _slurm_text(job_id: str, state: str, reason: str) -> str:
    return f"job {job_id} {state}" if reason in ("", "None") else f"job {job_id} {state} ({reason})"


def _arguments(config: ProviderConfig) -> dict[str, Any]:
    """Parsl's arguments. Shell lines for the nodes are in the script of :mod:`farcall_endpoint.providers.batch`."""
    skipped = {"launcher", "worker_init"}
    values = {name: getattr(config, name) for name in config.__struct_fields__ if name not in skipped}
    values["init_blocks"] = config.first_blocks
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _launcher(config: LauncherConfig, launchers: Any) -> Any:
    return getattr(launchers, str(type(config).__struct_config__.tag))(debug=False, **msgspec.structs.asdict(config))


def _described(status: Any) -> str:
    """The text of a Parsl status."""
    return f"{status.status_name} ({status.message})" if status.message else str(status.status_name)


class _ErrorLog(logging.Handler):
    """Captures errors that a provider logs: some report only there why a scheduler refused a job."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.text = ""
        self._logger = logging.getLogger("parsl")

    def __enter__(self) -> _ErrorLog:
        self._propagates, self._logger.propagate = self._logger.propagate, False  # reported once, by the caller
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = self._propagates

    def emit(self, record: logging.LogRecord) -> None:
        self.text = " ".join(record.getMessage().split())


def _reason(error: Exception) -> str:
    """The scheduler's output in an exception of a provider."""
    said = [str(getattr(error, name, None) or "").strip() for name in ("stderr", "stdout")]
    return next(filter(None, said), "") or str(error) or type(error).__name__
