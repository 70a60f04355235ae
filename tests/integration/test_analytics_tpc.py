"""All queries of TPC-DS and TPC-H in stages, with rows exchanged wherever they can be: answers are DuckDB's."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import duckdb
import pytest

import farcall_analytics as fa
from farcall_analytics import stages
from tests.support.analytics_data import ordered, tpcds, tpch

#: Quotients of decimals have as many digits as DataFusion gives them, which are fewer than DuckDB's.
FEWER_DIGITS: Final[Mapping[tuple[str, int], int]] = {("ds", 59): 5, ("ds", 66): 3, ("h", 1): 4}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, Path]]:
    directory = tmp_path_factory.mktemp("tpc")
    return {"ds": tpcds(directory / "ds"), "h": tpch(directory / "h")}


@pytest.fixture(scope="module")
def connections(tables: Mapping[str, Mapping[str, Path]]) -> Mapping[str, duckdb.DuckDBPyConnection]:
    found = {name: duckdb.connect(config={"threads": 1}) for name in tables}
    for benchmark, own in tables.items():
        for name, path in own.items():
            found[benchmark].execute(f"create view {name} as select * from '{path}'")
    return found


@pytest.mark.parametrize(
    ("benchmark", "number"),
    [*(("ds", number) for number in range(1, 100)), *(("h", number) for number in range(1, 23))],
)
def test_a_query_is_that_of_the_oracle(
    benchmark: str,
    number: int,
    tables: Mapping[str, Mapping[str, Path]],
    connections: Mapping[str, duckdb.DuckDBPyConnection],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stages, "BROADCAST_BYTES", 0)
    own = tables[benchmark]
    query = (next(iter(own.values())).parent / f"q{number}.sql").read_text()
    with ThreadPoolExecutor(2) as executor:
        options: Any = {"executor": executor, "storage": f"file://{tmp_path}", "share_bytes": 100_000, "partitions": 3}
        found = fa.sql(query, tables={name: str(path) for name, path in own.items()}, **options).to_arrow()
    digits = FEWER_DIGITS.get((benchmark, number), 6)
    expected = connections[benchmark].execute(query).to_arrow_table()
    assert ordered(found, digits=digits) == ordered(expected, digits=digits)
