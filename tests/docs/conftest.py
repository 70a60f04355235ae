"""One cloud tier and one endpoint for all pages."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from farcall_local.endpoint import LocalEndpoint
from farcall_local.tier import LocalTier
from tests.support.packages import rebuild_wheel


@pytest.fixture(scope="session")
def bare_environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The environment of a user who has installed Farcall and configured nothing."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("FARCALL_")}
    programs = str(Path(sys.executable).parent)
    home = tmp_path_factory.mktemp("home")
    return {**own, "PATH": f"{programs}{os.pathsep}{own['PATH']}", "FARCALL_HOME": str(home), "COLUMNS": "120"}


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package index without network: a directory with a wheel."""
    folder = tmp_path_factory.mktemp("index")
    rebuild_wheel(folder, "idna")
    return folder


@pytest.fixture(scope="session")
def environment(bare_environment: Mapping[str, str], index: Path) -> Iterator[Mapping[str, str]]:
    """The environment of a user who has a cloud tier, and an endpoint named ``here`` that is online."""
    home = Path(bare_environment["FARCALL_HOME"])
    packages = {"UV_OFFLINE": "1", "UV_FIND_LINKS": str(index)}
    with LocalTier() as tier, LocalEndpoint("here", home=home, environment=packages | tier.environment()):
        yield {**bare_environment, **tier.environment()}
