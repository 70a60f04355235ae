"""Simulated CPUs that functions share by weights, as cgroups do: tasks arrive, wait for a worker and run."""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Iterator, Mapping

from farcall_endpoint.qos.histograms import WindowedHistogram
from farcall_endpoint.qos.policies import Policy, Target

_STEP_S = 0.002
_INTERVAL_S = 0.25
_WINDOW_S = 4.0


@dataclasses.dataclass
class Load:
    """The tasks of a function.

    :param run_s: CPU time of a task.
    :param spread: the largest deviation from that, as a part of it.
    :param wait_s: for which a task waits for something else than a CPU, with its worker.
    :param workers: that it has.
    :param per_s: tasks that arrive, at random instants; 0: each one that ends is followed by another one.
    :param outstanding: how many there are at a time if ``per_s`` is 0.
    """

    run_s: float
    workers: int
    per_s: float = 0.0
    outstanding: int = 0
    spread: float = 0.0
    wait_s: float = 0.0


@dataclasses.dataclass
class Ended:
    """The tasks of a function that have ended: latencies in seconds, in order."""

    latencies: list[float] = dataclasses.field(default_factory=list)

    def violations(self, limit_s: float) -> float:
        """The part of the tasks that took longer."""
        return sum(each > limit_s for each in self.latencies) / len(self.latencies)

    def quantile(self, part: float) -> float:
        """The latency that this part of the tasks did not exceed."""
        return sorted(self.latencies)[int(part * (len(self.latencies) - 1))]


@dataclasses.dataclass
class _Task:
    arrived_at: float
    left_s: float
    wait_s: float


def run(
    policy: Policy,
    loads: Mapping[str, Load],
    targets: Mapping[str, Target],
    *,
    cores: int = 2,
    duration_s: float = 60.0,
    seed: int = 0,
) -> Mapping[str, Ended]:
    """The tasks of all functions that have ended under a policy."""
    sizes = random.Random(seed)

    def task(name: str, at: float) -> _Task:
        load = loads[name]
        return _Task(at, load.run_s * (1 + load.spread * sizes.uniform(-1, 1)), load.wait_s)

    arrivals = {name: _arrivals(load, random.Random(f"{seed} {name}")) for name, load in loads.items()}
    next_at = {name: next(each) for name, each in arrivals.items() if loads[name].per_s}
    waiting = {
        name: collections.deque(task(name, 0.0) for _ in range(load.outstanding)) for name, load in loads.items()
    }
    running: dict[str, list[_Task]] = {name: [] for name in loads}
    ended = {name: Ended() for name in loads}
    windows = {name: WindowedHistogram(_WINDOW_S) for name in targets}
    weights = dict.fromkeys(loads, 100.0)
    pressed_s, decide_at = 0.0, _INTERVAL_S
    for step in range(round(duration_s / _STEP_S)):
        now = step * _STEP_S
        for name, at in next_at.items():
            while at <= now:
                waiting[name].append(task(name, at))
                at += next(arrivals[name])
            next_at[name] = at
        for name, load in loads.items():
            while waiting[name] and len(running[name]) < load.workers:
                running[name].append(waiting[name].popleft())
        for each in (each for tasks in running.values() for each in tasks):
            each.wait_s -= _STEP_S
        computing = {name: [each for each in tasks if each.wait_s <= 0] for name, tasks in running.items()}
        busy = {name: len(tasks) for name, tasks in computing.items() if tasks}
        pressed_s += _STEP_S * (sum(busy.values()) > cores)
        for name, share in shares(busy, weights, cores).items():
            for each in computing[name]:
                each.left_s -= _STEP_S * share / busy[name]
            for each in [each for each in computing[name] if each.left_s <= 0]:
                running[name].remove(each)
                latency_s = now - each.arrived_at
                ended[name].latencies.append(latency_s)
                if name in windows:
                    windows[name].add(latency_s, now)
                    policy.on_task_ended(name, targets[name], latency_s)
                if not loads[name].per_s:
                    waiting[name].append(task(name, now))
        if now >= decide_at:
            latencies: dict[str, float | None] = {}
            for name, target in targets.items():
                histogram = windows[name].histogram(now)
                for age_s in (now - each.arrived_at for each in (*waiting[name], *running[name])):
                    if age_s > target.latency_s:
                        histogram.add(age_s)
                latencies[name] = histogram.quantile(target.percentile / 100)
            weights |= policy.weights(
                targets,
                latencies,
                pressure=min(1.0, pressed_s / _INTERVAL_S),
                interval_s=_INTERVAL_S,
                others=len(busy.keys() - targets.keys()),
            )
            pressed_s, decide_at = 0.0, decide_at + _INTERVAL_S
    return ended


def shares(busy: Mapping[str, int], weights: Mapping[str, float], cores: int) -> Mapping[str, float]:
    """The cores that each function gets: by weight, but no more than it has running tasks."""
    found: dict[str, float] = {}
    left, rest = float(cores), dict(busy)
    while rest:
        total = sum(weights[name] for name in rest)
        full = [name for name, count in rest.items() if left * weights[name] / total >= count]
        for name in full or list(rest):
            found[name] = min(rest[name], left * weights[name] / total)
        left -= sum(found[name] for name in full)
        rest = {name: count for name, count in rest.items() if full and name not in full}
    return found


def _arrivals(load: Load, generator: random.Random) -> Iterator[float]:
    while True:
        yield generator.expovariate(load.per_s)
