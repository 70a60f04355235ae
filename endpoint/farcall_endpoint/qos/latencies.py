"""Latencies of the functions of an endpoint over the last minutes: the metric processor of the QoS paper (section 3).

A task waits at the endpoint, perhaps for the start of a worker, then its function runs. All three are counted in
histograms, by function, submitter, target and size of the input. Of a function with many tasks a second, the first
ones are counted, and a sample of the others, with the weight of all of these.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from farcall_common.progress import clean_text
from farcall_endpoint.contracts.agent_manager import OrderTarget
from farcall_endpoint.qos.histograms import Histogram, WindowedHistogram

WINDOW_S: Final = 600.0
_SHORT_S: Final = 60.0
_STEPS: Final = 10
_MOST_FUNCTIONS: Final = 120
_MOST_OF_ONE: Final = 60
"""Maximum number of functions that are kept, of all submitters and of one: those whose tasks ended last. Each size of
input counts as a function."""
_MOST_NAMES: Final = 2000
_MOST_SHOWN: Final = 20
_MOST_REPORTED: Final = 10
"""Maximum number of functions reported to the cloud, those with a target first."""
_ALL_PER_S: Final = 20
"""Tasks of a function that are counted each second before sampling begins."""
_SAMPLES_PER_S: Final = 200
"""Approximate number of sampled tasks of a function each second, beyond the first ``_ALL_PER_S``."""
_LEAST_RUNS: Final = 20
"""Number of runs after which the fastest runs of a function are known."""
_QUANTILES: Final = (0.5, 0.95)
_INPUT_BYTES: Final = (4 * 1024, 64 * 1024)
"""Sizes of inputs: up to the first, up to the second, and larger ones."""
_HISTORY_S: Final = 10.0
"""Seconds between two weights that are kept."""
_MOST_BUCKETS: Final = 40


_Key = tuple[str, str, str, int]
"""Function, submitter, latency class (empty: batch work) and size of input. A tuple, as one is made for each task."""


class Ended(msgspec.Struct, frozen=True, gc=False):
    """A task whose function has run, or raised an exception.

    :param total_s: seconds from the arrival at the endpoint to the end.
    :param run_s: run time of the function in the last attempt, as the worker reported it.
    :param start_s: seconds spent waiting for the start of a worker; 0 if a worker was ready.
    """

    function_id: str
    function_hash: str
    submitter: str
    input_bytes: int
    total_s: float
    run_s: float
    start_s: float = 0.0
    target: OrderTarget | None = None


@dataclasses.dataclass(slots=True)
class _Function:
    """``ended``: tasks that ended in this second; ``stride``: one task in ``stride`` is counted, with this weight.
    ``violated``: tasks above their target; ``starts``: waits for the start of a worker. None before the first one."""

    name: str
    wait: WindowedHistogram
    run: WindowedHistogram
    total: WindowedHistogram
    violated: WindowedHistogram | None = None
    starts: WindowedHistogram | None = None
    target: OrderTarget | None = None
    second: int = 0
    ended: int = 0
    stride: int = 1


class ClassState(NamedTuple):
    """A latency class as managers report it: its weight, and why its target cannot be held (``reason``, ``fix``)."""

    weight: float
    reason: str = ""
    fix: str = ""


def _window() -> WindowedHistogram:
    return WindowedHistogram(WINDOW_S, _STEPS)


class Latencies:
    """The histograms of an endpoint, under 10 MB. Instants are epoch seconds of a clock that does not step."""

    def __init__(self) -> None:
        self._functions: collections.OrderedDict[_Key, _Function] = collections.OrderedDict()
        self._names: dict[str, str] = {}  # by hash
        self._weights: dict[str, collections.deque[tuple[float, float]]] = {}  # by class

    def name(self, function_hash: str, name: str) -> None:
        """The name of a function, for people. Its submitter has chosen it."""
        self._names[function_hash] = clean_text(name)
        if len(self._names) > _MOST_NAMES:
            del self._names[next(iter(self._names))]

    def name_of(self, function_hash: str) -> str:
        """The name of a function; empty if it is not known."""
        return self._names.get(function_hash, "")

    def ended(self, task: Ended, now: float) -> None:
        """Count a task."""
        size_bytes = task.input_bytes
        size = 0 if size_bytes <= _INPUT_BYTES[0] else 1 if size_bytes <= _INPUT_BYTES[1] else 2
        key = (task.function_id, task.submitter, "" if task.target is None else task.target.name, size)
        function = self._functions.get(key) or self._add(key, task.function_hash)
        if function.second != (second := int(now)):
            function.stride = max(1, math.ceil((function.ended - _ALL_PER_S) / _SAMPLES_PER_S))
            function.second, function.ended = second, 0
            self._functions.move_to_end(key)
        function.ended += 1
        function.target = task.target
        if task.start_s > 0:  # rare, and so each of them counts
            function.starts = function.starts or _window()
            function.starts.add(task.start_s, now)
        count = 1 if function.ended <= _ALL_PER_S else function.stride
        total_s = task.total_s
        if total_s < 0 or (count > 1 and function.ended % count):  # a clock may have been set back between two agents
            return
        run_s = min(max(task.run_s, 0.0), total_s)
        function.wait.add(total_s - run_s, now, count)
        function.run.add(run_s, now, count)
        function.total.add(total_s, now, count)
        if task.target is not None and total_s > task.target.latency_s:
            function.violated = function.violated or _window()
            function.violated.add(total_s, now, count)

    def weighed(self, classes: Mapping[str, ClassState], now: float) -> None:
        """The latency classes of the endpoint, and their weights, are these."""
        for name, state in classes.items():
            history = self._weights.setdefault(name, collections.deque(maxlen=int(WINDOW_S / _HISTORY_S)))
            if not history or now - history[-1][0] >= _HISTORY_S:
                history.append((now, state.weight))
        for name in [name for name, history in self._weights.items() if now - history[-1][0] > WINDOW_S]:
            del self._weights[name]

    def fastest_s(self, function_id: str, submitter: str, now: float) -> float | None:
        """How long the fastest tenth of the runs of a function took, for a submitter; None if it ran too seldom."""
        merged = Histogram()
        for key, function in self._functions.items():
            if key[:2] == (function_id, submitter):
                merged.merge(function.run.histogram(now))
        return merged.quantile(0.1) if merged.count >= _LEAST_RUNS else None

    def describe(self, now: float) -> list[dict[str, Any]]:
        """The functions of the last minutes with most tasks, for the status. Durations are in milliseconds."""
        return [self._row(functions, now) for _, functions in self._groups(now)[:_MOST_SHOWN]]

    def report(self, classes: Mapping[str, ClassState], now: float) -> list[dict[str, Any]]:
        """The same for the cloud, with targets and weights."""
        ranks: collections.Counter[str] = collections.Counter()
        ranked = []
        for (function_id, submitter, _), functions in self._groups(now):
            has_target = functions[-1].target is not None
            ranked.append((not has_target, ranks[submitter], function_id, submitter, functions))
            ranks[submitter] += has_target
        ranked.sort(key=lambda each: each[:2])  # those with a target first, of each submitter in turn
        return [
            self._details(function_id, submitter, functions, classes, now)
            for _, _, function_id, submitter, functions in ranked[:_MOST_REPORTED]
        ]

    # -- inside --------------------------------------------------------------------------------------------------------

    def _add(self, key: _Key, function_hash: str) -> _Function:
        name = self._names.get(function_hash, "") or key[0][:8]
        function = self._functions[key] = _Function(name, _window(), _window(), _window())
        own = [each for each in self._functions if each[1] == key[1]]
        if len(own) > _MOST_OF_ONE:
            del self._functions[own[0]]
        elif len(self._functions) > _MOST_FUNCTIONS:
            self._functions.popitem(last=False)
        return function

    def _groups(self, now: float) -> list[tuple[tuple[str, str, str], list[_Function]]]:
        """The functions by submitter and target, each with its sizes of inputs, those with most tasks first."""
        groups: dict[tuple[str, str, str], list[_Function]] = {}
        for key, function in self._functions.items():
            groups.setdefault(key[:3], []).append(function)
        counts = {name: sum(each.total.count(now) for each in several) for name, several in groups.items()}
        most = sorted(filter(counts.get, counts), key=lambda name: -counts[name])
        return [(name, groups[name]) for name in most]

    def _row(self, functions: Sequence[_Function], now: float) -> dict[str, Any]:
        kinds = ("wait", "run", "total")
        found = {kind: _merged([getattr(each, kind) for each in functions], now) for kind in kinds}
        row: dict[str, Any] = {"function": functions[0].name, "tasks": found["total"].count}
        for kind, histogram in found.items():
            for part in _QUANTILES:
                row[f"{kind}_p{round(100 * part)}_ms"] = _ms(histogram, part)
        if (target := functions[-1].target) is not None:
            row["target_ms"] = float(f"{1000 * target.latency_s:.4g}")
            row["violations"] = _merged([each.violated for each in functions], now).count
        return row

    def _details(
        self,
        function_id: str,
        submitter: str,
        functions: Sequence[_Function],
        classes: Mapping[str, ClassState],
        now: float,
    ) -> dict[str, Any]:
        target = functions[-1].target
        total = _merged([each.total for each in functions], now)
        found: dict[str, Any] = {
            "function_id": function_id,
            "function": functions[0].name,
            "submitter": submitter,
            "windows": {"1m": _window_of(functions, now, _SHORT_S), "10m": _window_of(functions, now, WINDOW_S)},
            "histogram": [
                [float(f"{1000 * upper_s:.4g}"), count] for upper_s, count in total.buckets(most=_MOST_BUCKETS)
            ],
        }
        if target is not None:
            found["target_ms"], found["percentile"] = float(f"{1000 * target.latency_s:.4g}"), target.percentile
            found["max_slowdown"] = target.max_slowdown
        if target is not None and (state := classes.get(target.name)) is not None:
            found["weight"] = state.weight
            history = self._weights.get(target.name, ())
            found["weights"] = [[round(at), weight] for at, weight in history]
            if state.reason:
                found["infeasible"] = {"reason": state.reason, "fix": state.fix}
        return found


def _window_of(functions: Sequence[_Function], now: float, last_s: float) -> dict[str, Any]:
    """The numbers of a function in a window."""

    def merged(kind: str) -> Histogram:
        return _merged([getattr(each, kind) for each in functions], now, last_s)

    total, wait, run = merged("total"), merged("wait"), merged("run")
    if not total.count:
        return {"tasks": 0}
    return {
        "tasks": total.count,
        "violations": merged("violated").count,
        "cold_starts": merged("starts").count,
        "queue_p50_ms": _ms(wait, 0.5),
        "queue_p95_ms": _ms(wait, 0.95),
        "run_p50_ms": _ms(run, 0.5),
        "run_p95_ms": _ms(run, 0.95),
        "p50_ms": _ms(total, 0.5),
        "p75_ms": _ms(total, 0.75),
        "p90_ms": _ms(total, 0.9),
        "p99_ms": _ms(total, 0.99),
    }


def _merged(windows: Sequence[WindowedHistogram | None], now: float, last_s: float = WINDOW_S) -> Histogram:
    found = Histogram()
    for each in windows:
        if each is not None:
            found.merge(each.histogram(now, last_s))
    return found


def _ms(histogram: Histogram, part: float) -> float:
    return float(f"{1000 * (histogram.quantile(part) or 0.0):.3g}")
