"""Phases of the chaos test: each breaks something while tasks run, and counts their results."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

import farcall
from farcall_local.endpoint import LocalEndpoint
from tests.chaos.harness import Lab, Load, PhaseResult, Sample, kill, pause, slope, stopped, tree, wait_until
from tests.chaos.proxy import CHANGES, Network

Phase = Callable[[Lab, PhaseResult], None]
Fault = Callable[[], None]

_MIB = 2**20
_TIER_PARTS = ("valkey", "forwarder", "postgres", "blobs", "api")
#: The agent's results wait in memory up to 256 MB by default; the rest is the agent itself and copies on their way.
_AGENT_LIMIT_BYTES = 700 * _MIB
#: A role that grows by more in the second half of the soak is not flat: noise, and so much for each task.
_NOISE_BYTES, _GROWTH_BYTES_PER_TASK = 4 * _MIB, 40
_SINGLE_TASK_S = 10.0
_TAKES_ROOT = "skipped: a small file system, which takes root and mount"


def under_load(load: Load, result: PhaseResult, tasks: int, faults: Sequence[Fault]) -> None:
    """For each fault some tasks: half before it, half while it lasts. Notes how long the next result took after it."""
    share = max(2, tasks // max(1, len(faults)))
    for fault in faults:
        before = load.ended()
        load.submit(share // 2)
        load.wait_for_more(before)
        load.submit(share - share // 2)
        fault()
        result.back_s.append(load.wait_for_more(load.ended()))


def kills(lab: Lab, result: PhaseResult) -> None:
    """kill -9 of each kind of process, one at a time, and wipes of Valkey."""
    result.kills_agent = True
    with (
        lab.endpoint("kills") as endpoint,
        lab.load("kills", [endpoint], programs=2, busy=True, target_ms=1000) as load,
    ):

        def part(name: str) -> Fault:
            return lambda: _restarted(lab, name)

        def agent() -> None:
            lab.kill_all_of(endpoint)
            lab.start_again(endpoint)

        def below(role: str) -> Fault:
            def fault() -> None:
                for process in endpoint.processes(role)[:1]:
                    kill(process)

            return fault

        each = [*map(part, _TIER_PARTS), lab.tier.wipe_queue, agent, below("manager"), below("worker")]
        under_load(load, result, lab.scale.tasks, each * lab.scale.rounds)
        load.count(result)


def _restarted(lab: Lab, name: str) -> None:
    pid = lab.tier.kill(name)
    lab.tier.wait_up(name, other_than=pid, within_s=100.0)


def hangs(lab: Lab, result: PhaseResult) -> None:
    """SIGSTOP, and SIGCONT some time later, of each kind of process."""
    with lab.endpoint("hangs") as endpoint, lab.load("hangs", [endpoint], target_ms=1000) as load:

        def hang(role: str) -> Fault:
            def fault() -> None:
                everything = lab.parts(endpoint)
                with stopped(everything[role] if role != "agent and all below" else _family(endpoint)):
                    pause(lab.scale.hang_s)

            return fault

        roles = ("forwarder", "agent", "manager", "worker", "valkey", "postgres", "api")
        under_load(load, result, lab.scale.tasks, list(map(hang, roles)))
        load.count(result)


def _family(endpoint: LocalEndpoint) -> list[psutil.Process]:
    agent = endpoint.agent()
    return tree(agent) if agent else []


def network(lab: Lab, result: PhaseResult) -> None:
    """Latency, resets, and silences on the way of the endpoint and of the program to API and forwarder."""
    with (
        Network(lab.tier.api_url) as way,
        lab.endpoint("network", api_url=way.api_url) as endpoint,
        lab.load("network", [endpoint], api_url=way.api_url) as load,
    ):

        def latency() -> None:
            way.delay(0.5)
            pause(lab.scale.hang_s / 10)
            way.delay(0.0)

        def silence() -> None:
            way.silence(True)
            pause(lab.scale.hang_s / 5)
            way.silence(False)

        faults = [way.reset, latency, way.reset, silence] * lab.scale.rounds
        under_load(load, result, lab.scale.tasks, faults)
        load.count(result)


def answers(lab: Lab, result: PhaseResult) -> None:
    """Answers of the API and of the blob store changed on their way to programs: one without a result stream, and one
    whose arguments and results are large."""
    with (
        Network(lab.tier.api_url, has_forwarders=False) as polls,
        Network(lab.tier.api_url) as way,
        lab.endpoint("answers") as endpoint,
        lab.load("answers", [endpoint], api_url=polls.api_url) as load,
        lab.load("answers-large", [endpoint], api_url=way.api_url, result_bytes=100_000, argument_bytes=300_000) as big,
    ):
        share = max(4, lab.scale.tasks // len(CHANGES))
        for program in (load, big):
            program.submit(2)
            program.wait_for_more(1)
        for name, change in CHANGES.items():
            before = load.ended(), big.ended()
            polls.change(change)
            way.change(change)
            load.submit(share)
            big.submit(max(2, min(share // 4, 40)))
            pause(lab.scale.hang_s / 10)
            wait_until(lambda: polls.changed > 1 and way.changed > 1)
            result.notes.append(f"{name}: {polls.changed + way.changed} answers changed")
            polls.change(None)
            way.change(None)
            result.back_s.append(load.wait_for_more(before[0]) + big.wait_for_more(before[1]))
        load.count(result)
        big.count(result)


def silence(lab: Lab, result: PhaseResult) -> None:
    """Once-only tasks, and a minute without network between endpoint and forwarder."""
    with (
        Network(lab.tier.api_url) as way,
        lab.endpoint("silence", api_url=way.api_url) as endpoint,
        lab.load("silence", [endpoint], once_of=1, task_s=0.05) as load,
    ):

        def fault() -> None:
            way.silence(True)
            pause(lab.scale.silence_s)
            way.silence(False)

        under_load(load, result, min(lab.scale.tasks, 1200), [fault])
        load.count(result)


def disks(lab: Lab, result: PhaseResult) -> None:
    """No room for the spool for a while: a small file system as root, and a limit on the size of the agent's files."""
    with _small_volume(lab.directory / "volume", mib=24) as volume:
        homes = {"quota": lab.directory / "home"}
        if volume is None:
            result.notes.append(_TAKES_ROOT)
        else:
            homes["volume"] = volume
        for kind, home in homes.items():
            with (
                lab.endpoint(f"disk-{kind}", home=home) as endpoint,
                lab.load(f"disks-{kind}", [endpoint], task_s=0.01) as load,
            ):

                def fault(kind: str = kind, endpoint: LocalEndpoint = endpoint, home: Path = home) -> None:
                    with _no_room(endpoint) if kind == "quota" else _filled(home / "ballast"):
                        pause(lab.scale.hang_s / 5)

                under_load(load, result, lab.scale.tasks // len(homes), [fault])
                load.count(result)


def tier_disk(lab: Lab, result: PhaseResult) -> None:
    """No room for the tier for a while: its database, its blobs and its logs are on a small file system."""
    with _small_volume(lab.directory / "volume", mib=800) as volume:
        if volume is None:
            result.notes.append(_TAKES_ROOT)
            result.skipped = True
            return
        with (
            Lab(volume, lab.scale) as inner,
            inner.endpoint("tier-disk", home=lab.directory / "home") as endpoint,
            inner.load("tier-disk", [endpoint], directory=lab.directory, task_s=0.01) as load,
        ):

            def fault() -> None:
                with _filled(volume / "ballast"):
                    pause(lab.scale.hang_s / 5)

            under_load(load, result, lab.scale.tasks, [fault, fault])
            load.count(result)


@contextlib.contextmanager
def _small_volume(path: Path, *, mib: int) -> Iterator[Path | None]:
    path.mkdir(exist_ok=True)
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=0755", "tmpfs", str(path)],
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        done = None
    if done is None or done.returncode:
        yield None
        return
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextlib.contextmanager
def _no_room(endpoint: LocalEndpoint) -> Iterator[None]:
    agent = endpoint.agent()
    assert agent is not None
    hard = resource.prlimit(agent.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        if agent.is_running():
            resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))


