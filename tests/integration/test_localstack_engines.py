"""Programs of PostgreSQL and Valkey for the offline tier, from their wheels."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from farcall_localstack.server import postgres_bin, public_copy, valkey_server


def _version(program: Path) -> str:
    return subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout


def test_postgres_and_valkey_programs_run() -> None:
    assert "PostgreSQL) 16" in _version(postgres_bin() / "postgres")
    assert "Valkey" in _version(valkey_server())


def test_a_copy_for_another_user_runs_and_is_created_once(tmp_path: Path) -> None:
    wheel = postgres_bin().parent
    root = tmp_path / "farcall-postgres"
    copy = public_copy(wheel, root)
    assert "PostgreSQL) 16" in _version(copy / "bin" / "postgres")
    assert "createdb" in _version(copy / "bin" / "createdb")  # it needs the libraries next to the package
    assert all(path.stat().st_mode & 0o001 for path in (root, copy.parent, copy, copy / "bin"))

    made = root.stat().st_ino
    assert public_copy(wheel, root) == copy
    assert root.stat().st_ino == made
    assert list(tmp_path.iterdir()) == [root]


def test_a_copy_that_is_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    root = tmp_path / "farcall-postgres"
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="another user"):
        public_copy(postgres_bin().parent, root)
