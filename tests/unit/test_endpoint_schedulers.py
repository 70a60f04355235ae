"""What batch systems get to see: rendered jobs, checked against commands that only write down what they were given."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from farcall_common.errors import ConfigurationError
from farcall_endpoint.config.providers import (
    BatchProviderConfig,
    CondorProviderConfig,
    GridEngineProviderConfig,
    KubernetesProviderConfig,
    LSFProviderConfig,
    MpiExecLauncherConfig,
    PBSProProviderConfig,
    ProviderConfig,
    SlurmProviderConfig,
    SrunLauncherConfig,
    TorqueProviderConfig,
)
from farcall_endpoint.providers.base import Phase
from farcall_endpoint.providers.batch import SchedulerError, node_script
from farcall_endpoint.providers.schedulers import make_scheduler

ANSWERS = {
    "sbatch": "Submitted batch job 4711",
    "qsub": "4711.server",
    "bsub": "Job <4711> is submitted to default queue <normal>.",
    "condor_submit": "1 job(s) submitted to cluster 4711.",
    "sacct": "",
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of commands that answer as the real ones do and keep a copy of every file they are given."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, answer in ANSWERS.items():
        answering(tmp_path, name, answer)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def answering(site: Path, command: str, answer: str) -> None:
    keep = f'{{ echo "$*"; for f in "$@"; do [ -f "$f" ] && cat "$f"; done; }} > {site}/{command}.job'
    write(site / "bin" / command, f"#!/bin/sh\n{keep}\necho '{answer}'\n")


def write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


COMMON: dict[str, Any] = {"nodes_per_block": 2, "walltime": "01:30:00", "launcher": MpiExecLauncherConfig()}


#: Lines of job scripts with the name that the scheduler shows.
_NAMES = ("#SBATCH --job-name=", "#PBS -N ", "#BSUB -J ")


@pytest.mark.parametrize(
    ("config", "command", "wanted"),
    [
        (
            SlurmProviderConfig(
                **COMMON | {"launcher": SrunLauncherConfig(overrides="--cpu-bind=none")},
                partition="gpu",
                account="abc",
                qos="high",
                constraint="a100",
                gres="gpu:4",
                mem_per_node=64,
                scheduler_options="#SBATCH --reservation=x",
            ),
            "sbatch",
            [
                "--nodes=2",
                "--time=90",
                "--partition=gpu",
                "--account=abc",
                "--qos=high",
                "--constraint=a100",
                "--gres=gpu:4",
                "--mem=64g",
                "--reservation=x",
                "--exclusive",
                "srun",
                "--cpu-bind=none",
            ],
        ),
        (
            PBSProProviderConfig(**COMMON, queue="prod", account="abc", cpus_per_node=32, select_options="ngpus=4"),
            "qsub",
            ["walltime=01:30:00", "select=2:ncpus=32:ngpus=4", "-q prod", "-A abc", "mpiexec"],
        ),
        (TorqueProviderConfig(**COMMON, queue="prod", account="abc"), "qsub", ["nodes=2:ppn=1", "walltime=01:30:00"]),
        (
            LSFProviderConfig(**COMMON, project="abc", queue="batch"),
            "bsub",
            ["-W 90", "-P abc", "-q batch", "-nnodes 2", "mpiexec"],
        ),
        (GridEngineProviderConfig(walltime="01:30:00", queue="all.q"), "qsub", ["h_rt=01:30:00", "-q all.q"]),
        (
            CondorProviderConfig(cores_per_slot=4, mem_per_slot=2.0, requirements='(OpSys == "LINUX")', project="abc"),
            "condor_submit",
            ["RequestCpus = 4", "RequestMemory = 2048", '(OpSys == "LINUX")', "abc"],
        ),
    ],
    ids=lambda value: type(value).__struct_config__.tag if isinstance(value, BatchProviderConfig) else "",
)
def test_job_requests_the_configured_resources(
    site: Path, config: ProviderConfig, command: str, wanted: list[str]
) -> None:
    scripts = site / "scripts"
    scripts.mkdir()
    scheduler = make_scheduler(config, script_dir=scripts)
    assert scheduler.submit("/bin/bash /shared/block.sh", name="block-1").startswith("4711")
    job = (site / f"{command}.job").read_text()
    for text in wanted:
        assert text in job, f"{text!r} is not in\n{job}"
    names = [line.rpartition("block-1")[2] for line in job.splitlines() if line.startswith(_NAMES)]
    assert set(names) <= {""}, "Parsl's suffix is gone"
    assert bool(names) is not isinstance(config, GridEngineProviderConfig | CondorProviderConfig)
    everything = job + "".join(path.read_text() for path in scripts.glob("*.script"))
    assert "/bin/bash /shared/block.sh" in everything


@pytest.mark.parametrize(
    ("config", "command"),
    [(SlurmProviderConfig(), "sbatch"), (PBSProProviderConfig(), "qsub"), (LSFProviderConfig(), "bsub")],
)
def test_refusal_contains_the_scheduler_output(
    site: Path, tmp_path: Path, config: ProviderConfig, command: str
) -> None:
    scheduler = make_scheduler(config, script_dir=tmp_path)
    write(site / "bin" / command, "#!/bin/sh\necho 'error: you have no hours left on abc' >&2; exit 1\n")
    with pytest.raises(SchedulerError, match="you have no hours left on abc"):
        scheduler.submit("true", name="block-1")


@pytest.mark.parametrize(
    ("line", "phase", "text"),
    [
        ("7|PENDING|Resources", Phase.WAITING, "job 7 PENDING (Resources)"),
        ("7|REQUEUED|BeginTime", Phase.WAITING, "job 7 REQUEUED (BeginTime)"),
        ("7|RUNNING|None", Phase.RUNNING, "job 7 RUNNING"),
        ("7|COMPLETING|None", Phase.RUNNING, "job 7 COMPLETING"),
        ("7|FAILED|NonZeroExitCode", Phase.ENDED, "job 7 FAILED (NonZeroExitCode)"),
        ("7|TIMEOUT|TimeLimit", Phase.ENDED, "job 7 TIMEOUT (TimeLimit)"),
        ("7|NODE_FAIL|None", Phase.ENDED, "job 7 NODE_FAIL"),
        ("7|POWER_UP_NODE|None", Phase.WAITING, "job 7 POWER_UP_NODE"),
        ("7|PREEMPTED|None", Phase.WAITING, "job 7 PREEMPTED"),
        ("7|SOMETHING_NEW|", Phase.WAITING, "job 7 SOMETHING_NEW"),
    ],
)
def test_slurm_states_are_mapped(site: Path, line: str, phase: Phase, text: str) -> None:
    scheduler = make_scheduler(SlurmProviderConfig(), script_dir=site)
    write(site / "bin" / "squeue", f"#!/bin/sh\necho '  {line}'; echo '8|RUNNING|None'\n")
    status = scheduler.statuses(["7"])
    assert list(status) == ["7"]
    assert (status["7"].phase, status["7"].text) == (phase, text)


@pytest.mark.parametrize(
    ("config", "command"),
    [(SlurmProviderConfig(), "sbatch"), (PBSProProviderConfig(), "qsub"), (LSFProviderConfig(), "bsub")],
)
def test_variables_of_another_job_do_not_reach_a_scheduler(
    site: Path, monkeypatch: pytest.MonkeyPatch, config: ProviderConfig, command: str
) -> None:
    for name in ("SLURM_CPU_BIND", "SBATCH_PARTITION", "SRUN_DEBUG", "PMIX_RANK", "PBS_JOBID", "LSB_JOBID"):
        monkeypatch.setenv(name, "of another job")
    for name in ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "PBS_DEFAULT", "LSB_DEFAULTQUEUE", "MY_SLURM_ID"):
        monkeypatch.setenv(name, "of the site")
    scheduler = make_scheduler(config, script_dir=site)
    write(site / "bin" / command, f"#!/bin/sh\nenv > {site}/environment; echo '{ANSWERS[command]}'\n")
    assert scheduler.submit("true", name="block-1").startswith("4711")
    given = (site / "environment").read_text()
    assert "of another job" not in given
    assert given.count("of the site") == 6


def test_unknown_slurm_job_is_left_out(site: Path) -> None:
    scheduler = make_scheduler(SlurmProviderConfig(), script_dir=site)
    write(site / "bin" / "squeue", "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
    assert scheduler.statuses(["7"]) == {}
    write(site / "bin" / "squeue", "#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    with pytest.raises(SchedulerError, match="Unable to contact"):
        scheduler.statuses(["7"])


def test_missing_provider_requirement_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "nothing"))
    with pytest.raises(
        ConfigurationError, match=r"KubernetesProvider cannot be used here: Failed to load .*kube-config"
    ):
        make_scheduler(KubernetesProviderConfig(image="x"), script_dir=tmp_path)


def test_node_script_quotes_any_value() -> None:
    script = node_script(
        ["python", "-m", "x", "$HOME `id` 'quoted'"], environment={"A": "it's $5"}, worker_init="module load py\n"
    )
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert "module load py" in lines
    assert """export A='it'"'"'s $5'""" in lines
    assert lines[-1] == """exec python -m x '$HOME `id` '"'"'quoted'"'"''"""
