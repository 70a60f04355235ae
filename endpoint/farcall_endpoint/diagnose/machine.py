"""Machine facts for a diagnosis: versions, resources, schedulers, disks."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psutil

SCARCE: Final = 0.05
"""The share of free space below which a disk is nearly full."""

_PACKAGES: Final = (
    "farcall", "farcall-common", "farcall-endpoint", "cloudpickle", "dill", "httpx", "msgspec", "parsl", "psutil",
    "pyyaml", "pyzmq", "typeguard", "uv",
)  # fmt: skip
_COMMANDS: Final = {
    "Slurm": ("sbatch", "squeue", "scancel", "srun", "sacct"),
    "PBS Pro, Torque, Grid Engine": ("qsub", "qstat", "qdel"),
    "LSF": ("bsub", "bjobs", "bkill", "jsrun"),
    "HTCondor": ("condor_submit", "condor_q", "condor_rm"),
    "Kubernetes": ("kubectl",),
    "launchers": ("mpiexec", "mpirun", "aprun", "parallel"),
    "containers": ("apptainer", "singularity", "podman", "docker", "podman-hpc", "shifter", "ch-run", "bwrap"),
    "accelerators": ("nvidia-smi", "rocm-smi", "xpu-smi"),
    "boot": ("systemctl", "loginctl"),
}
_LIMITS: Final = {
    "open_files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "address_space_bytes": resource.RLIMIT_AS,
    "locked_memory_bytes": resource.RLIMIT_MEMLOCK,
    "core_file_bytes": resource.RLIMIT_CORE,
}
_MAX_LISTED: Final = 500


def versions() -> dict[str, Any]:
    """Versions of Python and of relevant packages."""
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return {"python": sys.version, "executable": sys.executable, "prefix": sys.prefix, "packages": found}


def machine() -> dict[str, Any]:
    """Platform, cores, memory, limits."""
    memory = psutil.virtual_memory()
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "hostname": socket.gethostname(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "memory_bytes": memory.total,
        "available_memory_bytes": memory.available,
        "up_s": round(time.time() - psutil.boot_time()),
        "limits": {name: resource.getrlimit(number) for name, number in _LIMITS.items()},
        "cgroup": _read(Path("/proc/self/cgroup")),
    }


def schedulers(environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The commands of schedulers and their kin that are found, and where."""
    path = environ.get("PATH")
    found = {
        kind: {name: where for name in names if (where := shutil.which(name, path=path)) is not None}
        for kind, names in _COMMANDS.items()
    }
    return {kind: commands for kind, commands in found.items() if commands}


def process_facts(process: psutil.Process) -> dict[str, Any]:
    """The command and the resource usage of a process."""
    with process.oneshot():
        return {
            "pid": process.pid,
            "parent": process.ppid(),
            "command": " ".join(process.cmdline())[:1000],
            "state": process.status(),
            "up_s": round(time.time() - process.create_time(), 1),
            "cpu_s": round(sum(process.cpu_times()[:2]), 2),
            "memory_bytes": process.memory_info().rss,
            "threads": process.num_threads(),
            "descriptors": process.num_fds(),
        }


def disks(places: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Free space where the endpoint writes."""
    found = []
    for name, path in places.items():
        state = os.statvfs(path)
        total = state.f_blocks * state.f_frsize
        free = state.f_bavail * state.f_frsize
        found.append(
            {
                "name": name,
                "path": str(path),
                "total_bytes": total,
                "free_bytes": free,
                "free_share": round(free / total, 4) if total else 1.0,
                "free_files": state.f_favail,
            }
        )
    return found


def temporary() -> Path:
    """The directory of temporary files."""
    return Path(tempfile.gettempdir())


def listing(directory: Path) -> list[dict[str, Any]]:
    """The endpoint's own files and the log directory; without contents, and without files of tasks."""
    found = []
    for path in sorted([*directory.iterdir(), *directory.glob("logs/*")])[:_MAX_LISTED]:
        try:
            state = path.lstat()
        except FileNotFoundError:  # the endpoint runs, and has removed the file meanwhile
            continue
        found.append(
            {
                "path": str(path.relative_to(directory)),
                "mode": stat.filemode(state.st_mode),
                "bytes": state.st_size,
                "modified_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(state.st_mtime)),
            }
        )
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        return str(error)
