"""Warm starts: ``python -m benchmarks.warm_starts [--image DIRECTORY] [--count N]``.

From a manager's request for a worker to the first line of a function that needs NumPy and pandas, after its imports:
in a container of an image's own root (bubblewrap; Charliecloud as root), with the launcher that a manager has, which
also delivers the task. The arms are run in turn: a fresh container, a fork that begins with the request, and a child
that was forked in advance, one at a time and eight at once. Then the memory of sixteen workers, one-shot workers, and
what is left of all this.

The image is a directory with a Debian of this machine's Python, NumPy and pandas; it is made from the one of the tests.
As an ordinary user: the same command under ``setpriv --reuid 1000``, with a Python that this user may read.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import os
import select
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.report import Figure, Report, figure_table, new_report, parse_options, save
from farcall_common.environments import Environment
from farcall_common.payload import Serializer
from farcall_common.task_options import TaskOptions
from farcall_endpoint.environments.settings import EnvironmentSettings
from farcall_endpoint.environments.template_pool import TemplatePool
from farcall_endpoint.environments.templates import ForkedProcess, Template, start_template
from farcall_endpoint.manager.events import EnvironmentFailed, EnvironmentReady, Event
from farcall_endpoint.manager.launcher import FreshProcessLauncher
from farcall_endpoint.manager.slots import Slot
from farcall_endpoint.manager.worker_process import WorkerProcess, Workplace
from farcall_endpoint.process_reaper import descendants, read_processes
from farcall_endpoint.worker.boot import Boot, Descriptors
from farcall_endpoint.worker.channel import Channel, Done, Order, Ready, Run, channel_pair
from farcall_endpoint.worker.settings import WorkerSettings

_TESTS_IMAGE: Final = Path(".tools/images/debian")
_PACKAGES: Final = "usr/local/lib/python{0.major}.{0.minor}/dist-packages"
_AT_ONCE: Final = 8
_WORKERS: Final = 16
_LIMIT_S: Final = 60.0
_STEP_S: Final = 0.02
"""Between two measurements, so that the machine is idle again."""


def first_line() -> float:
    """When the function could begin."""
    import time

    import numpy  # noqa: F401
    import pandas  # type: ignore[import-untyped]  # noqa: F401

    return time.monotonic()


def use_pandas() -> float:
    """A small calculation."""
    import numpy
    import pandas

    return float(pandas.DataFrame({"a": numpy.arange(1000)}).a.sum())


def nothing() -> float:
    """Nothing that needs an import."""
    return 0.0


@functools.cache
def packed(function: Callable[[], float]) -> tuple[Run, list[bytes]]:
    """The packet of a task."""
    serializer = Serializer()
    body, payload = serializer.pack_function(function), serializer.pack_call(())
    function_hash = hashlib.sha256(body).hexdigest()
    order = Order("t", 1, function_hash, len(payload), TaskOptions())
    return Run((order,), ((function_hash, len(body)),)), [body, payload]


def results(channels: Sequence[Channel], function: Callable[[], float]) -> list[float]:
    """Give a task to each worker as soon as it is ready; their results, in order of the workers."""
    packet, body = packed(function)
    poll = select.poll()
    found: dict[int, float] = {}
    numbers = {channel.fileno(): number for number, channel in enumerate(channels)}
    for channel in channels:
        poll.register(channel, select.POLLIN)
    while len(found) < len(channels):
        ready = poll.poll(_LIMIT_S * 1000)
        if not ready:
            raise TimeoutError("no worker")
        for descriptor, _ in ready:
            number = numbers[descriptor]
            received = channels[number].receive()
            if received is None:
                raise RuntimeError("a worker died")
            if isinstance(received[0], Ready):
                channels[number].order(packet, body)
            elif isinstance(received[0], Done):
                if received[0].error is not None:
                    raise RuntimeError(str(received[0].error))
                found[number] = float(Serializer().deserialize(bytes(received[1])))  # type: ignore[arg-type]
                poll.unregister(descriptor)
    return [found[number] for number in range(len(channels))]


@dataclasses.dataclass
class Node:
    """A launcher in a directory, and an environment that is prepared."""

    launcher: FreshProcessLauncher
    environment: Environment
    next_id: int = 0
    events: list[Event] = dataclasses.field(default_factory=list)

    @property
    def pool(self) -> TemplatePool:
        """Of the launcher."""
        return self.launcher._in_environments()._launcher._pool

    def launch(self) -> WorkerProcess:
        """A worker that starts."""
        self.next_id += 1
        return self.launcher.launch(self.next_id, slot=0, submitter="", environment=self.environment)

    def serve_until(self, condition: Callable[[], bool]) -> None:
        """Do what a manager does meanwhile."""
        deadline = time.monotonic() + _LIMIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError
            select.select([self.launcher], [], [], 0.02)
            self.events += self.launcher.serve()

    def first_lines(self, count: int) -> list[float]:
        """Milliseconds from the request for each of so many workers to the first line of its function."""
        started: list[float] = []
        workers: list[WorkerProcess] = []
        for _ in range(count):
            started.append(time.monotonic())
            workers.append(self.launch())
        try:
            # All were asked for at the same time.
            self._wait_for_containers(workers)
            return [1000 * (at - started[0]) for at in results([worker.channel for worker in workers], first_line)]
        finally:
            for worker in workers:
                self.end(worker)
            self.launcher.serve()

    def wait_for_spares(self, count: int) -> None:
        """Wait until children were forked in advance, and are idle."""
        [entry] = self.pool._serving.values()
        spares = entry.template._spares
        self.serve_until(lambda: len(spares) == count and all(spare.pid for spare in spares))
        time.sleep(_STEP_S * max(1, count))

    def _wait_for_containers(self, workers: Sequence[WorkerProcess]) -> None:
        """A container's program connects, and is served; a fork is served by its template."""
        fresh = [worker for worker in workers if not isinstance(worker.process, ForkedProcess)]
        if fresh:
            self.serve_until(lambda: all(_is_readable(worker.channel.fileno()) for worker in fresh))

    def end(self, worker: WorkerProcess) -> None:
        """Kill a worker, and wait for its end."""
        worker.kill()
        select.select([worker.pidfd], [], [], _LIMIT_S)
        worker.reap()


