"""Python prefixes: virtual environments and conda environments, without a container."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from farcall_common.environments import Environment
from farcall_endpoint.environments.runners.base import ImagePreparation, Start

_ENV: Final = "/usr/bin/env"
_PATH: Final = "/usr/local/bin:/usr/bin:/bin"
_VARIABLES: Final[Mapping[str, tuple[str, ...]]] = {
    "venv": ("VIRTUAL_ENV",),
    "conda": ("CONDA_PREFIX", "CONDA_DEFAULT_ENV"),
}


class PrefixRunner:
    """Starts programs of a Python installation of the node: :attr:`Start.image` is its prefix, and
    :attr:`Start.command` begins with ``PREFIX/bin/python``.

    There is no container: a program sees the node as its user does. So nothing can be mounted elsewhere (see
    :meth:`problem`), and ``worker_target`` is empty: the worker's code is used in its place on the node.

    **Of a submitter other than the owner**: confine it as the endpoint's own workers of that submitter. Put
    ``isolation.bubblewrap.prefix(...)`` before the command where the node has it, with the prefix among the readable
    paths if the submitter may read it, and give the worker the same paths for Landlock.
    """

    worker_target = ""

    def __init__(self, type_: Literal["venv", "conda"]) -> None:
        self.type: str = type_

    def missing(self) -> str:
        """A prefix needs nothing of the node; whether it has a Python that works is found by asking that."""
        return ""

    def prepare(self, environment: Environment, *, cache: Path) -> ImagePreparation:  # noqa: ARG002
        """Nothing is to be prepared."""
        return ImagePreparation(environment.location)

    def problem(self, start: Start) -> str:
        """Why there is no such start; empty if there is."""
        if moved := next((each for each in start.mounts if each.source != each.target), None):
            return f"{self.type}: there is no container in which {moved.source} could be mounted at {moved.target}"
        if not start.network:
            return f"{self.type}: there is no container that could be without the node's network"
        if start.options:
            return f"{self.type}: there is no container that takes options: {' '.join(start.options)}"
        return ""

    def command(self, start: Start) -> list[str]:
        """The command, as of an activated environment, with no other variables than these.

        :raises ValueError: for what only a container has, see :meth:`problem`.
        """
        if problem := self.problem(start):
            raise ValueError(problem)
        own = dict.fromkeys(_VARIABLES[self.type], start.image)
        own["PATH"] = f"{start.image}/bin:{start.variables.get('PATH', _PATH)}"
        variables = {**start.variables, **own}
        return [
            *(_ENV, "-i", f"--chdir={start.directory}"),
            *(f"{name}={value}" for name, value in variables.items()),
            *start.command,
        ]

    def stop(self, start: Start) -> list[str] | None:  # noqa: ARG002
        """Nothing is left when the process tree was killed."""
        return None
