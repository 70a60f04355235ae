"""Tables of ``README.md`` and ``figures/``: ``python -m benchmarks.readme`` generates them from ``results/``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks import api, memoization, sdk, serialization, start, warm_routing
from benchmarks.analytics import table as analytics
from benchmarks.data import communication, files, nodes, objects
from benchmarks.engine import table as engine
from benchmarks.engine.papers import table as papers
from benchmarks.engine.scale import table as scale
from benchmarks.graphs import table as graphs
from benchmarks.qos import table as qos
from benchmarks.report import RESULTS, figure_table, with_section
from benchmarks.taps import table as taps
from benchmarks.warm_starts import table as warm_starts
from benchmarks.weight import table as weight

_HERE: Final = Path(__file__).parent
PAGES: Final = (_HERE / "README.md", *sorted(_HERE.glob("figures/*.md")))
#: The function that makes each section, which has the name of its file in ``results/``.
SECTIONS: Final[Mapping[str, Callable[[Any], str]]] = {
    "end_to_end": figure_table,
    "engine": engine.as_tables,
    "engine_scale": scale.as_tables,
    "engine_papers": papers.as_tables,
    "weight": weight.as_table,
    "api": api.as_table,
    "memoization": memoization.as_table,
    "memoization_full": memoization.as_table,
    "sealed": figure_table,
    "serialization": serialization.as_tables,
    "sdk": sdk.as_tables,
    "start": start.as_table,
    "forwarder": figure_table,
    "graphs": graphs.as_tables,
    "files": files.as_table,
    "nodes": nodes.as_table,
    "communication": communication.as_table,
    "objects": objects.as_table,
    "taps": taps.as_tables,
    "qos": qos.as_tables,
    "analytics": analytics.as_tables,
    "warm_starts": warm_starts.as_tables,
    "warm_one_shots": warm_starts.sustained_tables,
    "warm_routing": warm_routing.as_table,
}
_NO_RESULTS: Final = "Not measured yet.\n"


def sections_of(text: str) -> list[str]:
    """Names of the sections that a page has."""
    return [name for name in SECTIONS if f"<!-- {name} -->" in text]


def with_figures(text: str) -> str:
    """The page with the stored results in its sections."""
    for name in sections_of(text):
        path = RESULTS / f"{name}.json"
        make = SECTIONS[name]
        text = with_section(text, name, make(json.loads(path.read_text())) if path.exists() else _NO_RESULTS)
    return text


if __name__ == "__main__":
    for _page in PAGES:
        _page.write_text(with_figures(_page.read_text()))
