"""Routing by warm environments: ``python -m benchmarks.warm_routing``.

The experiment of the paper's section 7.4 (IEEE TPDS 2022), in virtual time: 10 nodes with 10 workers each, 10
environments, 3,000 tasks of a random one. The agent's core and its policies are the real ones, and so are credit and
prefetching; messages take 1 ms. The managers of the arm ``random`` start a worker for the first task that has none,
instead of an idle one of another environment: they evict on demand. The other arms have the real manager's core, which
deploys workers in proportion to its tasks.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import heapq
import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from benchmarks.report import Report, new_report, parse_options, save
from benchmarks.simulated_manager import SimulatedManager, job
from farcall_common.environments import Environment
from farcall_common.event_log import UserBytes
from farcall_common.task_options import TaskOptions
from farcall_common.wire import FunctionSpec, TaskRef, TaskSpec, TaskState
from farcall_endpoint.agent.core import actions as do
from farcall_endpoint.agent.core import events as ev
from farcall_endpoint.agent.core.agent import AgentCore
from farcall_endpoint.agent.core.scheduling import load_policy
from farcall_endpoint.agent.core.tasks import Task
from farcall_endpoint.contracts.agent_manager import Finished, Progress
from farcall_endpoint.contracts.prefetch import PrefetchPolicy
from farcall_endpoint.manager.core.events import TasksReceived

NODES, SLOTS, ENVIRONMENTS, TASKS = 10, 10, 10, 3000
DURATIONS_S: Final = (0.0, 1.0, 5.0, 20.0)
STARTS_S: Final = (1.8, 10.0)
ARRIVALS: Final = ("batch", "online")
ARMS: Final = ("random", "random, proportional", "warming-aware")

_NOOP_S: Final = 0.001
"""A task of 0 s."""
_MESSAGE_S: Final = 0.001
_ONLINE_S: Final = 5.0
"""Online, tasks arrive for half as long as all workers need for them, but at least for so long."""
_HASH: Final = "f" * 64
_ROUNDS: Final = 3

Environments = Sequence[Environment]


class Manager(Protocol):
    """What the experiment needs of a manager."""

    def give(self, tasks: Sequence[Task], *, now: float) -> list[Progress]:
        """Tasks from the agent; what it reports."""

    def next_event(self) -> float:
        """The virtual second of the next thing that happens."""

    def advance(self, now: float) -> list[Progress]:
        """Let happen what is due; what it reports."""

    @property
    def cold_starts(self) -> int:
        """Workers that it started in an environment."""


class ProportionalManager:
    """The real core of a manager."""

    def __init__(self, *, start_s: float, duration_s: float) -> None:
        def start_of(environment: Environment | None) -> float:
            return 0.0 if environment is None else start_s

        self._manager = SimulatedManager(
            slots=SLOTS, start_s=start_of, duration_s=lambda _: duration_s, prefetch=256, horizon_s=0.1
        )

    def give(self, tasks: Sequence[Task], *, now: float) -> list[Progress]:
        """As :class:`Manager`."""
        jobs = [job(task.task_id, task.spec.options.environment) for task in tasks]
        reports = self._manager.advance(now)
        return [*reports, *self._manager.handle([TasksReceived(jobs)], now=now)]

    def next_event(self) -> float:
        """As :class:`Manager`."""
        return self._manager.next_event()

    def advance(self, now: float) -> list[Progress]:
        """As :class:`Manager`."""
        return self._manager.advance(now)

    @property
    def cold_starts(self) -> int:
        """As :class:`Manager`."""
        return sum(count for key, count in self._manager.cold_starts.items() if key)


@dataclasses.dataclass
class _Worker:
    environment: Environment
    free_at: float
    task: Task | None = None


class EvictingManager:
    """Tasks in their order; one that finds no idle worker of its environment has one started on a free slot, or in the
    place of the worker that is idle for longest."""

    def __init__(self, *, start_s: float, duration_s: float) -> None:
        self._start_s = start_s
        self._duration_s = duration_s
        self._workers: list[_Worker] = []
        self._waiting: collections.deque[Task] = collections.deque()
        self._now = 0.0
        self.cold_starts = 0

    def give(self, tasks: Sequence[Task], *, now: float) -> list[Progress]:
        """As :class:`Manager`."""
        self._now = now
        self._waiting.extend(tasks)
        self._assign()
        return []

    def next_event(self) -> float:
        """As :class:`Manager`."""
        return min((worker.free_at for worker in self._workers if worker.task is not None), default=math.inf)

    def advance(self, now: float) -> list[Progress]:
        """As :class:`Manager`."""
        reports: list[Progress] = []
        while (at := self.next_event()) <= now:
            self._now = at
            finished = []
            for worker in self._workers:
                if worker.task is not None and worker.free_at <= at:
                    started_at = at - self._duration_s
                    finished.append(Finished(worker.task.task_id, TaskState.SUCCESS, None, None, started_at, at))
                    worker.task = None
            self._assign()
            reports.append(Progress(tuple(finished), workers=SLOTS))
        self._now = now
        return reports

    def _assign(self) -> None:
        for _ in range(len(self._waiting)):
            task = self._waiting.popleft()
            environment = task.spec.options.environment
            assert environment is not None
            idle = [worker for worker in self._workers if worker.task is None]
            worker = next((each for each in idle if each.environment == environment), None)
            if worker is not None:
                worker.task, worker.free_at = task, self._now + self._duration_s
            elif idle or len(self._workers) < SLOTS:
                if len(self._workers) == SLOTS:
                    self._workers.remove(min(idle, key=lambda each: each.free_at))
                self.cold_starts += 1
                ends_at = self._now + self._start_s + self._duration_s
                self._workers.append(_Worker(environment, ends_at, task))
            else:
                self._waiting.appendleft(task)
                return


class Experiment:
    """One run: the agent's core, its managers, and the cloud that sends tasks as far as there is credit for them."""

    def __init__(self, arm: str, *, duration_s: float, start_s: float, arrival: str, seed: int) -> None:
        rng = random.Random(seed)
        environments = [
            Environment(type="apptainer", location=f"/images/{number}.sif") for number in range(ENVIRONMENTS)
        ]
        self._now = 0.0
        self._numbers = itertools.count()
        self._messages: list[tuple[float, int, Callable[[], None]]] = []
        make = EvictingManager if arm == "random" else ProportionalManager
        run_s = duration_s or _NOOP_S
        self._managers: dict[str, Manager] = {
            f"m{number}": make(start_s=start_s, duration_s=run_s) for number in range(NODES)
        }
        window = PrefetchPolicy(horizon_s=1.0, limit=1024, unseen=16)
        self._core = AgentCore(
            endpoint_id="",
            policy=load_policy("warming-aware" if arm == "warming-aware" else "random", rng),
            slots_hint=SLOTS,
            prefetch=PrefetchPolicy(horizon_s=0.1, limit=256),
            window=window,
            max_window=1024,
        )
        self._credit = 0
        self._arrived: collections.deque[TaskSpec] = collections.deque()
        self._events: list[ev.Event] = []
        self.submitted_at: dict[str, float] = {}
        self.completed_at: dict[str, float] = {}
        span_s = 0.0 if arrival == "batch" else max(_ONLINE_S, TASKS * run_s / (NODES * SLOTS) / 2)
        for number in range(TASKS):
            options = TaskOptions(environment=rng.choice(environments))
            spec = TaskSpec(f"t{number}", 1, "", _HASH, options, 0)
            self._later(span_s * number / TASKS, lambda spec=spec: self._arrive(spec))  # type: ignore[misc]
        self._events.append(ev.SessionOpened())
        self._functions = [FunctionSpec(function_hash=_HASH, name="f", body=0)]
        for name in self._managers:
            self._events.append(ev.ManagerRegistered(name, SLOTS, None, name, {"apptainer": ""}))
            self._events.append(ev.ManagerProgress(name, Progress(workers=SLOTS, idle_workers=SLOTS)))

    def run(self) -> None:
        """Until all tasks have their results."""
        self._turn()
        while len(self.completed_at) < TASKS:
            due = [self._messages[0][0] if self._messages else math.inf, self._core.next_deadline() or math.inf]
            self._now = max(self._now, min(*due, *(each.next_event() for each in self._managers.values())))
            assert self._now < math.inf, "the tasks are lost"
            while self._messages and self._messages[0][0] <= self._now:
                heapq.heappop(self._messages)[2]()
            for name, manager in self._managers.items():
                if manager.next_event() <= self._now:
                    self._report(name, manager.advance(self._now))
            self._turn()

    @property
    def cold_starts(self) -> int:
        """Workers that were started in an environment."""
        return sum(manager.cold_starts for manager in self._managers.values())

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._messages, (self._now + delay_s, next(self._numbers), action))

    def _arrive(self, spec: TaskSpec) -> None:
        self.submitted_at[spec.task_id] = self._now
        self._arrived.append(spec)

    def _report(self, name: str, reports: Sequence[Progress]) -> None:
        for progress in reports:
            bodies = UserBytes([b"" for _ in progress.finished])
            event = ev.ManagerProgress(name, progress, bodies)
            self._later(_MESSAGE_S, lambda event=event: self._events.append(event))  # type: ignore[misc]

    def _turn(self) -> None:
        """A turn of the agent's loop."""
        if self._arrived and self._credit > 0:
            count = min(self._credit, len(self._arrived))
            specs = [self._arrived.popleft() for _ in range(count)]
            self._credit -= count
            functions, self._functions = self._functions, []
            payloads = UserBytes([b""] * count)
            self._events.append(ev.TasksReceived(specs, payloads, functions, UserBytes([b""] * len(functions))))
        events, self._events = self._events, []
        while True:
            written = False
            for action in self._core.handle(events, self._now):
                written = self._perform(action) or written
            if not written:
                return
            events = [ev.SpoolWritten()]

    def _perform(self, action: do.Action) -> bool:
        match action:
            case do.WriteSpool():
                return True
            case do.GiveCredit(tasks=credit):
                self._credit += credit
                if self._arrived:
                    self._later(_MESSAGE_S, lambda: None)
            case do.RunTasks(manager_id=name, tasks=sent):
                self._later(_MESSAGE_S, lambda: self._report(name, self._managers[name].give(sent, now=self._now)))
            case do.ReportResults(tasks=ended):
                for task in ended:
                    assert task.result is not None
                    assert task.result.state is TaskState.SUCCESS, task.result
                    self.completed_at[task.task_id] = self._now
                refs = tuple(TaskRef(task_id=task.task_id, attempt=task.attempt) for task in ended)
                self._later(_MESSAGE_S, lambda: self._events.append(ev.ResultsRecorded(refs)))
        return False


