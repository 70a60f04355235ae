"""Latencies of the functions of an endpoint over the last minutes: the metric processor of the QoS paper (section 3).

A task waits in the queue of the endpoint, then its function runs. Both are counted in histograms, by function. At high
rates only some tasks are counted, each for several: what is shown stays the same, and the cost has a limit.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, Final

from farcall_endpoint.qos.histograms import Histogram, WindowedHistogram

WINDOW_S: Final = 600.0
_MOST_FUNCTIONS: Final = 200
"""Those that ended last; the others are forgotten."""
_SAMPLES_PER_S: Final = 500
_MOST_SHOWN: Final = 20
_MOST_NAMES: Final = 10_000
_QUANTILES: Final = (0.5, 0.95)


@dataclasses.dataclass(slots=True)
class _Function:
    name: str
    queue: WindowedHistogram
    run: WindowedHistogram
    total: WindowedHistogram


class Latencies:
    """The functions of an endpoint. Instants are seconds of a clock that does not step.

    :param window_s: so long a task counts.
    """

    def __init__(self, *, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._functions: collections.OrderedDict[str, _Function] = collections.OrderedDict()  # by id, oldest first
        self._names: dict[str, str] = {}  # by the hash of a function
        self._second = 0
        self._left = _SAMPLES_PER_S  # samples in this second
        self._skipped: collections.Counter[str] = collections.Counter()  # tasks by function, since its last sample

    def __len__(self) -> int:
        return len(self._functions)

    def name(self, function_hash: str, name: str) -> None:
        """The name of a function, for :meth:`describe`."""
        self._names[function_hash] = name
        if len(self._names) > _MOST_NAMES:
            del self._names[next(iter(self._names))]

    def is_sampled(self, function_id: str, now: float) -> bool:
        """Whether a task of a function that has ended is to be added. If not, the next one that is counts for it."""
        if (second := int(now)) != self._second:
            self._second, self._left = second, _SAMPLES_PER_S
        if self._left > 0:
            self._left -= 1
            return True
        if function_id in self._functions:
            self._skipped[function_id] += 1
        return False

    def add(self, function_id: str, function_hash: str, *, total_s: float, run_s: float, now: float) -> None:
        """A task of a function has ended.

        :param total_s: since it has arrived at the endpoint.
        :param run_s: its function.
        """
        function = self._functions.get(function_id)
        if function is None:
            name = self._names.get(function_hash, "")
            function = _Function(name, *(WindowedHistogram(self._window_s) for _ in range(3)))
            self._functions[function_id] = function
            if len(self._functions) > _MOST_FUNCTIONS:
                forgotten, _ = self._functions.popitem(last=False)
                self._skipped.pop(forgotten, None)
        self._functions.move_to_end(function_id)
        times = 1 + self._skipped.pop(function_id, 0)
        function.queue.add(total_s - run_s, now, times)
        function.run.add(run_s, now, times)
        function.total.add(total_s, now, times)

    def describe(self, now: float) -> list[dict[str, Any]]:
        """The functions of the last minutes, those with most tasks first, some at most; for the status."""
        rows: list[dict[str, Any]] = []
        for function_id, function in self._functions.items():
            total = function.total.histogram(now)
            if total.count:
                rows.append(
                    {
                        "function": function.name or function_id[:8],
                        "tasks": total.count,
                        **_quantiles("queue", function.queue.histogram(now)),
                        **_quantiles("run", function.run.histogram(now)),
                        **_quantiles("total", total),
                    }
                )
        return sorted(rows, key=lambda row: -row["tasks"])[:_MOST_SHOWN]


def _quantiles(name: str, histogram: Histogram) -> dict[str, float]:
    """In milliseconds, with as many digits as are known."""
    return {
        f"{name}_p{round(100 * part)}_ms": float(f"{1000 * (histogram.quantile(part) or 0.0):.2g}")
        for part in _QUANTILES
    }
