"""Watch over templates: what packages of other submitters than the owner run there, outside of tasks.

A package's ``.pth`` file runs with each Python that finds it, before there is a task whose limits could count.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from farcall_endpoint.host.process_reaper import ids_of, read_process, walk
from farcall_endpoint.manager.core.limits import TaskUse
from farcall_endpoint.manager.shell.processes import MeasuredTask, Measuring, ShareLimit, processor_s, tree_bytes

if TYPE_CHECKING:
    from farcall_endpoint.environments.launcher import RunningTemplate

_LOOK_PERIOD_S: Final = 2.0
_MOST_LOOKS: Final = 3
"""Number of successive checks with further processes that end a template. Leftovers of workers end sooner."""
_COMPUTING_PERIOD_S: Final = 10.0
"""Seconds between two measurements of a template's processor time, without the time that its forks took."""
_FORK_S: Final = 0.05
"""Maximum processor time of a fork."""
_ANSWER_S: Final = 60.0


class Found(NamedTuple):
    """The result of a turn, by template: why some end, and what they take, with all processes but their workers."""

    ended: dict[str, str]
    sizes: dict[str, int]


@dataclasses.dataclass
class _Seen:
    """The past of a template: looks at which it had other processes; its processor time and forks at the
    beginning of a period, and the processors that it used, as a moving average; and since when it has not answered a
    request."""

    looks: int = 0
    period_from: float = math.nan
    used_s: float = 0.0
    forked: int = 0
    share: float = 0.0
    unanswered: int = 0
    unanswered_from: float = 0.0


class TemplateWatch:
    """Measures the templates in environments of other submitters than the owner.

    :param clock: monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._measuring = Measuring(clock=clock)
        self._templates: dict[str, RunningTemplate] = {}
        self._seen: dict[str, _Seen] = {}
        self._shares = ShareLimit(_COMPUTING_PERIOD_S)
        self._look_at = -math.inf

    @property
    def due_at(self) -> float:
        """When to call :meth:`turn` if there are templates, in seconds of the clock."""
        return max(self._measuring.due_at, self._look_at)

    def turn(self, templates: Sequence[RunningTemplate], *, memory_bytes: int | None, processes: int) -> Found:
        """Measure for a moment.

        :param memory_bytes: of a template, at most; None: no limit.
        :param processes: of a template, at most; 0: no limit.
        """
        self._templates = {template.name: template for template in templates}
        self._seen = {name: self._seen.get(name, _Seen()) for name in self._templates}
        found = Found({}, {})
        uses = self._measuring.turn(
            {name: (None, self._template_of(name, memory_bytes, processes)) for name in self._templates}
        )
        for name, use in uses.items():
            found.ended[name] = _excess(use, processes)
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + _LOOK_PERIOD_S
            for template in self._templates.values():
                if template.pids:
                    self._look(template, found, now)
            shares: dict[str, dict[str, float]] = collections.defaultdict(dict)
            for name, template in self._templates.items():
                shares[template.submitter][name] = self._seen[name].share
            for name in self._shares.excess(shares, now=now):
                found.ended.setdefault(name, "a package computes while no task runs")
        return found

    def _template_of(self, name: str, memory_bytes: int | None, processes: int) -> Callable[[], MeasuredTask]:
        return lambda: MeasuredTask(
            root=_root_of(self._templates[name]),
            memory_bytes=memory_bytes,
            processes=processes,
            apart=lambda: self._templates[name].workers,
            period_s=_LOOK_PERIOD_S / 2,
        )

    def _look(self, template: RunningTemplate, found: Found, now: float) -> None:
        """Look at a template once more."""
        own, seen = _own_of(template), self._seen[template.name]
        if not template.unanswered:  # else a process may be a worker that is forked just now
            seen.looks = seen.looks + 1 if _has_others(template, own) else 0
        if template.unanswered != seen.unanswered or not template.unanswered:
            seen.unanswered, seen.unanswered_from = template.unanswered, now
        if math.isnan(seen.period_from) or now >= seen.period_from + _COMPUTING_PERIOD_S:
            used_s = sum(map(processor_s, own))
            of_forks_s = _FORK_S * (template.forked - seen.forked)
            if not math.isnan(seen.period_from):
                share = max(0.0, used_s - seen.used_s - of_forks_s) / (now - seen.period_from)
                seen.share = (seen.share + share) / 2
            seen.period_from, seen.used_s, seen.forked = now, used_s, template.forked
            found.sizes[template.name] = tree_bytes(_root_of(template), without=template.workers) or 0
        if seen.looks >= _MOST_LOOKS:
            found.ended[template.name] = "a package runs processes of its own beside the workers"
        elif now >= seen.unanswered_from + _ANSWER_S:
            found.ended[template.name] = f"it has not forked a process for {_ANSWER_S:g} s"


def _excess(use: TaskUse, processes: int) -> str:
    if processes and use.processes > processes:
        return f"it has more than {processes} processes and threads"
    return f"it takes {(use.resident_bytes + use.file_bytes) / 1e6:.0f} MB of memory, more than a template may"


def _root_of(template: RunningTemplate) -> int:
    """The process below which all others of a template are."""
    if not template.is_remote or not template.pids:
        return template.root
    return [template.root, *_above(template.pids[0], inside=True)][-1]


def _own_of(template: RunningTemplate) -> set[int]:
    """The templates, and the processes between them and the root."""
    root, found = _root_of(template), {template.root}
    for pid in template.pids:
        for each in _above(pid, inside=False):
            found.add(each)
            if each == root:
                break
    return found


def _above(pid: int, *, inside: bool) -> Iterator[int]:
    """A process and those above it; with ``inside``, as long as they are in a process namespace below this one's."""
    here = len(ids_of(os.getpid()))
    while pid > 1 and pid != os.getpid() and not (inside and len(ids_of(pid)) <= here):
        yield pid
        process = read_process(pid)
        pid = 0 if process is None else process.parent


def _has_others(template: RunningTemplate, own: set[int]) -> bool:
    """Whether a template has processes in its container that are neither its workers nor its own. The runner's own
    are outside of the container."""
    here = len(ids_of(os.getpid()))
    is_apart = any(len(ids_of(pid)) > here for pid in template.pids)
    for pid, _ in walk(_root_of(template), without=template.workers):
        if pid in own or (is_apart and len(ids_of(pid)) <= here):
            continue
        process = read_process(pid)
        if process is not None and not process.is_zombie:
            return True
    return False
