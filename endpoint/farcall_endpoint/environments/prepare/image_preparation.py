"""Preparation of one environment: its technology is tried, its image converted, its Python found, and the bundle of the
worker's code made for that."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from farcall_common.environments import PREFIXES, UV, WITHOUT_CONTAINER, Environment
from farcall_common.errors import ErrorRecord
from farcall_common.files import keep_latest
from farcall_endpoint.config.settings import EnvironmentSettings, options_for
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.environments.cache import Cache
from farcall_endpoint.environments.prepare import access, probe
from farcall_endpoint.environments.prepare.bundle import make_bundle, name_of
from farcall_endpoint.environments.prepare.commands import CommandError, Commands
from farcall_endpoint.environments.prepare.preparation import (
    Crowded,
    Failed,
    Located,
    PreparationReport,
    PreparationSettings,
    Prepared,
    Progressed,
)
from farcall_endpoint.environments.prepare.technologies import not_allowed
from farcall_endpoint.environments.runners.base import ImagePreparation, Mount, Runner, Start
from farcall_endpoint.environments.runners.registry import RUNNERS
from farcall_endpoint.host.isolation.environment import for_runner

_PROBE_LIMIT_S: Final = 60.0
STOP_LIMIT_S: Final = 30.0
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


class PreparationError(Exception):
    """An environment cannot be prepared."""

    def __init__(self, record: ErrorRecord) -> None:
        super().__init__(record.message)
        self.record = record


class Preparation:
    """Prepares environments, in any thread.

    :param report: takes reports.
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
        self._readable, self._writable = settings.readable, settings.writable
        self._isolated = settings.isolated
        self._confined = settings.confined
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

    def locate(self, environment: Environment) -> Located:
        """Look up what an environment of another submitter than the owner names on the node."""
        try:
            return Located(environment, self._look_up(environment, self._runners.get(environment.type)))
        except PreparationError as error:
            return Located(environment, record=error.record)

    def tidy(self) -> None:
        """Remove what killed processes have left in the cache."""
        with contextlib.suppress(OSError):  # the first preparation says what is wrong
            self._cache.make()
            self._cache.tidy()

    def release(self, key: str) -> None:
        """Allow the cache to remove the prepared files of an environment."""
        for name in self._entries.pop(key, ()):
            if not any(name in names for names in list(self._entries.values())):  # threads add some
                self._cache.release(name)
        if self._cache.excess_bytes:
            self._clean()

    def _clean(self) -> None:
        self._cache.clean()
        if self._cache.excess_bytes:
            self._report(Crowded())

    def _prepare(self, environment: Environment, *, trusted: bool) -> Prepared:
        key, deadline = environment.key, time.monotonic() + self._settings.start_limit_s
        runner = working_runner(environment.type, self._settings, self._runners)
        self._cache.make()
        names = self._entries.setdefault(key, set())
        preparation = runner.prepare(environment, cache=self._cache.directory)
        if not trusted and self._isolated and environment.location.startswith("/"):
            self._report(Progressed(key, f"{environment.location} is looked up"))
        place = self._locate(environment, runner, trusted=trusted)
        if place is not None and preparation.commands:
            preparation = self._of_place(environment, runner, preparation, place)
        log = self._log_of(key)
        if (name := self._cache.name_of(preparation.image)) is not None:
            names.add(name)
            with self._cache.making(name, waiting=lambda: self._waits(key, deadline)):
                if not Path(preparation.image).exists():
                    self._run(key, preparation.what, preparation.commands, deadline=deadline, log=log)
                    if not Path(preparation.image).exists():
                        raise PreparationError(outcomes.environment_failed(environment.label, "it made no image"))
            self._clean()
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
        bundle = name_of(python.abi)
        names.add(bundle)
        is_new = not (self._cache.directory / bundle).exists()
        with self._cache.making(bundle, waiting=lambda: self._waits(key, deadline)):
            make_bundle(
                python.abi,
                self._cache.directory,
                run=lambda command: self.commands.run(command, limit_s=deadline - time.monotonic(), log=log),
                index_url=self._settings.index_url,
            )
        if is_new:
            self._clean()
        return Prepared(key, preparation.image, python.executable, python.abi, str(self._cache.directory / bundle))

    def _locate(self, environment: Environment, runner: Runner, *, trusted: bool) -> access.Place | None:
        """Return the file or directory that a submitter names on the node; None if there is nothing to check.

        :raises PreparationError: if the submitter's tasks may not use it.
        """
        return None if trusted or not self._isolated else self._look_up(environment, runner)

    def _look_up(self, environment: Environment, runner: Runner | None) -> access.Place | None:
        path = access.node_path(runner, environment.location)
        try:
            return access.locate(
                environment, self._settings, readable=self._readable, writable=self._writable, node_path=path
            )
        except access.Refused as error:
            raise PreparationError(outcomes.location_refused(environment.label, str(error))) from error

    def _of_place(
        self, environment: Environment, runner: Runner, preparation: ImagePreparation, place: access.Place
    ) -> ImagePreparation:
        """A preparation that reads what was checked."""
        seen = place.path if place.is_fixed else access.seen_in(self._cache.directory, place)
        location = environment.location.replace(access.node_path(runner, environment.location), seen, 1)
        before = [] if place.is_fixed else access.showing(environment.type, place, seen)
        commands = [
            (*before, *(location if word == environment.location else word for word in command))
            for command in preparation.commands
        ]
        return dataclasses.replace(preparation, commands=tuple(commands))

    def _log_of(self, key: str) -> Path | None:
        """The log of an environment's preparations; the oldest ones are removed."""
        if self._log_dir is None:
            return None
        with contextlib.suppress(OSError):
            keep_latest(self._log_dir.glob("environment-*.log"), _MOST_LOGS)
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
        if environment.type in WITHOUT_CONTAINER:
            return ()
        empty = self._cache.directory / _EMPTY
        empty.mkdir(mode=0o755, exist_ok=True)
        return (Mount(str(empty), runner.worker_target),)

    def _probe(
        self, environment: Environment, runner: Runner, start: Start, log: Path | None
    ) -> tuple[bytes, int | None]:
        place = self._locate(environment, runner, trusted=not start.private_root)
        before: list[str] = []
        if start.private_root and self._confined and environment.type in access.CONFINED_OUTSIDE:
            needed = (*self._readable, *(mount.source for mount in start.mounts))
            before = access.confinement_of(needed, environment.type, image=start.image, place=place)
        elif place is not None and environment.location == start.image:
            start, before = access.shown(environment.type, start, place, self._cache.directory)
        try:
            command = [*before, *runner.command(start)]
        except (OSError, ValueError) as error:
            raise PreparationError(outcomes.technology_unsupported(environment.type, error)) from error
        # A program in namespaces reads the variables of their first process, which is the runner's.
        variables = for_runner(environment.type, os.environ, passed=self._passed) if start.private_root else None
        try:
            return self.commands.run(command, limit_s=_PROBE_LIMIT_S, log=log, variables=variables), 0
        except CommandError as error:
            return error.output, error.code
        finally:
            if (stop := runner.stop(start)) is not None:
                with contextlib.suppress(CommandError):
                    self.commands.run(stop, limit_s=STOP_LIMIT_S)


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


