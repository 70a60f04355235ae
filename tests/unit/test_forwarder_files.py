"""Files of other endpoints at the forwarder: what agents may pull, what is asked of others, and what counts of it."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from farcall_common import wire
from farcall_common.errors import ProtocolError
from farcall_common.limits import MAX_URL_CHARACTERS
from farcall_common.store.model import BlobRef, Endpoint, FileAnswer, FileAsk, ObjectKind, Right, Share
from farcall_common.task_options import source_file
from farcall_common.wire import FileReason
from farcall_forwarder.adapters.steps import StoreSteps
from farcall_forwarder.core import actions as do
from farcall_forwarder.core.event_log import EventLog
from farcall_forwarder.core.events import Received, UploadGranted
from farcall_forwarder.core.files import (
    MAX_PULLS,
    MAX_READS,
    MAX_READS_OF_ONE,
    AnswerFile,
    AskFile,
    DeletePieces,
    FileAsked,
    FileMessagesHeard,
    PieceSigned,
    SignPiece,
    piece_key,
)
from farcall_forwarder.core.policy import Policy
from farcall_forwarder.core.relay import ReadPiece
from tests.support.stores import FakeDatabase, FakeQueue, fake_stores, single
from tests.unit.test_forwarder_core import AGENT, ENDPOINT_ID, OWNER_ID, World, hello, leased, sent, success, task_id

SOURCE = "00000000-0000-4000-8000-00000000000f"
SHA = "ab" * 32
ASK = FileAsk("r1", "elsewhere", ENDPOINT_ID, OWNER_ID, "/data/a", 0, 100)


def pull(request_id: str = "p1", **fields: Any) -> wire.FilePull:
    values: dict[str, Any] = {
        "request_id": request_id,
        "task_id": task_id(1),
        "endpoint_id": SOURCE,
        "path": "/data/a",
        "max_bytes": 100,
    }
    return wire.FilePull(**(values | fields))


def reading(**fields: Any) -> World:
    """A world whose agent has a task that reads files of SOURCE."""
    world = World(Policy(**fields))
    world.serve(credit=5)
    files = tuple(source_file(each, "/data/a") for each in (SOURCE, ENDPOINT_ID))
    world.dispatch(leased(1, sources=(SOURCE,), source_files=files), leased(2))
    return world


def asked(world: World, message: wire.FilePull | None = None) -> AskFile:
    [step] = world.hears(message or pull())
    assert isinstance(step, AskFile)
    assert world.on(FileAsked(step.ask.request_id)) == []
    return step


def refusal(actions: Sequence[do.Action]) -> str:
    [piece] = sent(actions)
    assert isinstance(piece, wire.FilePiece)
    return piece.reason


def answer_to(step: AskFile, **fields: Any) -> FileAnswer:
    values: dict[str, Any] = {"size_bytes": 250, "version": "1-2-3", "piece_bytes": 100, "sha256": SHA}
    return FileAnswer(step.ask.request_id, SOURCE, **(values | fields))


# -- the agent that pulls ----------------------------------------------------------------------------------------------


def test_a_piece_is_asked_for_in_the_name_of_the_submitter_and_deleted_when_it_is_taken() -> None:
    world = reading()
    step = asked(world)
    assert step.ask == FileAsk(step.ask.request_id, "forwarder", SOURCE, OWNER_ID, "/data/a", 0, 100, OWNER_ID)
    [sign] = world.on(FileMessagesHeard([answer_to(step)]))
    assert isinstance(sign, SignPiece)
    assert sign.blob_key == f"piece/{step.ask.request_id}/{SHA}"
    [piece] = sent(world.on(PieceSigned(sign.request_id, "https://blobs/get", sign.piece_bytes)))
    assert world.core._meter.read(endpoints=0, connections=0)["file_bytes"] == 100
    assert piece == wire.FilePiece(
        request_id="p1", size_bytes=250, version="1-2-3", piece_bytes=100, sha256=SHA, url="https://blobs/get"
    )
    assert world.hears(wire.FilesTaken(request_ids=("p1", "p1", "unknown"))) == [DeletePieces([sign.blob_key])]
    assert len(world.core._context.file_pulls) == 0


def test_size_and_version_alone_need_no_piece() -> None:
    world = reading()
    step = asked(world, pull(max_bytes=0))
    [piece] = sent(world.on(FileMessagesHeard([answer_to(step, piece_bytes=0, sha256="")])))
    assert piece == wire.FilePiece(request_id="p1", size_bytes=250, version="1-2-3")
    assert len(world.core._context.file_pulls) == 0


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (pull(task_id=task_id(9)), FileReason.NOT_LEASED),
        (pull(task_id=task_id(2)), FileReason.NOT_A_SOURCE),
        (pull(endpoint_id=ENDPOINT_ID), FileReason.NOT_A_SOURCE),
        (pull(path="/data/b"), FileReason.NOT_A_SOURCE),
        (pull(path="/data//a"), FileReason.NOT_A_SOURCE),
        (pull(offset_bytes=1000), FileReason.TOO_LARGE),
    ],
)
def test_what_the_task_does_not_name_is_not_asked_for(message: wire.FilePull, reason: FileReason) -> None:
    world = reading(max_relayed_file_bytes=1000)
    assert refusal(world.hears(message)) == reason


def test_a_task_that_has_ended_reads_no_more() -> None:
    world = reading()
    world.hears(success(1), b"result")
    assert refusal(world.hears(pull())) == FileReason.NOT_LEASED


def test_a_file_over_the_limit_is_not_passed_on() -> None:
    world = reading(max_relayed_file_bytes=1000)
    step = asked(world)
    actions = world.on(FileMessagesHeard([answer_to(step, size_bytes=1001)]))
    assert refusal(actions) == FileReason.TOO_LARGE
    assert DeletePieces([piece_key(step.ask.request_id, SHA)]) in actions


def test_answers_of_others_and_second_answers_do_not_count() -> None:
    world = reading()
    step = asked(world)
    forged = msgspec.structs.replace(answer_to(step), endpoint_id=ENDPOINT_ID)
    assert sent(world.on(FileMessagesHeard([forged]))) == []
    assert len(world.on(FileMessagesHeard([answer_to(step)]))) == 1
    assert [type(each) for each in world.on(FileMessagesHeard([answer_to(step)]))] == [DeletePieces]


def test_the_reason_of_the_source_is_passed_on() -> None:
    world = reading()
    for request_id, heard in (("p1", None), ("p2", FileReason.NO_RIGHT)):
        step = world.hears(pull(request_id))[0]
        assert isinstance(step, AskFile)
        if heard:
            assert refusal(world.on(FileAsked(step.ask.request_id, heard))) == heard
        else:
            answer = FileAnswer(step.ask.request_id, SOURCE, reason=FileReason.NOT_FOUND)
            assert refusal(world.on(FileMessagesHeard([answer]))) == FileReason.NOT_FOUND


def test_pulls_without_an_answer_and_pieces_that_are_not_taken_end() -> None:
    world = reading(file_pull_s=5.0, file_piece_s=9.0)
    asked(world, pull("silent"))
    step = asked(world, pull("left"))
    [sign] = world.on(FileMessagesHeard([answer_to(step)]))
    assert isinstance(sign, SignPiece)
    [piece] = [each for each in sent(world.passes(6)) if isinstance(each, wire.FilePiece)]
    assert (piece.request_id, piece.reason) == ("silent", FileReason.NO_ANSWER)
    assert DeletePieces([sign.blob_key]) in world.passes(6)
    assert len(world.core._context.file_pulls) == 0


def test_the_end_of_a_session_deletes_its_pieces() -> None:
    world = reading()
    step = asked(world)
    [sign] = world.on(FileMessagesHeard([answer_to(step)]))
    assert isinstance(sign, SignPiece)
    asked(world, pull("open"))
    assert DeletePieces([sign.blob_key]) in world.hears(wire.Goodbye())
    assert len(world.core._context.file_pulls) == 0
    assert world.on(PieceSigned(sign.request_id, "https://blobs/get")) == []


def test_pulls_of_one_agent_are_bounded() -> None:
    world = reading()
    for number in range(MAX_PULLS):
        asked(world, pull(f"p{number}"))
    assert refusal(world.hears(pull("more"))) == FileReason.BUSY
    assert world.hears(pull("p0")) == []


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_pull_counts_until_the_forwarder_was_asked_even_if_it_is_over(*, is_taken: bool) -> None:
    world = reading(file_pull_s=5.0)
    steps = [step for number in range(MAX_PULLS) for step in world.hears(pull(f"p{number}"))]
    assert len(steps) == MAX_PULLS
    if is_taken:
        assert world.hears(wire.FilesTaken(request_ids=tuple(f"p{number}" for number in range(MAX_PULLS)))) == []
    pieces = [each for _ in range(2) for each in sent(world.passes(6)) if isinstance(each, wire.FilePiece)]
    assert [each.reason for each in pieces] == ([] if is_taken else [FileReason.NO_ANSWER] * MAX_PULLS)
    assert refusal(world.hears(pull("more"))) == FileReason.BUSY
    first = steps[0]
    assert isinstance(first, AskFile)
    assert world.on(FileAsked(first.ask.request_id, FileReason.OFFLINE)) == []  # the agent waits for nothing
    [step] = world.hears(pull("more"))
    assert isinstance(step, AskFile)
    world.hears(wire.Goodbye())
    assert len(world.core._context.file_pulls) == 0


def test_the_piece_of_a_pull_that_is_over_is_deleted() -> None:
    world = reading()
    [step] = world.hears(pull())
    assert isinstance(step, AskFile)
    assert world.hears(wire.FilesTaken(request_ids=("p1",))) == []
    assert world.on(FileMessagesHeard([answer_to(step)])) == [DeletePieces([piece_key(step.ask.request_id, SHA)])]
    assert world.on(FileAsked(step.ask.request_id)) == []


def test_a_piece_that_cannot_be_signed_is_deleted_and_the_agent_hears_why() -> None:
    world = reading()
    step = asked(world)
    [sign] = world.on(FileMessagesHeard([answer_to(step)]))
    assert isinstance(sign, SignPiece)
    assert (sign.payer_id, sign.piece_bytes) == (OWNER_ID, 100)
    actions = world.on(PieceSigned(sign.request_id, reason=FileReason.NO_ANSWER))
    assert refusal(actions) == FileReason.NO_ANSWER
    assert DeletePieces([sign.blob_key]) in actions


def test_a_piece_is_relayed_to_the_agent_that_was_given_it() -> None:
    world = reading()
    step = asked(world)
    world.on(FileMessagesHeard([answer_to(step)]))
    [read] = world.hears(wire.BlobPull(task_id="p1", attempt=0, offset_bytes=0))
    assert isinstance(read, ReadPiece)
    assert (read.blob_key, read.length_bytes) == (piece_key(step.ask.request_id, SHA), 100)
    [refused] = sent(world.hears(wire.BlobPull(task_id=step.ask.request_id, attempt=0, offset_bytes=0)))
    assert isinstance(refused, wire.BlobPiece)
    assert refused.error is not None


# -- the agent that reads ----------------------------------------------------------------------------------------------


def wanted(ask: FileAsk = ASK, **fields: Any) -> World:
    """A world whose agent was asked for a piece."""
    world = World()
    world.serve(**fields)
    [message] = sent(world.on(FileMessagesHeard([ask])))
    assert message == wire.FileWanted(request_id="r1", submitter=OWNER_ID, path="/data/a", max_bytes=100)
    return world


def file_read(**fields: Any) -> wire.FileRead:
    values: dict[str, Any] = {"size_bytes": 250, "version": "1-2-3", "piece_bytes": 100, "sha256": SHA}
    return wire.FileRead(request_id="r1", **(values | fields))


@pytest.mark.parametrize(("payer", "sent_payer"), [("", ""), (OWNER_ID, ""), ("creator", "creator")])
def test_a_request_names_the_payer_of_a_service_account(payer: str, sent_payer: str) -> None:
    world = World()
    world.serve()
    [message] = sent(world.on(FileMessagesHeard([msgspec.structs.replace(ASK, payer=payer)])))
    assert isinstance(message, wire.FileWanted)
    assert message.payer == sent_payer


def test_an_answer_goes_to_the_forwarder_that_asked_once() -> None:
    world = wanted()
    answer = FileAnswer("r1", ENDPOINT_ID, 250, "1-2-3", 100, SHA)
    assert world.hears(file_read()) == [AnswerFile("elsewhere", answer)]
    assert world.hears(file_read()) == []


@pytest.mark.parametrize(
    "forged",
    [
        wire.FileRead(request_id="r2", size_bytes=1, version="1"),
        file_read(piece_bytes=101),
        file_read(sha256="AB" * 32),
        file_read(sha256="../" * 3),
        file_read(piece_bytes=0),
        file_read(version=""),
        file_read(version="x" * 101),
        file_read(version="new\nline"),
        file_read(size_bytes=2**49),
        file_read(reason="NO_RIGHT"),
        file_read(reason="x" * 1000),
    ],
)
def test_answers_that_cannot_be_are_not_passed_on(forged: wire.FileRead) -> None:
    world = wanted()
    assert world.hears(forged) == []
    assert len(world.hears(file_read())) == 1


def test_a_piece_is_uploaded_under_its_request_and_no_larger_than_was_asked_for() -> None:
    world = wanted()
    request = wire.BlobRequest(task_id="r1", attempt=0, size_bytes=100, sha256=SHA)
    [grant] = world.hears(request)
    assert isinstance(grant, do.GrantUpload)
    assert grant.owner_id == "piece/r1"
    [sent_grant] = sent(
        world.on(UploadGranted(ENDPOINT_ID, 1, "r1", 0, BlobRef(piece_key("r1", SHA), 100, SHA), "https://put", {}))
    )
    assert isinstance(sent_grant, wire.BlobGrant)
    assert sent_grant.upload_url == "https://put"
    for other in (msgspec.structs.replace(request, size_bytes=101), msgspec.structs.replace(request, task_id="r2")):
        [refused] = sent(world.hears(other))
        assert isinstance(refused, wire.BlobGrant)
        assert refused.error is not None
    world.hears(file_read())
    [refused] = sent(world.hears(request))
    assert isinstance(refused, wire.BlobGrant)
    assert refused.error is not None


def test_one_request_has_one_piece() -> None:
    world, other = wanted(), "cd" * 32
    request = wire.BlobRequest(task_id="r1", attempt=0, size_bytes=100, sha256=SHA)
    push = wire.BlobPush(task_id="r1", attempt=0, size_bytes=100, sha256=SHA)
    assert isinstance(world.hears(request)[0], do.GrantUpload)
    for second in (request, push):
        [refused] = sent(world.hears(msgspec.structs.replace(second, sha256=other)))
        assert isinstance(refused, wire.BlobGrant | wire.BlobTaken)
        assert refused.error is not None
    assert isinstance(world.hears(request)[0], do.GrantUpload)  # an upload that is tried again
    [taken] = sent(world.hears(push))
    assert isinstance(taken, wire.BlobTaken)
    assert taken.error is None
    assert world.hears(file_read(sha256=other)) == []
    assert [type(each) for each in world.hears(file_read())] == [AnswerFile]


def test_an_agent_that_is_offline_is_answered_for() -> None:
    [answer] = World().on(FileMessagesHeard([ASK]))
    assert isinstance(answer, AnswerFile)
    assert answer.answer.reason == FileReason.OFFLINE


def test_a_lost_session_answers_what_is_open() -> None:
    for message, routing_id in ((wire.Goodbye(), b"agent"), (hello(), b"again")):
        actions = wanted().hears(message, routing_id=routing_id)
        answers = [each for each in actions if isinstance(each, AnswerFile)]
        assert [each.answer.reason for each in answers] == [FileReason.OFFLINE]


def test_requests_of_one_submitter_at_one_agent_are_bounded() -> None:
    world = wanted()
    asks = [msgspec.structs.replace(ASK, request_id=f"more-{number}") for number in range(MAX_READS_OF_ONE)]
    actions = world.on(FileMessagesHeard(asks))
    assert len(sent(actions)) == MAX_READS_OF_ONE - 1
    [busy] = [each for each in actions if isinstance(each, AnswerFile)]
    assert busy.answer.reason == FileReason.BUSY
    [of_other] = sent(world.on(FileMessagesHeard([msgspec.structs.replace(ASK, request_id="o", submitter="other")])))
    assert isinstance(of_other, wire.FileWanted)


def test_a_submitter_gets_one_request_at_an_agent_however_many_others_have() -> None:
    world, submitters = wanted(), [f"other-{number}" for number in range(MAX_READS // MAX_READS_OF_ONE)]
    asks = [
        msgspec.structs.replace(ASK, request_id=f"{each}.{number}", submitter=each)
        for each in submitters
        for number in range(MAX_READS_OF_ONE)
    ]
    actions = world.on(FileMessagesHeard(asks))
    assert len(sent(actions)) == MAX_READS - 1  # with that of wanted()
    assert len(submitters) > 2
    late = [msgspec.structs.replace(ASK, request_id=f"late-{number}", submitter="late") for number in range(2)]
    first, second = world.on(FileMessagesHeard(late))
    [message] = sent([first])
    assert isinstance(message, wire.FileWanted)
    assert message.submitter == "late"
    assert isinstance(second, AnswerFile)
    assert second.answer.reason == FileReason.BUSY


def test_the_event_log_has_no_paths_and_no_urls() -> None:
    world, log = reading(), EventLog()
    log.add([Received(b"agent", AGENT, wire.Envelope(pull(path="/secret")))], world.now)
    log.add([PieceSigned("r1", "https://secret"), FileMessagesHeard([ASK])], world.now)
    text = str(list(log.records()))
    assert "secret" not in text
    assert "/data/a" not in text


def test_the_event_log_counts_the_paths_that_it_keeps() -> None:
    log, ask = EventLog(max_bytes=100_000), msgspec.structs.replace(ASK, path="/" + "x" * 40_000)
    for _ in range(5):
        log.add([FileMessagesHeard([ask])], World().now)
    assert (len(log), log.dropped_turns) == (2, 3)


@pytest.mark.parametrize(
    ("message", "field", "most"),
    [
        (pull(), "request_id", 64),
        (pull(), "task_id", 64),
        (pull(), "endpoint_id", 64),
        (pull(), "path", MAX_URL_CHARACTERS),
        (file_read(), "request_id", 64),
        (file_read(), "version", 100),
        (wire.FileWanted(request_id="r1", submitter="s", path="/"), "request_id", 64),
        (wire.FileWanted(request_id="r1", submitter="s", path="/"), "path", MAX_URL_CHARACTERS),
        (wire.FilePiece(request_id="p1"), "request_id", 64),
        (wire.FilePiece(request_id="p1"), "version", 100),
    ],
)
def test_texts_of_messages_about_files_are_bounded(message: wire.Message, field: str, most: int) -> None:
    longest = msgspec.structs.replace(message, **{field: "x" * most})
    assert wire.decode(wire.encode(wire.Envelope(longest))).message == longest
    with pytest.raises(ProtocolError):
        wire.decode(wire.encode(wire.Envelope(msgspec.structs.replace(message, **{field: "x" * (most + 1)}))))


@pytest.mark.parametrize("request_ids", [("x" * 65,), tuple(map(str, range(1001)))])
def test_ids_of_pieces_that_are_taken_are_bounded(request_ids: tuple[str, ...]) -> None:
    with pytest.raises(ProtocolError):
        wire.decode(wire.encode(wire.Envelope(wire.FilesTaken(request_ids=request_ids))))


# -- steps -------------------------------------------------------------------------------------------------------------


class Lab:
    """Steps of a forwarder, at fakes of the stores; the endpoint belongs to someone else."""

    def __init__(self, *, public: bool = False) -> None:
        self.queue, self.records = FakeQueue(), FakeDatabase().records
        self.records.endpoints.put_endpoint(Endpoint(ENDPOINT_ID, "someone", "a", public=public))
        single.claim(self.queue, ENDPOINT_ID, "elsewhere", ttl_s=45)
        self.listener = self.queue.listen("elsewhere")
        self.stores = dataclasses.replace(fake_stores(queue=self.queue), **vars(self.records))
        self.steps = StoreSteps(self.stores, forwarder_id="here", clock=lambda: 1_800_000_000.0)

    def ask(self, **fields: Any) -> str:
        ask = msgspec.structs.replace(ASK, forwarder_id="here", **fields)
        [event] = self.steps.perform([AskFile(ask, 100 * 1024)])
        assert isinstance(event, FileAsked)
        assert list(self.listener.take_file_messages()) == ([] if event.reason else [ask])
        return event.reason

    def sign_step(self, *, piece_bytes: int) -> SignPiece:
        return SignPiece("r1", piece_key("r1", SHA), 60, OWNER_ID, piece_bytes, 100 * 1024)

    def sign(self, *, piece_bytes: int) -> PieceSigned:
        [event] = self.steps.perform([self.sign_step(piece_bytes=piece_bytes)])
        assert isinstance(event, PieceSigned)
        return event

    def taken(self) -> int:
        """Bytes that the submitter has used up."""
        left = self.queue.take_tokens(f"stored:{OWNER_ID}", 100, rate_per_s=1e-9, burst=100)
        self.queue.take_tokens(f"stored:{OWNER_ID}", -left.tokens, rate_per_s=1e-9, burst=100, in_debt=True)
        return (100 - left.tokens) * 1024


class Broken:
    """A store whose driver raises errors that are not Unavailable."""

    def __getattr__(self, name: str) -> Any:
        def fail(*args: object, **fields: object) -> None:
            raise RuntimeError("credentials cannot be had")

        return fail


def test_the_submitter_needs_the_right_to_use_the_endpoint_for_each_piece() -> None:
    lab = Lab()
    assert lab.ask() == FileReason.NO_RIGHT
    assert lab.ask(submitter="someone") == ""
    assert lab.ask(endpoint_id=SOURCE) == FileReason.NO_RIGHT
    lab.records.shares.put_person(OWNER_ID, frozenset({f"identity {OWNER_ID}"}))
    at = dt.datetime.now(dt.UTC)
    share = Share("s1", ObjectKind.ENDPOINT, ENDPOINT_ID, f"identity {OWNER_ID}", Right.USE, "someone", at)
    lab.records.shares.put_share(share)
    assert lab.ask() == ""
    lab.records.shares.delete_share(share.object_id, share.share_id)
    assert lab.ask() == FileReason.NO_RIGHT
    assert Lab(public=True).ask() == ""


def test_pieces_count_as_stored_bytes_when_they_are_there() -> None:
    lab = Lab(public=True)
    for _ in range(3):  # the source is busy, or its answer is small
        assert lab.ask(max_bytes=200 * 1024) == ""
    lab.sign(piece_bytes=10)
    assert lab.taken() == 1024
    lab.sign(piece_bytes=200 * 1024)
    assert lab.ask(max_bytes=1) == FileReason.QUOTA
    assert lab.ask(max_bytes=0) == ""
    assert lab.ask(max_bytes=1, submitter="other") == ""


def test_an_offline_source_costs_no_bytes() -> None:
    lab = Lab(public=True)
    lab.listener.close()
    assert lab.ask(max_bytes=200 * 1024) == FileReason.OFFLINE
    assert lab.taken() == 0


def test_errors_of_the_stores_end_the_pull_and_not_the_forwarder(caplog: pytest.LogCaptureFixture) -> None:
    lab = Lab(public=True)
    broken = StoreSteps(
        dataclasses.replace(lab.stores, blobs=Broken(), queue=Broken()), forwarder_id="here", clock=lambda: 0.0
    )
    steps: list[do.StoreStep] = [AskFile(ASK, 0), lab.sign_step(piece_bytes=1), AnswerFile("f", FileAnswer("r", "e"))]
    events = [event for step in steps for event in broken.perform([step])]
    assert events == [FileAsked("r1", FileReason.NO_ANSWER), PieceSigned("r1", reason=FileReason.NO_ANSWER)]
    assert [record.exc_info is not None for record in caplog.records] == [True] * 3


def test_an_endpoint_without_a_forwarder_is_offline_and_a_queue_that_is_away_gives_no_answer() -> None:
    lab = Lab(public=True)
    lab.listener.close()
    assert lab.ask() == FileReason.OFFLINE
    lab.queue.reachable = False
    assert lab.ask(submitter="other") == FileReason.NO_ANSWER
    assert lab.steps.perform([AnswerFile("elsewhere", FileAnswer("r1", ENDPOINT_ID))]) == []


def test_pieces_are_signed_and_deleted() -> None:
    lab = Lab()
    key = piece_key("r1", SHA)
    lab.stores.blobs.write(key, b"piece")
    assert key in lab.sign(piece_bytes=5).url
    assert lab.steps.perform([DeletePieces([key, "piece/unknown"])]) == []
    assert lab.stores.blobs.size_bytes(key) is None
