"""Analytics by an executor of Farcall: answers are DuckDB's, on each tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import farcall
import farcall_analytics as fa
from farcall_common.objects.blocks import open_blocks
from tests.support.analytics_data import BIG_DATA_JOIN, big_data, oracle, ordered, tpcds


@pytest.fixture
def options(executor: farcall.Executor, tmp_path: Path) -> dict[str, Any]:
    return {"executor": executor, "storage": f"file://{tmp_path}/blocks", "share_bytes": 200_000, "partitions": 3}


def test_tpcds_queries_are_those_of_the_oracle(options: dict[str, Any], tmp_path: Path) -> None:
    tables = tpcds(tmp_path / "tpcds")
    for number in (1, 94):
        query = (tmp_path / "tpcds" / f"q{number}.sql").read_text()
        found = fa.sql(query, tables={name: str(path) for name, path in tables.items()}, **options).to_arrow()
        assert ordered(found) == ordered(oracle(query, **tables))
        assert found.num_rows


def test_the_big_data_join_is_that_of_the_oracle(options: dict[str, Any], tmp_path: Path) -> None:
    tables = big_data(tmp_path / "big")
    own = {name: pq.read_table(Path(pattern).parent) for name, pattern in tables.items()}
    for until in ("1980-04-01", "1983-01-01", "2010-01-01"):
        query = BIG_DATA_JOIN.format(until=until)
        found = fa.sql(query, tables=tables, **options).to_arrow()
        assert ordered(found) == ordered(oracle(query, **own))


def test_a_sort_on_an_endpoint_leaves_files_in_order_and_nothing_else(options: dict[str, Any], tmp_path: Path) -> None:
    tables = big_data(tmp_path / "big")
    done: list[tuple[str, int, int]] = []
    visits = fa.read_parquet(tables["visits"], **options)
    outcome = visits.sort("ad_revenue", "dest_url", descending=[True, False]).write_parquet(
        str(tmp_path / "out"), progress=lambda *each: done.append(each)
    )
    found = [row for path in outcome.paths for row in pq.read_table(path)["ad_revenue"].to_pylist()]
    assert found == sorted(found, reverse=True)
    assert outcome.rows == len(found) == 20_000
    assert done[-1] == ("stage 2 of 2", 3, 3)
    with open_blocks(options["storage"]) as blocks:
        assert list(blocks.names("")) == []


def test_an_error_of_a_task_is_that_of_the_query(options: dict[str, Any], tmp_path: Path) -> None:
    tables = big_data(tmp_path / "big")
    with pytest.raises(fa.QueryProblem, match="Divide by zero"):
        fa.sql("select sum(1 / (page_rank - page_rank)) s from rankings", tables=tables, **options).to_arrow()
