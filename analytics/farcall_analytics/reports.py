"""Reports: what the stages of a job took, beside what was predicted. No I/O, no clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from farcall_analytics.job_plans import JobPlan
from farcall_analytics.planner import bytes_text, number_text, table_text

_HEADING: Final = ("stage", "tasks", "rows", "bytes predicted", "passed on", "seconds predicted", "taken")


@dataclasses.dataclass
class StageReport:
    """What a stage took. ``busy_s``: of all its tasks together; ``size``: bytes that it wrote.

    :param copies: of slow tasks. ``retries``: of failed ones. ``reused``: tasks of which an earlier attempt had
        committed.
    :param repeats: because what it had written was lost.
    :param sampled_s: of its seconds, those that the sample of a sort took.
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
    """A table: what was predicted of each stage, and what was measured."""
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
