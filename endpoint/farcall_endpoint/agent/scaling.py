"""How many blocks there should be: a seam. A policy is a pure class; it sees numbers and gives back a wish.

In the paper's words (HPDC 2020, section 4.4): a monitor says how many workers are busy and how many tasks wait, and a
strategy turns that into a number of blocks, as aggressively as its ``parallelism`` says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class BlockLoad:
    """A block as a policy sees it. ``slots``: 0 while none of its managers is there. ``idle_s``: seconds without a
    task; None while it has one, or has no manager yet."""

    block_id: str
    slots: int
    idle_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Monitor:
    """How it stands. ``tasks``: that wait or run. ``slots_per_block``: to expect of a block without managers."""

    tasks: int
    slots_per_block: int
    blocks: Sequence[BlockLoad] = ()


@dataclasses.dataclass(frozen=True)
class Wish:
    """What a policy wants: so many blocks more, and these given back."""

    more: int = 0
    release: tuple[str, ...] = ()


class ScalingPolicy(Protocol):
    """Decides how many blocks there should be."""

    def wish(self, monitor: Monitor) -> Wish:
        """What to change. Asked about once a second; the same wish may come again until it is fulfilled."""


class SimpleScaling:
    """A slot for every ``1 / parallelism`` tasks, between a least and a most; blocks idle for long are given back.

    :param min_blocks: never fewer.
    :param max_blocks: never more.
    :param parallelism: in (0, 1]: slots to have for each task that waits or runs.
    :param idle_release_s: a block without a task for so long may go.
    """

    def __init__(self, *, min_blocks: int, max_blocks: int, parallelism: float, idle_release_s: float) -> None:
        self._min_blocks = min_blocks
        self._max_blocks = max_blocks
        self._parallelism = parallelism
        self._idle_release_s = idle_release_s

    def wish(self, monitor: Monitor) -> Wish:
        """As :meth:`ScalingPolicy.wish`. A block that has a task, or is still on its way, is never given back; one that
        is idle for long though tasks wait is of no use to them: they need more time than it has left."""
        have = len(monitor.blocks)
        slots = sum(block.slots or monitor.slots_per_block for block in monitor.blocks)
        missing = monitor.tasks * self._parallelism - slots
        wanted = have + max(0, math.ceil(missing / max(1, monitor.slots_per_block)))
        more = min(max(wanted, self._min_blocks), self._max_blocks) - have
        if more > 0:
            return Wish(more=more)
        idle = [block for block in monitor.blocks if block.idle_s is not None and block.idle_s >= self._idle_release_s]
        idle.sort(key=lambda block: -(block.idle_s or 0.0))
        return Wish(release=tuple(block.block_id for block in idle[: max(0, have - self._min_blocks)]))
