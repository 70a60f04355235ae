"""Keep-alive policies in virtual time: ``python -m benchmarks.warm_pool_simulation`` prints cold starts by policy.

Arrivals have the shape that M. Shahrad et al. report of Azure Functions ("Serverless in the Wild", USENIX ATC 2020):
few environments have most of the tasks, tasks come in bursts or by a timer, and lengths are log-normal. The node has
memory for some of the environments. The manager is the real core with simulated workers, also
with as many warm workers beyond its slots, which takes twice the memory; the others are textbook policies that start a
worker whenever no warm one of the environment is idle:

- *LRU + 10 min*: what was used last longest ago goes first, and whatever was idle for ten minutes;
- *Belady*: what is needed last goes first. It knows the future; no policy that never waits has fewer cold starts.
"""

from __future__ import annotations

import argparse
import bisect
import collections
import dataclasses
import heapq
import itertools
import math
import random
import statistics
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from benchmarks.simulated_manager import SimulatedManager, job
from farcall_common.environments import Environment
from farcall_endpoint.manager.core.events import TasksReceived
from farcall_endpoint.manager.core.warm_pool import WarmPoolSettings

_TIMERS: Final = 0.3
"""Share of environments whose tasks come by a timer."""
_IDLE_S: Final = 600.0
_OWN_START_S: Final = 0.2