@contextlib.contextmanager
def _filled(ballast: Path) -> Iterator[None]:
    with ballast.open("wb", buffering=0) as file:
        for size_bytes in (65536, 4096):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size_bytes):
                    pass
    try:
        yield
    finally:
        ballast.unlink()


def clocks(lab: Lab, result: PhaseResult) -> None:
    """The wall clock of the forwarder, of the API and of the agent an hour ahead and an hour behind."""
    modules = ("farcall_forwarder", "farcall_lambdas.local", "farcall_endpoint.agent")
    with lab.endpoint("clocks") as endpoint, lab.load("clocks", [endpoint], once_of=1, task_s=0.02) as load:

        def moved(module: str, offset_s: float, *, restarted: str = "") -> Fault:
            def fault() -> None:
                lab.move_clock(module, offset_s)
                if restarted:
                    _restarted(lab, restarted)
                pause(lab.scale.hang_s / 15)

            return fault

        def right(module: str, restarted: str = "") -> Fault:
            return moved(module, 0.0, restarted=restarted)

        hour = 3600.0
        faults: list[Fault] = []
        for module, offset_s in itertools.product(modules, (hour, -hour)):
            faults += [moved(module, offset_s), right(module)]
        faults += [moved("farcall_forwarder", -hour, restarted="forwarder"), right("farcall_forwarder", "forwarder")]
        try:
            under_load(load, result, lab.scale.tasks, faults)
        finally:
            for module in modules:
                lab.move_clock(module, 0.0)
        load.count(result)
    if max(result.back_s) > 60.0:
        result.broken.append(f"no service for {max(result.back_s):.0f} s with a moved clock")


