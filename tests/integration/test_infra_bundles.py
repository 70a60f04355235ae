"""Code bundles for AWS: wheels for its processor, small, built without compiler and docker."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from farcall_infra.bundles import ARM64, FORWARDER, HOST, LAMBDAS, Bundle

_MB = 1_000_000
_ARM64_ELF = 183  # e_machine of an ELF file


@pytest.mark.parametrize(
    ("bundle", "unpacked_mb", "packed_mb"),
    # Lambda's limit is 250 MB; a cold start reads all of it, so ours are far smaller.
    [(LAMBDAS, 75, 22), (FORWARDER, 48, 13)],
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


@pytest.mark.parametrize(
    ("bundle", "modules"),
    [
        (
            LAMBDAS,
            "farcall_lambdas.app, farcall_lambdas.authorizer, farcall_lambdas.migrator, globus_sdk, migration_resource",
        ),
        (FORWARDER, "farcall_forwarder.__main__"),
    ],
    ids=["lambdas", "forwarder"],
)
def test_a_bundle_has_all_imports_of_its_programs(tmp_path: Path, bundle: Bundle, modules: str) -> None:
    bundle.build(tmp_path, platform=HOST)
    # Lambda's own Python has boto3; all other packages must be in the bundle. -I and -S: nothing of this environment.
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {modules}"
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True, cwd=tmp_path)


def test_a_bundle_for_another_processor_has_byte_code_if_its_python_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """This Python replaces that of AWS, which may not be installed here."""
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    platform = dataclasses.replace(ARM64, python_version=HOST.python_version)
    small = Bundle("small", member="farcall-common", sources=("common/farcall_common",))
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
    unread = [path for path in (tmp_path / "with").rglob("*") if path.suffix in (".pyx", ".pxd", ".c", ".h")]
    assert unread == []
