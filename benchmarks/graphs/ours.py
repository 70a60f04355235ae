"""Graphs in an engine: the same experiments as on the peers."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import psutil

from benchmarks.graphs import functions
from benchmarks.graphs.measuring import (
    FAN_OUT,
    LOAD_S,
    NODES,
    PAUSE_S,
    PIECES,
    TIMEOUT_S,
    WORKERS,
    Counts,
    Figures,
    Results,
    application_figures,
    chain,
    chain_figures,
    cpu_s,
    expect,
    fan_out_figures,
    layers,
    layers_result,
    nested_figures,
    size_figures,
    text,
    words_result,
)
from farcall_endpoint import Engine, Graph


def measure(results: Results, counts: Counts) -> None:
    """All experiments."""
    with Engine(max_workers=1) as engine:
        _load_numpy(engine)
        results.add("edge, one worker", lambda: _edge(engine, counts, "one worker", functions.produce, False))
    with Engine(max_workers=WORKERS) as engine:
        _load_numpy(engine)
        for arm, producer in (("returned", functions.produce), ("in place", functions.produce_in_place)):
            results.add(f"edge, {arm}", functools.partial(_edge, engine, counts, arm, producer, True))
        for arm, spread in (("spread", True), ("as placed", False)):
            run = _runner(engine, *_chain(spread=spread))
            results.add(
                f"again, {arm}", functools.partial(chain_figures, arm, run, counts.chains, between=spread or None)
            )
        results.add("fan-out", lambda: fan_out_figures(_runner(engine, *_fan_out()), counts.fan_outs))
        for name, (graph, target), wanted in (
            ("alexa", alexa(), functions.ALEXA_RESULT),
            ("words", word_count(), words_result()),
        ):
            run = _runner(engine, graph, target)
            results.add(name, functools.partial(application_figures, name, run, counts.applications, wanted))
        results.add("layers", lambda: _layers(engine, counts.layers))
        results.add(
            "nested",
            lambda: nested_figures(
                lambda: engine.submit(functions.drive, FAN_OUT).result(timeout=TIMEOUT_S), counts.fan_outs
            ),
        )


def _load_numpy(engine: Engine) -> None:
    engine.wait_ready()
    list(engine.map(functions.load_numpy, [LOAD_S] * engine.stats().workers))


def _runner(engine: Engine, graph: Graph, target: Any) -> Callable[[], Any]:
    return lambda: engine.submit(graph, target).result(timeout=TIMEOUT_S)


def _edge(engine: Engine, counts: Counts, arm: str, producer: Callable[..., Any], spread: bool) -> Figures:
    def run(size: int, mark: int) -> functions.Stops:
        graph = Graph(spread=spread)
        made = graph.call(producer, size, mark, PAUSE_S)
        target = graph.call(functions.consume, made, size, mark)
        stops: functions.Stops = engine.submit(graph, target).result(timeout=TIMEOUT_S)
        return stops

    return size_figures(arm, run, counts, between=spread)


def _layers(engine: Engine, count: int) -> Figures:
    """Time and CPU per node of a graph of empty functions."""
    graph, target = graph_of_layers()
    run, check = _runner(engine, graph, target), expect(layers_result())
    check(run())
    roles = _processes()
    before = {role: cpu_s(processes) for role, processes in roles.items()}
    took = []
    for _ in range(count):
        began = time.perf_counter()
        result = run()
        took.append(time.perf_counter() - began)
        check(result)
    figures = {"layers/node_us": statistics.median(took) / NODES * 1e6}
    for role, processes in roles.items():
        figures[f"layers/{role}_cpu_us"] = (cpu_s(processes) - before[role]) / NODES / count * 1e6
    return figures


def _processes() -> dict[str, list[psutil.Process]]:
    """The processes of the engine by what they are; the client, which is the agent too, is this one."""
    here = psutil.Process(os.getpid())
    managers = [each for each in here.children(recursive=True) if "farcall_endpoint.manager" in each.cmdline()]
    workers = [worker for manager in managers for worker in manager.children(recursive=True)]
    return {"client": [here], "manager": managers, "worker": workers}


# -- graphs ------------------------------------------------------------------------------------------------------------


def _chain(*, spread: bool) -> tuple[Graph, Any]:
    graph = Graph(spread=spread)
    return graph, chain(functools.partial(graph.call, functions.pass_on))


def _fan_out() -> tuple[Graph, Any]:
    graph = Graph()
    return graph, graph.call(functions.total, graph.map(functions.increment, graph.call(functions.numbers, FAN_OUT)))


def alexa() -> tuple[Graph, Any]:
    """Five functions: a chain of three, then two devices."""
    graph = Graph()
    envelope = graph.call(functions.interact, graph.call(functions.frontend, functions.REQUEST))
    commands = graph.call(functions.smarthome, envelope)
    return graph, [graph.call(functions.door, commands), graph.call(functions.light, commands)]


def word_count() -> tuple[Graph, Any]:
    """Map and reduce."""
    graph = Graph()
    counted = graph.map(functions.count_words, graph.call(functions.split, text(), PIECES))
    return graph, graph.call(functions.merge, counted)


def graph_of_layers() -> tuple[Graph, Any]:
    """10,000 nodes."""
    graph = Graph()
    return graph, layers(functools.partial(graph.call, functions.join))
