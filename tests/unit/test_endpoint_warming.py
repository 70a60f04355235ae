"""Tasks and environments: where they go, how many workers that takes, and those that no manager can run."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import sys
import types
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farcall_common.environments import Environment
from farcall_common.errors import ConfigurationError, ErrorRecord
from farcall_common.task_options import TaskOptions
from farcall_common.wire import TaskSpec, TaskState
from farcall_endpoint.agent.core import actions as do
from farcall_endpoint.agent.core import events as ev
from farcall_endpoint.agent.core.agent import AgentCore
from farcall_endpoint.agent.core.demand import missing_slots
from farcall_endpoint.agent.core.environments import ProblemsLogged
from farcall_endpoint.agent.core.loads import EnvironmentDemand, EnvironmentLoad, Lifetime, ManagerLoad, Placed
from farcall_endpoint.agent.core.reports import REPORT_AFTER_S
from farcall_endpoint.agent.core.scheduling import POLICIES, OwnPolicy, SchedulingPolicy, load_policy
from farcall_endpoint.agent.core.tasks import Stage, Task
from farcall_endpoint.agent.core.warming import WarmingAwarePolicy
from farcall_endpoint.agent.shell.nodes import image_check
from farcall_endpoint.agent.shell.spool import Spool
from farcall_endpoint.config.settings import EnvironmentSettings
from farcall_endpoint.contracts.agent_manager import (
    EnvironmentStatus,
    FileContent,
    Finished,
    PrewarmRequest,
    Progress,
    Started,
)
from farcall_endpoint.contracts.prefetch import PrefetchPolicy
from tests.support.agent import CoreDriver, Turn

SCI = Environment(type="apptainer", location="/images/sci.sif", name="sci")
ML = Environment(type="apptainer", location="/images/ml.sif", name="ml")
OWN = ""
WORKS = {"apptainer": ""}
CONTENTS = [FileContent("", f"{number:064}", 10**number) for number in range(4)]
HASH = "f" * 64


def tasks_of(environment: Environment | None, count: int, **options: Any) -> list[Task]:
    label = "own" if environment is None else environment.label
    return [
        Task(
            number,
            TaskSpec(f"{label}{number}", 1, "", HASH, TaskOptions(environment=environment, **options), 0),
            1,
            Stage.QUEUED,
            0.0,
            environment_key="" if environment is None else environment.key,
        )
        for number in range(count)
    ]


def load(name: str, *, slots: int = 4, free: int | None = None, **environments: EnvironmentLoad) -> ManagerLoad:
    keys = {"sci": SCI.key, "ml": ML.key}
    here = {keys[label]: each for label, each in environments.items()}
    return ManagerLoad(name, slots, slots if free is None else free, types=WORKS, environments=here)


def place(
    tasks: Sequence[Task], managers: Sequence[ManagerLoad], *, depth: int = 0, now: float = 0.0, **demand: Any
) -> dict[str, int]:
    """How many tasks each manager gets."""
    placed = WarmingAwarePolicy(random.Random(1)).place(
        tasks, managers, depth=depth, now=now, environments=demands(tasks, managers, depth=depth, **demand)
    )
    return Counter(manager_id for _, manager_id in placed)


def demands(
    tasks: Iterable[Task],
    managers: Iterable[ManagerLoad],
    *,
    depth: int = 0,
    run_s: float | None = None,
    since: float = 0.0,
) -> dict[str, EnvironmentDemand]:
    waiting = Counter(task.environment_key for task in tasks)
    found = {task.environment_key: task.spec.options.environment for task in tasks}
    sent = Counter({key: sum(m.environments.get(key, EnvironmentLoad()).sent for m in managers) for key in waiting})
    return {key: EnvironmentDemand(found[key], waiting[key], sent[key], since, run_s, depth) for key in waiting}


# -- the policy --------------------------------------------------------------------------------------------------------


def test_the_manager_with_the_most_idle_workers_comes_first() -> None:
    managers = [load("cold"), load("one", sci=EnvironmentLoad(1)), load("three", sci=EnvironmentLoad(3))]
    assert place(tasks_of(SCI, 2), managers, run_s=0.01) == {"three": 2}
    managers = [load("cold"), load("one", sci=EnvironmentLoad(1)), load("three", sci=EnvironmentLoad(3))]
    assert place(tasks_of(SCI, 4), managers, run_s=0.01) == {"three": 3, "one": 1}


def test_of_an_unknown_environment_one_worker_is_started_at_first() -> None:
    managers = [load(name) for name in "abc"]
    assert sum(place(tasks_of(SCI, 100), managers).values()) == 1
    managers = [load(name) for name in "abc"]
    assert sum(place(tasks_of(SCI, 100), managers, now=31.0).values()) == 4, "a start that takes long is not waited for"


def test_long_tasks_get_every_worker_and_short_ones_wait_for_a_warm_one() -> None:
    managers = [load("a", sci=EnvironmentLoad(1, start_s=2.0)), load("b")]
    assert place(tasks_of(SCI, 20), managers, run_s=60.0) == {"a": 4, "b": 4}
    managers = [load("a", sci=EnvironmentLoad(1, start_s=2.0)), load("b")]
    assert place(tasks_of(SCI, 20), managers, run_s=0.01) == {"a": 1}


def test_warm_workers_without_a_slot_are_used_and_take_none_from_others() -> None:
    managers = [load("other"), load("warm", sci=EnvironmentLoad(4, parked=4))]
    assert place(tasks_of(SCI, 2), managers, run_s=0.01) == {"warm": 2}
    managers = [load("m", sci=EnvironmentLoad(4, parked=4))]
    assert place(tasks_of(None, 20), managers, run_s=0.001) == {"m": 4}
    managers = [load("m", free=0, sci=EnvironmentLoad(1, parked=1))]
    assert place(tasks_of(SCI, 20), managers, run_s=0.001, depth=4) == {}, "they would wait behind others"


def test_a_fork_comes_before_a_cold_start() -> None:
    managers = [load("cold", slots=8), load("forking", sci=EnvironmentLoad(forkable=True, start_s=0.02))]
    assert place(tasks_of(SCI, 3), managers, run_s=1.0) == {"forking": 3}


def test_never_where_it_cannot_run() -> None:
    managers = [
        ManagerLoad("without", 4, 4),
        ManagerLoad("refuses", 4, 4, types={"apptainer": "no user namespaces"}),
        ManagerLoad("pod", 4, 4, types=WORKS, image=ML.key),
        load("failing", sci=EnvironmentLoad(problem="no such image")),
        load("able"),
    ]
    assert place(tasks_of(SCI, 20), managers, run_s=60.0) == {"able": 4}
    assert set(place(tasks_of(None, 8) + tasks_of(ML, 1), managers, run_s=60.0)) <= {
        "without",
        "refuses",
        "failing",
        "able",
        "pod",
    }


def test_where_it_fails_on_all_nodes_a_manager_answers() -> None:
    managers = [ManagerLoad("without", 4, 4), load("failing", sci=EnvironmentLoad(problem="no such image"))]
    assert place(tasks_of(SCI, 2), managers) == {"failing": 1}


def test_a_pod_serves_its_image_and_nothing_else() -> None:
    pods = [ManagerLoad("sci", 2, 2, image=SCI.key), ManagerLoad("ml", 2, 2, image=ML.key), ManagerLoad("own", 2, 2)]
    placed = WarmingAwarePolicy(random.Random(1)).place(
        waiting := [*tasks_of(SCI, 5), *tasks_of(ML, 5), *tasks_of(None, 5)],
        pods,
        depth=0,
        now=0.0,
        environments=demands(waiting, pods),
    )
    assert Counter((task.spec.options.environment, name) for task, name in placed) == {
        (SCI, "sci"): 2,
        (ML, "ml"): 2,
        (None, "own"): 2,
    }


def test_short_tasks_wait_behind_those_of_their_own_environment_only() -> None:
    managers = [load("ml", free=0, ml=EnvironmentLoad(4, sent=4)), load("sci", free=2, sci=EnvironmentLoad(2, sent=2))]
    managers[1].slots = managers[1].free = 2
    managers[1].free = 0
    assert place(tasks_of(SCI, 20), managers, depth=3, run_s=0.01) == {"sci": 6}
    assert place(tasks_of(SCI, 20, idempotent=False), managers, depth=3, run_s=0.01) == {}


def test_two_environments_that_alternate_do_not_take_each_others_workers() -> None:
    managers = [load("m", free=1, sci=EnvironmentLoad(2, sent=2), ml=EnvironmentLoad(2, sent=1))]
    placed = WarmingAwarePolicy(random.Random(1)).place(
        waiting := [*tasks_of(SCI, 6), *tasks_of(ML, 3)],
        managers,
        depth=0,
        now=0.0,
        environments=demands(waiting, managers, run_s=2.0),
    )
    assert [task.spec.options.environment for task, _ in placed] == [ML]


def test_an_environment_without_a_worker_gets_one_although_another_has_tasks_for_all() -> None:
    managers = [load("m", free=1, sci=EnvironmentLoad(4, sent=3))]
    placed = WarmingAwarePolicy(random.Random(1)).place(
        waiting := [*tasks_of(SCI, 100), *tasks_of(ML, 1)],
        managers,
        depth=0,
        now=0.0,
        environments=demands(waiting, managers, run_s=2.0),
    )
    assert [task.spec.options.environment for task, _ in placed] == [ML]


loads_of = st.builds(
    EnvironmentLoad,
    ready=st.integers(0, 4),
    starting=st.integers(0, 2),
    forkable=st.booleans(),
    problem=st.sampled_from(["", "", "broken"]),
    start_s=st.none() | st.floats(0, 100),
    sent=st.integers(0, 4),
)


@settings(max_examples=200)
@given(
    managers=st.lists(
        st.tuples(
            st.integers(0, 6),
            st.dictionaries(st.sampled_from([SCI.key, ML.key]), loads_of),
            st.sampled_from([WORKS, {}, {"apptainer": "it does not"}]),
            st.sampled_from(["", "", SCI.key]),
            st.none() | st.just(Lifetime(50.0)),
        ),
        max_size=5,
    ),
    counts=st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30)),
    walltime_s=st.none() | st.sampled_from([10.0, 100.0]),
    idempotent=st.booleans(),
    depth=st.integers(0, 4),
    run_s=st.none() | st.floats(0, 1000),
    policy=st.sampled_from(sorted(POLICIES)),
    files=st.none() | st.randoms(use_true_random=False),
)
def test_each_task_is_placed_once_where_it_can_run_and_the_loads_are_right(
    managers: list[tuple[int, dict[str, EnvironmentLoad], dict[str, str], str, Lifetime | None]],
    counts: tuple[int, int, int],
    walltime_s: float | None,
    idempotent: bool,
    depth: int,
    run_s: float | None,
    policy: str,
    files: random.Random | None,
) -> None:
    loads = [
        ManagerLoad(f"m{number}", slots, slots - sum(each.sent for each in here.values()), lifetime, kinds, image, here)
        for number, (slots, here, kinds, image, lifetime) in enumerate(managers)
    ]
    before = {each.manager_id: each.free for each in loads}
    waiting = [
        task
        for environment, count in zip((None, SCI, ML), counts, strict=True)
        for task in tasks_of(environment, count, walltime_s=walltime_s, idempotent=idempotent)
    ]
    random.Random(0).shuffle(waiting)
    if files is not None:
        for each in waiting:
            each.contents = files.sample(CONTENTS, files.randrange(3))
        for node in loads:
            node.add_contents(files.sample(CONTENTS, files.randrange(3)))
    placed = load_policy(policy, random.Random(0)).place(
        iter(waiting), loads, depth=depth, now=0.0, environments=demands(waiting, loads, depth=depth, run_s=run_s)
    )
    assert len({id(task) for task, _ in placed}) == len(placed)
    assert [task for task, _ in placed] == [task for task in waiting if task in {each for each, _ in placed}]
    by_id = {each.manager_id: each for each in loads}
    for task, manager_id in placed:
        assert by_id[manager_id].refusal(task.spec.options.environment) == ""
        assert by_id[manager_id].lasts(walltime_s, now=0.0)
    given_to = Counter(manager_id for _, manager_id in placed)
    assert {name: before[name] - given_to[name] for name in before} == {each.manager_id: each.free for each in loads}


# -- a policy of the user's own ----------------------------------------------------------------------------------------


class Last:
    """All to the last manager."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def place(
        self,
        tasks: Iterable[Task],
        managers: Sequence[ManagerLoad],
        *,
        depth: int,
        now: float,
        environments: Mapping[str, EnvironmentDemand],
    ) -> Placed:
        room = managers[-1].room(depth)
        managers[-1].free = -99  # only a copy
        return [(task, managers[-1].manager_id) for task in list(tasks)[:room]]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType("my_policies")
    monkeypatch.setitem(sys.modules, "my_policies", made)
    return made


