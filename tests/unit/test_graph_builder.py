"""Building of graphs, what travels of them for a target, and their packed form."""

from __future__ import annotations

import functools
import itertools
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_common import graph_packing, graphs
from farcall_common.chains import chain
from farcall_common.errors import DeserializationError, PayloadTooLarge
from farcall_common.graph_builder import MAX_STAGES, Graph, Plan, plan_of
from farcall_common.graph_handles import StageHandle, StageList
from farcall_common.graph_packing import PackedPlan, check_callees, pack_plan
from farcall_common.graphs import COLLECT, Input, problem_of, unpack_graph
from farcall_common.payload import Serializer
from farcall_common.task_options import MAX_CALLEES, TaskOptions

_serializer = Serializer()


def load(path: str) -> str:
    return path


def resize(image: Any, size: int = 1) -> Any:
    return image, size


def merge(values: Any, **more: Any) -> Any:
    return values, more


def packed(plan: Plan, *, options: TaskOptions | None = None, identity: tuple[object, ...] = ()) -> PackedPlan:
    places = {id(function): at for at, function in enumerate(plan.functions)}
    return pack_plan(
        plan,
        callees=places,
        identity=identity,
        options=options or TaskOptions(),
        packer=_serializer,
        pack_call=lambda stage, _: (_serializer.pack_call(stage.args, stage.kwargs), None),
        spread=False,
    )


def unpacked(graph: Graph, target: object, **options: Any) -> graphs.Graph:
    plan = plan_of(graph, target)
    return unpack_graph(packed(plan, **options).payload, callees=len(plan.functions))


def test_max_stages_is_that_of_the_packed_form() -> None:
    assert MAX_STAGES == graphs.MAX_STAGES


# -- calls -------------------------------------------------------------------------------------------------------------


def test_a_stage_is_an_input_where_it_is_an_argument() -> None:
    graph = Graph()
    a, b = graph.call(load, "a"), graph.call(load, path="b")
    last = graph.call(merge, [a, {"x": (1, b)}], more={"k": [[a]]}, plain={"y": 2})
    found = unpacked(graph, last)
    assert [stage.name for stage in found.stages] == ["load", "load", "merge"]
    assert found.stages[2].inputs == (
        Input(0, (0, 0)),
        Input(1, (0, 1, "x", 1)),
        Input(0, ("more", "k", 0, 0)),
    )
    assert _serializer.unpack_call(found.calls[2]) == (
        ([None, {"x": (1, None)}],),
        {"more": {"k": [[None]]}, "plain": {"y": 2}},
    )
    assert (found.output, found.stages[2].function, found.stages[2].options) == (2, 1, None)


def test_the_lists_of_the_caller_are_not_changed() -> None:
    graph = Graph()
    given_list, given_dict = [graph.call(load, "a")], {"a": graph.call(load, "b")}
    graph.call(merge, given_list, more=given_dict)
    assert isinstance(given_list[0], StageHandle)
    assert isinstance(given_dict["a"], StageHandle)


def test_a_map_over_an_iterable_is_a_stage_for_each_element() -> None:
    graph = Graph()
    stages = graph.map(resize, [graph.call(load, "a"), "plain"], itertools.count(7))
    assert isinstance(stages, StageList)
    assert [each.number for each in stages] == [1, 2]
    assert len(stages[1:]) == 1
    found = unpacked(graph, graph.call(merge, stages))
    assert [stage.inputs for stage in found.stages[1:]] == [
        (Input(0, (0,)),),
        (),
        (Input(1, (0, 0)), Input(2, (0, 1))),
    ]
    assert _serializer.unpack_call(found.calls[2]) == (("plain", 8), {})


def test_a_map_over_a_stage_makes_its_calls_when_it_runs() -> None:
    graph = Graph()
    many = graph.map(resize, graph.call(load, "a"), graph.map(load, "bc"))
    assert isinstance(many, StageHandle)
    found = unpacked(graph, graph.call(merge, many))
    assert [stage.name for stage in found.stages] == ["load", "load", "load", "collect", "resize", "merge"]
    assert found.stages[3].function == COLLECT
    assert found.stages[4].inputs == (Input(0, (0,), each=True), Input(3, (1,), each=True))
    assert (found.stages[4].is_map, found.stages[5].inputs) == (True, (Input(4, (0,)),))


def test_a_map_over_a_stage_takes_no_list_of_constants() -> None:
    graph = Graph()
    with pytest.raises(TypeError, match=r"graph\.map: expected only stages, got list"):
        graph.map(resize, graph.call(load, "a"), [1, 2])
    with pytest.raises(TypeError, match="expected iterables or stages"):
        graph.map(load)
    with pytest.raises(ValueError, match=r"needs is an option of graph\.call"):
        graph.options(needs=1).map(load, "ab")


