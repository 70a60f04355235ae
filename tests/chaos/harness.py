"""Harness of the chaos test: a local tier, endpoints, programs of users, counts of starts and results."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil
import psycopg

from farcall_common.errors import FarcallError, Unavailable
from farcall_local.endpoint import LocalEndpoint
from farcall_local.postgres_files import forget_database
from farcall_local.tier import LocalTier
from tests.chaos.submitter import Orders

ROOT = Path(__file__).parents[2]
#: Modules whose wall clock can be moved.
CLOCKS = ("farcall_forwarder", "farcall_lambdas.local", "farcall_endpoint.agent")
_USERS = ("ada", "grace")
_LOOK_EVERY_S = 0.05
_TERMINAL = {"success", "failed", "cancelled", "lost", "dead-lettered"}


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much a phase does. ``tasks`` is for the phase; the rest is shorter where the test runs with others."""

    tasks: int
    hang_s: float = 75.0
    silence_s: float = 60.0
    rounds: int = 5
    big_results: int = 300
    backlog: int = 10_000
    within_s: float = 300.0


@dataclasses.dataclass
class PhaseResult:
    """The tasks of one phase, counted by result. ``broken`` lists the promises that did not hold."""

    name: str
    accepted: int = 0
    ended: int = 0
    unended: int = 0
    lost: int = 0
    lost_unstarted: int = 0
    once_twice: int = 0
    aborted: int = 0
    skipped: bool = False
    kills_agent: bool = False
    differing: int = 0
    unexpected: dict[str, int] = dataclasses.field(default_factory=dict)
    back_s: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    notes: list[str] = dataclasses.field(default_factory=list)
    broken: list[str] = dataclasses.field(default_factory=list)

    def judge(self) -> None:
        """Note the promises that hold in every phase and were broken in this one."""
        promises = {
            "tasks lost although no agent was killed": 0 if self.kills_agent else self.lost,
            "tasks without an end": self.unended,
            "once-only tasks started twice": self.once_twice,
            "programs aborted": self.aborted,
            "ends that differ between SDK and PostgreSQL": self.differing,
            "ends that no fault explains": sum(self.unexpected.values()),
        }
        self.broken += [f"{count} {what}" for what, count in promises.items() if count]
        if not self.accepted and not self.skipped:
            self.broken.append("nothing was accepted")