def test_a_policy_of_ones_own(module: types.ModuleType) -> None:
    module.Last = Last  # type: ignore[attr-defined]
    policy = load_policy("my_policies:Last", random.Random(1))
    loads = [ManagerLoad("a", 2, 2), ManagerLoad("b", 2, 2)]
    assert [name for _, name in policy.place(tasks_of(None, 5), loads, depth=0, now=0.0)] == ["b", "b"]
    assert [each.free for each in loads] == [2, 0]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("warming-awere", "no policy 'warming-awere'.*Did you mean 'warming-aware'"),
        ("no_such_module_here:Policy", "no_such_module_here cannot be imported"),
        ("my_policies:Missing", "my_policies has no class 'Missing'"),
        ("my_policies:Wrong", "as a policy: TypeError"),
        ("my_policies:NoPlace", "as a policy: AttributeError"),
    ],
)
def test_what_is_no_policy_is_refused_in_a_sentence(module: types.ModuleType, spec: str, says: str) -> None:
    class Wrong:
        def __init__(self, rng: random.Random) -> None:
            pass

        def place(self, tasks: object) -> None:
            pass

    module.Wrong, module.NoPlace = Wrong, lambda rng: rng  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match=f"(?s){says}"):
        load_policy(spec, random.Random(1))


@pytest.mark.parametrize(
    "nonsense",
    [
        lambda _, __: 1 / 0,
        lambda tasks, _: [(tasks[0], "missing")],
        lambda tasks, managers: [(tasks[0], managers[0].manager_id)] * 2,
        lambda tasks, managers: [(each, managers[0].manager_id) for each in tasks],
        lambda tasks, managers: [(tasks[0], managers[1].manager_id)],
        lambda _, __: 7,
    ],
)
def test_nonsense_of_a_policy_is_logged_once_and_its_turn_is_the_defaults(
    nonsense: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Mad:
        def place(self, tasks: Any, managers: Any, **_: Any) -> Any:
            return nonsense(tasks, managers)

    policy: SchedulingPolicy = OwnPolicy(Mad(), WarmingAwarePolicy(random.Random(1)), name="my:Mad")
    for _ in range(2):
        loads = [ManagerLoad("a", 2, 2), ManagerLoad("pod", 2, 2, image=SCI.key)]
        placed = policy.place(tasks_of(None, 5), loads, depth=0, now=0.0)
        assert [name for _, name in placed][:2] == ["a", "a"] or not placed
    assert len(caplog.records) == 1
    assert "my:Mad" in caplog.text


# -- the core ----------------------------------------------------------------------------------------------------------


def core_with(**options: Any) -> CoreDriver:
    prefetch = PrefetchPolicy(horizon_s=0.1, limit=8)
    core = CoreDriver(
        AgentCore(
            endpoint_id="e",
            slots_hint=1,
            prefetch=prefetch,
            window=PrefetchPolicy(horizon_s=1.0, limit=0),
            max_window=1000,
            **{"policy": WarmingAwarePolicy(random.Random(1)), **options},
        )
    )
    core.opened()
    core.accept(functions=[HASH])
    core.decide(now=0.0)
    return core


def manager(core: CoreDriver, name: str, *, types: Mapping[str, str] = WORKS, image: str = "", slots: int = 4) -> None:
    core.manager_registered(name, slots=slots, node=f"node-{name}", types=types, image=image)
    core.progress(name, Progress(workers=slots, idle_workers=slots))


def submit(
    core: CoreDriver, environment: Environment | None, count: int, *, now: float = 0.0, prefix: str = ""
) -> Turn:
    specs = [task.spec for task in tasks_of(environment, count)]
    core.accept(*(msgspec.structs.replace(each, task_id=prefix + each.task_id) for each in specs))
    return core.decide(now=now)


def image(number: int) -> Environment:
    return Environment(type="apptainer", location=f"/images/{number}.sif")


def spec_of(task_id: str, submitter: str, environment: Environment | None) -> TaskSpec:
    return TaskSpec(task_id, 1, "", HASH, TaskOptions(environment=environment), 0, submitter=submitter)


def ids(turn: Turn) -> dict[str, list[str]]:
    return {name: [task.task_id for task in tasks] for name, tasks in turn.orders.items()}


def test_tasks_wait_for_managers_and_fail_once_none_can_run_their_environment() -> None:
    core = core_with()
    assert not submit(core, SCI, 2).finished
    manager(core, "m", types={"apptainer": "apptainer is not installed", "podman": ""})
    turn = core.decide(now=1.0)
    assert len(turn.finished) == 2
    result = turn.finished[0].result
    assert result is not None
    assert result.state is TaskState.FAILED
    assert result.error is not None
    record = ErrorRecord.from_json(result.error)
    assert record.code == "CONTAINER_UNSUPPORTED"
    assert record.message == "No node of this endpoint can run environment sci: apptainer is not installed."
    assert core.core.waiting_reasons(1.0) == []


def test_a_second_start_is_worth_it_only_when_tasks_turn_out_to_be_long() -> None:
    core = core_with()
    manager(core, "a")
    manager(core, "b")
    first = ids(submit(core, SCI, 12))
    assert sum(map(len, first.values())) == 1
    [name] = first
    starting = EnvironmentStatus(SCI.key, "sci", "apptainer", starting=1, text="converts the image", since=1.0)
    core.progress(name, Progress(workers=3, idle_workers=3, environments=(starting,)))
    assert ids(core.decide(now=1.0)) == {}
    assert core.core.waiting_reasons(41.0) == [
        {
            "environment": "sci",
            "waiting_tasks": 11,
            "why": f"waits for environment sci to start on node node-{name}: converts the image, 40 s so far",
        }
    ]
    fresh = EnvironmentStatus(SCI.key, "sci", "apptainer", starting=1, since=1.0, start_s=2.0)
    core.progress(name, Progress(environments=(fresh,), workers=3, idle_workers=3))
    core.decide(now=1.0)
    [waiting] = core.core.waiting_reasons(41.0)
    assert waiting["why"] == f"waits for environment sci to start on node node-{name}: a worker starts"
    busy = EnvironmentStatus(SCI.key, "sci", "apptainer", busy=1, start_s=2.0)
    core.progress(name, Progress(workers=4, idle_workers=3, environments=(busy,)))
    core.decide(now=2.0)
    deadline = core.next_deadline()
    assert deadline is not None
    assert deadline <= 2.2, "time alone changes what is best"
    later = ids(core.decide(now=8.0))
    assert sum(map(len, later.values())) == 7, "all slots are used"


def test_tasks_that_wait_for_an_image_hold_no_slot_of_a_node() -> None:
    core = core_with()
    manager(core, "m")
    assert {name: len(tasks) for name, tasks in ids(submit(core, SCI, 12)).items()} == {"m": 1}
    status = EnvironmentStatus(SCI.key, "sci", "apptainer", text="converts the image", since=1.0)
    core.progress("m", Progress(workers=4, idle_workers=4, environments=(status,)))
    assert [ids(core.decide(now=now)) for now in (20.0, 40.0, 600.0)] == [{}, {}, {}]
    assert {name: len(tasks) for name, tasks in ids(submit(core, None, 6)).items()} == {"m": 4}
    status = EnvironmentStatus(SCI.key, "sci", "apptainer", warm=1, start_s=2.0)
    done = tuple(Finished(f"own{number}", TaskState.SUCCESS, 0, None, 600.0, 601.0) for number in range(2))
    core.progress("m", Progress(done, workers=4, idle_workers=1, environments=(status,)), [b"r", b"r"])
    assert sum(map(len, ids(core.decide(now=602.0)).values())) == 1, "it is ready: the next slot may be one for it"


@pytest.mark.parametrize("policy", POLICIES)
def test_tasks_of_many_environments_that_are_prepared_hold_no_others_up(policy: str) -> None:
    core = core_with(policy=POLICIES[policy](random.Random(1)))
    manager(core, "m", slots=2)
    core.accept(*(spec_of(f"eve-{number}", "eve", image(number)) for number in range(40)))
    there: dict[str, Environment | None] = {}

    def turns(now: float) -> list[str]:
        """What the agent sends, while the node prepares every environment of it."""
        new: list[str] = []
        while tasks := core.decide(now=now).orders.get("m"):
            new += [task.task_id for task in tasks]
            there.update({task.task_id: task.environment for task in tasks})
            named = [each for each in there.values() if each is not None]
            statuses = tuple(EnvironmentStatus(each.key, "", "apptainer", text="copies the image") for each in named)
            core.progress("m", Progress(workers=2, idle_workers=2, environments=statuses))
        return new

    assert 8 <= len(turns(1.0)) < 11, "one payer has some at a time"
    others = [spec_of("ada", "ada", image(39)), spec_of("bob", "bob", image(50)), spec_of("cy", "cy", None)]
    core.accept(*others, spec_of("eve-plain", "eve", None))
    assert sorted(turns(2.0)) == ["ada", "bob", "cy", "eve-plain"], "both slots were free"
    states = [TaskState.SUCCESS if each is None else TaskState.CANCELLED for each in there.values()]
    done = tuple(Finished(name, state, 0, None, 2.0, 3.0) for name, state in zip(there, states, strict=True))
    there.clear()
    core.progress("m", Progress(done, workers=2, idle_workers=2), [b"r", b"r"])
    assert 8 <= len(turns(3.0)) < 11, "the next ones come"


@pytest.mark.parametrize("environment", [None, SCI])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_task_waits_behind_a_long_one_on_another_node(policy: str, environment: Environment | None) -> None:
    core = core_with(policy=POLICIES[policy](random.Random(1)))
    warm = () if environment is None else (EnvironmentStatus(SCI.key, "sci", "apptainer", warm=2, start_s=2.0),)
    where: dict[str, str] = {}

    def send(*specs: TaskSpec) -> None:
        core.accept(*specs)
        for name, tasks in core.decide(now=1.0).orders.items():
            where.update({task.task_id: name for task in tasks})

    for name in "ab":
        core.manager_registered(name, slots=2, node=name, types=WORKS, image="")
        core.progress(name, Progress(workers=2, idle_workers=2, environments=warm))
    send(*(spec_of(f"quick-{number}", "ada", environment) for number in range(4)))
    for task_id, name in [*where.items()]:
        done = Finished(task_id, TaskState.SUCCESS, 0, None, 1.0, 1.001)
        core.progress(name, Progress((done,), workers=2, idle_workers=2), [b"r"])
    core.decide(now=1.0)
    core.manager_lost("b", "its block is over")
    send(*(spec_of(f"long-{number}", "eve", environment) for number in range(2)))
    started = tuple(Started(f"long-{number}", 1.0) for number in range(2))
    core.progress("a", Progress(workers=2, started=started))
    core.manager_registered("b", slots=2, node="b", types=WORKS, image="")
    core.progress("b", Progress(workers=2, idle_workers=2, environments=warm))
    send(*(spec_of(f"ada-{number}", "ada", environment) for number in range(40)))
    assert {where.get(f"ada-{number}", "b") for number in range(40)} == {"b"}
    assert sum(task_id.startswith("ada") for task_id in where) > 2, "some wait behind short ones"


def test_tasks_that_were_sent_behind_a_task_that_became_long_move_to_another_node() -> None:
    core = core_with()
    where: dict[str, str] = {}

    def decide(now: float) -> dict[str, list[str]]:
        """What managers are asked to give back."""
        turn = core.decide(now=now)
        for name, tasks in turn.orders.items():
            where.update({task.task_id: name for task in tasks})
        return {each.manager_id: list(each.task_ids) for each in turn.actions if isinstance(each, do.ReturnTasks)}

    core.manager_registered("a", slots=1, node="a", types=WORKS, image="")
    core.progress("a", Progress(workers=1, idle_workers=1))
    core.accept(spec_of("quick", "ada", None))
    decide(1.0)
    core.progress("a", Progress((Finished("quick", TaskState.SUCCESS, 0, None, 1.0, 1.001),), workers=1), [b"r"])
    core.accept(spec_of("long", "eve", None), *(spec_of(f"ada-{number}", "ada", None) for number in range(3)))
    assert decide(2.0) == {}
    assert where["ada-0"] == "a", "nothing is known of the long one yet"
    core.manager_registered("b", slots=1, node="b", types=WORKS, image="")
    core.progress("b", Progress(workers=1, idle_workers=1))
    core.progress("a", Progress(workers=1, started=(Started("long", 2.0),)))
    [asked] = decide(3.0).items()
    assert asked == ("a", ["ada-0"]), "one place is free"
    core.cancel(["ada-2"])
    core.progress("a", Progress(workers=1, returned=("ada-0", "ada-2")))
    decide(3.1)
    assert where["ada-0"] == "b"
    assert where["ada-2"] == "a"
    assert core.core.demand().tasks == 3, "long, ada-0 and ada-1"


def test_short_tasks_stay_with_the_worker_that_is_warm() -> None:
    core = core_with()
    manager(core, "a")
    manager(core, "b")
    turn = submit(core, SCI, 12)
    [(name, [task])] = turn.orders.items()
    warm = EnvironmentStatus(SCI.key, "sci", "apptainer", warm=1, start_s=2.0)
    done = Finished(task.task_id, TaskState.SUCCESS, 0, None, 2.0, 2.001)
    core.progress(name, Progress((done,), workers=4, idle_workers=4, environments=(warm,)), [b"r"])
    assert {name: len(each) for name, each in ids(core.decide(now=2.1)).items()} == {name: 9}


def test_tasks_that_name_no_environment_have_the_default_one() -> None:
    core = core_with(default_environment=SCI)
    manager(core, "m")
    warm = EnvironmentStatus(SCI.key, "sci", "apptainer", warm=4)
    core.progress("m", Progress(workers=4, idle_workers=4, environments=(warm,)))
    turn = submit(core, None, 6)
    assert {name: len(tasks) for name, tasks in ids(turn).items()} == {"m": 4}
    assert [task.spec.options.environment for task in turn.accepted] == [None] * 6, "its manager knows it"
    assert core.core.known_environments() == [SCI]


# -- what blocks should be enough for ----------------------------------------------------------------------------------


def started(core: CoreDriver, name: str, environment: Environment, **status: Any) -> None:
    row = EnvironmentStatus(environment.key, environment.label, environment.type, **status)
    core.progress(name, Progress(workers=4, idle_workers=4, environments=(row,)))
    core.decide(now=1.0)


def test_free_slots_of_a_node_that_cannot_run_it_are_none_for_an_environment() -> None:
    core = core_with()
    manager(core, "a", types={"apptainer": "no user namespaces"})
    manager(core, "b")
    submit(core, SCI, 6)
    started(core, "b", SCI, warm=1)
    submit(core, None, 2)
    demand = core.demand()
    assert (demand.tasks, demand.limited) == (8, {SCI.key: 6})
    assert {name: each.unable for name, each in demand.nodes.items()} == {"a": {SCI.key}, "b": frozenset()}
    assert {name: each.tasks.get(SCI.key, 0) for name, each in demand.nodes.items()} == {"a": 0, "b": 1}
    assert missing_slots(demand.tasks, demand.limited, demand.nodes.values()) == 2
    core.cancel([f"sci{number}" for number in range(6)])
    core.decide(now=2.0)
    for task in list(core.core._managers.members["b"].outstanding):
        core.progress("b", Progress((Finished(task, TaskState.CANCELLED, None, None, None, None),), workers=4))
    core.decide(now=2.0)
    submit(core, ML, 1)
    assert {name: each.unable for name, each in core.demand().nodes.items()} == {"a": {ML.key}, "b": frozenset()}


def test_a_node_where_an_environment_failed_has_no_slots_for_it_unless_it_failed_on_all() -> None:
    core = core_with()
    for name in "ab":
        manager(core, name)
    submit(core, SCI, 3)
    started(core, "a", SCI, problem="no such image")
    assert core.demand().nodes["a"].unable == {SCI.key}
    started(core, "b", SCI, problem="no such image")
    demand = core.demand()
    assert (demand.limited, {each.unable for each in demand.nodes.values()}) == ({}, {frozenset()}), "they answer"


@pytest.mark.parametrize("default", [None, SCI])
def test_tasks_that_wait_for_a_first_worker_ask_for_no_block_and_keep_the_one_where_it_starts(
    default: Environment | None,
) -> None:
    core = core_with(default_environment=default)
    core.manager_registered("m", slots=4, types=WORKS)
    submit(core, None if default else SCI, 100)
    assert core.demand().tasks == 100
    started(core, "m", SCI, text="converts the image")
    demand = core.demand()
    assert demand.tasks <= 4
    assert demand.busy == {"m"}
    started(core, "m", SCI, starting=1)
    assert core.demand().tasks <= 4
    started(core, "m", SCI, warm=1)
    assert core.demand().tasks == 100
    assert core.demand().nodes["m"].warm
    started(core, "m", SCI, warm=1, starting=1)
    assert core.demand().tasks == 100, "it has a worker"


class Recording:
    """A policy that places nothing, and remembers what it was given of environments."""

    def __init__(self) -> None:
        self.environments: list[Mapping[str, EnvironmentDemand]] = []

    def place(
        self, tasks: Iterable[Task], managers: Sequence[ManagerLoad], *, environments: Any, **_: object
    ) -> Placed:
        self.environments.append(environments)
        return []


def test_one_environment_for_all_tasks_is_no_work_for_the_policy() -> None:
    policy = Recording()
    core = core_with(policy=policy, default_environment=SCI)
    manager(core, "m")
    warm = EnvironmentStatus(SCI.key, "sci", "apptainer", warm=4)
    core.progress("m", Progress(workers=4, idle_workers=4, environments=(warm,)))
    submit(core, None, 3)
    turn = submit(core, SCI, 3)
    assert [task.environment_key for task in turn.accepted] == [""] * 3, "that of tasks that name it, too"
    assert not any(policy.environments)
    assert core.next_deadline() == REPORT_AFTER_S, "time alone does not change what is best"
    submit(core, ML, 2, now=1.0)
    assert {key: (each.environment, each.waiting) for key, each in policy.environments[-1].items()} == {
        ML.key: (ML, 2),
        "": (SCI, 6),
    }


def test_tasks_of_the_default_environment_fail_while_no_manager_can_run_it() -> None:
    core = core_with(default_environment=SCI)
    submit(core, None, 2)
    core.manager_registered("m", slots=4, types={"apptainer": "apptainer is not installed"})
    turn = core.decide(now=1.0)
    assert len(turn.finished) == 2
    assert "apptainer is not installed" in str(turn.finished[0].result)
    manager(core, "able")
    assert len(submit(core, None, 2, now=2.0, prefix="later-").orders["able"]) == 2


@pytest.mark.parametrize("policy", ["random", "warming-aware"])
def test_tasks_of_the_default_environment_avoid_a_node_where_it_fails(policy: str) -> None:
    core = core_with(policy=load_policy(policy, random.Random(1)), default_environment=SCI)
    for name in ("fails", "works"):
        manager(core, name)
    failed = EnvironmentStatus(SCI.key, "sci", "apptainer", problem="no such image")
    other = EnvironmentStatus(ML.key, "ml", "apptainer", warm=4)
    core.progress("fails", Progress(workers=4, idle_workers=4, environments=(failed, other)))
    works = EnvironmentStatus(SCI.key, "sci", "apptainer", warm=3, problem="a fifth one did not start")
    core.progress("works", Progress(workers=3, idle_workers=3, environments=(works,)))
    assert {name: len(tasks) for name, tasks in submit(core, None, 3).orders.items()} == {"works": 3}
    submit(core, None, 1, prefix="waiting-")
    [reason] = core.core.waiting_reasons(0.0)
    assert (reason["environment"], reason["waiting_tasks"]) == ("sci", 1)
    works = EnvironmentStatus(SCI.key, "sci", "apptainer", warm=1)
    core.progress("fails", Progress(workers=4, idle_workers=4, environments=(works,)))
    assert list(core.decide(now=1.0).orders) == ["fails"], "the owner has repaired it"


def test_the_report_has_what_is_interesting_first() -> None:
    core = core_with()
    manager(core, "a")
    statuses = [
        EnvironmentStatus("k1", "cold", "apptainer"),
        EnvironmentStatus("k2", "busy", "apptainer", busy=2, warm=1),
        EnvironmentStatus(
            "k3", "broken", "apptainer", problem="from docker://me:token@registry.example: denied", retry_at=9.0
        ),
        EnvironmentStatus("k4", "new", "apptainer", starting=1, text="converts the image", since=5.0),
    ]
    core.progress("a", Progress(workers=4, environments=tuple(statuses)))
    core.decide(now=0.0)
    rows = core.report().detail["environments"]
    assert [row["label"] for row in rows] == ["broken", "new", "busy", "cold"]
    assert rows[1] == {
        "key": "k4",
        "label": "new",
        "type": "apptainer",
        "node": "node-a",
        "warm": 0,
        "busy": 0,
        "starting": 1,
        "forkable": False,
        "text": "converts the image",
        "since": 5.0,
        "problem": "",
    }
    assert (rows[0]["problem"], rows[0]["retry_at"]) == ("from docker://registry.example: denied", 9.0)
    many = [EnvironmentStatus(f"k{number}", f"e{number:03}", "apptainer", warm=1) for number in range(50)]
    typos = [EnvironmentStatus(f"t{at}", f"typo{at}", "apptainer", problem="none", since=at) for at in range(30)]
    core.progress("a", Progress(workers=4, environments=(*many, *typos)))
    core.decide(now=1.0)
    labels = [row["label"] for row in core.report().detail["environments"]]
    assert labels[:6] == ["typo29", "typo28", "typo27", "typo26", "typo25", "e000"], "few of those, the newest"
    assert len(labels) == 20


def test_why_tasks_wait_says_when_an_environment_that_failed_is_tried_again() -> None:
    core = core_with()
    manager(core, "a")
    submit(core, SCI, 12)
    for retry_at, words in ((281.0, "tried again in 4 minutes"), (41.0, "tried again with the next task")):
        failed = EnvironmentStatus(SCI.key, "sci", "apptainer", problem="denied", retry_at=retry_at)
        core.progress("a", Progress(workers=4, environments=(failed,)))
        core.decide(now=1.0)
        [waiting] = core.core.waiting_reasons(41.0)
        assert waiting["why"] == f"environment sci cannot be started on node node-a: denied ({words})"


def test_a_cancelled_task_does_not_count_as_waiting() -> None:
    core = core_with()
    submit(core, SCI, 3)
    core.cancel(["sci0", "sci1"])
    core.decide(now=1.0)
    assert [row["waiting_tasks"] for row in core.core.waiting_reasons(1.0)] == [1]


# -- images ------------------------------------------------------------------------------------------------------------


IMAGE = Environment(type="docker", location="registry.example/sci:1", name="image")


def test_tasks_with_an_image_wait_for_a_pod_of_it_and_count_for_it() -> None:
    core = core_with(image_check=image_check(None, owner_id=lambda: "owner"))
    manager(core, "own", types={"docker": ""})
    turn = submit(core, IMAGE, 3)
    assert not turn.finished
    assert not turn.orders
    submit(core, None, 2, now=1.0)
    assert core.demand().images == {IMAGE.key: 3, "": 2}
    assert core.core.image_of(IMAGE.key) == "registry.example/sci:1"
    file = Environment(type="docker", location="/images/sci.tar")
    assert [task.result and task.result.state for task in submit(core, file, 1).finished] == [TaskState.FAILED]
    [row] = core.report().detail["environments"]
    assert (row["label"], row["node"], row["text"]) == ("image", "", "it waits for a pod of its image")
    assert core.core.waiting_reasons(1.0)[0]["why"] == "waits for a pod of its image"
    manager(core, "pod", types={}, image=IMAGE.key, slots=2)
    assert ids(core.decide(now=2.0)) == {"pod": ["image0", "image1"]}
    [row] = core.report().detail["environments"]
    assert (row["node"], row["text"]) == ("node-pod", "")
    [waiting] = core.core.waiting_reasons(2.0)
    assert waiting["why"] == "waits for a worker of environment image: all of them are busy"


def test_where_pods_have_images_the_owner_may_limit_them() -> None:
    rules = EnvironmentSettings(types=("docker",), locations=("registry.example/*",))
    check = image_check(rules, owner_id=lambda: "owner")

    foreign = Environment(type="docker", location="elsewhere.example/x")
    assert check(IMAGE, "user") == check(foreign, "owner") == check(foreign, "") == ""
    assert "location" in check(foreign, "user")
    assert "podman" in check(Environment(type="podman", location="registry.example/sci:1"), "")
    core = core_with(image_check=check)
    [failed] = submit(core, Environment(type="podman", location="registry.example/sci:1"), 1).finished
    assert failed.result is not None
    assert failed.result.state is TaskState.FAILED


def test_prewarmed_images_are_a_demand_for_pods_and_no_manager_is_asked() -> None:
    rules = EnvironmentSettings(types=("docker",))
    core = core_with(image_check=image_check(rules, owner_id=lambda: "owner"))
    manager(core, "own", types={"docker": ""})
    podman = Environment(type="podman", location="registry.example/sci:1")
    requests = [PrewarmRequest(environment=each, count=3, requested_at=5.0) for each in (IMAGE, podman)]
    core.add(ev.PrewarmRequested(requests))
    assert not any(isinstance(each, do.Prewarm) for each in core.decide(now=1.0).actions)
    demand = core.core.demand()
    assert demand.prewarmed == {IMAGE.key: 3}
    assert core.core.image_of(IMAGE.key) == IMAGE.location
    [wanted, refused] = core.core.prewarmed()
    assert (wanted["placed"], wanted["warm"], wanted["failed"]) == (3, 0, False)
    assert "waits for pods of its image; max_blocks" in str(wanted["why"])
    assert refused["failed"]
    assert refused["why"] == "the endpoint's settings do not allow podman"
    core.add(ev.NodesChanged("", "ErrImagePull"))
    core.decide(now=2.0)
    assert "ErrImagePull" in str(core.core.prewarmed()[0]["why"])
    manager(core, "pod", types={}, image=IMAGE.key, slots=4)
    assert not any(isinstance(each, do.Prewarm) for each in core.decide(now=3.0).actions)
    assert core.core.prewarmed()[0]["warm"] == 4
    [row] = core.core.environments()
    assert (row["label"], row["node"], row["warm"], row["busy"]) == ("image", "node-pod", 4, 0)
    core.add(ev.PrewarmRequested([msgspec.structs.replace(requests[0], node="n1")]))
    core.decide(now=4.0)
    assert core.core.demand().prewarmed == {}
    assert "leave --node out" in str(core.core.prewarmed()[0]["why"])


def test_managers_that_drain_get_nothing() -> None:
    core = core_with()
    manager(core, "a")
    manager(core, "b")
    core.add(ev.ManagersDraining(["a"]))
    assert set(ids(submit(core, None, 8))) == {"b"}
    core.add(ev.ManagersDraining([]))
    assert set(ids(core.decide(now=1.0))) == {"a"}


def test_the_spool_keeps_the_environment_of_a_task(tmp_path: Path) -> None:
    core = core_with()
    turn = submit(core, SCI, 1)
    with contextlib.closing(Spool(tmp_path / "spool.sqlite3")) as spool:
        spool.commit(turn.write)
        [kept], _ = spool.load()
    assert kept.spec.options.environment == SCI
    assert kept.to_task().environment_key == SCI.key


@settings(max_examples=60)
@given(data=st.data())
def test_counts_are_right_whatever_happens(data: st.DataObject) -> None:
    core = core_with(default_environment=data.draw(st.sampled_from([None, ML])))
    environments = [None, SCI, ML]
    numbers = itertools.count()
    alive: list[str] = []
    for now in range(data.draw(st.integers(1, 25))):
        managers = core.core._managers.members
        action = data.draw(
            st.sampled_from(["manager", "submit", "submit", "finish", "finish", "cancel", "lose", "fail"])
        )
        if action == "manager" and len(alive) < 3:
            alive.append(f"m{next(numbers)}")
            manager(core, alive[-1], types=data.draw(st.sampled_from([WORKS, WORKS, {}])))
        elif action == "submit":
            environment = data.draw(st.sampled_from(environments))
            specs = [task.spec for task in tasks_of(environment, data.draw(st.integers(1, 6)))]
            core.accept(*(msgspec.structs.replace(each, task_id=f"t{next(numbers)}") for each in specs))
        elif action in ("finish", "cancel") and alive:
            name = data.draw(st.sampled_from(alive))
            given_to = list(managers[name].outstanding) if name in managers else []
            if action == "cancel":
                core.cancel(data.draw(st.lists(st.sampled_from(sorted(core.core._held.by_id) or ["none"]), max_size=3)))
            ended = tuple(Finished(each, TaskState.SUCCESS, 0, None, float(now), now + 0.5) for each in given_to[:3])
            statuses = tuple(
                EnvironmentStatus(each.key, each.label, each.type, *data.draw(st.tuples(*[st.integers(0, 3)] * 3)))
                for each in data.draw(st.sets(st.sampled_from([SCI, ML])))
            )
            core.progress(name, Progress(ended, workers=4, environments=statuses), [b"r"] * len(ended))
        elif action == "lose" and alive:
            core.manager_lost(alive.pop(), "killed", unstarted=data.draw(st.booleans()))
        core.decide(now=float(now))
        if action == "fail":
            core.fail_write(now=float(now))
        else:
            core.written(now=float(now))
        check_counts(core.core)


def check_counts(core: AgentCore) -> None:
    sent: Counter[str] = Counter()
    for member in core._managers.members.values():
        assert member.load.free == member.load.slots - len(member.outstanding)
        here = Counter(task.environment_key for task in member.outstanding.values() if task.environment_key)
        assert {key: each.sent for key, each in member.load.environments.items() if each.sent} == here
        assert all(0 <= each.cold <= each.sent or each.cold == 0 for each in member.load.environments.values())
        sent += here
    assert core._managers.sent == sent
    waiting = Counter(
        task.environment_key
        for task in core._held.by_id.values()
        if task.environment_key and task.stage is Stage.QUEUED
    )
    assert {key: len(each) for key, each in core._queue.waiting.items()} == waiting


def test_a_problem_of_an_environment_is_logged_once_and_its_end_too() -> None:
    log = ProblemsLogged()
    words = "no such image:\nhttps://me:secret@registry.example/sci"
    fails = EnvironmentStatus(SCI.key, SCI.label, SCI.type, problem=words)
    [(level, text)] = log.changes("m", (fails,))
    assert level == logging.WARNING
    assert text == f"no such image: https://registry.example/sci (logs/environment-{SCI.key}.log)"
    assert log.changes("m", None) == []
    assert log.changes("m", (fails,)) == []
    assert log.changes("other", (fails,)) == [(level, text)], "each node has its own"
    works = EnvironmentStatus(SCI.key, SCI.label, SCI.type, warm=1)
    assert log.changes("m", (works,)) == [(logging.INFO, "The environment sci can be started again")]
    assert log.changes("m", (works,)) == []
    log.changes("m", (fails,))
    log.forget("m")
    assert log.changes("m", (works,)) == []
