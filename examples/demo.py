"""Demo: a cloud tier and an endpoint on this machine, and real work through the public SDK.

    python -m examples.demo

It stops and removes everything that it started, also after an error; the pictures stay in ``build/demo``.
``make docs-picture`` draws its results for the documentation.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

import farcall
from examples import correlation, digits, latency, metadata, stills, tomography
from farcall_common.errors import FarcallError, TaskCancelled, TaskFailed, TaskUnknown
from farcall_common.wire import TaskState
from farcall_local.control import wipe
from farcall_local.endpoint import LocalEndpoint
from farcall_local.process import log_tail
from farcall_local.tier import LocalTier

BATCH = 1_000
MEGABYTES = 5

console = Console(highlight=False)
_FONT = re.compile(r"@font-face \{.*?\}", re.DOTALL)


def square(number: int) -> int:
    return number * number


def reversed_bytes(data: bytes) -> bytes:
    """The bytes in reverse order: the result is as large as the argument."""
    return data[::-1]


def estimate_pi(seed: int) -> float:
    """Pi from 10,000 random points in a square."""
    import random

    draw = random.Random(seed).random
    inside = sum(draw() ** 2 + draw() ** 2 <= 1 for _ in range(10_000))
    return 4 * inside / 10_000


def weigh(sample: dict[str, float]) -> float:
    return total_mass(sample) / len(sample)


def total_mass(sample: dict[str, float]) -> float:
    return sum(sample[element] for element in ("carbon", "iron", "unobtainium"))


def sleep_long() -> None:
    import time

    time.sleep(600)


class Results:
    """The result and the time of each step."""

    def __init__(self) -> None:
        self._table = Table("step", "result", title="Results")
        self._table.add_column("seconds", justify="right")

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[list[str]]:
        """Measure the time of a step, which appends its result to the list."""
        shown: list[str] = []
        console.print(f"[bold]•[/bold] {name} …")
        began = time.monotonic()
        yield shown
        took_s = time.monotonic() - began
        self._table.add_row(name, "".join(shown), f"{took_s:.2f}")
        console.print(f"  {''.join(shown)} [dim]({took_s:.2f} s)[/dim]")

    def show(self) -> None:
        console.print(self._table)

    def draw(self, path: Path, *, took_s: float) -> None:
        """Write the results as a picture of a terminal, without the fonts that a browser would fetch for it."""
        terminal = Console(record=True, file=io.StringIO(), width=100, highlight=False)
        terminal.print("$ make demo")
        terminal.print(self._table)
        terminal.print(f"[green]Done in {took_s:.1f} s; all processes are stopped.[/green]")
        svg = _FONT.sub("", terminal.export_svg(title="make demo", unique_id="demo"))
        path.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n", encoding="utf-8")


def run_steps(client: farcall.Client, endpoint_id: str, results: Results, *, pictures: Path) -> None:
    """All steps that use only the SDK."""
    with farcall.Executor(endpoint_id, client=client) as executor, cancelling_on_error(executor):
        with results.step("register a function and run it") as shown:
            function_id = client.register_function(latency.hello)
            task_id = client.run("world", endpoint_id=endpoint_id, function_id=function_id)
            shown.append(client.get_result(task_id, wait_s=30))
        with results.step(f"a batch of {BATCH:,}") as shown:
            batch = client.create_batch()
            square_id = client.register_function(square)
            for number in range(BATCH):
                batch.add(square_id, (number,))
            client.batch_run(endpoint_id, batch)
            client.get_result(batch.task_ids[-1], wait_s=60)
            infos = client.get_batch_result(batch.task_ids)
            squares = [
                info.result() if not info.pending else client.get_result(info.task_id, wait_s=60)
                for info in infos.values()
            ]
            require(squares == [number * number for number in range(BATCH)], "the batch's results are wrong")
            shown.append(f"{len(squares):,} results, their sum is {sum(squares):,}")
        with results.step("map over inputs") as shown:
            estimates = executor.map(estimate_pi, range(200))
            values = list(farcall.track(estimates, "  estimating pi", total=200, show=True))
            shown.append(f"pi is about {sum(values) / len(values):.4f}")
        with results.step(f"{MEGABYTES} MB there and back") as shown:
            data = os.urandom(MEGABYTES * 1_000_000)
            back = executor.submit(reversed_bytes, data).result()
            require(back == data[::-1], "the bytes came back wrong")
            shown.append(f"{len(back):,} bytes, all correct")
        with results.step("a function that raises") as shown:
            failure = executor.submit(weigh, {"carbon": 12.0, "iron": 55.8}).exception()
            require(isinstance(failure, TaskFailed), f"expected a failed task, got {failure!r}")
            assert isinstance(failure, TaskFailed)
            console.print(failure.remote_traceback, style="yellow", markup=False)
            shown.append(f"{failure.record.exception_type}; the demo continues")
        with results.step("cancel a long task") as shown:
            long = executor.submit(sleep_long)
            wait_until_running(client, long.task_id)
            require(long.cancel(), "the task could not be cancelled")
            try:
                client.get_result(long.task_id, wait_s=30)
            except TaskCancelled as cancelled:
                shown.append(cancelled.record.message)
        case_studies(executor, results, pictures=pictures)
    console.print(latency.table(latency.measure(client, endpoint_id, calls=60)))


def case_studies(executor: farcall.Executor, results: Results, *, pictures: Path) -> None:
    """Case studies of the funcX papers."""
    with results.step("stills: bright spots on detector images") as shown:
        counts = stills.run(executor)
        shown.append(f"{sum(counts):,} spots on {len(counts)} frames, {len(stills.hits(counts))} hits")
    with results.step("metadata of a file tree") as shown:
        catalogue = metadata.run(executor)
        kinds = ", ".join(f"{count} {kind}" for kind, count in catalogue.kinds.most_common())
        shown.append(f"{len(catalogue.records)} files ({kinds}) about {', '.join(catalogue.topics(3))}")
    with results.step("digits read by a trained model") as shown:
        reading = digits.run(executor)
        shown.append(f"{reading.images} images, {reading.accuracy:.1%} right")
    with results.step("tomography: preview of a slice") as shown:
        pictures.mkdir(parents=True, exist_ok=True)
        shown.append(str(tomography.run(executor, pictures / "slice.png")))
    with results.step("correlation: how fast a sample moves") as shown:
        times = correlation.run(executor)
        mean = sum(times) / len(times)
        shown.append(f"{mean:.1f} frames, the mean of {len(times)} rings; {correlation.RELAXATION_FRAMES:.1f} expected")


def wait_until_running(client: farcall.Client, task_id: str, *, within_s: float = 30.0) -> None:
    """Wait until a submitted task runs."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        with contextlib.suppress(TaskUnknown):  # an executor submits in the background
            if client.get_task(task_id).state is TaskState.RUNNING:
                return
        time.sleep(0.01)
    raise RuntimeError(f"task {task_id} did not start")


