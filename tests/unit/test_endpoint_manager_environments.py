"""The manager's core with environments: preparation, warm workers, failures. Workers are simulated, time is virtual."""

from __future__ import annotations

import collections
import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulated_manager import SimulatedManager, job
from benchmarks.warm_pool_simulation import azure_shaped, by_manager, by_textbook
from farcall_common.environments import Environment
from farcall_common.errors import ErrorRecord
from farcall_common.task_options import TaskOptions
from farcall_common.wire import TaskState
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.contracts.agent_manager import CancelTasks, EnvironmentStatus, Prewarm, Stop, TaskOrder
from farcall_endpoint.contracts.manager_worker import Done
from farcall_endpoint.manager.core.actions import Action, Kill, Launch, Prepare, Release, Send
from farcall_endpoint.manager.core.environment_states import EnvironmentState
from farcall_endpoint.manager.core.events import (
    EnvironmentFailed,
    EnvironmentGone,
    EnvironmentProgress,
    EnvironmentReady,
    EnvironmentsCrowded,
    Event,
    Job,
    LimitExceeded,
    PacketsReceived,
    TasksReceived,
    WorkerDied,
)
from farcall_endpoint.manager.core.warm_pool import WarmPool, WarmPoolSettings
from farcall_endpoint.manager.core.workers import TURN_S, Pair, Worker
from tests.support.manager import Rig, ready

A, B, C = (Environment.of({"type": "venv", "location": f"/{name}", "name": name}) for name in "abc")
MIB = 2**20
WORDS = ErrorRecord("ENVIRONMENT_FAILED", "no such image")
AGAIN = ErrorRecord("ENVIRONMENT_FAILED", "the registry does not answer", retryable=True)


def tasks(environment: Environment | None, *names: str, submitter: str = "", payer: str = "") -> TasksReceived:
    options = TaskOptions(environment=environment)
    orders = [TaskOrder(name, 1, "h", 0, options, submitter=submitter, payer=payer) for name in names]
    return TasksReceived([Job(order, b"body", b"payload") for order in orders])


class EnvironmentRig(Rig):
    """Workers start, and die when they are killed, at once; the test decides when environments are prepared.

    It checks that tasks run only in workers of their submitter and environment, that no running task is evicted, and
    that no two workers have the same slot."""

    def __init__(self, *, slots: int, prefetch: int = 0, **options: Any) -> None:
        super().__init__(slots=slots, prefetch=prefetch, **options)
        self.slots = slots
        self.extra = (options.get("warm") or WarmPoolSettings()).extra_workers
        self.default: Environment | None = options.get("default_environment")
        self.hanging: set[str] = set()  # names of environments in which no worker gets ready
        self.failing: set[str] = set()  # submitters whose workers die before they are ready
        self.launched: dict[int, Launch] = {}
        self.started: set[int] = set()
        self.prepared: list[str] = []
        self.released: list[str] = []
        self.stopped: set[str] = set()  # tasks that may be killed
        self.statuses: dict[str, EnvironmentStatus] = {}
        self.launches: collections.Counter[str] = collections.Counter()

    def _perform(self, action: Action) -> list[Event]:
        match action:
            case Launch(worker_id=worker_id):
                if not self.extra:
                    assert action.slot not in {self.launched[each].slot for each in self.workers}
                self.launched[worker_id] = action
                self.launches[_key(action.environment)] += 1
            case Send(worker_id=worker_id, packet=packet):
                launch = self.launched[worker_id]
                for order in packet.orders:
                    assert order.submitter == launch.submitter
                    assert _key(order.options.environment or self.default) == _key(launch.environment)
            case Kill(worker_id=worker_id):
                running = self.workers[worker_id].running
                assert running is None or running.task_id in self.stopped, "a running task is evicted"
            case Prepare(environment=environment):
                self.prepared.append(environment.name)
            case Release(key=key):
                self.released.append(key)
        return super()._perform(action)

    def settle(self, *events: Event) -> list[str]:
        """The environments of the workers, once none of them starts or dies."""
        self.handle(*events)
        for turn in itertools.count():
            assert turn < 200, "workers are started and ended without end"
            skipping = [
                number
                for number, worker in self.workers.items()
                if worker.packets and not (worker.claims or worker.running)
            ]
            starting = [
                number
                for number in self.workers
                if number not in self.started and _name(self.launched[number].environment) not in self.hanging
            ]
            if not (skipping or starting or self.killed):
                break
            for worker_id in skipping:
                self._step(worker_id)
            while self.killed:
                self.die(self.killed.pop())
            for worker_id in starting:
                if worker_id in self.workers and self.launched[worker_id].submitter in self.failing:
                    del self.workers[worker_id]
                    self.handle(WorkerDied(worker_id, 0, "exit code 1"))
                elif worker_id in self.workers:
                    self.started.add(worker_id)
                    self.handle(ready(worker_id))
        for report in self.reports:
            if report.progress.environments is not None:
                self.statuses = {each.label: each for each in report.progress.environments}
        busy = [worker for worker in self.workers.values() if worker.running or worker.ahead]
        assert len(busy) <= self.slots
        assert len(self.workers) <= self.slots + self.extra
        return sorted(_name(self.launched[number].environment) for number in self.workers)

    def wait(self, seconds: float) -> list[str]:
        """Let time pass, with all deadlines; the environments of the workers."""
        until = self.now + seconds
        while (deadline := self.core.next_deadline()) <= until:
            self.now = max(self.now + 1e-6, deadline)
            self.settle()
        self.now = until
        return self.settle()

    def busy(self) -> list[int]:
        return [number for number, worker in self.workers.items() if worker.running or worker.ahead]

    def finish(self, environment: Environment | None, *, duration_s: float = 0.001) -> str:
        """A worker of an environment ends its task."""
        worker_id = next(each for each in self.busy() if self.launched[each].environment == environment)
        name = self.done(worker_id, duration_s=duration_s)
        self.settle()
        return name

    def failures(self) -> dict[str, str]:
        """Messages of the tasks that failed, by task; all reports since the last call."""
        return {
            each.task_id: (each.error or {})["message"]
            for each in self.progress().finished
            if each.state is TaskState.FAILED
        }


def _key(environment: Environment | None) -> str:
    return "" if environment is None else environment.key


