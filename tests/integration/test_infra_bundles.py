"""Bundles as AWS gets them: wheels for its processor, no compiler and no docker, and small."""

from __future__ import annotations

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
    # Lambda takes 250 MB; a cold start reads all of it, so ours are far below.
    [(LAMBDAS, 75, 22), (FORWARDER, 65, 30)],
    ids=["lambdas", "forwarder"],
)
def test_a_bundle_for_arm64_is_small(tmp_path: Path, bundle: Bundle, unpacked_mb: int, packed_mb: int) -> None:
    directory = tmp_path / "bundle"
    bundle.build(directory, platform=ARM64)
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
        (LAMBDAS, "farcall_lambdas.app, farcall_lambdas.migrator, migration_resource"),
        (FORWARDER, "farcall_forwarder.__main__"),
    ],
    ids=["lambdas", "forwarder"],
)
def test_a_bundle_has_all_that_its_programs_import(tmp_path: Path, bundle: Bundle, modules: str) -> None:
    bundle.build(tmp_path, platform=HOST)
    # Lambda's own Python has boto3; all else has to be in the bundle. -I and -S: nothing of this environment.
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {modules}"
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True, cwd=tmp_path)
