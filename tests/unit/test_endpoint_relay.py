"""Blobs by way of the forwarder, from the agent's side."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from typing import Any

import httpx
import pytest

from farcall_common import wire
from farcall_common.task_options import TaskOptions
from farcall_common.wire import BlobLocation, BlobPiece, BlobPull, BlobPush, BlobTaken, Message
from farcall_endpoint.agent.core import events as ev
from farcall_endpoint.agent.core.relay import Relay, TransferFailed
from farcall_endpoint.agent.core.tasks import Stage, Task, TaskResult
from farcall_endpoint.agent.shell.blobs import Blobs, BlobsMode
from farcall_endpoint.agent.shell.transfers import Transfers
from farcall_endpoint.host.shared_memory import Frame

PIECE = 1000
DATA = bytes(range(256)) * 10
BLOB = BlobLocation(
    blob_key="o/k", size_bytes=len(DATA), sha256=hashlib.sha256(DATA).hexdigest(), url="http://s3.example/get"
)
AWAY = {"code": "UNAVAILABLE", "message": "away", "fault": "us", "retryable": True}
NO = {"code": "TASK_UNKNOWN", "message": "no such task", "fault": "peer", "retryable": False}


class Line:
    """What an agent says to its forwarder, and a forwarder that answers."""

    def __init__(self) -> None:
        self.said: list[tuple[Message, tuple[bytes, ...]]] = []
        self.outcomes: list[Frame | TransferFailed] = []
        self.now = 100.0
        self.relay = Relay(lambda message, frames: self.said.append((message, frames)))
        self.stored = b""

    def open(self, piece_bytes: int = PIECE) -> None:
        self.relay.opened(piece_bytes, now=self.now)

    def download(self, task_id: str = "t1") -> None:
        self.relay.download(task_id, 1, BLOB, self.outcomes.append, now=self.now)

    def upload(self, task_id: str = "t1", data: bytes = DATA) -> None:
        self.relay.upload(task_id, 1, BLOB, data, self.outcomes.append, now=self.now)

    def piece(self, data: bytes, *, task_id: str = "t1", offset: int = 0, error: dict[str, Any] | None = None) -> None:
        message = BlobPiece(task_id=task_id, attempt=1, offset_bytes=offset, piece=None if error else 0, error=error)
        self.relay.received(message, () if error else (data,), now=self.now)

    def taken(self, offset: int, *, blob_key: str = "", error: dict[str, Any] | None = None) -> None:
        message = BlobTaken(task_id="t1", attempt=1, offset_bytes=offset, blob_key=blob_key, error=error)
        self.relay.received(message, (), now=self.now)

    def answer(self) -> None:
        """Do what a forwarder does, until nothing is asked any more."""
        while self.said:
            message, frames = self.said.pop(0)
            match message:
                case BlobPull(task_id=task_id, offset_bytes=offset) if offset < len(DATA):
                    self.piece(DATA[offset : offset + PIECE], task_id=task_id, offset=offset)
                case BlobPush(piece=None):
                    self.stored = b""
                    self.taken(0)
                case BlobPush(offset_bytes=offset):
                    assert offset == len(self.stored)
                    self.stored += frames[0]
                    self.taken(len(self.stored), blob_key="o/k" if len(self.stored) == len(DATA) else "")
                case _:
                    pass

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.relay.tick(now=self.now)


@pytest.fixture
def line() -> Line:
    return Line()


def test_payload_is_downloaded_in_chunks(line: Line) -> None:
    line.download()
    assert line.said == []  # no session yet
    line.open()
    line.answer()
    assert line.outcomes == [DATA]
    assert line.relay.next_deadline() is None


def test_end_of_a_download_is_reported(line: Line) -> None:
    line.open()
    line.download()
    for offset in range(0, len(DATA), PIECE):
        line.piece(DATA[offset : offset + PIECE], offset=offset)
    assert line.said[-1][0] == BlobPull(task_id="t1", attempt=1, offset_bytes=len(DATA))


def test_result_is_uploaded_in_chunks(line: Line) -> None:
    line.open()
    line.upload()
    line.answer()
    assert (line.stored, line.outcomes) == (DATA, [DATA])


def test_download_resumes_and_upload_ends_with_its_session(line: Line) -> None:
    line.open()
    line.download("t2")
    line.upload()
    line.piece(DATA[:PIECE], task_id="t2")
    line.taken(0)
    line.relay.closed()
    line.said.clear()
    line.piece(DATA[PIECE : 2 * PIECE], task_id="t2", offset=PIECE)  # of the former session
    line.open(2 * PIECE)
    assert [message for message, _ in line.said] == [BlobPull(task_id="t2", attempt=1, offset_bytes=PIECE)]
    line.answer()
    assert line.outcomes == [DATA]


def test_concurrent_transfers_are_bounded(line: Line) -> None:
    line.open()
    for number in range(5):
        line.download(f"t{number}")
    assert len(line.said) == 2
    line.answer()
    assert line.outcomes == [DATA] * 5


def test_upload_requested_twice_runs_once(line: Line) -> None:
    line.open()
    line.upload()
    line.upload()
    line.answer()
    assert line.outcomes == [DATA]


def test_forwarder_without_relay_is_an_error(line: Line) -> None:
    line.open(0)
    line.download()
    line.upload()
    assert [(str(each), each.retryable) for each in line.outcomes if isinstance(each, TransferFailed)] == [
        ("the forwarder passes no blobs on; it is older than this endpoint", False)
    ] * 2
    assert line.said == []


def test_retriable_errors_are_retried_up_to_a_limit(line: Line) -> None:
    line.open()
    line.download()
    for pause_s in (0.5, 1.0, 2.0, 4.0):
        line.said.clear()
        line.piece(b"", error=AWAY)
        assert line.said == []
        line.after(pause_s)
        assert len(line.said) == 1
    line.piece(b"", error=AWAY)
    [failure] = line.outcomes
    assert isinstance(failure, TransferFailed)
    assert str(failure) == "away"


def test_permanent_errors_are_not_retried(line: Line) -> None:
    line.open()
    line.download()
    line.piece(b"", error=NO)
    line.upload()
    line.taken(0, error=NO)
    assert [str(each) for each in line.outcomes] == ["no such task"] * 2


@pytest.mark.parametrize("answer", [bytes(PIECE), b""], ids=["other bytes", "nothing"])
def test_wrong_hash_is_detected(line: Line, answer: bytes) -> None:
    line.open()
    line.download()
    for _ in range(5):
        offset = 0
        while line.said and not line.outcomes:
            message = line.said.pop(0)[0]
            assert isinstance(message, BlobPull)
            if message.offset_bytes < len(DATA):
                offset = message.offset_bytes
                line.piece(answer[: len(DATA) - offset], offset=offset)
        line.after(60.0)
    [failure] = line.outcomes
    assert isinstance(failure, TransferFailed)
    assert "SHA-256 differ" in str(failure)


def test_timeout_is_a_failure(line: Line) -> None:
    line.open()
    line.upload()
    line.after(121.0)
    [failure] = line.outcomes
    assert isinstance(failure, TransferFailed)
    assert failure.retryable


# -- which way ---------------------------------------------------------------------------------------------------------


class Events:
    """The events for the agent's core."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, object]] = []

    def add(self, event: ev.Event) -> None:
        match event:
            case ev.PayloadFetched(payload=payload):
                self.seen.append(("fetched", payload.bodies[0]))
            case ev.FetchFailed(reason=reason):
                self.seen.append(("fetch failed", reason))
            case ev.ResultUploaded(location=location):
                self.seen.append(("uploaded", location.blob_key))
            case ev.UploadFailed(retryable=retryable):
                self.seen.append(("upload failed", retryable))
            case _:
                raise TypeError(event)


