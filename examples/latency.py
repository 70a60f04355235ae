"""Where the time of a call goes: the latency breakdown of the funcX paper (HPDC 2020, figure 4) for your endpoint.

    python examples/latency.py --endpoint ENDPOINT_ID [--calls 200]

Calls a function that does nothing, one after the other, and shows the time spent in each part of the system.
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
    """The least that a function can do."""
    return f"hello, {event}"


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """One call in seconds. ``client`` is what the other parts do not account for: the SDK and the network."""

    client: float
    service: float
    forwarder: float
    endpoint: float
    execution: float

    @property
    def total(self) -> float:
        return self.client + self.service + self.forwarder + self.endpoint + self.execution

    @classmethod
    def of(cls, stations: Mapping[str, float], *, total_s: float) -> Breakdown:
        """From the instants at a task's stations; each difference is taken within one clock.

        :raises KeyError: if a station is not known.
        """
        service = stations["enqueued_at"] - stations["submitted_at"]
        execution = stations["ended_at"] - stations["started_at"]
        endpoint = stations["returned_at"] - stations["leased_at"] - execution
        forwarder = stations["leased_at"] - stations["enqueued_at"] + stations["recorded_at"] - stations["returned_at"]
        return cls(total_s - service - execution - endpoint - forwarder, service, forwarder, endpoint, execution)


PARTS = {
    "client": "SDK, HTTP and result stream",
    "service": "API: check, write ahead, queue",
    "forwarder": "queue to wire, and result to record",
    "endpoint": "agent, manager, worker, and back",
    "execution": "the function itself",
    "total": "submit to result",
}


def measure(client: farcall.Client, endpoint_id: str, *, calls: int, warm_up: int = 20) -> list[Breakdown]:
    """The breakdown of ``calls`` sequential calls, after some that do not count."""
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
    shown = Table(title=f"Latency of {len(measured)} warm calls, one after the other")
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

    parser = argparse.ArgumentParser(description="Show where the time of a call goes.")
    parser.add_argument("--endpoint", required=True, help="id of the endpoint to run on")
    parser.add_argument("--calls", type=int, default=200)
    arguments = parser.parse_args()
    with farcall.Client() as client:
        Console().print(table(measure(client, arguments.endpoint, calls=arguments.calls)))


if __name__ == "__main__":
    main()