@contextlib.contextmanager
def running_node(image: Path, *, fork: bool, spares: int = 0) -> Iterator[Node]:
    """A node whose workers are forks, or fresh containers."""
    # As root, workers of bubblewrap are fresh containers.
    technology = "charliecloud" if os.geteuid() == 0 else "bubblewrap"
    environment = Environment(type=technology, location=str(image), preload=("numpy", "pandas"))
    with tempfile.TemporaryDirectory(prefix="farcall-bench-") as name:
        directory = Path(name)
        place = Workplace(
            working_dir=directory / "work",
            environment=dict(os.environ),
            slots=(Slot(0, threads=1),),
            settings=WorkerSettings(),
        )
        launcher = FreshProcessLauncher(
            place, environments=EnvironmentSettings(cache_dir=str(directory / "cache"), fork=fork)
        )
        node = Node(launcher, environment)
        try:
            launcher.prepare(environment)
            node.pool._spares = spares
            ends = (EnvironmentReady, EnvironmentFailed)
            node.serve_until(lambda: any(isinstance(event, ends) for event in node.events))
            failed = [event.record for event in node.events if isinstance(event, EnvironmentFailed)]
            if failed:
                raise RuntimeError(str(failed[0]))
            if fork:
                _wait_for_template(node)
            yield node
        finally:
            launcher.close()


def _wait_for_template(node: Node) -> None:
    """Start workers until they are forks, and spare children are there."""
    while True:
        worker = node.launch()
        node._wait_for_containers([worker])
        node.serve_until(lambda: _is_readable(worker.channel.fileno()))  # noqa: B023
        is_fork = isinstance(worker.process, ForkedProcess)
        node.end(worker)
        if is_fork:
            break
        with contextlib.suppress(TimeoutError):
            deadline = time.monotonic() + 3
            node.serve_until(lambda: time.monotonic() > deadline)  # noqa: B023
    time.sleep(1)
    node.launcher.serve()


