"""Charliecloud as a runner: a directory tree as the root of a mount namespace, by ``ch-run`` (0.31 and later)."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Final

from farcall_common.environments import Environment
from farcall_endpoint.environments.runners.base import ImagePreparation, Mount, Start
from farcall_endpoint.environments.runners.bubblewrap import ASSEMBLE, WORKER_TARGET
from farcall_endpoint.host.isolation.trial import problem

_HOST: Final = ("/bin", "/lib", "/lib32", "/lib64", "/usr")


class CharliecloudRunner:
    """Starts containers from directory trees, as an ordinary user or root. Squashfs images need FUSE, and are refused.

    ``ch-run`` mounts only where the image has a directory, and everything writable. So the root is assembled before, in
    a mount namespace of its own, by :mod:`~farcall_endpoint.host.tree_root`: read-only is what shall be.

    The container has the tree, read-only; what is mounted; a ``/tmp`` in memory; and **of the node** ``/dev``,
    ``/proc`` with all processes, ``/sys``, and the names of hosts. That is Charliecloud's way, and right for the
    owner's tasks.

    **Of a submitter other than the owner** (``private_root``): put ``isolation.bubblewrap.prefix(..., nested=True)``
    before the command, as for bubblewrap. Then these are the prefix's. Without bubblewrap, refuse such tasks.

    There is no process between the manager's child and the worker; it ends as any worker of the manager.
    """

    type = "charliecloud"
    worker_target = WORKER_TARGET

    def missing(self) -> str:
        """Why containers cannot be started on this node, after a try: of an image that is made of the node's system."""
        if shutil.which("ch-run") is None:
            return "charliecloud: the program ch-run is not installed"
        with tempfile.TemporaryDirectory(prefix="farcall-charliecloud-") as image:
            mounts = tuple(Mount(str(Path(path).resolve()), path) for path in _HOST if Path(path).is_dir())
            reason = problem(self.command(Start(image, ("/bin/true",), mounts)))
        return f"charliecloud: {reason.removeprefix('charliecloud: ')}" if reason else ""

    def prepare(self, environment: Environment, *, cache: Path) -> ImagePreparation:  # noqa: ARG002
        """Nothing is to be prepared."""
        return ImagePreparation(environment.location)

    def command(self, start: Start) -> list[str]:
        """The command of a container; its first process becomes the program in it."""
        mounts = [("rw" if mount.writable else "ro", mount.source, mount.target) for mount in start.mounts]
        words = ["--private-tmp", "--unset-env=*", "--env-no-expand"]
        words += [f"--set-env={name}={value}" for name, value in start.variables.items()]
        words += [*start.options, f"--cd={start.directory}"]
        program = shutil.which("ch-run") or "ch-run"
        network = "network" if start.network else "none"
        return [
            *(*ASSEMBLE, "charliecloud", start.image, network, *(word for mount in mounts for word in mount)),
            *("--", program, *words, start.image, "--", *start.command),
        ]

    def stop(self, start: Start) -> list[str] | None:  # noqa: ARG002
        """Nothing is left when the process tree was killed."""
        return None
