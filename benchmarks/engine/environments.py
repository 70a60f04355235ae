"""Peer environments: one virtual environment for each peer, made by uv from ``peers/<name>.txt``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_HERE: Final = Path(__file__).parent
_REPOSITORY: Final = _HERE.parents[1]
_TIMEOUT_S: Final = 300


def interpreter_path(peer: str | None) -> Path:
    """The interpreter in a peer's environment, which need not exist; ours for None."""
    return Path(sys.executable) if peer is None else _HERE / ".venv-peers" / peer / "bin" / "python"


def interpreter(peer: str | None) -> Path:
    """The interpreter of a peer; creates its environment if necessary."""
    python = interpreter_path(peer)
    environment = python.parents[1]
    if peer is None:
        return python
    requirements = _HERE / "peers" / f"{peer}.txt"
    made = environment / ".made"  # with the requirements that it was made of
    if not made.exists() or made.read_text() != requirements.read_text():
        uv = shutil.which("uv") or str(_REPOSITORY / ".tools" / "bin" / "uv")
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(environment)], check=True)
        install = [uv, "pip", "install", "--quiet", "--python", str(python), "-r", str(requirements)]
        subprocess.run(install, check=True)
        shutil.copyfile(requirements, made)
    return python


def run_driver(
    python: Path, *arguments: str, driver: str = "benchmarks.engine.driver", variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a driver with this interpreter; returns the JSON of its last line.

    :param driver: its module.
    :param variables: more variables of its environment.
    :raises subprocess.SubprocessError: if it fails, or takes too long.
    :raises ValueError: if the last line is not JSON.
    """
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])  # Parsl looks for programs there
    environment = {
        **os.environ,
        "PYTHONPATH": str(_REPOSITORY),
        "PATH": path,
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        **(variables or {}),
    }
    for variable in ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"):
        environment.pop(variable, None)
    command = [str(python), "-m", driver, *arguments]
    with tempfile.TemporaryDirectory() as directory:  # some systems write logs into the current directory
        done = subprocess.run(
            command, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, check=True
        )
    figures: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return figures