class AtOnce:
    """Jobs that are done when they are given."""

    def submit(self, job: Any) -> None:
        job()()


class StillClock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def epoch(self) -> float:
        return self.now


class Site:
    """An agent's blobs at a site where the blob store answers, or cannot be reached."""

    def __init__(self, mode: BlobsMode = "auto") -> None:
        self.reachable = False
        self.asked = 0
        self.events, self.clock, self.line = Events(), StillClock(), Line()
        transfers = Transfers(transport=httpx.MockTransport(self._serve), pause=lambda _: None, connect_tries=2)
        parts: dict[str, Any] = {
            "emit": self.events.add,
            "background": AtOnce(),
            "transfers": transfers,
            "clock": self.clock,
        }
        parts |= {"send": lambda message, frames: self.line.said.append((message, frames)), "memory_bytes": 2**20}
        self.blobs = Blobs(mode, **parts)
        self.line.relay = self.blobs._relay
        self.blobs.opened(PIECE)
        spec = wire.TaskSpec(
            task_id="t1", attempt=1, function_id="f", function_hash="h", options=TaskOptions(), payload_blob=BLOB
        )
        self.task = Task(1, spec, 1, Stage.FETCHING, 0.0)
        self.task.result = TaskResult(wire.TaskState.SUCCESS, size_bytes=len(DATA), sha256=BLOB.sha256)

    def _serve(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        if not self.reachable:
            raise httpx.ConnectTimeout("the firewall says nothing")
        return httpx.Response(200, content=DATA if request.method == "GET" else b"")

    def fetch(self) -> None:
        self.task.stage = Stage.FETCHING
        self.blobs.fetch(self.task)
        self.line.answer()
        self.blobs.settle()

    def upload(self) -> None:
        grant = wire.BlobGrant(task_id="t1", attempt=1, blob_key="o/k", upload_url="http://s3.example/put")
        self.task.stage = Stage.FINISHED
        self.blobs.upload(self.task, grant, lambda: DATA)
        self.line.answer()
        self.blobs.settle()


def test_unreachable_store_falls_back_to_the_relay_and_logs_once(caplog: pytest.LogCaptureFixture) -> None:
    site = Site()
    with caplog.at_level(logging.WARNING):
        site.fetch()
        site.upload()
        site.fetch()
    assert site.events.seen == [("fetched", DATA), ("uploaded", "o/k"), ("fetched", DATA)]
    assert site.asked == 2  # both at the first time
    [record] = caplog.records
    assert "the firewall says nothing" in record.getMessage()


def test_store_is_tried_again_after_a_time(caplog: pytest.LogCaptureFixture) -> None:
    site = Site()
    site.fetch()
    site.clock.now += 601.0
    site.reachable = True
    site.fetch()
    site.upload()
    assert site.asked == 4
    site.reachable = False
    site.upload()
    assert [what for what, _ in site.events.seen] == ["fetched", "fetched", "uploaded", "uploaded"]
    assert len(caplog.records) == 2


@pytest.mark.parametrize("mode", ["direct", "relay"])
def test_chosen_mode_has_no_fallback(mode: BlobsMode) -> None:
    site = Site(mode)
    site.fetch()
    site.upload()
    if mode == "relay":
        assert (site.asked, [what for what, _ in site.events.seen]) == (0, ["fetched", "uploaded"])
    else:
        assert (site.line.stored, [what for what, _ in site.events.seen]) == (b"", ["fetch failed", "upload failed"])


def test_error_names_both_failed_paths() -> None:
    site = Site()
    site.blobs.closed()
    site.blobs.opened(0)
    site.fetch()
    [(what, reason)] = site.events.seen
    assert what == "fetch failed"
    assert "older than this endpoint" in str(reason)
    assert "the firewall says nothing" in str(reason)


def test_refusal_of_the_store_has_no_fallback() -> None:
    """It was reached: the forwarder would get the same answer."""
    site = Site()
    site.blobs._transfers = Transfers(
        transport=httpx.MockTransport(lambda _: httpx.Response(403)), pause=lambda _: None, connect_tries=2
    )
    site.fetch()
    assert site.events.seen == [("fetch failed", "GET http://s3.example/get answered with HTTP 403")]


# -- memory ------------------------------------------------------------------------------------------------------------


class Later:
    """Jobs that are done when the test says so."""

    def __init__(self) -> None:
        self.jobs: deque[Any] = deque()

    def submit(self, job: Any) -> None:
        self.jobs.append(job)

    def finish_one(self) -> None:
        self.jobs.popleft()()()


class Crowd:
    """Many large results and payloads, memory for two and a half of them."""

    def __init__(self, mode: BlobsMode = "direct", *, fails: bool = False) -> None:
        self.events, self.later, self.line = Events(), Later(), Line()
        self.status = 400 if fails else 200
        self.in_memory = self.most_in_memory = 0
        transfers = Transfers(transport=httpx.MockTransport(self._serve), pause=lambda _: None)
        parts: dict[str, Any] = {"emit": self.events.add, "background": self.later, "transfers": transfers}
        parts |= {"clock": StillClock(), "memory_bytes": len(DATA) * 5 // 2}
        self.blobs = Blobs(mode, send=lambda message, frames: self.line.said.append((message, frames)), **parts)
        self.line.relay = self.blobs._relay
        self.blobs.opened(PIECE)
        self.tasks = [self._task(number) for number in range(10)]

    def _task(self, number: int) -> Task:
        spec = wire.TaskSpec(
            task_id=f"t{number}",
            attempt=1,
            function_id="f",
            function_hash="h",
            options=TaskOptions(),
            payload_blob=BLOB,
        )
        task = Task(number, spec, 1, Stage.FETCHING, 0.0)
        task.result = TaskResult(wire.TaskState.SUCCESS, size_bytes=len(DATA), sha256=BLOB.sha256)
        return task

    def _serve(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(self.status, content=DATA if request.method == "GET" else b"")

    def upload(self) -> None:
        for task in self.tasks:
            task.stage = Stage.FINISHED
            grant = wire.BlobGrant(task_id=task.task_id, attempt=1, blob_key="o/k", upload_url="http://s3.example/put")
            self.blobs.upload(task, grant, self._read)

    def _read(self) -> bytes:
        self.in_memory += 1
        self.most_in_memory = max(self.most_in_memory, self.in_memory)
        return DATA


@pytest.mark.parametrize("fails", [False, True])
def test_results_are_read_only_when_there_is_memory_for_them(fails: bool) -> None:
    crowd = Crowd(fails=fails)
    crowd.upload()
    while crowd.later.jobs:
        crowd.in_memory -= 1  # the oldest is through, and its turn's end lets the next one in
        crowd.later.finish_one()
        crowd.blobs.settle()
    assert crowd.most_in_memory == 2
    assert [what for what, _ in crowd.events.seen] == ["upload failed" if fails else "uploaded"] * 10


@pytest.mark.parametrize("fails", [False, True])
def test_payloads_are_fetched_after_earlier_ones_are_spooled(fails: bool) -> None:
    crowd = Crowd(fails=fails)
    for task in crowd.tasks:
        crowd.blobs.fetch(task)
    for count in range(0 if fails else 2, 10, 2):
        assert len(crowd.later.jobs) == 2
        crowd.later.finish_one()
        crowd.later.finish_one()
        if not fails:
            assert len(crowd.later.jobs) == 0
            assert len(crowd.events.seen) == count
        crowd.blobs.settle()
    assert [what for what, _ in crowd.events.seen] == ["fetch failed" if fails else "fetched"] * (10 if fails else 8)


def test_unneeded_result_is_not_read() -> None:
    crowd = Crowd()
    crowd.upload()
    for task in crowd.tasks[2:]:
        task.result = None
    while crowd.later.jobs:
        crowd.later.finish_one()
        crowd.blobs.settle()
    assert crowd.in_memory == 2


def test_the_end_of_a_session_frees_the_memory_of_relayed_results() -> None:
    crowd = Crowd("relay")
    crowd.upload()
    assert crowd.in_memory == 2
    for sessions in range(1, 4):
        crowd.blobs.closed()
        crowd.blobs.opened(PIECE)
        crowd.upload()
        assert crowd.in_memory == 2 + 2 * sessions