def test_each_function_of_a_chain_is_a_stage() -> None:
    graph = Graph()
    called = graph.call(chain(load, chain(resize, merge)), "a")
    mapped = graph.map(chain(resize, merge), called)
    found = unpacked(graph, mapped)
    assert [stage.name for stage in found.stages] == ["load", "resize", "merge", "resize", "merge"]
    assert [stage.inputs for stage in found.stages[1:]] == [
        (Input(0, (0,)),),
        (Input(1, (0,)),),
        (Input(2, (0,), each=True),),
        (Input(3, (0,), each=True),),
    ]


def test_a_chain_can_be_called() -> None:
    both = chain(load, resize)
    assert both("a") == ("a", 1)
    assert repr(both) == "chain(load, resize)"
    with pytest.raises(TypeError, match="chain: expected functions, got int"):
        chain(load, 3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="no function"):
        chain()


# -- options -----------------------------------------------------------------------------------------------------------


def test_options_are_those_of_the_task_and_the_stage_together() -> None:
    graph = Graph()
    view = graph.options(walltime_s=60, name="first").options(requirements=["polars"])
    a = view.call(load, "a")
    b = graph.options(retries=0, needs="any").call(merge, [a])
    task = TaskOptions.of(
        retries=3, max_attempts=2, result_serializers=("11",), environment={"type": "uv", "requirements": ["x"]}
    )
    found = unpacked(graph, b, options=task)
    first, second = found.stages
    assert first.name == "first"
    assert (second.name, second.needs) == ("merge", 1)
    assert first.options == TaskOptions.of(retries=3, max_attempts=2, walltime_s=60, requirements=["polars"])
    assert second.options == TaskOptions.of(max_attempts=2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"walltime": 5}, TypeError, "'walltime' is not an option of stages. Did you mean 'walltime_s'"),
        ({"container": "c"}, TypeError, r"'container' is not an option of stages\..*executor\.options\(container"),
        ({"environment": "c"}, TypeError, r"expected a dict, got str\..*executor\.options\(container"),
        ({"walltime_s": -1}, ValueError, "walltime_s"),
        ({"name": 3}, TypeError, "name: expected a text, got int"),
    ],
)
def test_options_that_a_stage_does_not_have(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Graph().options(**options)


@pytest.mark.parametrize(
    ("needs", "error", "message"),
    [
        (3, ValueError, r"stage 2 \(merge\): it needs 3 inputs, and has 2"),
        (0, ValueError, "needs is 0, and has to be at least 1"),
        ("most", TypeError, 'needs is \'most\'; it is "all", "any" or a number'),
        (True, TypeError, "needs is True"),
    ],
)
def test_needs_that_cannot_be(needs: Any, error: type[Exception], message: str) -> None:
    graph = Graph()
    pair = graph.map(load, "ab")
    with pytest.raises(error, match=message):
        graph.options(needs=needs).call(merge, pair)


def test_a_stage_with_a_map_among_its_inputs_may_need_more_than_it_has_stages() -> None:
    graph = Graph()
    many = graph.map(load, graph.call(load, "abc"))
    last = graph.options(needs=3).call(merge, many)
    assert unpacked(graph, last).stages[2].needs == 3
    with pytest.raises(ValueError, match="it needs 2 inputs, and has 1"):
        graph.options(needs=2).call(merge, last)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_stages_of_another_graph_are_refused() -> None:
    graph, other = Graph(), Graph()
    foreign = other.call(load, "a")
    for call in (
        lambda: graph.call(merge, [foreign]),
        lambda: graph.map(merge, foreign),
        lambda: graph.call(merge, StageList([foreign])),
    ):
        with pytest.raises(ValueError, match=r"stage 0 \(merge\): stage 0 \(load\) is a stage of another graph"):
            call()
    with pytest.raises(ValueError, match=r"the target, stage 0 \(load\), is a stage of another graph"):
        plan_of(graph, foreign)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="stage 0: expected a function, got str"):
        Graph().call("load", 1)  # type: ignore[arg-type]


def test_places_that_cannot_hold_a_value() -> None:
    graph = Graph()
    a = graph.call(load, "a")
    with pytest.raises(TypeError, match=r"stage 1 \(merge\): a stage is in a set, which has no places; use a list"):
        graph.call(merge, {a})
    with pytest.raises(TypeError, match=r"under the key \(1, 2\); such keys have to be texts or integers"):
        graph.call(merge, {(1, 2): [a]})
    with pytest.raises(TypeError, match="under the key True"):
        graph.call(merge, {True: a})
    graph.call(merge, {(1, 2): "no stage", "a": a})
    with pytest.raises(TypeError, match=r"graph\.map\(f, stage\) makes a call for each"):
        list(a)  # type: ignore[call-overload]


