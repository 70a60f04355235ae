"""Code bundles: small, complete, with wheels for the target's processor, built without compiler and docker."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farcall_infra.bundles import ARM64, FORWARDER, HOST, LAMBDAS, Bundle, content_digest
from farcall_infra.cloud.cli import app
from farcall_localstack.assembly import is_whole, stack_names
from farcall_localstack.synth import ensure_assembly

_MB = 1_000_000
_ARM64_ELF = 183  # e_machine of an ELF file


@pytest.mark.parametrize(
    ("bundle", "unpacked_mb", "packed_mb"),
    # Lambda's limit is 250 MB; a cold start reads all of it, so ours are far smaller.
    [(LAMBDAS, 79, 24), (FORWARDER, 48, 13)],
    ids=["lambdas", "forwarder"],
)
def test_a_bundle_for_arm64_is_small(tmp_path: Path, bundle: Bundle, unpacked_mb: int, packed_mb: int) -> None:
    """Without byte code, which needs an installed Python."""
    directory = tmp_path / "bundle"
    bundle.build(directory, platform=ARM64)
    for path in list(directory.rglob("*.pyc")):
        path.unlink()
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= unpacked_mb * _MB
    archive = Path(shutil.make_archive(str(tmp_path / "packed"), "zip", directory))
    assert archive.stat().st_size <= packed_mb * _MB
    libraries = [path for path in files if ".so" in path.suffixes]
    assert libraries
    for library in libraries:
        header = library.read_bytes()[:20]
        assert int.from_bytes(header[18:20], "little") == _ARM64_ELF, library


@pytest.fixture(scope="module")
def assembly() -> Path:
    """Bundles for this machine, as LocalStack runs them."""
    return ensure_assembly()


def _bundle(assembly: Path, package: str) -> Path:
    (init,) = assembly.glob(f"asset.*/{package}/__init__.py")
    return init.parents[1]


@pytest.mark.slow
def test_the_command_line_writes_an_assembly_that_can_be_deployed(assembly: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["synth", "-c", "target=localstack", "--output", str(out)])
    assert done.exit_code == 0, done.output
    assert done.output == f"{out}\n"
    assert is_whole(out)
    assert stack_names(out) == stack_names(assembly)
    assert {path.name for path in out.glob("asset.*")} == {
        path.name for path in assembly.glob("asset.*") if path.is_dir()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "module"),
    [
        ("farcall_lambdas", "farcall_lambdas.handlers.api"),
        ("farcall_lambdas", "farcall_lambdas.handlers.authorizer"),
        ("farcall_lambdas", "farcall_lambdas.handlers.reconciler"),
        ("farcall_lambdas", "farcall_lambdas.handlers.canary, farcall_lambdas.handlers.exchange_cache, boto3"),
        ("farcall_lambdas", "farcall_lambdas.handlers.migrator, globus_sdk, migration_resource"),
        ("farcall_forwarder", "farcall_forwarder.__main__"),
    ],
)
def test_a_bundle_needs_only_the_standard_library(assembly: Path, package: str, module: str) -> None:
    program = f"import sys; sys.path.insert(0, {str(_bundle(assembly, package))!r}); import {module}"
    # -I and -S: no environment variables, no site-packages.
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_no_bundle_can_deserialize_user_bytes(assembly: Path) -> None:
    for package in ("farcall_lambdas", "farcall_forwarder"):
        bundle = _bundle(assembly, package)
        assert not (bundle / "dill").exists()
        assert not (bundle / "cloudpickle").exists()


def test_a_bundle_for_another_processor_has_byte_code_if_its_python_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """This Python replaces that of AWS, which may not be installed here."""
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    platform = dataclasses.replace(ARM64, python_version=HOST.python_version)
    requirements = tmp_path / "requirements.txt"
    locked = FORWARDER.requirements.read_text(encoding="utf-8")
    requirements.write_text(locked[locked.index("msgspec==") :].partition("\npsycopg==")[0], encoding="utf-8")
    small = Bundle("small", requirements=requirements, packages=("farcall_common",))
    small.build(tmp_path / "with", platform=platform)
    sources = {path.relative_to(tmp_path / "with") for path in (tmp_path / "with").rglob("*.py")}
    assert len(sources) > 50
    for source in sources:
        code = Path(importlib.util.cache_from_source(str(tmp_path / "with" / source))).read_bytes()
        assert code[:4] == importlib.util.MAGIC_NUMBER
        assert int.from_bytes(code[4:8], "little") == 1, "Python would compare it with its source"  # PEP 552
    assert capfd.readouterr().err == ""
    small.build(tmp_path / "without", platform=dataclasses.replace(ARM64, python_version="3.14.99"))
    assert not list((tmp_path / "without").rglob("*.pyc"))
    assert "no byte code" in capfd.readouterr().err
    # So a bundle that gets byte code later is another asset.
    assert content_digest(tmp_path / "with") != content_digest(tmp_path / "without")
    unread = [path for path in (tmp_path / "with").rglob("*") if path.suffix in (".pyx", ".pxd", ".c", ".h")]
    assert unread == []
