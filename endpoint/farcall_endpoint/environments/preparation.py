"""Preparation of environments on a node: a process of its own, so that no manager ever waits for a runner.

``python -m farcall_endpoint.environments.preparation SETTINGS``: reads orders from standard input and writes reports to
standard output, one in each line. It checks that the technology works, converts the image, looks for a Python in it
and makes the bundle of the worker's code for that. It also ends containers of which only their runner's daemon knows.

When its manager is gone, for whatever reason, its input ends: then it kills what it started, ends the containers that
are left, and ends itself.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import os
import re
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from farcall_common.environments import PREFIXES, TREES, UV, Environment
from farcall_common.errors import ErrorRecord
from farcall_endpoint import outcomes, process_reaper
from farcall_endpoint.environments import probe
from farcall_endpoint.environments.bundle import Abi, make_bundle
from farcall_endpoint.environments.runner import Mount, Runner, Start
from farcall_endpoint.environments.runners import RUNNERS, runners_of
from farcall_endpoint.environments.settings import EnvironmentSettings
from farcall_endpoint.environments.technologies import not_allowed
from farcall_endpoint.isolation import bubblewrap
from farcall_endpoint.isolation.environment import for_runner

CONFINED_OUTSIDE: Final = frozenset({*TREES, *PREFIXES, UV})
"""Types whose containers of submitters other than the owner run in bubblewrap's confinement of ours. The others have
namespaces of their own."""
UNTRUSTED_OUTSIDE: Final = CONFINED_OUTSIDE - {UV}
"""Those whose Python is not ours: it cannot be trusted to confine itself."""

_AT_ONCE: Final = 8
"""Environments that are prepared at once, as many as managers want: one that waited would lose its time."""
_STOPS_AT_ONCE: Final = 8
_PROBE_LIMIT_S: Final = 60.0
_STOP_LIMIT_S: Final = 30.0
_LOCK_PERIOD_S: Final = 0.2
_MOST_OUTPUT_BYTES: Final = 64 * 1024
_MOST_LOG_BYTES: Final = 2**20
_MOST_LOGS: Final = 50
_EMPTY: Final = ".empty"

_PASSING: Final = re.compile(
    r"no space left|quota exceeded|connection (refused|reset)|timed? ?out|unreachable|temporary failure|"
    r"could not resolve|no such host|name resolution|too many requests|service unavailable|bad gateway|dns error|"
    r"failed to fetch|error sending request|network",
    re.I,
)
"""Words of runners and uv for what may be different soon."""
_URL: Final = re.compile(r"(https?://)(?:[^\s/@`'\"]*@)?([^\s/?`'\")]+)/?([^\s`'\")]*)")


# -- orders and reports ------------------------------------------------------------------------------------------------


class _Message(msgspec.Struct, frozen=True, tag=True):
    """A line."""


class Prepare(_Message, frozen=True):
    """Prepare an environment. Answered by Prepared or Failed. ``trusted``: the owner of the endpoint has named it, so
    its Python may be asked without confinement."""

    environment: Environment
    trusted: bool = False


class Release(_Message, frozen=True):
    """An environment is not used any more: what was prepared may be removed from the cache."""

    key: str


class Started(_Message, frozen=True):
    """A container was started, which this command ends if the manager does not live to say Ended."""

    name: str
    stop: tuple[str, ...]


class Ended(_Message, frozen=True):
    """The process of a container has ended: make sure of the container, too, unless nothing can be left of it."""

    name: str
    stops: bool = True


class Progressed(_Message, frozen=True):
    """What is done now, for people."""

    key: str
    text: str


class Prepared(_Message, frozen=True):
    """An environment can be started: with this Python of the image, and the worker's code in ``bundle``."""

    key: str
    image: str
    python: str
    abi: Abi
    bundle: str


class Failed(_Message, frozen=True):
    """An environment cannot be prepared."""

    key: str
    record: ErrorRecord