def measure(image: Path, count: int) -> list[Figure]:
    """All figures."""
    before = left_over()
    figures: list[Figure] = []
    for function in (first_line, use_pandas, nothing):
        packed(function)  # its submitter's work
    with running_node(image, fork=False) as node:
        values = [value for _ in range(max(10, count // 20)) for value in node.first_lines(1)]
        figures += quantiles("fresh container", values)
    goals = (7.0, 15.0) if os.geteuid() == 0 else (8.0, 17.0)
    for spares, label, (median_ms, tail_ms) in (
        (0, "fork begun after the request", goals),
        (1, "child forked in advance", (1.0, 4.0)),
    ):
        with running_node(image, fork=True, spares=spares) as node:
            values = []
            for _ in range(count):
                node.wait_for_spares(spares)
                values += node.first_lines(1)
            figures += quantiles(label, values, median_ms, tail_ms)
        with running_node(image, fork=True, spares=spares * _AT_ONCE) as node:
            values = []
            for _ in range(count // _AT_ONCE):
                node.wait_for_spares(spares * _AT_ONCE)
                values += node.first_lines(_AT_ONCE)
            figures += quantiles(f"{label}, {_AT_ONCE} at once", values, median_ms, tail_ms)
            if not spares:
                figures += memory(node)
                figures.append(one_shot(node, count))
    figures.append(bare_one_shot(count * 2))
    after = left_over()
    figures.append(
        Figure(
            "left processes, descriptors, mounts",
            sum(max(0, b - a) for a, b in zip(before, after, strict=True)),
            "",
            "0",
            after <= before,
        )
    )
    return figures


def memory(node: Node) -> list[Figure]:
    """Proportional memory of each of sixteen workers, and of the template in it."""
    workers = [node.launch() for _ in range(_WORKERS)]
    results([worker.channel for worker in workers], use_pandas)
    templates = node.pool.pids
    each = [pss_mib(worker.pid) for worker in workers]
    total = sum(each) + sum(map(pss_mib, templates))
    for worker in workers:
        node.end(worker)
    return [
        Figure(f"memory (PSS) of each of {_WORKERS} workers", sum(each) / _WORKERS, "MiB"),
        Figure("the same, with the template", total / _WORKERS, "MiB", "≤ 8", total / _WORKERS <= 8),
    ]


def one_shot(node: Node, count: int) -> Figure:
    """Tasks per second and core, each in a new worker in a container."""
    started_at = time.monotonic()
    done = 0
    while done < count:
        workers = [node.launch() for _ in range(4)]
        results([worker.channel for worker in workers], use_pandas)
        for worker in workers:
            node.end(worker)
        node.launcher.serve()
        done += len(workers)
    rate = done / (time.monotonic() - started_at) / len(os.sched_getaffinity(0))
    return Figure("one-shot tasks per second and core, NumPy and pandas in a container", rate, "/s", "≥ 80", rate >= 80)


def bare_one_shot(count: int) -> Figure:
    """Tasks per second and core, each in a fork of a template with the standard library only."""
    process, connection = start_template(variables=dict(os.environ))
    template = Template(connection)
    poll = select.poll()
    poll.register(template, select.POLLIN)
    while not template.is_serving:
        poll.poll(1000)
        template.serve()
    output = [os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR | os.O_APPEND) for _ in range(2)]
    started_at = time.monotonic()
    done = 0
    while done < count:
        workers: list[tuple[ForkedProcess, Channel, socket.socket, socket.socket]] = []
        for _ in range(4):
            channel, end, claims = channel_pair()
            boot = Boot(variables={"PATH": os.environ["PATH"]}, directory="/")
            workers.append(
                (template.fork(boot, Descriptors(end.fileno(), claims.fileno(), *output)), channel, end, claims)
            )
        results([channel for _, channel, _, _ in workers], nothing)
        for worker, channel, end, claims in workers:
            channel.close()
            end.close()
            claims.close()
            worker.wait()
            os.close(worker.pidfd)
        template.serve()
        done += len(workers)
    rate = done / (time.monotonic() - started_at) / len(os.sched_getaffinity(0))
    for descriptor in output:
        os.close(descriptor)
    template.close()
    process.wait(_LIMIT_S)
    return Figure(
        "one-shot tasks per second and core, standard library, no container", rate, "/s", "≥ 200", rate >= 200
    )


def quantiles(label: str, values: Sequence[float], median_ms: float = 0, tail_ms: float = 0) -> list[Figure]:
    """Median and 99th percentile."""
    ordered = sorted(values)
    found = []
    for name, share, goal in (("p50", 0.5, median_ms), ("p99", 0.99, tail_ms)):
        value = ordered[min(len(ordered) - 1, int(len(ordered) * share))]
        shown, reached = (f"≤ {goal:g} ms", value <= goal) if goal else ("", None)
        found.append(Figure(f"{label}, {name} (n={len(ordered)})", value, "ms", shown, reached))
    return found


def pss_mib(pid: int) -> float:
    """The proportional memory of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def left_over() -> tuple[int, int, int]:
    """Processes below this one, its descriptors, and the mounts that it sees."""
    return (
        len(descendants({os.getpid()}, read_processes())),
        len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        len(Path("/proc/self/mounts").read_text().splitlines()),
    )


def make_image(path: Path) -> None:
    """The image of the tests, with NumPy and pandas."""
    packages = path / _PACKAGES.format(sys.version_info)
    if (packages / "pandas").is_dir():
        return
    if not path.is_dir():
        shutil.copytree(_TESTS_IMAGE, path, symlinks=True, ignore=special_files)
    command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, "--target", str(packages)]
    subprocess.run([*command, "numpy", "pandas"], check=True)
    for library in Path("/usr/lib").glob("*-linux-gnu/lib*.so.*"):  # of the same Debian: the image is a small one
        if library.name.startswith(("libstdc++.", "libgcc_s.")):
            shutil.copy2(library, path / library.relative_to("/"))


def special_files(directory: str, names: list[str]) -> list[str]:
    """Devices, pipes and sockets: a copy of what ``/dev/zero`` contains would fill the disk."""
    modes = {name: os.lstat(Path(directory) / name).st_mode for name in names}
    return [
        name for name, mode in modes.items() if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))
    ]


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--image", type=Path, default=Path(".tools/images/science"))
    parser.add_argument("--count", type=int, default=400)
    options = parse_options(parser, "warm_starts.json")
    make_image(options.image)
    report: Report = new_report(
        user="root" if os.geteuid() == 0 else "ordinary user",
        figures=[dataclasses.asdict(figure) for figure in measure(options.image.resolve(), options.count)],
    )
    save(report, options.output, figure_table)


if __name__ == "__main__":
    main()
