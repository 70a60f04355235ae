"""Pool of templates: one for each kind of worker, replaced when tasks import something new.

The pool starts no process itself: a launcher asks :meth:`TemplatePool.wanted` when it starts a worker afresh, starts a
template in the same way as that worker, in an environment or not, and gives its connection to :meth:`TemplatePool.add`.
A template that is unfit costs no task anything: workers are started afresh, as without templates.
"""

from __future__ import annotations

import dataclasses
import logging
import select
import socket
from collections.abc import Callable, Sequence
from typing import Final

from farcall_common.environments import Environment
from farcall_endpoint.environments.preload import PreloadStore, chosen, excluded, learned, measured
from farcall_endpoint.environments.templates import ForkedProcess, Template, TemplateFailed
from farcall_endpoint.worker.boot import Boot, Descriptors

_logger = logging.getLogger(__name__)

_KEPT_STARTS: Final = 4.0
"""A template is used for so many times what its start took before one with more modules replaces it, unless it has
none: until then, each worker of tasks that import more does so itself."""
_CHECK_PERIOD_S: Final = 1.0
_MOST_FAILURES: Final = 20
"""Each names a module that is left out from then on, so they end by themselves; a hostile image could go on."""
_PAUSE_S: Final = 60.0
"""After a failure without a module to blame, or too many. The next one is twice as long: a task can stop its template,
and the manager waits for that for seconds."""
_LONGEST_PAUSE_S: Final = 3600.0
_MOST_FAILED: Final = 1000
"""Templates whose failures are remembered."""


@dataclasses.dataclass
class _Entry:
    environment_key: str
    statistics_key: str
    template: Template
    modules: tuple[str, ...]
    stop: Callable[[], object]
    started_at: float
    used_at: float
    check_at: float = 0.0


@dataclasses.dataclass
class _Failures:
    reason: str = ""
    count: int = 0
    pauses: int = 0
    until: float = 0.0


@dataclasses.dataclass(frozen=True)
class TemplateChange:
    """A template serves now, or is over: ``problem`` says why it cannot fork, empty if it can."""

    key: str
    environment_key: str
    problem: str = ""


