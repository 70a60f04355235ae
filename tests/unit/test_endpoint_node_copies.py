"""Tasks with files and nodes that keep copies: where the agent places them, and what it lets managers copy."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_common import wire
from farcall_common.environments import Environment
from farcall_common.staged_files import FileUse, pack_files
from farcall_common.task_options import TaskOptions
from farcall_common.wire import TaskSpec
from farcall_endpoint.agent.core import actions as do
from farcall_endpoint.agent.core import events as ev
from farcall_endpoint.agent.core.agent import AgentCore
from farcall_endpoint.agent.core.loads import EnvironmentDemand, EnvironmentLoad, ManagerLoad
from farcall_endpoint.agent.core.managers import Managers
from farcall_endpoint.agent.core.node_copies import contents_of
from farcall_endpoint.agent.core.replicas import ENDPOINT, CopyOrder
from farcall_endpoint.agent.core.scheduling import POLICIES, OwnPolicy, SchedulingPolicy, bin_packing, round_robin
from farcall_endpoint.agent.core.tasks import Stage, Task
from farcall_endpoint.agent.core.warming import WarmingAwarePolicy
from farcall_endpoint.contracts.agent_manager import (
    FileContent,
    FilesReported,
    Finished,
    NodeFile,
    Progress,
    WaitingForFiles,
)
from farcall_endpoint.contracts.prefetch import PrefetchPolicy
from farcall_endpoint.files import orders
from farcall_endpoint.files.plan import Staging
from tests.support.agent import CoreDriver, Turn
from tests.unit.test_endpoint_agent_core import BODY, FUNCTION, spec

SHA256 = "ab" * 32
MB = 10**6
A, B, C = (FileContent("", name * 64, size * MB) for name, size in (("a", 1), ("b", 10), ("c", 100)))


def task(name: str, *contents: FileContent, environment: Environment | None = None, **options: Any) -> Task:
    about = TaskSpec(name, 1, "", "f" * 64, TaskOptions(environment=environment, **options), 0)
    key = "" if environment is None else environment.key
    return Task(1, about, 1, Stage.QUEUED, 0.0, environment_key=key, contents=contents)


def load(name: str, *contents: FileContent, slots: int = 2, free: int | None = None) -> ManagerLoad:
    made = ManagerLoad(name, slots, slots if free is None else free, types={"apptainer": ""})
    made.add_contents(contents)
    return made


def place(
    tasks: Sequence[Task], managers: Sequence[ManagerLoad], *, policy: SchedulingPolicy | None = None, depth: int = 0
) -> dict[str, str]:
    policy = policy or WarmingAwarePolicy(random.Random(1))
    return {each.task_id: name for each, name in policy.place(tasks, managers, depth=depth, now=0.0)}


# -- placement ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["warming-aware", "random"])
def test_a_task_goes_to_the_node_that_lacks_the_fewest_bytes(name: str) -> None:
    for seed in range(20):
        policy = POLICIES[name](random.Random(seed))
        managers = [load("none"), load("small", A, B), load("large", C)]
        assert place([task("t", A, B, C)], managers, policy=policy) == {"t": "large"}


def test_a_busy_node_is_not_waited_for() -> None:
    managers = [load("has", C, free=0), load("free")]
    assert place([task("t", C)], managers) == {"t": "free"}
    assert place([task("t", C)], managers, depth=5) == {"t": "free"}


def test_behind_running_tasks_it_is_the_node_with_the_file() -> None:
    for seed in range(20):
        managers = [load(name, free=0) for name in "xyz"] + [load("has", C, free=0)]
        policy = WarmingAwarePolicy(random.Random(seed))
        assert place([task("t", C)], managers, policy=policy, depth=1) == {"t": "has"}


def test_tasks_that_share_a_file_come_together_before_anything_is_copied() -> None:
    tasks = [task(f"{name}{number}", content) for number in range(2) for name, content in (("a", A), ("b", B))]
    for seed in range(20):
        placed = place(
            tasks, [load(f"m{n}", slots=4) for n in range(10)], policy=WarmingAwarePolicy(random.Random(seed))
        )
        assert placed["a0"] == placed["a1"]
        assert placed["b0"] == placed["b1"]


def test_tasks_without_files_are_placed_as_ever() -> None:
    plain = [load(f"m{n}") for n in range(4)]
    with_files = [load(f"m{n}", A) for n in range(4)]
    tasks = [task(f"t{n}") for n in range(8)]
    assert place(tasks, plain) == place(tasks, with_files)


@pytest.mark.parametrize("policy", [round_robin, bin_packing])
def test_a_policy_with_an_order_of_its_own_keeps_it(policy: Any) -> None:
    managers = [load("m0"), load("m1", free=1), load("has", C)]
    assert place([task("t", C)], managers, policy=policy()) == {"t": "m1"}


def test_with_environments_warmth_comes_first_and_then_files() -> None:
    sci = Environment(type="apptainer", location="/images/sci.sif", name="sci")

    def placed(managers: list[ManagerLoad], seed: int, count: int = 1) -> list[str]:
        tasks = [task(f"t{n}", A, C, environment=sci) for n in range(count)]
        demand = {sci.key: EnvironmentDemand(sci, count, 0, 0.0, 100.0)}
        policy = WarmingAwarePolicy(random.Random(seed))
        return [name for _, name in policy.place(tasks, managers, depth=0, now=0.0, environments=demand)]

    for seed in range(10):
        managers = [load("cold", A, C), load("warm"), load("both", A), load("other")]
        for each in managers[1:3]:
            each.environments[sci.key] = EnvironmentLoad(ready=2)
        assert placed(managers, seed) == ["both"]
        assert placed([load("x"), load("has", C), load("y")], seed) == ["has"]  # where none is warm
        managers = [load(name, slots=1) for name in "xyz"] + [load("has", C, slots=1)]
        assert sorted(placed(managers, seed, count=4)) == ["has", "x", "y", "z"]


def test_a_policy_of_ones_own_sees_contents_and_changes_none() -> None:
    class Own:
        def place(self, tasks: Any, managers: Any, **_: Any) -> Any:
            best = min(managers, key=lambda each: each.lacking_bytes(tasks[0]))
            best.count_down(tasks[0])
            return [(tasks[0], best.manager_id)]

    managers = [load("x"), load("has", A)]
    policy = OwnPolicy(Own(), WarmingAwarePolicy(random.Random(1)), name="own")
    assert place([task("t", A)], managers, policy=policy) == {"t": "has"}
    assert not policy.problem
    assert managers[1].contents == {A: 2}


TASKS = st.lists(st.lists(st.sampled_from([A, B, C]), max_size=3, unique=True), max_size=30)
NODES = st.lists(
    st.tuples(st.integers(0, 4), st.lists(st.sampled_from([A, B, C]), unique=True)), min_size=1, max_size=6
)


@given(TASKS, NODES, st.integers(0, 3), st.randoms())
def test_files_never_leave_a_slot_free_while_tasks_wait(
    files: list[list[FileContent]], nodes: list[tuple[int, list[FileContent]]], depth: int, rng: random.Random
) -> None:
    def managers() -> list[ManagerLoad]:
        return [load(f"m{n}", *has, slots=4, free=free) for n, (free, has) in enumerate(nodes)]

    loads = managers()
    tasks = [task(f"t{n}", *contents) for n, contents in enumerate(files)]
    placed = WarmingAwarePolicy(rng).place(tasks, loads, depth=depth, now=0.0)
    assert len(placed) == min(len(tasks), sum(each.room(depth) for each in managers()))
    free = sum(free for free, _ in nodes)
    before = {each.manager_id: each.free for each in managers()}
    counts = Counter(manager_id for _, manager_id in placed[:free])
    assert all(count <= before[name] for name, count in counts.items()), "a task waits behind others"


# -- loads -------------------------------------------------------------------------------------------------------------


def test_contents_are_forgotten_with_the_last_reason() -> None:
    managers = Managers()
    managers.add("m", slots=2, lifetime=None)
    managers.note("m", workers=2, idle_workers=2, problem="")
    manager = managers.members["m"].load
    first, second = task("a", A), task("b", A, B)
    for each in (first, second):
        manager.count_down(each)
        managers.assign("m", each)
    assert manager.contents == {A: 2, B: 1}
    managers.release("m", "b")
    assert manager.contents == {A: 1}
    manager.add_contents([A])  # its copy is there
    managers.release("m", "a")
    assert manager.contents == {A: 1}
    manager.remove_contents([A])
    assert manager.contents == {}


def test_the_largest_contents_of_a_task_decide_each_once() -> None:
    files = [NodeFile(f"{n}/f", f"{n % 90:064}", n % 90) for n in range(100)]
    contents = contents_of(files, submitter="ann")
    assert len(contents) <= 64
    assert contents[0] == FileContent("ann", f"{89:064}", 89)
    assert len(set(contents)) == len(contents)


# -- the agent ---------------------------------------------------------------------------------------------------------


def agent(*managers: str, slots: int = 1, depth: int = 0) -> CoreDriver:
    core = CoreDriver(
        AgentCore(
            endpoint_id="e",
            policy=WarmingAwarePolicy(random.Random(1)),
            slots_hint=2,
            prefetch=PrefetchPolicy(horizon_s=1.0, limit=depth),
            window=PrefetchPolicy(horizon_s=1.0, limit=0),
            max_window=100,
            staging=Staging(for_nodes=True),
        )
    )
    for name in managers:
        core.manager_registered(name, slots=slots)
        core.progress(name, Progress(workers=slots))
    core.opened()
    core.decide(now=0.0)
    return core


def submit(core: CoreDriver, task_id: str, *urls: str, **options: Any) -> Turn:
    """A task whose files are staged at once."""
    uses = [FileUse(url) for url in urls]
    core.run_tasks(
        wire.RunTasks(tasks=(spec(task_id, **options),), functions=(FUNCTION,)), [BODY, pack_files(uses, b"c")]
    )
    turn = core.decide(now=0.0)
    core.add(ev.TransfersReported([orders.Made(task_id)]))
    turn = core.decide(now=0.0)
    fetches = [
        each
        for action in turn.actions
        if isinstance(action, do.MoveFiles)
        for each in action.orders
        if isinstance(each, orders.Fetch)
    ]
    core.add(ev.TransfersReported([orders.Fetched(each.number, MB, SHA256, cached=True) for each in fetches]))
    return core.decide(now=0.0)


def report(core: CoreDriver, manager_id: str, **fields: Any) -> list[do.CopyFiles]:
    core.add(ev.CopiesReported(manager_id, FilesReported(**fields)))
    return [each for each in core.decide(now=5.0).actions if isinstance(each, do.CopyFiles)]


def test_managers_copy_a_file_from_one_another() -> None:
    core = agent("m", "n")
    tasks = [task for name in "ab" for task in submit(core, name, "s3://lab/x").orders.values()]
    assert len(tasks) == 2
    [[first], [second]] = tasks
    [file] = first.node_files
    assert (file.sha256, file.size_bytes, file.place.endswith("/x")) == (SHA256, MB, True)
    content = FileContent("", SHA256, MB)
    assert (first.contents, second.contents) == ((content,), (content,))
    assert report(core, "m", wanted=(content,)) == [do.CopyFiles("m", (CopyOrder("m", content, ENDPOINT),))]
    assert report(core, "n", wanted=(content,)) == [do.CopyFiles("n", (CopyOrder("n", content, "m"),))]
    assert report(core, "m", have=(content,)) == []
    core.manager_lost("m", "gone")
    core.decide(now=6.0)
    assert report(core, "n", failed=((content, False),)) == [do.CopyFiles("n", (CopyOrder("n", content, ENDPOINT),))]


def test_the_status_has_the_copies_of_all_nodes_and_the_tasks_without() -> None:
    core = agent("m", "n")
    assert core.core.node_copies() == {}
    report(core, "m", copies=2, copies_bytes=5, missed=1, problem="the disk is full")
    report(core, "n", copies=1, copies_bytes=7)
    report(core, "m", copies=1, copies_bytes=3, missed=2, problem="no byte\n has\x1b come")
    report(core, "n", copies=1, copies_bytes=7, missed=-1)
    assert core.core.node_copies() == {
        "node_copies_count": 2,
        "node_copies_bytes": 10,
        "tasks_without_node_copies": 3,
        "node_copies_problem": "no byte has come",
    }
    core.manager_lost("m", "gone")
    core.decide(now=6.0)
    assert core.core.node_copies()["node_copies_bytes"] == 7


def test_the_owners_contents_have_the_name_that_managers_give_them() -> None:
    core = agent("m")
    core.add(ev.OwnerKnown("ann"))
    [task] = submit(core, "a", "s3://lab/x", submitter="ann").orders["m"]
    assert task.contents == (FileContent("", SHA256, MB),)
    other = submit(agent("m"), "b", "s3://lab/x", submitter="bob").orders["m"]
    assert other[0].contents == (FileContent("bob", SHA256, MB),)


def test_while_a_long_task_waits_for_its_copy_no_other_takes_its_slot() -> None:
    """It would wait for the other one's end, although another node may be free before."""
    core = agent("m")
    submit(core, "a", "s3://lab/x")
    report(core, "m", wanted=(FileContent("", SHA256, MB),), waiting=(WaitingForFiles("a", 1, MB, 1, MB),))
    core.run_tasks(wire.RunTasks(tasks=(spec("b"),), functions=(FUNCTION,)), [BODY, b"p"])
    assert core.decide(now=0.0).orders == {}


