"""Runs on the engine of an endpoint: an open loop of calls with targets, and a closed loop of batch work."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.qos import functions
from benchmarks.qos.arrivals import Arrival
from benchmarks.qos.experiments import BATCH_CPU_MS, BATCH_OUTSTANDING, CPU_MS, TARGET, Arm, Experiment
from benchmarks.qos.figures import calls_between, class_figures, quantile
from farcall_common.qos import QoS
from farcall_endpoint import Engine
from farcall_endpoint.config.settings import QosSettings

BATCH_WORKERS: Final = 4
LATENCY_WORKERS: Final = 8
"""More than two calls run at a time, as it is the weights that are compared, not the order of a queue."""
FUNCTIONS: Final[Mapping[str, Callable[[int], functions.Done]]] = {
    each.__name__: each
    for each in (functions.resize, functions.name_generation, functions.pyaes, functions.training, functions.short)
}
_SOON_S: Final = 0.05
_LAST_RESULTS_S: Final = 10.0
_MANAGER: Final = "farcall_endpoint.manager"
_WEIGHT_STEP_S: Final = 0.25


@dataclasses.dataclass(slots=True)
class Call:
    """A call of an open loop. Instants are seconds since its beginning; ``behind_s``: how late it was made."""

    arrival: Arrival
    behind_s: float
    submitted_s: float
    ended_s: float | None = None
    weight: float | None = None

    @property
    def latency_ms(self) -> float:
        """From submit to result."""
        assert self.ended_s is not None  # it has been waited for
        return 1000 * (self.ended_s - self.submitted_s)


@dataclasses.dataclass(frozen=True, slots=True)
class Clocks:
    """CPU times until now, in seconds: of the machine, of this program with its workers, and of managers."""

    at_s: float
    machine_s: float
    own_s: float
    managers_s: float


class ClosedLoop:
    """Batch work: so many calls are always outstanding, until it is stopped."""

    def __init__(self, engine: Engine, rounds: int) -> None:
        self._engine = engine
        self._rounds = rounds
        self._outstanding: set[Future[functions.Done]] = set()
        self._is_over = False
        self.intervals: list[tuple[float, float]] = []
        """The instants at which calls began and ended."""

    def start(self) -> None:
        """Make the first calls."""
        for _ in range(BATCH_OUTSTANDING):
            self._submit()

    def stop(self) -> None:
        """Make no more calls, and wait for those that are outstanding, but not for ever.

        :raises BaseException: what a call has ended with.
        """
        self._is_over = True
        for future in wait(list(self._outstanding), timeout=_LAST_RESULTS_S).done:
            future.result()

    def _submit(self) -> None:
        future = self._engine.submit(functions.batch, self._rounds)
        self._outstanding.add(future)
        future.add_done_callback(self._on_done)

    def _on_done(self, future: Future[functions.Done]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        self.intervals.append((future.result()[1], time.monotonic()))
        if not self._is_over:
            self._submit()
        self._outstanding.discard(future)


@contextlib.contextmanager
def engine_with(arm: Arm, *, cores: Collection[int] | None = None) -> Iterator[Engine]:
    """An engine whose workers have started.

    :param cores: those that its processes may use, if not all.
    """
    before = os.sched_getaffinity(0)
    try:
        if cores is not None:
            os.sched_setaffinity(0, cores)  # what this thread starts inherits them
        engine = Engine(BATCH_WORKERS, qos_settings=settings_of(arm))
    finally:
        os.sched_setaffinity(0, before)
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.shutdown(cancel_futures=True)


def settings_of(arm: Arm) -> QosSettings:
    """What the engine of an arm gets."""
    values: dict[str, Any] = {"policy": arm.policy, "latency_workers": LATENCY_WORKERS}
    if arm.policy == "threshold":
        values |= {"ratio": TARGET, "delta": arm.delta}
    if arm.deltas:
        values["deltas"] = dict(arm.deltas)
    if arm.weights:
        values["weights"] = dict(arm.weights)
    return QosSettings(**values)


def measure_baselines(names: Collection[str], rounds_per_ms: float, count: int) -> dict[str, float]:
    """The latency of each function on an idle engine in milliseconds: the median of so many calls, one by one."""
    with engine_with(Arm("idle")) as engine:
        return {name: _baseline_ms(engine, name, rounds_per_ms, count) for name in names}


def _baseline_ms(engine: Engine, name: str, rounds_per_ms: float, count: int) -> float:
    submit = engine.options(qos=QoS(is_baseline=True)).submit
    rounds = round(CPU_MS[name] * rounds_per_ms)
    took_ms = []
    for _ in range(count):
        before = time.monotonic()
        submit(FUNCTIONS[name], rounds).result()
        took_ms.append(1000 * (time.monotonic() - before))
    return quantile(took_ms, 50)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of a run: before anything is counted, and of what is counted; calls that make a baseline."""

    warm_up_s: float
    measured_s: float
    baseline_calls: int


