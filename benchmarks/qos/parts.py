"""Parts beside the experiments: what the controller costs with many short calls, and how soon it reacts to a burst."""

from __future__ import annotations

import random
import time
from typing import Any, Final

from benchmarks.qos import functions
from benchmarks.qos.arrivals import Arrival, arrivals, poisson
from benchmarks.qos.experiments import BATCH_CPU_MS, NONE, PI, Arm
from benchmarks.qos.figures import reaction_s
from benchmarks.qos.measuring import ClosedLoop, OpenLoop, clocks, engine_with
from farcall_common.qos import QoS

ARMS: Final = (Arm(NONE), Arm(PI, "pi"))
NOOPS_PER_S: Final = 1000
BURST_S: Final = 2.0
RATE_PER_S: Final = 8.0
"""Of short calls before and after a burst."""
CALM_S: Final = 5.0
_NOOPS_AT_ONCE: Final = 10
_NOOP_TARGET_MS: Final = 50.0
_WARM_UP_NOOPS: Final = 500


def controller(seed: int, *, paced_s: float, noops: int) -> dict[str, Any]:
    """CPU of the manager with 1,000 calls a second that have a target, in percent of a core, and the rate of calls that
    are submitted at once: by policy, which take turns."""
    found = {}
    for arm in random.Random(seed).sample(ARMS, len(ARMS)):
        with engine_with(arm) as engine:
            submit = engine.options(qos=QoS(target_ms=_NOOP_TARGET_MS)).submit
            for future in [submit(functions.noop) for _ in range(_WARM_UP_NOOPS)]:
                future.result()
            before, begin, futures = clocks(), time.monotonic(), []
            for turn in range(round(paced_s * NOOPS_PER_S / _NOOPS_AT_ONCE)):
                time.sleep(max(0.0, begin + turn * _NOOPS_AT_ONCE / NOOPS_PER_S - time.monotonic()))
                futures += [submit(functions.noop) for _ in range(_NOOPS_AT_ONCE)]
            after = clocks()
            for future in futures:
                future.result()
            elapsed_s = after.at_s - before.at_s
            begin = time.monotonic()
            for future in [submit(functions.noop) for _ in range(noops)]:
                future.result()
            found[arm.name] = {
                "manager_percent": 100 * (after.managers_s - before.managers_s) / elapsed_s,
                "paced_per_s": len(futures) / elapsed_s,
                "noops_per_s": noops / (time.monotonic() - begin),
            }
    return found


def reaction(seed: int, *, target_ms: float, rounds_per_ms: float, bursts: int) -> dict[str, Any]:
    """Seconds from the end of each burst until the target is met again, by policy: short calls beside batch work, whose
    rate is doubled for two seconds."""
    segments_s = [CALM_S, *[BURST_S, CALM_S] * bursts]
    calls = _short_calls(segments_s, seed)
    found = {}
    for arm in ARMS:
        with engine_with(arm) as engine:
            batch = ClosedLoop(engine, round(BATCH_CPU_MS * rounds_per_ms))
            loop = OpenLoop(engine, {"short": target_ms}, rounds_per_ms)
            batch.start()
            made = loop.run(calls, until_s=sum(segments_s))
            loop.wait(made)
            batch.stop()
        latencies = [(each.arrival.at_s, each.latency_ms) for each in made]
        ends = [CALM_S + number * (BURST_S + CALM_S) + BURST_S for number in range(bursts)]
        found[arm.name] = {
            "reactions_s": [
                round(reaction_s(latencies, begin_s=end_s, end_s=end_s + CALM_S, target_ms=target_ms), 1)
                for end_s in ends
            ]
        }
    return found


def _short_calls(segments_s: list[float], seed: int) -> list[Arrival]:
    """Calm seconds and bursts in turn; a burst has twice the rate."""
    rng = random.Random(f"reaction {seed}")
    found: list[Arrival] = []
    begin_s = 0.0
    for number, segment_s in enumerate(segments_s):
        rate_per_s = 2 * RATE_PER_S if number % 2 else RATE_PER_S
        calls = arrivals("short", rate_per_s, [segment_s], rng, instants=poisson, spread=0.0)
        found += [each._replace(at_s=begin_s + each.at_s) for each in calls]
        begin_s += segment_s
    return found