def test_short_tasks_are_sent_to_a_node_that_waits_for_a_copy() -> None:
    core = agent("m", depth=4)
    core.run_tasks(wire.RunTasks(tasks=(spec("short"),), functions=(FUNCTION,)), [BODY, b"p"])
    core.decide(now=0.0)
    finished = Finished("short", wire.TaskState.SUCCESS, 0, None, 0.0, 0.001)
    core.progress("m", Progress(finished=(finished,), workers=1), [b"r"])
    core.decide(now=0.0)
    submit(core, "a", "s3://lab/x")
    core.run_tasks(wire.RunTasks(tasks=(spec("b"),), functions=(FUNCTION,)), [BODY, b"p"])
    assert [each.task_id for each in core.decide(now=0.0).orders["m"]] == ["b"]


def test_the_report_says_what_is_copied_to_nodes() -> None:
    core = agent("m")
    submit(core, "a", "s3://lab/x")
    report(core, "m", waiting=(WaitingForFiles("a", 2, 2 * MB, 1, MB), WaitingForFiles("unknown", 1, 1, 1, 1)))
    [row] = core.core.report().detail["staging"]
    assert row == {
        "task_id": "a",
        "state": "staging-in",
        "bytes": MB,
        "files": 2,
        "files_done": 1,
        "since": 5.0,
        "total": 2 * MB,
        "to_node": True,
    }
    report(core, "m")
    assert "staging" not in core.core.report().detail


def test_without_copies_on_nodes_tasks_have_none() -> None:
    core = agent("m")
    core.core._staging._for_nodes = False
    [task] = submit(core, "a", "s3://lab/x").orders["m"]
    assert (task.node_files, task.contents) == ((), ())


def test_what_an_unknown_manager_reports_is_nothing() -> None:
    core = agent("m")
    assert report(core, "gone", wanted=(A,)) == []
