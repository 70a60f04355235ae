"""``farcall analytics``: commands that measure storages from an endpoint, and show how a query would be run."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Final

import typer

import farcall_analytics as fa
from farcall import Executor
from farcall_analytics import profile_files
from farcall_analytics.frames import STORAGE
from farcall_analytics.measuring import measure
from farcall_analytics.planner import bytes_text, number_text
from farcall_analytics.profiles import Profile
from farcall_common.console import check_number, new_group, show_table
from farcall_common.errors import ConfigurationError
from farcall_common.objects.node_blocks import is_on_nodes, open_storage

app = new_group("Queries on large tables: measure storages, show plans.", name="analytics")

_COLUMNS: Final = ("storage", "reads/s", "writes/s", "a worker reads", "writes", "all together", "latency")

Storage = Annotated[
    str,
    typer.Option("--storage", metavar="URL", envvar=STORAGE, help="By which tasks pass rows on."),
]
FastStorage = Annotated[str, typer.Option("--fast-storage", metavar="URL", help="A memory, if there is one.")]


@app.command()
def profile(
    endpoint: Annotated[str, typer.Argument(metavar="ENDPOINT", help="Its name or id.")],
    storage: Storage,
    fast_storage: FastStorage = "",
    dollars_per_hour: Annotated[float, typer.Option(callback=check_number, min=0, help="What a worker costs.")] = 0.0,
    again: Annotated[bool, typer.Option("--again", help="Measure also if the last profile is not a week old.")] = False,
) -> None:
    """Measure workers of an endpoint, and storages from there; programs on this computer plan with it for a week."""
    urls = [url for url in (storage, fast_storage) if url]
    for url in urls:
        if is_on_nodes(url):
            raise ConfigurationError("The memory of nodes is always measured: leave it out.")
        try:
            with open_storage(url) as blocks:
                next(blocks.names("farcall-profile-"), None)
        except OSError as error:
            raise ConfigurationError(f"{url} cannot be used from here: {error.strerror}.") from error
    with Executor(endpoint) as executor:
        path = profile_files.profile_path(executor)
        profile_files.check_place(path)
        found = None if again else profile_files.load(path)
        if found is None or not found.has(urls) or found.age_s(time.time()) >= profile_files.STALE_S:
            measured = measure(executor, urls, dollars_per_hour=dollars_per_hour, progress=_note)
            found = profile_files.save(path, measured, list(measured.tiers))
        else:
            _note(f"measured {number_text(found.age_s(time.time()) / 3600)} hours ago; --again repeats that")
        _show(profile_files.profile_of(executor, *urls))


@app.command()
def explain(
    query: Annotated[Path, typer.Argument(metavar="FILE.sql", help="A file with a query; - is the standard input.")],
    table: Annotated[list[str], typer.Option("--table", metavar="NAME=FILES", help="A table; may be repeated.")],
    storage: Storage,
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", "-e", metavar="NAME|ID", help="Where it would run.")
    ] = None,
    fast_storage: FastStorage = "",
    objective: Annotated[str, typer.Option(metavar="cheapest|fastest")] = "cheapest",
    deadline: Annotated[
        float | None, typer.Option(callback=check_number, metavar="SECONDS", help="For the whole query.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(callback=check_number, metavar="DOLLARS", help="For the whole query.")
    ] = None,
) -> None:
    """Show the plan of a query, what else was compared, and its stages. Nothing runs; of files, only their ends are
    read."""
    tables = {}
    for each in table:
        name, equals, files = each.partition("=")
        if not (name and equals and files):
            raise ConfigurationError(
                f"--table {each}: expected NAME=FILES.", hint="Write --table 'visits=in/*.parquet'."
            )
        tables[name] = files
    text = sys.stdin.read() if str(query) == "-" else _text(query)
    with _executor(endpoint) as executor:
        try:
            dataset = fa.sql(
                text,
                tables=tables,
                executor=executor,
                storage=storage,
                fast_storage=fast_storage,
                objective=objective,
                deadline_s=deadline,
                budget=budget,
            )
            typer.echo(dataset.plan().explain())
        except (fa.QueryProblem, fa.InputProblem, fa.NoPlan) as error:
            raise ConfigurationError(str(error)) from error


def _executor(endpoint: str | None) -> Executor | ThreadPoolExecutor:
    """Return the executor of an endpoint. Without an endpoint and a login, one for plans from assumptions."""
    try:
        return Executor(endpoint)
    except ConfigurationError:
        if endpoint is not None:
            raise
        return ThreadPoolExecutor(1)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is no text.", hint="Name a file with a query in SQL.") from error


def _note(text: str) -> None:
    typer.echo(text, err=True)


def _show(found: Profile) -> None:
    workers = found.workers
    typer.echo(
        f"{workers.most} workers with {bytes_text(workers.memories[0])} each; "
        f"a call takes {number_text(workers.call_s * 1e3)} ms, "
        f"a processor partitions {bytes_text(workers.partition_bytes_per_s)}/s "
        f"and combines {bytes_text(workers.combine_bytes_per_s)}/s"
    )
    rows = [
        (
            tier.name,
            number_text(tier.reads_per_s.points[0][1]),
            number_text(tier.writes_per_s.points[0][1]),
            f"{bytes_text(tier.read_bytes_per_s.points[0][1])}/s",
            f"{bytes_text(tier.write_bytes_per_s.points[0][1])}/s",
            "no limit" if tier.total_bytes_per_s == float("inf") else f"{bytes_text(tier.total_bytes_per_s)}/s",
            f"{number_text(tier.latency_s * 1e3)} ms",
        )
        for tier in found.tiers.values()
    ]
    show_table(_COLUMNS, rows)
