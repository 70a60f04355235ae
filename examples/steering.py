"""Steering: a thinker decides after each result what is computed next, for 1,000 tasks of 1 MB in and 1 MB out.

    python examples/steering.py --endpoint NAME [--tasks 1000] [--at-once 8]

After Colmena ("Scalable Machine-Learning-Based Steering of Ensemble Simulations", MLHPC 2021), whose thinker is a
program that hears of each result. Here it is a function that runs at the endpoint, too, and calls others with
:func:`farcall.current`: 2 GB go between processes of one node, in memory, and only the answer goes through the cloud.
With an executor in its place, each task and each result would travel through the cloud tier, and through its blob store
because of their size. That is the right form if the thinker needs what only your machine has.

The thinker searches the state of least energy of a field: a sheet of 512 x 256 numbers, each of which wants to be 1 or
-1 and equal to its neighbours (the Ginzburg-Landau energy). A task relaxes a field for some steps. The thinker keeps
the best ones, continues with these most of the time, and begins with a new one now and then.
"""

from __future__ import annotations

import argparse
import dataclasses
from concurrent.futures import Executor
from typing import Any

TASKS = 1_000
AT_ONCE = 8
ROWS, COLUMNS = 512, 256
KEPT = 4
STEPS = 4


@dataclasses.dataclass(frozen=True)
class Found:
    """The least energy for each number; ``first`` is that of the first task. ``moved_bytes`` went in and out of
    ``tasks`` tasks, of which ``fresh`` began with a new field."""

    energy: float
    first: float
    tasks: int
    fresh: int
    moved_bytes: int


def energy_of(field: Any) -> float:
    """The Ginzburg-Landau energy of a field, divided by how many numbers it has; 0 is the least. Runs on a worker."""
    import numpy as np

    wells = 0.25 * (field**2 - 1) ** 2
    slopes = sum(0.5 * (np.roll(field, 1, axis) - field) ** 2 for axis in (0, 1))
    return float((wells + slopes).mean())


def relax(field: Any, steps: int) -> tuple[float, Any]:
    """Some steps of gradient descent: the energy, and the new field. Runs on a worker."""
    import numpy as np

    for _ in range(steps):
        around = sum(np.roll(field, shift, axis) for shift in (1, -1) for axis in (0, 1))
        field = field + 0.2 * (around - 4 * field + field - field**3)
    return energy_of(field), field


def think(tasks: int, at_once: int, rows: int = ROWS, columns: int = COLUMNS) -> Found:
    """Keep ``at_once`` tasks under way, and decide after each what is next. Runs on a worker.

    :raises RuntimeError: if a field came back with another energy than its task has computed.
    """
    from concurrent.futures import FIRST_COMPLETED, Future, wait

    import numpy as np

    from farcall import current

    draw = np.random.default_rng(7)
    best: list[tuple[float, int, Any]] = []  # energy, when it came, field
    pending: set[Future[Any]] = set()
    started = ended = fresh = moved = 0
    first = float("nan")
    while ended < tasks:
        while started < tasks and len(pending) < at_once:
            if len(best) < KEPT or draw.random() < 0.05:
                fresh += 1
                field = draw.normal(0.1, 0.5, (rows, columns))
            else:
                field = best[draw.integers(len(best))][2]
            pending.add(current().submit(relax, field, STEPS))
            moved += field.nbytes
            started += 1
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        for future in done:
            energy, field = future.result()
            ended += 1
            moved += field.nbytes
            first = energy if ended == 1 else first
            best = sorted([*best, (energy, ended, field)], key=lambda each: each[:2])[:KEPT]
    energy, _, field = best[0]
    if energy_of(field) != energy:
        raise RuntimeError("a field came back with another energy")
    return Found(energy, first, ended, fresh, moved)


def run(executor: Executor, *, tasks: int = TASKS, at_once: int = AT_ONCE) -> Found:
    """Search with so many tasks.

    :raises RuntimeError: if nothing better was found than by the first task.
    """
    found = executor.submit(think, tasks, at_once).result()
    if found.tasks != tasks or not 0 <= found.energy < found.first:
        raise RuntimeError(f"the search has failed: {found}")
    return found


def main() -> None:
    import farcall

    parser = argparse.ArgumentParser(description="Search a state of least energy, steered by the results.")
    parser.add_argument("--endpoint", required=True, help="name or id of the endpoint to run on")
    parser.add_argument("--tasks", type=int, default=TASKS)
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="tasks under way")
    arguments = parser.parse_args()
    with farcall.Executor(endpoint_id=arguments.endpoint) as executor:
        found = run(executor, tasks=arguments.tasks, at_once=arguments.at_once)
    print(
        f"{found.tasks:,} tasks, {found.fresh} of them with a new field, moved {found.moved_bytes / 1e9:.2f} GB; "
        f"the energy fell from {found.first:.2g} to {found.energy:.2g}"
    )


if __name__ == "__main__":
    main()
