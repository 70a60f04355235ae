"""Prefetch policy: how many tasks to queue behind a running one (HPDC 2020, section 5.2: internal batching).

Many for short tasks, so that no worker waits for a message; none for long ones, so that no task waits behind a long one
while another worker is idle.
"""

from __future__ import annotations

from collections.abc import Sequence

_MEMORY = 0.1
"""Weight of the newest observation: the last ten or so count."""
_LEAST_S, _MOST_S = 1e-6, 1e9


class PrefetchPolicy:
    """The number of tasks to queue behind each running one, from the durations observed so far.

    :param horizon_s: how many seconds of work should be ready.
    :param limit: never more tasks than this; 0 switches prefetching off.
    :param unseen: the depth before any task has finished.
    """

    def __init__(self, *, horizon_s: float, limit: int, unseen: int = 0) -> None:
        self.horizon_s = horizon_s
        self.limit = limit
        self._unseen = min(unseen, limit)
        self._mean_s: float | None = None

    def observe(self, duration_s: float, *, count: int = 1) -> None:
        """Record the duration of a task in seconds, or the mean of several."""
        duration_s = min(max(_LEAST_S, duration_s), _MOST_S)
        weight = _MEMORY if count == 1 else 1 - (1 - _MEMORY) ** count
        self._mean_s = duration_s if self._mean_s is None else self._mean_s + weight * (duration_s - self._mean_s)

    def observe_all(self, durations_s: Sequence[float]) -> None:
        """Record the durations of several tasks, in seconds, by their mean."""
        if durations_s:
            self.observe(sum(durations_s) / len(durations_s), count=len(durations_s))

    @property
    def mean_s(self) -> float | None:
        """The moving average of durations in seconds; None before the first."""
        return self._mean_s

    @property
    def depth(self) -> int:
        """Tasks to keep ready behind each running one."""
        if self._mean_s is None:
            return self._unseen
        return min(self.limit, int(self.horizon_s / self._mean_s))