class Arrival(NamedTuple):
    """A task: when it comes, the index of its environment, and how long it runs, in seconds."""

    at: float
    environment: int
    duration_s: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of one policy. Waits are from arrival to start, in seconds; ``most_running``: tasks at the same time."""

    cold_starts: int
    mean_wait_s: float
    p99_wait_s: float
    most_running: int


def azure_shaped(
    rng: random.Random, *, environments: int = 50, hours: float = 4.0, tasks: int = 12_000
) -> list[Arrival]:
    """Arrivals in order of time, about as many as ``tasks``."""
    shares = [rng.lognormvariate(0.0, 1.8) for _ in range(environments)]
    horizon_s = hours * 3600
    arrivals: list[Arrival] = []
    for index, share in enumerate(shares):
        expected = tasks * share / sum(shares)
        median_s = min(10.0, rng.lognormvariate(-0.4, 1.2))
        if rng.random() < _TIMERS:
            period_s = horizon_s / max(1.0, expected)
            times = [rng.uniform(0, period_s) + number * period_s for number in range(max(1, round(expected)))]
        else:
            times = []
            while len(times) < expected:
                at = rng.uniform(0, horizon_s)
                for _ in range(min(60, max(1, round(rng.paretovariate(1.2))))):
                    times.append(at)
                    at += rng.expovariate(1 / (2 * median_s))
        arrivals += [
            Arrival(at, index, min(120.0, median_s * rng.lognormvariate(0.0, 0.6))) for at in times if at < horizon_s
        ]
    return sorted(arrivals)


def by_manager(
    arrivals: Sequence[Arrival],
    *,
    workers: int,
    start_s: Sequence[float],
    eviction: Literal["greedy-dual", "lru"] = "greedy-dual",
    extra_workers: int = 0,
) -> Outcome:
    """The policy of the manager.

    :param extra_workers: so many may be warm beyond ``workers``.
    """
    environments = [
        Environment.of({"type": "venv", "location": f"/environments/{number}"}) for number in range(len(start_s))
    ]
    starts = {environment.key: seconds for environment, seconds in zip(environments, start_s, strict=True)}
    manager = SimulatedManager(
        slots=workers,
        start_s=lambda environment: _OWN_START_S if environment is None else starts[environment.key],
        duration_s=lambda order: arrivals[int(order.task_id)].duration_s,
        warm=WarmPoolSettings(idle_s=_IDLE_S, eviction=eviction, extra_workers=extra_workers),
    )
    for number, arrival in enumerate(arrivals):
        environment = environments[arrival.environment]
        manager.handle([TasksReceived([job(str(number), environment)])], now=arrival.at)
    while len(manager.started_at) < len(arrivals):
        manager.advance(manager.next_event())
    waits = [manager.started_at[str(number)] - arrival.at for number, arrival in enumerate(arrivals)]
    cold_starts = sum(count for key, count in manager.cold_starts.items() if key)
    return _outcome(arrivals, cold_starts, waits)


@dataclasses.dataclass
class _Worker:
    environment: int
    idle_since: float | None = None


def by_textbook(
    arrivals: Sequence[Arrival], *, workers: int, start_s: Sequence[float], policy: Literal["lru", "belady"]
) -> Outcome:
    """A policy that never waits for a busy warm worker, unless all are busy."""
    future: dict[int, list[float]] = collections.defaultdict(list)
    for arrival in arrivals:
        future[arrival.environment].append(arrival.at)
    there: list[_Worker] = []
    ends: list[tuple[float, int, _Worker]] = []
    waiting: collections.deque[int] = collections.deque()
    waits = [0.0] * len(arrivals)
    numbers = itertools.count()
    cold_starts = 0

    def next_use(worker: _Worker, now: float, before: int) -> float:
        """When an idle worker is needed, if so many of its environment are taken first."""
        times = future[worker.environment]
        index = bisect.bisect_right(times, now) + before
        return times[index] if index < len(times) else math.inf

    def victim(now: float) -> _Worker | None:
        idle = [worker for worker in there if worker.idle_since is not None]
        if policy == "lru":
            return min(idle, key=lambda worker: worker.idle_since or 0.0, default=None)
        ranks: collections.Counter[int] = collections.Counter()
        uses: list[tuple[float, _Worker]] = []
        for worker in idle:
            uses.append((next_use(worker, now, ranks[worker.environment]), worker))
            ranks[worker.environment] += 1
        return max(uses, key=lambda use: use[0], default=(0.0, None))[1]

    def begin(number: int, now: float) -> bool:
        nonlocal cold_starts
        arrival = arrivals[number]
        idle = [worker for worker in there if worker.idle_since is not None]
        if policy == "lru":
            for worker in [worker for worker in idle if now - (worker.idle_since or 0.0) > _IDLE_S]:
                there.remove(worker)
                idle.remove(worker)
        warm = next((worker for worker in reversed(idle) if worker.environment == arrival.environment), None)
        began = now
        if warm is None:
            if len(there) >= workers:
                evicted = victim(now)
                if evicted is None:
                    return False
                there.remove(evicted)
            warm = _Worker(arrival.environment)
            there.append(warm)
            cold_starts += 1
            began += start_s[arrival.environment]
        warm.idle_since = None
        waits[number] = began - arrival.at
        heapq.heappush(ends, (began + arrival.duration_s, next(numbers), warm))
        return True

    def end_until(now: float) -> None:
        while ends and ends[0][0] <= now:
            at, _, worker = heapq.heappop(ends)
            worker.idle_since = at
            while waiting and begin(waiting[0], at):
                waiting.popleft()

    for number, arrival in enumerate(arrivals):
        end_until(arrival.at)
        if waiting or not begin(number, arrival.at):
            waiting.append(number)
    end_until(math.inf)
    return _outcome(arrivals, cold_starts, waits)


def _outcome(arrivals: Sequence[Arrival], cold_starts: int, waits: list[float]) -> Outcome:
    began = [arrival.at + wait_s for arrival, wait_s in zip(arrivals, waits, strict=True)]
    ended = [at + arrival.duration_s for at, arrival in zip(began, arrivals, strict=True)]
    # At the same instant one ends before the next begins; a rounding apart they do, too.
    changes = sorted([*((at + 1e-5, 1) for at in began), *((at, -1) for at in ended)])
    running = itertools.accumulate(change for _, change in changes)
    return Outcome(cold_starts, statistics.fmean(waits), statistics.quantiles(waits, n=100)[98], max(running))


def compare(seed: int, *, environments: int = 50, workers: int = 15) -> dict[str, Outcome]:
    """All policies with the same arrivals."""
    rng = random.Random(seed)
    arrivals = azure_shaped(rng, environments=environments)
    start_s = [rng.choice([1.2, 1.8, 5.0, 10.4]) for _ in range(environments)]
    return {
        "LRU + 10 min": by_textbook(arrivals, workers=workers, start_s=start_s, policy="lru"),
        "manager, LRU": by_manager(arrivals, workers=workers, start_s=start_s, eviction="lru"),
        "manager, Greedy-Dual": by_manager(arrivals, workers=workers, start_s=start_s),
        "with as many warm beyond": by_manager(arrivals, workers=workers, start_s=start_s, extra_workers=workers),
        "Belady": by_textbook(arrivals, workers=workers, start_s=start_s, policy="belady"),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--environments", type=int, default=50)
    parser.add_argument("--workers", type=int, default=15)
    options = parser.parse_args()
    rows: dict[str, list[Outcome]] = collections.defaultdict(list)
    for seed in range(options.seeds):
        for name, outcome in compare(seed, environments=options.environments, workers=options.workers).items():
            rows[name].append(outcome)
    baseline = statistics.fmean(each.cold_starts for each in rows["LRU + 10 min"])
    print(f"{'policy':24} {'cold starts':>12} {'against LRU':>12} {'mean wait, s':>13} {'p99 wait, s':>12}")
    for name, outcomes in rows.items():
        cold = statistics.fmean(each.cold_starts for each in outcomes)
        mean_s = statistics.fmean(each.mean_wait_s for each in outcomes)
        p99_s = statistics.fmean(each.p99_wait_s for each in outcomes)
        print(f"{name:24} {cold:12.0f} {cold / baseline - 1:12.0%} {mean_s:13.2f} {p99_s:12.1f}")


if __name__ == "__main__":
    main()