def flood(lab: Lab, result: PhaseResult) -> None:
    """Several programs submit as fast as they can; a task at another endpoint is timed all the while."""
    with (
        lab.endpoint("flood-1") as first,
        lab.endpoint("flood-2") as second,
        lab.endpoint("calm") as calm,
        lab.load("flood", [first, second], programs=4, task_s=0.0) as load,
        lab.load("calm", [calm], user="ada") as other,
    ):
        load.submit(lab.scale.tasks)
        took = []
        while load.ended() < lab.scale.tasks and load.pids:
            before = other.ended()
            other.submit(1)
            took.append(other.wait_for_more(before))
            pause(0.2)
        result.notes.append(
            f"a task at another endpoint: median {statistics.median(took):.2f} s, worst {max(took):.2f} s"
        )
        load.count(result)
        other.count(result)


def soak(lab: Lab, result: PhaseResult) -> None:
    """A steady stream of tasks without faults: memory and descriptors of each role, after a warm-up."""
    with lab.endpoint("soak") as endpoint, lab.load("soak", [endpoint], task_s=0.0, target_ms=1000) as load:
        samples = []
        share = max(1, lab.scale.tasks // 40)
        for number in range(1, 41):
            load.submit(share)
            load.wait_for_more(number * share - max(1, share // 4))
            samples.append(Sample.take(load.ended(), lab.parts(endpoint, load)))
        load.count(result)
    steady = samples[len(samples) // 2 :]
    tasks = steady[-1].ended - steady[0].ended
    for role in steady[-1].pss_bytes:
        by_task = slope(steady, role)
        first, last = steady[0].descriptors.get(role, 0), steady[-1].descriptors.get(role, 0)
        result.notes.append(
            f"{role}: {steady[-1].pss_bytes[role] / _MIB:.1f} MiB, {by_task:+.0f} bytes a task, "
            f"{first} -> {last} descriptors"
        )
        if role == "postgres":  # its shared buffers fill up, and each of its processes keeps files of the database open
            continue
        # The program keeps its futures' ends only while they are open.
        if by_task * tasks > _NOISE_BYTES + _GROWTH_BYTES_PER_TASK * tasks:
            result.broken.append(f"memory of {role} grows by {by_task:.0f} bytes a task")
        if last > first + 10:
            result.broken.append(f"descriptors of {role} grow: {first} -> {last}")


def power_cut(lab: Lab, result: PhaseResult) -> None:
    """kill -9 of an endpoint, and the last third of its spool's write-ahead log gone, as a power cut may leave it."""

    def cut(endpoint: LocalEndpoint) -> None:
        wal = endpoint.directory / "spool.sqlite3-wal"
        if wal.exists():
            os.truncate(wal, wal.stat().st_size * 2 // 3)

    _spool_of_before(lab, result, "power_cut", after_kill=cut)


def old_spool(lab: Lab, result: PhaseResult) -> None:
    """kill -9 of an endpoint, and a copy of its spool of some seconds before put back."""
    copies = lab.directory / "old-spool"
    shutil.rmtree(copies, ignore_errors=True)
    copies.mkdir()

    def copy(endpoint: LocalEndpoint) -> None:
        for path in endpoint.directory.glob("spool.sqlite3*"):
            shutil.copy2(path, copies)

    def put_back(endpoint: LocalEndpoint) -> None:
        for path in endpoint.directory.glob("spool.sqlite3*"):
            path.unlink()
        for path in copies.iterdir():
            shutil.copy2(path, endpoint.directory)

    _spool_of_before(lab, result, "old_spool", before_kill=copy, after_kill=put_back)


def copied_spool(lab: Lab, result: PhaseResult) -> None:
    """kill -9 of an endpoint, its directory copied, and both started."""
    twin_home = lab.directory / "twin-home"

    def start_twin(endpoint: LocalEndpoint) -> None:
        twin = LocalEndpoint(endpoint.name, home=twin_home, environment=lab.environment())
        ignored = shutil.ignore_patterns("daemon.pid", "*.sock")
        shutil.rmtree(twin.directory, ignore_errors=True)
        shutil.copytree(endpoint.directory, twin.directory, ignore=ignored)
        with contextlib.suppress(Exception):
            twin.start()
        twins.append(twin)

    twins: list[LocalEndpoint] = []
    try:
        _spool_of_before(lab, result, "copied_spool", after_kill=start_twin, may_not_start=True)
    finally:
        for twin in twins:
            twin.kill()


def _spool_of_before(
    lab: Lab,
    result: PhaseResult,
    name: str,
    *,
    before_kill: Callable[[LocalEndpoint], None] | None = None,
    after_kill: Callable[[LocalEndpoint], None],
    may_not_start: bool = False,
) -> None:
    """Once-only tasks run; the endpoint is killed, its spool changed, and it is started again."""
    result.kills_agent = True
    tasks = min(lab.scale.tasks, 400)
    with lab.endpoint(name) as endpoint, lab.load(name, [endpoint], once_of=1, task_s=0.05) as load:
        load.submit(tasks)
        load.wait_for_more(tasks // 8)
        if before_kill is not None:
            before_kill(endpoint)
        load.wait_for_more(tasks // 4)
        lab.kill_all_of(endpoint)
        after_kill(endpoint)
        began = time.monotonic()
        try:
            lab.start_again(endpoint, within_s=60.0 if may_not_start else 150.0)
        except Exception:
            if not may_not_start:
                raise
        result.back_s.append(time.monotonic() - began)
        load.count(result)


def working_directory(lab: Lab, result: PhaseResult) -> None:
    """A task removes its working directory, and its worker ends: later tasks run, in a working directory."""
    with lab.endpoint("cwd") as endpoint, _executor(lab, endpoint) as executor:
        with contextlib.suppress(Exception):
            executor.submit(_remove_working_directory).result(lab.scale.within_s)
        for process in endpoint.processes("worker"):
            kill(process)
        began = time.monotonic()
        futures = [executor.submit(_write_relative_file, number) for number in range(20)]
        result.accepted = len(futures)
        for future in futures:
            try:
                future.result(max(0.0, 60.0 - (time.monotonic() - began)))
                result.ended += 1
            except TimeoutError:
                result.unended += 1
            except Exception as error:  # noqa: BLE001 - counted
                result.ended += 1
                name = type(error).__name__
                result.unexpected[name] = result.unexpected.get(name, 0) + 1
        result.back_s.append(time.monotonic() - began)
        executor.shutdown(wait=False, cancel_futures=True)


def _remove_working_directory() -> None:
    import os
    import shutil

    shutil.rmtree(os.getcwd())  # noqa: PTH109 - a user's program


def _write_relative_file(number: int) -> int:
    import pathlib

    pathlib.Path(f"file-{number}").write_text("text")
    return number


def big_results(lab: Lab, result: PhaseResult) -> None:
    """Results of 10 MB by the hundred: the agent's memory is bounded."""
    count = lab.scale.big_results
    with (
        lab.endpoint("big") as endpoint,
        lab.load("big", [endpoint], once=0, task_s=0.0, result_bytes=9_900_000) as load,
    ):
        load.submit(count)
        most = 0
        while load.pids and load.ended() < count:
            agent = endpoint.agent()
            with contextlib.suppress(psutil.Error):
                most = max(most, agent.memory_full_info().pss if agent else 0)
            if not load.wait_for_more(load.ended(), within_s=0.3):
                pause(0.05)
        load.count(result)
    result.notes.append(f"agent: {most / _MIB:.0f} MiB at most")
    if most > _AGENT_LIMIT_BYTES:
        result.broken.append(f"the agent took {most / _MIB:.0f} MiB")


def fairness(lab: Lab, result: PhaseResult) -> None:
    """One user's backlog before another's single task, at an endpoint that both may use."""
    count = min(lab.scale.tasks, lab.scale.backlog)
    with lab.endpoint("shared") as endpoint:
        with farcall.Client(lab.tier.api_url, lab.tier.tokens["ada"]) as ada:
            ada.register_endpoint("shared", endpoint.endpoint_id, public=True)
        with (
            lab.load("fairness", [endpoint], once=0, task_s=0.01) as load,
            lab.load("fairness-single", [endpoint], user="grace", once=0, task_s=0.01) as single,
        ):
            load.submit(count)
            load.wait_for_more(count // 20)
            single.submit(1)
            waited_s = single.wait_for_more(0, within_s=lab.scale.within_s)
            before = load.ended()
            load.count(result)
            single.count(result)
    result.notes.append(f"the single task took {waited_s:.1f} s; {before} of {count} others had ended by then")
    if waited_s > _SINGLE_TASK_S and before > count // 2:
        result.broken.append(f"a single task waited {waited_s:.1f} s behind another user's backlog")


@contextlib.contextmanager
def _executor(lab: Lab, endpoint: LocalEndpoint) -> Iterator[farcall.Executor]:
    with (
        farcall.Client(lab.tier.api_url, lab.tier.tokens["ada"]) as client,
        farcall.Executor(endpoint.endpoint_id, client=client, max_attempts=3) as executor,
    ):
        yield executor


#: By name, with its share of the tasks of a run in hundredths.
PHASES: Mapping[str, tuple[Phase, int]] = {
    "kills": (kills, 33),
    "hangs": (hangs, 10),
    "network": (network, 5),
    "answers": (answers, 2),
    "silence": (silence, 1),
    "disks": (disks, 1),
    "tier_disk": (tier_disk, 1),
    "clocks": (clocks, 1),
    "flood": (flood, 15),
    "soak": (soak, 27),
    "power_cut": (power_cut, 1),
    "old_spool": (old_spool, 1),
    "copied_spool": (copied_spool, 1),
    "working_directory": (working_directory, 1),
    "big_results": (big_results, 1),
    "fairness": (fairness, 5),
}