Order = Prepare | Release | Started | Ended
PreparationReport = Progressed | Prepared | Failed


class PreparationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the process needs to know.

    :param log_dir: where the runners' output goes; empty: nowhere.
    :param run_dir: the manager's directory for sockets, which goes with it.
    :param confined: whether what others than the owner name is confined by bubblewrap where its runner does not do it.
    :param readable: what it may read then.
    :param passed: as of :func:`~farcall_endpoint.isolation.environment.for_submitter`.
    """

    environments: EnvironmentSettings
    cache: str
    log_dir: str = ""
    run_dir: str = ""
    confined: bool = False
    readable: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()


class PreparationError(Exception):
    """An environment cannot be prepared."""

    def __init__(self, record: ErrorRecord) -> None:
        super().__init__(record.message)
        self.record = record


class CommandError(Exception):
    """A command failed. ``output`` is the end of what it printed, ``code`` its exit code, None if it took too long."""

    def __init__(self, output: bytes, code: int | None) -> None:
        super().__init__(probe.last_lines(output) or ("it took too long" if code is None else f"exit code {code}"))
        self.output = output
        self.code = code


# -- commands ----------------------------------------------------------------------------------------------------------


class Commands:
    """Runs commands, each with its descendants as a group, in any thread. :meth:`close` kills them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._closed = False

    def run(
        self,
        command: Sequence[str],
        *,
        limit_s: float,
        log: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> bytes:
        """Run a command; the end of what it printed, on both streams.

        :param variables: its environment variables; None: those of this process.
        :raises CommandError: if it fails, or takes longer than the limit.
        """
        with self._lock:
            if self._closed:
                raise CommandError(b"the manager ends", None)
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(process_reaper.__file__), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )
            self._running.add(process.pid)
        with process, _opened(log) as write:
            try:
                write(f"$ {' '.join(command)}\n".encode())
                output, in_time = _read(process, deadline=time.monotonic() + limit_s, write=write)
            finally:
                process_reaper.kill_trees({process.pid})
                code = process.wait()
                with self._lock:
                    self._running.discard(process.pid)
        if code or not in_time:
            raise CommandError(output, code if in_time else None)
        return output

    @property
    def is_closed(self) -> bool:
        """Whether no command can be run any more."""
        return self._closed

    def close(self) -> None:
        """Kill all that run, with their descendants, and run no others."""
        with self._lock:
            self._closed = True
            process_reaper.kill_trees(set(self._running))


def _read(process: subprocess.Popen[bytes], *, deadline: float, write: Callable[[bytes], object]) -> tuple[bytes, bool]:
    """The end of a process's output, and whether it ended in time."""
    output = b""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left_s := deadline - time.monotonic()) > 0:
            if not selector.select(left_s):
                continue
            data = os.read(process.stdout.fileno(), _MOST_OUTPUT_BYTES)
            if not data:
                return output, True
            write(data)
            output = (output + data)[-_MOST_OUTPUT_BYTES:]
    return output, False


@contextlib.contextmanager
def _opened(log: Path | None) -> Iterator[Callable[[bytes], object]]:
    """A function that adds to a log file, which stays below its limit. A log that cannot be written is left out."""
    try:
        file = None if log is None else open(log, "ab", buffering=0, opener=_private)  # noqa: SIM115 - closed below
    except OSError:
        file = None
    if file is None:
        yield lambda _: None
        return

    def write(data: bytes) -> None:
        with contextlib.suppress(OSError):  # the disk is full: that is no reason to stop
            if file.tell() < _MOST_LOG_BYTES:
                file.write(data)

    with file:
        yield write


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


# -- cache -------------------------------------------------------------------------------------------------------------


