"""Which blocks to start and to give back, and when to stop trying. No I/O, no clock; instants are monotonic seconds.

The truth about a block is whether its managers speak; what a scheduler says is a reason to tell, not a state to act on.
After ``max_failures`` blocks in a row that ended without a single manager the *circuit breaker* opens: nothing is
started, and :attr:`Blocks.refusal` says why, in the scheduler's own words. When the pause is over, the next wish gets
one block to try; if that fails too, the next pause is twice as long.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Final

from farcall_common.backoff import Backoff
from farcall_endpoint.agent.scaling import BlockLoad, Monitor, ScalingPolicy

_HASTY_S: Final = 1.0
"""A block whose managers last no longer than this is not replaced at once."""
_MAX_BACKOFF_S: Final = 30.0
_FIRST_PAUSE_S: Final = 60.0
_MAX_PAUSE_S: Final = 1800.0


@dataclasses.dataclass(frozen=True)
class Orders:
    """What to do now: block ids to start, and blocks to give back."""

    start: tuple[str, ...] = ()
    release: tuple[str, ...] = ()


@dataclasses.dataclass
class _Block:
    slots: dict[str, int] = dataclasses.field(default_factory=dict)  # of its managers
    joined_at: float | None = None
    released: bool = False
    working: bool = False
    failed: bool = False
    idle_since: float | None = None


class Blocks:
    """One per fleet.

    :param first_blocks: to start whatever the policy says.
    :param slots_per_block: to expect of a block until one has shown how many it has.
    :param max_failures: in a row, until the breaker opens.
    :param backoff_s: pause after the first failure in a row; it doubles with each.
    :param new_block_id: makes ids.
    """

    def __init__(
        self,
        *,
        policy: ScalingPolicy,
        first_blocks: int,
        slots_per_block: int,
        max_failures: int,
        backoff_s: float,
        new_block_id: Callable[[], str],
    ) -> None:
        self._policy = policy
        self._first_blocks = first_blocks
        self._slots_per_block = slots_per_block
        self._max_failures = max_failures
        self._backoff = Backoff(first_s=backoff_s, most_s=_MAX_BACKOFF_S)
        self._pause = Backoff(first_s=_FIRST_PAUSE_S, most_s=_MAX_PAUSE_S)
        self._new_block_id = new_block_id
        self._blocks: dict[str, _Block] = {}
        self._not_before = 0.0
        self._refusal = ""
        self._last_words = ""

    @property
    def refusal(self) -> str:
        """Why no block can be had: what waits should fail with this. Empty while there is hope."""
        return self._refusal

    @property
    def problem(self) -> str:
        """What went wrong lately, while it is not mended."""
        return self._refusal or self._last_words

    def joined(self, block_id: str, manager_id: str, *, slots: int, now: float) -> None:
        """A manager of a block is there; whether it can start workers is not known yet."""
        block = self._blocks[block_id]
        block.slots[manager_id] = slots
        block.joined_at, block.idle_since = now, now
        self._slots_per_block = max(1, sum(block.slots.values()))

    def working(self, block_id: str) -> None:
        """A manager of a block has a worker."""
        block = self._blocks.get(block_id)
        if block is not None and not block.working:
            block.working = True
            self._backoff.reset()
            self._pause.reset()
            self._refusal = self._last_words = ""

    def failed(self, block_id: str) -> None:
        """A manager of a block could not start workers."""
        self._blocks[block_id].failed = True

    def left(self, block_id: str, manager_id: str) -> None:
        """A manager is gone; its block may have others."""
        block = self._blocks.get(block_id)
        if block is not None:
            block.slots.pop(manager_id, None)

    def ended(self, block_id: str, reason: str, *, now: float) -> None:
        """A block is over, or could not be started."""
        block = self._blocks.pop(block_id, None)
        if block is None or block.released:
            return
        if block.joined_at is not None and (block.working or not block.failed):
            hasty = now - block.joined_at < _HASTY_S
            self._not_before = max(self._not_before, now + self._backoff.first_s if hasty else now)
            return
        wait_s, failures = self._backoff.next_s(), self._backoff.failures
        what = "could not start workers" if block.failed else "ended before it brought a manager"
        self._last_words = f"a block {what}: {reason}"
        if failures < self._max_failures:
            self._not_before = now + wait_s
            return
        self._not_before = now + self._pause.next_s()
        what = "could not start workers" if block.failed else "ended before they brought a manager"
        self._refusal = f"{failures} blocks in a row {what}; the last one: {reason}"

    def decide(self, *, tasks: int, busy: Collection[str], now: float) -> Orders:
        """What to do now.

        :param tasks: that wait or run.
        :param busy: blocks that have a task.
        """
        for block_id, block in self._blocks.items():
            if block_id in busy:
                block.idle_since = None
            elif block.idle_since is None and block.slots:
                block.idle_since = now
        standing = {block_id: block for block_id, block in self._blocks.items() if not block.released}
        loads = [
            BlockLoad(
                block_id,
                sum(block.slots.values()),
                None if block.idle_since is None or not block.slots else now - block.idle_since,
            )
            for block_id, block in standing.items()
        ]
        wish = self._policy.wish(Monitor(tasks, self._slots_per_block, loads))
        started: tuple[str, ...] = ()
        if now >= self._not_before:
            self._refusal = ""
            more = max(wish.more, self._first_blocks - len(standing))
            more = min(more, 1) if self._backoff.failures else more  # one to try
            started = tuple(self._new_block_id() for _ in range(more))
            self._first_blocks = 0
        for block_id in started:
            self._blocks[block_id] = _Block()
        for block_id in wish.release:
            self._blocks[block_id].released = True
        return Orders(started, wish.release)
