"""Blob relay: permissions, order and memory of transfers."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import pytest

from farcall_common import wire
from farcall_common.errors import ErrorRecord, Fault
from farcall_common.store.model import BlobRef, PeerKey, PeerKind
from farcall_forwarder.adapters.steps import read_piece, store_blob
from farcall_forwarder.core import actions as do
from farcall_forwarder.core.leases import Lease, Stage
from farcall_forwarder.core.policy import Instant, Policy
from farcall_forwarder.core.relay import BlobStored, PieceRead, ReadPiece, Relay, StoreBlob
from farcall_forwarder.core.sessions import PeerSession
from tests.support.stores import FakeBlobs
from tests.unit.test_forwarder_core import CLIENT, EPOCH, OWNER_ID, World, hello, leased, sent, task_id

PIECE = 1000
DATA = bytes(range(256)) * 10  # three pieces
SHA256 = hashlib.sha256(DATA).hexdigest()
KEY = f"{OWNER_ID}/{SHA256}"
REF = BlobRef(KEY, len(DATA), SHA256)
POLICY = Policy(relay_bytes=10_000, relay_piece_bytes=PIECE, relay_timeout_s=30.0, max_result_bytes=8_000)
UNAVAILABLE = ErrorRecord(code="UNAVAILABLE", message="away", fault=Fault.US, retryable=True)


def open_session(number: int = 1) -> PeerSession:
    peer = PeerKey(f"key {number}", PeerKind.AGENT, f"endpoint-{number}")
    now = Instant(0.0, EPOCH)
    session = PeerSession.begin(b"%d" % number, peer, session_id=f"s{number}", heartbeat_s=30.0, now=now)
    session.wire.received(hello(), now=0.0)
    session.wire.sent(wire.Welcome(session_id="s", forwarder_id="f", protocol_version=1, heartbeat_s=30.0), now=0.0)
    return session


def lease(number: int = 1, *, stage: Stage = Stage.ACCEPTED, ref: BlobRef | None = REF) -> Lease:
    return Lease(task_id(number), 1, OWNER_ID, "group", True, stage, EPOCH + 30, {}, payload_ref=ref)


class Bench:
    """A relay, its store, and a clock that tests move. Steps wait until they are performed."""

    def __init__(self, policy: Policy = POLICY) -> None:
        self.relay = Relay(policy)
        self.blobs = FakeBlobs()
        self.now = Instant(100.0, EPOCH)
        self.steps: list[ReadPiece | StoreBlob] = []
        self.heard: list[tuple[bytes, wire.Message, tuple[bytes, ...]]] = []

    def act(self, actions: Sequence[do.Action]) -> list[wire.Message]:
        """The messages to agents; store steps are collected."""
        messages = []
        for action in actions:
            match action:
                case do.Send(routing_id=routing_id, envelope=envelope):
                    wire.decode(wire.encode(envelope))
                    self.heard.append((routing_id, envelope.message, envelope.frames))
                    messages.append(envelope.message)
                case ReadPiece() | StoreBlob():
                    self.steps.append(action)
                case _:
                    raise AssertionError(action)
        return messages

    def perform(self) -> list[wire.Message]:
        """Perform the oldest store step."""
        step = self.steps.pop(0)
        if isinstance(step, ReadPiece):
            return self.act(self.relay.on_read(read_piece(self.blobs, step), self.now))
        return self.act(self.relay.on_stored(store_blob(self.blobs, step), self.now))

    def pull(self, session: PeerSession, offset: int, **fields: Any) -> list[wire.Message]:
        held = fields.pop("lease", lease())
        message = wire.BlobPull(task_id=fields.get("task_id", task_id(1)), attempt=1, offset_bytes=offset)
        return self.act(self.relay.pull(session, message, held and held.payload_to_pull, self.now))

    def push(
        self, session: PeerSession, offset: int | None = None, piece: bytes | None = None, **fields: Any
    ) -> list[wire.Message]:
        held = fields.pop("lease", lease())
        values: dict[str, Any] = {
            "task_id": task_id(1),
            "attempt": 1,
            "size_bytes": len(DATA),
            "sha256": SHA256,
        } | fields
        message = wire.BlobPush(**values, offset_bytes=offset or 0, piece=None if piece is None else 0)
        frames = () if piece is None else (piece,)
        return self.act(self.relay.push(session, message, frames, held and held.owner_id, self.now))

    def push_all(self, session: PeerSession, data: bytes = DATA, **fields: Any) -> None:
        """All pieces; the last one waits for the store."""
        for offset in range(0, len(data), PIECE):
            self.push(session, offset, data[offset : offset + PIECE], **fields)

    def after(self, seconds: float) -> list[wire.Message]:
        self.now = Instant(self.now.mono + seconds, self.now.epoch + seconds)
        return self.act(self.relay.tick(self.now))


def error_of(messages: Sequence[wire.Message]) -> tuple[str, bool]:
    [message] = messages
    assert isinstance(message, wire.BlobPiece | wire.BlobTaken)
    assert message.error is not None
    return message.error["code"], message.error["retryable"]


# -- payloads ----------------------------------------------------------------------------------------------------------


def test_payload_is_sent_in_chunks() -> None:
    bench, session = Bench(), open_session()
    bench.blobs.write(KEY, DATA)
    got = b""
    while len(got) < len(DATA):
        assert bench.pull(session, len(got)) == []
        assert bench.pull(session, len(got)) == []  # asked twice, answered once
        [piece] = bench.perform()
        assert isinstance(piece, wire.BlobPiece)
        assert piece.offset_bytes == len(got)
        got += bench.heard[-1][2][0]
    assert got == DATA
    assert len(bench.relay) == 1
    assert bench.pull(session, len(DATA)) == []
    assert (len(bench.relay), bench.steps) == (0, [])


def test_a_download_continues_in_another_session() -> None:
    bench = Bench()
    bench.blobs.write(KEY, DATA)
    first, second = open_session(1), open_session(2)
    bench.pull(first, 0)
    bench.perform()
    bench.act(bench.relay.close(first, bench.now))
    bench.pull(second, PIECE)
    [piece] = bench.perform()
    assert isinstance(piece, wire.BlobPiece)
    assert piece.offset_bytes == PIECE
    assert bench.heard[-1][2] == (DATA[PIECE : 2 * PIECE],)


@pytest.mark.parametrize(
    "held", [None, lease(stage=Stage.RETURNED), lease(ref=None)], ids=["another's", "ended", "inline"]
)
def test_only_payloads_of_leased_tasks_are_relayed(held: Lease | None) -> None:
    bench = Bench()
    bench.blobs.write(KEY, DATA)
    assert error_of(bench.pull(open_session(), 0, lease=held)) == ("TASK_UNKNOWN", False)
    assert bench.steps == []


def test_an_agent_names_tasks_not_blob_keys() -> None:
    """An agent cannot choose a blob key: it names a task, and the lease has its blob."""
    assert not {"blob_key", "url"} & {*wire.BlobPull.__struct_fields__, *wire.BlobPush.__struct_fields__}


def test_an_unavailable_store_ends_the_transfer_with_an_error() -> None:
    bench, session = Bench(), open_session()
    bench.blobs.write(KEY, DATA)
    bench.blobs.reachable = False
    bench.pull(session, 0)
    assert error_of(bench.perform()) == ("UNAVAILABLE", True)
    assert len(bench.relay) == 0
    bench.blobs.reachable = True
    bench.pull(session, 0)
    assert isinstance(bench.perform()[0], wire.BlobPiece)


def test_a_missing_blob_ends_the_transfer_with_an_error() -> None:
    bench = Bench()
    bench.pull(open_session(), 0)
    assert error_of(bench.perform()) == ("BLOB_UNKNOWN", False)


def test_an_offset_beyond_the_blob_is_ignored() -> None:
    bench = Bench()
    assert bench.pull(open_session(), 2**40) == []
    assert (bench.steps, len(bench.relay)) == ([], 0)


# -- results -----------------------------------------------------------------------------------------------------------


def test_result_is_received_in_chunks_and_stored_whole() -> None:
    bench, session = Bench(), open_session()
    [room] = bench.push(session)
    assert room == wire.BlobTaken(task_id=task_id(1), attempt=1, offset_bytes=0)
    bench.push_all(session)
    assert bench.blobs.size_bytes(KEY) is None
    [stored] = bench.perform()
    assert stored == wire.BlobTaken(task_id=task_id(1), attempt=1, offset_bytes=len(DATA), blob_key=KEY)
    assert bench.blobs.read(KEY) == DATA
    assert len(bench.relay) == 0


@pytest.mark.parametrize("wrong", [DATA[::-1], bytes(len(DATA))])
def test_bytes_that_differ_from_the_announced_hash_are_not_stored(wrong: bytes) -> None:
    bench, session = Bench(), open_session()
    bench.push(session)
    bench.push_all(session, wrong)
    assert error_of(bench.perform()) == ("PROTOCOL_ERROR", True)
    assert bench.blobs.size_bytes(KEY) is None


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"lease": None}, "TASK_UNKNOWN"),
        ({"size_bytes": POLICY.max_result_bytes + 1}, "RESULT_TOO_LARGE"),
        ({"sha256": "../" * 21 + "x"}, "PROTOCOL_ERROR"),
        ({"sha256": SHA256.upper()}, "PROTOCOL_ERROR"),
    ],
)
def test_refused_upload_reserves_no_memory(asked: dict[str, Any], code: str) -> None:
    bench = Bench()
    assert error_of(bench.push(open_session(), **asked)) == (code, False)
    assert len(bench.relay) == 0


@pytest.mark.parametrize(
    ("offset", "piece", "fields"),
    [
        (1, b"x", {}),
        (0, bytes(PIECE + 1), {}),
        (0, b"x", {"sha256": "0" * 64}),
        (0, b"x", {"size_bytes": 5}),
        (0, b"x", {"task_id": task_id(2)}),
    ],
    ids=["a gap", "too much", "another hash", "another size", "another task"],
)
def test_chunk_at_a_wrong_offset_ends_the_upload(offset: int, piece: bytes, fields: dict[str, Any]) -> None:
    bench, session = Bench(), open_session()
    bench.push(session)
    assert error_of(bench.push(session, offset, piece, **fields)) == ("PROTOCOL_ERROR", True)
    assert bench.steps == []
    if "task_id" not in fields:
        assert len(bench.relay) == 0
        assert error_of(bench.push(session, 0, b"x")) == ("PROTOCOL_ERROR", True)


def test_upload_may_restart() -> None:
    bench, session = Bench(), open_session()
    bench.push(session)
    bench.push(session, 0, DATA[:PIECE])
    [room] = bench.push(session)
    assert isinstance(room, wire.BlobTaken)
    assert room.offset_bytes == 0
    bench.push_all(session)
    bench.perform()
    assert bench.blobs.read(KEY) == DATA


# -- memory ------------------------------------------------------------------------------------------------------------


def test_transfers_without_memory_wait_in_order_of_arrival() -> None:
    bench = Bench()
    sessions = [open_session(number) for number in range(5)]
    size = 4000  # two fit into 10,000 bytes
    answers = [bench.push(session, size_bytes=size) for session in sessions]
    assert [len(messages) for messages in answers] == [1, 1, 0, 0, 0]
    bench.act(bench.relay.close(sessions[0], bench.now))
    bench.act(bench.relay.close(sessions[3], bench.now))  # it waited, and disconnected
    bench.act(bench.relay.close(sessions[1], bench.now))
    assert [routing_id for routing_id, _, _ in bench.heard] == [b"0", b"1", b"2", b"4"]


def test_download_reserves_memory_for_one_chunk() -> None:
    bench = Bench()
    bench.blobs.write(KEY, DATA)
    sessions = [open_session(number) for number in range(25)]
    for session in sessions:
        bench.pull(session, 0)
    assert len(bench.steps) == 10
    for _ in range(10):
        bench.perform()
    assert bench.steps == []  # sent, but not acknowledged yet
    bench.pull(sessions[0], len(DATA))
    assert len(bench.steps) == 1


def test_pending_store_step_keeps_its_memory_after_the_session() -> None:
    bench, session, other = Bench(), open_session(1), open_session(2)
    bench.push(session)
    bench.push_all(session)
    [step] = bench.steps
    assert isinstance(step, StoreBlob)
    bench.act(bench.relay.close(session, bench.now))
    assert bench.push(other, size_bytes=8000) == []
    [room] = bench.perform()  # stored without an answer, and makes room
    assert isinstance(room, wire.BlobTaken)
    assert bench.heard[-1][0] == b"2"


def test_stalled_agent_releases_its_memory() -> None:
    bench, lazy, other = Bench(), open_session(1), open_session(2)
    bench.push(lazy, size_bytes=8000)
    assert bench.push(other, size_bytes=8000) == []
    assert bench.after(29.0) == []
    [room] = bench.after(2.0)
    assert isinstance(room, wire.BlobTaken)
    assert bench.heard[-1][0] == b"2"
    assert error_of(bench.push(lazy, 0, b"x", size_bytes=8000)) == ("PROTOCOL_ERROR", True)


def test_the_transfers_of_one_agent_are_limited() -> None:
    bench, session = Bench(), open_session()
    for number in range(16):
        bench.push(session, task_id=task_id(number))
    assert error_of(bench.push(session, task_id=task_id(99))) == ("LIMIT_EXCEEDED", True)
    assert error_of(bench.pull(session, 0, task_id=task_id(98))) == ("LIMIT_EXCEEDED", True)


def test_all_memory_is_released() -> None:
    """After many aborted transfers all room is free again."""
    bench = Bench()
    bench.blobs.write(KEY, DATA)
    for number in range(200):
        session = open_session(number)
        bench.push(session)
        bench.pull(session, 0)
        if number % 2:
            bench.push_all(session)
        if number % 3 and bench.steps:
            bench.perform()
        if number % 5 == 0:
            bench.blobs.reachable = not bench.blobs.reachable
        bench.act(bench.relay.close(session, bench.now))
    while bench.steps:
        bench.perform()
    assert len(bench.relay) == 0
    assert bench.push(open_session(), size_bytes=8000) != []
    assert bench.relay._free_bytes == POLICY.relay_bytes - 8000


# -- in the forwarder --------------------------------------------------------------------------------------------------


def test_the_forwarder_relays_blobs_of_leased_tasks() -> None:
    world = World()
    world.serve(credit=5)
    world.dispatch(leased(1, payload=None, payload_ref=REF), leased(2))
    [read] = world.hears(wire.BlobPull(task_id=task_id(1), attempt=1, offset_bytes=0))
    assert isinstance(read, ReadPiece)
    assert (read.blob_key, read.length_bytes) == (KEY, len(DATA))
    [piece] = sent(world.on(PieceRead(read.transfer_id, DATA)))
    assert isinstance(piece, wire.BlobPiece)
    assert (
        error_of(sent(world.hears(wire.BlobPull(task_id=task_id(3), attempt=1, offset_bytes=0))))[0] == "TASK_UNKNOWN"
    )
    announced = wire.BlobPush(task_id=task_id(2), attempt=1, size_bytes=4, sha256="0" * 64)
    assert len(sent(world.hears(announced))) == 1
    [store] = world.hears(wire.BlobPush(task_id=task_id(2), attempt=1, size_bytes=4, sha256="0" * 64, piece=0), b"data")
    assert isinstance(store, StoreBlob)
    assert store.ref == BlobRef(f"{OWNER_ID}/{'0' * 64}", 4, "0" * 64)
    world.hears(wire.Goodbye())
    assert sent(world.on(BlobStored(store.transfer_id))) == []
    assert len(world.core._context.relay) == 0


def test_a_client_may_not_use_the_relay() -> None:
    world = World()
    world.open_stream("group")
    messages = sent(
        world.hears(wire.BlobPull(task_id=task_id(1), attempt=1, offset_bytes=0), peer=CLIENT, routing_id=b"client")
    )
    assert [type(message) for message in messages] == [wire.Refused]


def test_smallest_policy_admits_the_largest_result() -> None:
    relay = Relay(dataclasses.replace(POLICY, relay_bytes=1))
    message = wire.BlobPush(task_id=task_id(1), attempt=1, size_bytes=POLICY.max_result_bytes, sha256=SHA256)
    assert relay.push(open_session(), message, (), OWNER_ID, Instant(0.0, EPOCH)) != []


class BrokenBlobs(FakeBlobs):
    def read_part(self, blob_key: str, *, offset_bytes: int, length_bytes: int) -> bytes:
        raise ZeroDivisionError(blob_key)

    def write(self, blob_key: str, data: bytes) -> BlobRef:
        raise ZeroDivisionError(blob_key)


def test_a_bug_in_the_blob_store_ends_one_transfer() -> None:
    read = read_piece(BrokenBlobs(), ReadPiece(1, "key", 0, 1))
    stored = store_blob(BrokenBlobs(), StoreBlob(1, BlobRef("key", 0, hashlib.sha256().hexdigest()), ()))
    for error in (read.error, stored.error):
        assert error is not None
        assert error.retryable
