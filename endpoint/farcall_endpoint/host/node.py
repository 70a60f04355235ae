"""Node discovery: cores, memory and accelerators, from affinity, control groups, the kernel and the scheduler."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from farcall_endpoint.host.slots import Node

_VISIBLE: Final = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_NOT_VISIBLE: Final = frozenset({"", "-1", "NoDevFiles"})
"""What says that there is none; the last is Slurm's."""
_KIB: Final = 1024
_MIB: Final = 1024 * 1024
_UNIFIED: Final = ""
"""The controller of the one hierarchy of cgroup v2, as ``/proc/self/cgroup`` has it."""


def discover_node(
    accelerators: Sequence[str] = (),
    *,
    environ: Mapping[str, str],
    cores: Collection[int] | None = None,
    root: Path = Path("/"),
) -> Node:
    """The resources that this process and its children may use.

    :param accelerators: names to share out; what the scheduler hides is left out.
    :param cores: instead of those of this process' affinity.
    :param root: where ``proc`` and ``sys`` are.
    :raises OSError: if the kernel does not say how much memory there is.
    """
    mine = tuple(sorted(os.sched_getaffinity(0) if cores is None else cores))
    groups = list(_own_groups(root))
    memory = [_total_memory(root), *_memory_limits(groups), *_granted_memory(environ, len(mine))]
    cpus = [*_cpu_quotas(groups), *_numbers(environ.get("SLURM_CPUS_ON_NODE"))]
    return Node(
        cores=mine,
        memory_bytes=int(min(memory)),
        accelerators=visible_accelerators(accelerators, environ=environ),
        cpus=min(cpus, default=None),
    )


def visible_accelerators(names: Sequence[str], *, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the configured accelerators that the scheduler makes visible to this job.

    Names that only count (``0``, ``1``, ...) mean the first visible accelerators, in this number, whatever their names.
    A name with commas is several accelerators for one worker.
    """
    listed = next((environ[variable] for variable in _VISIBLE if variable in environ), None)
    if listed is None:
        return tuple(names)
    visible = [name.strip() for name in listed.split(",") if name.strip() not in _NOT_VISIBLE]
    if list(names) == [str(number) for number in range(len(names))]:
        return tuple(visible[: len(names)])
    return tuple(name for name in names if set(name.split(",")).issubset(visible))


def has_amd_accelerators(root: Path = Path("/")) -> bool:
    """Whether this node has AMD accelerators."""
    return (root / "dev/kfd").exists()


# -- memory and time ---------------------------------------------------------------------------------------------------


def _total_memory(root: Path) -> int:
    path = root / "proc/meminfo"
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            return int(value.split()[0]) * _KIB
    raise OSError(f"{path} has no MemTotal")


def _granted_memory(environ: Mapping[str, str], cores: int) -> list[float]:
    """What Slurm has granted on this node, whether or not it watches over it."""
    node = [value * _MIB for value in _numbers(environ.get("SLURM_MEM_PER_NODE"))]
    cpus = next(iter(_numbers(environ.get("SLURM_CPUS_ON_NODE"))), float(cores))
    each = [value * cpus * _MIB for value in _numbers(environ.get("SLURM_MEM_PER_CPU"))]
    return [granted for granted in (*node, *each) if granted > 0]  # Slurm's 0 is all there is


def _numbers(*texts: str | None) -> list[float]:
    """The texts that are whole numbers."""
    return [float(text) for text in texts if text is not None and text.isdigit()]


# -- control groups ----------------------------------------------------------------------------------------------------


class _Group(NamedTuple):
    """A control group that this process is in, directly or not. ``controller`` is empty for cgroup v2."""

    controller: str
    path: Path

    def read(self, name: str) -> list[str]:
        """The words in one of its files; none if there is no such file."""
        try:
            return (self.path / name).read_text().split()
        except OSError:
            return []


def _own_groups(root: Path) -> Iterator[_Group]:
    """All groups that this process is in, each with the groups around it: a limit of any of them holds."""
    mounts = dict(_mounts(root))
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller not in mounts:
                continue
            top, mounted = mounts[controller]
            # in a container the path may be the host's: then the top of what is mounted is our own group
            inside = Path(path).relative_to(mounted) if Path(path).is_relative_to(mounted) else Path()
            group = top / inside
            yield from (_Group(controller, each) for each in (group, *group.parents) if each.is_relative_to(top))


def _mounts(root: Path) -> Iterator[tuple[str, tuple[Path, str]]]:
    """By controller: where its hierarchy is mounted, and which group of it that is."""
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        mount, _, kind = line.partition(" - ")
        fields, (name, _, options) = mount.split(), kind.split(maxsplit=2)
        place = (root / fields[4].lstrip("/"), fields[3])
        if name == "cgroup2":
            yield _UNIFIED, place
        elif name == "cgroup":
            yield from ((option, place) for option in options.split(",") if option in {"cpu", "memory"})


def _memory_limits(groups: Sequence[_Group]) -> list[float]:
    files = {_UNIFIED: "memory.max", "memory": "memory.limit_in_bytes"}
    words = [group.read(files[group.controller]) for group in groups if group.controller in files]
    return _numbers(*(word[0] for word in words if word))


def _cpu_quotas(groups: Sequence[_Group]) -> list[float]:
    """In cores' worth of time."""
    quotas = []
    for group in groups:
        words = group.read("cpu.max")
        if group.controller == "cpu":
            words = [*group.read("cpu.cfs_quota_us"), *group.read("cpu.cfs_period_us")]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit():  # else "max", or -1: no quota
            quotas.append(int(words[0]) / int(words[1]))
    return quotas
