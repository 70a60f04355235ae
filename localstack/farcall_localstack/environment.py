"""LocalStack's own Python environment, created once per set of constraints."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import uv

from farcall_common.errors import ConfigurationError
from farcall_localstack.locks import locked
from farcall_localstack.workspace import ASSEMBLIES, CONSTRAINTS, ENVIRONMENT, PLUGIN


def ensure_environment(directory: Path = ENVIRONMENT) -> Path:
    """Create or update LocalStack's environment; returns its interpreter.

    :raises ConfigurationError: if uv cannot install it, for instance without a network on the first run.
    """
    python = directory / "bin" / "python"
    marker = directory / "farcall-made-from"
    wanted = _digest()
    with locked(ASSEMBLIES / "environment"):
        if not (python.exists() and marker.exists() and marker.read_text(encoding="utf-8") == wanted):
            _uv("venv", "--quiet", "--clear", "--python", sys.executable, str(directory))
            install = ("pip", "install", "--quiet", "--python", str(python), "--no-deps")
            _uv(*install, "-r", str(CONSTRAINTS))
            _uv(*install, "--editable", str(PLUGIN))
            marker.write_text(wanted, encoding="utf-8")
    return python


def _digest() -> str:
    inputs = hashlib.sha256(sys.version.encode())
    for path in (CONSTRAINTS, PLUGIN / "pyproject.toml"):
        inputs.update(path.read_bytes())
    return inputs.hexdigest()


def _uv(*arguments: str) -> None:
    done = subprocess.run([uv.find_uv_bin(), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigurationError(
            f"uv {' '.join(arguments[:2])} failed: {done.stderr.strip()}",
            hint=f"LocalStack's environment needs a network once, free disk space, and Python 3.11 (this is "
            f"{sys.version_info[0]}.{sys.version_info[1]}).",
        )
