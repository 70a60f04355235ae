"""Latency breakdown of a call on your endpoint, as in the funcX paper (HPDC 2020, figure 4).

    python examples/latency.py --endpoint NAME [--calls 200]

Calls a no-op sequentially, and shows the time in each part of the system.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import farcall


def hello(event: str) -> str:
    """A function with almost no work."""
    return f"hello, {event}"


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """The parts of one call in seconds. ``client`` is the rest: the SDK and the network."""

    client: float
    service: float
    forwarder: float
    endpoint: float
    execution: float

    @property
    def total(self) -> float:
        return self.client + self.service + self.forwarder + self.endpoint + self.execution

    @classmethod
    def of(cls, timings: Mapping[str, float], *, total_s: float) -> Breakdown:
        """The breakdown by a task's timings; each difference is taken within one clock.

        :raises KeyError: if a timing is missing.
        """
        service = timings["enqueued_at"] - timings["submitted_at"]
        execution = timings["ended_at"] - timings["started_at"]
        endpoint = timings["returned_at"] - timings["leased_at"] - execution
        forwarder = timings["leased_at"] - timings["enqueued_at"] + timings["recorded_at"] - timings["returned_at"]
        return cls(total_s - service - execution - endpoint - forwarder, service, forwarder, endpoint, execution)


PARTS = {
    "client": "SDK, HTTP and result stream",
    "service": "API: check, record, queue",
    "forwarder": "queue to endpoint, result to database",
    "endpoint": "agent, manager and worker, both ways",
    "execution": "the function itself",
    "total": "submit to result",
}


def measure(client: farcall.Client, endpoint_id: str, *, calls: int, warm_up: int = 20) -> list[Breakdown]:
    """The breakdown of ``calls`` sequential calls, after a warm-up."""
    import farcall

    timed = []
    with farcall.Executor(endpoint_id, client=client) as executor:
        for number in range(-warm_up, calls):
            began = time.perf_counter()
            future = executor.submit(hello, "event")
            future.result()
            if number >= 0:
                timed.append((future.task_id, time.perf_counter() - began))
    records = client.get_batch_result(task_id for task_id, _ in timed)
    return [Breakdown.of(records[task_id].timings, total_s=total_s) for task_id, total_s in timed]


def percentile(values: Sequence[float], percent: int) -> float:
    """The value below which ``percent`` of the values lie."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def table(measured: Sequence[Breakdown]) -> Table:
    """The median and the 99th percentile of each part, in milliseconds."""
    shown = Table(title=f"Latency of {len(measured)} sequential warm calls")
    shown.add_column("part")
    shown.add_column("what it does")
    shown.add_column("p50, ms", justify="right")
    shown.add_column("p99, ms", justify="right")
    for part, what in PARTS.items():
        values = [getattr(each, part) * 1000 for each in measured]
        shown.add_row(
            part, what, *(f"{percentile(values, percent):.2f}" for percent in (50, 99)), end_section=part == "execution"
        )
    return shown


def main() -> None:
    import farcall

    parser = argparse.ArgumentParser(description="Show the latency of each part of a call.")
    parser.add_argument("--endpoint", required=True, help="name or id of the endpoint to run on")
    parser.add_argument("--calls", type=int, default=200)
    arguments = parser.parse_args()
    with farcall.Client() as client:
        Console().print(table(measure(client, arguments.endpoint, calls=arguments.calls)))


if __name__ == "__main__":
    main()
