"""Targets: latency limits of tasks, from their options and the duration of their functions on an idle endpoint. No I/O.

The duration comes from calls that measured it (``client.qos.baseline``), else from the fastest tenth of recent runs.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable, Mapping
from typing import Final

from farcall_common.wire import TaskSpec
from farcall_endpoint.contracts.agent_manager import OrderTarget

_MOST_BASELINES: Final = 1000
_MOST_OF_ONE: Final = 200
"""Maximum number of baselines of one submitter."""
_SEEN_S: Final = 10.0
_IDLE_WAIT_S: Final = 0.05
"""Seconds within which an idle endpoint begins a call."""
_MOST_RUNS: Final = 20
"""Number of last runs of a function whose median is its baseline."""


class Targets:
    """The targets of an endpoint.

    :param weights, deltas: settings of the owner, by the name of a function.
    :param baselines: stored baselines in seconds, by function and submitter: no submitter measures for others.
    :param fastest_s: returns the duration of a submitter's fastest runs of a function; None if too few were seen.
    :param name_of: returns the name of a function, by its hash.
    :param max_weights: see :class:`~farcall_endpoint.config.settings.QosSettings`.
    :param needs_all: whether the policy needs the duration of every function with a target.
    :param clock: in seconds.
    """

    def __init__(
        self,
        *,
        weights: Mapping[str, float],
        deltas: Mapping[str, int],
        baselines: Mapping[str, float],
        fastest_s: Callable[[str, str], float | None],
        name_of: Callable[[str], str],
        max_weights: Mapping[str, float],
        needs_all: bool,
        clock: Callable[[], float],
    ) -> None:
        self._weights = weights
        self._deltas = deltas
        self._baselines = dict(baselines)
        self._fastest_s = fastest_s
        self._name_of = name_of
        self._max_weights = max_weights
        self._needs_all = needs_all
        self._clock = clock
        self._seen: dict[str, tuple[float, float | None]] = {}  # until when it counts
        #: The endpoint's owner; weights and deltas apply only to functions that the owner calls.
        self.owner_id = ""
        self._runs: dict[str, collections.deque[float]] = {}
        self.has_changed = False

    def of(self, spec: TaskSpec) -> OrderTarget | None:
        """Return the target of a task; None if it has none, or is a multiple of a baseline that is not known yet."""
        qos = spec.options.qos
        if qos is None or not qos.has_target:
            return None
        expected_s = self._baselines.get(_key(spec))
        if expected_s is None and (qos.max_slowdown is not None or self._needs_all):
            expected_s = self._seen_s(spec)
        if qos.target_ms is not None:
            latency_s = qos.target_ms / 1000
        elif expected_s is not None and qos.max_slowdown is not None:
            latency_s = qos.max_slowdown * expected_s
        else:
            return None
        wanted = f"{qos.target_ms:g}" if qos.target_ms is not None else f"x{qos.max_slowdown:g}"
        name = f"{_key(spec)}:{wanted}:{qos.percentile:g}"
        is_owner = spec.submitter in ("", self.owner_id)
        function = self._name_of(spec.function_hash) if is_owner else ""
        return OrderTarget(
            name,
            latency_s,
            qos.percentile,
            expected_s=expected_s,
            weight=self._weights.get(function),
            max_slowdown=qos.max_slowdown,
            delta=self._deltas.get(function),
            max_weight=None if is_owner else self._max_weights.get(_payer(spec)),
        )

    def has_share(self, spec: TaskSpec) -> bool:
        """Whether a target of this submitter may take processors from other submitters' tasks."""
        return spec.submitter in ("", self.owner_id) or _payer(spec) in self._max_weights

    def _seen_s(self, spec: TaskSpec) -> float | None:
        """Return the duration of a function's fastest runs, cached for ``_SEEN_S`` because the computation is slow."""
        key, now = _key(spec), self._clock()
        known = self._seen.get(key)
        if known is None or now >= known[0]:
            if len(self._seen) >= _MOST_BASELINES:
                self._seen.clear()
            known = self._seen[key] = now + _SEEN_S, self._fastest_s(spec.function_id, spec.submitter)
        return known[1]

    def measured(self, spec: TaskSpec, *, total_s: float, run_s: float) -> None:
        """Record the end of a measuring call on an idle endpoint. A call that had to wait counts with its run alone.

        :param total_s: seconds from the call's arrival to its end, without the start of a worker.
        """
        latency_s = total_s if total_s <= 2 * run_s + _IDLE_WAIT_S else run_s
        if not latency_s > 0:
            return
        key = _key(spec)
        runs = self._runs.setdefault(key, collections.deque(maxlen=_MOST_RUNS))
        runs.append(latency_s)
        self._baselines.pop(key, None)
        self._baselines[key] = statistics.median(runs)
        self.has_changed = True
        own = [each for each in self._baselines if each.endswith(f":{spec.submitter}")]
        surplus = own[:1] if len(own) > _MOST_OF_ONE else list(self._baselines)[:1]
        if len(own) > _MOST_OF_ONE or len(self._baselines) > _MOST_BASELINES:
            for each in surplus:
                del self._baselines[each]
                self._runs.pop(each, None)

    def baselines(self) -> Mapping[str, float]:
        """Return the baselines to store, in seconds, by function and submitter."""
        return dict(self._baselines)


def _payer(spec: TaskSpec) -> str:
    return spec.payer or spec.submitter


def _key(spec: TaskSpec) -> str:
    """Return the key of a function and its submitter. It has the function's hash, as ids differ between executors."""
    return f"{spec.function_hash}:{spec.submitter}"
