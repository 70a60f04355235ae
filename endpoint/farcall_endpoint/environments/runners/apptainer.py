"""Apptainer and Singularity: containers of a SIF file, a directory, or an image that is converted once on each node."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path
from typing import Final, Literal

from farcall_common.environments import Environment
from farcall_endpoint.environments.runners.base import ImagePreparation, Start
from farcall_endpoint.environments.runners.trial import start_problem
from farcall_endpoint.host.isolation.paths import SHARED_MEMORY

_URI: Final = re.compile(r"[a-z][a-z0-9+-]*:")
_OF_FILES: Final = re.compile(r"(?:docker-archive|oci-archive|oci|dir|localimage):(?://)?(/[^:]*)")

# $1: the image to make, $2: the program, $3: the location. Everything is written into one directory beside the image,
# which is removed in any case: also the temporary files, that the program would otherwise keep below /tmp and the home.
# Without /dev/fuse or a starter with the set-user-ID bit, a SIF file could not be mounted: the image is a directory.
_CONVERT: Final = r"""
set -eu
test ! -e "$1" || exit 0
mkdir -p -- "${1%/*}"
part=$(mktemp -d -- "$1.part-XXXXXX")
trap 'chmod -R u+rwX -- "$part" 2>/dev/null; rm -rf -- "$part"' EXIT
trap 'exit 1' HUP INT TERM
kind=--sandbox
if test -r /dev/fuse -a -w /dev/fuse; then kind=
elif libexec=$("$2" buildcfg LIBEXECDIR 2>/dev/null) && test -u "$libexec/$2/bin/starter-suid"; then kind=; fi
export APPTAINER_TMPDIR="$part" SINGULARITY_TMPDIR="$part"
"$2" build --disable-cache ${kind:+"$kind" --fix-perms} "$part/image" "$3"
mv -T -- "$part/image" "$1"
"""


class ApptainerRunner:
    """Runs ``apptainer exec``, or ``singularity exec`` with the same arguments.

    The location is a SIF file, a directory (a "sandbox"), or what the program's ``build`` takes: ``docker://``,
    ``oras://``, ``library://``, ``docker-archive:`` and so on.

    The container has process and IPC namespaces of its own: it dies with its first process, which dies with ours.
    """

    worker_target = "/run/farcall/worker"

    def __init__(self, type: Literal["apptainer", "singularity"]) -> None:  # noqa: A002 - the seam's name
        self.type: str = type

    def missing(self) -> str:
        found = start_problem(self, self.type)
        if "capability set" in found:
            found += " (as root, it takes CAP_SYS_RESOURCE: an endpoint of an ordinary user works)"
        return f"{self.type}: {found}" if found else ""

    def prepare(self, environment: Environment, *, cache: Path) -> ImagePreparation:
        location = environment.location
        if not _URI.match(location):
            return ImagePreparation(location)
        name = hashlib.sha256(location.encode()).hexdigest()[:32]
        image = str(cache / f"{self.type}-{name}")
        convert = ("sh", "-c", _CONVERT, "sh", image, self.type, location)
        return ImagePreparation(image, (convert,), f"{self.type} is converting the image")

    def node_path(self, location: str) -> str:
        """Return the file or directory of the node that a location names; empty if it names none."""
        if not _URI.match(location):
            return location
        found = _OF_FILES.match(location)
        return found[1] if found else ""

    def command(self, start: Start) -> list[str]:
        """Return the command that starts a container.

        :raises OSError: for a path that cannot be mounted.
        """
        # By --env, a value with a comma would be two.
        prefix = f"{self.type.upper()}ENV_"
        command = ["env", *(f"{prefix}{name}={value}" for name, value in start.variables.items())]
        command = [*(command if start.variables else []), shutil.which(self.type) or self.type, "--silent", "exec"]
        if start.private_root:
            command += ["--containall", "--no-mount", "hostfs,bind-paths", "--bind", "/etc/hosts:/etc/hosts:ro"]
        else:
            command += ["--cleanenv", "--pid", "--ipc", "--no-mount", "cwd"]
        command.append("--no-home")
        if self.type == "apptainer":
            command.append("--no-eval")  # else a shell in the container evaluates the values of variables
        if not start.network:
            command += ["--net", "--network", "none"]
        if start.accelerators:
            command.append("--rocm" if start.amd else "--nv")
        for mount in start.mounts:
            if start.private_root and mount.target.startswith(f"{SHARED_MEMORY}/"):
                continue  # the container's own is empty, and has no place for a mount: tasks get no memory_dir
            if bad := [path for path in (mount.source, mount.target) if re.search("[:,]", path)]:
                raise OSError(f"{self.type} cannot mount {bad[0]}: a colon or comma is in its name")
            command += ["--bind", f"{mount.source}:{mount.target}:{'rw' if mount.writable else 'ro'}"]
        return [*command, "--pwd", start.directory, *start.options, start.image, *start.command]

    def stop(self, start: Start) -> list[str] | None:  # noqa: ARG002 - the seam's
        return None
