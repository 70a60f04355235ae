"""Everything is killed, stopped and cut off at random under load, and still every task ends exactly once.

``FARCALL_FAULT_MINUTES`` is how long the faults go on in all (half a minute by default), ``FARCALL_FAULT_SEEDS`` which
plans are carried out (numbers with commas between them).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil
import pytest

from farcall_common.wire import TaskState
from tests.support.endpoint import (
    Ended,
    EndpointProcess,
    FakeCloud,
    FaultInjector,
    FaultKind,
    plan_faults,
    running_endpoint,
)
from tests.waiting import WAIT_S

SEEDS: Final = [int(seed) for seed in os.environ.get("FARCALL_FAULT_SEEDS", "1,2,3").split(",")]
DURATION_S: Final = 60 * float(os.environ.get("FARCALL_FAULT_MINUTES", "0.6")) / len(SEEDS)
"""After the last fault, all that is left ends within this, or something is wedged."""
MOST_UNFINISHED: Final = 250
HEARTBEATS: Final = {"heartbeat_period": 0.5, "heartbeat_threshold": 1.7}
"""Some of the managers that are stopped are given up for it, and some wake up in time."""


class Kind(enum.StrEnum):
    """How a task behaves."""

    NOTHING = "does nothing"
    SHORT = "1 ms"
    LONG = "50 ms"
    FAILING = "fails"
    DEADLY = "kills its worker"
    CANCELLED = "runs until it is cancelled"


#: kind, seconds, share in a wave
MIX: Final = (
    (Kind.NOTHING, 0.0, 30),
    (Kind.SHORT, 0.001, 20),
    (Kind.LONG, 0.05, 8),
    (Kind.FAILING, 0.0, 4),
    (Kind.DEADLY, 0.0, 1),
    (Kind.CANCELLED, 1.0, 1),
)
MAX_ATTEMPTS: Final = {Kind.DEADLY: 2}
LOSES_A_MANAGER: Final = {
    FaultKind.MANAGER_KILLED,
    FaultKind.MANAGER_STOPPED,
    FaultKind.REAPER_KILLED,
    FaultKind.AGENT_KILLED,
    FaultKind.AGENT_STOPPED,
}
"""A worker gets several tasks in one packet, and runs on while its manager is stopped. Once such a manager is given up,
only as many starts count as it had slots: others of the packet may have run once more for each of these faults."""


def work(log: str, number: int, kind: str, seconds: float) -> int:
    """Note the start in one write, which no other can come between; then behave."""
    import os
    import signal
    import time

    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{number}\n".encode())
    os.close(descriptor)
    if seconds:
        time.sleep(seconds)
    if kind == "fails":
        raise ValueError(number)
    if kind == "kills its worker":
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@dataclasses.dataclass(frozen=True)
class Sent:
    """A task that was submitted."""

    number: int
    kind: Kind
    idempotent: bool


class Load:
    """Keeps an endpoint busy with tasks of all kinds, and remembers them."""

    def __init__(self, cloud: FakeCloud, log: Path, rng: random.Random) -> None:
        self._cloud = cloud
        self._log = log
        self._rng = rng
        self.sent: dict[str, Sent] = {}

    def unfinished(self) -> int:
        """Tasks whose end the cloud has not seen."""
        return len(self.sent) - self._cloud.ended

    def submit_wave(self) -> None:
        """Some of each kind, some of them not idempotent, in any order."""
        wave = [(kind, seconds, self._rng.random() < 0.7) for kind, seconds, share in MIX for _ in range(share)]
        self._rng.shuffle(wave)
        for kind, seconds, idempotent in wave:
            number = len(self.sent)
            task_id = self._cloud.submit(
                work,
                str(self._log),
                number,
                kind.value,
                seconds,
                idempotent=idempotent,
                max_attempts=MAX_ATTEMPTS.get(kind, 50),
            )
            self.sent[task_id] = Sent(number, kind, idempotent)
            if kind is Kind.CANCELLED and self._rng.random() < 0.7:
                self._cancel_one()

    def _cancel_one(self) -> None:
        of_this_kind = [task_id for task_id, sent in self.sent.items() if sent.kind is Kind.CANCELLED]
        self._cloud.cancel(self._rng.choice(of_this_kind[-4:]))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_task_ends_exactly_once_whatever_dies(seed: int, tmp_path: Path) -> None:
    faults = plan_faults(seed, duration_s=DURATION_S)
    print(f"FARCALL_FAULT_SEEDS={seed} for {DURATION_S:g} s, planned:", *faults, sep="\n  ")
    log = tmp_path / "runs"
    with running_endpoint(tmp_path, engine=HEARTBEATS) as endpoint:
        injector = FaultInjector(endpoint, faults)
        load = Load(endpoint.cloud, log, random.Random(seed))
        try:
            drive(endpoint, injector, load)
            ends = endpoint.cloud.ends(list(load.sent), timeout_s=WAIT_S)
        except BaseException:
            explain(endpoint, load, log)
            raise
        finally:
            injector.calm()
            print("what happened:", *injector.done, sep="\n  ")
    injector.wait_gone()
    assert not processes_of(tmp_path)
    losses = sum(fault.kind in LOSES_A_MANAGER for fault in faults)
    check(list(load.sent.values()), ends, log, endpoint.cloud, losses)


def drive(endpoint: EndpointProcess, injector: FaultInjector, load: Load) -> None:
    """Keep the endpoint busy while faults come in."""
    started = time.monotonic()
    while (now_s := time.monotonic() - started) < DURATION_S:
        injector.perform(now_s)
        if load.unfinished() < MOST_UNFINISHED:
            load.submit_wave()
        next_at_s = min(injector.next_at_s or DURATION_S, DURATION_S)
        with contextlib.suppress(TimeoutError):
            retry_timeout_s = started + next_at_s - time.monotonic()
            endpoint.cloud.wait_for(lambda: load.unfinished() < MOST_UNFINISHED, timeout_s=max(0.0, retry_timeout_s))
    injector.calm()


def check(sent: Sequence[Sent], ends: Sequence[Ended], log: Path, cloud: FakeCloud, losses: int) -> None:
    """What was promised, task by task, when at most so many managers were lost."""
    runs = collections.Counter(int(line) for line in log.read_text().split())
    states: dict[str, set[TaskState]] = collections.defaultdict(set)
    for spec in cloud.results:
        states[spec.task_id].add(spec.state)
    assert {task_id: seen for task_id, seen in states.items() if len(seen) > 1} == {}, "an end changed"
    assert {one.number: runs[one.number] for one in sent if not one.idempotent and runs[one.number] > 1} == {}
    wrong = [
        (one, end.state, end.value, end.error, runs[one.number])
        for one, end in zip(sent, ends, strict=True)
        if not fits(one, end, runs[one.number], losses)
    ]
    assert wrong == []
    tally = collections.Counter((one.kind, one.idempotent, end.state) for one, end in zip(sent, ends, strict=True))
    rows = [
        f"{kind}, {'may' if again else 'may not'} run again: {state} x {n}" for (kind, again, state), n in tally.items()
    ]
    print("how they ended:", *sorted(rows), sep="\n  ")
    assert len(sent) > 10 * DURATION_S, "a load that deserves the name"


def fits(one: Sent, end: Ended, runs: int, losses: int) -> bool:
    """Whether a task of its kind may end like that, after so many starts and lost managers."""
    code: object = end.error.get("code")
    if not one.idempotent and code in ("TASK_LOST", "WORKER_DIED"):
        return (end.state is TaskState.LOST) == (code == "TASK_LOST")
    match one.kind:
        case Kind.FAILING:
            return end.state is TaskState.FAILED and code == "TASK_FAILED" and runs >= 1
        case Kind.DEADLY:
            most = MAX_ATTEMPTS[one.kind] + losses
            return end.state is TaskState.FAILED and code == "WORKER_DIED" and 1 <= runs <= most
        case Kind.CANCELLED if end.state is TaskState.CANCELLED:
            return True
        case _:
            return end.state is TaskState.SUCCESS and (end.value, runs >= 1) == (one.number, True)


def explain(endpoint: EndpointProcess, load: Load, log: Path) -> None:
    """What is to be known about tasks that have not ended, and the last that the endpoint said."""
    runs = collections.Counter(int(line) for line in log.read_text().split()) if log.exists() else {}
    for task_id, sent in load.sent.items():
        if not endpoint.cloud.has_ended(task_id):
            print(f"{task_id} has not ended; {sent}; accepted: {task_id in endpoint.cloud.accepted}", end="; ")
            print(f"started {runs.get(sent.number, 0)} times")
    print("status:", endpoint.directory.read_status())
    with contextlib.suppress(psutil.Error):
        family = [f"{one.pid} {one.status()} {' '.join(one.cmdline())}" for one in endpoint.family()]
        print("processes:", *family, sep="\n  ")
    print("log:", *endpoint.log().splitlines()[-60:], sep="\n  ")


def processes_of(home: Path) -> list[psutil.Process]:
    """Live processes that belong to an endpoint, whichever process has started them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            of_this_home = process.environ().get("FARCALL_HOME") == str(home)
            if of_this_home and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
