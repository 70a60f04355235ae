"""The provider seam: where blocks come from. A block is what a scheduler gives at a time; each node runs a manager."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Protocol

from farcall_endpoint.pipe import Pipe


class Phase(enum.Enum):
    """How far a block is, as far as its provider can tell."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


@dataclasses.dataclass(frozen=True)
class BlockStatus:
    """A hint. ``text`` is the scheduler's own: why a block waits, how it ended."""

    phase: Phase
    text: str = ""


class Block(Protocol):
    """Managers that were started together and end together."""

    @property
    def pipe(self) -> Pipe | None:
        """The way to the manager of a block on this machine; others find theirs to the agent's socket."""

    def status(self) -> BlockStatus:
        """What is known of it without asking anybody now."""

    def kill(self) -> None:
        """End the block; returns at once, and may be called again."""

    def close(self) -> None:
        """Give back what the block holds; only after its end."""


class Provider(Protocol):
    """Starts blocks. No method waits for a scheduler."""

    #: Seconds that a block lives; None if it has no end.
    walltime_s: float | None

    def fileno(self) -> int:
        """A descriptor that is readable while the status of some block may have changed."""

    def changed(self) -> None:
        """All blocks were asked for their status; called whenever the descriptor is readable."""

    def start(self, command: Sequence[str], *, block_id: str, environment: Mapping[str, str]) -> Block:
        """Start a block whose nodes each run ``command``, with these variables beside those of the site.

        :raises OSError: if that is not possible now.
        """

    def close(self) -> None:
        """Give everything back. Blocks that have not ended are not waited for."""
