"""Registry of container runners, by the type of environment that they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from farcall_endpoint.environments.apptainer import ApptainerRunner
from farcall_endpoint.environments.bubblewrap import BubblewrapRunner
from farcall_endpoint.environments.charliecloud import CharliecloudRunner
from farcall_endpoint.environments.oci import OciRunner
from farcall_endpoint.environments.prefixes import PrefixRunner
from farcall_endpoint.environments.runner import Runner
from farcall_endpoint.environments.shifter import ShifterRunner

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
)
RUNNERS: Final[Mapping[str, Runner]] = {runner.type: runner for runner in _RUNNERS}
