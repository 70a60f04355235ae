"""Graphs as an engine packs them. No worker is started."""

from __future__ import annotations

from typing import Any

import pytest

import farcall_endpoint
from farcall_common.errors import SerializationError
from farcall_common.graph_builder import plan_of
from farcall_common.graph_packing import task_options
from farcall_common.graphs import unpack_graph
from farcall_common.payload.functions import FunctionTable
from farcall_common.payload.native import load_call
from farcall_common.task_options import Callee, TaskOptions
from farcall_endpoint import Graph, chain
from farcall_endpoint.engine.graphs import EngineGraph, pack_for_engine


def double(number: float) -> float:
    return number * 2


def pair(first: object, second: object = None) -> tuple[object, object]:
    return first, second


def packed(graph: Graph, target: object, table: FunctionTable | None = None) -> EngineGraph:
    return pack_for_engine(
        plan_of(graph, target), table or FunctionTable(), TaskOptions(retries=1), spread=graph.spread
    )


def test_the_package_has_what_builds_graphs() -> None:
    assert sorted(farcall_endpoint.__all__) == ["Engine", "File", "Graph", "chain"]
    assert (farcall_endpoint.Graph, farcall_endpoint.chain) == (Graph, chain)
    with pytest.raises(AttributeError):
        _ = farcall_endpoint.Graphs


def test_arguments_are_native_and_functions_are_called_by_their_hash() -> None:
    graph = Graph(spread=True)
    last = graph.options(walltime_s=2).call(pair, (graph.call(double, 2.5), {1, 2}), second=double)
    found = packed(graph, last)
    read = unpack_graph(found.payload, callees=2)
    assert read.spread
    assert load_call(read.calls[0]) == ((2.5,), {})
    assert load_call(read.calls[1]) == (((None, {1, 2}),), {"second": double})
    assert read.stages[1].options == TaskOptions(retries=1, walltime_s=2)
    assert [each.name for each in found.functions] == ["double", "pair"]
    assert (found.function.name, found.callees) == ("pair", tuple(Callee("", each.hash) for each in found.functions))


def test_several_stages_begin_with_the_first_function() -> None:
    graph = Graph()
    found = packed(graph, list(graph.map(chain(double, pair), [1, 2])))
    assert found.function.name == "double"
    assert [each.name for each in unpack_graph(found.payload, callees=2).stages] == [*["double", "pair"] * 2, "collect"]


def test_a_graph_with_a_stage_that_may_not_run_twice_may_not_either() -> None:
    graph = Graph()
    once = graph.options(idempotent=False).call(double, 1.0)
    plan = plan_of(graph, graph.call(pair, once))
    assert not task_options(plan, TaskOptions()).idempotent
    found = unpack_graph(packed(graph, graph.call(pair, once)).payload, callees=2).stages
    assert [each.options and each.options.idempotent for each in found] == [False, True]
    assert task_options(plan_of(graph, graph.call(double, 1.0)), TaskOptions()).idempotent


def test_a_graph_is_packed_once() -> None:
    graph, table = Graph(), FunctionTable()
    last = graph.call(chain(double, pair), 1)
    assert packed(graph, last, table).payload is packed(graph, last, table).payload


@pytest.mark.parametrize(
    ("add", "error", "message"),
    [
        (
            lambda graph: graph.call(double, (each for each in "ab")),
            SerializationError,
            r"stage 0 \(double\): .*pickled",
        ),
        (
            lambda graph: graph.options(requirements=["polars"]).call(double, 1),
            TypeError,
            r"stage 0 \(double\): 'requirements' is not an option of stages in an engine",
        ),
    ],
)
def test_what_an_engine_cannot_run_names_its_stage(add: Any, error: type[Exception], message: str) -> None:
    graph = Graph()
    with pytest.raises(error, match=message):
        packed(graph, add(graph))