class TemplatePool:
    """Templates by key. Owned by one thread; times are in monotonic seconds.

    :param store: what tasks import.
    :param budget_bytes: of memory for the learned modules of a template.
    :param spares: children that each template forks in advance.
    :param idle_s: a template of no environment ends when it has not been used for so long; those of environments end
        with them (see :meth:`release`).
    """

    def __init__(
        self, store: PreloadStore, *, budget_bytes: int = 512 * 2**20, spares: int = 1, idle_s: float = float("inf")
    ) -> None:
        self._store = store
        self._budget_bytes = budget_bytes
        self._spares = spares
        self._idle_s = idle_s
        self._serving: dict[str, _Entry] = {}
        self._starting: dict[str, _Entry] = {}
        self._leaving: list[_Entry] = []
        self._reserved: set[str] = set()
        self._failures: dict[str, _Failures] = {}
        self._epoll = select.epoll()

    def fileno(self) -> int:
        """Readable when :meth:`serve` has something to do."""
        return self._epoll.fileno()

    def wanted(
        self, key: str, statistics_key: str, environment: Environment | None, *, now: float
    ) -> tuple[str, ...] | None:
        """The modules of a template that should be started now; None if none should.

        After an answer that is not None, call :meth:`add` or :meth:`not_started`.
        """
        if key in self._reserved or key in self._starting or now < self._failures.get(key, _Failures()).until:
            return None
        running = self._serving.get(key)
        if running is not None:
            if now < running.check_at:
                return None
            running.check_at = now + _CHECK_PERIOD_S
        modules = chosen(self._store.of(statistics_key), environment, budget_bytes=self._budget_bytes)
        if running is not None and set(modules) <= set(running.modules):
            return None
        self._reserved.add(key)
        return modules

    def not_started(self, key: str, reason: str, *, now: float) -> None:
        """The template could not be started."""
        self._reserved.discard(key)
        self._failed(key, reason, "", now=now)

    def add(
        self,
        key: str,
        environment_key: str,
        connection: socket.socket,
        modules: tuple[str, ...],
        *,
        stop: Callable[[], object],
        now: float,
        namespaces: bool = False,
        network: bool = True,
        places: Sequence[str] = (),
        private: Sequence[str] = (),
        import_limit_s: float = 60.0,
        statistics_key: str | None = None,
    ) -> None:
        """A template has connected. Arguments are those of :class:`Template`.

        :param statistics_key: None: that of the owner's tasks.
        :param stop: ends what was started for it, when it is over.
        """
        self._reserved.discard(key)
        template = Template(
            connection,
            modules=modules,
            places=places,
            private=private,
            namespaces=namespaces,
            spares=self._spares,
            network=network,
            start_limit_s=import_limit_s,
        )
        statistics_key = environment_key if statistics_key is None else statistics_key
        entry = _Entry(environment_key, statistics_key, template, modules, stop, started_at=now, used_at=now)
        if not template.is_over:
            self._epoll.register(template.fileno(), select.EPOLLIN)
        self._starting[key] = entry

    def fork(self, key: str, boot: Boot, descriptors: Descriptors, *, now: float) -> ForkedProcess | None:
        """A worker; None if it must be started afresh."""
        entry = self._serving.get(key)
        if entry is None:
            return None
        entry.used_at = now
        try:
            return entry.template.fork(boot, descriptors)
        except TemplateFailed as error:
            _logger.info("a worker is started afresh: %s", error)
            return None

    def is_forkable(self, key: str) -> bool:
        """Whether :meth:`fork` would fork."""
        entry = self._serving.get(key)
        return entry is not None and entry.template.is_serving

    def problem(self, key: str) -> str:
        """Why there is no template; empty if there is one, or none was tried."""
        return "" if key in self._serving else self._failures.get(key, _Failures()).reason

    @property
    def pids(self) -> set[int]:
        """The processes of templates."""
        entries = (*self._serving.values(), *self._starting.values(), *self._leaving)
        return {entry.template.pid for entry in entries if entry.template.pid}

    def learn(self, statistics_key: str, names: Sequence[str], *, now: float) -> None:
        """A worker has reported what its tasks imported."""
        self._store.put(statistics_key, learned(self._store.of(statistics_key), names), now=now)

    def next_deadline(self) -> float:
        """When :meth:`serve` must be called in any case."""
        entries = (*self._starting.values(), *self._serving.values())
        # What is found out while a worker is forked, or before a template is here, wakes nothing: its socket is closed.
        if any(entry.template.is_over for entry in (*entries, *self._leaving)):
            return 0.0
        deadlines = [entry.template.next_deadline() for entry in entries]
        deadlines += [self._unused_at(entry) for entry in self._serving.values()]
        return min(deadlines, default=float("inf"))

    def serve(self, *, now: float) -> list[TemplateChange]:
        """Take what templates have sent, without waiting; what has changed."""
        changes: list[TemplateChange] = []
        for key, entry in list(self._starting.items()):
            entry.template.serve()
            if entry.template.is_over:
                del self._starting[key]
                changes.append(self._ended(key, entry, now=now))
            elif entry.template.is_serving:
                del self._starting[key]
                self._learn_cost(entry, now=now)
                if entry.modules:
                    entry.check_at = now + max(_CHECK_PERIOD_S, _KEPT_STARTS * (now - entry.started_at))
                if (former := self._serving.pop(key, None)) is not None:
                    self._leave(former)
                self._serving[key] = entry
                if (failures := self._failures.get(key)) is not None:
                    failures.reason, failures.count = "", 0
                changes.append(TemplateChange(key, entry.environment_key))
        for key, entry in list(self._serving.items()):
            entry.template.serve()
            if entry.template.is_over:
                del self._serving[key]
                changes.append(self._ended(key, entry, now=now))
            elif now >= self._unused_at(entry):
                self._leave(self._serving.pop(key))
        for entry in list(self._leaving):
            entry.template.serve()
            if entry.template.is_over:
                self._leaving.remove(entry)
                entry.stop()
        return changes

    def release(self, environment_key: str) -> None:
        """End the templates of an environment, each with its last worker."""
        for entries in (self._serving, self._starting):
            for key in [key for key, entry in entries.items() if entry.environment_key == environment_key]:
                self._leave(entries.pop(key))

    def close(self) -> None:
        """End all templates, and what is left of their workers."""
        for entry in (*self._serving.values(), *self._starting.values(), *self._leaving):
            entry.template.close()
            entry.template.kill_all()
            entry.stop()
        self._serving.clear()
        self._starting.clear()
        self._leaving.clear()
        self._store.close()
        self._epoll.close()

    def _unused_at(self, entry: _Entry) -> float:
        return float("inf") if entry.environment_key else entry.used_at + self._idle_s

    def _leave(self, entry: _Entry) -> None:
        entry.template.close()
        if entry.template.is_over:
            entry.stop()
        else:
            self._leaving.append(entry)

    def _learn_cost(self, entry: _Entry, *, now: float) -> None:
        imports = entry.template.imports
        statistics = measured(self._store.of(entry.statistics_key), imports.cost, imports.skipped)
        self._store.put(entry.statistics_key, statistics, now=now)

    def _ended(self, key: str, entry: _Entry, *, now: float) -> TemplateChange:
        template = entry.template
        self._learn_cost(entry, now=now)
        if now - entry.started_at >= _LONGEST_PAUSE_S and (failures := self._failures.get(key)) is not None:
            failures.pauses = 0  # it was fit for long
        self._failed(key, template.problem, template.problem_module, now=now)
        if template.problem_module:
            statistics = excluded(self._store.of(entry.statistics_key), template.problem_module, template.problem)
            self._store.put(entry.statistics_key, statistics, now=now, at_once=True)
        _logger.warning("the template of %s cannot fork: %s", key, template.problem)
        entry.stop()
        return TemplateChange(key, entry.environment_key, template.problem)

    def _failed(self, key: str, reason: str, module: str, *, now: float) -> None:
        while len(self._failures) >= _MOST_FAILED and key not in self._failures:
            del self._failures[next(iter(self._failures))]
        failures = self._failures.setdefault(key, _Failures())
        failures.reason = reason
        failures.count += 1
        if not module or failures.count >= _MOST_FAILURES:
            failures.until = now + min(_PAUSE_S * 2**failures.pauses, _LONGEST_PAUSE_S)
            failures.pauses = min(failures.pauses + 1, 10)
            failures.count = 0
