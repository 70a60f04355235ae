"""Files on nodes: one that many tasks on several managers share, each with its own copies, on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.report import GOAL_COLUMNS, Figure, Report, goal_row, heading, page, spread, table
from farcall_common.file_arguments import File
from farcall_common.staged_files import FileUse, pack_files
from farcall_common.wire import TaskState
from tests.support.endpoint import EndpointProcess, running_endpoint
from tests.support.file_servers import WebServer
from tests.waiting import wait_until

_BYTES: Final = 200_000_000
_QUICK_BYTES: Final = 20_000_000
_TASKS: Final = 1000
_NODES: Final = 8
_CACHE_GB: Final = 2
_GOAL: Final = 2.0
_FROM_ENDPOINT: Final = "from the endpoint's directory"
_FROM_NODE: Final = "from the node at"
Samples = dict[str, float]


def begin(file: Any, seconds: float) -> tuple[str, float]:
    """A task that keeps its node for so long; the path of its file, and when it began."""
    now = time.time()
    time.sleep(seconds)
    return str(file.path), now


def size_of(file: Any) -> int:
    """The size of a task's file."""
    return int(file.path.stat().st_size)


def measure(*, quick: bool, full: bool) -> Samples:  # noqa: ARG001 - all of it in every round
    """One round."""
    data = os.urandom(1000) * ((_QUICK_BYTES if quick else _BYTES) // 1000)
    tasks = _TASKS // (10 if quick else 1)
    web = WebServer()
    web.files["/shared"] = data
    file = File(f"{web.url}/shared", size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    samples: Samples = {}
    with tempfile.TemporaryDirectory() as directory, contextlib.closing(web):
        home = Path(directory)
        # The first run leaves the file in the endpoint's cache: what is measured is the way to the nodes.
        with _endpoint(home, nodes=1, cache_gb=0) as endpoint:
            _results(endpoint, size_of, [(file,)])
        with _endpoint(home, nodes=1, cache_gb=_CACHE_GB) as endpoint:
            one_s = samples["copy for one node, s"] = _until_begun(endpoint, file, nodes=1)
        with _endpoint(home, nodes=_NODES, cache_gb=_CACHE_GB) as endpoint:
            all_s = samples[f"copies for {_NODES} nodes, s"] = _until_begun(endpoint, file, nodes=_NODES)
            samples["reads of the endpoint's copy"] = _count(endpoint, _FROM_ENDPOINT)
            samples["copies from node to node"] = _count(endpoint, _FROM_NODE)
            samples[f"tasks that share the file, {_NODES} nodes, ms a task"] = _many(endpoint, file, tasks)
        with _endpoint(home, nodes=_NODES, cache_gb=_CACHE_GB) as endpoint:
            samples["the same from the start, with copying, ms a task"] = _many(endpoint, file, tasks)
        with _endpoint(home, nodes=_NODES, cache_gb=0) as endpoint:
            samples["the same without copies on nodes, ms a task"] = _many(endpoint, file, tasks)
        samples["reads of the source"] = web.requests["GET", "/shared"]
    samples[f"{_NODES} nodes to one"] = all_s / one_s
    return samples


@contextlib.contextmanager
def _endpoint(home: Path, *, nodes: int, cache_gb: float) -> Iterator[EndpointProcess]:
    provider = {"type": "LocalProvider", "init_blocks": nodes, "min_blocks": nodes, "max_blocks": nodes}
    with running_endpoint(home, workers=1, start=False, engine={"provider": provider}) as endpoint:
        config = yaml.safe_load(endpoint.directory.config_file.read_text())
        config["engine"]["provider"] = provider
        config |= {"files": {"node_cache": cache_gb}, "debug": True}
        endpoint.directory.config_file.write_text(yaml.safe_dump(config))
        for log in endpoint.directory.log_dir.glob("*.log"):
            log.unlink()
        endpoint.start()
        wait_until(lambda: endpoint.directory.read_status().get("workers") == nodes, "workers")
        yield endpoint


def _results(endpoint: EndpointProcess, function: Any, calls: list[tuple[Any, ...]]) -> list[Any]:
    serializer = endpoint.cloud.serializer
    payloads = [
        pack_files([FileUse(args[0].url, "r", args[0].size_bytes, args[0].sha256)], serializer.pack_call(args))
        for args in calls
    ]
    task_ids = endpoint.cloud.submit_raw(serializer.pack_function(function), payloads, submitter="")
    ends = list(endpoint.cloud.ends(task_ids))
    assert all(end.state is TaskState.SUCCESS for end in ends), [end.error for end in ends]
    return [end.value for end in ends]


def _until_begun(endpoint: EndpointProcess, file: File, *, nodes: int) -> float:
    """Seconds from the submit until a task runs on each node, with a copy there."""
    began = time.time()
    started = _results(endpoint, begin, [(file, 0.5)] * nodes)
    assert len({re.findall("farcall-temporary-files-[^/]*", path)[0] for path, _ in started}) == nodes
    return float(max(at for _, at in started) - began)


def _many(endpoint: EndpointProcess, file: File, tasks: int) -> float:
    began = time.perf_counter()
    assert set(_results(endpoint, size_of, [(file,)] * tasks)) == {file.size_bytes}
    return 1000 * (time.perf_counter() - began) / tasks


def _count(endpoint: EndpointProcess, words: str) -> int:
    return endpoint.log().count(words)


def as_table(report: Report) -> str:
    """The goals, and medians and spreads of all rounds."""
    rounds: list[Samples] = report["rounds"]
    found = {name: spread([each[name] for each in rounds]) for name in rounds[0]}
    ratio = found[f"{_NODES} nodes to one"]["median"]
    reads = max(each["reads of the source"] for each in rounds)
    goals = [
        Figure("reads of the source", reads, "", "1", reads == 1),
        Figure(f"copies for {_NODES} nodes, to that for one", ratio, "x", f"≤ {_GOAL:g}", ratio <= _GOAL),
    ]
    rows = [(name, *(f"{each[key]:,.3g}" for key in ("median", "min", "max"))) for name, each in found.items()]
    return page(
        heading(
            report,
            f"{len(rounds)} rounds; one file of {_BYTES // 10**6} MB, {_TASKS:,} tasks",
            "all nodes are managers on this machine, with one worker each, and share its disk and cores",
        ),
        table(GOAL_COLUMNS, [goal_row(each.name, each.shown(), each.goal, each.reached) for each in goals]),
        table(("figure", "median", "min", "max"), rows),
    )
