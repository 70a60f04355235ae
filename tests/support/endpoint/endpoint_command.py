"""``farcall-endpoint`` as a user types it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.waiting import WAIT_S

PROGRAM: Final = str(Path(sys.executable).with_name("farcall-endpoint"))


class EndpointCommand:
    """Runs ``farcall-endpoint`` in an environment and a directory."""

    def __init__(self, environment: Mapping[str, str], directory: Path) -> None:
        self.environment = environment
        self._directory = directory

    def run(self, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        """The finished command; ``changes`` go into its environment."""
        return subprocess.run(
            [PROGRAM, *arguments],
            env={**self.environment, **changes},
            cwd=self._directory,
            text=True,
            capture_output=True,
            timeout=WAIT_S,
            check=False,
        )

    def ok(self, *arguments: str, **changes: str) -> str:
        """The output of a command that must succeed."""
        finished = self.run(*arguments, **changes)
        assert finished.returncode == 0, finished.stderr
        return finished.stdout
