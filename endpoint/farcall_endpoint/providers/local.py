"""The provider seam, and the provider for the machine that the agent runs on."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Protocol

__all__ = ["Block", "LocalProvider", "Provider"]


class Block(Protocol):
    """Managers that were started together and end together."""

    def fileno(self) -> int:
        """A descriptor that becomes readable at the block's end."""

    def ended(self) -> str | None:
        """How the block ended; None while it lives."""

    def kill(self) -> None:
        """End the block now."""

    def close(self) -> None:
        """Give back what the block holds; only after its end."""


class Provider(Protocol):
    """Starts blocks."""

    def start(self, command: Sequence[str], *, environment: Mapping[str, str]) -> Block:
        """Start a block whose nodes each run ``command``.

        :raises OSError: if that is not possible now.
        """


class LocalProvider:
    """A block is one process on this machine."""

    def start(self, command: Sequence[str], *, environment: Mapping[str, str]) -> Block:
        """Start the manager in a session of its own, so that a Ctrl-C on the terminal reaches the agent alone."""
        return _LocalBlock(
            subprocess.Popen(command, stdin=subprocess.DEVNULL, env=dict(environment), start_new_session=True)
        )


class _LocalBlock:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)

    def fileno(self) -> int:
        return self._pidfd

    def ended(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def close(self) -> None:
        self._process.wait()
        os.close(self._pidfd)
