"""Checkout: its paths, locks for files that several tiers share, and LocalStack's own Python environment.

The offline tier needs a checkout: it synthesises the app from its sources.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import uv

from farcall_common.errors import ConfigurationError

WORKSPACE: Final = Path(__file__).resolve().parents[2]
ASSEMBLIES: Final = WORKSPACE / "cdk.out" / "localstack"
_PLUGIN: Final = WORKSPACE / "localstack" / "plugin"
_CONSTRAINTS: Final = WORKSPACE / "localstack" / "constraints.txt"
# LocalStack's environment pins versions that the project must not be pinned to.
_ENVIRONMENT: Final = WORKSPACE / ".venv-localstack"


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock for ``path`` (on the file ``path.lock``), waiting for it if ``wait``.

    :raises BlockingIOError: if another process holds it, without ``wait``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def ensure_environment(directory: Path = _ENVIRONMENT) -> Path:
    """Create or update LocalStack's environment, once per set of constraints; returns its interpreter.

    :raises ConfigurationError: if uv cannot install it, for instance without a network on the first run.
    """
    python = directory / "bin" / "python"
    marker = directory / "farcall-made-from"
    wanted = _digest()
    with locked(ASSEMBLIES / "environment"):
        if not (python.exists() and marker.exists() and marker.read_text(encoding="utf-8") == wanted):
            _uv("venv", "--quiet", "--clear", "--python", sys.executable, str(directory))
            install = ("pip", "install", "--quiet", "--python", str(python), "--no-deps")
            _uv(*install, "-r", str(_CONSTRAINTS))
            _uv(*install, "--editable", str(_PLUGIN))
            marker.write_text(wanted, encoding="utf-8")
    return python


def _digest() -> str:
    inputs = hashlib.sha256(sys.version.encode())
    for path in (_CONSTRAINTS, _PLUGIN / "pyproject.toml"):
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
