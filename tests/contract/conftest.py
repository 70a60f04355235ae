"""Fixtures of the contract tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from farcall_infra.profiles import Profile, load_profile
from tests.contract.templates import PROFILES, Templates, ensure_assemblies, read_templates


@pytest.fixture(scope="session")
def assemblies(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The directory of all assemblies, ``TARGET/PROFILE`` and ``options/NAME``."""
    own = tmp_path_factory.getbasetemp()
    directory = (own if worker_id == "master" else own.parent) / "assemblies"
    ensure_assemblies(directory)
    return directory


@pytest.fixture(scope="session")
def synthesized(assemblies: Path) -> Callable[[str, str], Templates]:
    """Templates by target and profile, or by "options" and name."""
    return functools.cache(lambda target, profile: read_templates(assemblies / target / profile))


@pytest.fixture(params=PROFILES)
def profile(request: pytest.FixtureRequest) -> str:
    """Every profile in turn."""
    return str(request.param)


@pytest.fixture
def size(profile: str) -> Profile:
    """What the profile asks for."""
    return load_profile(profile)


@pytest.fixture
def aws(synthesized: Callable[[str, str], Templates], profile: str) -> Templates:
    """What goes to AWS, by stack."""
    return synthesized("aws", profile)


@pytest.fixture
def localstack(synthesized: Callable[[str, str], Templates], profile: str) -> Templates:
    """What goes to the offline tier, by stack."""
    return synthesized("localstack", profile)