def _name(environment: Environment | None) -> str:
    return "" if environment is None else environment.name


def prepared(*environments: Environment, slots: int, **options: Any) -> EnvironmentRig:
    rig = EnvironmentRig(slots=slots, **options)
    rig.settle()
    for environment in environments:
        rig.settle(Prewarm(environment, 1))
        rig.settle(Prewarm(environment, 0), EnvironmentReady(environment.key))
    return rig


# -- preparation -------------------------------------------------------------------------------------------------------


def test_the_first_task_of_an_environment_waits_for_its_preparation_and_no_other_does() -> None:
    rig = EnvironmentRig(slots=2)
    rig.settle()
    assert rig.settle(tasks(A, "a1", "a2")) == ["", ""]
    assert rig.prepared == ["a"]
    rig.settle(tasks(A, "a3"), tasks(None, "own"))
    assert rig.prepared == ["a"]
    assert rig.finish(None) == "own"
    assert rig.settle(EnvironmentReady(A.key)) == ["", "a"]
    assert [rig.finish(A) for _ in range(3)] == ["a1", "a2", "a3"]


def test_a_default_environment_is_that_of_tasks_without_one() -> None:
    rig = EnvironmentRig(slots=2, default_environment=A)
    assert rig.settle() == []
    assert rig.prepared == ["a"]
    rig.settle(tasks(None, "one"))
    assert rig.core.next_deadline() > rig.now, "it waits, and does not spin"
    assert rig.settle(EnvironmentReady(A.key)) == ["a", "a"]
    assert rig.finish(A) == "one"
    assert rig.wait(2000.0) == ["a", "a"], "they are the endpoint's own workers"


def test_a_default_environment_that_fails_is_the_problem_of_the_manager_and_tried_again() -> None:
    rig = EnvironmentRig(slots=1, default_environment=A)
    rig.settle(tasks(None, "one"), EnvironmentFailed(A.key, WORDS))
    progress = rig.progress()
    assert "no such image" in progress.problem
    assert [each.task_id for each in progress.finished] == ["one"]
    rig.wait(30.0)
    assert rig.prepared == ["a", "a"]
    assert rig.settle(EnvironmentReady(A.key)) == ["a"]
    assert rig.progress().problem == ""


def test_tasks_that_wait_for_a_preparation_can_be_cancelled() -> None:
    rig = EnvironmentRig(slots=1)
    rig.settle(tasks(A, "a1", "a2"), CancelTasks(("a1",)))
    [finished] = rig.progress().finished
    assert (finished.task_id, finished.state) == ("a1", TaskState.CANCELLED)
    rig.settle(EnvironmentReady(A.key))
    assert rig.finish(A) == "a2"


def test_a_manager_that_stops_prepares_nothing_more() -> None:
    rig = EnvironmentRig(slots=1)
    rig.settle(tasks(A, "a1"))
    rig.settle(Stop(0.0), EnvironmentReady(A.key), Prewarm(B, 1))
    assert rig.core.is_over
    assert rig.prepared == ["a"]
    assert rig.launches[A.key] == 0


# -- failures ----------------------------------------------------------------------------------------------------------


def test_tasks_of_an_environment_that_cannot_be_prepared_fail_with_its_record() -> None:
    rig = EnvironmentRig(slots=1)
    rig.settle(tasks(A, "a1", "a2"), tasks(None, "own"))
    rig.settle(EnvironmentFailed(A.key, WORDS))
    assert rig.failures() == {"a1": "no such image", "a2": "no such image"}
    rig.settle(tasks(A, "a3"))
    assert rig.failures() == {"a3": "no such image"}, "at once"
    assert rig.finish(None) == "own"
    rig.wait(0.5)
    assert rig.statuses["a"].problem == "no such image"
    assert rig.statuses["a"].retry_at == 1010.0
    rig.now += 10.0
    rig.settle(tasks(A, "a4"))
    rig.wait(0.5)
    assert rig.statuses["a"].retry_at is None


def test_after_a_pause_one_try_is_made_and_pauses_double() -> None:
    rig = EnvironmentRig(slots=1)
    rig.settle(tasks(A, "first"), EnvironmentFailed(A.key, WORDS))
    pauses = []
    for number in range(4):
        began = rig.now
        while True:
            rig.progress()
            rig.settle(tasks(A, f"try {number} at {rig.now}"))
            if len(rig.prepared) > number + 1:
                break
            rig.now += 1.0
        pauses.append(rig.now - began)
        rig.settle(EnvironmentFailed(A.key, AGAIN))
        assert rig.failures(), "a try is not repeated"
    assert pauses == [10.0, 20.0, 40.0, 80.0]
    rig.now += 1000.0
    rig.settle(tasks(A, "last"))
    rig.settle(EnvironmentReady(A.key))
    assert rig.finish(A) == "last"
    assert rig.statuses["a"].problem == "" or (rig.wait(1.0) and rig.statuses["a"].problem == "")


def test_an_environment_that_failed_and_is_not_named_again_is_forgotten() -> None:
    rig = EnvironmentRig(slots=1, default_environment=B)
    rig.settle(tasks(A, "a1"), EnvironmentFailed(A.key, WORDS), EnvironmentFailed(B.key, WORDS))
    rig.wait(3000.0)
    rig.settle(tasks(A, "a2"))
    rig.settle(EnvironmentFailed(A.key, WORDS))
    rig.wait(3000.0)
    assert rig.statuses["a"].problem == "no such image"
    rig.wait(601.0)
    assert "a" not in rig.statuses
    assert rig.statuses["b"].problem, "it is wanted"


def test_a_preparation_that_is_worth_another_try_is_tried_three_times() -> None:
    rig = EnvironmentRig(slots=1)
    rig.settle(tasks(A, "a1"))
    for number in (1, 2):
        rig.settle(EnvironmentFailed(A.key, AGAIN))
        assert not rig.failures()
        rig.wait(5.0)
        assert len(rig.prepared) == number + 1
    rig.settle(EnvironmentFailed(A.key, AGAIN))
    assert rig.failures() == {"a1": "the registry does not answer"}