def failure(environment: Environment, error: CommandError) -> ErrorRecord:
    """The error record of a failed command, in its own words."""
    outcome = outcomes.requirements_failed if environment.type == UV else outcomes.environment_failed
    passing = error.code is None or _PASSING.search(str(error)) is not None
    words = _URL.sub(_without_secrets, str(error))
    record = outcome(environment.label, words)
    hint = _may_pass(environment.key) if passing else record.hint
    return dataclasses.replace(record, hint=hint, retryable=passing)


def _may_pass(key: str) -> str:
    """Return the hint for a failure that the task has not caused."""
    return (
        "Submit it again later, or ask the endpoint's owner, who finds the whole output in "
        f"`logs/environment-{key}.log` of the endpoint."
    )


def _words(error: OSError | RecursionError) -> str:
    """Describe an error and its path; for a copy, the path is its target."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    place = error.filename2 or error.filename
    return f"{error.strerror}: {place}" if place else error.strerror


def _without_secrets(url: re.Match[str]) -> str:
    """Return an address for submitters, without the token that an owner's index may have in its path or query."""
    scheme, host, path = url.groups()
    names = path.partition("?")[0].strip("/").split("/")
    return f"{scheme}{host}/{'.../' if len(names) > 1 else ''}{names[-1]}"
