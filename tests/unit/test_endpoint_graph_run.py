"""A graph that runs: readiness, values, failures and the end, with calls that end in any order."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farcall_common.graphs import COLLECT, MAX_CALLS, MAX_INPUTS, MAX_READS, Graph, Input, Stage, problem_of
from farcall_common.task_options import TaskOptions
from farcall_common.wire import TaskState
from farcall_endpoint.contracts.manager_worker import InputOrder
from farcall_endpoint.graphs.run import Call, GraphRun
from farcall_endpoint.graphs.values import GraphSettings, Memory
from farcall_endpoint.host.shared_memory import bytes_of

Value = str | list["Value"]


def graph_of(*stages: Stage, output: int = -1) -> Graph:
    graph = Graph(stages, (b"",) * len(stages), output % len(stages))
    assert not problem_of(graph, callees=1)
    return graph


def run_of(graph: Graph, **options: Any) -> GraphRun:
    memory = Memory(GraphSettings(), writers=2)
    run = GraphRun(graph, options=TaskOptions.of(**options), memory=memory, jitter=lambda: 0.0)
    run.start()
    return run


def take(run: GraphRun) -> list[Call]:
    """The calls that are ready now."""
    ready, run.ready = run.ready, []
    return [call for call in ready if run.is_out(call)]


def name_of(*parts: object) -> str:
    return hashlib.md5(repr(parts).encode()).hexdigest()[:8]


def packed(value: Value) -> bytes:
    return repr(value).encode()


def unpacked(data: object) -> Value:
    return eval(bytes_of(data))  # type: ignore[arg-type, no-any-return]


def called(stage: Stage, number: int, element: int, inputs: Sequence[tuple[str, Value]], elements: int | None) -> Value:
    """What the function of every stage returns: a name that depends on everything, or several of them."""
    if stage.function == COLLECT:
        return [value for _, value in inputs]
    if elements is not None:
        return [name_of(number, element, inputs, each) for each in range(elements)]
    return name_of(number, element, inputs)


class Player:
    """Makes the calls of a run, in an order of its own."""

    def __init__(self, run: GraphRun, *, elements: Sequence[int], chance: random.Random) -> None:
        self.run = run
        self.elements = elements
        self.chance = chance
        self.out: list[Call] = []
        self.made: list[Call] = []

    def pull(self) -> None:
        for call in take(self.run):
            assert call not in self.out
            self.out.append(call)
            self.made.append(call)
        for call in self.run.dropped:
            if call in self.out:
                self.out.remove(call)
        self.run.dropped.clear()

    def pick(self) -> Call:
        return self.out.pop(self.chance.randrange(len(self.out)))

    def inputs(self, call: Call) -> list[tuple[str, Value]]:
        orders, frames = self.run.inputs(call)
        found: list[tuple[str, Value]] = []
        at = 0
        for order in orders:
            parts = frames[at : at + len(order.parts)]
            at += len(order.parts)
            assert [len(part) for part in parts] == list(order.parts)
            if not order.missing:
                values = [unpacked(part) for part in parts]
                found.append((repr(order.path), values if order.is_list else values[0]))
        assert at == len(frames)
        return found

    def succeed(self, call: Call) -> None:
        stage = self.run.stages[call[0]]
        elements = self.elements[call[0]] if stage.is_spread else None
        value = called(stage.spec, *call, self.inputs(call), elements)
        self.run.succeeded(call, [packed(each) for each in value] if stage.is_spread else [packed(value)])

    def finish(self) -> None:
        while self.run.end is None:
            self.pull()
            assert self.out, "a graph that is not over waits for nothing"
            self.succeed(self.pick())
        assert self.run.memory.used_bytes == 0


@st.composite
def graphs(draw: st.DrawFn, *, with_needs: bool) -> tuple[Graph, list[int]]:
    count = draw(st.integers(1, 9))
    stages: list[Stage] = []
    for number in range(count):
        inputs: list[Input] = []
        collects = draw(st.integers(0, 5)) == 0
        for at in range(draw(st.integers(0, 3)) if number else 0):
            each = not collects and draw(st.integers(0, 2)) == 0
            inputs.append(Input(draw(st.integers(0, number - 1)), (at,), each))
        needs = draw(st.integers(0, 4)) if with_needs and inputs else 0
        stages.append(Stage(COLLECT if collects else 0, f"s{number}", tuple(inputs), needs))
    return graph_of(*stages), [draw(st.integers(0, 3)) for _ in range(count + 1)]


def reference(graph: Graph, elements: Sequence[int], failing: set[Call]) -> Value | None:
    """The value of the output, stage by stage; None if it cannot be."""
    needed = {graph.output}
    for number in range(graph.output, -1, -1):
        if number in needed:
            needed.update(each.stage for each in graph.stages[number].inputs)
    spread = {each.stage for number in needed for each in graph.stages[number].inputs if each.each}
    parts: list[list[Value | None] | None] = []

    def whole(number: int) -> Value | None:
        value = parts[number]
        if value is None or None in value:
            return None
        found = [each for each in value if each is not None]
        return found if graph.stages[number].is_map or number in spread else found[0]

    for number, stage in enumerate(graph.stages):
        sources = [parts[each.stage] for each in stage.inputs if each.each]
        if number not in needed or None in sources:
            parts.append(None)
            continue
        made: list[Value | None] = []
        for element in range(min((len(each or ()) for each in sources), default=1)):
            inputs = [
                (repr(each.path), (parts[each.stage] or ())[element] if each.each else whole(each.stage))
                for each in stage.inputs
            ]
            given = [(path, value) for path, value in inputs if value is not None]
            if len(given) < len(inputs) or (number, element) in failing:
                made.append(None)
            else:
                several = elements[number] if number in spread and not stage.is_map else None
                made.append(called(stage, number, element, given, several))
        if number in spread and not stage.is_map:
            [value] = made
            parts.append(None if value is None else list(value))
        else:
            parts.append(made)
    return whole(graph.output)


@settings(max_examples=100, deadline=None)
@given(graphs(with_needs=False), st.randoms(use_true_random=False))
def test_the_result_is_that_of_the_calls_one_by_one(made: tuple[Graph, list[int]], chance: random.Random) -> None:
    graph, elements = made
    player = Player(run_of(graph), elements=elements, chance=chance)
    player.finish()
    assert player.run.end is TaskState.SUCCESS
    assert unpacked(player.run.result) == reference(graph, elements, set())
    assert len(player.made) == len(set(player.made)), "a call is made once"


@settings(max_examples=100, deadline=None)
@given(graphs(with_needs=False), st.data(), st.randoms(use_true_random=False))
def test_a_graph_fails_when_a_call_fails_that_its_result_needs(
    made: tuple[Graph, list[int]], data: st.DataObject, chance: random.Random
) -> None:
    graph, elements = made[0], [max(1, each) for each in made[1]]
    functions = [number for number, stage in enumerate(graph.stages) if stage.function != COLLECT]
    failing: set[Call] = set()
    if functions:
        failing = set(data.draw(st.lists(st.tuples(st.sampled_from(functions), st.integers(0, 1)), max_size=2)))
    player = Player(run_of(graph), elements=elements, chance=chance)
    run = player.run
    while run.end is None:
        player.pull()
        assert player.out, "a graph that is not over waits for nothing"
        call = player.pick()
        if call in failing:
            run.failed(call, {"message": f"{call}"})
        else:
            player.succeed(call)
    expected = reference(graph, elements, failing)
    assert (run.end is TaskState.FAILED) == (expected is None)
    assert run.memory.used_bytes == 0
    if expected is None:
        assert run.failure is not None
        assert (run.failure.stage, run.failure.element) in failing
        assert any(state.state == "failed" for state in run.states())
    else:
        assert unpacked(run.result) == expected


@settings(max_examples=200, deadline=None)
@given(graphs(with_needs=True), st.booleans(), st.randoms(use_true_random=False))
def test_a_graph_ends_once_whatever_happens_to_its_calls(
    made: tuple[Graph, list[int]], idempotent: bool, chance: random.Random
) -> None:
    graph, elements = made
    run = run_of(graph, idempotent=idempotent, retries=1, retry_delay_s=0.0, max_attempts=2)
    player = Player(run, elements=elements, chance=chance)
    cancels_at = chance.choice([0, 1, 5, 1000])
    for turn in range(1000):
        assert all(uses >= 0 for stage in run.stages for uses in stage.uses)
        run.retry_due(1e9)
        player.pull()
        if run.end is not None:
            break
        if turn == cancels_at:
            run.stop(TaskState.CANCELLED, {"message": "cancelled"})
            continue
        assert player.out, "a graph that is not over waits for nothing"
        call = player.pick()
        stage = run.stages[call[0]]
        if stage.needs:
            given = sum(
                len(value) if run.stages[source.stage].is_list and isinstance(value, list) and not stage.is_map else 1
                for source, (_, value) in zip(_given(run, call), player.inputs(call), strict=True)
            )
            assert given >= stage.needs
        match chance.randrange(6):
            case 0:
                run.died(call, "killed")
            case 1:
                run.raised(call, {"message": "no"}, is_retried=chance.random() < 0.5)
            case _:
                player.succeed(call)
    assert run.end is not None
    assert run.memory.used_bytes == 0
    assert not player.out, "what runs at the end is cancelled"
    assert not run.ready
    if not idempotent:
        deaths = [call for call in set(player.made) if run.starts(call)[0] > 1]
        assert not deaths


def _given(run: GraphRun, call: Call) -> list[Input]:
    orders: tuple[InputOrder, ...] = run.inputs(call)[0]
    inputs = run.stages[call[0]].spec.inputs
    return [each for each, order in zip(inputs, orders, strict=True) if not order.missing]


def stages_of(run: GraphRun) -> list[str]:
    return [state.state for state in run.states()]


def test_a_call_that_died_is_made_again_with_the_same_inputs() -> None:
    run = run_of(graph_of(Stage(0, "a"), Stage(0, "b", (Input(0, (0,)),))))
    [call] = take(run)
    run.succeeded(call, [b"1"])
    [call] = take(run)
    before = run.inputs(call)
    run.died(call, "killed by SIGKILL")
    assert take(run) == [call]
    assert run.inputs(call) == before
    assert run.starts(call) == (1, 0)
    run.succeeded(call, [b"2"])
    assert (run.end, run.result) == (TaskState.SUCCESS, b"2")


def test_a_call_that_may_not_run_twice_is_not_made_again() -> None:
    run = run_of(graph_of(Stage(0, "a")), idempotent=False)
    [call] = take(run)
    run.died(call, "killed by SIGKILL")
    assert not take(run)
    assert run.end is TaskState.FAILED
    assert run.failure is not None
    assert run.failure.record["code"] == "WORKER_DIED"


def test_options_of_a_stage_are_those_of_its_calls() -> None:
    run = run_of(graph_of(Stage(0, "a", options=TaskOptions(idempotent=False))), idempotent=True)
    [call] = take(run)
    run.died(call, "killed")
    assert run.end is TaskState.FAILED


def test_a_retry_waits() -> None:
    run = run_of(graph_of(Stage(0, "a")), retries=2, retry_delay_s=4.0)
    [call] = take(run)
    run.raised(call, {"message": "no"}, is_retried=True)
    run.retry_due(10.0)
    assert run.next_deadline() == 14.0
    assert not take(run)
    run.retry_due(14.0)
    assert take(run) == [call]
    run.raised(call, {"message": "no"}, is_retried=True)
    run.retry_due(20.0)
    assert run.next_deadline() == 28.0
    run.retry_due(28.0)
    [call] = take(run)
    run.raised(call, {"message": "no"}, is_retried=True)
    assert run.end is TaskState.FAILED
    assert run.failure is not None
    assert run.failure.record == {"message": "no", "retries_used": 2}


def test_a_map_of_a_map_passes_on_each_element_by_itself() -> None:
    run = run_of(
        graph_of(
            Stage(0, "s"), Stage(0, "m", (Input(0, (0,), each=True),)), Stage(0, "n", (Input(1, (0,), each=True),))
        )
    )
    [source] = take(run)
    run.succeeded(source, [b"a", b"b"])
    first, second = take(run)
    run.succeeded(second, [b"B"])
    assert take(run) == [(2, 1)]
    assert run.memory.used_bytes == 2  # "a", which the first call reads, and "B"
    run.succeeded((2, 1), [b"BB"])
    run.succeeded(first, [b"A"])
    assert take(run) == [(2, 0)]
    run.succeeded((2, 0), [b"AA"])
    [last] = take(run)
    orders, frames = run.inputs(last)
    assert orders == (InputOrder((0,), (2,)), InputOrder((1,), (2,)))
    assert frames == (b"AA", b"BB")


def test_a_fan_in_starts_with_as_many_as_it_needs_and_the_rest_is_cancelled() -> None:
    run = run_of(
        graph_of(Stage(0, "s"), Stage(0, "m", (Input(0, (0,), each=True),)), Stage(0, "f", (Input(1, (0,)),), 2))
    )
    [source] = take(run)
    run.succeeded(source, [b"a", b"b", b"c", b"d"])
    calls = take(run)
    run.failed(calls[3], {"message": "no"})
    run.succeeded(calls[2], [b"C"])
    run.succeeded(calls[0], [b"A"])
    assert run.dropped == [(1, 1)]
    [last] = take(run)
    assert run.inputs(last) == ((InputOrder((0,), (1, 1), is_list=True),), (b"A", b"C"))
    run.succeeded(last, [b"AC"])
    assert run.end is TaskState.SUCCESS
    assert stages_of(run) == ["done", "failed", "done"]


def test_any_of_two_calls() -> None:
    run = run_of(graph_of(Stage(0, "a"), Stage(0, "b"), Stage(0, "f", (Input(0, (0,)), Input(1, (1,))), 1)))
    first, second = take(run)
    run.succeeded(second, [b"b"])
    assert run.dropped == [first]
    [last] = take(run)
    assert run.inputs(last)[0] == (InputOrder((0,), missing=True), InputOrder((1,), (1,)))
    assert stages_of(run) == ["skipped", "done", "waiting"]  # for a worker
    run.stages[2].note_start(1.0)
    assert stages_of(run) == ["skipped", "done", "running"]


def test_more_inputs_than_there_are_cannot_be_needed() -> None:
    run = run_of(
        graph_of(Stage(0, "s"), Stage(0, "m", (Input(0, (0,), each=True),)), Stage(0, "f", (Input(1, (0,)),), 3))
    )
    [source] = take(run)
    run.succeeded(source, [b"a", b"b"])
    assert run.end is TaskState.FAILED
    assert run.failure is not None
    assert run.failure.record["code"] == "TOO_FEW_INPUTS"
    assert run.where(run.failure) == "stage 2 (f)"


def test_what_the_result_does_not_need_is_not_called() -> None:
    run = run_of(graph_of(Stage(0, "a"), Stage(0, "b"), output=0))
    assert take(run) == [(0, 0)]
    run.succeeded((0, 0), [b"a"])
    assert stages_of(run) == ["done", "skipped"]


def test_a_failure_names_stage_and_element_and_leaves_small_values() -> None:
    run = run_of(graph_of(Stage(0, "a"), Stage(0, "s", (Input(0, (0,)),)), Stage(0, "m", (Input(1, (0,), each=True),))))
    run.succeeded(take(run)[0], [b"v"])
    run.succeeded(take(run)[0], [b"a", b"b"])
    _, second = take(run)
    run.failed(second, {"message": "no"})
    assert run.end is TaskState.FAILED
    assert run.failure is not None
    assert run.where(run.failure) == "stage 2 (m), element 1"
    assert run.small_values() == {0: b"v"}
    assert stages_of(run) == ["done", "done", "failed"]
    assert run.dropped == [(2, 0)]


@pytest.mark.parametrize(("count", "is_brief"), [(20, False), (21, True)])
def test_errors_of_many_stages_are_brief(count: int, is_brief: bool) -> None:
    run = run_of(
        graph_of(
            *(Stage(0, f"s{number}") for number in range(count + 1)),
            Stage(0, "f", tuple(Input(number, (number,)) for number in range(count + 1)), 1),
        )
    )
    record = {"code": "TASK_FAILED", "message": "m" * 9000, "traceback": "t" * 9000 + "!", "exception_data": "x" * 9000}
    for call in take(run)[:count]:
        run.failed(call, record)
    error = run.states()[0].error
    assert error is not None
    assert error["code"] == "TASK_FAILED"
    assert "exception_data" not in error
    assert ("traceback" in error) is not is_brief
    assert len(error["message"]) == (200 if is_brief else 4000)
    assert error.get("traceback", "!").endswith("!")


def test_maps_make_a_bounded_number_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farcall_endpoint.graphs.run.MAX_CALLS", 3)
    run = run_of(
        graph_of(
            Stage(0, "s"), Stage(0, "m", (Input(0, (0,), each=True),)), Stage(0, "n", (Input(1, (0,), each=True),))
        )
    )
    run.succeeded(take(run)[0], [b"a", b"b"])
    assert run.end is TaskState.FAILED
    assert run.failure is not None
    assert run.failure.record["code"] == "GRAPH_TOO_LARGE"


@pytest.mark.parametrize("needs", [0, 1])
def test_a_graph_may_be_deep(needs: int) -> None:
    depth = 20_000
    chain = [Stage(0, "a"), *(Stage(0, "b", (Input(number, (0,)),), needs) for number in range(depth))]
    run = run_of(graph_of(*chain))
    for _ in range(3):
        run.succeeded(take(run)[0], [b"v"])
    run.failed(take(run)[0], {"message": "no"})
    assert run.end is TaskState.FAILED
    assert run.memory.used_bytes == 0


def test_a_call_that_was_made_ahead_waits_until_it_has_run_for_a_moment() -> None:
    run = run_of(Graph((Stage(0, "a"), Stage(0, "b", (Input(0, (0,)),))), (b"", b""), 1))
    [first] = take(run)
    found = run.follower(first)
    assert found is not None
    run.begin_ahead(found[0])
    run.stages[0].note_start(1.0)
    assert [each.state for each in run.states()] == ["running", "waiting"]
    run.succeeded(first, [b"1"])
    assert [each.state for each in run.states()] == ["done", "waiting"]
    run.stages[1].note_start(2.0)
    assert [each.state for each in run.states()] == ["done", "running"]


EACH = Input(0, (0,), each=True)
WHOLE = Input(0, (1,))


@pytest.mark.parametrize(
    ("readers", "parts"),
    [
        ([Stage(0, "b", (EACH,) * 1000)], MAX_CALLS),
        ([Stage(0, "b", (EACH, WHOLE))], 10_000),
        ([Stage(0, "b", (EACH,)), Stage(0, "c", (Input(1, (0,)), *(WHOLE,) * 1000))], MAX_CALLS),
    ],
)
def test_a_small_graph_whose_calls_read_without_end_is_over_at_once(readers: list[Stage], parts: int) -> None:
    run = run_of(graph_of(Stage(0, "a"), *readers, Stage(0, "end", (Input(len(readers), (0,)),))))
    assert take(run) == [(0, 0)]
    run.succeeded((0, 0), [b"x"] * parts)
    assert (run.end, run.failure and run.failure.record["code"]) == (TaskState.FAILED, "GRAPH_TOO_LARGE")
    assert f"{MAX_READS:,}" in str(run.failure)
    assert run.memory.used_bytes == 0


def test_a_graph_has_so_many_inputs() -> None:
    stages = (Stage(0, "a"), Stage(0, "b", (WHOLE,) * (MAX_INPUTS + 1)))
    assert f"{MAX_INPUTS:,}" in problem_of(Graph(stages, (b"", b""), 1), callees=1)