def test_an_environment_whose_files_were_deleted_is_prepared_again_and_no_task_fails() -> None:
    rig = prepared(A, slots=1)
    rig.hanging.add(A.name)
    rig.settle(tasks(A, "a1", "a2"))
    for number in range(6):
        [worker_id] = [each for each in rig.workers if rig.launched[each].environment == A]
        rig.workers.pop(worker_id)
        rig.handle(EnvironmentGone(A.key), WorkerDied(worker_id, 0, "the bundle was deleted"))
        assert rig.prepared == ["a"] * (number + 2)
        assert "a" not in rig.settle(), "no start before it is prepared"
        rig.settle(EnvironmentReady(A.key))
    rig.hanging.clear()
    rig.settle()
    assert [rig.finish(A), rig.finish(A)] == ["a1", "a2"]
    assert not rig.failures()


def test_a_preparation_has_a_time_limit() -> None:
    rig = EnvironmentRig(slots=1, environment_start_limit_s=50.0)
    rig.settle(tasks(A, "a1"), EnvironmentProgress(A.key, "apptainer is converting the image"))
    rig.wait(49.0)
    assert rig.statuses["a"].text == "apptainer is converting the image"
    assert not rig.failures()
    rig.wait(1.0)
    [message] = rig.failures().values()
    assert "longer than 50 s" in message
    assert "apptainer is converting the image" in message
    rig.settle(EnvironmentReady(A.key))  # at last
    rig.settle(tasks(A, "a2"))
    assert rig.finish(A) == "a2"


def test_workers_that_do_not_start_in_an_environment_fail_its_tasks_only() -> None:
    rig = EnvironmentRig(slots=2)
    rig.settle(tasks(A, "a1"), tasks(None, "own"))
    rig.hanging.add(A.name)
    rig.settle(EnvironmentReady(A.key))
    rounds = 0
    while not (failures := rig.failures()):
        rounds += 1
        assert rounds < 10
        for worker_id in [each for each, launch in rig.launched.items() if each in rig.workers and launch.environment]:
            rig.workers.pop(worker_id)
            rig.settle(WorkerDied(worker_id, 0, "exit code 255", "", "log\nFATAL: no such image\n"))
        rig.wait(1.0)
    assert rounds == 4
    assert "exit code 255; FATAL: no such image" in failures["a1"]
    rig.settle(tasks(A, "a2"))
    assert "a2" in rig.failures(), "at once"
    assert not rig.leaves
    assert rig.finish(None) == "own"
    rig.hanging.clear()
    for _ in range(100):  # the endpoint's own workers come back, and stay
        rig.wait(10.0)
    assert rig.settle() == ["", ""]
    assert not rig.leaves


def test_starts_that_fail_for_a_submitter_fail_no_task_of_others() -> None:
    rig = prepared(A, slots=1)
    rig.hanging.add(A.name)
    rig.settle(tasks(A, "e1", submitter="eve"))
    while not (failures := rig.failures()):
        for worker_id in [each for each, launch in rig.launched.items() if each in rig.workers and launch.environment]:
            rig.workers.pop(worker_id)
            rig.settle(WorkerDied(worker_id, 0, "exit code 1", "", "eve's package"))
        rig.wait(1.0)
        assert rig.launches[A.key] < 10
    assert "eve's package" in failures["e1"]
    assert rig.statuses["a"].problem == ""
    rig.settle(tasks(A, "e2", submitter="eve"))
    assert rig.failures().keys() == {"e2"}, "a pause for its submitter"
    rig.hanging.clear()
    for name, submitter in (("ada", "ada"), ("own", "")):
        rig.settle(tasks(A, name, submitter=submitter))
        assert rig.finish(A) == name
    rig.wait(10.0)
    rig.settle(tasks(A, "e3", submitter="eve"))
    assert rig.finish(A) == "e3"


def test_start_that_exceeds_a_limit_fails_the_tasks_of_its_submitter_with_that() -> None:
    """At once: the next start would, too."""
    rig = prepared(A, slots=1)
    rig.hanging.add(A.name)
    rig.settle(tasks(A, "e1", "e2", submitter="eve"))
    [worker_id] = rig.workers
    assert rig.core.limited(processes=5) == [(worker_id, None, None)]
    rig.settle(LimitExceeded(worker_id, "", outcomes.processes_exceeded(5)))
    ends = {end.task_id: end.error for end in rig.progress().finished}
    assert {name: error and error["code"] for name, error in ends.items()} == dict.fromkeys(
        ("e1", "e2"), "PROCESSES_EXCEEDED"
    )
    assert rig.launches[A.key] == 1
    rig.hanging.clear()
    rig.settle(tasks(A, "ada", submitter="ada"))
    assert rig.finish(A) == "ada"


@pytest.mark.parametrize("has_begun", [True, False])
def test_worker_that_is_ended_with_too_many_processes_has_exceeded_the_limit(has_begun: bool) -> None:
    """A process that a package has forked sends what its worker sends."""
    rig = prepared(A, slots=1)
    rig.settle(tasks(A, "e1", submitter="eve"))
    [worker_id] = rig.workers
    if has_begun:
        rig.read(worker_id)
    rig.stopped.add("e1")
    rig.handle(ready(worker_id), LimitExceeded(worker_id, "", outcomes.processes_exceeded(5)))
    rig.settle()
    [end] = rig.progress().finished
    assert end.error is not None
    assert (end.task_id, end.error["code"]) == ("e1", "PROCESSES_EXCEEDED")


@pytest.mark.parametrize("environment", [None, A])
def test_starts_that_fail_for_a_submitter_delay_no_task_of_others(environment: Environment | None) -> None:
    rig = prepared(A, slots=2)
    rig.failing.add("eve")
    rig.settle(tasks(environment, *(f"e{number}" for number in range(8)), submitter="eve"))
    for number in range(40):
        rig.wait(1.5)
        name = f"ada{number}"
        rig.settle(tasks(environment, name, submitter="ada"))
        assert rig.finish(environment) == name, "at once"
    assert not rig.leaves
    assert sum(launch.submitter == "eve" for launch in rig.launched.values()) < 40
    if environment is None:
        rig.failing.clear()
        rig.wait(10.0)
        assert rig.finish(None).startswith("e")


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_starts_that_hang_do_not_keep_all_places_from_others(is_cancelled: bool) -> None:
    rig = prepared(A, B, slots=2)
    rig.hanging |= {A.name, B.name}
    rig.settle(tasks(A, "e1", submitter="eve"), tasks(B, "e2", submitter="eve"))
    assert sorted(rig.launched[each].submitter for each in rig.workers) == ["eve", "eve"]
    rig.settle(tasks(None, "ada", submitter="ada"))
    if is_cancelled:
        rig.settle(CancelTasks(("e1", "e2")))
    else:
        rig.wait(29.0)
        assert not rig.busy()
        rig.wait(1.5)
    assert rig.finish(None) == "ada"
    assert not rig.failures()
    if not is_cancelled:
        for name in ("ada2", "ada3"):
            rig.settle(tasks(None, name, submitter="ada"))
            assert rig.finish(None) == name, "the place stays with those whose starts end"
        rig.hanging.clear()
        rig.settle()
        assert {rig.finish(each) for each in (A, B)} == {"e1", "e2"}


