"""Arithmetic of the graph benchmark, and that all systems run the same applications."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.graphs import functions
from benchmarks.graphs.driver import SYSTEMS
from benchmarks.graphs.measuring import (
    NODES,
    PIECES,
    QUICK,
    SIZES,
    WIDTH,
    Results,
    chain,
    chain_figures,
    crossings,
    edges_us,
    expect,
    fan_out_figures,
    layers_result,
    size_figures,
    text,
    timed_us,
    words_result,
)
from benchmarks.graphs.ours import alexa, graph_of_layers, word_count
from benchmarks.graphs.plot import draw
from benchmarks.graphs.table import as_tables, goals
from tests.unit.benchmark_machine import MACHINE


def round_of(**figures: float) -> dict[str, Any]:
    return {"figures": {name.replace("__", "/"): value for name, value in figures.items()}, "missing": {}}


def test_edges_are_from_the_return_of_a_function_to_the_beginning_of_the_next() -> None:
    stops = ((1, 0, 5_000), (2, 7_000, 8_000), (2, 8_500, 9_000))
    assert edges_us(stops) == [2.0, 0.5]
    assert crossings(stops) == [True, False]


def test_edges_of_the_other_kind_are_left_out() -> None:
    def run(size: int, mark: int) -> functions.Stops:
        assert size in SIZES.values()
        return (1, 0, 0), (1 + mark % 2, 0, 0)

    between = size_figures("arm", run, QUICK, between=True)
    assert between["edge/arm/1 KB/p50_us"] == 0
    assert size_figures("arm", lambda *_: ((1, 0, 0), (1, 0, 0)), QUICK, between=True) == {}


def test_a_chain_passes_its_value_on_and_each_stage_adds_a_stop() -> None:
    carried = chain(functions.pass_on)
    figures = chain_figures("arm", lambda: carried, 3)
    assert set(figures) == {"again/arm/edge_us", "again/arm/edge_p90_us", "again/arm/run_us"}
    with pytest.raises(AssertionError):
        chain_figures("arm", lambda: (carried[0], b"another value"), 1)


def test_results_are_checked() -> None:
    with pytest.raises(AssertionError, match="a result of 1, not 2"):
        timed_us(lambda: 1, 1, check=expect(2))
    assert fan_out_figures(lambda: 500_500, 1)["fan_out/edges_per_s"] > 0


def test_an_experiment_that_fails_is_told_and_the_others_go_on() -> None:
    results = Results()
    results.add("one", lambda: {"value": float("not here\nand more")})
    results.add("two", lambda: {"value": 1.0})
    assert results.missing == {"one": "ValueError: could not convert string to float: 'not here\\nand more'"}
    assert results.figures == {"value": 1.0}


def test_functions_of_the_alexa_skill() -> None:
    commands = functions.smarthome(functions.interact(functions.frontend(functions.REQUEST)))
    assert [functions.door(commands), functions.light(commands)] == functions.ALEXA_RESULT
    wrong = functions.smarthome(
        functions.interact(functions.frontend({**functions.REQUEST, "text": "Enter home with password x"}))
    )
    assert functions.door(wrong) == "door OFF for u-17"


def test_words_are_counted_in_pieces() -> None:
    pieces = functions.split(text(), PIECES)
    assert len(pieces) == PIECES
    assert functions.merge([functions.count_words(piece) for piece in pieces]) == words_result()


def test_graphs_have_the_stages_of_the_experiments() -> None:
    assert len(alexa()[0]) == 5
    assert len(word_count()[0]) == 3
    assert len(graph_of_layers()[0]) == NODES
    assert len(layers_result()) == WIDTH


def test_goals_are_limits_and_ratios_to_peers() -> None:
    rounds = {
        "farcall": [round_of(again__spread__edge_us=30, alexa__run_us=10, layers__node_us=25)],
        "Ray": [{"figures": {"again/Ray Compiled Graph/edge_us": 60}, "missing": {}}],
        "Flask": [round_of(alexa__run_us=40)],
        "farcall, two managers": [round_of(managers__fork_ms=10)],
    }
    found: dict[str, Any] = {each.name: (each.value, each.reached) for each in goals(rounds)}
    assert found["the same graph again, an edge between two workers, 1 KB, p50"] == (30, True)
    assert found["Ray Compiled Graph beside it"] == (2.0, True)
    assert found["Alexa skill, Flask to graph"] == (4.0, False)
    assert found["10,000 nodes in layers of 100: us per node"] == (25, False)
    assert found["call that begins in a fork at another manager, p50, ms"] == (10, True)
    assert len(found) == 5


def test_tables_and_picture_show_what_is_there_and_say_what_is_not(tmp_path: Path) -> None:
    rounds = {
        "farcall": [
            {"figures": {"edge/returned/1 KB/p50_us": 40.0, "edge/returned/1 KB/first_us": 900.0}, "missing": {}}
        ],
        "Ray": [{"figures": {}, "missing": {"again, compiled": "ImportError: no module"}}],
    }
    report = {"measured_at": "now", "machine": MACHINE, "rounds": rounds}
    shown = as_tables(report)
    assert "| between two workers, returned | 40.0 (40.0 to 40.0) / 900 | - | - | - |" in shown
    assert "| edge between two workers, returned, 1 KB, p50 | 40 us | ≤ 50 | yes |" in shown
    assert "Not measured: Ray, again, compiled (ImportError: no module)." in shown
    draw(report, tmp_path / "graphs.png")
    assert (tmp_path / "graphs.png").stat().st_size > 1000


def test_each_system_has_a_module() -> None:
    folder = Path(functions.__file__).parent
    assert all((folder / f"{module}.py").exists() for _, module in SYSTEMS.values())
