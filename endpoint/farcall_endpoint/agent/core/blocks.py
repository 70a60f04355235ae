"""Blocks: how many there should be, which to start and to return, and when to stop trying. Instants are monotonic
seconds.

A block counts as working while its managers report; the state that a scheduler gives is shown, not acted on. After a
block that ended without a worker, the next one is tried after a pause, which grows, and tasks wait. The
*circuit breaker* opens after ``max_failures`` such blocks in a row that also span a time, because a fault that ends by
itself should end no task: :attr:`Blocks.refusal` has the reason, in the scheduler's own words.

A scaling policy is a pure class that turns numbers into a decision. In the paper's words (HPDC 2020, section 4.4): a
monitor says how many workers are busy and how many tasks wait, and a strategy turns that into a number of blocks, as
aggressively as its ``parallelism`` says.

A slot counts for tasks that its node can run: see :mod:`farcall_endpoint.agent.core.demand`.

Where a block is a pod, it runs one image: that of the tasks of one environment, or the endpoint's own. Each image then
has its own demand and its own blocks, within the limits of all together.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Protocol

from farcall_common.backoff import Backoff
from farcall_endpoint.agent.core.demand import NodeLoad, missing_slots

_NONE: Final[Mapping[str, Any]] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class BlockLoad:
    """A block as a policy sees it. ``slots``: 0 while none of its managers is there. ``idle_s``: seconds without a
    task; None while it has one, or has no manager yet. ``image``: the key of its environment, or empty for its own.
    ``age_s``: since its last manager came; None before the first. ``nodes``: one for each manager that is there."""

    block_id: str
    slots: int
    idle_s: float | None = None
    image: str = ""
    age_s: float | None = None
    nodes: Sequence[NodeLoad] = ()

    @property
    def is_warm(self) -> bool:
        """Whether it has workers of an environment with waiting tasks."""
        return any(node.warm for node in self.nodes)


@dataclasses.dataclass(frozen=True)
class Monitor:
    """Input of a policy. ``tasks``: that wait or run. ``slots_per_block``: to expect of a block without managers.
    ``images``: the tasks of each image, by its key; None where a block runs all tasks. ``limited``: of the tasks, those
    of environments that some node cannot run, by key. ``prewarmed``: the slots that images are to have also without
    tasks."""

    tasks: int
    slots_per_block: int
    blocks: Sequence[BlockLoad] = ()
    images: Mapping[str, int] | None = None
    limited: Mapping[str, int] = dataclasses.field(default_factory=dict)
    prewarmed: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def nodes(self) -> list[NodeLoad]:
        """The nodes of all blocks. A block without managers counts as one node with its expected slots."""
        return [
            node for block in self.blocks for node in block.nodes or [NodeLoad(block.slots or self.slots_per_block)]
        ]


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The decision of a policy: ``more`` blocks to start and blocks to release. ``images``: images of the new blocks,
    if blocks have images. ``drain``: blocks that get no new tasks and can be released when they have none."""

    more: int = 0
    release: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()