def test_a_worker_that_hangs_at_its_start_in_an_environment_is_killed_after_the_limit_of_the_environment() -> None:
    rig = EnvironmentRig(slots=1, environment_start_limit_s=200.0)
    rig.settle(tasks(A, "a1"))
    rig.hanging.add(A.name)
    rig.settle(EnvironmentReady(A.key))
    rig.wait(199.0)
    assert rig.launches[A.key] == 1
    rig.wait(5.0)
    assert rig.launches[A.key] == 2
    assert "it was not ready within 200 s" in rig.statuses["a"].problem


def test_errors_have_the_name_that_each_submitter_gave() -> None:
    rig = EnvironmentRig(slots=1)
    names = [Environment.of({"type": "venv", "location": "/x", "name": name}) for name in ("e", "secret", "")]
    rig.handle(*(tasks(each, each.name or "none", submitter=each.name) for each in names))
    record = outcomes.environment_failed(names[0].label, "no Python")
    rig.settle(EnvironmentFailed(names[0].key, record))
    messages = {end.task_id: end.error["message"] for end in rig.progress().finished if end.error}
    assert messages == {
        "e": record.message,
        "secret": record.message.replace("environment e ", "environment secret "),
        "none": record.message.replace("environment e ", "environment venv:/x "),
    }


@pytest.mark.parametrize("payer", ["", "m"])
def test_a_submitter_does_not_keep_others_from_preparing(payer: str) -> None:
    """Nor do the service accounts of one payer."""
    rig = EnvironmentRig(slots=2)
    slow = [Environment.of({"type": "venv", "location": f"/s{n}", "name": f"s{n}"}) for n in range(30)]
    accounts = [f"robot-{number}" if payer else "m" for number in range(30)]
    rig.handle(
        *(tasks(each, each.name, submitter=name, payer=payer) for name, each in zip(accounts, slow, strict=True))
    )
    assert rig.prepared == ["s0", "s1"]
    for number, submitter in enumerate("opq"):
        rig.handle(*(tasks(each, f"{each.name}{submitter}", submitter=submitter) for each in slow[10 * number :]))
    assert len(rig.prepared) == 6, "of all submitters together"
    rig.handle(tasks(A, "a1"))
    assert rig.prepared[6:] == ["a"], "the owner does not wait for them"
    rig.handle(tasks(slow[29], "mine"))
    assert rig.prepared[7:] == ["s29"], "the owner needs it, too"
    rig.handle(EnvironmentFailed(slow[0].key, WORDS))
    assert len(rig.prepared) == 9


def test_few_environments_are_prepared_at_a_time() -> None:
    rig = EnvironmentRig(slots=1)
    rig.settle()
    environments = [Environment.of({"type": "venv", "location": f"/{n}", "name": f"n{n}"}) for n in range(20)]
    rig.settle(*[tasks(each, each.name) for each in environments])
    assert len(rig.prepared) == 8
    rig.wait(0.5)
    assert "other environments" in rig.statuses["n9"].text
    for environment in environments:
        rig.settle(EnvironmentReady(environment.key))
        if rig.busy():
            rig.finish(environment)
    assert len(rig.prepared) == 20
    while rig.busy():
        rig.done(rig.busy()[0])
        rig.settle()
    assert len(rig.progress().finished) == 20


def test_any_number_of_environments_is_named_without_harm() -> None:
    rig = EnvironmentRig(slots=1)
    for number in range(1000):
        environment = Environment.of({"type": "venv", "location": f"/{number}"})
        rig.handle(tasks(environment, str(number)), EnvironmentFailed(environment.key, WORDS))
    assert len(rig.progress().finished) == 1000
    rig.wait(1.0)
    assert len(rig.statuses) <= 200


# -- places ------------------------------------------------------------------------------------------------------------


def test_workers_serve_one_submitter_in_one_environment() -> None:
    rig = EnvironmentRig(slots=3)
    rig.settle(tasks(A, "1", submitter="x"), tasks(A, "2", submitter="y"), tasks(None, "3", submitter="x"))
    rig.settle(EnvironmentReady(A.key))
    pairs = {
        (each.submitter, _name(each.environment)) for number, each in rig.launched.items() if number in rig.workers
    }
    assert pairs == {("x", "a"), ("y", "a"), ("x", "")}
    assert {rig.finish(A), rig.finish(A), rig.finish(None)} == {"1", "2", "3"}


@pytest.mark.parametrize("slots", [2, 3, 6])
def test_a_long_task_holds_up_no_other_submitter_in_its_environment(slots: int) -> None:
    """Idle workers that stay warm give their places away, and not the worker that runs the task."""
    rig = prepared(A, slots=slots, warm=WarmPoolSettings(extra_workers=slots))
    rig.settle(EnvironmentReady(A.key, forkable=True))
    rig.settle(tasks(A, "short", submitter="x"))
    rig.finish(A)
    rig.settle(tasks(A, "long", submitter="x"))
    [worker_id] = rig.busy()
    rig.read(worker_id)
    rig.wait(8.0)
    rig.settle(tasks(A, "other", submitter="y"))
    rig.wait(1.0)
    assert sorted(rig.launched[number].submitter for number in rig.busy()) == ["x", "y"]


def test_shared_workers_serve_all_submitters_in_one_environment() -> None:
    manager = _simulated(slots=2, shared_workers=True)
    jobs = [job(f"{number}", (A, B)[number % 2], submitter=f"user {number % 3}") for number in range(30)]
    _run(manager, jobs)
    assert len(manager.started_at) == 30
    assert (manager.cold_starts[A.key], manager.cold_starts[B.key]) == (1, 1)


