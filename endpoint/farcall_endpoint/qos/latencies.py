"""Latencies of the functions of an endpoint over the last minutes: the metric processor of the QoS paper (section 3).

A task waits at the endpoint, then its function runs. Both are counted in histograms, by function. Of a function with
many tasks a second, the first ones are counted, and one in so many of the others, for all of these.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any, Final

from farcall_common.progress import clean_text
from farcall_endpoint.qos.histograms import WindowedHistogram

WINDOW_S: Final = 600.0
_MOST_FUNCTIONS: Final = 200
"""Those whose tasks ended last; the others are forgotten."""
_MOST_NAMES: Final = 2000
_MOST_SHOWN: Final = 20
_ALL_PER_S: Final = 20
"""So many tasks of a function are counted each second, before some stand for others."""
_SAMPLES_PER_S: Final = 200
"""Of the others of a function, about."""
_QUANTILES: Final = (0.5, 0.95)


@dataclasses.dataclass(slots=True)
class _Function:
    """``ended``: in this second; ``stride``: one task in so many is counted, for all of these."""

    name: str
    wait: WindowedHistogram
    run: WindowedHistogram
    total: WindowedHistogram
    second: int = 0
    ended: int = 0
    stride: int = 1


class Latencies:
    """The functions of an endpoint. Instants are seconds of a clock that does not step.

    :param window_s: so long a task counts.
    """

    def __init__(self, *, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._functions: collections.OrderedDict[str, _Function] = collections.OrderedDict()  # by id, oldest first
        self._names: dict[str, str] = {}  # by the hash of a function

    def __len__(self) -> int:
        return len(self._functions)

    def name(self, function_hash: str, name: str) -> None:
        """The name of a function, for :meth:`describe`. Its submitter has chosen it."""
        self._names[function_hash] = clean_text(name)
        if len(self._names) > _MOST_NAMES:
            del self._names[next(iter(self._names))]

    def ended(self, function_id: str, function_hash: str, *, total_s: float, run_s: float, now: float) -> None:
        """A task has ended whose function has run, or raised an exception.

        :param total_s: since it has arrived at the endpoint.
        :param run_s: its function in the last attempt, as its worker says.
        """
        function = self._functions.get(function_id) or self._add(function_id, function_hash)
        if function.second != (second := int(now)):
            function.stride = max(1, math.ceil((function.ended - _ALL_PER_S) / _SAMPLES_PER_S))
            function.second, function.ended = second, 0
            self._functions.move_to_end(function_id)
        function.ended += 1
        count = 1 if function.ended <= _ALL_PER_S else function.stride
        if count > 1 and function.ended % count:
            return
        if total_s >= 0:  # a clock may have been set back between two agents
            run_s = min(max(run_s, 0.0), total_s)
            function.wait.add(total_s - run_s, now, count)
            function.run.add(run_s, now, count)
            function.total.add(total_s, now, count)

    def _add(self, function_id: str, function_hash: str) -> _Function:
        name = self._names.get(function_hash, "")
        wait, run, total = (WindowedHistogram(self._window_s) for _ in range(3))
        function = self._functions[function_id] = _Function(name, wait, run, total)
        if len(self._functions) > _MOST_FUNCTIONS:
            self._functions.popitem(last=False)
        return function

    def describe(self, now: float) -> list[dict[str, Any]]:
        """The functions of the last minutes with most tasks, for the status. Durations are in milliseconds."""
        counts = {function_id: each.total.count(now) for function_id, each in self._functions.items()}
        most = sorted(filter(counts.get, counts), key=lambda each: -counts[each])[:_MOST_SHOWN]
        return [self._row(function_id, counts[function_id], now) for function_id in most]

    def _row(self, function_id: str, tasks: int, now: float) -> dict[str, Any]:
        function = self._functions[function_id]
        row: dict[str, Any] = {"function": function.name or function_id[:8], "tasks": tasks}
        for kind in ("wait", "run", "total"):
            histogram = getattr(function, kind).histogram(now)
            for part in _QUANTILES:
                quantile_ms = 1000 * (histogram.quantile(part) or 0.0)
                row[f"{kind}_p{round(100 * part)}_ms"] = float(f"{quantile_ms:.3g}")
        return row