@contextlib.contextmanager
def cancelling_on_error(executor: farcall.Executor) -> Iterator[None]:
    """Cancel all tasks when a step fails; the executor alone would wait for them."""
    try:
        yield
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        raise


def require(condition: bool, otherwise: str) -> None:
    """Fail the demo, unlike ``assert`` also with ``python -O``."""
    if not condition:
        raise RuntimeError(otherwise)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the demo on a local tier.")
    parser.add_argument("--pictures", type=Path, default=Path("build/demo"), help="where pictures go")
    parser.add_argument("--svg", type=Path, help="draw the results as this picture")
    arguments = parser.parse_args()
    pictures: Path = arguments.pictures
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    began = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="farcall-demo-"))
    results = Results()
    try:
        with contextlib.ExitStack() as stack:
            with results.step("start the cloud tier") as shown:
                tier = stack.enter_context(LocalTier(directory / "tier"))
                shown.append(tier.api_url)
            with results.step("start an endpoint") as shown:
                endpoint = LocalEndpoint("demo", home=directory, environment=tier.environment())
                stack.enter_context(endpoint)
                shown.append("demo, online")
            client = stack.enter_context(farcall.Client(tier.api_url, tier.token))
            run_steps(client, endpoint.endpoint_id, results, pictures=pictures)
            results.show()
        if arguments.svg:
            results.draw(arguments.svg, took_s=time.monotonic() - began)
        console.print(f"[green]Done in {time.monotonic() - began:.1f} s; all processes are stopped.[/green]")
    except KeyboardInterrupt:
        console.print("[yellow]Interrupted; all processes are stopped.[/yellow]")
        return 130
    except (FarcallError, RuntimeError, OSError) as failure:
        console.print(f"[red]The demo failed:[/red] {failure}", markup=True)
        _keep_logs(directory)
        return 1
    finally:
        wipe(directory / "tier")
        shutil.rmtree(directory, ignore_errors=True)
    return 0


def _keep_logs(directory: Path) -> None:
    """Show the last lines of the logs, and copy them to a directory that is kept."""
    kept = Path(tempfile.mkdtemp(prefix="farcall-demo-logs-"))
    for log in sorted(directory.rglob("*.log")):
        console.rule(log.name)
        console.print(log_tail(log), markup=False)
        shutil.copy(log, kept / log.name)
    console.print(f"All logs: {kept}")


if __name__ == "__main__":
    sys.exit(main())
