"""Attempts of calls: whether a call whose worker died, or whose function raised, is made again. Pure.

Calls are a matter of their manager, as tasks are one of their agent, by the same options.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from farcall_common.backoff import Backoff
from farcall_common.retries import MAX_DELAY_S
from farcall_common.task_options import TaskOptions
from farcall_endpoint.contracts import outcomes

K = TypeVar("K", bound=Hashable)


class Attempts(Generic[K]):
    """Counts of the failed attempts of each call, and the decisions to retry a call.

    :param jitter: returns numbers in [0, 1), which shorten the wait before a retry by up to a half.
    """

    def __init__(self, jitter: Callable[[], float]) -> None:
        self._jitter = jitter
        self._deaths: dict[K, list[str]] = {}
        self._retries: dict[K, int] = {}

    def before(self, call: K) -> tuple[int, int]:
        """Return how many attempts of a call ended with a worker's death, and how many raised and were retried."""
        return len(self._deaths.get(call, ())), self._retries.get(call, 0)

    def raised(
        self, call: K, record: dict[str, Any], *, options: TaskOptions, is_retried: bool
    ) -> tuple[float | None, dict[str, Any]]:
        """Record that a call raised; return the seconds to its retry (None: no retry) and its error record."""
        used = self._retries.get(call, 0)
        if not is_retried or used >= options.retries:
            return None, {**record, "retries_used": used} if used else record
        wait = Backoff(first_s=options.retry_delay_s, most_s=MAX_DELAY_S, jitter=lambda: 1.0 - self._jitter() / 2.0)
        wait.reset(failures=used)
        self._retries[call] = used + 1
        return wait.next_s(), record

    def died(
        self, call: K, reason: str, *, options: TaskOptions, stdout_tail: str = "", stderr_tail: str = ""
    ) -> dict[str, Any] | None:
        """Record that the worker of a call died; return the call's error, or None if the call is retried."""
        reasons = self._deaths.setdefault(call, [])
        reasons.append(reason)
        if options.idempotent and len(reasons) < options.max_attempts:
            return None
        record = outcomes.worker_died(
            reason, starts=len(reasons), reasons=tuple(reasons), stdout_tail=stdout_tail, stderr_tail=stderr_tail
        )
        return record.to_json()

    def forget(self, call: K) -> None:
        """Forget the attempts of a call that has ended for good."""
        self._deaths.pop(call, None)
        self._retries.pop(call, None)