def test_arguments_by_name_are_refused_without_a_private_name() -> None:
    with pytest.raises(TypeError, match=r"^[A-Z]\w+\.map\(\) got an unexpected keyword argument 'x'"):
        Graph().map(merge, x=[1])  # type: ignore[call-overload]


def test_a_stage_that_comes_later_cannot_be_written() -> None:
    """A cycle: the list gets a stage after the call that has it."""
    graph = Graph()
    values: list[Any] = []
    first = graph.call(merge, values)
    values.append(graph.call(merge, first))
    with pytest.raises(Exception, match=r"stage 1 \(merge\) has no value before the graph runs"):
        packed(plan_of(graph, first))
    with pytest.raises(TypeError, match="has no value before the graph runs"):
        pickle.dumps(first)


@pytest.mark.parametrize("inputs", [(Input(1, (0,)),), (Input(0, (0,)),), (Input(2, (0,)),)])
def test_a_cycle_cannot_be_read(inputs: tuple[Input, ...]) -> None:
    stages = (graphs.Stage(0, inputs=inputs), graphs.Stage(0, inputs=(Input(0, (0,)),)))
    graph = graphs.Graph(stages, (b"", b""), 1)
    assert "does not come before it" in problem_of(graph, callees=1)
    with pytest.raises(DeserializationError, match="does not come before it"):
        unpack_graph(graphs.pack_graph(graph), callees=1)


def test_a_list_that_has_itself_is_left_to_the_serializer() -> None:
    values: list[Any] = [1]
    values.append(values)
    graph = Graph()
    [call] = unpacked(graph, graph.call(merge, values)).calls
    (read,), _ = _serializer.unpack_call(call)
    assert read[1] is read


def test_a_graph_has_at_most_so_many_stages() -> None:
    graph = Graph()
    with pytest.raises(ValueError, match="load would be stage 100000; a graph has at most 100,000 stages"):
        graph.map(load, itertools.repeat(1))
    assert len(graph) == MAX_STAGES


def test_a_graph_calls_at_most_so_many_functions() -> None:
    graph = Graph()
    last = graph.call(merge, graph.call(load, "a"))
    with pytest.raises(ValueError, match=r"stage 1 \(merge\) needs 1,001 different functions; a task calls"):
        check_callees(plan_of(graph, last), range(MAX_CALLEES + 1))


def test_a_graph_that_is_too_large_names_its_largest_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph()
    last = graph.call(merge, graph.call(load, "x" * 4_000), graph.call(load, "y" * 2_000))
    plan = plan_of(graph, last)

    def pack(*, max_bytes: int) -> None:
        pack_plan(
            plan,
            callees={id(function): 0 for function in plan.functions},
            identity=(),
            options=TaskOptions(),
            packer=None,
            pack_call=lambda stage, _: (_serializer.pack_call(stage.args, stage.kwargs), None),
            spread=False,
            max_bytes=max_bytes,
        )

    with pytest.raises(PayloadTooLarge, match=r"The arguments of stage 0 \(load\) take most"):
        pack(max_bytes=100)
    monkeypatch.setattr(graph_packing, "_MOST_CALL_BYTES", 5_000)  # which counts before compression
    with pytest.raises(PayloadTooLarge, match="the graph before compression takes"):
        pack(max_bytes=2**20)


def test_a_graph_with_too_many_options_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_HEAD_BYTES", 100)
    graph = Graph()
    with pytest.raises(PayloadTooLarge, match=r"the graph's 20 stages take .* MiB without their arguments"):
        packed(plan_of(graph, graph.options(walltime_s=5).map(load, "a" * 19)))


# -- targets -----------------------------------------------------------------------------------------------------------


def test_only_what_a_target_needs_travels() -> None:
    graph = Graph()
    a, _, c = graph.map(load, "abc")
    last = graph.call(merge, [c, a])
    graph.call(merge, last)
    plan = plan_of(graph, last)
    assert (plan.numbers, plan.output, plan.pruned_numbers) == ([0, 2, 3], 2, [0, 2, 3])
    found = unpacked(graph, last)
    assert found.stages[2].inputs == (Input(1, (0, 0)), Input(0, (0, 1)))
    assert plan.where(1) == "stage 2 (load)"