class ScalingPolicy(Protocol):
    """Decides how many blocks there should be."""

    def scale(self, monitor: Monitor) -> Scaling:
        """The change to make. Called about once a second; the same may be returned until it is done."""


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

    def scale(self, monitor: Monitor) -> Scaling:
        """Release only blocks without tasks that have started. If a block stays idle although tasks wait, they need
        more time than it has left, or another node: it is released, too. Blocks that are warm for waiting tasks are
        released last."""
        if monitor.images is not None:
            return self._scale_images(monitor, monitor.images)
        have = len(monitor.blocks)
        nodes = monitor.nodes
        if self._are_in_vain(monitor):
            nodes = [NodeLoad(node.slots) for node in nodes]
        missing = missing_slots(monitor.tasks, monitor.limited, nodes, parallelism=self._parallelism)
        wanted = have + max(0, math.ceil(missing / max(1, monitor.slots_per_block)))
        more = min(max(wanted, self._min_blocks), self._max_blocks) - have
        if more > 0:
            return Scaling(more=more)
        idle = [block for block in monitor.blocks if block.idle_s is not None and block.idle_s >= self._idle_release_s]
        idle.sort(key=lambda block: (block.is_warm, -(block.idle_s or 0.0)))
        return Scaling(release=tuple(block.block_id for block in idle[: max(0, have - self._min_blocks)]))

    def _are_in_vain(self, monitor: Monitor) -> bool:
        """Whether several blocks came lately that cannot run some tasks: others are tried when these are old."""
        young = [
            block
            for block in monitor.blocks
            if block.idle_s is not None
            and block.age_s is not None
            and block.age_s < self._idle_release_s
            and any(node.unable for node in block.nodes)
        ]
        return len(young) >= _MOST_IN_VAIN

    def _scale_images(self, monitor: Monitor, tasks: Mapping[str, int]) -> Scaling:
        """Scale each image by its own tasks. New blocks go to the image with the fewest blocks. At ``max_blocks``, an
        idle block, or else a block of the image with the most blocks, makes room for an image that has too few.
        Pre-warmed blocks start after blocks for tasks, and make room only for blocks for tasks."""
        by_image: dict[str, list[BlockLoad]] = {image: [] for image in ("", *tasks, *monitor.prewarmed)}
        for block in monitor.blocks:
            by_image.setdefault(block.image, []).append(block)
        missing = {image: self._missing(tasks.get(image, 0), blocks, monitor) for image, blocks in by_image.items()}
        total, new = len(monitor.blocks), list[str]()
        have = {image: len(blocks) for image, blocks in by_image.items()}
        missing[""] = max(missing[""], self._min_blocks - total - sum(missing.values()) + missing[""])
        while total + len(new) < self._max_blocks and (lacking := [each for each in missing if missing[each] > 0]):
            image = min(lacking, key=lambda each: have[each])
            new.append(image)
            have[image] += 1
            missing[image] -= 1
        ahead = [
            image
            for image, slots in monitor.prewarmed.items()
            for _ in range(math.ceil(slots / max(1, monitor.slots_per_block)) - have[image])
        ]
        new += ahead[: max(0, self._max_blocks - total - len(new))]
        if new:
            return Scaling(more=len(new), images=tuple(new))
        lacking = [image for image, count in missing.items() if count > 0]
        kept = _prewarmed_blocks(by_image, monitor)
        idle = sorted(
            (block for block in monitor.blocks if block.idle_s is not None and not tasks.get(block.image)),
            key=lambda block: (block.block_id in kept, -(block.idle_s or 0.0)),
        )
        if lacking and not idle:
            return self._drain_one(by_image, min(lacking, key=lambda each: have[each]))
        if lacking:
            return Scaling(release=tuple(block.block_id for block in idle[: len(lacking)]))
        idle = [block for block in idle if block.block_id not in kept]
        if ahead:
            return Scaling(release=tuple(block.block_id for block in idle[: len(ahead)]))
        long = [block for block in idle if (block.idle_s or 0.0) >= self._idle_release_s]
        return Scaling(release=tuple(block.block_id for block in long[: max(0, total - self._min_blocks)]))

    def _missing(self, tasks: int, blocks: Sequence[BlockLoad], monitor: Monitor) -> int:
        """Return the number of blocks that an image lacks for its tasks."""
        slots = sum(block.slots or monitor.slots_per_block for block in blocks)
        return max(0, math.ceil((tasks * self._parallelism - slots) / max(1, monitor.slots_per_block)))

    def _drain_one(self, by_image: Mapping[str, Sequence[BlockLoad]], lacking: str) -> Scaling:
        """Drain one block of the image with the most blocks, and release it when it has no tasks. The block must have
        worked for a while, so that two images do not take it from each other all the time."""
        most = max(by_image.values(), key=len)
        old = [block for block in most if block.age_s is not None and block.age_s >= _DRAIN_AFTER_S]
        if not old or (by_image[lacking] and len(most) < len(by_image[lacking]) + 2):
            return Scaling()
        block = min(old, key=lambda each: (each.idle_s is None, each.block_id))
        is_free = block.idle_s is not None
        return Scaling(release=(block.block_id,) if is_free else (), drain=() if is_free else (block.block_id,))


def _prewarmed_blocks(by_image: Mapping[str, Sequence[BlockLoad]], monitor: Monitor) -> set[str]:
    """Return the blocks that the owner's pre-warming requests need, also without tasks."""
    kept = set[str]()
    for image, slots in monitor.prewarmed.items():
        for block in sorted(by_image[image], key=lambda each: each.idle_s or 0.0):
            if slots > 0:
                kept.add(block.block_id)
                slots -= block.slots or monitor.slots_per_block
    return kept


_NODE: Final = NodeLoad()
_MOST_IN_VAIN: Final = 2
_DRAIN_AFTER_S: Final = 60.0
"""Seconds that a block works before it makes room for a block of another image."""
_HASTY_S: Final = 1.0
"""A block whose managers last no longer than this is not replaced at once."""
_MAX_BACKOFF_S: Final = 60.0
_REFUSED_PERIOD_S: Final = 300.0
"""Time in which a scheduler refuses each block, after which the next one has no better chance."""


@dataclasses.dataclass(frozen=True)
class Orders:
    """Block ids to start, and blocks to release. ``images``: the keys of those that start with another image than the
    endpoint's own. ``drain``: see :class:`Scaling`."""

    start: tuple[str, ...] = ()
    release: tuple[str, ...] = ()
    images: Mapping[str, str] = dataclasses.field(default_factory=dict)
    drain: tuple[str, ...] = ()


@dataclasses.dataclass
class _Block:
    slots: dict[str, int] = dataclasses.field(default_factory=dict)  # of its managers
    joined_at: float | None = None
    released: bool = False
    working: bool = False
    failed: bool = False
    idle_since: float | None = None
    image: str = ""


