"""Code bundles: their digest, requirements and packages."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import uv

from farcall_infra.bundles import ARM64, FORWARDER, HOST, LAMBDAS, Bundle, package_directory

ROOT = Path(__file__).parents[2]


def test_the_digest_is_stable_and_differs_by_platform_and_bundle() -> None:
    assert LAMBDAS.digest(ARM64) == LAMBDAS.digest(ARM64)
    assert len({LAMBDAS.digest(ARM64), LAMBDAS.digest(HOST), FORWARDER.digest(ARM64)}) == 3


@pytest.mark.parametrize(
    ("bundle", "member", "omitted"),
    [
        (LAMBDAS, "farcall-lambdas", ()),  # with boto3: that of Lambda's runtime changes by itself
        (FORWARDER, "farcall-forwarder", ("alembic",)),  # only the API runs migrations
    ],
    ids=["lambdas", "forwarder"],
)
def test_requirements_are_those_of_the_lock_file(bundle: Bundle, member: str, omitted: tuple[str, ...]) -> None:
    """``FARCALL_UPDATE_SNAPSHOTS=1`` renews them."""
    prunes = [argument for name in omitted for argument in ("--prune", name)]
    options = ["--no-dev", "--no-emit-workspace", "--no-annotate", "--no-header", *prunes]
    export = [uv.find_uv_bin(), "export", "--quiet", "--frozen", "--package", member, *options]
    locked = subprocess.run(export, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    if os.environ.get("FARCALL_UPDATE_SNAPSHOTS"):
        bundle.requirements.write_text(locked, encoding="utf-8")
    assert bundle.requirements.read_text(encoding="utf-8") == locked


def test_requirements_have_hashes_and_no_omitted_packages() -> None:
    requirements, forwarder = (bundle.requirements.read_text(encoding="utf-8") for bundle in (LAMBDAS, FORWARDER))
    assert "aws-lambda-powertools==" in requirements
    assert requirements.count("--hash=sha256:") > requirements.count("==")
    assert "boto3==" in requirements
    assert "boto3==" in forwarder
    assert "sqlalchemy==" in requirements
    assert "sqlalchemy==" not in forwarder


def test_user_code_libraries_are_in_no_bundle() -> None:
    for bundle in (LAMBDAS, FORWARDER):
        requirements = bundle.requirements.read_text(encoding="utf-8")
        assert "dill==" not in requirements
        assert "cloudpickle==" not in requirements


def test_packages_are_found_where_they_are_installed() -> None:
    for bundle in (LAMBDAS, FORWARDER):
        for package in bundle.packages:
            assert (package_directory(package) / "__init__.py").exists()
