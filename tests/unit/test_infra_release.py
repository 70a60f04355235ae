"""The release of an installation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from farcall_infra.release import sources_digest, this_release

_FILES = (
    "farcall_common/errors.py",
    "farcall_forwarder/service.py",
    "farcall_infra/cloud/cli.py",
    "farcall_infra/constructs/stores.py",
    "farcall_infra/profiles.toml",
    "farcall_infra/requirements/lambdas.txt",
    "farcall_infra/runtime/fargate_boot.py",
    "farcall_lambdas/app.py",
)


def _packages(directory: Path, changed: str = "") -> Mapping[str, Path]:
    for name in _FILES:
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("other" if name == changed else "same", encoding="utf-8")
    return {package.name: package for package in directory.iterdir()}


def test_a_release_is_a_version_and_a_digest() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\+[0-9a-f]{12}", this_release())


def test_the_digest_ignores_the_path_and_byte_code(tmp_path: Path) -> None:
    other = _packages(tmp_path / "other")
    cache = other["farcall_lambdas"] / "__pycache__"
    cache.mkdir()
    (cache / "app.cpython-311.pyc").touch()
    assert sources_digest(other) == sources_digest(_packages(tmp_path / "one"))


@pytest.mark.parametrize("changed", _FILES)
def test_the_digest_depends_only_on_deployed_sources(tmp_path: Path, changed: str) -> None:
    """Settings are recorded separately, and code that only reads or uses deployments is not a part of them."""
    before = sources_digest(_packages(tmp_path / "before"))
    after = sources_digest(_packages(tmp_path / "after", changed))
    is_deployed = changed not in ("farcall_infra/cloud/cli.py", "farcall_infra/profiles.toml")
    assert (before != after) is is_deployed
