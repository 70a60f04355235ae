"""FunctionBench, cold and end to end: from a request to the result, in fresh containers and processes and in forks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.warm_starts.functions import WORKLOADS
from benchmarks.warm_starts.images import make_image, make_venv
from benchmarks.warm_starts.node import RUNC
from benchmarks.warm_starts.places import MeasuredNode, NodeFailed, OwnPlace, running_node, type_with_forks

ARMS: Final = (RUNC, "bubblewrap", "process", "fork", "fork in advance", "warm")


def measure(directory: Path, count: int) -> list[dict[str, Any]]:
    """A row for each function: milliseconds of each of the :data:`ARMS`, which take turns; without runc where that is
    not installed. Each function has an image with its own packages only, as it is deployed.

    :raises ValueError: if a function's result differs between arms.
    """
    place = OwnPlace(directory)
    rows = []
    for (packages, preload), names in itertools.groupby(WORKLOADS, lambda name: WORKLOADS[name][2:4]):
        image, venv = make_image(packages), make_venv(packages)
        with contextlib.ExitStack() as stack:
            nodes: dict[str, MeasuredNode] = {}
            missing = ""
            for arm, (type_, location, options) in _arms(place, image, venv, preload).items():
                node = running_node(place, f"{packages[0]}-{arm.replace(' ', '-')}", type_, location, **options)
                try:
                    nodes[arm] = stack.enter_context(node)
                except NodeFailed as error:
                    if arm != RUNC:
                        raise
                    missing = str(error)
            rows += [
                {"function": name, "arms": _in_turn(nodes, name, count), "runc_missing": missing} for name in names
            ]
    return rows


def _arms(
    place: OwnPlace, image: str, venv: Path, preload: Sequence[str]
) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """The type and the location of each arm's environment, and the options of its node."""
    return {
        RUNC: (RUNC, image, {}),
        "bubblewrap": ("bubblewrap", image, {}),
        "process": ("venv", str(venv), {}),
        "fork": (type_with_forks(place), image, {"preload": preload, "fork": True}),
        "fork in advance": (type_with_forks(place), image, {"preload": preload, "fork": True, "spares": 1}),
        "warm": ("bubblewrap", image, {"keeps": True}),
    }


def _in_turn(nodes: dict[str, MeasuredNode], function: str, count: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {arm: [] for arm in ARMS if arm in nodes}
    results = set()
    for number in range(count + 1):
        for arm in found:
            (times,) = nodes[arm].starts(function)
            results.add(times.result)
            if number:  # the first one reads files, and is the first task of the warm worker
                found[arm].append(round(1000 * (times.result_at - times.requested_at), 3))
    if len(results) != 1:
        raise ValueError(f"{function} has different results: {sorted(results)}")
    return found
