"""Reports: predicted and measured time of the stages of a job. No I/O, no clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from farcall_analytics.job_plans import JobPlan
from farcall_analytics.planner import bytes_text, number_text, table_text

_HEADING: Final = ("stage", "tasks", "rows", "bytes predicted", "passed on", "seconds predicted", "taken")


@dataclasses.dataclass
class StageReport:
    """Measurements of a stage. ``busy_s``: seconds of all its tasks together; ``size``: bytes that it wrote.

    :param copies: copies of slow tasks. ``retries``: retries of failed tasks. ``reused``: tasks of which an earlier
        attempt had committed.
    :param repeats: repeats because blocks were lost.
    :param sampled_s: seconds of the sample of a sort; ``seconds`` has them, too.
    """

    number: int
    tasks: int = 0
    rows: int = 0
    size: int = 0
    seconds: float = 0.0
    busy_s: float = 0.0
    copies: int = 0
    retries: int = 0
    reused: int = 0
    repeats: int = 0
    sampled_s: float = 0.0


def report_text(plan: JobPlan, reports: Sequence[StageReport], seconds: float) -> str:
    """Return a table of the prediction and the measurement of each stage."""
    rows = [
        (
            str(each.number + 1),
            str(report.tasks),
            f"{report.rows:,}",
            bytes_text(each.size),
            bytes_text(report.size),
            number_text(each.seconds),
            number_text(report.seconds),
        )
        for each, report in zip(plan.stages, reports, strict=True)
    ]
    return table_text(
        _HEADING, [*rows, ("all", "", "", "", "", number_text(plan.estimate.seconds), number_text(seconds))]
    )
