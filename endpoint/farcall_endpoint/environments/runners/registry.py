"""Registry of container runners, by the type of environment that they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from farcall_endpoint.config.settings import EnvironmentSettings
from farcall_endpoint.environments.runners.apptainer import ApptainerRunner
from farcall_endpoint.environments.runners.base import Runner
from farcall_endpoint.environments.runners.bubblewrap import BubblewrapRunner
from farcall_endpoint.environments.runners.charliecloud import CharliecloudRunner
from farcall_endpoint.environments.runners.oci import OciRunner
from farcall_endpoint.environments.runners.prefixes import PrefixRunner
from farcall_endpoint.environments.runners.shifter import ShifterRunner
from farcall_endpoint.environments.runners.uv import UvRunner

_RUNNERS: Final[tuple[Runner, ...]] = (
    ApptainerRunner("apptainer"),
    ApptainerRunner("singularity"),
    BubblewrapRunner(),
    CharliecloudRunner(),
    OciRunner("docker"),
    OciRunner("podman"),
    OciRunner("podman-hpc"),
    PrefixRunner("conda"),
    PrefixRunner("venv"),
    ShifterRunner(),
    UvRunner(),
)
RUNNERS: Final[Mapping[str, Runner]] = {runner.type: runner for runner in _RUNNERS}


def runners_of(settings: EnvironmentSettings, *, readable: Sequence[str] = ()) -> Mapping[str, Runner]:
    """The runners of a node, as its settings want them.

    :param readable: what uv may read; empty: the system and Python.
    """
    uv = UvRunner(source_builds=settings.source_builds, index_url=settings.index_url, readable=readable)
    return {**RUNNERS, uv.type: uv}
