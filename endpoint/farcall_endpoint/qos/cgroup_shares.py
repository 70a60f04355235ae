"""CPU shares by cgroups: a group for each function, version 1 or version 2."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from farcall_endpoint.config.settings import DEFAULT_WEIGHT
from farcall_endpoint.host.cgroups import Cgroups, Group, Hierarchy
from farcall_endpoint.host.process_reaper import read_process, tree
from farcall_endpoint.qos.weights import check_weight, cpu_shares, cpu_weight

_CONTROLLER: Final = "cpu"
_FILES: Final = {1: "cpu.shares", 2: "cpu.weight"}
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PASSES: Final = 3
"""Number of passes that move the descendants of a process: each finds those that started during the one before."""


@dataclasses.dataclass
class _Member:
    function: str
    start: int
    """Start time of the process, which identifies it: the kernel reuses pids."""
    has_joined: bool = False


class CgroupShares:
    """The actuator of one version of cgroups. Not for several threads.

    Version 2 gets a weight as ``cpu.weight``, which is the weight itself; version 1 gets ``cpu.shares``, which is 1024
    for a weight of 100. All groups lie in one directory, which weighs as much as the ordinary processes that compute in
    it, and as one on each CPU at least, up to the kernel's largest number: all functions together have the share that
    they would have without groups.

    :param cgroups: of this process. This object removes the groups that it makes, and not the others.
    :param version: 1 or 2.
    :param cpus: over which the kernel divides what the directory weighs.
    """

    def __init__(self, cgroups: Cgroups, version: int, *, cpus: int | None = None) -> None:
        self.name = f"cgroup v{version}"
        self.problem = ""
        self._cgroups = cgroups
        self.version = version
        self._cpus = cpus or len(os.sched_getaffinity(0))
        self._hierarchy = hierarchy_of(cgroups.hierarchies, version)
        self._tree_weight = DEFAULT_WEIGHT * self._cpus
        self._weights: dict[str, float] = {}
        self._members: dict[int, _Member] = {}
        self._groups: dict[str, Group] = {}
        self._old_groups: list[Group] = []
        """Which could not be removed yet."""

    def join(self, pid: int, function: str) -> None:
        """Move a process and its descendants into the group of a function. The kernel takes up to 30 ms for it."""
        process = read_process(pid)
        if process is None or process.is_zombie:
            self._members.pop(pid, None)
            return
        known = self._members.get(pid)
        if known is not None and (known.function, known.start, known.has_joined) == (function, process.start, True):
            return
        self._members[pid] = _Member(function, process.start)
        with self._noting_problems(f"process {pid} cannot join"):
            self._apply(function)
            self._move(pid)

    def set_weights(self, weights: Mapping[str, float], running: Mapping[str, int] | None = None) -> None:
        """Write the weights of groups that exist; the others get theirs when a process joins."""
        self._weights |= {function: check_weight(weight) for function, weight in weights.items()}
        self.problem = ""
        if running is not None:
            former, self._tree_weight = self._tree_weight, DEFAULT_WEIGHT * max(self._cpus, sum(running.values()))
            if self._groups and self._tree_weight != former:
                self._set_tree_weight()
        self._drop_ended()
        for function in {member.function for member in self._members.values()} | self._groups.keys():
            with self._noting_problems(f"function {function}"):
                self._apply(function)
        for pid, member in list(self._members.items()):
            if not member.has_joined and member.function in self._groups:
                with self._noting_problems(f"process {pid} cannot join"):
                    self._move(pid)
        self._remove_old_groups()

    def tick(self) -> float | None:
        """Remove groups whose processes have ended meanwhile."""
        self._remove_old_groups()
        return 1.0 if self._old_groups else None

    def forget(self, function: str) -> None:
        """Remove the group of a function. Its processes go back to the group of this process."""
        self._weights.pop(function, None)
        self._members = {pid: member for pid, member in self._members.items() if member.function != function}
        if group := self._groups.pop(function, None):
            self._old_groups.append(group)
        self._remove_old_groups()

    def close(self) -> None:
        """Remove all groups of functions."""
        for function in list(self._groups):
            self.forget(function)
        self._weights.clear()
        self._members.clear()
        self._remove_old_groups()

    def unsupported_reason(self, pid: int) -> str:
        """Try it: make a group, set and read its weight, move a process into it. The reason why that does not work.

        :param pid: of a process that ends afterwards.
        """
        function, weight = f"trial of {pid}", 2 * DEFAULT_WEIGHT
        try:
            self._make(function)
            self._members[pid] = _Member(function, 0)
            self._weights[function] = weight
            self._apply(function)
            self._move(pid)
            group = self._groups[function]
            if group.read(_FILES[self.version]) != [str(self._value(weight))]:
                return f"{group.paths[0] / _FILES[self.version]}: a weight that is written does not stay"
            if pid not in group.processes():
                return f"{group.paths[0]}: a process that joins is not in it"
        except OSError as error:
            return describe_error(error)
        finally:
            self.forget(function)
            self.problem = ""
        return ""

    # -- groups --------------------------------------------------------------------------------------------------------

    def _apply(self, function: str) -> None:
        """Write the weight of a function's group, which is made if there is none.

        If it was removed, its processes join the new one.
        """
        group = self._groups.get(function)
        value = self._value(self._weights.get(function, DEFAULT_WEIGHT))
        try:
            if group is not None:
                group.write(_FILES[self.version], value)
                return
        except OSError as error:
            if not _is_gone(error):
                raise
        self._make(function).write(_FILES[self.version], value)
        for member in self._members.values():
            member.has_joined &= member.function != function

    def _make(self, function: str) -> Group:
        if self._hierarchy is None:
            raise OSError(errno.ENOENT, "no group can be made", self.name)
        if self.version == 2:
            self._cgroups.enable_cpu(self._hierarchy)
        try:
            group = self._cgroups.create(group_name(function), within=self._hierarchy)
        except FileNotFoundError:
            self._cgroups.create_tree(self._hierarchy)
            group = self._cgroups.create(group_name(function), within=self._hierarchy)
        self._old_groups = [each for each in self._old_groups if each.name != group.name]
        self._groups[function] = group
        self._set_tree_weight()
        return group

    def _set_tree_weight(self) -> None:
        assert self._hierarchy is not None
        with contextlib.suppress(OSError):  # then the processes of all functions share what one process would get
            self._cgroups.tree(self._hierarchy).write(_FILES[self.version], self._value(self._tree_weight))

    def _value(self, weight: float) -> int:
        return cpu_weight(weight) if self.version == 2 else cpu_shares(weight)

    def _move(self, pid: int) -> None:
        member = self._members[pid]
        group = self._groups[member.function]
        for _ in range(_PASSES):
            missing = {pid, *tree(pid)} - group.processes()
            problem: OSError | None = None
            for each in sorted(missing, key=lambda each: each != pid):  # first the one whose new children follow it
                try:
                    _join(group, each)
                except OSError as error:  # one of another user, for example: the others join all the same
                    problem = problem or error
            if problem is not None:
                raise problem
            if not missing:
                break
        member.has_joined = True

    def _remove_old_groups(self) -> None:
        if not self._old_groups:
            return
        assert self._hierarchy is not None
        own = self._cgroups.own(self._hierarchy)
        for group in self._old_groups:
            for pid in group.processes():
                with self._noting_problems(f"process {pid} cannot leave its group"):
                    _join(own, pid)
        self._old_groups = [group for group in self._old_groups if not group.remove()]

    def _drop_ended(self) -> None:
        for pid, member in list(self._members.items()):
            process = read_process(pid)
            if process is None or process.is_zombie or process.start != member.start:
                del self._members[pid]

    @contextlib.contextmanager
    def _noting_problems(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.problem = self.problem or f"{what}: {describe_error(error)}"


def hierarchy_of(hierarchies: Sequence[Hierarchy], version: int) -> Hierarchy | None:
    """The one that can have CPU shares by this version."""
    for each in hierarchies:
        if (version == 1 and _CONTROLLER in each.controllers) or (version == 2 and not each.controllers):
            return each
    return None


def group_name(function: str) -> str:
    """The name of a function's group: unique to the function, and safe in a file system."""
    if _UUID.fullmatch(function):
        return f"function-{function}"
    digest = hashlib.sha256(function.encode(errors="surrogatepass")).hexdigest()[:32]
    return f"function-{digest}"


def describe_error(error: OSError) -> str:
    """Return the kernel's message for an error, with the file that it is about."""
    text = error.strerror or str(error)
    return f"{error.filename}: {text}" if error.filename else text


def try_directory(path: Path) -> str:
    """Return why no group can be made in the group ``path``; empty if one can be made, or exists already."""
    trial = path / f"farcall-trial-{os.getpid()}"
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        return describe_error(error)
    return "" if os.access(path / "cgroup.procs", os.W_OK) else f"{path}/cgroup.procs: {os.strerror(errno.EACCES)}"


def _join(group: Group, pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        group.join(pid)


def _is_gone(error: OSError) -> bool:
    """Whether the group does not exist any more."""
    return error.errno in (errno.ENOENT, errno.ENODEV)
