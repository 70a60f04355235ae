"""All queries of TPC-DS in stages, with rows that are exchanged wherever they can be: answers are DuckDB's."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import duckdb
import pytest

import farcall_analytics as fa
from farcall_analytics import stages
from tests.support.analytics_data import ordered, tpcds

#: Their quotients of decimals have as many digits as DataFusion gives them, which are fewer than DuckDB's.
FEWER_DIGITS: Final[Mapping[int, int]] = {59: 5, 66: 3}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return tpcds(tmp_path_factory.mktemp("tpcds") / "data")


@pytest.fixture(scope="module")
def connection(tables: Mapping[str, Path]) -> duckdb.DuckDBPyConnection:
    found = duckdb.connect(config={"threads": 1})
    for name, path in tables.items():
        found.execute(f"create view {name} as select * from '{path}'")
    return found


@pytest.mark.parametrize("number", range(1, 100))
def test_a_query_is_that_of_the_oracle(
    number: int,
    tables: Mapping[str, Path],
    connection: duckdb.DuckDBPyConnection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stages, "BROADCAST_BYTES", 0)
    query = (tables["item"].parent / f"q{number}.sql").read_text()
    with ThreadPoolExecutor(2) as executor:
        own: Any = {"executor": executor, "storage": f"file://{tmp_path}", "share_bytes": 100_000, "partitions": 3}
        found = fa.sql(query, tables={name: str(path) for name, path in tables.items()}, **own).to_arrow()
    digits = FEWER_DIGITS.get(number, 6)
    assert ordered(found, digits=digits) == ordered(connection.execute(query).to_arrow_table(), digits=digits)
