"""Shares of the CPUs for the workers of a manager: a thread moves them into groups, and sets the weights of these.

The kernel may take 30 ms to move a process, in which no process of the machine can fork, and permits one change of an
autogroup in 100 ms. So the manager does not wait for it. Workers of batch work join when they have run for a moment:
those that end at once, such as one-shot ones, join nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from farcall_endpoint.config.settings import ActuatorName
from farcall_endpoint.host.cgroups import Cgroups
from farcall_endpoint.manager.core.events import CpusMeasured
from farcall_endpoint.qos.actuators import Actuator, choose
from farcall_endpoint.qos.controller import BATCH

_logger = logging.getLogger(__name__)

_BATCH_AFTER_S: Final = 1.0
_PERIOD_S: Final = 0.1
_MOST_TRIES: Final = 10
_MOST_THREADS: Final = 64
"""Maximum number of measured threads of a process."""
_RESTART_S: Final = 1.0
_PRESSURE: Final = Path("/proc/pressure/cpu")


class Pressure:
    """How long processes wait for CPUs, as the kernel counts it (pressure-stall information).

    :param path: of the file; where there is none, CPUs count as busy.
    :param clock: monotonic, in seconds.
    """

    def __init__(self, path: Path = _PRESSURE, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._last = self._read()

    def measure(self) -> float:
        """The part of the time since the last call in which some process waited for a CPU, 0 to 1."""
        found, former = self._read(), self._last
        self._last = found
        if found is None or former is None or found[0] <= former[0]:
            return 1.0
        return min(max((found[1] - former[1]) / (found[0] - former[0]), 0.0), 1.0)

    def _read(self) -> tuple[float, float] | None:
        """The time, and the seconds of waiting until then."""
        try:
            line = self._path.read_text(encoding="ascii").splitlines()[0]
            return self._clock(), int(line.rpartition("total=")[2]) / 1e6
        except (OSError, ValueError, IndexError):
            return None


class Demand:
    """How many threads of processes compute, or would if a CPU were free, by groups of processes.

    :param clock: monotonic, in seconds.
    """

    def __init__(self, proc: Path = Path("/proc"), *, clock: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._clock = clock
        self._measured_at = clock()
        self._last: dict[int, float] = {}  # seconds, by process

    def measure(self, groups: Mapping[int, str]) -> dict[str, float]:
        """The mean number of threads since the last call, by group. Threads that have ended do not count.

        :param groups: by process.
        """
        now = self._clock()
        elapsed_s, self._measured_at = now - self._measured_at, now
        former, self._last = self._last, {pid: self._seconds(pid) for pid in groups}
        found: dict[str, float] = {}
        for pid, seconds in self._last.items():
            if pid in former and elapsed_s > 0:
                group = groups[pid]
                found[group] = found.get(group, 0.0) + max(0.0, seconds - former[pid]) / elapsed_s
        return found

    def _seconds(self, pid: int) -> float:
        """Return the seconds for which the threads of a process have run or waited for a CPU."""
        total_ns = 0
        try:
            for path in itertools.islice((self._proc / str(pid) / "task").iterdir(), _MOST_THREADS):
                with contextlib.suppress(OSError, ValueError):  # a thread that has ended
                    run_ns, wait_ns, _ = (path / "schedstat").read_text(encoding="ascii").split()
                    total_ns += int(run_ns) + int(wait_ns)
        except OSError:  # it has ended
            return 0.0
        return total_ns / 1e9


class CpuShares:
    """Gives workers their shares, from the first weights on.

    :param cgroups: of this process; this object closes them.
    :param processors: that the workers may use together; 0: not known.
    :param actuator: the one to use.
    :param make: makes it; in the thread, as it may take two seconds.
    """

    def __init__(
        self,
        cgroups: Cgroups,
        *,
        processors: int = 0,
        actuator: ActuatorName = "auto",
        make: Callable[[Cgroups, ActuatorName], Actuator] | None = None,
        batch_after_s: float = _BATCH_AFTER_S,
    ) -> None:
        self._cgroups = cgroups
        self._processors = processors
        self._wanted = actuator
        self._make = make or (lambda cgroups, wanted: choose(cgroups, wanted).actuator)
        self._batch_after_s = batch_after_s
        self._lock = threading.Lock()
        self._groups: dict[int, str] = {}  # by worker
        self._joining: dict[int, float] = {}  # when each may
        self._weights: Mapping[str, float] = {}
        self._running: Mapping[str, int] = {}
        self._has_weights = threading.Event()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._measured: CpusMeasured | None = None

    @property
    def directories(self) -> tuple[Path, ...]:
        """What must be removed when this process cannot do it any more."""
        return self._cgroups.directories

    def add(self, pid: int, group: str) -> None:
        """A worker has started, or gets into another group; it joins with all its descendants.

        :param group: its latency class; empty: batch work.
        """
        with self._lock:
            self._groups[pid] = group or BATCH
            self._joining[pid] = time.monotonic() + (0.0 if group else self._batch_after_s)

    def remove(self, pid: int) -> None:
        """A worker has ended, and is about to be reaped."""
        with self._lock:
            self._groups.pop(pid, None)
            self._joining.pop(pid, None)

    def share(self, weights: Mapping[str, float], running: Mapping[str, int]) -> None:
        """Set weights. Groups that are not named lose their weight. See :meth:`Actuator.set_weights`."""
        if not weights:
            return
        with self._lock:
            self._weights, self._running = weights, running
        self._has_weights.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="farcall-cpu-shares", daemon=True)
            self._thread.start()

    def news(self) -> CpusMeasured | None:
        """Return the measurement since the last call; None if there is none."""
        found, self._measured = self._measured, None
        return found

    def close(self) -> None:
        """Remove the groups; all workers have ended."""
        self._is_over.set()
        self._has_weights.set()
        if self._thread is not None:
            self._thread.join()
        for _ in range(_MOST_TRIES):  # the kernel may know of a process for a moment longer than its parent
            self._cgroups.close()
            if not any(directory.exists() for directory in self._cgroups.directories):
                break
            time.sleep(_PERIOD_S)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                self._serve()
            except Exception:
                _logger.exception("shares of the CPUs stay as they are for a moment")
                self._measured = CpusMeasured(problem="it has failed, and starts again", processors=self._processors)
                self._is_over.wait(_RESTART_S)

    def _serve(self) -> None:
        actuator = self._make(self._cgroups, self._wanted)
        _logger.info("latency classes get their shares of the CPUs by: %s %s", actuator.name, actuator.problem)
        pressure, demand, known, is_failing = Pressure(), Demand(), set[str](), False
        with self._lock:  # workers that run already
            self._joining = dict.fromkeys(self._groups, 0.0)
        wait_s = _PERIOD_S
        while not self._is_over.is_set():
            has_weights = self._has_weights.wait(wait_s)
            self._has_weights.clear()
            try:
                wait_s = min(self._step(actuator, known, has_weights=has_weights) or _PERIOD_S, _PERIOD_S)
                is_failing = False
            except Exception:
                if not is_failing:
                    _logger.exception("shares of the CPUs stay as they are")
                is_failing, wait_s = True, _PERIOD_S
            if has_weights:
                with self._lock:
                    latency = {pid: group for pid, group in self._groups.items() if group != BATCH}
                self._measured = CpusMeasured(
                    pressure.measure(), actuator.name, actuator.problem, self._processors, demand.measure(latency)
                )
        actuator.close()

    def _step(self, actuator: Actuator, known: set[str], *, has_weights: bool) -> float | None:
        now = time.monotonic()
        with self._lock:
            due = [pid for pid, at in self._joining.items() if at <= now]
            for pid in due:
                del self._joining[pid]
            joins = [(pid, self._groups[pid]) for pid in due]
            weights, running = self._weights, self._running
        for pid, group in joins:
            actuator.join(pid, group)
        if has_weights:
            for gone in known - weights.keys():
                actuator.forget(gone)
            known.clear()
            known.update(weights)
            actuator.set_weights(weights, running)
        return actuator.tick()
