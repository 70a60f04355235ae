"""Preparation of environments: what a manager and its process of preparations tell each other, a message in each line.

The process is :mod:`~farcall_endpoint.environments.prepare.preparation_process`.
"""

from __future__ import annotations

import msgspec

from farcall_common.environments import Environment
from farcall_common.errors import ErrorRecord
from farcall_endpoint.config.settings import EnvironmentSettings
from farcall_endpoint.environments.prepare.access import Place
from farcall_endpoint.environments.prepare.bundle import Abi


class _Message(msgspec.Struct, frozen=True, tag=True):
    """A line."""


class Prepare(_Message, frozen=True):
    """Prepare an environment. Answered by Prepared or Failed. ``trusted``: the owner of the endpoint has named it, so
    its Python may be asked without confinement."""

    environment: Environment
    trusted: bool = False


class Locate(_Message, frozen=True):
    """Look up what an environment of another submitter than the owner names on the node. Answered by Located."""

    environment: Environment


class Ping(_Message, frozen=True):
    """Give a sign of life. Answered by Alive."""


class Release(_Message, frozen=True):
    """An environment is not used any more: what was prepared may be removed from the cache."""

    key: str


class Started(_Message, frozen=True):
    """A container was started, which this command ends if the manager does not live to say Ended."""

    name: str
    stop: tuple[str, ...]


class Ended(_Message, frozen=True):
    """The process of a container has ended: make sure of the container, too, unless nothing can be left of it."""

    name: str
    stops: bool = True


class Progressed(_Message, frozen=True):
    """Present step of a preparation, as text for users."""

    key: str
    text: str


class Prepared(_Message, frozen=True):
    """An environment can be started: with this Python of the image, and the worker's code in ``bundle``."""

    key: str
    image: str
    python: str
    abi: Abi
    bundle: str


class Failed(_Message, frozen=True):
    """An environment cannot be prepared."""

    key: str
    record: ErrorRecord


class Crowded(_Message, frozen=True):
    """The cache is above its limit, and all entries are in use: release those that are not needed now."""


class Located(_Message, frozen=True):
    """File or directory that an environment names on the node; None if there is nothing to check. ``record``: reason
    why its tasks cannot use it."""

    environment: Environment
    place: Place | None = None
    record: ErrorRecord | None = None


class Alive(_Message, frozen=True):
    """The process has started, or answers Ping."""


Order = Prepare | Locate | Ping | Release | Started | Ended
PreparationReport = Progressed | Prepared | Failed | Crowded
Report = PreparationReport | Located | Alive


class PreparationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the process of preparations.

    :param log_dir: directory for the output of runners; empty: none is kept.
    :param run_dir: the manager's directory for sockets, which is removed with the manager.
    :param confined: whether bubblewrap confines environments that submitters name, if their runner does not.
    :param isolated: whether submitters other than the owner may read ``readable`` only.
    :param readable: paths that submitters other than the owner may read.
    :param writable: directories in which their tasks may write, besides the directories of ``environments``.
    :param passed: see :func:`~farcall_endpoint.host.isolation.environment.for_submitter`.
    """

    environments: EnvironmentSettings
    cache: str
    log_dir: str = ""
    run_dir: str = ""
    confined: bool = False
    isolated: bool = False
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
