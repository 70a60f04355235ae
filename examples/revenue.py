"""Revenue: the visitor that brought the most revenue, and the rank of the pages that it saw.

    python examples/revenue.py --endpoint NAME --directory SHARED [--visits 200000]

The join of the Big Data Benchmark. Calls on the endpoint make the tables, in files of a directory that its workers
share; the query runs there, too, and one row comes back.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import farcall

PAGES = 5_000
PARTS = 4
QUERY = """
    select source_ip, sum(ad_revenue) as revenue, avg(page_rank) as page_rank
    from rankings join visits on page_url = dest_url
    where visit_date between date '1980-01-01' and date '2010-01-01'
    group by source_ip order by revenue desc, source_ip limit 1
"""


@dataclasses.dataclass(frozen=True)
class Visitor:
    """``revenue`` in dollars; ``page_rank`` is a mean."""

    source_ip: str
    revenue: float
    page_rank: float


def make_rankings(directory: Path) -> None:
    """A rank for each page. Runs on a worker."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    urls = [f"page {number}" for number in range(PAGES)]
    ranks = np.random.default_rng(0).integers(0, 10_000, PAGES)
    directory.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"page_url": urls, "page_rank": ranks}), directory / "0.parquet")


def make_visits(directory: Path, part: int, visits: int) -> None:
    """Visits, most of them to few pages, by few visitors. Runs on a worker."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = np.random.default_rng(part + 1)
    days = np.datetime64("1970-01-01") + draw.integers(0, 15_000, visits)
    columns = {
        "source_ip": [f"10.0.{number // 250}.{number % 250}" for number in draw.integers(0, 1_000, visits)],
        "dest_url": [f"page {number}" for number in np.minimum(draw.zipf(1.3, visits), PAGES) - 1],
        "visit_date": pa.array(days, pa.date32()),
        "ad_revenue": draw.integers(0, 100_000, visits) / 100,
    }
    directory.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), directory / f"{part}.parquet", row_group_size=20_000)


def run(executor: farcall.Executor, directory: Path, *, visits: int = 200_000) -> Visitor:
    """Make the tables, and run the query."""
    import farcall_analytics as fa

    made = [executor.submit(make_rankings, directory / "rankings")]
    made += [executor.submit(make_visits, directory / "visits", part, visits // PARTS) for part in range(PARTS)]
    for each in made:
        each.result()
    tables = {name: f"{directory}/{name}/*.parquet" for name in ("rankings", "visits")}
    best = fa.sql(QUERY, tables=tables, executor=executor, storage=f"file://{directory}/exchange")
    [row] = best.to_arrow().to_pylist()
    return Visitor(**row)


def main() -> None:
    import farcall

    parser = argparse.ArgumentParser(description="Find the visitor that brought the most revenue.")
    parser.add_argument("--endpoint", required=True, help="name or id of the endpoint to run on")
    parser.add_argument("--directory", required=True, type=Path, help="a directory that this program and workers share")
    parser.add_argument("--visits", type=int, default=200_000)
    arguments = parser.parse_args()
    with farcall.Executor(endpoint_id=arguments.endpoint) as executor:
        best = run(executor, arguments.directory.resolve(), visits=arguments.visits)
    print(f"{best.source_ip}: {best.revenue:,.2f} dollars; mean rank of its pages: {best.page_rank:.1f}")


if __name__ == "__main__":
    main()