class Load:
    """Programs that submit to some endpoints, and what is known of their tasks."""

    def __init__(self, lab: Lab, directory: Path, users: Sequence[tuple[Orders, Mapping[str, str]]]) -> None:
        self._lab = lab
        self._directory = directory
        self._orders = [orders for orders, _ in users]
        self._given = self._ended = 0
        self._read_bytes: dict[str, int] = {}
        self._programs: list[subprocess.Popen[str]] = []
        for orders, environment in users:
            with (directory / f"{orders.name}.log").open("ab") as log:
                self._programs.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.chaos.submitter", json.dumps(orders._asdict())],
                        cwd=ROOT,
                        env={**os.environ, **environment},
                        stdin=subprocess.PIPE,
                        stdout=subprocess.DEVNULL,
                        stderr=log,
                        text=True,
                    )
                )
        try:
            for orders, program in zip(self._orders, self._programs, strict=True):
                wait_until(lambda: "ready" in self._text(orders.ends) or program.poll() is not None)  # noqa: B023
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for program in self._programs:
            program.kill()
            program.wait()
            assert program.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                program.stdin.close()

    @property
    def pids(self) -> list[int]:
        return [program.pid for program in self._programs if program.poll() is None]

    def submit(self, count: int) -> None:
        """Let the programs submit so many tasks together; they do it one after the other, in the background."""
        share, rest = divmod(count, len(self._programs))
        for index, program in enumerate(self._programs):
            if own := share + (index < rest):
                assert program.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # it was aborted, which is counted at the end
                    program.stdin.write(f"{own}\n")
                    program.stdin.flush()
                    self._given += own

    def ended(self) -> int:
        """How many results the programs have seen. It is called often, so it reads only what was added since."""
        for orders in self._orders:
            with contextlib.suppress(FileNotFoundError), Path(orders.ends).open("rb") as file:
                file.seek(self._read_bytes.get(orders.ends, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
                self._read_bytes[orders.ends] = self._read_bytes.get(orders.ends, 0) + len(whole + newline)
                self._ended += sum(line.startswith(b"end ") for line in whole.split(b"\n"))
        return self._ended

    def started(self) -> collections.Counter[str]:
        """How often each task was started."""
        return collections.Counter(key for orders in self._orders for key in self._text(orders.starts).split())

    def wait_for_more(self, than: int, *, within_s: float | None = None) -> float:
        """Wait for more results than ``than``, or all; returns the seconds. It does not fail: others count."""
        began = time.monotonic()
        with contextlib.suppress(TimeoutError):
            wait_until(
                lambda: than >= self._given or self.ended() > than or not self.pids,
                within_s=self._lab.scale.within_s if within_s is None else within_s,
            )
        return time.monotonic() - began

    def count(self, result: PhaseResult) -> None:
        """Wait for all results, and count them."""
        for program in self._programs:
            assert program.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                program.stdin.close()
        retry_timeout_s = max(orders.within_s for orders in self._orders) + 60.0
        with contextlib.suppress(TimeoutError):
            while self.pids:
                before = self.ended()
                wait_until(lambda: self.ended() > before or not self.pids, within_s=retry_timeout_s)  # noqa: B023
        result.aborted += sum(program.poll() != 0 for program in self._programs)
        lines = [line.split() for orders in self._orders for line in self._text(orders.ends).splitlines()]
        groups = [line[1] for line in lines if line[0] == "group"]
        ends = {line[2]: line for line in lines if line[0] == "end"}
        starts, stored = self.started(), self._stored(groups)
        result.accepted += len(stored)
        for task_id, state in stored.items():
            _, key, _, kind, outcome = ends.get(task_id, ("", "", "", "?", "open"))
            heard = _STATES.get(outcome, "failed")
            if state not in _TERMINAL or (outcome == "open" and not result.aborted):
                result.unended += 1
                continue
            result.ended += 1
            if state == "lost":
                result.lost += 1
                result.lost_unstarted += bool(key) and not starts[key]
            elif state != "success" and (kind, outcome) not in _OF_A_KILL:
                name = outcome if outcome != "open" else state
                result.unexpected[name] = result.unexpected.get(name, 0) + 1
            result.differing += outcome != "open" and heard != state
        for task_id in ends.keys() - stored.keys():
            name = f"{ends[task_id][4]} before it was accepted"
            result.unexpected[name] = result.unexpected.get(name, 0) + 1
        result.once_twice += sum(starts[key] > 1 for _, key, _, kind, _ in ends.values() if kind == "once")

    def _stored(self, groups: Sequence[str]) -> dict[str, str]:
        query = "SELECT task_id, state FROM task WHERE task_group_id = ANY(%s)"
        for attempt in range(30):
            try:
                with psycopg.connect(self._lab.tier.state.database_url) as connection:
                    return dict(connection.execute(query, [list(groups)]).fetchall())
            except psycopg.OperationalError:
                if attempt == 29:
                    raise
                time.sleep(1.0)
        raise AssertionError

    def _text(self, path: str) -> str:
        try:
            return Path(path).read_text()
        except FileNotFoundError:
            return ""


#: A once-only task whose worker was killed is known to have started, and is not tried again.
_OF_A_KILL = {("once", "WORKER_DIED")}
_STATES = {"success": "success", "TASK_LOST": "lost", "cancelled": "cancelled", "DEAD_LETTERED": "dead-lettered"}


class Lab:
    """A local tier and the folder of this run; a phase makes its own endpoints and programs."""

    def __init__(self, directory: Path, scale: Scale) -> None:
        self.directory = directory
        self.scale = scale
        self.tier = LocalTier(directory / "tier", users=_USERS)
        self._clocks = directory / "clocks"
        self._clocks.mkdir(parents=True, exist_ok=True)
        for module in CLOCKS:
            self.move_clock(module, 0.0)

    def __enter__(self) -> Self:
        self._environ = dict(os.environ)
        os.environ["CHAOS_CLOCKS"] = str(self._clocks)  # read by what is started from now on
        os.environ["PYTHONPATH"] = str(Path(__file__).with_name("clock"))
        (self.directory / "tier").mkdir(exist_ok=True)
        try:
            self.tier.__enter__()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        self.tier.__exit__(None, None, None)
        forget_database(self.directory / "tier")

    def _restore(self) -> None:
        os.environ.clear()
        os.environ.update(self._environ)

    def environment(self, user: str = "ada", *, api_url: str = "") -> dict[str, str]:
        """What the programs of a user need, by another way to the API if there is one."""
        return {"FARCALL_API_URL": api_url or self.tier.api_url, "FARCALL_TOKEN": self.tier.tokens[user]}

    @contextlib.contextmanager
    def endpoint(
        self, name: str, *, home: Path | None = None, api_url: str = "", configuration: str = ""
    ) -> Iterator[LocalEndpoint]:
        """An endpoint with two workers."""
        endpoint = LocalEndpoint(
            name, home=home or self.directory / "home", environment=self.environment(api_url=api_url)
        )
        endpoint.configure()
        text = configuration or "engine:\n  max_workers_per_node: 2\nheartbeat_period: 5\n"
        (endpoint.directory / "config.yaml").write_text(text)
        try:
            self.start_again(endpoint)
            yield endpoint
        finally:
            for role in ("worker", "manager"):
                for process in endpoint.processes(role):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.send_signal(signal.SIGCONT)
            endpoint.kill()

    def load(
        self, name: str, endpoints: Sequence[LocalEndpoint], *, programs: int = 1, user: str = "ada", api_url: str = "",
        once: int = 1, once_of: int = 2, task_s: float = 0.005, result_bytes: int = 0, argument_bytes: int = 0,
        busy: bool = False, target_ms: float = 0.0, directory: Path | None = None,
    ) -> Load:  # fmt: skip
        """Programs of a user that submit to these endpoints; their counts are in ``directory``, or in the lab's."""
        directory = (directory or self.directory) / name
        directory.mkdir(exist_ok=True)
        users = []
        for index in range(programs):
            own = f"{user}-{index}"
            for kind in ("starts", "ends"):
                (directory / f"{own}.{kind}").unlink(missing_ok=True)
            orders = Orders(
                own, [endpoint.endpoint_id for endpoint in endpoints], str(directory / f"{own}.starts"),
                str(directory / f"{own}.ends"), once, once_of, task_s, result_bytes, busy, self.scale.within_s,
                target_ms, argument_bytes,
            )  # fmt: skip
            users.append((orders, self.environment(user, api_url=api_url)))
        return Load(self, directory, users)

    def start_again(self, endpoint: LocalEndpoint, *, within_s: float = 150.0) -> None:
        """Start an endpoint whose agent was killed: another one may not be let in at once. If its spool is refused as
        an old copy, it starts with an empty one, as its operator is advised to.

        :raises Unavailable: if it does not start in time.
        """
        deadline = time.monotonic() + within_s
        while True:
            try:
                endpoint.start()
                return
            except (Unavailable, subprocess.TimeoutExpired) as error:
                if "SPOOL_OUTDATED" in str(error):
                    endpoint.command("start", endpoint.name, "--detach", "--new-spool")
                    return
                if time.monotonic() > deadline:
                    raise
                time.sleep(1.0)

    def kill_all_of(self, endpoint: LocalEndpoint) -> None:
        """kill -9 of an endpoint's agent and of all below it."""
        agent = endpoint.agent()
        family = tree(agent) if agent else []
        for process in family:
            kill(process)
        psutil.wait_procs(family, timeout=30.0)

    def move_clock(self, module: str, offset_s: float) -> None:
        """Move the wall clock of the processes that run a module."""
        path = self._clocks / module
        if not path.exists():
            path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            file.write(struct.pack("d", offset_s))

    def parts(self, endpoint: LocalEndpoint, load: Load | None = None) -> dict[str, list[psutil.Process]]:
        """The processes of the tier, of an endpoint, and of the users' programs, by role."""
        found: dict[str, list[psutil.Process]] = {}
        for name in self.tier.state.processes:
            if (pid := self.tier.pid(name)) is not None and psutil.pid_exists(pid):
                found[name] = tree(psutil.Process(pid))
        if (agent := endpoint.agent()) is not None:
            found["agent"] = [agent]
        for role in ("manager", "worker"):
            found[role] = list(endpoint.processes(role))
        found["program"] = [psutil.Process(pid) for pid in (load.pids if load else ()) if psutil.pid_exists(pid)]
        return found


@dataclasses.dataclass(frozen=True)
class Sample:
    """Memory (PSS, bytes) and descriptors by role, after so many ends."""

    ended: int
    pss_bytes: Mapping[str, int]
    descriptors: Mapping[str, int]

    @classmethod
    def take(cls, ended: int, parts: Mapping[str, Iterable[psutil.Process]]) -> Sample:
        pss: dict[str, int] = {}
        descriptors: dict[str, int] = {}
        for role, processes in parts.items():
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    pss[role] = pss.get(role, 0) + process.memory_full_info().pss
                    descriptors[role] = descriptors.get(role, 0) + process.num_fds()
        return cls(ended, pss, descriptors)


def slope(samples: Sequence[Sample], role: str) -> float:
    """Bytes that a role grows by with each task: the straight line through the samples."""
    points = [(sample.ended, sample.pss_bytes[role]) for sample in samples if role in sample.pss_bytes]
    if len({ended for ended, _ in points}) < 2:
        return 0.0
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def tree(process: psutil.Process) -> list[psutil.Process]:
    """A process and all below it."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill(process: psutil.Process) -> None:
    """kill -9; a process that is gone already is fine."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """SIGSTOP, and SIGCONT at the end of the block."""
    try:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def wait_until(condition: Callable[[], bool], *, within_s: float = 120.0) -> None:
    """Wait for a condition.

    :raises TimeoutError: if it does not hold in time.
    """
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within_s:g} s")
        time.sleep(_LOOK_EVERY_S)


def pause(seconds: float) -> None:
    """How long a fault lasts."""
    time.sleep(seconds)


#: What a phase may end with that is no fault of the test.
Failure = FarcallError
