"""One cloud tier and one endpoint for all pages."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from farcall_local.endpoint import LocalEndpoint
from farcall_local.tier import LocalTier


@pytest.fixture(scope="session")
def bare_environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The environment of a user who has installed Farcall and configured nothing."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("FARCALL_")}
    programs = str(Path(sys.executable).parent)
    home = tmp_path_factory.mktemp("home")
    return {**own, "PATH": f"{programs}{os.pathsep}{own['PATH']}", "FARCALL_HOME": str(home), "COLUMNS": "120"}


@pytest.fixture(scope="session")
def environment(bare_environment: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """The environment of a user who has a cloud tier, and an endpoint named ``here`` that is online."""
    home = Path(bare_environment["FARCALL_HOME"])
    with LocalTier() as tier, LocalEndpoint("here", home=home, environment=tier.environment()):
        yield {**bare_environment, **tier.environment()}