@pytest.mark.parametrize("duration_s", [0.5, 4.0])
def test_environments_get_places_in_proportion_to_their_tasks(duration_s: float) -> None:
    manager = _simulated(slots=10, duration_s=duration_s)
    _handle(manager, [job(f"{number}", A if number % 10 < 3 else B) for number in range(400)])
    manager.advance(8.0)
    assert manager.workers() == {A.key: 3, B.key: 7}
    manager.advance(20.0)
    assert (manager.cold_starts[A.key], manager.cold_starts[B.key]) == (3, 7)


@pytest.mark.parametrize(
    ("slots", "extra", "most"),
    [
        pytest.param(1, 0, 19, id="one place: each keeps it for four starts"),
        pytest.param(2, 0, 2, id="a place for each"),
        pytest.param(3, 0, 32, id="the odd one, for four starts and only if it has ten percent more tasks"),
        pytest.param(3, 3, 6, id="three more are warm without a place"),
    ],
)
def test_two_environments_that_alternate_under_load_do_not_take_turns_all_the_time(
    slots: int, extra: int, most: int
) -> None:
    """One task of each comes each 50 ms, for a minute. All places are needed, and a start takes a second."""
    warm = WarmPoolSettings(extra_workers=extra)
    manager = _simulated(slots=slots, duration_s=0.024 * slots, start_s=1.0, warm=warm)
    for number in range(2400):
        manager.handle([TasksReceived([job(str(number), (A, B)[number % 2])])], now=number * 0.025)
    while len(manager.started_at) < 2400:
        manager.advance(manager.next_event())
    assert manager.cold_starts[A.key] + manager.cold_starts[B.key] <= most


def test_more_environments_than_places_take_turns() -> None:
    manager = _simulated(slots=1, duration_s=0.5, start_s=0.1)
    _handle(manager, [job(f"{name}{number}", environment) for number in range(20) for name, environment in NAMED])
    manager.advance(15.0)
    assert {name[0] for name in manager.started_at} == {"a", "b", "c"}
    _run(manager, [])
    assert len(manager.started_at) == 60


def test_a_task_waits_for_a_busy_worker_that_is_free_before_a_start_is_done() -> None:
    rig = prepared(A, slots=3)
    _took(rig, A, start_s=5.0, task_s=1.0)
    rig.settle(tasks(A, "a1", "a2", "a3"))
    assert rig.settle().count("a") == 1
    rig.finish(A)
    rig.settle(tasks(A, *(f"more {number}" for number in range(20))))
    assert rig.settle().count("a") == 3, "so many would not begin within five seconds"


def test_a_task_that_runs_longer_than_expected_is_not_waited_for() -> None:
    rig = prepared(A, slots=2)
    _took(rig, A, start_s=2.0, task_s=0.5)
    rig.settle(tasks(A, "long", "next"))
    rig.read(rig.busy()[0])
    assert rig.settle() == ["", "a"]
    assert rig.wait(5.0) == ["a", "a"]


@pytest.mark.parametrize("seed", range(8))
def test_nothing_depends_on_the_clock_of_the_wall(seed: int) -> None:
    """It may be set at any moment: pauses, time limits, places and times to live are the same."""

    def decisions(rig: EnvironmentRig) -> list[object]:
        found: list[object] = [rig.settle(tasks(A, "a1", "a2"), tasks(B, "b1"), EnvironmentFailed(B.key, WORDS))]
        for number in range(40):
            rig.settle(tasks(B, f"b at {number}"))
            found.append((rig.wait(0.5), rig.settle(EnvironmentFailed(B.key, WORDS)), list(rig.prepared)))
        rig.hanging = {"a"}
        found += [rig.settle(EnvironmentReady(A.key)), rig.wait(29.0), rig.wait(2.0), dict(rig.launches)]
        rig.hanging = set()
        found.append(rig.wait(20.0))
        while rig.busy():
            rig.now += 0.1
            found.append(rig.finish(rig.launched[rig.busy()[0]].environment))
        return [*found, *((rig.wait(30.0), len(rig.released)) for _ in range(45))]

    steady, moved = (EnvironmentRig(slots=2, environment_start_limit_s=30.0) for _ in range(2))
    random_ = random.Random(seed)
    moved.clock_is_set = lambda: random_.choice([-1e6, -60.0, 0.0, 60.0, 1e6])
    expected = decisions(steady)
    assert steady.prepared.count("b") > 1, "a pause was over"
    assert steady.released
    assert decisions(moved) == expected


# -- warm workers ------------------------------------------------------------------------------------------------------


def test_what_nothing_needs_is_released_at_once_if_there_is_no_room() -> None:
    rig = prepared(A, B, slots=1)
    rig.settle(tasks(A, "a1"))
    rig.settle(EnvironmentsCrowded())
    assert rig.released == [B.key], "a task runs in the other one"
    rig.settle(tasks(B, "b1"))
    assert rig.prepared == ["a", "b", "b"]


def test_an_idle_worker_ends_after_its_time_and_then_its_environment_is_released() -> None:
    rig = prepared(A, slots=2)
    rig.settle(tasks(A, "a1"))
    rig.finish(A)
    assert rig.wait(599.0) == ["", "a"]
    assert rig.wait(2.0) == ["", ""]
    assert not rig.released
    rig.wait(600.0)
    assert rig.released == [A.key]
    assert "a" not in rig.statuses
    rig.settle(tasks(A, "a2"))
    assert rig.prepared == ["a", "a"]


def test_the_length_of_tasks_that_end_together_is_their_mean() -> None:
    state = EnvironmentState(A)
    state.tasks_ended(4, 8.0)
    assert state.expected_task_s == pytest.approx(2.0)
    one_by_one = EnvironmentState(A)
    one_by_one.tasks_ended(1, 2.0)
    for _ in range(3):
        one_by_one.tasks_ended(1, 1.0)
    state.tasks_ended(3, 3.0)
    assert state.expected_task_s == pytest.approx(one_by_one.expected_task_s)


