"""Completeness of code bundles: their programs can be imported with only the bundle and the standard library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from farcall_localstack.synth import ensure_assembly

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def assembly() -> Path:
    return ensure_assembly()


def _bundle(assembly: Path, package: str) -> Path:
    (init,) = assembly.glob(f"asset.*/{package}/__init__.py")
    return init.parents[1]


@pytest.mark.parametrize(
    ("package", "module"),
    [
        ("farcall_lambdas", "farcall_lambdas.handlers.api"),
        ("farcall_lambdas", "farcall_lambdas.handlers.authorizer"),
        ("farcall_lambdas", "farcall_lambdas.handlers.reconciler"),
        ("farcall_lambdas", "migration_resource"),
        ("farcall_forwarder", "farcall_forwarder.__main__"),
    ],
)
def test_a_bundle_needs_only_the_standard_library(assembly: Path, package: str, module: str) -> None:
    program = f"import sys; sys.path.insert(0, {str(_bundle(assembly, package))!r}); import {module}"
    # -I and -S: no environment variables, no site-packages. Packages of Lambda (boto3) are imported on first use.
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_bundle_can_deserialize_user_bytes(assembly: Path) -> None:
    for package in ("farcall_lambdas", "farcall_forwarder"):
        bundle = _bundle(assembly, package)
        assert not (bundle / "dill").exists()
        assert not (bundle / "cloudpickle").exists()
