"""Container runners: one seam for all technologies. Commands are made by pure code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from farcall_common.environments import Environment


@dataclasses.dataclass(frozen=True)
class Mount:
    """A directory or file of the node that a container sees at ``target``."""

    source: str
    target: str
    writable: bool = False


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of a container.

    :param image: what the runner takes: the prepared file or directory, or the reference.
    :param command: the program in the container, with its arguments.
    :param mounts: what it sees of the node.
    :param variables: its environment variables; those of the image that they do not name stay.
    :param directory: its working directory, one of the mounts or below one.
    :param network: whether it shares the node's network.
    :param accelerators: names of those that it may use; empty: none.
    :param amd: whether these are AMD's.
    :param options: further options for the runner, of the endpoint's owner.
    :param name: unique on the node; the container's, where containers have names.
    :param private_root: whether nothing of the node is visible but ``mounts``: for submitters other than the owner.
    """

    image: str
    command: tuple[str, ...]
    mounts: tuple[Mount, ...] = ()
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    directory: str = "/"
    network: bool = True
    accelerators: tuple[str, ...] = ()
    amd: bool = False
    options: tuple[str, ...] = ()
    name: str = ""
    private_root: bool = False


@dataclasses.dataclass(frozen=True)
class ImagePreparation:
    """What must run, once on a node, before an image can be started.

    :param commands: in order, each with its arguments.
    :param image: what :attr:`Start.image` is afterwards.
    :param what: for people, in the present: "apptainer is converting the image".
    """

    image: str
    commands: tuple[tuple[str, ...], ...] = ()
    what: str = ""


class Runner(Protocol):
    """A technology. Its methods are pure, but for :meth:`missing`, which asks the node.

    Standard streams, and the exit of the process that :meth:`command` starts, are those of the container: it runs in
    the foreground, ends with the container, and the container ends when it is killed or when :meth:`stop` was run.
    """

    @property
    def type(self) -> str:
        """The type of environments that it runs."""

    @property
    def worker_target(self) -> str:
        """Path at which the worker's code is mounted in the container."""

    def missing(self) -> str:
        """Why the technology does not work on this node, after a try; empty if it works."""

    def prepare(self, environment: Environment, *, cache: Path) -> ImagePreparation:
        """Return how to make the image startable on this node. The result lies in ``cache`` under a name that is
        derived from the location, completely or not at all."""

    def command(self, start: Start) -> list[str]:
        """The command that starts a container."""

    def stop(self, start: Start) -> list[str] | None:
        """The command that ends a container whose process was killed; None if nothing can be left of it."""
