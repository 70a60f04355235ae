"""Copies of files on a node, as its manager decides: what is copied, linked and removed, and which tasks wait."""

from __future__ import annotations

from typing import Any

import pytest

from farcall_common.task_options import TaskOptions
from farcall_common.wire import TaskState
from farcall_endpoint.contracts.agent_manager import (
    CancelTasks,
    CopyFiles,
    FileContent,
    FileCopy,
    FilesReported,
    NodeFile,
    Stop,
    TaskOrder,
    WaitingForFiles,
)
from farcall_endpoint.manager.core.actions import Action, Copy, Link, RemoveCopies, Send, Unlink, Warn
from farcall_endpoint.manager.core.events import CopyEnded, Event, Job, Linked, TasksReceived, WorkerDied
from tests.support.manager import Rig, done

MB = 10**6


def file(name: str, size_bytes: int = MB) -> NodeFile:
    return NodeFile(f"{ord(name):032}/{name}", f"{ord(name):064}", size_bytes)


def content(of: NodeFile, submitter: str = "") -> FileContent:
    return FileContent(submitter, of.sha256, of.size_bytes)


def job(task_id: str, *files: NodeFile, submitter: str = "", **options: Any) -> Job:
    order = TaskOrder(task_id, 1, "h", 0, TaskOptions(**options), "", submitter, files_dir=f"/shared/{task_id}")
    return Job(order, b"body", b"payload", files=files)


class Node(Rig):
    """A manager that keeps copies, whose worker is ready."""

    def __init__(self, *, budget_bytes: int = 100 * MB, slots: int = 2) -> None:
        super().__init__(slots=slots, node_cache_bytes=budget_bytes)
        self.start_all()
        self.report()

    def receive(self, *jobs: Job) -> list[Action]:
        return self.handle(TasksReceived(jobs))

    def report(self) -> FilesReported:
        """What the agent has heard of copies since the last call, a second ago or more."""
        self.now += 1.0
        self.handle()
        reports = [each.message for each in self.passed if isinstance(each.message, FilesReported)]
        self.passed.clear()
        kinds = ("wanted", "dropped", "have", "failed", "gone")
        joined = {kind: tuple(each for report in reports for each in getattr(report, kind)) for kind in kinds}
        last = reports[-1] if reports else FilesReported()
        return FilesReported(
            **joined,
            waiting=last.waiting,
            copies=last.copies,
            copies_bytes=last.copies_bytes,
            missed=sum(each.missed for each in reports),
            problem=last.problem,
        )

    def copy(self, of: NodeFile, *, source: str = "", submitter: str = "") -> list[Action]:
        """Let a copy be made."""
        self.order(of, source, submitter=submitter)
        return self.handle(CopyEnded(content(of, submitter)))

    def order(self, of: NodeFile, source: str | None, *, submitter: str = "") -> list[Action]:
        return self.handle(CopyFiles((FileCopy(content(of, submitter), source),)))

    def link(self, actions: list[Action]) -> list[Action]:
        """Let the links be made that were ordered."""
        events: list[Event] = [
            Linked(each.number, f"/node/{each.number}") for each in actions if isinstance(each, Link)
        ]
        return self.handle(*events)


def sent(actions: list[Action]) -> list[tuple[str, str]]:
    """The tasks that workers get, each with the directory of what it reads."""
    return [(o.task_id, o.read_dir) for each in actions if isinstance(each, Send) for o in each.packet.orders]


def of_kind(actions: list[Action], kind: type[Action]) -> list[Action]:
    return [each for each in actions if isinstance(each, kind)]


def test_a_task_waits_for_its_copies_without_a_slot_and_others_run() -> None:
    node = Node(slots=1)
    assert sent(node.receive(job("a", file("x")), Job(TaskOrder("b", 1, "h", 0), b"body", b"payload"))) == [("b", "")]
    report = node.report()
    assert report.wanted == (content(file("x")),)
    assert report.waiting == (WaitingForFiles("a", 1, MB, 1, MB),)
    [copy] = node.order(file("x"), "")
    assert copy == Copy(content(file("x")), "", f"/shared/a/r/{file('x').place}")
    node.done()
    linking = node.handle(CopyEnded(content(file("x"))))
    assert of_kind(linking, Link) == [Link(1, "", (file("x"),))]
    assert sent(node.link(linking)) == [("a", "/node/1")]
    report = node.report()
    assert (report.have, report.waiting) == ((content(file("x")),), ())
    node.read()
    assert node.done() == "a"
    assert [each.task_id for each in node.progress().finished] == ["b", "a"]