def test_tasks_whose_results_come_together_count_as_long_as_they_took_together() -> None:
    rig = EnvironmentRig(slots=1, prefetch=3)
    rig.settle(tasks(A, "a", "b", "c"))
    rig.settle(EnvironmentReady(A.key))
    [worker_id] = rig.workers
    rig.now += 0.009
    rig.handle(PacketsReceived(worker_id, [(Done(name, 0.0, 0.003), b"r") for name in "abc"]))
    assert rig.core._environments[A.key].expected_task_s == pytest.approx(0.003)


def test_idle_workers_have_a_memory_budget() -> None:
    rig = EnvironmentRig(slots=4, warm=WarmPoolSettings(memory_bytes=250 * MIB))
    rig.settle()
    for environment in (A, B, C):
        rig.settle(tasks(environment, environment.name))
        rig.settle(EnvironmentReady(environment.key, memory_bytes=100 * MIB))
    assert rig.settle() == ["", "a", "b", "c"], "busy ones do not count"
    for environment in (A, B, C):
        rig.now += 1.0
        rig.finish(environment)
    assert rig.settle().count("") == 2


def test_a_worker_that_is_larger_than_the_budget_runs_its_tasks_first() -> None:
    rig = EnvironmentRig(slots=1, warm=WarmPoolSettings(memory_bytes=10 * MIB))
    rig.settle(tasks(A, "a1", "a2"))
    assert rig.settle(EnvironmentReady(A.key, memory_bytes=100 * MIB)) == ["a"]
    assert [rig.finish(A), rig.finish(A)] == ["a1", "a2"]
    assert rig.settle() == [""]
    assert rig.launches[A.key] == 1


def test_prewarmed_workers_are_there_before_any_task_and_stay() -> None:
    rig = EnvironmentRig(slots=4)
    rig.settle()
    rig.settle(Prewarm(A, 2))
    assert rig.settle(EnvironmentReady(A.key)) == ["", "", "a", "a"]
    assert rig.wait(5000.0) == ["", "", "a", "a"]
    assert rig.statuses["a"].warm == 2
    rig.settle(tasks(B, "b1", "b2", "b3"))
    rig.settle(EnvironmentReady(B.key))
    assert rig.settle().count("a") == 2
    rig.settle(Prewarm(A, 0))
    assert rig.wait(700.0).count("a") == 0
    assert A.key in rig.released or A.key in (rig.wait(700.0) and rig.released)


def test_busy_prewarmed_workers_are_replaced_while_there_is_a_place() -> None:
    rig = EnvironmentRig(slots=3)
    rig.settle()
    rig.settle(Prewarm(A, 1))
    rig.settle(EnvironmentReady(A.key))
    assert rig.settle(tasks(A, "a1")) == ["", "a", "a"]


def test_what_is_prewarmed_keeps_no_task_from_running() -> None:
    rig = EnvironmentRig(slots=1)
    rig.settle()
    rig.settle(Prewarm(A, 5))
    assert rig.settle(EnvironmentReady(A.key)) == ["a"]
    assert rig.settle(tasks(None, "own")) == [""]
    rig.finish(None)
    assert rig.settle() == ["a"]


def test_prewarm_of_an_environment_that_fails_is_tried_again_and_harms_no_other() -> None:
    rig = EnvironmentRig(slots=1)
    rig.settle(Prewarm(A, 1), tasks(None, "own"))
    rig.settle(EnvironmentFailed(A.key, WORDS))
    rig.wait(0.5)
    assert rig.statuses["a"].problem == "no such image"
    assert rig.finish(None) == "own"
    rig.wait(60.0)
    assert rig.prepared == ["a", "a"]


def test_the_owner_ends_the_pause_of_an_environment_that_failed() -> None:
    rig = EnvironmentRig(slots=1)
    rig.settle(tasks(A, "first"), EnvironmentFailed(A.key, WORDS))
    rig.settle(Prewarm(A, 1))
    assert rig.prepared == ["a"], "what the agent repeats by itself ends no pause"
    rig.settle(Prewarm(A, 1, retry=True))
    assert rig.prepared == ["a", "a"]
    rig.settle(EnvironmentReady(A.key), tasks(A, "second"))
    assert rig.finish(A) == "second"


def test_warm_workers_beyond_the_slots_cost_no_start() -> None:
    rig = prepared(A, B, slots=1, warm=WarmPoolSettings(extra_workers=2))
    for number in range(10):
        rig.settle(tasks(A, f"a{number}"))
        assert rig.finish(A) == f"a{number}"
        rig.settle(tasks(B, f"b{number}"))
        assert rig.finish(B) == f"b{number}"
    assert (rig.launches[A.key], rig.launches[B.key]) == (1, 1)
    assert rig.settle() == ["", "a", "b"]
    assert rig.wait(1300.0) == [""], "their time is over as for any other"


def test_there_are_no_more_workers_beyond_the_slots_than_there_may_be() -> None:
    rig = prepared(A, slots=3, warm=WarmPoolSettings(extra_workers=1))
    rig.settle(EnvironmentReady(A.key, forkable=True))
    assert rig.settle(tasks(A, "a1", "a2", "a3")) == ["", "a", "a", "a"]


def test_warm_workers_beyond_the_slots_have_a_time_and_a_memory_as_they_are_measured() -> None:
    rig = prepared(A, B, C, slots=1, warm=WarmPoolSettings(extra_workers=3, memory_bytes=250 * MIB))
    for environment in (A, B, C):
        rig.settle(tasks(environment, environment.name))
        rig.finish(environment)
        rig.now += 1.0
    assert rig.settle() == ["b", "c"], "100 MiB each, until more is known"
    rig.settle(*(EnvironmentReady(each.key, memory_bytes=10 * MIB) for each in (A, B, C)))
    for environment in (A, B, C):
        rig.settle(tasks(environment, f"{environment.name} again"))
        rig.finish(environment)
    assert {"a", "b", "c"} <= set(rig.settle())
    rig.settle(EnvironmentReady(B.key, memory_bytes=400 * MIB))
    assert "b" not in rig.settle(), "a measurement counts at once"
    assert rig.wait(1300.0) == [""]