@pytest.mark.parametrize(
    ("target", "rebuilt"),
    [
        (lambda a, b: [a, b], None),
        (lambda a, b: StageList([a, b]), None),
        (lambda a, b: (a, b), (1, 2)),
        (lambda a, b: {"x": a, "y": [b, (a,)]}, {"x": 1, "y": [2, (1,)]}),
        (lambda a, b: [[a], b], [[1], 2]),
        (lambda a, b: [a, a], None),
    ],
)
def test_several_stages_as_a_target(target: Any, rebuilt: Any) -> None:
    graph = Graph()
    a, b = graph.map(load, "ab")
    plan = plan_of(graph, target(a, b))
    found = unpacked(graph, target(a, b))
    assert found.stages[found.output].function == COLLECT
    names = {0: 1, 1: 2}
    values = [names[each.stage] for each in found.stages[found.output].inputs]
    if rebuilt is None:
        assert plan.rebuild is None
    else:
        assert plan.rebuild is not None
        assert plan.rebuild(values) == rebuilt
    assert len(graph) == 2  # submitting it changes nothing


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (None, TypeError, "or dictionary of stages, got NoneType"),
        ([], ValueError, "the target names no stage"),
        ({}, ValueError, "the target names no stage"),
        ([1], TypeError, "expected a stage, or a list, tuple or dictionary of stages, got int"),
    ],
)
def test_targets_that_cannot_be(target: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan_of(Graph(), target)


# -- packed again ------------------------------------------------------------------------------------------------------


def test_a_graph_without_changes_is_packed_once() -> None:
    graph = Graph()
    last = graph.call(merge, [graph.call(load, "a")])
    first = packed(plan_of(graph, last))
    assert packed(plan_of(graph, last)) is first
    assert packed(plan_of(graph, last), options=TaskOptions(max_attempts=1)) is not first
    assert packed(plan_of(graph, last), identity=("other",)) is not first
    graph.call(merge, last)
    assert packed(plan_of(graph, last)) is first


def test_changed_arguments_are_packed_again() -> None:
    graph = Graph()
    settings = {"size": 1}
    last = graph.call(merge, [graph.call(load, "a")], settings=settings)
    first = packed(plan_of(graph, last))
    settings["size"] = 2
    found = unpack_graph(packed(plan_of(graph, last)).payload, callees=2)
    assert found.calls[1] != unpack_graph(first.payload, callees=2).calls[1]
    assert _serializer.unpack_call(found.calls[1])[1] == {"settings": {"size": 2}}


# -- any graph ---------------------------------------------------------------------------------------------------------

_leaves = (
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.text(max_size=3)
    | st.builds("stage {}".format, st.integers(0, 30))
)
_values = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.text(max_size=2) | st.integers(-3, 3), inner, max_size=3)
    ),
    max_leaves=6,
)
_named = st.dictionaries(st.sampled_from("pqr"), _values, max_size=2)
_calls = st.lists(st.tuples(st.lists(_values, max_size=3), _named), min_size=1)


def _with(value: Any, stages: list[Any]) -> Any:
    """A value with stages in the places of texts that name one."""
    if isinstance(value, str) and value.startswith("stage ") and stages:
        return stages[int(value[6:]) % len(stages)]
    if isinstance(value, list | tuple):
        return type(value)(_with(each, stages) for each in value)
    return {key: _with(each, stages) for key, each in value.items()} if isinstance(value, dict) else value


@given(_calls, st.data())
def test_any_graph_computes_what_its_calls_say(calls: list[Any], data: st.DataObject) -> None:
    graph, handles, values = Graph(), list[Any](), list[Any]()
    for number, (args, kwargs) in enumerate(calls):
        handles.append(graph.call(merge, *_with(args, handles), **_with(kwargs, handles)))
        values.append((number, tuple(_with(args, values)), _with(kwargs, values)))
    target = data.draw(st.integers(0, len(handles) - 1))
    found = unpacked(graph, handles[target])
    assert problem_of(found, callees=1) == ""

    @functools.cache
    def value(place: int) -> Any:
        args, kwargs = _serializer.unpack_call(found.calls[place])
        root: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        for each in found.stages[place].inputs:
            _put(root, each.path, value(each.stage))
        number = plan.numbers[place]
        return number, tuple(root[at] for at in range(len(args))), {name: root[name] for name in kwargs}

    plan = plan_of(graph, handles[target])
    assert repr(value(found.output)) == repr(values[target])
    reached = {each.stage for stage in found.stages for each in stage.inputs} | {found.output}
    assert reached == set(range(len(found.stages)))


def _put(above: Any, path: tuple[int | str, ...], value: Any) -> None:
    key, *rest = path
    if not rest:
        above[key] = value
    elif isinstance(above[key], tuple):
        inner = list(above[key])
        _put(inner, tuple(rest), value)
        above[key] = tuple(inner)
    else:
        _put(above[key], tuple(rest), value)


def test_a_stage_has_no_value_while_the_graph_is_written() -> None:
    stage: Any = Graph().call(load, "a")
    with pytest.raises(TypeError, match=r"stage 0 \(load\) is neither true nor false before the graph runs"):
        bool(stage)
    no_elements = r"stage 0 \(load\) has no elements before the graph runs: graph\.map"
    with pytest.raises(TypeError, match=no_elements):
        iter(stage)
    with pytest.raises(TypeError, match=no_elements):
        stage[0]
