"""Targets: the latency that a task is to hold, by its options and what its function takes on an idle endpoint. No I/O.

That is known from calls which measured it (``client.qos.baseline``), else from the fastest tenth of the runs that were
seen.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable, Mapping
from typing import Final

from farcall_common.wire import TaskSpec
from farcall_endpoint.protocol import OrderTarget

_MOST_BASELINES: Final = 1000
_MOST_RUNS: Final = 20
"""So many of the last runs of a function make its baseline: the median of them."""


class Targets:
    """The targets of an endpoint.

    :param weights, deltas: that the owner has set, by the name of a function.
    :param baselines: seconds by function and submitter, as they were kept: no submitter measures for others.
    :param fastest_s: returns how long the fastest runs of a function took for a submitter; None if too few were seen.
    :param name_of: returns the name of a function, by its hash.
    """

    def __init__(
        self,
        *,
        weights: Mapping[str, float],
        deltas: Mapping[str, int],
        baselines: Mapping[str, float],
        fastest_s: Callable[[str, str], float | None],
        name_of: Callable[[str], str],
    ) -> None:
        self._weights = weights
        self._deltas = deltas
        self._baselines = dict(baselines)
        self._fastest_s = fastest_s
        self._name_of = name_of
        self._runs: dict[str, collections.deque[float]] = {}
        self.has_changed = False

    def of(self, spec: TaskSpec) -> OrderTarget | None:
        """The target of a task; None if it has none, or is a multiple of what is not known yet."""
        qos = spec.options.qos
        if qos is None or not qos.has_target:
            return None
        expected_s = self._baselines.get(_key(spec)) or self._fastest_s(spec.function_id, spec.submitter)
        if qos.target_ms is not None:
            latency_s = qos.target_ms / 1000
        elif expected_s is not None and qos.max_slowdown is not None:
            latency_s = qos.max_slowdown * expected_s
        else:
            return None
        wanted = f"{qos.target_ms:g}" if qos.target_ms is not None else f"x{qos.max_slowdown:g}"
        name = f"{_key(spec)}:{wanted}:{qos.percentile:g}"
        function = self._name_of(spec.function_hash)
        weight, delta = self._weights.get(function), self._deltas.get(function)
        return OrderTarget(name, latency_s, qos.percentile, 0.0, expected_s, weight, qos.max_slowdown, delta)

    def measured(self, spec: TaskSpec, latency_s: float) -> None:
        """A call that measures has ended, on an endpoint that is idle."""
        if not latency_s > 0:
            return
        key = _key(spec)
        runs = self._runs.setdefault(key, collections.deque(maxlen=_MOST_RUNS))
        runs.append(latency_s)
        self._baselines.pop(key, None)
        self._baselines[key] = statistics.median(runs)
        self.has_changed = True
        for known in (self._runs, self._baselines):
            if len(known) > _MOST_BASELINES:
                del known[next(iter(known))]

    def baselines(self) -> Mapping[str, float]:
        """Seconds by function and submitter, to be kept."""
        self.has_changed = False
        return dict(self._baselines)


def _key(spec: TaskSpec) -> str:
    """A function and its submitter: by its body, as each executor registers it under an id of its own."""
    return f"{spec.function_hash}:{spec.submitter}"