def run(
    experiment: Experiment,
    arm: Arm,
    *,
    seed: int,
    targets_ms: Mapping[str, float],
    rounds_per_ms: float,
    timing: Timing,
) -> dict[str, Any]:
    """One run of an experiment with one policy, and its figures."""
    arrivals = experiment.arrivals((timing.warm_up_s, timing.measured_s), seed)
    with contextlib.ExitStack() as belongings:
        first, *others = sorted(os.sched_getaffinity(0))
        engine = belongings.enter_context(engine_with(arm, cores={first} if arm.is_reserved else None))
        batch_engine = belongings.enter_context(engine_with(arm, cores=others)) if arm.is_reserved else engine
        if arm.policy == "threshold":
            for name in targets_ms:
                _baseline_ms(engine, name, rounds_per_ms, timing.baseline_calls)
        loop = OpenLoop(engine, targets_ms, rounds_per_ms)
        batch = ClosedLoop(batch_engine, round(BATCH_CPU_MS * rounds_per_ms))
        if experiment.has_batch:
            batch.start()
        loop.run([each for each in arrivals if each.at_s < timing.warm_up_s], until_s=timing.warm_up_s)
        before = clocks()
        end_s = timing.warm_up_s + timing.measured_s
        calls = loop.run([each for each in arrivals if each.at_s >= timing.warm_up_s], until_s=end_s)
        after = clocks()
        loop.wait(calls)
        batch.stop()
    elapsed_s = after.at_s - before.at_s
    machine_s, own_s = after.machine_s - before.machine_s, after.own_s - before.own_s
    return {
        "classes": {
            name: class_figures([each.latency_ms for each in calls if each.arrival.function == name], target_ms)
            for name, target_ms in targets_ms.items()
        },
        "batch_calls": round(calls_between(batch.intervals, before.at_s, after.at_s), 2),
        "manager_percent": round(100 * (after.managers_s - before.managers_s) / elapsed_s, 3),
        "utilisation": round(machine_s / elapsed_s / len(os.sched_getaffinity(0)), 3),
        "others": round(max(0.0, machine_s - own_s) / elapsed_s / len(os.sched_getaffinity(0)), 3),
        "generator_p99_ms": round(1000 * quantile([each.behind_s for each in calls], 99), 1),
        "weights": weights_over_time(calls),
    }


class OpenLoop:
    """Makes calls at given instants, whether earlier ones have ended or not, from the moment it is made."""

    def __init__(self, engine: Engine, targets_ms: Mapping[str, float], rounds_per_ms: float) -> None:
        self._submits = {
            name: engine.options(qos=QoS(target_ms=target_ms)).submit for name, target_ms in targets_ms.items()
        }
        self._rounds_per_ms = rounds_per_ms
        self._problems: list[BaseException] = []
        self._begin = time.monotonic() + _SOON_S

    def run(self, arrivals: Sequence[Arrival], *, until_s: float) -> list[Call]:
        """Make these calls, and return at this instant."""
        calls = []
        for arrival in arrivals:
            self._sleep(arrival.at_s)
            rounds = round(CPU_MS[arrival.function] * arrival.factor * self._rounds_per_ms)
            now_s = time.monotonic() - self._begin
            call = Call(arrival, now_s - arrival.at_s, now_s)
            calls.append(call)
            submitted = self._submits[arrival.function](FUNCTIONS[arrival.function], rounds)
            submitted.add_done_callback(functools.partial(self._on_done, call))
        self._sleep(until_s)
        return calls

    def wait(self, calls: Collection[Call]) -> None:
        """Wait for the results, but not for ever: a call without one counts with its age.

        :raises BaseException: what a call has ended with.
        """
        deadline = time.monotonic() + _LAST_RESULTS_S
        while time.monotonic() < deadline and any(each.ended_s is None for each in calls) and not self._problems:
            time.sleep(_SOON_S)
        if self._problems:
            raise self._problems[0]
        now_s = time.monotonic() - self._begin
        for each in calls:
            if each.ended_s is None:
                each.ended_s = now_s

    def _sleep(self, until_s: float) -> None:
        time.sleep(max(0.0, self._begin + until_s - time.monotonic()))

    def _on_done(self, call: Call, future: Future[Any]) -> None:
        if future.cancelled():
            return
        if (error := future.exception()) is not None:
            self._problems.append(error)
            return
        call.weight, _ = future.result()
        call.ended_s = time.monotonic() - self._begin


def weights_over_time(calls: Collection[Call]) -> dict[str, list[tuple[float, float]]]:
    """By function, instants and the weights that its calls then had; empty if the machine does not tell them."""
    found: dict[str, dict[float, float]] = collections.defaultdict(dict)
    for each in sorted(calls, key=lambda each: each.ended_s or 0.0):
        if each.ended_s is not None and each.weight is not None:
            step = round(each.ended_s / _WEIGHT_STEP_S) * _WEIGHT_STEP_S
            found[each.arrival.function][step] = round(each.weight, 1)
    return {name: list(values.items()) for name, values in found.items()}


def clocks() -> Clocks:
    """The CPU times of this moment."""
    machine = psutil.cpu_times()
    own_s = managers_s = 0.0
    here = psutil.Process()
    for process in [here, *here.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            own_s += times.user + times.system
            if process.pid != here.pid and _MANAGER in process.cmdline():
                managers_s += _precise_cpu_s(process.pid)
    return Clocks(time.monotonic(), sum(machine) - machine.idle - machine.iowait, own_s, managers_s)


def _precise_cpu_s(pid: int) -> float:
    """CPU time of the threads of a process, which the kernel has in nanoseconds."""
    total_ns = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has ended
            total_ns += int(path.read_text().split()[0])
    return total_ns / 1e9
