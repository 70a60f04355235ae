"""Copies of files on nodes, as the agent sees them: what managers report of them, and what each is to copy. No I/O."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Sequence
from typing import Any, Final

from farcall_common.progress import clean_text
from farcall_common.staging import IN
from farcall_endpoint.agent.core.actions import CopyFiles
from farcall_endpoint.agent.core.managers import Managers
from farcall_endpoint.agent.core.replicas import Replicas
from farcall_endpoint.contracts.agent_manager import FileContent, FilesReported, NodeFile, WaitingForFiles

_MOST_CONTENTS: Final = 64
"""Maximum number of a task's files, the largest ones, that decide where it is placed."""


def contents_of(files: Sequence[NodeFile], *, submitter: str) -> tuple[FileContent, ...]:
    """The contents that decide where a task is placed.

    :param submitter: the submitter's name at managers.
    """
    largest = sorted(files, key=lambda each: -each.size_bytes)[:_MOST_CONTENTS]
    return tuple(dict.fromkeys([FileContent(submitter, each.sha256, each.size_bytes) for each in largest]))


class NodeCopies:
    """The copies of all managers.

    :param managers: whose loads have the contents of their copies.
    """

    def __init__(self, managers: Managers) -> None:
        self._managers = managers
        self._replicas = Replicas()
        self._use: dict[str, tuple[int, int]] = {}  # by manager: copies and bytes
        self._missed = 0
        self._problem = ""
        self._waiting: dict[str, dict[str, tuple[float, WaitingForFiles]]] = {}  # by manager and task: since when

    def joined(self, manager_id: str) -> None:
        """A manager has registered."""
        self._replicas.joined(manager_id)

    def lost(self, manager_id: str) -> None:
        """A manager is gone."""
        self._waiting.pop(manager_id, None)
        self._use.pop(manager_id, None)
        self._replicas.lost(manager_id)

    def reported(self, manager_id: str, report: FilesReported, now: float) -> None:
        """A manager reports."""
        member = self._managers.members.get(manager_id)
        if member is None:
            return
        replicas = self._replicas
        member.load.add_contents(report.have)
        member.load.remove_contents(report.gone)
        replicas.gone(manager_id, report.gone)
        replicas.dropped(manager_id, report.dropped)
        replicas.have(manager_id, report.have)
        for content, reached in report.failed:
            replicas.failed(manager_id, content, reached=reached)
        replicas.wanted(manager_id, report.wanted)
        self._use[manager_id] = max(0, report.copies), max(0, report.copies_bytes)
        self._missed += max(0, report.missed)
        self._problem = clean_text(report.problem) or self._problem
        former = self._waiting.pop(manager_id, {})
        if report.waiting:
            waiting = {each.task_id: (former.get(each.task_id, (now, each))[0], each) for each in report.waiting}
            self._waiting[manager_id] = waiting

    def take_orders(self) -> Iterator[CopyFiles]:
        """Return the orders to copy files since the last call, by manager."""
        orders, self._replicas.orders = self._replicas.orders, []
        for manager_id, several in itertools.groupby(sorted(orders, key=lambda each: each.manager_id), lambda e: e[0]):
            yield CopyFiles(manager_id, tuple(several))

    @property
    def has_orders(self) -> bool:
        """Whether orders to copy files wait to be taken."""
        return bool(self._replicas.orders)

    def describe(self) -> dict[str, Any]:
        """Facts for the endpoint's status: copies on all nodes, tasks that got no copy, and the last problem."""
        facts = {
            "node_copies_count": sum(copies for copies, _ in self._use.values()),
            "node_copies_bytes": sum(size_bytes for _, size_bytes in self._use.values()),
            "tasks_without_node_copies": self._missed,
            "node_copies_problem": self._problem,
        }
        return {name: value for name, value in facts.items() if value}

    def rows(self, tasks: Container[str]) -> Iterator[dict[str, Any]]:
        """Tasks whose files are being copied to their nodes, in rows like those of
        :meth:`farcall_endpoint.files.plan.Staging.report`."""
        for since, waiting in itertools.chain.from_iterable(each.values() for each in self._waiting.values()):
            if waiting.task_id in tasks:
                yield {
                    "task_id": waiting.task_id,
                    "state": IN,
                    "bytes": waiting.total_bytes - waiting.left_bytes,
                    "files": waiting.contents,
                    "files_done": waiting.contents - waiting.left,
                    "since": since,
                    "total": waiting.total_bytes,
                    "to_node": True,
                }
