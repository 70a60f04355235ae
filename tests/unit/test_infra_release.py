"""The release of an installation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from farcall_infra.release import this_release

_FILES = (
    "common/farcall_common/errors.py",
    "forwarder_fargate/farcall_forwarder/service.py",
    "infra/farcall_infra/cloud/cli.py",
    "infra/farcall_infra/constructs/stores.py",
    "infra/profiles.toml",
    "infra/runtime/fargate_boot.py",
    "lambdas/farcall_lambdas/app.py",
    "sdk/farcall/_client.py",
    "uv.lock",
)


def _workspace(directory: Path, changed: str = "") -> Path:
    for name in _FILES:
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("other" if name == changed else "same", encoding="utf-8")
    return directory


def test_a_release_is_a_version_and_a_digest() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\+[0-9a-f]{12}", this_release())


def test_the_digest_ignores_the_path_and_byte_code(tmp_path: Path) -> None:
    other = _workspace(tmp_path / "other")
    cache = other / "lambdas" / "farcall_lambdas" / "__pycache__"
    cache.mkdir()
    (cache / "app.cpython-311.pyc").touch()
    assert this_release(other) == this_release(_workspace(tmp_path / "one"))


@pytest.mark.parametrize("changed", _FILES)
def test_the_digest_depends_only_on_deployed_sources(tmp_path: Path, changed: str) -> None:
    """Settings are recorded separately, and code that only reads or uses deployments is not a part of them."""
    before, after = this_release(_workspace(tmp_path / "before")), this_release(_workspace(tmp_path / "after", changed))
    is_deployed = changed not in ("infra/farcall_infra/cloud/cli.py", "infra/profiles.toml", "sdk/farcall/_client.py")
    assert (before != after) is is_deployed
