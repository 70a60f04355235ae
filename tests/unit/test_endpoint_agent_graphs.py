"""Graphs and callees at an agent: what it refuses, where it places them, what it keeps and shows of them."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import random
import shutil
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farcall_common import graphs as g
from farcall_common import wire
from farcall_common.environments import Environment
from farcall_common.errors import ErrorRecord
from farcall_common.event_log import UserBytes
from farcall_common.graphs import COLLECT, MAX_DEPTH, MAX_INPUTS, PREFIX, Graph, Input, Stage, StageState, pack_graph
from farcall_common.sealing import Answer, open_answer
from farcall_common.ssh_signatures import sign, statement
from farcall_common.task_options import Callee, TaskOptions
from farcall_common.wire import TaskState
from farcall_endpoint.agent.core import actions as do
from farcall_endpoint.agent.core import events as ev
from farcall_endpoint.agent.core.agent import AgentCore
from farcall_endpoint.agent.core.graphs import MOST_ENVIRONMENTS, GraphNeeds, bounded, read_graph
from farcall_endpoint.agent.core.running_graphs import MOST_REPORTED
from farcall_endpoint.agent.core.scheduling import POLICIES, SchedulingPolicy, round_robin
from farcall_endpoint.agent.core.tasks import OpenedCall, SpooledTask, TaskResult
from farcall_endpoint.agent.shell.sealing import seal_result
from farcall_endpoint.agent.shell.spool import Spool
from farcall_endpoint.app.status import lines
from farcall_endpoint.contracts.agent_manager import Died, EnvironmentStatus, Finished, GraphProgress, Limits, Progress
from farcall_endpoint.contracts.output import Printed
from farcall_endpoint.contracts.prefetch import PrefetchPolicy
from tests.support.agent import CoreDriver, Turn
from tests.unit.test_endpoint_agent_core import KEY, signatures

BODIES = [b"load", b"detect", b"merge"]
HASHES = [hashlib.sha256(body).hexdigest() for body in BODIES]
CALLEES = tuple(Callee(f"id-{body.decode()}", name) for body, name in zip(BODIES, HASHES, strict=True))
FUNCTIONS = tuple(
    wire.FunctionSpec(function_hash=name, name=body.decode(), body=index)
    for index, (body, name) in enumerate(zip(BODIES, HASHES, strict=True))
)
SCI = Environment(type="apptainer", location="/images/sci.sif", name="sci")
ML = Environment(type="venv", location="/envs/ml", name="ml")
SEALING_KEY = bytes(32)


def chain(*options: TaskOptions | None, names: Sequence[str] = ("load", "detect", "merge")) -> bytes:
    """A graph of stages one after the other, each with its options."""
    stages = [
        Stage(number % 3, names[number % 3], (Input(number - 1, (0,)),) if number else (), 0, own)
        for number, own in enumerate(options)
    ]
    return pack_graph(Graph(tuple(stages), (b"call",) * len(stages), len(stages) - 1))


def wide(width: int) -> bytes:
    """A graph with so many calls side by side, and one that gets all of their values."""
    inputs = tuple(Input(number, (0, number)) for number in range(width))
    stages = (*[Stage(0, "load")] * width, Stage(2, "merge", inputs))
    return pack_graph(Graph(stages, (b"call",) * (width + 1), width))


PLAIN = chain(None, None, None)
ONCE = chain(None, TaskOptions(idempotent=False))


def within(environment: Environment | None, callees: Sequence[Callee] = CALLEES) -> tuple[Callee, ...]:
    """Callees as the API writes them for a submit that names an environment."""
    return tuple(msgspec.structs.replace(each, environment=environment or each.environment) for each in callees)


def spec(
    task_id: str, callees: Sequence[Callee] = CALLEES, *, data_only: bool = False, **options: Any
) -> wire.TaskSpec:
    return wire.TaskSpec(
        task_id=task_id,
        attempt=1,
        function_id="id-merge",
        function_hash=HASHES[2],
        options=TaskOptions(callees=within(options.get("environment"), callees), **options),
        payload=3,
        data_only=data_only,
    )


def make_core(*, policy: SchedulingPolicy | None = None, **settings: Any) -> CoreDriver:
    none = PrefetchPolicy(horizon_s=1.0, limit=0)
    core = AgentCore(
        endpoint_id="e",
        policy=policy or round_robin(),
        slots_hint=4,
        prefetch=none,
        window=none,
        max_window=100,
        **settings,
    )
    return CoreDriver(core)


def add_manager(core: CoreDriver, name: str, *, slots: int = 4, **types: str) -> None:
    core.manager_registered(name, slots=slots, types=types)
    core.progress(name, Progress(workers=slots))


def connected(*names: str, **settings: Any) -> CoreDriver:
    core = make_core(**settings)
    for name in names or ("m",):
        add_manager(core, name)
    core.opened()
    core.decide(now=0.0)
    return core


def send(
    core: CoreDriver,
    *tasks: wire.TaskSpec,
    payload: bytes = PLAIN,
    functions: Sequence[wire.FunctionSpec] = FUNCTIONS,
    now: float = 0.0,
) -> Turn:
    core.run_tasks(wire.RunTasks(tasks=tasks, functions=tuple(functions)), [*BODIES, payload])
    return core.decide(now=now)


def error_of(turn: Turn) -> ErrorRecord:
    [ended] = turn.finished
    assert ended.result is not None
    assert ended.result.error is not None
    assert not turn.orders
    return ErrorRecord.from_json(ended.result.error)


def placed(turn: Turn) -> dict[str, str]:
    return {task.task_id: manager_id for manager_id, tasks in turn.orders.items() for task in tasks}


# -- acceptance --------------------------------------------------------------------------------------------------------


def test_a_graph_is_one_order_for_one_manager() -> None:
    turn = send(connected("m", "n"), spec("a"))
    assert len(placed(turn)) == 1
    [task] = turn.accepted
    assert task.graph == GraphNeeds(3, 1, once=False, walltime_s=None, environments=(None,))


def test_a_task_that_only_calls_functions_is_no_graph() -> None:
    turn = send(connected(), spec("a"), payload=b"a packed call")
    assert placed(turn) == {"a": "m"}
    assert turn.accepted[0].graph is None


def test_a_payload_that_looks_like_a_graph_is_none_without_callees() -> None:
    turn = send(connected(), spec("a", ()))
    assert turn.accepted[0].graph is None


@pytest.mark.parametrize("listed", ["id", "hash"])
def test_each_callee_must_be_on_the_list(listed: str) -> None:
    allowed = [callee.function_id if listed == "id" else callee.function_hash for callee in CALLEES]
    assert placed(send(connected(allowed_functions=allowed), spec("a"))) == {"a": "m"}
    for missing in (0, 1):  # the last is the task's own function
        core = connected(allowed_functions=allowed[:missing] + allowed[missing + 1 :])
        record = error_of(send(core, spec("a")))
        assert (record.code, CALLEES[missing].function_id in record.message) == ("FUNCTION_NOT_PERMITTED", True)
        assert CALLEES[missing].function_hash in record.message


def test_the_body_of_each_callee_must_be_here() -> None:
    record = error_of(send(connected(), spec("a"), functions=(FUNCTIONS[0], FUNCTIONS[2])))
    assert (record.code, HASHES[1][:12] in record.message) == ("FUNCTION_UNKNOWN", True)


def test_each_callee_must_be_signed_where_functions_are() -> None:
    signed = [
        msgspec.structs.replace(each, signature=sign(statement(each.name, each.function_hash), KEY))
        for each in FUNCTIONS
    ]
    assert placed(send(connected(signatures=signatures()), spec("a"), functions=signed)) == {"a": "m"}
    record = error_of(
        send(connected(signatures=signatures()), spec("a"), functions=[signed[0], FUNCTIONS[1], signed[2]])
    )
    assert (record.code, "detect" in record.message) == ("FUNCTION_NOT_SIGNED", True)


INVALID = Environment(type="apptainer", location="--bind /")
STAGE_OPTIONS: Mapping[str, tuple[TaskOptions, dict[str, Any], str]] = {
    "unresolved container": (TaskOptions(container="c"), {}, "CONTAINER_UNSUPPORTED"),
    "invalid environment": (TaskOptions(environment=INVALID), {}, "CONTAINER_UNSUPPORTED"),
    "environment where functions are restricted": (
        TaskOptions(environment=SCI),
        {"allowed_functions": HASHES},
        "FUNCTION_NOT_PERMITTED",
    ),
    "walltime": (TaskOptions(walltime_s=101.0), {"block_s": 100.0}, "LIMIT_INVALID"),
    "limit": (TaskOptions(resource_specification={"num_ranks": 0}), {}, "LIMIT_INVALID"),
    "unknown resource": (TaskOptions(resource_specification={"gpus": 2}), {}, "LIMIT_INVALID"),
    "callees": (TaskOptions(callees=CALLEES[:1]), {}, "GRAPH_INVALID"),
}


@pytest.mark.parametrize("case", STAGE_OPTIONS)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_stage_is_refused_as_a_task_is_and_named(case: str, *, is_late: bool) -> None:
    own, settings, code = STAGE_OPTIONS[case]
    core, payload = connected(**settings), chain(TaskOptions(), own, TaskOptions(walltime_s=1.0))
    if is_late:
        blob = wire.BlobLocation(blob_key="b", size_bytes=len(payload), sha256="0")
        late = msgspec.structs.replace(spec("a"), payload=None, payload_blob=blob)
        [task] = send(core, late).fetches
        core.fetched(task, payload)
        turn = core.decide(now=1.0)
    else:
        turn = send(core, spec("a"), payload=payload)
    record = error_of(turn)
    assert (record.code, record.message[:18]) == (code, "Stage 1 (detect): ")


def test_a_graph_that_is_fetched_is_run_with_what_is_known_of_it() -> None:
    core = connected()
    blob = wire.BlobLocation(blob_key="b", size_bytes=1, sha256="0")
    [task] = send(core, msgspec.structs.replace(spec("a"), payload=None, payload_blob=blob)).fetches
    assert task.graph is None
    core.fetched(task, chain(None, TaskOptions(idempotent=False)))
    turn = core.decide(now=1.0)
    assert placed(turn) == {"a": "m"}
    assert not task.is_idempotent
    assert turn.write.fetched == (task,)


def test_a_sealed_graph_that_is_refused_shows_no_name_of_a_stage() -> None:
    core = connected(seal=seal_result)
    payload = chain(TaskOptions(container="secret-image"), names=("secret-stage",) * 3)
    core.add(
        ev.TasksReceived((spec("a"),), UserBytes([payload]), FUNCTIONS, UserBytes(BODIES), [OpenedCall(SEALING_KEY)])
    )
    [ended] = core.decide(now=0.0).finished
    assert ended.result is not None
    assert ended.result.error is not None
    assert "secret" not in str({**ended.result.error, "sealed": ""})
    opened = open_answer(ended.result.error["sealed"].encode(), SEALING_KEY, part=Answer.ERROR, task_id="a")
    assert b"Stage 0 (secret-stage)" in bytes(opened)


def bomb() -> bytes:
    """Ten million inputs in a few bytes."""
    count = 10_000_000
    head = (
        b"\x94\xdd"
        + struct.pack(">I", 1)
        + b"\x93\x00\xa0\xdd"
        + struct.pack(">I", count)
        + b"\x92\x00\x91\x00" * count
    )
    return framed(head + b"\x90\x00\xc2")


def framed(head: bytes) -> bytes:
    return PREFIX + base64.b64encode(zlib.compress(struct.pack("<I", len(head)) + head))


DEEP = framed(
    b"\x94\x91\x95\x00\xa0\x90\x00\x81\xb6resource_specification\x81\xa1a" + b"\x91" * 5000 + b"\xc0\x91\x00\x00\xc2"
)


@pytest.mark.parametrize(
    "payload",
    [
        PREFIX,
        PREFIX + b"\xff\xfe",
        PREFIX + b"AAAA",
        PLAIN[:-8],
        framed(b""),
        framed(b"\x94\x90\x90\x00\xc2"),
        pack_graph(Graph((Stage(3),), (b"",), 0)),
        pack_graph(Graph((Stage(0),), (b"",), 1)),
        pack_graph(Graph((Stage(0, inputs=(Input(0, (0,)),)),), (b"",), 0)),
        pack_graph(Graph((Stage(0, options=TaskOptions(environment=SCI)),), (b"", b""), 0)),
        DEEP,
        framed(b"\x93\x91\x92\x00\xa1a\xdd" + struct.pack(">I", 5_000_000) + bytes(5_000_000) + b"\x00"),
        pack_graph(Graph((Stage(0), Stage(0, inputs=(Input(0, (0,) * (MAX_DEPTH + 1)),))), (b"", b""), 1)),
        pack_graph(Graph((Stage(0), Stage(0, inputs=(Input(0, (0,)),) * (MAX_INPUTS + 1))), (b"", b""), 1)),
    ],
    ids=range(14),
)
def test_a_hostile_graph_fails_its_task_with_a_sentence(payload: bytes) -> None:
    record = error_of(send(connected(), spec("a"), payload=payload))
    assert record.code == "GRAPH_INVALID"
    assert 20 < len(record.message) <= 1100
    assert record.message.isprintable()


def test_a_small_payload_does_not_become_large_in_memory() -> None:
    payload = bomb()
    assert len(payload) < 100_000
    assert "more than" in error_of(send(connected(), spec("a"), payload=payload)).message


@given(st.binary(max_size=400), st.booleans())
@settings(max_examples=200)
def test_no_payload_raises(content: bytes, is_framed: bool) -> None:
    found = read_graph(framed(content) if is_framed else PREFIX + content, TaskOptions(callees=CALLEES))
    assert isinstance(found, ErrorRecord | GraphNeeds)


_KINDS: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=20,
)


@given(st.lists(_KINDS, max_size=6), _KINDS, _KINDS)
@settings(max_examples=200)
def test_no_stage_raises(stage: list[Any], sizes: Any, output: Any) -> None:
    head = msgspec.msgpack.encode([[stage], sizes, output, False])
    assert read_graph(framed(head), TaskOptions(callees=CALLEES)) is not None


@pytest.mark.parametrize("own", [None, TaskOptions(), TaskOptions(walltime_s=5.0)])
def test_a_stage_runs_in_the_environment_of_its_function_and_not_in_that_of_the_task(own: TaskOptions | None) -> None:
    callees = (CALLEES[0], *within(ML, CALLEES[1:2]), *within(SCI, CALLEES[2:]))
    found = read_graph(chain(own, own), TaskOptions(callees=callees, environment=SCI))
    assert isinstance(found, GraphNeeds)
    assert set(found.environments) == {None, ML}


def test_where_the_service_restricts_functions_a_stage_runs_in_the_environment_of_its_function() -> None:
    chosen = TaskOptions(environment=ML)
    callees = (CALLEES[0], *within(ML, CALLEES[1:2]), CALLEES[2])
    core = connected()
    assert placed(send(core, spec("a", data_only=True), payload=PLAIN)) == {"a": "m"}
    core = connected()
    add_manager(core, "n", venv="")
    send(core, spec("a", callees, data_only=True), payload=chain(None, chosen))
    task = core.core.task("a")
    assert task is not None
    assert task.result is None
    for payload in (chain(chosen), chain(None, TaskOptions(environment=SCI))):
        record = error_of(send(connected(), spec("a", callees, data_only=True), payload=payload))
        assert record.code == "FUNCTION_NOT_PERMITTED"
        assert record.message.startswith("Stage ")
    assert not isinstance(read_graph(chain(chosen), TaskOptions(callees=CALLEES)), ErrorRecord)


@pytest.mark.parametrize(
    ("environment", "settings", "code"),
    [(SCI, {"allowed_functions": HASHES}, "FUNCTION_NOT_PERMITTED"), (INVALID, {}, "CONTAINER_UNSUPPORTED")],
)
def test_an_environment_of_a_callee_is_refused_as_that_of_a_task(
    environment: Environment, settings: dict[str, Any], code: str
) -> None:
    callees = (*within(environment, CALLEES[:1]), *CALLEES[1:])
    assert error_of(send(connected(**settings), spec("a", callees))).code == code


def test_names_are_cut_and_on_one_line() -> None:
    name = "a\nb" + "x" * 10_000
    record = error_of(send(connected(), spec("a"), payload=chain(TaskOptions(container="c" * 5000), names=(name,) * 3)))
    assert record.message.startswith("Stage 0 (a bxxx")
    assert len(record.message) < 1100


def test_a_graph_has_few_environments() -> None:
    def options(count: int) -> list[TaskOptions]:
        return [TaskOptions(environment=Environment(type="venv", location=f"/e/{n}")) for n in range(count)]

    assert isinstance(read_graph(chain(*options(MOST_ENVIRONMENTS)), TaskOptions(callees=CALLEES)), GraphNeeds)
    record = read_graph(chain(*options(MOST_ENVIRONMENTS + 1)), TaskOptions(callees=CALLEES))
    assert isinstance(record, ErrorRecord)
    assert "more than 20 environments" in record.message


def test_what_is_known_of_a_graph() -> None:
    own, free = TaskOptions(walltime_s=5.0, environment=ML), TaskOptions(walltime_s=2.0)
    stages = (
        Stage(0, "a", options=free),
        Stage(1, "b", (Input(0, (0,)),), options=own),
        Stage(1, "c", (Input(0, (0,)),), options=msgspec.structs.replace(own, walltime_s=9.0)),
        Stage(COLLECT, "", (Input(1, (0,)), Input(2, (1,)))),
    )
    payload = pack_graph(Graph(stages, (b"",) * 4, 3))
    task = TaskOptions(callees=within(SCI), environment=SCI)
    found = read_graph(payload, task)
    assert isinstance(found, GraphNeeds)
    assert (found.stages, found.width, found.once, found.walltime_s) == (4, 2, False, 9.0)
    assert found.environments == (ML, SCI), "a stage that names none has that of its function"
    assert [each.label for each in found.options] == ["Stage 0 (a)", "Stage 1 (b)", "Stage 2 (c)"]
    limited = read_graph(payload, msgspec.structs.replace(task, walltime_s=7.0))
    assert isinstance(limited, GraphNeeds)
    assert limited.walltime_s == 7.0, "the task's limit is that of the whole graph"
    mapped = pack_graph(Graph((Stage(0), Stage(1, "", (Input(0, (0,), each=True),))), (b"", b""), 1))
    assert read_graph(mapped, task) == GraphNeeds(2, g.MAX_CALLS, once=False, walltime_s=None, environments=(SCI,))


# -- placement ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("environment", [None, SCI])
def test_two_graphs_go_to_two_managers(name: str, environment: Environment | None) -> None:
    for seed in range(5):
        core = make_core(policy=POLICIES[name](random.Random(seed)))
        for manager_id in ("m", "n"):
            add_manager(core, manager_id, apptainer="")
            statuses = () if environment is None else (EnvironmentStatus(environment.key, "sci", "apptainer", warm=4),)
            core.progress(manager_id, Progress(workers=4, environments=statuses))
        core.opened()
        turn = send(core, spec("a", environment=environment), spec("b", environment=environment), payload=wide(9))
        assert sorted(placed(turn).values()) == ["m", "n"]


def test_other_tasks_get_the_slots_that_no_graph_can_use_first_and_then_those() -> None:
    core = connected("m", "n")
    [graph_at] = placed(send(core, spec("a"), payload=wide(9))).values()
    other = {"m": "n", "n": "m"}[graph_at]
    tasks = [msgspec.structs.replace(spec(f"t{number}"), options=TaskOptions()) for number in range(6)]
    found = placed(send(core, *tasks, payload=b"a call"))
    assert [found[f"t{number}"] for number in range(6)] == [other] * 4 + [graph_at] * 2


def test_a_task_that_may_not_run_twice_does_not_wait_behind_the_calls_of_a_graph() -> None:
    core = connected("m")
    send(core, spec("a"), payload=wide(9))
    once = msgspec.structs.replace(spec("once"), options=TaskOptions(idempotent=False))
    often = msgspec.structs.replace(spec("often"), options=TaskOptions())
    assert placed(send(core, once, often, payload=b"a call")) == {"often": "m"}
    core.progress("m", Progress(workers=4, finished=(Finished("a", TaskState.SUCCESS, 0),)), [b"r"])
    assert placed(core.decide(now=1.0)) == {"once": "m"}


def test_the_slots_of_a_graph_are_counted_back_at_its_end() -> None:
    core = connected("m")
    for number in range(3):
        assert placed(send(core, spec(f"a{number}"), payload=wide(9))) == {f"a{number}": "m"}
        ahead = core.core._managers.members["m"].load.ahead
        core.progress("m", Progress(workers=4, finished=(Finished(f"a{number}", TaskState.SUCCESS, 0),)), [b"r"])
        core.decide(now=1.0)
        assert (ahead, core.core._managers.members["m"].load.ahead) == (3, 0)


_STEPS = st.lists(
    st.tuples(st.sampled_from(["graph", "plain", "once", "end", "lose", "workers"]), st.integers(0, 9)), max_size=40
)


@given(_STEPS, st.sampled_from(sorted(POLICIES)))
@settings(max_examples=100)
def test_slots_are_counted_right_whatever_happens(steps: list[tuple[str, int]], policy: str) -> None:
    core = make_core(policy=POLICIES[policy](random.Random(1)))
    core.opened()
    add_manager(core, "m0")
    add_manager(core, "m1", slots=2)
    members = core.core._managers.members
    for number, (what, value) in enumerate(steps):
        name = f"t{number}"
        match what:
            case "graph" | "plain":
                payload = wide(value + 1) if what == "graph" else b"a call"
                core.run_tasks(wire.RunTasks(tasks=(spec(name),), functions=FUNCTIONS), [*BODIES, payload])
            case "once":
                core.run_tasks(wire.RunTasks(tasks=(spec(name),), functions=FUNCTIONS), [*BODIES, ONCE])
            case "end":
                for manager_id, member in members.items():
                    ended = [Finished(each, TaskState.SUCCESS, 0) for each in list(member.outstanding)[: value % 3]]
                    core.progress(manager_id, Progress(workers=member.workers, finished=tuple(ended)), [b"r"])
            case "lose" if value < len(members):
                core.manager_lost(list(members)[value], "gone")
                add_manager(core, f"n{number}")
            case "workers" if value < len(members):
                core.progress(list(members)[value], Progress(workers=value % 4 + 1))
        core.decide(now=float(number))
        for member in members.values():
            assert member.load.free == member.workers - len(member.outstanding)
            assert member.load.ahead == sum(member.ahead.values()) >= 0
            assert member.ahead.keys() <= member.outstanding.keys()


def test_a_graph_asks_for_the_slots_that_it_can_use() -> None:
    core = connected("m")
    send(core, spec("a"), spec("b"), payload=wide(3))
    assert core.demand().tasks == 6
    core.cancel(["a"])
    core.progress("m", Progress(workers=4, finished=(Finished("a", TaskState.CANCELLED),)))
    core.decide(now=1.0)
    assert core.demand().tasks == 3
    core.recorded([wire.TaskRef(task_id="b", attempt=1)])
    core.decide(now=2.0)
    assert core.demand().tasks == 0


MIXED = chain(TaskOptions(environment=SCI), TaskOptions(environment=SCI), TaskOptions(environment=ML))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_graph_goes_where_all_of_its_environments_run(name: str) -> None:
    core = make_core(policy=POLICIES[name](random.Random(1)))
    add_manager(core, "one", apptainer="")
    add_manager(core, "other", venv="")
    add_manager(core, "both", apptainer="", venv="")
    core.opened()
    turn = send(core, *(spec(str(number)) for number in range(3)), payload=MIXED)
    assert set(placed(turn).values()) == {"both"}
    assert not turn.finished


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_graph_that_no_node_runs_as_a_whole_goes_where_most_of_it_runs(name: str) -> None:
    core = make_core(policy=POLICIES[name](random.Random(1)))
    core.opened()
    add_manager(core, "other", venv="")
    add_manager(core, "one", apptainer="")
    assert placed(send(core, spec("a"), payload=MIXED)) == {"a": "one"}
    add_manager(core, "both", apptainer="", venv="")
    turn = send(core, spec("b"), payload=MIXED, now=2.0)
    assert placed(turn).get("b", "both") == "both", "or it waits for a place there"
    assert not turn.finished


def test_a_graph_that_all_nodes_together_cannot_run_is_refused_with_its_environments() -> None:
    core = make_core()
    core.opened()
    assert not send(core, spec("a"), payload=MIXED).finished, "there may be a node that does"
    add_manager(core, "one", apptainer="")
    record = error_of(core.decide(now=1.0))
    assert record.code == "CONTAINER_UNSUPPORTED"
    assert "the environments sci, ml" in record.message


def test_a_graph_is_placed_by_the_environment_of_most_stages() -> None:
    core = make_core(policy=POLICIES["warming-aware"](random.Random(1)))
    for name, warm in (("m", ML), ("n", SCI)):
        add_manager(core, name, apptainer="", venv="")
        core.progress(name, Progress(workers=4, environments=(EnvironmentStatus(warm.key, "", warm.type, warm=2),)))
    core.opened()
    assert placed(send(core, spec("a"), payload=MIXED)) == {"a": "n"}


def test_a_graph_with_several_images_is_refused_where_each_node_runs_one() -> None:
    images = [TaskOptions(environment=Environment(type="docker", location=f"python:{minor}")) for minor in ("a", "b")]
    core = connected(image_check=lambda *_: "")
    assert "several images" in error_of(send(core, spec("a"), payload=chain(*images))).message
    core = connected(image_check=lambda environment, _: f"not {environment.location}")
    assert "not python:a" in error_of(send(core, spec("b"), payload=chain(images[0]))).message


# -- ends and restarts -------------------------------------------------------------------------------------------------


def test_a_graph_with_a_stage_that_may_not_run_twice_is_lost_with_its_manager() -> None:
    core = connected("m", "n")
    send(core, spec("once"), payload=ONCE)
    send(core, spec("often"))
    for name in ("m", "n"):
        core.manager_lost(name, "gone")
    turn = core.decide(now=1.0)
    [lost] = turn.finished
    assert (lost.task_id, lost.result and lost.result.state) == ("once", TaskState.LOST)
    add_manager(core, "new")
    assert placed(core.decide(now=2.0)) == {"often": "new"}


def test_the_loss_of_a_manager_counts_as_an_attempt() -> None:
    core = connected()
    send(core, spec("a", max_attempts=2))
    for name in ("m", "n"):
        core.manager_lost(name, "gone")
        add_manager(core, "n")
        turn = core.decide(now=1.0)
    assert error_of(turn).code == "WORKER_DIED"


@pytest.mark.parametrize(("payload", "is_retried"), [(PLAIN, True), (PLAIN, False), (ONCE, True)])
def test_a_graph_is_retried_as_a_whole_only_if_it_was_too_slow_and_may_run_twice(
    payload: bytes, *, is_retried: bool
) -> None:
    core = connected()
    [task] = send(core, spec("a", retries=5), payload=payload).accepted
    report(core, "a", now=1.0)
    error = {"code": "WALLTIME_EXCEEDED" if is_retried else "TASK_FAILED", "message": "", "fault": "user_code"}
    core.progress("m", Progress(finished=(Finished("a", TaskState.FAILED, None, error, is_retried=is_retried),)))
    turn = core.decide(now=1.0)
    assert (task.result is None) is (payload is PLAIN and is_retried)
    assert bool(turn.finished) is (task.result is not None)
    assert "graphs" not in core.report().detail


def test_a_graph_is_cancelled_as_a_whole() -> None:
    core = connected()
    send(core, spec("a"))
    core.cancel(["a"])
    assert core.decide(now=1.0).cancels == {"m": ["a"]}
    core.progress("m", Progress(workers=4, died=(Died("a", "killed"),)))
    [ended] = core.decide(now=2.0).finished
    assert ended.result is not None
    assert ended.result.state is TaskState.CANCELLED


def test_the_output_of_a_graph_is_kept_as_that_of_a_task() -> None:
    core = connected()
    send(core, spec("a"))
    finished = Finished("a", TaskState.SUCCESS, 0, printed=Printed(27, 0, 27, 0), output=1)
    core.progress("m", Progress(workers=4, finished=(finished,)), [b"r", b"--- stage load, attempt 1\n"])
    [kept] = [action for action in core.decide(now=1.0).actions if isinstance(action, do.KeepOutput)]
    assert [(each.task_id, each.attempt, each.tails) for each in kept.outputs] == [
        ("a", 1, b"--- stage load, attempt 1\n")
    ]


def perform(spool: Spool, turn: Turn, core: CoreDriver) -> None:
    spool.commit(turn.write)
    core.written(now=0.0)


def after_kill(path: Path, home: Path) -> Path:
    """What a spool is on disk, as a process finds it that starts after the one that had it was killed."""
    home.mkdir()
    for file in path.parent.glob("spool*"):
        (shutil.copytree if file.is_dir() else shutil.copy)(file, home / file.name)
    return home / path.name


@pytest.mark.parametrize("payload", [PLAIN, ONCE, chain(*[None] * 30_000)], ids=["small", "once", "large"])
def test_after_a_kill_a_graph_runs_again_with_its_callees_if_it_may(tmp_path: Path, payload: bytes) -> None:
    path = tmp_path / "spool.sqlite3"
    with contextlib.closing(Spool(path)) as spool:
        core = connected()
        perform(spool, turn := send(core, spec("a"), payload=payload), core)
        [needs] = [task.graph for task in turn.accepted]
        copy = after_kill(path, tmp_path / "later")
    with contextlib.closing(Spool(copy)) as spool:
        tasks, functions = spool.load()
        assert functions == set(HASHES)
        assert [task.graph for task in tasks] == [needs]
        again = connected()
        again.restore(tasks, sorted(functions))
        turn = again.decide(now=1.0)
        if payload is ONCE:
            [lost] = turn.finished
            assert lost.result is not None
            assert lost.result.state is TaskState.LOST
        else:
            assert placed(turn) == {"a": "m"}
            perform(spool, turn, again)
            assert [spool.function(each) for each in HASHES] == BODIES
            again.progress("m", Progress(workers=4, finished=(Finished("a", TaskState.SUCCESS, 0),)), [b"r"])
            turn = again.decide(now=2.0)
        perform(spool, turn, again)
        assert not spool._database.execute("SELECT * FROM graphs").fetchall()
    with contextlib.closing(Spool(copy)) as spool:
        assert spool.load()[1] == set(), "no task needs a function any more"


@pytest.mark.parametrize("row", [b"\xc1", b"", b"\x93\x01\x01\x01", "text"])
@pytest.mark.parametrize("payload", [PLAIN, ONCE, chain(*[None] * 30_000)], ids=["small", "once", "large"])
def test_a_damaged_row_of_a_graph_is_read_again_from_its_arguments(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, payload: bytes, row: bytes | str
) -> None:
    with contextlib.closing(Spool(tmp_path / "spool.sqlite3")) as spool:
        core = connected()
        spool.commit(send(core, spec("a"), payload=payload).write)
        [task] = core.core._held.by_id.values()
        spool._database.execute("UPDATE graphs SET needs = ?", (row,))
        assert [each.graph for each in spool.load()[0]] == [task.graph]
        [record] = caplog.records
        assert "the graph of task a" in record.message


@pytest.mark.parametrize(("is_started", "state"), [(True, TaskState.LOST), (False, None)])
def test_a_graph_of_which_all_is_damaged_does_not_run_twice(
    tmp_path: Path, is_started: bool, state: TaskState | None
) -> None:
    with contextlib.closing(Spool(tmp_path / "spool.sqlite3")) as spool:
        spool.commit(send(connected() if is_started else make_core(), spec("a")).write)
        spool._database.execute("UPDATE graphs SET needs = x'c1'")
        spool._database.execute("UPDATE bodies SET body = ?", (PLAIN[:20],))
        core = connected()
        core.restore(spool.load()[0], HASHES)
        turn = core.decide(now=1.0)
        assert [task.result.state for task in turn.finished if task.result] == ([state] if state else [])
        assert placed(turn) == {}, "one that has not started waits for the word of the cloud"
        core.opened()
        assert placed(core.decide(now=2.0)) == ({} if is_started else {"a": "m"})


def test_the_start_of_a_graph_that_may_not_run_twice_is_flushed(tmp_path: Path) -> None:
    with contextlib.closing(Spool(tmp_path / "spool.sqlite3")) as spool:
        core = connected()
        perform(spool, send(core, spec("often")), core)
        assert spool.generation == 0
        perform(spool, send(core, spec("once"), payload=ONCE), core)
        assert spool.generation == 1


def test_what_is_known_of_a_fetched_graph_is_in_the_spool_and_is_dropped_with_its_task(tmp_path: Path) -> None:
    path = tmp_path / "spool.sqlite3"
    with contextlib.closing(Spool(path)) as spool:
        core = connected()
        blob = wire.BlobLocation(blob_key="b", size_bytes=1, sha256="0")
        perform(spool, turn := send(core, msgspec.structs.replace(spec("a"), payload=None, payload_blob=blob)), core)
        core.fetched(turn.fetches[0], ONCE)
        perform(spool, core.decide(now=1.0), core)
    with contextlib.closing(Spool(path)) as spool:
        [task] = spool.load()[0]
        assert task.graph is not None
        assert task.graph.once
        core.recorded([wire.TaskRef(task_id="a", attempt=1)])
        perform(spool, core.decide(now=2.0), core)
        assert not spool._database.execute("SELECT * FROM graphs").fetchall()


def test_a_graph_that_the_endpoint_does_not_permit_any_more_is_refused_at_the_start() -> None:
    [task] = send(connected(), spec("a"), payload=MIXED).accepted
    core = connected(allowed_functions=HASHES[2:])
    core.restore([SpooledTask(1, task.spec, 1, 0.0, graph=task.graph)], HASHES)
    assert error_of(core.decide(now=1.0)).code == "FUNCTION_NOT_PERMITTED"
    core = connected(allowed_functions=HASHES)
    core.restore([SpooledTask(1, task.spec, 1, 0.0, graph=task.graph)], HASHES)
    assert error_of(core.decide(now=1.0)).message.startswith("Stage 0 (load): ")


def test_a_graph_of_which_nothing_is_known_is_fetched_when_the_spool_is_confirmed() -> None:
    core = make_core()
    core.restore([SpooledTask(1, spec("a"), 1, 0.0, is_fetched=False)], HASHES)
    assert not core.decide(now=0.0).fetches
    core.opened()
    assert [task.task_id for task in core.decide(now=1.0).fetches] == ["a"]


# -- what is shown -----------------------------------------------------------------------------------------------------


def states(count: int = 3, **fields: Any) -> tuple[StageState, ...]:
    return tuple(StageState(number, f"stage{number}", "running", **fields) for number in range(count))


def report(core: CoreDriver, *tasks: str, now: float, count: int = 3, manager: str = "m") -> Any:
    core.progress(manager, Progress(workers=4, graphs=tuple(GraphProgress(name, states(count)) for name in tasks)))
    core.decide(now=now)
    return core.report().detail.get("graphs", [])


def test_running_graphs_are_reported_at_most_each_second_until_they_end() -> None:
    core = connected()
    send(core, spec("a"), spec("b"))
    assert "graphs" not in core.report().detail
    [row] = report(core, "a", now=1.0)
    assert (row["task_id"], row["running"], row["calls"], row["ended"]) == ("a", 3, 3, 0)
    assert row["stages"][1] == {"number": 1, "name": "stage1", "state": "running", "calls": 1, "ended": 0}
    assert len(report(core, "b", now=1.9)) == 1
    assert [row["task_id"] for row in report(core, now=2.0)] == ["a", "b"]
    shown = list(lines({"graphs": core.core.running_graphs()}, now=2.0))
    assert shown[0].split("\t") == ["graphs", "a", "0", "3", "0", "0", "3", "0", "0 stage0, 1 stage1, 2 stage2"]
    core.progress("m", Progress(workers=4, finished=(Finished("a", TaskState.SUCCESS, 0),)), [b"r"])
    core.decide(now=2.1)
    assert [row["task_id"] for row in core.report().detail["graphs"]] == ["b"]
    core.manager_lost("m", "gone")
    core.decide(now=2.2)
    assert "graphs" not in core.report().detail


def test_a_report_of_graphs_is_small() -> None:
    core = connected()
    tasks = [f"t{number}" for number in range(50)]
    for number in range(13):
        add_manager(core, f"n{number}")
    sent = placed(send(core, *map(spec, tasks)))
    for name, manager in sent.items():
        report(core, name, now=1.0, count=g.MAX_STATES, manager=manager)
    rows = report(core, now=5.0)
    assert len(rows) == MOST_REPORTED
    assert len(msgspec.msgpack.encode(rows)) < 20_000
    assert {row["running"] for row in rows} == {g.MAX_STATES}


def test_reports_of_tasks_that_a_manager_does_not_have_do_not_count() -> None:
    core = connected("m", "n")
    [manager] = placed(send(core, spec("a"))).values()
    assert not report(core, "a", "b", now=1.0, manager={"m": "n", "n": "m"}[manager])


def test_a_sealed_graph_shows_numbers_only() -> None:
    core = connected(seal=seal_result)
    core.add(
        ev.TasksReceived((spec("a"),), UserBytes([PLAIN]), FUNCTIONS, UserBytes(BODIES), [OpenedCall(SEALING_KEY)])
    )
    core.decide(now=0.0)
    error = {"code": "TASK_FAILED", "message": "stage0 hush"}
    core.progress("m", Progress(workers=4, graphs=(GraphProgress("a", states(error=error)),)))
    core.decide(now=1.0)
    assert core.report().detail["graphs"][0]["running"] == 3
    assert "stage0" not in str(core.report())
    assert "stage0" not in str(core.core.running_graphs())
    details = {
        "stages": msgspec.to_builtins(states(error=error, ended=1, run_s=0.5)),
        "values": {"0": "c3RhZ2Uw"},
        "stage_calls": 3,
        "stage_run_s": 1.5,
    }
    core.progress("m", Progress(workers=4, finished=(Finished("a", TaskState.SUCCESS, 0, details=details),)), [b"r"])
    [ended] = core.decide(now=2.0).finished
    assert ended.result is not None
    assert ended.result.details is not None
    numbers = {name: value for name, value in ended.result.details.items() if name != "sealed"}
    assert numbers == {"stage_calls": 3, "stage_run_s": 1.5}, "the usage is counted"
    opened = open_answer(ended.result.details["sealed"].encode(), SEALING_KEY, part=Answer.DETAILS, task_id="a")
    assert msgspec.json.decode(opened)["stages"][0]["name"] == "stage0"


def test_sealed_details_fit_what_the_cloud_keeps() -> None:
    [task] = send(connected(), spec("a")).accepted
    task.answer_key = SEALING_KEY
    error = {"code": "TASK_FAILED", "message": "m" * 500, "traceback": "t" * 4000}
    many = [*states(1000), StageState(1000, "last", "failed", error=error)]
    details = {"stages": msgspec.to_builtins(many), "values": {"0": "x" * 5000}}
    sealed = seal_result(task, TaskResult(TaskState.FAILED, details=details)).details
    assert sealed is not None
    assert len(sealed["sealed"]) < 64 * 1024
    opened = msgspec.json.decode(open_answer(sealed["sealed"].encode(), SEALING_KEY, part=Answer.DETAILS, task_id="a"))
    assert opened["stages"][-1]["name"] == "last"
    assert opened["stages"][-1]["error"] == {"code": "TASK_FAILED"}


def test_details_of_a_result_are_checked_and_cut() -> None:
    error = {"code": "TASK_FAILED", "message": "m" * 10**6, "traceback": "t" * 10**6, "other": "x", "hint": 5}
    stages = [
        msgspec.to_builtins(each)
        for each in (*states(5000, workers=tuple(range(1000))), StageState(1, "n" * 10**6, "failed", error=error))
    ]
    values = {str(number): "A" * 5000 for number in range(1000)} | {"x": "A", "1": "A" * 6000, "2": 7}
    found = bounded({"stdout_tail": "hi", "stages": stages[::-1], "values": values})
    assert found["stdout_tail"] == "hi"
    assert len(msgspec.msgpack.encode(found)) < 350_000
    assert len(found["stages"][-1]["workers"]) == 10
    assert sum(map(len, found["values"].values())) <= 88 * 1024
    first = next(each for each in found["stages"] if each["state"] == "failed")
    assert len(first["name"]) == 100
    assert set(first["error"]) <= {"code", "message", "traceback"}
    for wrong in ("text", [1], [{"number": "x"}], {"a": 1}, [{"number": 1, "name": "a", "state": "odd"}]):
        assert bounded({"stages": wrong, "values": [wrong]}) == {}
    plain = {"stages": [msgspec.to_builtins(StageState(0, "a", "done", run_s=0.5))], "values": {"0": "QQ=="}}
    assert bounded(plain) == plain


@given(_KINDS, _KINDS)
def test_no_details_raise(stages: Any, values: Any) -> None:
    assert set(bounded({"stages": stages, "values": values})) <= {"stages", "values"}


def test_a_result_has_its_stages() -> None:
    core = connected()
    send(core, spec("a"))
    details = {"stages": [msgspec.to_builtins(StageState(0, "load", "done"))], "values": {"0": "QQ=="}}
    core.progress("m", Progress(workers=4, finished=(Finished("a", TaskState.SUCCESS, 0, details=details),)), [b"r"])
    [ended] = core.decide(now=1.0).results
    assert ended.result is not None
    assert ended.result.details == details


def test_the_log_has_no_text_of_a_graph() -> None:
    private = Environment(type="uv", requirements=("hush",), name="x")
    secret = TaskOptions(
        resource_specification={"a": "hush"}, environment=Environment(type="docker", location="https://u:hush@r/i")
    )
    needs = read_graph(chain(TaskOptions(), secret, names=("hush",) * 3), TaskOptions(callees=CALLEES))
    assert isinstance(needs, GraphNeeds)
    assert private.requirements == ("hush",)
    error = {"code": "TASK_FAILED", "message": "hush"}
    named = (StageState(0, "hush", "failed", node="hush", error=error),)
    events: list[ev.Event] = [
        ev.TasksReceived((spec("a"),), UserBytes([b"hush"]), FUNCTIONS, UserBytes([b"hush"] * 3)),
        ev.PayloadFetched("a", 1, UserBytes([b"hush"])),
        ev.Restored([SpooledTask(1, spec("a"), 1, 0.0, graph=needs)], HASHES),
        ev.ManagerProgress("m", Progress(graphs=(GraphProgress("a", named),))),
    ]
    for event in events:
        logged = ev.for_log(event)
        assert "hush" not in repr(logged)
        assert b"hush" not in msgspec.json.encode(msgspec.to_builtins(logged[0], enc_hook=lambda each: each.sizes))


# -- limits ------------------------------------------------------------------------------------------------------------


def test_limits_hold_for_stages_and_a_node_that_is_the_container_starts_none() -> None:
    own = TaskOptions(walltime_s=100.0, environment=SCI, container="c")
    limited = Limits(60.0, 5, None, 7).applied_to(own)
    assert (limited.walltime_s, limited.memory_bytes, limited.output_bytes, limited.environment) == (60.0, 5, 7, SCI)
    inside = Limits(in_image=True).applied_to(own)
    assert (inside.walltime_s, inside.environment, inside.container) == (100.0, None, None)