class Blocks:
    """One per fleet.

    :param first_blocks: to start whatever the policy says.
    :param slots_per_block: to expect of a block until one has shown how many it has.
    :param max_failures: in a row, until the endpoint is blocked, and the least until the breaker opens.
    :param failure_period_s: seconds that failures in a row span at least when the breaker opens; if the scheduler has
        refused all of these blocks, 300 s are enough. Time in which no block was wanted does not count.
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
        failure_period_s: float,
        backoff_s: float,
        new_block_id: Callable[[], str],
    ) -> None:
        self._policy = policy
        self._first_blocks = first_blocks
        self._slots_per_block = slots_per_block
        self._max_failures = max_failures
        self._backoff = Backoff(first_s=backoff_s, most_s=_MAX_BACKOFF_S)
        self._failure_period_s = failure_period_s
        self._refused_period_s = min(failure_period_s, _REFUSED_PERIOD_S)
        self._failing_since: float | None = None  # when the first of the blocks in a row failed
        self._refused_since: float | None = None
        self._new_block_id = new_block_id
        self._blocks: dict[str, _Block] = {}
        self._not_before = 0.0
        #: Why no block can be had: waiting tasks should fail with this. Empty while they should wait.
        self.refusal = ""
        #: Why the last block failed, until a block works again.
        self.problem = ""

    @property
    def blocked(self) -> str:
        """Why several blocks in a row failed, until a block works again; empty if they did not."""
        return self.problem if self._backoff.failures >= self._max_failures else ""

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
            self._failing_since = self._refused_since = None
            self.refusal = self.problem = ""

    def failed(self, block_id: str) -> None:
        """A manager of a block could not start workers."""
        self._blocks[block_id].failed = True

    def left(self, block_id: str, manager_id: str) -> None:
        """A manager is gone; its block may have others."""
        block = self._blocks.get(block_id)
        if block is not None:
            block.slots.pop(manager_id, None)

    def ended(self, block_id: str, reason: str, *, now: float, refused: bool = False) -> bool:
        """A block is over, or could not be started; whether it failed.

        :param refused: whether the scheduler has answered that it does not take the block.
        """
        block = self._blocks.pop(block_id, None)
        if block is None or block.released:
            return False
        if block.joined_at is not None and (block.working or not block.failed):
            hasty = now - block.joined_at < _HASTY_S
            self._not_before = max(self._not_before, now + self._backoff.first_s if hasty else now)
            return False
        self._not_before = now + self._backoff.next_s()
        failures = self._backoff.failures
        since = self._failing_since = now if self._failing_since is None else self._failing_since
        self._refused_since = (now if self._refused_since is None else self._refused_since) if refused else None
        what = "could not start workers" if block.failed else "ended before {} brought a manager"
        if failures < self._max_failures:
            self.problem = f"a block {what.format('it')}: {reason}"
            return True
        self.problem = f"{failures} blocks in a row {what.format('they')}; the last one: {reason}"
        is_final = self._refused_since is not None and now - self._refused_since >= self._refused_period_s
        if is_final or now - since >= self._failure_period_s:
            self.refusal = self.problem
        return True

    def _leave_out(self, unwanted_s: float) -> None:
        """Leave the time in which no block was wanted out of the time of failures."""
        if self._failing_since is not None:
            self._failing_since += unwanted_s
        if self._refused_since is not None:
            self._refused_since += unwanted_s

    def decide(
        self,
        *,
        tasks: int,
        busy: Collection[str],
        now: float,
        images: Mapping[str, int] | None = None,
        limited: Mapping[str, int] = _NONE,
        prewarmed: Mapping[str, int] = _NONE,
        nodes: Mapping[str, NodeLoad] = _NONE,
    ) -> Orders:
        """Return the blocks to start and to release now.

        :param tasks: waiting and running tasks.
        :param busy: blocks that have a task, or start their first worker or an environment that tasks wait for.
        :param images: the tasks of each image, where a block runs one.
        :param limited, prewarmed, nodes: see :class:`~farcall_endpoint.agent.core.demand.Demand`.
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
                block.image,
                None if block.joined_at is None else now - block.joined_at,
                [
                    dataclasses.replace(nodes.get(manager_id, _NODE), slots=slots)
                    for manager_id, slots in block.slots.items()
                ]
                if nodes
                else (),
            )
            for block_id, block in standing.items()
        ]
        scaling = self._policy.scale(Monitor(tasks, self._slots_per_block, loads, images, limited, prewarmed))
        started: tuple[str, ...] = ()
        if now >= self._not_before:
            self.refusal = ""  # tasks that arrive now wait for the block that is tried
            more = max(scaling.more, self._first_blocks - len(standing))
            if self._failing_since is not None and more > 0:
                more = 1  # to try
                if all(block.slots for block in standing.values()):
                    self._leave_out(now - self._not_before)
            started = tuple(self._new_block_id() for _ in range(more))
            self._first_blocks = 0
        of_block = dict(zip(started, scaling.images, strict=False))
        for block_id in started:
            self._blocks[block_id] = _Block(image=of_block.get(block_id, ""))
        for block_id in scaling.release:
            self._blocks[block_id].released = True
        return Orders(
            started, scaling.release, {each: image for each, image in of_block.items() if image}, scaling.drain
        )
