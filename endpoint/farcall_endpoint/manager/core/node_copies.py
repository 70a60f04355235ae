"""Copies of files on this node: which tasks wait for which, what is removed to make room. No I/O, no clock.

A copy belongs to one submitter. Tasks have links to copies; a copy with a link is never removed. Where a copy cannot be
had, or has no room, the task reads the endpoint's own copy, as without copies on nodes.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec

from farcall_endpoint.contracts.agent_manager import CopyFiles, FileContent, FileCopy, FilesReported, WaitingForFiles
from farcall_endpoint.manager.core.actions import Action, Copy, Link, Pass, RemoveCopies, Unlink, Warn
from farcall_endpoint.manager.core.events import CopyEnded, Job, Linked

_LEAST_BYTES: Final = 4096
"""Least size that a copy counts for, which also limits the number of copies."""
_MOST_SHOWN: Final = 20
"""Maximum number of waiting tasks in a report."""
_SHOW_PERIOD_S: Final = 1.0
_MOST_IN_MESSAGE: Final = 5000
"""Maximum number of entries of each kind in a report."""


@dataclasses.dataclass(slots=True)
class _Copy:
    """A copy, perhaps incomplete. ``links``: number of links, including those of waiting tasks. ``is_ordered``: whether
    the agent has named a source."""

    links: int = 0
    is_complete: bool = False
    is_ordered: bool = False
    tasks: dict[int, None] = dataclasses.field(default_factory=dict)  # that wait, by number


@dataclasses.dataclass(slots=True)
class _Waiting:
    """A task that waits for copies, or for its links."""

    job: Job
    copies: dict[FileContent, _Copy]
    places: dict[str, str]  # by SHA-256
    total_bytes: int
    left: int = 0
    left_bytes: int = 0


class NodeFiles:
    """Adds actions about copies to those of the core. Tasks leave by ``ready``, whose taker clears it.

    :param budget_bytes: of all copies; 0: the node keeps none.
    """

    def __init__(self, *, actions: list[Action], budget_bytes: int) -> None:
        self._actions = actions
        self._budget_bytes = budget_bytes
        self._copies: collections.OrderedDict[FileContent, _Copy] = collections.OrderedDict()  # longest unused first
        self._used_bytes = 0
        self._waiting: dict[int, _Waiting] = {}
        self._linked: dict[str, tuple[int, dict[FileContent, _Copy]]] = {}  # by the path of the links
        self._numbers = itertools.count(1)
        #: Tasks that may run, in the order in which they have their files.
        self.ready: list[Job] = []
        self._last_problem = ""
        self._missed = 0  # since the last report
        self._news: dict[str, list[FileContent]] = collections.defaultdict(list)
        self._failed: list[tuple[FileContent, bool]] = []
        self._has_changed = self._has_shown = False
        self._shown_at = 0.0

    def __len__(self) -> int:
        """How many tasks wait."""
        return len(self._waiting)

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """A task with files has come."""
        number = next(self._numbers)
        contents = {FileContent(job.order.submitter, each.sha256, each.size_bytes): None for each in job.files}
        missing = [each for each in contents if each not in self._copies]
        if not self._make_room(sum(map(_taken, missing)), keep=contents):
            self._give_up(job, f"with those of other tasks, its files need more than {self._budget_bytes:,} bytes")
            return
        for each in missing:
            self._copies[each] = _Copy()
            self._used_bytes += _taken(each)
        if missing:
            self._news["wanted"] += missing
        waiting = self._waiting[number] = _Waiting(
            job,
            {each: self._copies[each] for each in contents},
            {each.sha256: each.place for each in job.files},
            sum([each.size_bytes for each in contents]),
        )
        for content, copy in waiting.copies.items():
            copy.links += 1
            self._copies.move_to_end(content)
            if not copy.is_complete:
                copy.tasks[number] = None
                waiting.left += 1
                waiting.left_bytes += content.size_bytes
        self._has_changed = True
        if not waiting.left:
            self._actions.append(Link(number, job.order.submitter, job.files))

    def ended(self, jobs: list[Job]) -> None:
        """Tasks that had links have ended; they are taken out."""
        for job in jobs:
            number, copies = self._linked.pop(job.read_dir, (0, {}))
            if not number:  # it has ended twice
                continue
            self._actions.append(Unlink(number, job.order.submitter))
            self._release(copies)
        jobs.clear()

    def cancel(self, task_ids: Collection[str]) -> list[Job]:
        """Take out waiting tasks."""
        numbers = [number for number, each in self._waiting.items() if each.job.order.task_id in task_ids]
        return [self._take_out(number) for number in numbers]

    def clear(self) -> None:
        """Take out all that wait."""
        for number in list(self._waiting):
            self._take_out(number)

    def _take_out(self, number: int) -> Job:
        waiting = self._waiting.pop(number)
        self._has_changed = True
        if not waiting.left:  # its links are being made
            self._actions.append(Unlink(number, waiting.job.order.submitter))
        for copy in waiting.copies.values():
            copy.tasks.pop(number, None)
        self._release(waiting.copies)
        return waiting.job

    def _release(self, copies: Mapping[FileContent, _Copy]) -> None:
        for content, copy in copies.items():
            copy.links -= 1
            if copy.links or copy.is_complete or copy.is_ordered:  # what is on its way arrives
                continue
            if self._copies.get(content) is copy:
                self._remove(content)
                self._news["dropped"].append(content)

    def _give_up(self, job: Job, reason: str) -> None:
        """A task reads the endpoint's copies."""
        self._missed += 1
        if reason != self._last_problem:  # of thousands of tasks, one line
            self._last_problem = reason
            task_id = job.order.task_id
            self._actions.append(Warn(f"task {task_id} reads its files from the endpoint's directory: {reason}"))
        self.ready.append(msgspec.structs.replace(job, files=()))

    # -- copies --------------------------------------------------------------------------------------------------------

    def handle(self, event: CopyFiles | CopyEnded | Linked) -> None:
        """The agent names sources, or something was done."""
        match event:
            case CopyFiles():
                self._order(event)
            case CopyEnded():
                self._copy_ended(event)
            case Linked():
                self._link_ended(event)

    def _order(self, message: CopyFiles) -> None:
        for each in message.copies:
            copy = self._copies.get(each.content)
            if copy is None:  # it is not wanted any more, and the agent must hear that from here
                self._news["dropped"].append(each.content)
            elif copy.is_complete:
                self._news["have"].append(each.content)
            elif copy.is_ordered:
                continue
            elif each.source is None:
                self._lack(each.content, "the copy could not be had from any node, nor from the endpoint's directory")
            elif not copy.links:
                self._remove(each.content)
                self._news["dropped"].append(each.content)
            else:
                copy.is_ordered = True
                self._actions.append(self._copy(each, copy))

    def _copy(self, ordered: FileCopy, copy: _Copy) -> Copy:
        """The order with the place of the endpoint's copy: in the directory of a task that waits for it."""
        content, source = ordered.content, ordered.source
        assert source is not None
        waiting = self._waiting[next(iter(copy.tasks))]
        return Copy(content, source, f"{waiting.job.order.files_dir}/r/{waiting.places[content.sha256]}")

    def _copy_ended(self, event: CopyEnded) -> None:
        content = event.content
        copy = self._copies.get(content)
        if copy is None or not copy.is_ordered:
            return
        copy.is_ordered = False
        if not event.problem:
            copy.is_complete = True
            self._news["have"].append(content)
            for number in copy.tasks:
                waiting = self._waiting[number]
                waiting.left -= 1
                waiting.left_bytes -= content.size_bytes
                if not waiting.left:
                    self._actions.append(Link(number, content.submitter, waiting.job.files))
            copy.tasks.clear()
            self._has_changed = True
        elif event.is_local:
            self._lack(content, event.problem)
            self._news["dropped"].append(content)
        elif copy.links:
            self._failed.append((content, event.reached))
        else:
            self._remove(content)
            self._news["dropped"].append(content)

    def _lost(self, contents: Iterable[FileContent]) -> None:
        """Copies are not as they were, and have been removed. Tasks that have links keep these."""
        for each in contents:
            copy = self._copies.get(each)
            if copy is not None and copy.is_complete:
                self._remove(each)
                self._news["gone"].append(each)

    def _link_ended(self, event: Linked) -> None:
        waiting = self._waiting.pop(event.number, None)
        if waiting is None:
            return
        self._has_changed = True
        if event.problem:
            self._actions.append(Unlink(event.number, waiting.job.order.submitter))
            self._release(waiting.copies)
            self._lost(event.lost)
            self._give_up(waiting.job, event.problem)
            return
        self._linked[event.read_dir] = event.number, waiting.copies
        self.ready.append(msgspec.structs.replace(waiting.job, read_dir=event.read_dir))

    def _lack(self, content: FileContent, reason: str) -> None:
        """A copy cannot be had: the tasks that wait for it read the endpoint's."""
        for number in list(self._copies[content].tasks):
            self._give_up(self._take_out(number), reason)
        if content in self._copies:
            self._remove(content)

    def _make_room(self, needed_bytes: int, *, keep: Collection[FileContent]) -> bool:
        """Remove copies that no task has, those first that were not used for longest; False if that is not enough:
        then none is removed."""
        excess = self._used_bytes + needed_bytes - self._budget_bytes
        chosen: list[FileContent] = []
        for content, copy in self._copies.items():
            if excess <= 0:
                break
            if copy.is_complete and not copy.links and content not in keep:
                chosen.append(content)
                excess -= _taken(content)
        if excess > 0:
            return False
        for content in chosen:
            self._remove(content)
        if chosen:
            self._actions.append(RemoveCopies(tuple(chosen)))
            self._news["gone"] += chosen
        return True

    def _remove(self, content: FileContent) -> None:
        del self._copies[content]
        self._used_bytes -= _taken(content)

    # -- the agent -----------------------------------------------------------------------------------------------------

    def has_news(self, now: float) -> bool:
        """Whether there is something to report. Waiting tasks are reported at most once a second."""
        if self._news or self._failed or self._missed:
            return True
        return self._has_changed and now >= self._shown_at and bool(self._waiting or self._has_shown)

    def news(self, now: float) -> Iterable[Pass]:
        """Return the changes since the last call, in messages of limited size."""
        self._shown_at = now + _SHOW_PERIOD_S
        self._has_shown = bool(self._waiting)
        kinds = {name: tuple(contents) for name, contents in self._news.items()}
        failed = tuple(self._failed)
        missed = self._missed
        self._news.clear()
        self._failed, self._missed, self._has_changed = [], 0, False
        counts = [*map(len, kinds.values()), len(failed)]
        for start in range(0, max([1, *counts]), _MOST_IN_MESSAGE):
            end = start + _MOST_IN_MESSAGE
            message = FilesReported(
                **{name: contents[start:end] for name, contents in kinds.items()},
                failed=failed[start:end],
                waiting=tuple(map(_shown, itertools.islice(self._waiting.values(), _MOST_SHOWN))),
                copies=len(self._copies),
                copies_bytes=self._used_bytes,
                missed=0 if start else missed,
                problem=self._last_problem if missed else "",
            )
            yield Pass(message, ())


def _taken(content: FileContent) -> int:
    return max(content.size_bytes, _LEAST_BYTES)


def _shown(waiting: _Waiting) -> WaitingForFiles:
    task_id = waiting.job.order.task_id
    return WaitingForFiles(task_id, len(waiting.copies), waiting.total_bytes, waiting.left, waiting.left_bytes)
