"""Requests of a transfer process for files of other endpoints, at the agent: when they are sent, and how they end."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

from farcall_common.wire import BlobLocation, FilePiece, FilePull, FileReason, FilesTaken, Message
from farcall_endpoint.agent.shell.file_pulls import FilePulls
from farcall_endpoint.files import orders

SOURCE = "00000000-0000-4000-8000-00000000000f"
SHA = "ab" * 32


class Driver:
    """Pulls of an agent; the test plays forwarder, blob store and transfer process."""

    def __init__(self, *, is_relayed: bool = False, relays: bool = True) -> None:
        self.now = 0.0
        self.sent: list[Message] = []
        self.answers: list[orders.Piece] = []
        self.tasks: dict[str, Any] = {
            each: types.SimpleNamespace(task_id=each, answer_key=b"", share_of="") for each in ("t1", "t2")
        }
        self.relayed: list[tuple[str, Callable[[bytes, str], None]]] = []
        self.is_relayed = is_relayed
        self.relays = relays
        self.problems: list[str] = []
        blobs: Any = self
        self.pulls = FilePulls(
            find=self.tasks.get, send=self.sent.append, answer=self.answers.append, blobs=blobs, clock=self
        )

    # -- the clock, and the blobs of the agent

    def monotonic(self) -> float:
        return self.now

    def store_unreachable(self, reason: str) -> bool:
        self.problems.append(reason)
        return self.relays

    def pull_piece(self, request_id: str, location: BlobLocation, done: Callable[[bytes, str], None]) -> None:
        assert (location.size_bytes, location.sha256) == (10, SHA)
        self.relayed.append((request_id, done))

    # -- what tests do

    def want(self, number: int = 1, *task_ids: str, submitter: str = "", payer: str = "", max_bytes: int = 10) -> None:
        for each in task_ids or ("t1",):
            if each in self.tasks:
                self.tasks[each].share_of = payer or submitter
        wanted = orders.PieceWanted(number, submitter, task_ids or ("t1",), SOURCE, "/data", 20, max_bytes)
        other = orders.Alive()
        assert self.pulls.reported([other, wanted]) == [other]

    def open(self, most_bytes: int = 8) -> None:
        self.pulls.opened(most_bytes)

    def messages(self) -> list[Message]:
        found, self.sent[:] = list(self.sent), []
        return found

    def pull(self) -> FilePull:
        [message] = self.messages()
        assert isinstance(message, FilePull)
        return message

    def answer(self) -> orders.Piece:
        [piece] = self.answers
        self.answers.clear()
        return piece

    def give(self, pull: FilePull, **fields: Any) -> None:
        values: dict[str, Any] = {
            "size_bytes": 50,
            "version": "v",
            "piece_bytes": 10,
            "sha256": SHA,
            "url": "https://get",
        }
        self.pulls.received(FilePiece(request_id=pull.request_id, **(values | fields)))

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.pulls.tick()


def test_a_piece_is_requested_for_a_task_that_is_held_and_given_back() -> None:
    driver = Driver()
    driver.want(1, "gone", "t2")
    assert driver.messages() == []
    driver.open()
    pull = driver.pull()
    assert (pull.task_id, pull.endpoint_id, pull.path, pull.offset_bytes, pull.max_bytes) == (
        "t2",
        SOURCE,
        "/data",
        20,
        8,
    )
    driver.give(pull)
    assert driver.answer() == orders.Piece(1, 50, "v", 10, SHA, "https://get", most_bytes=8)
    driver.give(pull)
    assert driver.answers == []
    driver.pulls.reported([orders.PieceTaken(1)])
    assert driver.messages() == [FilesTaken(request_ids=(pull.request_id,))]
    assert driver.pulls.next_deadline() is None


@pytest.mark.parametrize("fields", [{"reason": "NOT_FOUND", "piece_bytes": 0}, {"piece_bytes": 0, "url": ""}])
def test_what_has_no_piece_is_over_with_its_answer(fields: dict[str, Any]) -> None:
    driver = Driver()
    driver.open()
    driver.want()
    driver.give(driver.pull(), **fields)
    assert driver.answer().reason == fields.get("reason", "")
    driver.pulls.reported([orders.PieceTaken(1)])
    assert driver.messages() == []


def test_what_cannot_be_requested_is_answered() -> None:
    driver = Driver()
    driver.tasks["t2"].answer_key = b"key"
    driver.open()
    driver.want(1, "gone")
    assert driver.answer().reason == FileReason.NOT_LEASED
    driver.want(2, "t2")
    assert driver.answer().reason == orders.SEALED
    driver.pulls.closed()
    driver.open(most_bytes=0)
    driver.want(3)
    assert driver.answer().reason == orders.FORWARDER_TOO_OLD
    assert driver.messages() == []


def test_pulls_wait_for_a_session_and_are_sent_again_in_the_next_one() -> None:
    driver = Driver()
    driver.open()
    driver.want()
    first = driver.pull()
    driver.pulls.closed()
    driver.give(first)
    assert driver.answers == []
    driver.open()
    second = driver.pull()
    assert second.request_id != first.request_id
    driver.pulls.closed()
    driver.after(59.0)
    assert driver.answers == []
    driver.after(1.0)
    assert driver.answer().reason == orders.NOT_CONNECTED
    driver.open()
    assert driver.messages() == []


def test_a_forwarder_that_does_not_answer_is_not_waited_for_forever() -> None:
    driver = Driver()
    driver.open()
    driver.want()
    assert driver.pulls.next_deadline() == 180.0
    driver.after(180.0)
    assert driver.answer().reason == FileReason.NO_ANSWER


def test_a_busy_source_is_asked_again_for_a_while() -> None:
    driver = Driver()
    driver.open()
    driver.want()
    first = driver.pull()
    driver.give(first, reason="BUSY")
    assert (driver.messages(), driver.answers) == ([], [])
    driver.after(1.0)
    assert driver.pull().request_id != first.request_id
    driver.pulls.reported([orders.PieceTaken(1)])
    driver.messages()
    driver.want(2)
    pull = driver.pull()
    driver.now += 60.0
    driver.give(pull, reason="BUSY")
    assert driver.answer().reason == FileReason.BUSY


def test_submitters_take_turns_and_few_pulls_are_open() -> None:
    driver = Driver()
    driver.open()
    for number in range(40):
        driver.want(number, submitter="ada")
    open_pulls = driver.messages()
    assert len(open_pulls) == 16
    driver.want(40, "t2", submitter="grace")
    first, second, *_ = [each for each in open_pulls if isinstance(each, FilePull)]
    driver.give(first)
    assert driver.pull().task_id == "t2"
    driver.give(second)
    assert driver.pull().task_id == "t1"


def test_service_accounts_of_one_payer_take_turns_as_one() -> None:
    driver = Driver()
    driver.open()
    for number in range(16):
        driver.want(number, "t1", submitter=f"robot-{number}", payer="ada")
    pulls = [each for each in driver.messages() if isinstance(each, FilePull)]
    driver.want(16, "t1", submitter="robot-16", payer="ada")
    driver.want(17, "t2", submitter="grace")
    driver.give(pulls[0])
    assert driver.pull().task_id == "t2", "all accounts together have had 16"


def test_what_is_not_needed_any_more_makes_room() -> None:
    driver = Driver()
    driver.open()
    for number in range(20):
        driver.want(number)
    assert len(driver.messages()) == 16
    driver.pulls.reported([orders.PieceTaken(0), orders.PieceTaken(18)])
    taken, more = sorted(driver.messages(), key=lambda each: type(each).__name__, reverse=True)
    assert isinstance(taken, FilesTaken)
    assert isinstance(more, FilePull)
    driver.pulls.process_lost()
    [lost] = driver.messages()
    assert isinstance(lost, FilesTaken)
    assert len(lost.request_ids) == 16
    assert driver.pulls.next_deadline() is None


def test_the_bytes_come_by_the_forwarder_where_the_blob_store_is_blocked() -> None:
    driver = Driver(is_relayed=True)
    driver.open()
    driver.want()
    pull = driver.pull()
    driver.give(pull)
    [(request_id, done)] = driver.relayed
    assert request_id == pull.request_id
    done(b"0123456789", "")
    assert driver.answer() == orders.Piece(1, 50, "v", 10, SHA, data=b"0123456789", most_bytes=8)


@pytest.mark.parametrize("relays", [True, False])
def test_a_process_that_does_not_reach_the_blob_store_gets_the_bytes(*, relays: bool) -> None:
    driver = Driver(relays=relays)
    driver.open()
    driver.want()
    driver.give(driver.pull())
    driver.answer()
    driver.pulls.reported([orders.PieceUnreachable(1, "refused"), orders.PieceUnreachable(9, "unknown")])
    assert driver.problems == ["refused"]
    if relays:
        driver.relayed[0][1](b"", "away")
    assert driver.answer().reason == orders.BLOBS_UNREACHABLE
    assert len(driver.relayed) == relays