def test_without_environments_a_worker_beyond_the_slots_has_a_time_too() -> None:
    rig = EnvironmentRig(slots=1, warm=WarmPoolSettings(extra_workers=2))
    rig.settle()
    rig.settle(tasks(None, "x", submitter="x"))
    assert [each.submitter for each in rig.launched.values()] == ["", "x"]
    rig.finish(None)
    rig.settle(tasks(None, "own"))
    assert rig.finish(None) == "own"
    assert rig.launches[""] == 2, "the owner's worker stayed"
    assert len(rig.workers) == 1, "that of another submitter did not: its threads would run without a slot"
    rig.settle(tasks(None, "x again", submitter="x"))
    rig.finish(None)
    assert len(rig.workers) == 2
    rig.wait(700.0)
    assert len(rig.workers) == 1


def test_warm_workers_beyond_the_slots_save_starts_and_run_no_more_tasks() -> None:
    """The whole experiment is ``python -m benchmarks.warm_pool_simulation``."""
    rng = random.Random(4)
    arrivals = azure_shaped(rng, environments=20, hours=0.5, tasks=1500)
    start_s = [rng.choice([1.2, 5.0]) for _ in range(20)]
    without = by_manager(arrivals, workers=6, start_s=start_s)
    beyond = by_manager(arrivals, workers=6, start_s=start_s, extra_workers=6)
    assert beyond.cold_starts < 0.9 * without.cold_starts
    assert beyond.mean_wait_s < without.mean_wait_s
    assert beyond.most_running <= 6 == without.most_running


@pytest.mark.parametrize("forkable", [False, True])
def test_a_storm_of_starts_stays_within_slots_memory_and_preparations(forkable: bool) -> None:
    """500 tasks of 50 environments come at once. A worker takes 50 MiB, and idle ones may have 300 MiB together."""
    environments = [Environment.of({"type": "venv", "location": f"/{number}"}) for number in range(50)]
    manager = SimulatedManager(
        slots=8,
        start_s=lambda _: 0.02 if forkable else 0.5,
        duration_s=lambda _: 0.2,
        prepare_s=0.3,
        forkable=forkable,
        memory_bytes=lambda _: 50 * MIB,
        warm=WarmPoolSettings(memory_bytes=300 * MIB, extra_workers=8),
    )
    _handle(manager, [job(f"{number}", environments[number % 50]) for number in range(500)])
    most: collections.Counter[str] = collections.Counter()
    while len(manager.started_at) < 500:
        manager.advance(manager.next_event())
        most |= collections.Counter(
            running=manager.running,
            starting=manager.starting,
            workers=sum(manager.workers().values()),
            idle=sum(manager.idle.values()),
            preparing=manager.preparing,
        )
    assert max(most["running"], most["starting"]) <= 8
    assert most["workers"] <= 16
    assert most["idle"] <= 6
    assert most["preparing"] <= 8
    assert most["running"] == 8, "nor does it leave slots empty"
    starts = [manager.cold_starts[each.key] for each in environments]
    assert min(starts) >= 1
    assert sum(starts) <= 150, "tasks of an environment run one after another in one worker"


def test_greedy_dual_ends_first_what_is_rarely_used_and_cheap_to_start() -> None:
    costs = {"cheap": 0.1, "dear": 10.0, "": 0.3}
    pool = WarmPool(WarmPoolSettings(), start_s=costs.__getitem__, memory_of=lambda _: 100 * MIB)
    cheap, dear = Worker(0, 0, Pair("", "cheap"), 5.0), Worker(1, 1, Pair("", "dear"), 1.0)
    pool.used(dear, 1, 1.0)
    pool.used(cheap, 20, 5.0)
    assert pool.in_order([dear, cheap]) == [cheap, dear]
    for number in range(200):  # others come and go, and dear is not used
        other = Worker(2 + number, 0, Pair("", "cheap"), 6.0)
        pool.used(other, 100, 6.0)
        pool.evicted(other)
    pool.used(cheap, 1, 7.0)
    assert pool.in_order([dear, cheap]) == [dear, cheap]
    lru = WarmPool(WarmPoolSettings(eviction="lru"), start_s=costs.__getitem__, memory_of=lambda _: None)
    assert lru.in_order([cheap, dear]) == [dear, cheap]


def test_more_workers_of_the_same_are_worth_less() -> None:
    pool = WarmPool(WarmPoolSettings(), start_s=lambda _: 1.0, memory_of=lambda _: None)
    twins = [Worker(number, number, Pair("", "twins"), float(number)) for number in range(2)]
    single = Worker(2, 2, Pair("", "single"), 2.0)
    for worker in twins:
        pool.used(worker, 2, 0.0)
    pool.used(single, 3, 0.0)
    assert pool.in_order([single, *twins]) == [twins[0], single, twins[1]]


def test_the_manager_has_far_fewer_cold_starts_than_the_textbook() -> None:
    """The whole experiment is ``python -m benchmarks.warm_pool_simulation``."""
    rng = random.Random(4)
    arrivals = azure_shaped(rng, environments=20, hours=0.5, tasks=1500)
    start_s = [rng.choice([1.2, 5.0]) for _ in range(20)]
    textbook = by_textbook(arrivals, workers=6, start_s=start_s, policy="lru")
    manager = by_manager(arrivals, workers=6, start_s=start_s)
    assert manager.cold_starts < 0.7 * textbook.cold_starts
    assert manager.mean_wait_s < textbook.mean_wait_s


# -- one-shot workers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "prefetch"), [(1, 0), (1, 5), (3, 0), (3, 5)])
def test_a_worker_ends_after_so_many_tasks(limit: int, prefetch: int) -> None:
    rig = EnvironmentRig(slots=2, prefetch=prefetch, tasks_per_worker=limit)
    rig.settle()
    rig.settle(tasks(A, *(f"a{number}" for number in range(12))), tasks(None, *(f"o{number}" for number in range(12))))
    rig.settle(EnvironmentReady(A.key))
    done: collections.Counter[int] = collections.Counter()
    while busy := rig.busy():
        assert all(len(rig.workers[each].ahead) + done[each] <= limit for each in busy)
        done[busy[0]] += 1
        rig.done(busy[0])
        rig.settle()
    assert sum(done.values()) == 24
    assert max(done.values()) == limit
    assert len(done) >= 24 / limit


# -- reports -----------------------------------------------------------------------------------------------------------


