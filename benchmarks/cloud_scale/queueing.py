"""Latency model: a queueing simulation of the parts that all tasks share.

Batches arrive at random moments (Poisson, from a fixed seed) and pass the API, the database, the queue, the forwarders
and the database again. Each part serves as many batches at once as it has processors, first come first served.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from typing import Final

import numpy as np

from benchmarks.cloud_scale.inputs import Deployment, Inputs

_HORIZON_S: Final = 60.0
_SUBMIT_SHARE: Final = 0.5
"""Of the database's work for a task; the other half is for its result."""


@dataclasses.dataclass(frozen=True)
class Latency:
    """Milliseconds without endpoint and network. ``settled`` is false if the queue only grows."""

    p50_ms: float
    p99_ms: float
    settled: bool


class _Part:
    def __init__(self, servers: int) -> None:
        self.free = servers
        self.queue: deque[tuple[int, int]] = deque()


def latency(tasks_per_s: float, size: Deployment, inputs: Inputs, *, seed: int = 1) -> Latency:
    """Simulate a minute."""
    rng = np.random.default_rng(seed)
    batch, task = inputs.policy["batch"], inputs.per_task
    database = _Part(int(size.database_vcpus))
    stages_us = (
        (_Part(int(inputs.limits["lambda_concurrency"])), task["api_us"]),
        (database, _SUBMIT_SHARE * task["postgres_us"]),
        (_Part(1), task["valkey_us"]),
        (_Part(max(1, round(size.forwarders * size.forwarder_vcpus))), task["forwarder_us"]),
        (database, (1 - _SUBMIT_SHARE) * task["postgres_us"]),
    )
    stages = [(part, us * batch / 1e6) for part, us in stages_us]
    count = int(tasks_per_s / batch * _HORIZON_S)
    began = np.cumsum(rng.exponential(batch / tasks_per_s, count))
    ended = np.full(count, np.inf)
    events: list[tuple[float, int, int, bool]] = [(at, job, 0, False) for job, at in enumerate(began)]
    heapq.heapify(events)
    while events:
        now, job, stage, is_done = heapq.heappop(events)
        part, service_s = stages[stage]
        if not is_done:
            if part.free == 0:
                part.queue.append((job, stage))
                continue
            part.free -= 1
            heapq.heappush(events, (now + service_s, job, stage, True))
            continue
        if part.queue:
            next_job, next_stage = part.queue.popleft()
            heapq.heappush(events, (now + stages[next_stage][1], next_job, next_stage, True))
        else:
            part.free += 1
        if stage + 1 < len(stages):
            heapq.heappush(events, (now, job, stage + 1, False))
        else:
            ended[job] = now
    took = 1000 * (ended - began)
    first, last = took[: count // 3], took[-(count // 3) :]
    settled = bool(np.median(last) < 2 * np.median(first) + 10)
    return Latency(float(np.percentile(took, 50)), float(np.percentile(took, 99)), settled)