def test_links_are_removed_when_the_task_has_ended_and_the_copy_stays() -> None:
    node = Node()
    node.receive(job("a", file("x")))
    node.link(node.copy(file("x")))
    node.read()
    order = node.workers[0].running
    assert order is not None
    actions = node.handle(done(0, order.task_id))
    assert of_kind(actions, Unlink) == [Unlink(1, "")]
    again = node.receive(job("b", file("x")))
    assert of_kind(again, Link) == [Link(2, "", (file("x"),))]
    assert node.report().wanted == (content(file("x")),)  # of the first task only


def test_a_worker_that_dies_leaves_no_links() -> None:
    node = Node()
    node.receive(job("a", file("x")))
    node.link(node.copy(file("x")))
    node.read()
    assert not of_kind(node.handle(), Unlink)
    actions = node.handle(WorkerDied(0, 0, "exit code 1"))
    assert of_kind(actions, Unlink) == [Unlink(1, "")]


def test_tasks_that_share_a_file_wait_for_one_copy() -> None:
    node = Node(slots=3)
    node.receive(*[job(name, file("x")) for name in "abc"])
    assert node.report().wanted == (content(file("x")),)
    linking = node.copy(file("x"))
    assert len(of_kind(linking, Link)) == 3
    assert sorted(task_id for task_id, _ in sent(node.link(linking))) == ["a", "b", "c"]


def test_a_task_waits_until_all_of_its_files_are_there() -> None:
    node = Node()
    node.receive(job("a", file("x"), file("y")))
    assert not of_kind(node.copy(file("x")), Link)
    assert [(each.contents, each.left) for each in node.report().waiting] == [(2, 1)]
    assert of_kind(node.copy(file("y")), Link)


def test_a_waiting_task_can_be_cancelled() -> None:
    node = Node()
    node.receive(job("a", file("x")))
    node.handle(CancelTasks(("a",)))
    [finished] = node.progress().finished
    assert finished.state is TaskState.CANCELLED
    report = node.report()
    assert (report.dropped, report.waiting) == ((content(file("x")),), ())
    assert not of_kind(node.order(file("x"), ""), Copy)  # the order was on its way
    assert node.report().dropped == (content(file("x")),)


def test_a_copy_on_its_way_arrives_although_its_task_was_cancelled() -> None:
    node = Node()
    node.receive(job("a", file("x")))
    node.order(file("x"), "")
    node.handle(CancelTasks(("a",)))
    assert node.report().dropped == ()
    node.handle(CopyEnded(content(file("x"))))
    assert node.report().have == (content(file("x")),)
    assert of_kind(node.receive(job("b", file("x"))), Link)


def test_a_task_that_is_cancelled_while_its_links_are_made_leaves_none() -> None:
    node = Node()
    node.receive(job("a", file("x")))
    node.copy(file("x"))
    actions = node.handle(CancelTasks(("a",)))
    assert of_kind(actions, Unlink) == [Unlink(1, "")]
    assert sent(node.handle(Linked(1, "/node/1"))) == []


def test_the_longest_unused_copies_without_links_make_room() -> None:
    node = Node(budget_bytes=3 * MB, slots=1)
    for name in "xyz":
        node.receive(job(name, file(name)))
        node.link(node.copy(file(name)))
        if name != "x":  # the task with x runs on
            node.handle()
    assert node.done() == "x"
    assert node.done() == "y"
    node.receive(job("again", file("x")))  # used: y is the longest unused one
    node.report()
    actions = node.receive(job("v", file("v")))
    assert of_kind(actions, RemoveCopies) == [RemoveCopies((content(file("y")),))]
    assert node.report().gone == (content(file("y")),)