class Cache:
    """A directory of prepared images and bundles, shared by the managers of a node, or of many that share its file
    system. Each entry has a lock file: who makes or removes the entry has it alone, who uses it shares it.

    :param most_bytes: the least recently used entries are removed beyond that, never one in use.
    """

    def __init__(self, directory: Path, *, most_bytes: int) -> None:
        self.directory = directory
        self._most_bytes = most_bytes
        self._held: dict[str, int] = {}
        self._lock = threading.Lock()

    def make(self) -> None:
        """Make the directory if it does not exist.

        :raises OSError: if others could write into it: it may be in a directory that all users share. Or if no code
            could be loaded from it.
        """
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.directory.lstat()
        if (
            not stat.S_ISDIR(found.st_mode)
            or found.st_uid != os.geteuid()
            or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        ):
            raise PermissionError(f"the cache {self.directory} must be a directory that only this user can write")
        if os.statvfs(self.directory).f_flag & os.ST_NOEXEC:
            raise PermissionError(
                f"the cache {self.directory} is on a file system without programs (mounted noexec); "
                "the owner sets engine.environments.cache_dir to another one"
            )

    def name_of(self, image: str) -> str | None:
        """The name of the entry that a path lies in; None if it is none of the cache's."""
        path = Path(image)
        return path.relative_to(self.directory).parts[0] if path.is_relative_to(self.directory) else None

    @contextlib.contextmanager
    def making(self, name: str, *, waiting: Callable[[], bool]) -> Iterator[None]:
        """Have an entry alone, then share it until :meth:`release`.

        :param waiting: called while another process has it; False to give up.
        :raises TimeoutError: if that gave up.
        """
        descriptor = os.open(
            self.directory / f".{name}.use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            while not _locked(descriptor, fcntl.LOCK_EX):
                if not (_locked(descriptor, fcntl.LOCK_SH) and self._exists(name)) and waiting():
                    time.sleep(_LOCK_PERIOD_S)
                    continue
                if not self._exists(name):
                    raise TimeoutError(f"another process has been preparing {name} for too long")
                break
            yield
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            os.utime(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        with self._lock:
            former = self._held.pop(name, None)
            self._held[name] = descriptor
        if former is not None:
            os.close(former)

    def release(self, name: str) -> None:
        """Use an entry no longer."""
        with self._lock:
            descriptor = self._held.pop(name, None)
        if descriptor is not None:
            os.close(descriptor)

    def clean(self) -> list[str]:
        """Remove the least recently used entries beyond the limit; their names."""
        names = [each.name for each in self.directory.iterdir()]
        entries = [self.directory / name for name in names if f".{name}.use" in names]
        sizes = {each: _size_of(each) for each in entries}
        excess = sum(sizes.values()) - self._most_bytes
        removed: list[str] = []
        for entry in sorted(entries, key=self._used_at):
            if excess <= 0:
                break
            if self._remove(entry):
                excess -= sizes[entry]
                removed.append(entry.name)
        return removed

    def remove(self, name: str) -> None:
        """Remove an entry, unless another process uses it."""
        self.release(name)
        with contextlib.suppress(OSError):
            self._remove(self.directory / name)

    def _exists(self, name: str) -> bool:
        return (self.directory / name).exists()

    def _used_at(self, entry: Path) -> float:
        try:
            return (self.directory / f".{entry.name}.use").stat().st_mtime
        except OSError:
            return 0.0

    def _remove(self, entry: Path) -> bool:
        lock = self.directory / f".{entry.name}.use"
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if not _locked(descriptor, fcntl.LOCK_EX):
                return False
            doomed = self.directory / f".removed-{uuid.uuid4().hex}"
            entry.rename(doomed)
            _remove_tree(doomed)
            return True
        finally:
            os.close(descriptor)


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _size_of(path: Path) -> int:
    """Bytes on disk of a file or a directory."""
    if path.is_symlink() or not path.is_dir():
        with contextlib.suppress(OSError):
            return path.lstat().st_blocks * 512
        return 0
    total = 0
    for parent, _, files in os.walk(path):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512  # noqa: PTH118 - many files
    return total


def _remove_tree(path: Path) -> None:
    """Remove a file, or a directory with read-only ones in it."""
    if not path.is_dir() or path.is_symlink():
        path.unlink()
        return
    for parent, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            Path(parent).chmod(0o700)
    shutil.rmtree(path, ignore_errors=True)


# -- preparation -------------------------------------------------------------------------------------------------------


class Preparation:
    """Prepares environments, in any thread.

    :param report: takes what is to be told.
    """

    def __init__(
        self,
        settings: PreparationSettings,
        *,
        report: Callable[[PreparationReport], object],
        runners: Mapping[str, Runner] = RUNNERS,
    ) -> None:
        self._settings = settings.environments
        self._log_dir = Path(settings.log_dir) if settings.log_dir else None
        self._readable = settings.readable if settings.confined else None
        self._passed = settings.passed
        self._report = report
        self._runners = runners
        self._cache = Cache(Path(settings.cache), most_bytes=settings.environments.cache_bytes)
        self._entries: dict[str, set[str]] = {}
        self.commands = Commands()

    def prepare(self, environment: Environment, *, trusted: bool) -> None:
        """Prepare an environment, and report how that ended."""
        key = environment.key
        try:
            prepared: PreparationReport = self._prepare(environment, trusted=trusted)
        except PreparationError as error:
            prepared = Failed(key, error.record)
        except CommandError as error:
            prepared = Failed(key, failure(environment, error))
        except (OSError, RecursionError) as error:
            record = outcomes.environment_failed(environment.label, _words(error))
            prepared = Failed(key, dataclasses.replace(record, hint=_may_pass(key), retryable=True))
        self._report(prepared)

    def release(self, key: str) -> None:
        """What was prepared of an environment may be removed."""
        for name in self._entries.pop(key, ()):
            if not any(name in names for names in self._entries.values()):
                self._cache.release(name)

    def _prepare(self, environment: Environment, *, trusted: bool) -> Prepared:
        key, deadline = environment.key, time.monotonic() + self._settings.start_limit_s
        runner = working_runner(environment.type, self._settings, self._runners)
        self._cache.make()
        names = self._entries.setdefault(key, set())
        preparation = runner.prepare(environment, cache=self._cache.directory)
        log = self._log_of(key)
        if (name := self._cache.name_of(preparation.image)) is not None:
            names.add(name)
            with self._cache.making(name, waiting=lambda: self._waits(key, deadline)):
                if not Path(preparation.image).exists():
                    self._run(key, preparation.what, preparation.commands, deadline=deadline, log=log)
                    if not Path(preparation.image).exists():
                        raise PreparationError(outcomes.environment_failed(environment.label, "it made no image"))
            self._cache.clean()
        else:
            self._run(key, preparation.what, preparation.commands, deadline=deadline, log=log)
        self._report(Progressed(key, "looking for a Python"))
        try:
            python = self._find_python(environment, runner, preparation.image, log, trusted=trusted)
        except PreparationError:
            if name is not None:  # so that the next try takes the image that it was replaced by
                names.discard(name)
                self._cache.remove(name)
            raise
        self._report(Progressed(key, f"installing the worker for Python {python.abi.version}"))
        bundle = make_bundle(
            python.abi,
            self._cache.directory,
            run=lambda command: self.commands.run(command, limit_s=deadline - time.monotonic(), log=log),
            index_url=self._settings.index_url,
        )
        names.add(bundle.name)
        with self._cache.making(bundle.name, waiting=lambda: self._waits(key, deadline)):
            pass
        return Prepared(key, preparation.image, python.executable, python.abi, str(bundle))

    def _log_of(self, key: str) -> Path | None:
        """The log of an environment's preparations; the oldest ones are removed."""
        if self._log_dir is None:
            return None
        with contextlib.suppress(OSError):
            logs = sorted(self._log_dir.glob("environment-*.log"), key=lambda path: path.stat().st_mtime)
            for path in logs[: max(0, len(logs) - _MOST_LOGS)]:
                path.unlink(missing_ok=True)
        return self._log_dir / f"environment-{key}.log"

    def _waits(self, key: str, deadline: float) -> bool:
        self._report(Progressed(key, "another manager prepares the same image"))
        return time.monotonic() < deadline and not self.commands.is_closed

    def _run(
        self, key: str, what: str, commands: Sequence[Sequence[str]], *, deadline: float, log: Path | None
    ) -> None:
        if commands:
            self._report(Progressed(key, what))
        for command in commands:
            self.commands.run(command, limit_s=deadline - time.monotonic(), log=log)

    def _find_python(
        self, environment: Environment, runner: Runner, image: str, log: Path | None, *, trusted: bool
    ) -> probe.Python:
        problem = ""
        for candidate in probe.candidates(environment.type, image):
            start = Start(
                image,
                probe.command(candidate),
                mounts=self._mounts_of(environment, runner),
                variables=probe.search_path(environment.type),
                network=self._settings.network,
                options=options_for(environment, self._settings),
                name=f"farcall-probe-{uuid.uuid4().hex[:12]}",
                private_root=not trusted,
            )
            output, code = self._probe(environment, runner, start, log)
            found = probe.read(output)
            if found is None and (code in probe.NOT_FOUND or probe.is_absent(candidate, output)):
                continue
            if found is None:
                raise CommandError(output, code)
            problem = problem or found.problem()
            if not found.problem():
                return found
        if environment.type in PREFIXES and not problem:
            problem = f"there is no {image}/bin/python3"
            if not Path(image).is_dir():
                words = f"{environment.type}: {image} is not a directory on this node, or not readable"
                raise PreparationError(outcomes.environment_failed(environment.label, words))
        raise PreparationError(
            outcomes.environment_without_python(environment.label, problem or "it has none in its search path")
        )

    def _mounts_of(self, environment: Environment, runner: Runner) -> tuple[Mount, ...]:
        """An empty directory in the place of the worker's code: so a probe starts as a worker does."""
        if environment.type in (*PREFIXES, UV):
            return ()
        empty = self._cache.directory / _EMPTY
        empty.mkdir(mode=0o755, exist_ok=True)
        return (Mount(str(empty), runner.worker_target),)

    def _probe(
        self, environment: Environment, runner: Runner, start: Start, log: Path | None
    ) -> tuple[bytes, int | None]:
        try:
            command = runner.command(start)
        except (OSError, ValueError) as error:
            raise PreparationError(outcomes.technology_unsupported(environment.type, error)) from error
        if start.private_root and self._readable is not None and environment.type in CONFINED_OUTSIDE:
            needed = (start.image, *(mount.source for mount in start.mounts))
            command = [*confinement_of([*self._readable, *needed], environment.type), *command]
        # A program in namespaces reads the variables of their first process, which is the runner's.
        variables = for_runner(environment.type, os.environ, passed=self._passed) if start.private_root else None
        try:
            return self.commands.run(command, limit_s=_PROBE_LIMIT_S, log=log, variables=variables), 0
        except CommandError as error:
            return error.output, error.code
        finally:
            if (stop := runner.stop(start)) is not None:
                with contextlib.suppress(CommandError):
                    self.commands.run(stop, limit_s=_STOP_LIMIT_S)


def working_runner(name: str, settings: EnvironmentSettings, runners: Mapping[str, Runner]) -> Runner:
    """The runner of a technology.

    :raises PreparationError: if it does not work on this node, or may not be used.
    """
    runner = runners.get(name)
    if runner is None:
        reason = "this version of Farcall has no runner for it"
    elif settings.types is not None and name not in settings.types:
        reason = not_allowed(settings)
    else:
        reason = runner.missing()
        if not reason:
            return runner
    raise PreparationError(outcomes.technology_unsupported(name, reason))


def confinement_of(
    readable: Sequence[str], type_: str, *, writable: Sequence[str] = (), directory: Path = Path("/")
) -> list[str]:
    """What to write before the command of a runner that leaves the confinement of submitters to us."""
    nested = {"nested": True} if type_ in TREES else {}  # for the runner's own namespaces
    return bubblewrap.prefix(readable=readable, writable=writable, directory=directory, **nested)


def options_for(environment: Environment, settings: EnvironmentSettings) -> tuple[str, ...]:
    """The owner's options for the command of a runner."""
    default = settings.default
    return settings.options if default is not None and default.type == environment.type else ()


def failure(environment: Environment, error: CommandError) -> ErrorRecord:
    """The error record of a failed command, in its own words."""
    outcome = outcomes.requirements_failed if environment.type == UV else outcomes.environment_failed
    passing = error.code is None or _PASSING.search(str(error)) is not None
    words = _URL.sub(_without_secrets, str(error))
    record = outcome(environment.label, words)
    hint = _may_pass(environment.key) if passing else record.hint
    return dataclasses.replace(record, hint=hint, retryable=passing)


def _may_pass(key: str) -> str:
    """A hint for what is no mistake of the task."""
    return (
        "Submit it again later, or ask the endpoint's owner, who finds the whole output in "
        f"`logs/environment-{key}.log` of the endpoint."
    )


def _words(error: OSError | RecursionError) -> str:
    """What went wrong and where; of a copy, at its target."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    place = error.filename2 or error.filename
    return f"{error.strerror}: {place}" if place else error.strerror


def _without_secrets(url: re.Match[str]) -> str:
    """An address for submitters: that of the owner's index may have a token in its path or its query."""
    scheme, host, path = url.groups()
    names = path.partition("?")[0].strip("/").split("/")
    return f"{scheme}{host}/{'.../' if len(names) > 1 else ''}{names[-1]}"


# -- process -----------------------------------------------------------------------------------------------------------


def _end_if_failed(future: concurrent.futures.Future[None]) -> None:
    """End this process if a preparation failed in an unforeseen way; then its manager tries it again."""
    if not future.cancelled() and (error := future.exception()) is not None:
        traceback.print_exception(error)
        os._exit(1)


def main() -> None:
    """Serve a manager until it is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the manager gets them too, and ends this process
    settings = msgspec.json.decode(sys.argv[1], type=PreparationSettings)
    lock = threading.Lock()

    def report(message: PreparationReport) -> None:
        with lock, contextlib.suppress(BrokenPipeError):
            os.write(1, msgspec.json.encode(message) + b"\n")

    runners = runners_of(settings.environments, readable=settings.readable)
    preparation = Preparation(settings, report=report, runners=runners)
    stops: dict[str, tuple[str, ...]] = {}
    stopping = Commands()

    def stop(command: Sequence[str]) -> None:
        with contextlib.suppress(CommandError, OSError):
            stopping.run(command, limit_s=_STOP_LIMIT_S)

    with (
        concurrent.futures.ThreadPoolExecutor(_STOPS_AT_ONCE) as ends,
        concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as preparations,
    ):
        for line in sys.stdin.buffer:
            match msgspec.json.decode(line, type=Order):
                case Prepare(environment=environment, trusted=trusted):
                    submitted = preparations.submit(preparation.prepare, environment, trusted=trusted)
                    submitted.add_done_callback(_end_if_failed)
                case Release(key=key):
                    preparation.release(key)
                case Started(name=name, stop=command):
                    stops[name] = command
                case Ended(name=name, stops=True):
                    ends.submit(stop, stops.pop(name))
                case Ended(name=name):
                    del stops[name]
        preparations.shutdown(wait=False, cancel_futures=True)
        preparation.commands.close()
        for command in stops.values():
            ends.submit(stop, command)
    if settings.run_dir:
        shutil.rmtree(settings.run_dir, ignore_errors=True)


if __name__ == "__main__":
    main()
