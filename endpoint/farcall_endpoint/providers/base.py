"""Provider interface: providers start blocks. A block is one job of a scheduler; each of its nodes runs a manager."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Protocol

from farcall_endpoint.host.pipe import Pipe


class Phase(enum.Enum):
    """State of a block, as far as its provider knows."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


@dataclasses.dataclass(frozen=True)
class BlockStatus:
    """A hint. ``text`` is from the scheduler: why a block waits, how it ended. ``refused``: the scheduler has answered
    that it does not take the block."""

    phase: Phase
    text: str = ""
    refused: bool = False


class Block(Protocol):
    """Managers that start and end together."""

    @property
    def pipe(self) -> Pipe | None:
        """The connection to a manager on this machine; other managers connect to the agent's socket."""

    def status(self) -> BlockStatus:
        """The last known status."""

    def kill(self) -> None:
        """End the block; returns at once, and may be called again."""

    def close(self) -> None:
        """Release the block's resources; only after its end."""


class Provider(Protocol):
    """Starts blocks. No method waits for a scheduler."""

    #: Lifetime of a block in seconds; None for no limit.
    walltime_s: float | None

    def fileno(self) -> int:
        """A descriptor that is readable while the status of some block may have changed."""

    def changed(self) -> None:
        """The caller has read the status of all blocks; called whenever the descriptor is readable."""

    def start(self, command: Sequence[str], *, block_id: str, environment: Mapping[str, str], image: str = "") -> Block:
        """Start a block whose nodes each run ``command``, with these variables in addition to those of the site.

        :param image: of the block's pod, instead of the configured one; empty where blocks are no pods.

        :raises OSError: if that is not possible now.
        """

    def close(self) -> None:
        """Release all resources, without waiting for blocks that have not ended."""