def test_where_all_copies_are_in_use_a_task_reads_the_endpoints_copy() -> None:
    node = Node(budget_bytes=MB)
    node.receive(job("a", file("x")))
    node.link(node.copy(file("x")))
    actions = node.receive(job("b", file("y")))
    assert sent(actions) == [("b", "")]
    assert of_kind(actions, Warn)
    assert not of_kind(actions, RemoveCopies)
    report = node.report()
    assert (report.copies, report.copies_bytes, report.missed) == (1, MB, 1)
    assert "more than 1,000,000 bytes" in report.problem
    assert node.report().missed == 0


def test_what_cannot_be_had_is_read_from_the_endpoints_directory() -> None:
    node = Node(slots=3)
    node.receive(job("a", file("x")), job("b", file("x"), file("y")), job("c", file("y")))
    assert sorted(sent(node.order(file("x"), None))) == [("a", ""), ("b", "")]
    assert [each.task_id for each in node.report().waiting] == ["c"]
    node.copy(file("y"))


@pytest.mark.parametrize("is_local", [True, False])
def test_a_failed_copy_is_tried_elsewhere_unless_the_node_is_at_fault(is_local: bool) -> None:
    node = Node()
    node.receive(job("a", file("x")))
    node.report()
    node.order(file("x"), "host:1")
    failed = CopyEnded(content(file("x")), "why", is_local=is_local, reached=False)
    actions = node.handle(failed)
    report = node.report()
    if is_local:
        assert sent(actions) == [("a", "")]
        assert set(report.dropped) == {content(file("x"))}
    else:
        assert sent(actions) == []
        assert report.failed == ((content(file("x")), False),)
        assert of_kind(node.order(file("x"), "host:2"), Copy)


def test_a_copy_that_a_task_has_changed_is_copied_again() -> None:
    node = Node()
    node.receive(job("a", file("x")))
    [link] = of_kind(node.copy(file("x")), Link)
    assert isinstance(link, Link)
    actions = node.handle(Linked(link.number, problem="1 copies were changed", lost=(content(file("x")),)))
    assert sent(actions) == [("a", "")]
    assert node.report().gone == (content(file("x")),)
    node.receive(job("b", file("x")))
    assert node.report().wanted == (content(file("x")),)


def test_links_of_a_removed_copy_do_not_count_for_its_successor() -> None:
    node = Node(budget_bytes=2 * MB, slots=3)
    node.receive(job("a", file("x")))
    node.link(node.copy(file("x")))
    node.receive(job("b", file("x")))
    node.handle(Linked(2, problem="changed", lost=(content(file("x")),)))
    node.receive(job("c", file("x")))
    node.link(node.copy(file("x")))
    node.handle(done(0, "a"))
    assert not of_kind(node.receive(job("d", file("y", 2 * MB))), RemoveCopies)


def test_submitters_share_no_copies() -> None:
    node = Node()
    node.receive(job("a", file("x")))
    node.copy(file("x"))
    node.report()
    node.receive(job("b", file("x"), submitter="other"))
    assert node.report().wanted == (content(file("x"), "other"),)


def test_a_manager_that_stops_waits_for_no_copies() -> None:
    node = Node()
    node.receive(job("a", file("x")))
    node.order(file("x"), "")
    node.handle(Stop(60.0))
    assert sent(node.handle(CopyEnded(content(file("x"))))) == []
    for worker_id in list(node.workers):
        node.handle(WorkerDied(worker_id, 0, "exit code 1"))
    assert node.leaves


def test_ten_thousand_files_are_reported_in_several_messages() -> None:
    node = Node(budget_bytes=10**12)
    files = [NodeFile(f"{number:032}/f", f"{number:064}", 1) for number in range(10_000)]
    node.receive(job("a", *files))
    assert [len(each.message.wanted) for each in node.passed if isinstance(each.message, FilesReported)] == [5000, 5000]


def test_what_waits_is_reported_once_a_second_at_most() -> None:
    node = Node(slots=4)
    node.receive(job("a", file("x")))
    node.link(node.copy(file("x")))
    node.report()
    node.report()
    for name in "bcd":
        node.link(node.receive(job(name, file("x"))))
    assert len([each for each in node.passed if isinstance(each.message, FilesReported)]) <= 1
