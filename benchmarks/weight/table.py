"""The history of the weight of a call as Markdown: a row for each measurement."""

from __future__ import annotations

from typing import Any, Final

from benchmarks.report import Report, heading, page, table

_GOALS: Final = {"yardsticks": 8, "hops": 6}
_COLUMNS: Final = (
    "commit",
    "what changed",
    "processor time: yardsticks",
    "beside 22b29d76",
    "µs: client, manager, workers",
    "one call: hops",
    "beside 22b29d76",
    "tasks/s, submit()/s, round trip beside 4478e583",
)


def as_table(report: Report) -> str:
    """The goals, and all rows."""
    rows = [_row(row) for row in report["rows"]]
    goals = ["goal", "", f"<= {_GOALS['yardsticks']}", "", "", f"<= {_GOALS['hops']}", "", ">= 1.8, >= 2.5, <= 0.6"]
    return page(heading(report, "the machine of the last row"), table(list(_COLUMNS), [goals, *rows]))


def _row(row: dict[str, Any]) -> list[str]:
    engine, path = row["engine"], row.get("path")
    parts = ", ".join(f"{engine[name]:.0f}" for name in ("client_us", "manager_us", "worker_us"))
    names = ("tasks_per_s_ratio", "submits_per_s_ratio", "round_trip_ms_ratio")
    return [
        row["commit"],
        row["change"],
        f"{engine['yardsticks']:.1f}",
        f"{engine['cpu_ratio']:.2f} x",
        parts,
        f"{engine['hops']:.1f}",
        f"{engine['wait_ratio']:.2f} x",
        "not measured" if path is None else ", ".join(f"{path[name]:.2f}" for name in names),
    ]