def test_environments_are_reported_when_they_change() -> None:
    rig = EnvironmentRig(slots=2)
    rig.settle()
    rig.handle()
    assert all(report.progress.environments is None for report in rig.reports)
    rig.settle(tasks(A, "a1"), EnvironmentProgress(A.key, "uv installs packages"))
    rig.wait(0.5)
    status = rig.statuses["a"]
    assert (status.key, status.type, status.text, status.since) == (A.key, "venv", "uv installs packages", 1000.0)
    rig.settle(EnvironmentReady(A.key, forkable=True))
    rig.wait(0.5)
    status = rig.statuses["a"]
    assert (status.warm, status.busy, status.starting, status.forkable, status.text) == (0, 1, 0, True, "")
    assert status.start_s == 0.0
    rig.finish(A)
    rig.wait(0.5)
    assert (rig.statuses["a"].warm, rig.statuses["a"].busy) == (1, 0)
    rig.settle(EnvironmentReady(A.key, forkable=False))  # its template was ended
    rig.wait(0.5)
    assert (rig.statuses["a"].warm, rig.statuses["a"].forkable) == (1, False)
    rig.reports.clear()
    rig.wait(5.0)
    assert rig.reports, "heartbeats"
    assert all(report.progress.environments is None for report in rig.reports), "unchanged"


# -- random events -----------------------------------------------------------------------------------------------------


operations = st.lists(
    st.sampled_from(["tasks", "tasks", "done", "done", "done", "wait", "long wait", "ready", "fail", "die", "cancel"]),
    min_size=30,
    max_size=120,
)


@settings(max_examples=60, deadline=None)
@given(
    operations=operations,
    rng=st.randoms(use_true_random=False),
    slots=st.integers(1, 4),
    prefetch=st.sampled_from([0, 4]),
    extra=st.sampled_from([0, 2]),
    limit=st.sampled_from([0, 0, 1, 2]),
    default=st.sampled_from([None, None, A]),
    budget=st.sampled_from([None, 250 * MIB]),
)
def test_each_task_ends_once_in_its_environment_whatever_happens(
    operations: list[str],
    rng: random.Random,
    slots: int,
    prefetch: int,
    extra: int,
    limit: int,
    default: Environment | None,
    budget: int | None,
) -> None:
    """The rig checks environments and submitters of tasks, slots, and that no running task is evicted."""
    warm = WarmPoolSettings(extra_workers=extra, memory_bytes=budget)
    rig = EnvironmentRig(slots=slots, prefetch=prefetch, warm=warm, tasks_per_worker=limit, default_environment=default)
    rig.settle()
    sent: list[str] = []
    answered: collections.Counter[str] = collections.Counter()

    def step(operation: str) -> None:
        busy = rig.busy()
        environment = rng.choice([A, B, C])
        match operation:
            case "tasks":
                names = [f"t{len(sent) + number}" for number in range(rng.choice([1, 2, 12]))]
                sent.extend(names)
                rig.settle(tasks(rng.choice([None, A, B, C]), *names, submitter=rng.choice(["", "x", "y"])))
            case "done" if busy:
                rig.done(rng.choice(busy))
            case "wait":
                rig.now += rng.choice([0.001, 0.03, 0.6, TURN_S])
            case "long wait":
                rig.now += rng.choice([5.0, 700.0])
            case "ready":
                rig.settle(EnvironmentReady(environment.key, rng.random() < 0.3, 100 * MIB))
            case "fail":
                rig.settle(EnvironmentFailed(environment.key, rng.choice([WORDS, AGAIN])))
            case "die" if busy:
                worker_id = rng.choice(busy)
                if rig.workers[worker_id].running is None and rig.workers[worker_id].ahead:
                    rig.read(worker_id)
                if worker_id in rig.workers:
                    rig.die(worker_id)
            case "cancel" if sent:
                name = rng.choice(sent)
                rig.stopped.add(name)
                rig.settle(CancelTasks((name,)))
        rig.settle()
        used = rig.busy()
        idle = [
            each for each in rig.workers if each not in used and rig.launched[each].environment not in (None, default)
        ]
        assert budget is None or len(idle) * 100 * MIB <= budget
        progress = rig.progress()
        answered.update([each.task_id for each in progress.finished] + [each.task_id for each in progress.died])

    for operation in operations:
        step(operation)
    for environment in (A, B, C):
        rig.settle(EnvironmentReady(environment.key))
    for _ in range(50 + 10 * len(sent)):
        if answered.keys() >= set(sent):
            break
        rig.now += 1.0
        step("done")
        for environment in (A, B, C):
            rig.settle(EnvironmentReady(environment.key))
    assert answered.keys() == set(sent)
    assert set(answered.values()) <= {1}


# -- helpers -----------------------------------------------------------------------------------------------------------

NAMED = (("a", A), ("b", B), ("c", C))


def _took(rig: EnvironmentRig, environment: Environment, *, start_s: float, task_s: float) -> None:
    """Let one worker start and run one task, in so many seconds; it is warm afterwards."""
    rig.hanging.add(A.name)
    for worker_id in _of(rig, environment):
        rig.die(worker_id)
    rig.settle(tasks(environment, "first"))
    rig.now += start_s
    rig.hanging.clear()
    rig.settle()
    [worker_id] = rig.busy()
    rig.read(worker_id)
    rig.now += task_s
    rig.finish(environment, duration_s=task_s)


def _of(rig: EnvironmentRig, environment: Environment) -> list[int]:
    return [each for each in rig.workers if rig.launched[each].environment == environment]


def _simulated(
    *,
    slots: int,
    duration_s: float = 0.01,
    start_s: float = 1.0,
    shared_workers: bool = False,
    warm: WarmPoolSettings | None = None,
) -> SimulatedManager:
    return SimulatedManager(
        slots=slots,
        start_s=lambda environment: 0.2 if environment is None else start_s,
        duration_s=lambda _: duration_s,
        shared_workers=shared_workers,
        warm=warm,
    )


def _handle(manager: SimulatedManager, jobs: list[Job]) -> None:
    manager.handle([TasksReceived(jobs)], now=0.0)


def _run(manager: SimulatedManager, jobs: list[Job]) -> None:
    """Run until all tasks have begun, and a while longer."""
    _handle(manager, jobs)
    while manager.running or manager.waiting:
        assert manager.next_event() < math.inf
        manager.advance(manager.next_event())
