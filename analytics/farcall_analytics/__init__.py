"""Analytics: sort, group, join and SQL on Farcall: ``import farcall_analytics as fa``."""

from datafusion import col, lit

from farcall_analytics.frames import (
    Dataset,
    Groups,
    count,
    from_arrow,
    max,  # noqa: A004 - as in the libraries that users know
    mean,
    min,  # noqa: A004
    read_parquet,
    sql,
    sum,  # noqa: A004
)
from farcall_analytics.job_plans import JobPlan
from farcall_analytics.jobs import Outcome
from farcall_analytics.parquet import InputProblem
from farcall_analytics.planner import NoPlan
from farcall_analytics.relations import QueryProblem
from farcall_analytics.reports import StageReport
from farcall_analytics.settings import Settings

__all__ = [
    "Dataset",
    "Groups",
    "InputProblem",
    "JobPlan",
    "NoPlan",
    "Outcome",
    "QueryProblem",
    "Settings",
    "StageReport",
    "col",
    "count",
    "from_arrow",
    "lit",
    "max",
    "mean",
    "min",
    "read_parquet",
    "sql",
    "sum",
]
