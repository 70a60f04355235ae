"""Slurm cluster of this machine alone, for a test: own keys, ports and directory, no root."""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from tests.waiting import WAIT_S, wait_until

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=10
InactiveLimit=0
KillWait=2
MinJobAge=60
MessageTimeout=5
PropagateResourceLimits=NONE
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


class SlurmCluster:
    """A controller, and nodes ``n1`` … that are all this machine, each with its own cores."""

    def __init__(self, directory: Path, *, nodes: int, cores: int) -> None:
        self.nodes = [f"n{index}" for index in range(1, nodes + 1)]
        self._directory = directory
        self._cores = cores
        self._configuration = directory / "slurm.conf"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def environment(self) -> dict[str, str]:
        """What the commands of Slurm need to find this cluster."""
        return {"SLURM_CONF": str(self._configuration)}

    def start(self) -> None:
        """Start everything, and wait for idle nodes."""
        directory = self._directory
        (directory / "state").mkdir()
        key = directory / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(1024))
        munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={directory}/munge.sock"]
        munge += [f"--pid-file={directory}/munged.pid", f"--log-file={directory}/munged.log"]
        self._run("munged", [*munge, f"--seed-file={directory}/munge.seed"])
        wait_until((directory / "munge.sock").exists)
        port, *ports = _free_ports(1 + len(self.nodes))
        host = socket.gethostname().partition(".")[0]
        lines = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_port} CPUs={self._cores} "
            "RealMemory=2000 State=UNKNOWN"
            for node, node_port in zip(self.nodes, ports, strict=True)
        ]
        self._configuration.write_text(
            _CONFIGURATION.format(
                host=host, port=port, user=getpass.getuser(), directory=directory, nodes="\n".join(lines)
            )
        )
        (directory / "cgroup.conf").touch()
        self._run("slurmctld", ["slurmctld", "-D", "-c", "-f", str(self._configuration)])
        for node in self.nodes:
            self.boot(node)
        wait_until(lambda: len(self.idle_nodes()) == len(self.nodes))

    def stop(self) -> None:
        """End everything that was started, jobs first."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.command("scancel", f"--user={getpass.getuser()}")
            wait_until(lambda: not self.jobs())
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def boot(self, node: str) -> None:
        """Start a node."""
        (self._directory / f"spool.{node}").mkdir(exist_ok=True)
        self._run(node, ["slurmd", "-D", "-N", node, "-f", str(self._configuration)])

    def crash(self, node: str) -> None:
        """Kill a node and everything on it."""
        daemon = self._processes.pop(node)
        daemon.kill()
        daemon.wait()
        for process in self._jobs_of(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)

    def command(self, *command: str) -> str:
        """What a command of Slurm prints.

        :raises subprocess.CalledProcessError: if it fails.
        """
        environment = {**os.environ, **self.environment}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=True
        ).stdout

    def idle_nodes(self) -> list[str]:
        """Names of nodes that are up and have nothing to do; none while the controller does not answer."""
        with contextlib.suppress(subprocess.SubprocessError):
            return self.command("sinfo", "-h", "-N", "-r", "-t", "idle", "-o", "%N").split()
        return []

    def jobs(self, *states: str) -> dict[str, str]:
        """Ids and nodes of jobs that wait or run; of certain states, if those are named."""
        wanted = [f"--states={','.join(states)}"] if states else []
        lines = self.command("squeue", "-h", *wanted, "-o", "%i|%N").splitlines()
        return dict(line.strip().split("|", 1) for line in lines)

    def _run(self, name: str, command: Sequence[str]) -> None:
        log = (self._directory / f"{name}.out").open("ab")
        with log:
            self._processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **self.environment}, start_new_session=True
            )

    def _jobs_of(self, node: str) -> Iterator[psutil.Process]:
        """Processes that run in a job on a node, and the daemons beside them."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.uids().real != os.getuid() or process.pid == os.getpid():
                    continue
                variables = process.environ()
                if variables.get("SLURM_CONF") != str(self._configuration):
                    continue
                if variables.get("SLURMD_NODENAME") == node or f"-N {node}" in " ".join(process.cmdline()):
                    yield process


def _free_ports(count: int) -> list[int]:
    """Free ports; all are held until the last is known, so that they differ."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def running_cluster(directory: Path, *, nodes: int, cores: int) -> Iterator[SlurmCluster]:
    """A cluster that is gone at the end, with all its jobs.

    :raises FileNotFoundError: if Slurm is not installed; ``make setup-system`` does that.
    """
    for program in ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue"):
        if shutil.which(program) is None:
            raise FileNotFoundError(f"{program} is missing: run `make setup-system` first")
    cluster = SlurmCluster(directory, nodes=nodes, cores=cores)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
