"""bubblewrap as a runner: a directory tree as the root of namespaces of its own."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from farcall_common.environments import Environment
from farcall_endpoint.environments.runners.base import ImagePreparation, Start
from farcall_endpoint.host import tree_root
from farcall_endpoint.host.isolation.bubblewrap import KERNEL_SETTINGS
from farcall_endpoint.host.isolation.paths import DEVICES
from farcall_endpoint.host.isolation.trial import problem

WORKER_TARGET: Final = "/run/farcall"
"""No image has anything there, and it need not exist: roots are assembled."""
ASSEMBLE: Final = (sys.executable, "-I", "-S", str(Path(tree_root.__file__)))
"""The program that assembles a root; it becomes the runner's."""

_TEMPORARY: Final = "/tmp"  # noqa: S108 - the container's own
_FABRIC: Final = "/dev/infiniband"
_NAMESPACES: Final = (
    *("--unshare-user-try", "--unshare-ipc", "--unshare-uts"),
    *("--cap-drop", "ALL"),  # root would keep its own
    "--die-with-parent",
    "--clearenv",
)
_NAMES_OF_HOSTS: Final = ("/etc/resolv.conf", "/etc/hosts")
_PROCESSORS: Final = "/sys/devices/system"
"""Processors and memory nodes, which numerical libraries count."""
_HARDWARE: Final = ("/sys/bus", "/sys/class", "/sys/dev", "/sys/devices", "/sys/module")
"""Directories in which drivers of accelerators search for devices."""


class BubblewrapRunner:
    """Starts containers from directory trees.

    The container has the tree, read-only; what is mounted; a ``/dev`` with the usual devices, and those of accelerators
    if it has any; ``/proc`` of its own processes; a ``/tmp`` in memory; the processors in ``/sys``; and the names of
    hosts, unless it has no network. It has no capabilities, setuid programs give none, and devices in the tree do not
    work.

    **Of a submitter other than the owner** (``private_root``): put ``isolation.bubblewrap.prefix(..., nested=True)``
    before the command, with what the submitter's workers may read and write, the worker's code and sockets and the
    directory of the tree. Then the tree's path, which a submitter may change at any time, is looked up in that view: it
    cannot lead to what the submitter may not read. The process namespace is that of the prefix.

    **The end.** Kill the process with :func:`~farcall_endpoint.host.process_reaper.kill_trees`, which stops bubblewrap
    before it looks for what it has started. Killing only bubblewrap, in the milliseconds in which it sets up the
    container, leaves a container behind; it is in bubblewrap's process group, if that has one of its own.

    :param is_root: whether the endpoint's user is root.
    """

    type = "bubblewrap"
    worker_target = WORKER_TARGET

    def __init__(self, *, is_root: bool = os.geteuid() == 0) -> None:
        self._is_root = is_root

    def missing(self) -> str:
        """Why containers cannot be started on this node, after a try."""
        if shutil.which("bwrap") is None:
            return "bubblewrap: the program bwrap is not installed"
        view = ("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", _TEMPORARY)
        reason = problem([_program(), *_NAMESPACES, "--unshare-pid", *view, "--", "true"])
        return f"bubblewrap: {reason}" if reason else ""

    def prepare(self, environment: Environment, *, cache: Path) -> ImagePreparation:  # noqa: ARG002
        return ImagePreparation(environment.location)

    def command(self, start: Start) -> list[str]:
        """The command of a container; its first process becomes bubblewrap."""
        words: list[str] = [*_NAMESPACES]
        if not start.private_root:  # the process namespace of the prefix is the submitter's already
            words.append("--unshare-pid")
        if not start.network:
            words.append("--unshare-net")
        words += ["--dev", "/dev"]
        for device in _devices(start):
            words += ["--dev-bind-try", device, device]
        words += ["--proc", "/proc", "--tmpfs", _TEMPORARY]
        for path in (*(KERNEL_SETTINGS if self._is_root else ()), *_readable(start)):
            words += ["--ro-bind-try", path, path]
        for mount in sorted(start.mounts, key=lambda each: Path(each.target).parts):
            words += ["--bind" if mount.writable else "--ro-bind", mount.source, mount.target]
        for name, value in start.variables.items():
            words += ["--setenv", name, value]
        words += [*start.options, "--remount-ro", "/", "--chdir", start.directory, "--", *start.command]
        return [*ASSEMBLE, "bubblewrap", start.image, _program(), *words]

    def stop(self, start: Start) -> list[str] | None:  # noqa: ARG002
        """Nothing is left when the process tree was killed."""
        return None


def _program() -> str:
    return shutil.which("bwrap") or "bwrap"


def _devices(start: Start) -> Iterator[str]:
    """bubblewrap's own ``/dev`` has null, zero, full, random, urandom, tty and terminals."""
    if start.accelerators:
        amd = ("/dev/kfd", "/dev/dri")
        yield from (
            each for each in DEVICES if (each in amd if start.amd else each.startswith(("/dev/nv", "/dev/dri")))
        )
    if start.network:
        yield _FABRIC


def _readable(start: Start) -> Iterator[str]:
    yield from _HARDWARE if start.accelerators else (_PROCESSORS,)
    if start.network:
        yield from _NAMES_OF_HOSTS
