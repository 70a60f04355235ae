"""Registry of container runners, by the type of environment that they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from farcall_endpoint.environments.runner import Runner

RUNNERS: Final[Mapping[str, Runner]] = {}
