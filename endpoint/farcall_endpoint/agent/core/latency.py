"""Latency targets at an agent: what tasks are to hold, what they took, and which weights managers set. No I/O."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, Final

from farcall_endpoint.agent.core.tasks import Task
from farcall_endpoint.config.settings import QosSettings
from farcall_endpoint.contracts.agent_manager import CpuSharesStatus, Finished, OrderTarget
from farcall_endpoint.qos.controller import NEEDS_CPU, NEEDS_LOOSER, NEEDS_WORKERS
from farcall_endpoint.qos.latencies import ClassState, Ended, Latencies
from farcall_endpoint.qos.targets import Targets

_REPORT_S: Final = 10.0
"""Between two reports to the cloud, and while no task has a target."""
_CALM_REPORT_S: Final = 60.0

_REASONS: Final[Mapping[str, tuple[str, str]]] = {
    NEEDS_WORKERS: (
        "More calls come than its workers can run, so that they wait for one another",
        "Use more nodes, a higher qos.latency_workers of the endpoint, or a looser target",
    ),
    NEEDS_CPU: (
        "It has the largest share of the processors that it may have",
        "Use more nodes, fewer neighbours on them, or a looser target",
    ),
    NEEDS_LOOSER: (
        "A call takes longer than the target even while it has the processors that it needs",
        "Use a looser target, or a faster function",
    ),
}


class LatencyTargets:
    """The targets of an agent's tasks.

    ``latencies``: of all functions; ``targets``: what is known of baselines; ``now``: of this turn, which
    the agent's core sets.

    :param settings: of the endpoint.
    :param baselines: seconds by function and submitter, as they were kept.
    """

    def __init__(self, settings: QosSettings, *, baselines: Mapping[str, float]) -> None:
        self._settings = settings
        self.now = 0.0
        self.latencies = Latencies()
        self.targets = Targets(
            weights=settings.weights,
            deltas=settings.deltas,
            max_weights=settings.max_weights,
            baselines=baselines,
            fastest_s=lambda function_id, submitter: self.latencies.fastest_s(function_id, submitter, self.now),
            name_of=self.latencies.name_of,
            needs_all=settings.policy in ("threshold", "short-first"),
            clock=lambda: self.now,
        )
        self._by_manager: dict[str, CpuSharesStatus] = {}
        self._reported_at = float("-inf")
        self._report: dict[str, Any] = {}

    def target_of(self, task: Task) -> OrderTarget | None:
        """Latency target of a task. None for batch work, as graphs and their calls are, and tasks of submitters whose
        targets have no share of the processors."""
        return self.targets.of(task.spec) if self.targets.has_share(task.spec) else None

    def ended(self, task: Task, finished: Finished) -> None:
        """A manager has reported the end of a task. One whose function has not ended counts if it was late already."""
        spec, total_s, run_s, target = task.spec, self.now - task.received_at, 0.0, task.target
        if target is None and task.graph is None and not self.targets.has_share(spec):
            target = self.targets.of(spec)
        if finished.started_at is not None and finished.ended_at is not None:
            run_s = finished.ended_at - finished.started_at
        elif target is None or total_s <= target.latency_s:
            return
        ended = Ended(
            spec.function_id,
            spec.function_hash,
            spec.submitter,
            task.input_bytes,
            total_s,
            run_s,
            finished.start_s,
            target,
        )
        self.latencies.ended(ended, self.now)
        if spec.options.qos is not None and spec.options.qos.is_baseline and finished.error is None:
            self.targets.measured(spec, total_s=total_s - finished.start_s, run_s=run_s)

    def weighed(self, manager_id: str, status: CpuSharesStatus) -> None:
        """Record the state of a manager's latency classes, as the manager reported it."""
        self._by_manager[manager_id] = status

    def lost(self, manager_id: str) -> None:
        """Forget a manager that is gone."""
        self._by_manager.pop(manager_id, None)

    def report(self) -> dict[str, Any]:
        """How long functions took and how targets are held, for the cloud; empty before any task has ended. It changes
        every few seconds at most."""
        now = self.now
        if now >= self._reported_at + (_REPORT_S if self._has_classes() else _CALM_REPORT_S):
            classes, self._reported_at = self._classes(), now
            self.latencies.weighed(classes, now)
            functions = self.latencies.report(classes, now)
            self._report = {**self._about(), "functions": functions} if functions else {}
        return self._report

    def describe(self) -> dict[str, Any]:
        """How targets are held, for the status of the endpoint; empty while there are none."""
        classes = self._classes()
        if not classes:
            return {}
        found = {f"latency_{name}": value for name, value in self._about().items() if value}
        missed = sorted({f"{state.reason}: {state.fix}" for state in classes.values() if state.reason})
        return {**found, "latency_classes": len(classes), **({"latency_needs": "; ".join(missed)} if missed else {})}

    # -- inside --------------------------------------------------------------------------------------------------------

    def _has_classes(self) -> bool:
        return any(status.classes for status in self._by_manager.values())

    def _about(self) -> dict[str, Any]:
        statuses = self._by_manager.values()
        return {
            "policy": self._settings.policy,
            "actuator": ", ".join(sorted({each.actuator for each in statuses if each.actuator})),
            "problem": next((each.problem for each in statuses if each.problem), ""),
            "admission": self._settings.admission,
        }

    def _classes(self) -> dict[str, ClassState]:
        """The latency classes of all nodes: the mean of their weights; a target can be held while one node can."""
        weights: dict[str, list[float]] = {}
        problems: dict[str, list[str]] = {}
        for status in self._by_manager.values():
            for each in status.classes:
                weights.setdefault(each.name, []).append(each.weight)
                problems.setdefault(each.name, []).append(each.problem)
        found: dict[str, ClassState] = {}
        for name, several in weights.items():
            reason, fix = _REASONS.get(problems[name][0], ("", "")) if all(problems[name]) else ("", "")
            found[name] = ClassState(round(statistics.fmean(several), 1), reason, fix)
        return found
