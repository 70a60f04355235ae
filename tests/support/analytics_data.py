"""Tables for tests of analytics, and DuckDB's answers, with which results are compared."""

from __future__ import annotations

import decimal
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq


def random_rows(count: int, *, seed: int = 1, different: int = 10**9) -> pa.Table:
    """Rows of a number ``a`` with so many different values, a small number ``b`` and a text ``c``."""
    query = f"""
        select (hash(i + {seed}) % {different})::bigint as a, (hash(i * 7) % 10)::int as b, 'row ' || i as c
        from range({count}) t(i)
    """
    return duckdb.connect().execute(query).to_arrow_table()


def files(directory: Path, table: pa.Table, *, count: int = 3, group_rows: int = 100) -> str:
    """A pattern for the files of a table."""
    directory.mkdir(exist_ok=True, parents=True)
    step = math.ceil(max(1, table.num_rows) / count)
    for number in range(count):
        pq.write_table(table.slice(number * step, step), directory / f"{number}.parquet", row_group_size=group_rows)
    return f"{directory}/*.parquet"


def oracle(query: str, **tables: pa.Table | Path) -> pa.Table:
    """DuckDB's answer."""
    with duckdb.connect(config={"threads": 1}) as connection:
        for name, table in tables.items():
            connection.register(name, table if isinstance(table, pa.Table) else pq.read_table(table))
        return connection.execute(query).to_arrow_table()


def ordered(table: pa.Table, *, digits: int = 6) -> list[tuple[str, ...]]:
    """The rows of a table as texts, in an order of their own; of decimals and floats, so many digits."""
    rows = zip(*(column.to_pylist() for column in table.columns), strict=True)

    def text(value: Any) -> str:
        return f"{float(value):.{digits}g}" if isinstance(value, (float, decimal.Decimal)) else str(value)

    return sorted(tuple(map(text, row)) for row in rows)


def tpcds(directory: Path, *, scale: float = 0.01) -> Mapping[str, Path]:
    """The files of TPC-DS, by the names of their tables."""
    import duckdb_extension_tpcds

    directory.mkdir(exist_ok=True)
    with _extended(duckdb_extension_tpcds.__file__) as connection:
        connection.execute(f"call dsdgen(sf={scale})")
        names = [name for (name,) in connection.execute("select table_name from duckdb_tables()").fetchall()]
        for name in names:
            connection.execute(f"copy {name} to '{directory}/{name}.parquet' (row_group_size 2048)")
        _write_queries(directory, connection, "tpcds_queries")
    return {name: directory / f"{name}.parquet" for name in names}


def tpch(directory: Path, *, scale: float = 0.01) -> Mapping[str, Path]:
    """The files of TPC-H, by the names of their tables."""
    import duckdb_extension_tpch

    program = Path(sys.executable).with_name("tpchgen-cli")
    command = ["parquet", "--scale-factor", str(scale), "--output-dir", str(directory), "--row-group-bytes", "100000"]
    subprocess.run([program, *command, "--quiet"], check=True)
    with _extended(duckdb_extension_tpch.__file__) as connection:
        _write_queries(directory, connection, "tpch_queries")
    return {each.stem: each for each in directory.glob("*.parquet")}


def _extended(package: str) -> duckdb.DuckDBPyConnection:
    """DuckDB with the extension in a package."""
    [extension] = Path(package).parent.rglob("*.duckdb_extension")
    connection = duckdb.connect(config={"threads": 1, "allow_unsigned_extensions": True})
    connection.execute(f"load '{extension}'")
    return connection


def _write_queries(directory: Path, connection: duckdb.DuckDBPyConnection, function: str) -> None:
    for number, query in connection.execute(f"select query_nr, query from {function}()").fetchall():
        (directory / f"q{number}.sql").write_text(query)


BIG_DATA_JOIN = """
    select source_ip, sum(ad_revenue) as revenue, avg(page_rank) as page_rank
    from rankings join visits on page_url = dest_url
    where visit_date between date '1980-01-01' and date '{until}'
    group by source_ip order by revenue desc, source_ip limit 1
"""
"""The third query of the Big Data Benchmark; the last date decides how many rows are joined."""


def big_data(directory: Path, *, pages: int = 2_000, visits: int = 20_000) -> Mapping[str, str]:
    """The tables of the Big Data Benchmark, with few pages that have most of the visits; patterns of their files."""
    rankings = oracle(f"""
        select 'url ' || i as page_url, (hash(i) % 10_000)::int as page_rank, (hash(i + 1) % 100)::int as avg_duration
        from range({pages}) t(i)
    """)
    found = oracle(f"""
        select (hash(i) % 250) || '.' || (hash(i + 7) % 4) as source_ip,
            'url ' || (pow((hash(i + 1) % 1_000_000) / 1e6, 3) * {pages})::bigint as dest_url,
            date '1970-01-01' + (hash(i + 2) % 15_000)::int as visit_date,
            (hash(i + 3) % 100_000)::decimal(12, 2) / 100 as ad_revenue
        from range({visits}) t(i)
    """)
    return {
        "rankings": files(directory / "rankings", rankings, count=2, group_rows=500),
        "visits": files(directory / "visits", found, count=4, group_rows=2_000),
    }


class NoExecutor:
    """Of plans that do not run."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        raise AssertionError(f"{fn}{args} is not to run")
