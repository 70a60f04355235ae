"""Fault plans: what is killed, stopped or cut off and when, from a seed; and the injector that performs a plan."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import random
from collections.abc import Callable, Sequence
from typing import Final

import psutil

from tests.support.endpoint.endpoint_process import EndpointProcess, wait_gone
from tests.waiting import WAIT_S


class FaultKind(enum.StrEnum):
    """What goes wrong. Killed is kill -9; stopped is SIGSTOP, and SIGCONT when it is over."""

    WORKER_KILLED = "worker killed"
    MANAGER_KILLED = "manager killed"
    REAPER_KILLED = "process reaper killed"
    AGENT_KILLED = "agent killed and started again"
    WORKER_STOPPED = "worker stopped"
    MANAGER_STOPPED = "manager stopped"
    AGENT_STOPPED = "agent stopped"
    CLOUD_CUT_OFF = "cloud cut off"


_WEIGHTS: Final = {
    FaultKind.WORKER_KILLED: 6,
    FaultKind.MANAGER_KILLED: 3,
    FaultKind.REAPER_KILLED: 1,
    FaultKind.AGENT_KILLED: 2,
    FaultKind.WORKER_STOPPED: 1,
    FaultKind.MANAGER_STOPPED: 2,
    FaultKind.AGENT_STOPPED: 1,
    FaultKind.CLOUD_CUT_OFF: 2,
}
_LONGEST_S: Final = 2.5


@dataclasses.dataclass(frozen=True)
class Fault:
    """``pick`` (from 0 to below 1) says which of the processes there are, ``lasts_s`` is for what ends again."""

    at_s: float
    kind: FaultKind
    pick: float
    lasts_s: float

    def __str__(self) -> str:
        return f"{self.at_s:7.3f} s  {self.kind} (pick {self.pick:.3f}, lasts {self.lasts_s:.2f} s)"


def plan_faults(seed: int, *, duration_s: float, mean_gap_s: float = 0.6) -> list[Fault]:
    """The faults of a run, in order. They come at random (exponential gaps), the same for the same seed."""
    rng = random.Random(seed)
    kinds, weights = list(_WEIGHTS), list(_WEIGHTS.values())
    faults: list[Fault] = []
    at_s = rng.expovariate(1 / mean_gap_s)
    while at_s < duration_s:
        [kind] = rng.choices(kinds, weights)
        faults.append(Fault(at_s, kind, rng.random(), rng.uniform(0.05, _LONGEST_S)))
        at_s += rng.expovariate(1 / mean_gap_s)
    return faults


class FaultInjector:
    """Carries out a plan on an endpoint. ``now_s`` counts from the start of the plan, in the caller's time."""

    def __init__(self, endpoint: EndpointProcess, faults: Sequence[Fault]) -> None:
        self._endpoint = endpoint
        self._left = list(faults)
        self._endings: list[tuple[float, Callable[[], None]]] = []
        self._seen: set[psutil.Process] = set()
        self._cut_off = False
        self.done: list[str] = []

    @property
    def next_at_s(self) -> float | None:
        """When :meth:`perform` has something to do next; None when all is done."""
        due = [at_s for at_s, _ in self._endings]
        if self._left:
            due.append(self._left[0].at_s)
        return min(due, default=None)

    def perform(self, now_s: float) -> None:
        """Do what is due."""
        agent = self._endpoint.agent
        assert agent is not None
        assert agent.poll() is None, f"the agent ended with {agent.returncode}"
        for ending in [ending for ending in self._endings if ending[0] <= now_s]:
            self._endings.remove(ending)
            ending[1]()
        while self._left and self._left[0].at_s <= now_s:
            fault = self._left.pop(0)
            self._seen.update(self._endpoint.family())
            hit = self._strike(fault, now_s)
            self.done.append(f"{now_s:7.3f} s  {fault.kind}: {hit}")

    def calm(self) -> None:
        """End all that lasts."""
        self._left.clear()
        for _, ending in self._endings:
            ending()
        self._endings.clear()

    def wait_gone(self, *, timeout_s: float = WAIT_S) -> None:
        """Wait for the end of every process that was ever seen; the endpoint is stopped already.

        :raises TimeoutError: naming those that live on.
        """
        wait_gone(self._seen, timeout_s=timeout_s)

    def _strike(self, fault: Fault, now_s: float) -> str:
        endpoint = self._endpoint
        match fault.kind:
            case FaultKind.WORKER_KILLED:
                return self._kill(endpoint.workers(), fault)
            case FaultKind.MANAGER_KILLED:
                return self._kill(endpoint.managers(), fault)
            case FaultKind.REAPER_KILLED:
                return self._kill(endpoint.process_reapers(), fault)
            case FaultKind.WORKER_STOPPED:
                return self._suspend(endpoint.workers(), fault, now_s)
            case FaultKind.MANAGER_STOPPED:
                return self._suspend(endpoint.managers(), fault, now_s)
            case FaultKind.AGENT_STOPPED:
                assert endpoint.agent is not None
                return self._suspend([psutil.Process(endpoint.agent.pid)], fault, now_s)
            case FaultKind.AGENT_KILLED:
                return self._replace_agent()
            case FaultKind.CLOUD_CUT_OFF:
                return self._cut(fault, now_s)

    def _kill(self, candidates: Sequence[psutil.Process], fault: Fault) -> str:
        victim = _pick(candidates, fault)
        if victim is None:
            return "there was none"
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
        return f"process {victim.pid}"

    def _suspend(self, candidates: Sequence[psutil.Process], fault: Fault, now_s: float) -> str:
        victim = _pick(candidates, fault)
        if victim is None:
            return "there was none"

        def resume() -> None:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.resume()

        with contextlib.suppress(psutil.NoSuchProcess):
            victim.suspend()
        self._endings.append((now_s + fault.lasts_s, resume))
        return f"process {victim.pid}, for {fault.lasts_s:.2f} s"

    def _replace_agent(self) -> str:
        agent = self._endpoint.agent
        assert agent is not None
        agent.kill()
        agent.wait()
        self._endpoint.start(connected=False)  # what the old one has started may live on for a moment
        assert self._endpoint.agent is not None
        return f"process {agent.pid}, now {self._endpoint.agent.pid}"

    def _cut(self, fault: Fault, now_s: float) -> str:
        if self._cut_off:
            return "it was already"
        self._cut_off = True
        self._endpoint.cloud.offline()

        def restore() -> None:
            self._cut_off = False
            self._endpoint.cloud.online()

        self._endings.append((now_s + fault.lasts_s, restore))
        return f"for {fault.lasts_s:.2f} s"


def _pick(candidates: Sequence[psutil.Process], fault: Fault) -> psutil.Process | None:
    return candidates[int(fault.pick * len(candidates))] if candidates else None
