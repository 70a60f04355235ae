"""Podman, podman-hpc and Docker: containers of images in the store of the program, and for Podman also of directories.

Podman's containers are run without a control group of their own: they stay in the manager's, with the limits of its
batch job.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

from farcall_common.environments import Environment
from farcall_endpoint.environments.runners.base import ImagePreparation, Start
from farcall_endpoint.environments.runners.trial import start_problem
from farcall_endpoint.host.isolation.trial import problem

LABEL: Final = "farcall.container"
"""Has a container of Farcall; its value is the container's name."""

_OF_FILES: Final = re.compile(r"(?:docker-archive|oci-archive|oci|dir):(?://)?(/[^:]*)")

# $1: the program, $2: the reference.
_PULL: Final = '"$1" image inspect "$2" >/dev/null 2>&1 || exec "$1" pull --quiet "$2"'
# $1: the program, $2: the location, $3: the name that the image gets.
_LOAD: Final = 'id=$("$1" pull --quiet "$2") && exec "$1" tag "$id" "$3"'

# Podman 4 takes two tries for a container whose monitor was killed: the first finds out that it does not run.
_REMOVE: Final = 'for _ in 1 2 3; do "$@" && exit; done; exit 1'
# Docker's daemon may be about to create what its client asked for before it was killed. $1: the program, $2: the name.
_AWAIT: Final = r"""
for _ in 1 2 3 4 5; do
    found=$("$1" ps --all --quiet --filter "name=^/$2\$") || exit
    test -z "$found" || exec "$1" rm --force --volumes "$found"
    sleep 0.1
done
"""

# Podman's monitor of a container leaves its parent, and the container with it. As the adopter of orphans, the process
# that runs Podman stays the ancestor of both: who kills it with its descendants, kills the container.
_ADOPT: Final = "import ctypes, os, sys; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0); os.execvp(sys.argv[1], sys.argv[1:])"


def own_limits() -> dict[str, tuple[int, int]]:
    """The limits of open files and processes that this process has, as Podman can set them for a container: it lowers
    its own limit of processes to the kernel's first, and could not raise it again."""
    most = int(Path("/proc/sys/kernel/pid_max").read_text(encoding="ascii"))
    soft, hard = (
        most if each == resource.RLIM_INFINITY else min(each, most)
        for each in resource.getrlimit(resource.RLIMIT_NPROC)
    )
    return {"nofile": resource.getrlimit(resource.RLIMIT_NOFILE), "nproc": (soft, hard)}


