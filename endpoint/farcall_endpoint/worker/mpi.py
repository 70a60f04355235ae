"""MPI support: allocation of a block's nodes to tasks, and the launcher command for their ranks.

The workers of a block share its nodes by locks on the bytes of one file, a byte for each node: the kernel gives them
back when a worker dies, and file systems that nodes share know such locks, too. The environment variables of a task
are those of Parsl's and Globus Compute's MPI engines (``PARSL_MPI_PREFIX`` and others).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from farcall_common.errors import ErrorRecord, Fault

#: Names the launcher (``srun``, ``mpiexec`` or ``aprun``, or where one of them is); without it no ranks are started.
LAUNCHER: Final = "FARCALL_MPI_LAUNCHER"
_NODE_FILES: Final = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE", "COBALT_NODEFILE")
_JOB_IDS: Final = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "COBALT_JOBID")
_TURN: Final = 1 << 20
"""A byte behind those of all nodes: its holder is the next to get nodes, so that large tasks do not starve."""
_LOOK_S: Final = 0.05
_SCONTROL_S: Final = 30.0


class RanksImpossible(Exception):
    """A task requests unavailable or inconsistent ranks; ``record`` is its error."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.record = ErrorRecord("LIMIT_INVALID", message, hint, Fault.CALLER)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Numbers of nodes and processes.

    :param nodes: number of whole nodes of the block.
    :param per_node: number of processes on each node.
    """

    nodes: int
    per_node: int

    @property
    def total(self) -> int:
        """Processes in all."""
        return self.nodes * self.per_node

    @classmethod
    def of(cls, nodes: int | None, per_node: int | None, total: int | None) -> Ranks:
        """What two of the three numbers mean, or one of them, or all.

        :raises RanksImpossible: if they contradict one another.
        """
        if nodes is None:
            nodes = max(1, -(-total // per_node)) if total and per_node else 1
        if per_node is None:
            per_node = max(1, total // nodes) if total else 1
        ranks = cls(nodes, per_node)
        if total not in (None, ranks.total):
            raise RanksImpossible(
                f"{total} ranks cannot be {per_node} on each of {nodes} nodes.",
                hint="num_ranks is num_nodes times ranks_per_node; two of them are enough.",
            )
        return ranks


class Nodes:
    """The nodes of a block, as one of its workers sees them. A worker has one task at a time, so it takes once.

    :param lock_file: file that the workers of the block share.
    :param pause: sleeps for a number of seconds.
    """

    def __init__(self, names: Sequence[str], lock_file: Path, *, pause: Callable[[float], None] = time.sleep) -> None:
        self._names = names
        self._lock = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._pause = pause

    @contextlib.contextmanager
    def taken(self, count: int) -> Iterator[list[str]]:
        """Take ``count`` nodes until the ``with`` block ends; wait until they are free.

        :raises RanksImpossible: if the endpoint's blocks have fewer nodes.
        """
        if count > len(self._names):
            raise RanksImpossible(
                f"The task requests {count} nodes, and a block of this endpoint has {len(self._names)}.",
                hint="Ask for fewer, or let the endpoint's administrator raise nodes_per_block.",
            )
        taken: list[int] = []
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX, 1, _TURN)
            while not self._take(taken, count):
                self._pause(_LOOK_S)
            fcntl.lockf(self._lock, fcntl.LOCK_UN, 1, _TURN)
            yield [self._names[index] for index in taken]
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)  # all of them, and the turn

    def _take(self, taken: list[int], count: int) -> bool:
        """Take free nodes, up to ``count`` in total. Whether these are enough."""
        for index in range(len(self._names)):
            if len(taken) < count and index not in taken:
                with contextlib.suppress(BlockingIOError, PermissionError):  # another worker has it
                    fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index)
                    taken.append(index)
        return len(taken) == count


def nodes_of_block(environ: Mapping[str, str]) -> list[str]:
    """The names of the nodes that the scheduler gave; this machine where there is none.

    :raises OSError, subprocess.SubprocessError: if the scheduler's list cannot be read.
    """
    listed = environ.get("SLURM_JOB_NODELIST")
    if listed:
        command = ["scontrol", "show", "hostnames", listed]
        names = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_S, check=True).stdout.split()
        return list(dict.fromkeys(names))
    for variable in _NODE_FILES:
        if environ.get(variable):
            lines = Path(environ[variable]).read_text().splitlines()
            return list(dict.fromkeys(line.split()[0] for line in lines if line.strip()))
    return ["localhost"]


def lock_file_of_block(environ: Mapping[str, str], directory: Path) -> Path:
    """The file by which the workers of a block share its nodes."""
    job_id = next((environ[name] for name in _JOB_IDS if environ.get(name)), f"manager-{os.getppid()}")
    return directory / f".nodes-of-{job_id.replace('/', '-')}"


def variables(launcher: str, ranks: Ranks, nodes: Sequence[str]) -> dict[str, str]:
    """The environment variables of a task.

    :raises RanksImpossible: if the launcher is unknown.
    """
    name, hosts = Path(launcher).name, ",".join(nodes)
    if name == "srun":
        options = f"--ntasks {ranks.total} --ntasks-per-node {ranks.per_node} --nodelist {hosts} --nodes {ranks.nodes}"
    elif name == "mpiexec":
        options = f"-n {ranks.total} -ppn {ranks.per_node} -hosts {hosts}"
    elif name == "aprun":
        options = f"-n {ranks.total} -N {ranks.per_node} -node-list {hosts}"
    else:
        raise RanksImpossible(
            f"The endpoint's {LAUNCHER} is {launcher!r}, and must be srun, mpiexec or aprun.",
            hint="Its administrator sets it in worker_init.",
        )
    prefix = f"{launcher} {options}"
    return {
        "PARSL_MPI_PREFIX": prefix,
        f"PARSL_{name.upper()}_PREFIX": prefix,
        "PARSL_NUM_NODES": str(ranks.nodes),
        "PARSL_NUM_RANKS": str(ranks.total),
        "PARSL_RANKS_PER_NODE": str(ranks.per_node),
    }
