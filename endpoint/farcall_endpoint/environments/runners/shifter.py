"""Shifter: containers of images that the site's image gateway keeps.

Shifter mounts the site's directories into every container, at their places on the node; it changes neither the network
nor the view on processes. What else is mounted must be a directory in one of them, and its place must exist in the
image, or in what is mounted there.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final

from farcall_common.environments import Environment
from farcall_endpoint.environments.runners.base import ImagePreparation, Start
from farcall_endpoint.host.isolation.trial import problem

# $1: the image. The exit code of a pull that failed may be 0.
_PULL: Final = """
shifterimg pull "$1" && shifterimg lookup "$1" >/dev/null && exit
echo "the image gateway has no $1" >&2
exit 1
"""


class ShifterRunner:
    """Runs ``shifter``. The location is a reference to an image, with or without ``docker:`` before it."""

    type = "shifter"
    worker_target = "/mnt"

    def missing(self) -> str:
        for program in ("shifter", "shifterimg"):
            if shutil.which(program) is None:
                return f"shifter: the program {program} is not installed"
        found = problem(["shifter", "--help"])
        return f"shifter: {found}" if found else ""

    def prepare(self, environment: Environment, *, cache: Path) -> ImagePreparation:  # noqa: ARG002 - the seam's
        """Return how to get the image into Shifter's gateway."""
        location = environment.location
        image = location if re.match("(docker|custom|id):", location) else f"docker:{location}"
        return ImagePreparation(image, (("sh", "-c", _PULL, "sh", image),), "shifter is pulling the image")

    def node_path(self, location: str) -> str:  # noqa: ARG002 - as the other runners'
        """The file or directory of the node that a location names: none."""
        return ""

    def command(self, start: Start) -> list[str]:
        """Return the command that starts a container. A mount at its own path is left out: it is a site's directory,
        which every container has.

        :raises OSError: if Shifter cannot start a container like this.
        """
        if start.private_root:
            raise OSError("shifter shows the node's directories to every container: it runs the owner's tasks only")
        if not start.network:
            raise OSError("shifter cannot keep a container from the network")
        command = [shutil.which("shifter") or "shifter", f"--image={start.image}", "--clearenv"]
        for mount in start.mounts:
            if mount.source == mount.target:
                continue
            if bad := [path for path in (mount.source, mount.target) if re.search("[:;]", path)]:
                raise OSError(f"shifter cannot mount {bad[0]}: a colon or semicolon is in its name")
            command.append(f"--volume={mount.source}:{mount.target}{'' if mount.writable else ':ro'}")
        # It takes no empty value.
        command += [f"--env={name}={value}" for name, value in start.variables.items() if value]
        return [*command, f"--workdir={start.directory}", *start.options, "--", *start.command]

    def stop(self, start: Start) -> list[str] | None:  # noqa: ARG002 - the seam's
        """Return None: the program replaces Shifter in its process, so killing the process is enough."""
        return None