def measure(arm: str, *, duration_s: float, start_s: float, arrival: str, seed: int) -> dict[str, float]:
    """One run: when the last task was done, how long one waited in the mean, and the cold starts."""
    experiment = Experiment(arm, duration_s=duration_s, start_s=start_s, arrival=arrival, seed=seed)
    experiment.run()
    waits = [experiment.completed_at[name] - at for name, at in experiment.submitted_at.items()]
    return {
        "completion_s": max(experiment.completed_at.values()),
        "mean_s": statistics.fmean(waits),
        "cold_starts": experiment.cold_starts,
    }


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    options = parse_options(parser, "warm_routing.json")
    rows: list[dict[str, Any]] = []
    for duration_s, start_s, arrival in itertools.product(DURATIONS_S, STARTS_S, ARRIVALS):
        cell = {"duration_s": duration_s, "start_s": start_s, "arrival": arrival}
        for arm in ARMS:
            runs = [measure(arm, **cell, seed=seed) for seed in range(options.rounds)]  # type: ignore[arg-type]
            medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            rows.append({**cell, "arm": arm, **medians})
    save(new_report(rows=rows, rounds=options.rounds), options.output, as_table)


def as_table(report: Report) -> str:
    """Markdown: a row for each cell, with the difference to the arm ``random``."""
    lines = [
        "| task | cold start | arrival | random: time, cold starts | random, proportional | warming-aware | change |",
        "|---|---|---|---|---|---|---|",
    ]
    cells: dict[tuple[object, ...], dict[str, Mapping[str, float]]] = collections.defaultdict(dict)
    for row in report["rows"]:
        cells[row["duration_s"], row["start_s"], row["arrival"]][row["arm"]] = row
    for (duration_s, start_s, arrival), arms in cells.items():
        shown = [f"{arms[arm]['completion_s']:,.1f} s, {arms[arm]['cold_starts']:,.0f}" for arm in ARMS]
        change = arms["warming-aware"]["completion_s"] / arms["random"]["completion_s"] - 1
        lines.append(f"| {duration_s:g} s | {start_s:g} s | {arrival} | {' | '.join(shown)} | {change:+.0%} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
