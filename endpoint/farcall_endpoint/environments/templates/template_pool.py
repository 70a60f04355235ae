"""Pool of templates: one for each kind of worker, replaced when tasks import something new.

A launcher asks :meth:`TemplatePool.wanted` when it starts a worker afresh. The template is a branch of one that runs in
the same root, where there is one (:meth:`TemplatePool.branch`); else the launcher starts it in the same way as that
worker, in an environment or not, and gives its connection to :meth:`TemplatePool.add`.
A template that is unfit costs no task anything: workers are started afresh, as without templates.

Templates have a memory budget. One without workers and branches makes room for another one if it was not used for a
while, the one that was used last longest ago first; a template that finds no room is not started, and one that turns
out to have none is ended. So two that alternate and have room for one do not take turns: that would cost a start for
each worker.
"""

from __future__ import annotations

import dataclasses
import logging
import resource
import select
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from farcall_common.environments import Environment
from farcall_endpoint.environments.templates.preload import PreloadStore, chosen, excluded, learned, measured
from farcall_endpoint.environments.templates.templates import ForkedProcess, Template, TemplateFailed
from farcall_endpoint.worker.boot import Boot, Descriptors

_logger = logging.getLogger(__name__)

_LEAST_AGE_S: Final = 30.0
"""Time since the last use of a template before another template may get its memory."""
_KEPT_STARTS: Final = 4.0
"""Time to use a template, in multiples of its start time, before one with more modules replaces it, unless it has no
modules. Until then, workers import further modules themselves."""
_CHECK_PERIOD_S: Final = 1.0
_MOST_FAILURES: Final = 20
"""Maximum failures without a pause. Each names a module to leave out, so they end, unless an image is hostile."""
_PAUSE_S: Final = 60.0
"""Pause after a failure without a module to blame, or after too many failures. The next pause is twice as long: a task
can end its template each time, and a start takes seconds of a core."""
_LONGEST_PAUSE_S: Final = 3600.0
_MOST_FAILED: Final = 1000
"""Templates whose failures, and whose sizes, are remembered."""
_MOST_LEVELS: Final = 3
"""Maximum depth of branches. Each level is a process that stays while it has branches, even without other uses."""
_UNKNOWN_BYTES: Final = 100 * 2**20
"""Memory to assume for a template that was not measured yet."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TemplateRoot:
    """Confinement of a template, and files that its imports must not read.

    :param name: equal for templates that see the same files and variables, and whose workers may share memory; empty
        for a template that has no branches.
    :param namespaces, writable, network, places, private, import_limit_s: see :class:`Template`.
    """

    name: str = ""
    namespaces: bool = False
    writable: tuple[str, ...] = ()
    network: bool = True
    places: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    import_limit_s: float = 60.0


@dataclasses.dataclass(eq=False)
class _Entry:
    """A template of the pool. ``name``: of the process that was started for it, or for the first template above it.
    ``parent``: the template that it is a branch of. ``size_bytes``: memory beyond the parent's; ``total_bytes``: all
    its memory. ``exceeds``: whether there was no room for it when it was measured."""

    environment_key: str
    statistics_key: str
    root: TemplateRoot
    template: Template
    modules: tuple[str, ...]
    stop: Callable[[], object]
    started_at: float
    used_at: float
    size_bytes: int
    name: str = ""
    parent: _Entry | None = None
    total_bytes: int = 0
    serving_since: float = 0.0
    check_at: float = 0.0
    exceeds: bool = False

    @property
    def level(self) -> int:
        return 0 if self.parent is None else self.parent.level + 1

    @property
    def loaded(self) -> set[str]:
        return set(self.modules).difference(self.template.imports.skipped)

    def measure(self) -> None:
        """A branch shares what its parent had loaded. What a template says of itself is believed between the bounds
        that can be seen."""
        if self.template.pid:
            resident_bytes, self.total_bytes = _memory_of(self.template.pid)
            shared_bytes = 0 if self.parent is None else self.parent.total_bytes
            said_bytes = min(self.template.private_bytes, resident_bytes)
            self.size_bytes = max(said_bytes, self.total_bytes - shared_bytes)


@dataclasses.dataclass
class _Failures:
    reason: str = ""
    count: int = 0
    pauses: int = 0
    until: float = 0.0


@dataclasses.dataclass(frozen=True)
class TemplateChange:
    """A template serves now, or is over: ``problem`` says why it cannot fork, empty if it can. ``is_forkable``: whether
    the environment has one that can."""

    key: str
    environment_key: str
    problem: str = ""
    is_forkable: bool = True


class TemplatePool:
    """Templates by key. Owned by one thread; times are in monotonic seconds.

    :param store: what tasks import.
    :param budget_bytes: of memory for the learned modules of a template.
    :param spares: children that each template forks in advance.
    :param idle_s: a template of no environment ends when it has not been used for so long; those of environments end
        with them (see :meth:`release`).
    :param memory_bytes: of all templates together, if there is more than one; None: no limit.
    """

    def __init__(
        self,
        store: PreloadStore,
        *,
        budget_bytes: int = 512 * 2**20,
        spares: int = 1,
        idle_s: float = float("inf"),
        memory_bytes: int | None = None,
    ) -> None:
        self._store = store
        self._budget_bytes = budget_bytes
        self._spares = spares
        self._idle_s = idle_s
        self._memory_bytes = memory_bytes
        self._sizes: dict[str, int] = {}  # of templates, as they were measured last
        self._changes: list[TemplateChange] = []  # to be reported by the next call of serve
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

        After an answer that is not None, call :meth:`branch`; if that is false, :meth:`add` or :meth:`not_started`.
        """
        if key in self._reserved or key in self._starting or now < self._failures.get(key, _Failures()).until:
            return None
        running = self._serving.get(key)
        if running is not None:
            if now < running.check_at:
                return None
            running.check_at = now + _CHECK_PERIOD_S
        elif not self._make_room(self._sizes.get(key, _UNKNOWN_BYTES), now=now):
            return None
        modules = chosen(self._store.of(statistics_key), environment, budget_bytes=self._budget_bytes)
        if running is not None and set(modules) <= set(running.modules):
            return None
        self._reserved.add(key)
        return modules

    def not_started(self, key: str, reason: str, *, now: float) -> None:
        """The template could not be started."""
        self._reserved.discard(key)
        self._failed(key, reason, "", now=now)

    def branch(
        self,
        key: str,
        environment_key: str,
        modules: tuple[str, ...],
        *,
        root: str,
        now: float,
        statistics_key: str | None = None,
    ) -> bool:
        """Fork a template from one in the same root that has imported a part of the modules; false if there is none.

        :param root: the name of the :class:`TemplateRoot`.
        :param statistics_key: as of :meth:`add`.
        """
        parent = self._parent_for(root, modules)
        if parent is None:
            return False
        try:
            process, connection = parent.template.branch()
        except TemplateFailed as error:
            _logger.info("a template is started afresh: %s", error)
            return False
        self.add(
            key,
            environment_key,
            connection,
            modules,
            root=parent.root,
            stop=lambda: parent.template.end_branch(process),
            now=now,
            statistics_key=statistics_key,
            name=parent.name,
            parent=parent,
        )
        return True

    def _parent_for(self, root: str, modules: Sequence[str]) -> _Entry | None:
        """The template to branch from: the one with the most modules, all of which are wanted."""
        wanted = set(modules)
        found = [
            entry
            for entry in self._serving.values()
            if root and entry.root.name == root and entry.level < _MOST_LEVELS and entry.loaded <= wanted
        ]
        return max(found, key=lambda entry: len(entry.loaded), default=None)

    def add(
        self,
        key: str,
        environment_key: str,
        connection: socket.socket,
        modules: tuple[str, ...],
        *,
        root: TemplateRoot,
        stop: Callable[[], object],
        now: float,
        statistics_key: str | None = None,
        name: str = "",
        parent: _Entry | None = None,
    ) -> None:
        """Add a template that has connected.

        :param statistics_key: None: that of the owner's tasks.
        :param stop: ends the process that was started for the template, when the template is over.
        :param name: name of the process that was started for it, or for the template that it is a branch of.
        :param parent: the template that it is a branch of.
        """
        self._reserved.discard(key)
        template = Template(
            connection,
            modules=modules,
            places=root.places,
            private=root.private,
            namespaces=root.namespaces,
            writable=root.writable,
            network=root.network,
            spares=self._spares,
            start_limit_s=root.import_limit_s,
        )
        if not template.is_over:
            self._epoll.register(template.fileno(), select.EPOLLIN)
        self._starting[key] = _Entry(
            environment_key,
            environment_key if statistics_key is None else statistics_key,
            root,
            template,
            modules,
            stop,
            started_at=now,
            used_at=now,
            size_bytes=self._sizes.get(key, _UNKNOWN_BYTES),
            name=name,
            parent=parent,
        )

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

    def named(self, name: str) -> list[Template]:
        """The templates that run in what was started by this name."""
        return [entry.template for entry in self._all() if entry.name == name and not entry.template.is_over]

    def takes(self, name: str, size_bytes: int) -> None:
        """Record the memory of a template with its branches and without workers. The branches' share counts for the
        branches."""
        family = [entry for entry in self._all() if entry.name == name]
        for entry in family:
            if entry.parent is None:
                of_others = sum(each.size_bytes for each in family if each is not entry)
                entry.size_bytes = max(0, size_bytes - of_others)
                entry.exceeds = entry.exceeds or self._excess_bytes() > 0

    @property
    def pids(self) -> set[int]:
        """The processes of templates."""
        return {entry.template.pid for entry in self._all() if entry.template.pid}

    @property
    def held_bytes(self) -> int:
        """Memory of the templates, as far as it is known."""
        return sum(entry.size_bytes for entry in self._all())

    def learn(self, statistics_key: str, names: Sequence[str], *, now: float) -> None:
        """A worker has reported what its tasks imported."""
        self._store.put(statistics_key, learned(self._store.of(statistics_key), names), now=now)

    def next_deadline(self) -> float:
        """When :meth:`serve` must be called in any case."""
        if self._changes:
            return 0.0
        entries = (*self._starting.values(), *self._serving.values())
        # What is found out while a worker is forked, or before a template is here, wakes nothing: its socket is closed.
        if any(entry.template.is_over for entry in (*entries, *self._leaving)):
            return 0.0
        deadlines = [entry.template.next_deadline() for entry in entries]
        deadlines += [self._unused_at(entry) for entry in self._serving.values()]
        if self._excess_bytes() > 0:
            deadlines += [entry.serving_since + _LEAST_AGE_S for _, entry in self._idle() if entry.exceeds]
        return min(deadlines, default=float("inf"))

    def serve(self, *, now: float) -> list[TemplateChange]:
        """Take what templates have sent, without waiting; what has changed."""
        changes, self._changes = self._changes, []
        for key, entry in list(self._starting.items()):
            entry.template.serve()
            if entry.template.is_over or entry.template.is_serving:
                del self._starting[key]
                self._learn_cost(entry, now=now)
            if entry.template.is_over:
                changes.append(self._ended(key, entry, now=now))
            elif entry.template.is_serving:
                entry.measure()
                entry.used_at = entry.serving_since = now
                if entry.modules:
                    entry.check_at = now + max(_CHECK_PERIOD_S, _KEPT_STARTS * (now - entry.started_at))
                self._sizes.pop(key, None)
                self._sizes[key] = entry.size_bytes
                if len(self._sizes) > _MOST_FAILED:
                    del self._sizes[next(iter(self._sizes))]
                if (former := self._serving.pop(key, None)) is not None:
                    self._leave(former)
                self._serving[key] = entry
                entry.exceeds = self._excess_bytes() > 0
                if (failures := self._failures.get(key)) is not None:
                    failures.reason, failures.count = "", 0
                changes.append(self._change(key, entry))
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
        self._shrink(now=now)
        changes += self._changes
        self._changes = []
        return changes

    # -- memory --------------------------------------------------------------------------------------------------------

    def _excess_bytes(self, needed_bytes: int = 0) -> int:
        """Return the memory of templates beyond the budget, which a single template may exceed."""
        sizes = [size for size in (*(entry.size_bytes for entry in self._all()), needed_bytes) if size]
        return 0 if self._memory_bytes is None or len(sizes) < 2 else sum(sizes) - self._memory_bytes

    def _make_room(self, needed_bytes: int, *, now: float) -> bool:
        """End templates that were not used for a while, if that makes room for ``needed_bytes``. Return whether it
        does."""
        excess_bytes = self._excess_bytes(needed_bytes)
        ended: list[str] = []
        for key, entry in self._idle():
            if excess_bytes <= 0 or now < entry.used_at + _LEAST_AGE_S:
                break
            excess_bytes -= entry.size_bytes
            ended.append(key)
        if excess_bytes > 0:
            return False
        for key in ended:
            self._evict(key)
        return True

    def _shrink(self, *, now: float) -> None:
        """End templates that turned out to have no room, but none that has just begun to serve."""
        for key, entry in self._idle():
            if entry.exceeds and now >= entry.serving_since + _LEAST_AGE_S and self._excess_bytes() > 0:
                self._evict(key)

    def _idle(self) -> list[tuple[str, _Entry]]:
        """Templates that have neither workers nor branches, the one first that was used last longest ago."""
        idle = [(key, entry) for key, entry in self._serving.items() if entry.template.is_idle]
        return sorted(idle, key=lambda each: each[1].used_at)

    def _evict(self, key: str) -> None:
        entry = self._serving.pop(key)
        self._leave(entry)
        entry.size_bytes = 0  # it ends
        self._changes.append(self._change(key, entry, "others need its memory"))

    def _change(self, key: str, entry: _Entry, problem: str = "") -> TemplateChange:
        is_forkable = any(each.environment_key == entry.environment_key for each in self._serving.values())
        return TemplateChange(key, entry.environment_key, problem, is_forkable=is_forkable)

    def release(self, environment_key: str) -> None:
        """End the templates of an environment, each with its last worker."""
        self._changes = [change for change in self._changes if change.environment_key != environment_key]
        for entries in (self._serving, self._starting):
            for key in [key for key, entry in entries.items() if entry.environment_key == environment_key]:
                self._leave(entries.pop(key))

    def close(self) -> None:
        """End all templates, and what is left of their workers."""
        for entry in self._all():
            entry.template.close()
            entry.template.kill_all()
            entry.stop()
        self._serving.clear()
        self._starting.clear()
        self._leaving.clear()
        self._store.close()
        self._epoll.close()

    def _all(self) -> list[_Entry]:
        return [*self._serving.values(), *self._starting.values(), *self._leaving]

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
        for module, reason in imports.skipped.items():
            _logger.warning("%s is not preloaded in %s: %.200r", module, entry.environment_key or "workers", reason)
        statistics = measured(self._store.of(entry.statistics_key), imports.cost, imports.skipped)
        self._store.put(entry.statistics_key, statistics, now=now)

    def _ended(self, key: str, entry: _Entry, *, now: float) -> TemplateChange:
        template = entry.template
        if now - entry.started_at >= _LONGEST_PAUSE_S and (failures := self._failures.get(key)) is not None:
            failures.pauses = 0  # it was fit for long
        self._failed(key, template.problem, template.problem_module, now=now)
        if template.problem_module:
            statistics = excluded(self._store.of(entry.statistics_key), template.problem_module, template.problem)
            self._store.put(entry.statistics_key, statistics, now=now, at_once=True)
        _logger.warning("the template of %s cannot fork: %s", key, template.problem)
        entry.stop()
        return self._change(key, entry, template.problem)

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


def _memory_of(pid: int) -> tuple[int, int]:
    """Resident bytes of a process, and those of them that are no file's; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/statm").read_text(encoding="utf-8")
    except OSError:
        return 0, 0
    _, resident, shared, *_ = map(int, text.split())
    return resident * resource.getpagesize(), (resident - shared) * resource.getpagesize()
