"""Latency targets: how an endpoint holds them, what a call takes on an idle endpoint, and warnings of submits."""

from __future__ import annotations

import logging
import statistics
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from farcall._latencies import Baseline, LatencyReport, Window, read_latencies
from farcall._metrics import record_latencies
from farcall_common.errors import InvalidRequest
from farcall_common.forks import fork_safe_lock
from farcall_common.plain_text import plain

if TYPE_CHECKING:
    from farcall import Client
    from farcall._api import Api

_INFEASIBLE: Final = "TARGET_INFEASIBLE"

_logger = logging.getLogger(__name__)


class QosWarning(UserWarning):
    """An endpoint cannot hold the latency target of a call that it has accepted."""


class LatencyTargets:
    """``client.qos``: how endpoints hold latency targets, and baselines of functions."""

    def __init__(self, client: Client, api: Api) -> None:
        self._client = client
        self._api = api

    def report(self, endpoint: str | uuid.UUID | None = None, *, window: Window = "10m") -> LatencyReport:
        """How an endpoint holds latency targets, by function. In a program with a meter provider of OpenTelemetry, the
        numbers are recorded as metrics, too.

        :param endpoint: its name or id; None: the default one.
        :param window: of time: ``1m`` or ``10m``.
        :raises InvalidRequest: for another window.
        :raises Forbidden: if you may not use the endpoint.
        """
        from farcall_common.qos_report import WINDOWS

        if window not in WINDOWS:
            raise InvalidRequest(f"there is no window {window!r}", hint=f"Use one of {', '.join(WINDOWS)}.")
        endpoint_id = self._client.find_endpoint(endpoint)
        report = read_latencies(self._api.get_endpoint_qos(endpoint_id), endpoint_id=endpoint_id, window=window)
        record_latencies(report)
        return report

    def baseline(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        endpoint: str | uuid.UUID | None = None,
        runs: int = 20,
        timeout_s: float | None = None,
    ) -> Baseline:
        """Call a function some times, one call after the other, and return what a call takes. The endpoint remembers
        it: targets with ``max_slowdown`` are multiples of it. Other work on the endpoint makes the calls slower.

        :param endpoint: its name or id; None: the default one.
        :param runs: how many calls.
        :param timeout_s: how long to wait for each of them; None: without limit. A call that takes longer is cancelled.
        :raises InvalidRequest: for no runs.
        :raises TaskError: if a call fails.
        :raises TimeoutError: after ``timeout_s``; the message names what holds the call up, if that is known.
        """
        from farcall import Executor, Function, QoS  # here: they need the client, which has this

        if runs < 1:
            raise InvalidRequest(f"runs: Expected at least 1, got {runs}")
        qos = QoS(is_baseline=True)
        # What a decorated function has of its own comes before the options of the executor.
        function = fn.options(qos=qos, memoize=False) if isinstance(fn, Function) else fn
        run_ms, total_ms = list[float](), list[float]()
        with Executor(endpoint, client=self._client, qos=qos, memoize=False) as executor:
            for _ in range(runs):
                start = time.perf_counter()
                future = executor.submit(function, *args, **dict(kwargs or {}))
                try:
                    future.result(timeout_s)
                finally:
                    future.cancel()  # no effect on one that has ended
                total_ms.append((time.perf_counter() - start) * 1000)
                times = future.timings
                run_ms.append((times["ended_at"] - times["started_at"]) * 1000)
        return Baseline(
            endpoint_id=future.endpoint_id,
            run_ms=statistics.median(run_ms),
            run_p95_ms=_quantile(run_ms, 0.95),
            total_ms=statistics.median(total_ms),
            runs=runs,
        )


class TargetWarnings:
    """Warnings in the answers of submits: one for each function of the program. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._warned: set[tuple[str, str]] = set()

    def show(self, found: Sequence[Any] | None, *, endpoint_id: str, names: Mapping[str, str]) -> None:
        """Warn of targets that the endpoint cannot hold.

        :param found: the warnings of an answer.
        :param names: of the functions, by the ids of the request.
        """
        for each in found or ():
            if not isinstance(each, Mapping) or each.get("code") != _INFEASIBLE:
                continue
            function_id = str(each.get("function_id"))
            with self._lock:
                if (endpoint_id, function_id) in self._warned:
                    continue
                self._warned.add((endpoint_id, function_id))
            reason, hint = str(each.get("message", "")), str(each.get("hint", ""))
            name = names.get(function_id, function_id)
            parts = (reason, hint, "The calls run nevertheless")
            text = " ".join(f"{part.rstrip('.')}." for part in parts if part)
            message = plain(f"endpoint {endpoint_id} cannot hold the latency target of {name}: {text}")
            try:
                warnings.warn(message, QosWarning, stacklevel=3)
            except QosWarning:  # the program makes errors of warnings, and the tasks are accepted
                _logger.warning("%s", message)


def _quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that this part of all does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(part * 100) // 100) - 1)]