class OciRunner:
    """Runs ``podman run``, ``podman-hpc run`` or ``docker run``.

    The location is a reference to an image; for both Podmans also the directory of a root file system, and for
    ``podman`` ``docker-archive:``, ``oci-archive:``, ``oci:`` or ``dir:`` with a path. The root file system of the
    container is read-only, but for ``/tmp``, ``/run`` and ``/var/tmp`` in memory. In it, the endpoint's user has their
    own id with Docker, and is root without capabilities with the others: there, that is the endpoint's user on the
    node. Docker's containers are no descendants of the process that starts them.

    :param python: starts Podman so that its containers are descendants of the process.
    :param user: with Docker, the ids of user and group of the container's program.
    :param limits: soft and hard ones, as of ``ulimit``, with Podman; None: those that this process has.
    """

    worker_target = "/run/farcall/worker"

    def __init__(
        self,
        type: Literal["docker", "podman", "podman-hpc"],  # noqa: A002 - the seam's name
        *,
        python: str = sys.executable,
        user: str = f"{os.getuid()}:{os.getgid()}",
        limits: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.type: str = type
        self._podman = type != "docker"
        self._python = python
        self._user = "0:0" if self._podman else user
        # As root without CAP_SYS_RESOURCE, Podman cannot set its usual ones.
        found = own_limits() if limits is None else limits
        self._limits = [word for name, (soft, hard) in found.items() for word in ("--ulimit", f"{name}={soft}:{hard}")]

    def missing(self) -> str:
        if self.type == "podman":
            found = start_problem(self, self.type)
        elif shutil.which(self.type) is None:
            found = f"the program {self.type} is not installed"
        else:
            found = problem([self.type, "info" if self._podman else "version"])
        return f"{self.type}: {found}" if found else ""

    def prepare(self, environment: Environment, *, cache: Path) -> ImagePreparation:  # noqa: ARG002 - the seam's
        """Return how to get the image into the program's own store."""
        location = environment.location
        if self._is_directory(location):
            return ImagePreparation(location)
        if self.type == "podman" and _OF_FILES.match(location):
            image = f"localhost/farcall-{hashlib.sha256(location.encode()).hexdigest()[:32]}:latest"
            load = ("sh", "-c", _LOAD, "sh", self.type, location, image)
            return ImagePreparation(image, (load,), f"{self.type} is loading the image")
        image = re.sub("^docker://(?!-)", "", location)  # with a dash, it would be an option
        pull = ("sh", "-c", _PULL, "sh", self.type, image)
        return ImagePreparation(image, (pull,), f"{self.type} is pulling the image")

    def node_path(self, location: str) -> str:
        """The file or directory of the node that a location names; empty if none."""
        if self._is_directory(location):
            return location
        found = _OF_FILES.match(location) if self._podman else None
        return found[1] if found else ""

    def command(self, start: Start) -> list[str]:
        """Return the command that starts a container.

        :raises OSError: for a path that cannot be mounted.
        """
        program = shutil.which(self.type) or self.type
        command = [program]
        if self._podman:
            command = [self._python, "-I", "-S", "-c", _ADOPT, program]
        if self.type == "podman":
            command += ["--log-level", "error"]
        command += ["run", "--rm", "--pull", "never", "--log-driver", "none", "--no-healthcheck"]
        if start.name:
            command += ["--name", start.name, "--label", f"{LABEL}={start.name}"]
        command += ["--network", "host" if start.network else "none"]
        command += ["--read-only", "--user", self._user, "--cap-drop", "ALL"]
        command += ["--security-opt", "no-new-privileges", "--security-opt", "label=disable"]
        if self._podman:
            command += ["--cgroups", "disabled", "--image-volume", "ignore", *self._limits]
        else:
            targets = {mount.target for mount in start.mounts}
            for path in sorted({"/run", "/tmp", "/var/tmp"} - targets):  # noqa: S108 - the container's own
                command += ["--tmpfs", f"{path}:rw,exec,nosuid,nodev,mode=1777"]
        command += self._accelerators(start)
        for mount in start.mounts:
            if bad := [path for path in (mount.source, mount.target) if re.search('[,"]', path)]:
                raise OSError(f"{self.type} cannot mount {bad[0]}: a comma or quotation mark is in its name")
            readonly = "" if mount.writable else ",readonly"
            command += ["--mount", f"type=bind,source={mount.source},target={mount.target}{readonly}"]
        for name, value in start.variables.items():
            command += ["--env", f"{name}={value}"]
        command += ["--workdir", start.directory, *start.options, "--entrypoint", start.command[0]]
        if self._is_directory(start.image):
            # A layer above takes the places of mounts, so the directory stays as it is. It need not have /etc/hosts.
            return [*command, "--no-hosts", "--rootfs", f"{start.image}:O", *start.command[1:]]
        return [*command, start.image, *start.command[1:]]

    def stop(self, start: Start) -> list[str] | None:
        """Return the command that ends a container. A busy Docker may create it even later: see :meth:`leftovers`."""
        if not start.name:
            return None
        return self.remove([start.name]) if self._podman else ["sh", "-c", _AWAIT, "sh", self.type, start.name]

    def leftovers(self) -> list[str]:
        """Return the command that lists all of this user's Farcall containers, running or not, one name per line."""
        return [self.type, "ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.Names}}"]

    def remove(self, names: Iterable[str]) -> list[str]:
        """Return the command that ends and removes containers. Docker's fails if one does not exist any more."""
        command = [self.type, "rm", "--force", "--volumes"]
        if self._podman:
            command = ["sh", "-c", _REMOVE, "sh", *command, "--time", "0", "--ignore"]
        return [*command, *names]

    def _is_directory(self, location: str) -> bool:
        return self._podman and location.startswith("/")

    def _accelerators(self, start: Start) -> Iterator[str]:
        if not start.accelerators:
            return
        if start.amd:
            yield from ("--device", "/dev/kfd", "--device", "/dev/dri")
            yield from ("--group-add", "keep-groups" if self._podman else "video")
            return
        names = [name for each in start.accelerators for name in each.split(",")]
        if self._podman:
            for name in names:
                yield from ("--device", f"nvidia.com/gpu={name}")
        else:
            yield from ("--gpus", f'"device={",".join(names)}"')
