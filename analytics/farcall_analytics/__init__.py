"""Analytics: sort, group, join and SQL on Farcall: ``import farcall_analytics as fa``."""

from datafusion import col, lit

from farcall_analytics.attempts import StageReport
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
from farcall_analytics.jobs import Outcome, Settings
from farcall_analytics.parquet import InputProblem
from farcall_analytics.relations import QueryProblem

__all__ = [
    "Dataset",
    "Groups",
    "InputProblem",
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
