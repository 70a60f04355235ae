"""Worker slots: division of a node among workers. No I/O: :mod:`farcall_endpoint.host.node` reads the node."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final, Literal, get_args

from farcall_common.errors import ConfigurationError

Affinity = Literal["none", "block", "alternating"]

_ROUNDING: Final = 1e-9
"""Ten workers with 0.1 of a core each fill it, whatever binary fractions say."""


@dataclasses.dataclass(frozen=True)
class Node:
    """Resources of a node for all its workers.

    :param cores: the numbers of the logical cores that this process may run on, in ascending order.
    :param memory_bytes: the lowest of the memory limits.
    :param accelerators: names or numbers, as ``CUDA_VISIBLE_DEVICES`` and its kin take them; ``0,1`` is a pair.
    :param cpus: how many cores' worth of time there is, if a quota allows less than all of ``cores``.
    """

    cores: tuple[int, ...]
    memory_bytes: int
    accelerators: tuple[str, ...] = ()
    cpus: float | None = None

    @property
    def usable_cpus(self) -> float:
        """Cores' worth of time that can be used."""
        return len(self.cores) if self.cpus is None else min(self.cpus, len(self.cores))

    @property
    def whole_cpus(self) -> int:
        """The same as a whole number, which is 1 at least."""
        return max(1, int(self.usable_cpus))


@dataclasses.dataclass(frozen=True)
class Sharing:
    """Settings for the division of a node.

    :param max_workers: most workers; one for each core (or each ``cores_per_worker``) if not given.
    :param cores_per_worker: may be a fraction; 1 if not given, where nothing else is.
    :param memory_per_worker_bytes: also the most that a task may use.
    :param accelerators: those to share out; each worker gets one, so there are no more workers than these.
    :param cpu_affinity: ``block`` binds workers to neighbouring cores, ``alternating`` to every n-th.
    :raises ConfigurationError: if that makes no sense on any node.
    """

    max_workers: int | None = None
    cores_per_worker: float | None = None
    memory_per_worker_bytes: int | None = None
    accelerators: tuple[str, ...] = ()
    cpu_affinity: Affinity = "none"

    def __post_init__(self) -> None:
        for name in ("max_workers", "cores_per_worker", "memory_per_worker_bytes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigurationError(f"{name} is {value}; it must be more than 0.")
        if len(set(self.accelerators)) < len(self.accelerators):
            raise ConfigurationError("An accelerator is listed twice.", hint="List each one once.")
        if self.cpu_affinity not in get_args(Affinity):
            known = ", ".join(get_args(Affinity))
            raise ConfigurationError(f"cpu_affinity is {self.cpu_affinity!r}, not one of {known}.")

    def guess(self, cores: int) -> int:
        """Return the estimated number of workers of a node with ``cores`` cores."""
        by_cores = max(1, int(cores / (self.cores_per_worker or 1) + _ROUNDING))
        limits = [self.max_workers or by_cores]
        limits += [] if self.cores_per_worker is None else [by_cores]
        limits += [len(self.accelerators)] if self.accelerators else []
        return min(limits)

    def options(self) -> list[str]:
        """The same as options of a manager's command line."""
        options = ["--cpu-affinity", self.cpu_affinity]
        for name, value in (
            ("--slots", self.max_workers),
            ("--cores-per-worker", self.cores_per_worker),
            ("--mem-per-worker", self.memory_per_worker_bytes),
        ):
            options += [] if value is None else [name, str(value)]
        return [*options, "--accelerators", *self.accelerators] if self.accelerators else options


@dataclasses.dataclass(frozen=True)
class Slot:
    """The share of one worker.

    :param cores: those that it is bound to; empty if it may use all.
    :param threads: how many a library should use in it; None if cores are not shared out.
    :param memory_bytes: its share; None if memory is not shared out.
    """

    index: int
    cores: tuple[int, ...] = ()
    threads: int | None = None
    memory_bytes: int | None = None
    accelerators: tuple[str, ...] = ()


def partition(node: Node, sharing: Sharing) -> tuple[Slot, ...]:
    """Divide a node: as many slots as fit, up to ``max_workers``. The rules are those of Parsl's executor.

    Cores, memory and accelerators each limit the workers; the smallest limit wins. Workers that are bound to cores
    never share one: ``block`` gives each of n workers an n-th of the cores, rounded down; ``alternating`` deals all of
    them out in turns.

    :raises ConfigurationError: if not even one fits; says what is there and what was asked for.
    """
    count = min(_limits(node, sharing))
    blocks = _blocks(node.cores, count, sharing.cpu_affinity)
    loose_threads = None if sharing.cores_per_worker is None else max(1, int(sharing.cores_per_worker))
    return tuple(
        Slot(
            index,
            cores,
            threads=len(cores) or loose_threads,
            memory_bytes=sharing.memory_per_worker_bytes,
            accelerators=node.accelerators[index : index + 1],
        )
        for index, cores in enumerate(blocks)
    )


def extra_workers(slots: Sequence[Slot], wanted: int | None) -> int:
    """How many workers may stay warm without a slot: as many as there are slots, unless the owner wants another number.

    None where slots have cores or accelerators: a worker keeps those that it was started with, and gets its next slot
    where one is free. None by default where they have memory, as it is shared out among them.
    """
    if any(slot.cores or slot.accelerators for slot in slots):
        return 0
    if wanted is None:
        return 0 if any(slot.memory_bytes for slot in slots) else len(slots)
    return wanted


def latency_workers(slots: Sequence[Slot], wanted: int | None) -> int:
    """How many workers there may be for tasks with a latency target, beyond the slots: as many as there are slots,
    unless the owner wants another number. None where slots have cores, memory or accelerators of their own."""
    if any(slot.cores or slot.accelerators or slot.memory_bytes for slot in slots):
        return 0
    return len(slots) if wanted is None else wanted


def _limits(node: Node, sharing: Sharing) -> list[int]:
    """How many workers each of the resources allows; all above 0."""
    cores, memory_bytes = sharing.cores_per_worker, sharing.memory_per_worker_bytes
    limits = [] if sharing.max_workers is None else [sharing.max_workers]
    if cores is not None:
        if node.usable_cpus + _ROUNDING < cores:
            raise _too_little("cores_per_worker", f"{cores:g} cores", f"{node.usable_cpus:g}")
        limits.append(int(node.usable_cpus / cores + _ROUNDING))
    elif not limits:
        limits.append(node.whole_cpus)
    if memory_bytes is not None:
        if node.memory_bytes < memory_bytes:
            raise _too_little("mem_per_worker", _gigabytes(memory_bytes), _gigabytes(node.memory_bytes))
        limits.append(node.memory_bytes // memory_bytes)
    if sharing.accelerators:
        if not node.accelerators:
            raise _too_little("available_accelerators", "one of " + ", ".join(sharing.accelerators), "none of them")
        limits.append(len(node.accelerators))
    if sharing.cpu_affinity != "none":
        limits.append(len(node.cores))
    return limits


def _blocks(cores: Sequence[int], count: int, affinity: Affinity) -> list[tuple[int, ...]]:
    each = len(cores) // count
    match affinity:
        case "none":
            return [()] * count
        case "block":
            return [tuple(cores[index * each : (index + 1) * each]) for index in range(count)]
        case "alternating":
            return [tuple(cores[index::count]) for index in range(count)]


def _too_little(field: str, wanted: str, there: str) -> ConfigurationError:
    return ConfigurationError(
        f"A worker needs {wanted} ({field}), and this node provides {there}: not even one worker fits.",
        hint=f"Lower {field}, or ask the scheduler for more on each node.",
    )


def _gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.3g} GB"
