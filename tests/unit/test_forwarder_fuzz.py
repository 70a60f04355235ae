"""Fuzzing of the forwarder: mutated frames of peers neither stop it nor reach a store as values that the store cannot
hold. The mutations are the same in each run."""

from __future__ import annotations

import copy
import datetime as dt
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import hypothesis
import msgspec
from hypothesis import HealthCheck
from hypothesis import strategies as st

from farcall_common import wire
from farcall_common.errors import ProtocolError
from farcall_common.store import task_rows
from farcall_common.store.model import BlobRef, PeerKey, PeerKind, TaskResult
from farcall_common.wire import TaskState
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.relay import BlobStored, PieceRead, ReadPiece, StoreBlob
from tests.contract.wire_samples import SAMPLES
from tests.unit.test_forwarder_core import (
    AGENT,
    CLIENT,
    ENDPOINT_ID,
    EPOCH,
    OWNER_ID,
    POLICY,
    TICKETS,
    World,
    hello,
    leased,
    recorded,
    sent,
    success,
    task_id,
)

OTHER_ID: Final = "00000000-0000-4000-8000-0000000000ee"
#: The agent of another endpoint, which sends valid messages only.
HONEST: Final = PeerKey("honest key", PeerKind.AGENT, OTHER_ID)
UNKNOWN: Final = PeerKey("unknown key", PeerKind.AGENT, "00000000-0000-4000-8000-0000000000ff")
RECORDED_AT: Final = dt.datetime.fromtimestamp(EPOCH, dt.UTC)
#: Senders and their connections; an unknown peer may get a routing id that another peer had.
PEERS: Final = [(AGENT, b"agent")] * 4 + [(CLIENT, b"client")] * 2 + [(UNKNOWN, b"unknown"), (UNKNOWN, b"agent")]

#: Valid messages of the peers in these tests.
REAL: Final = [
    hello(),
    hello(
        held=(wire.HeldTask(task_id=task_id(1), attempt=1), wire.HeldTask(task_id=task_id(8), attempt=3, finished=True))
    ),
    wire.Credit(tasks=5),
    wire.TasksAccepted(tasks=(wire.TaskRef(task_id=task_id(1), attempt=1),)),
    wire.TaskTransitions(
        transitions=(
            wire.TaskTransition(task_id=task_id(1), attempt=1, state=TaskState.RUNNING, at=EPOCH, detail={"node": "n"}),
        )
    ),
    success(1),
    wire.TaskResults(
        results=(
            wire.ResultSpec(
                task_id=task_id(2),
                attempt=1,
                state=TaskState.FAILED,
                error={"code": "TASK_FAILED", "message": "no", "fault": "user_code", "retry_after_s": 1.0},
                started_at=EPOCH,
                ended_at=EPOCH + 1,
                details={"os": "linux", "load": [1, 2.5]},
            ),
        )
    ),
    wire.BlobRequest(task_id=task_id(1), attempt=1, size_bytes=5_000_000, sha256="0" * 64),
    wire.BlobPull(task_id=task_id(4), attempt=1, offset_bytes=0),
    wire.BlobPush(task_id=task_id(1), attempt=1, size_bytes=6, sha256="0" * 64),
    wire.BlobPush(task_id=task_id(1), attempt=1, size_bytes=6, sha256="0" * 64, piece=0),
    wire.Heartbeat(at=EPOCH, report=wire.EndpointReport(managers=1, detail={"problem": "none"})),
    wire.Goodbye(reason="done"),
    wire.OpenStream(
        ticket=TICKETS.issue(CLIENT, expires_at=EPOCH + 60),
        protocol_versions=(1,),
        heartbeat_s=30.0,
        task_group_ids=("group",),
        cursor="forwarder:0",
    ),
    wire.Subscribe(task_group_ids=("group", "other")),
]
#: Messages with other ids, and of other roles.
ANY: Final = [*REAL, *(envelope.message for envelope in SAMPLES.values())]

JUNK: Final[Sequence[Any]] = [
    *(
        "",
        "\0",
        "a\0b",
        "x" * 70_000,
        "\N{ROMAN NUMERAL ONE}",
        task_id(1),
        task_id(2),
        task_id(99),
        OTHER_ID,
        ENDPOINT_ID,
    ),
    *(0, -1, 1, 2, 255, 2**31, 2**53 + 1, 2**63 - 1, 2**64 - 1, -(2**63)),
    *(0.0, -0.0, 1.5, 1e308, -1e308, 5e-324, math.inf, -math.inf, math.nan, EPOCH, -EPOCH),
    *(None, True, False, [], {}, b"", b"\xff\x00", [None], ["a", 1], {"a": math.nan}, {"\0": "\0"}, {"code": 1}),
    *([[[[[[[[[[]]]]]]]]]], {"": {"": {"": {"": {"": {"": {"": 1}}}}}}}, {"problem": "p" * 5000}, {"fault": "moon"}),
    *(str(state) for state in TaskState),
]

_ENCODER: Final = msgspec.msgpack.Encoder()


class Tape:
    """Choices, read from bytes; at the end of the tape each choice is 0. Hypothesis makes and shrinks bytes fastest."""

    def __init__(self, data: bytes) -> None:
        self._bytes = iter(data)

    def below(self, limit: int) -> int:
        return next(self._bytes, 0) % limit

    def one_of(self, choices: Sequence[Any]) -> Any:
        return choices[self.below(len(choices))]

    def frames(self) -> list[bytes]:
        """The frames of a valid message, changed in its values, in its bytes, or not at all."""
        tree = msgspec.msgpack.decode(_ENCODER.encode(self.one_of(REAL if self.below(8) else ANY)))
        for _ in range(self.one_of([0, 0, 0, 1, 1, 1, 2, 3])):
            self._change(tree)
        header = b"\x01" + _ENCODER.encode(tree)
        at = self.below(len(header)) if self.below(16) == 1 else None
        if at is not None:
            byte = bytes([self.below(256)])
            header = self.one_of(
                [header[:at], header[:at] + byte + header[at + 1 :], header[at:], header * 2, header + byte]
            )
        if self.below(32) == 1:
            return list(self.one_of([[], [b""], [b"result"], [header] * 3]))
        return list(self.one_of([[header], [header, b"result"], [header, b"", b"x"]]))

    def _change(self, tree: dict[str, Any]) -> None:
        """Replace, drop, repeat or add something somewhere in a message."""
        if not (places := list(_places(tree))):
            return
        holder, key = self.one_of(places)
        match self.below(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.extend(copy.deepcopy(holder[key]) for _ in range(3))
            case 2 if isinstance(holder, dict):
                holder[f"new{self.below(3)}"] = copy.deepcopy(self.one_of(JUNK))
            case _:
                holder[key] = copy.deepcopy(self.one_of(JUNK))


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a tree, as its container and its key or index."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else []
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


def settings(examples: int) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )


@settings(2000)
@hypothesis.given(st.binary(max_size=30))
def test_unreadable_frames_raise_only_protocol_errors(choices: bytes) -> None:
    try:
        envelope = wire.decode(Tape(choices).frames())
    except ProtocolError:
        return
    assert wire.decode(wire.encode(envelope)) == envelope or "nan" in repr(envelope)


@settings(400)
@hypothesis.given(st.binary(min_size=100, max_size=600))
def test_no_peer_stops_the_forwarder(choices: bytes) -> None:
    world, tape = World(), Tape(choices)
    world.serve(credit=10)
    big = BlobRef(f"{OWNER_ID}/{'0' * 64}", 3 * POLICY.relay_piece_bytes, "0" * 64)
    world.dispatch(leased(1), leased(2), leased(3, idempotent=False), leased(4, payload=None, payload_ref=big))
    world.open_stream("group")

    for _ in range(40):
        if not is_connected(world):  # redirected, and connected again
            settle(world, world.hears(hello()))
        peer, routing_id = tape.one_of(PEERS)
        settle(world, world.on(event_of(routing_id, peer, tape.frames())))
        if pause_s := tape.one_of([0, 0, 0, 0, 0.5, 40]):
            settle(world, world.after(pause_s))

    settle(world, world.after(10))
    assert is_served(world)


def is_connected(world: World) -> bool:
    return b"agent" in world.core._connections._sessions


def event_of(routing_id: bytes, peer: PeerKey, parts: list[bytes]) -> ev.Event:
    """The event that the shell makes from frames of a socket."""
    try:
        return ev.Received(routing_id, peer, wire.decode(parts))
    except ProtocolError as error:
        return ev.MalformedReceived(routing_id, peer, error)


def settle(world: World, actions: Sequence[do.Action]) -> None:
    """Check the core's actions, and give it the answers of the stores."""
    for action in actions:
        match action:
            case do.Send(envelope=envelope):
                wire.decode(wire.encode(envelope))
            case do.FlushResults():
                for batch in action.batches:
                    for result in batch.results:
                        _check_result(result)
                settle(world, world.on(recorded(action)))
            case do.RecordTransitions(events=events):
                for event in events:
                    _check_row(task_rows.event_row(event))
                settle(world, world.on(ev.TransitionsRecorded()))
            case do.ClaimEndpoint(endpoint_id=endpoint_id, generation=generation):
                settle(world, world.on(ev.EndpointClaimed(endpoint_id, generation, 8)))
            case do.ReadLeases(endpoint_id=endpoint_id, fence=fence):
                settle(world, world.on(ev.LeasesRead(endpoint_id, fence, {})))
            case do.SetPresence(status=status):
                assert all(not isinstance(value, int) or 0 <= value < 2**31 for value in vars(status).values())
            case ReadPiece(transfer_id=transfer_id, length_bytes=length_bytes):
                assert 0 < length_bytes <= POLICY.relay_piece_bytes
                settle(world, world.on(PieceRead(transfer_id, bytes(length_bytes))))
            case StoreBlob(transfer_id=transfer_id, ref=ref, pieces=pieces):
                assert sum(map(len, pieces)) == ref.size_bytes
                settle(world, world.on(BlobStored(transfer_id)))
            case do.WatchOwners(owner_ids=owner_ids):
                settle(world, world.on(ev.OwnersWatched(list(owner_ids), frozenset(owner_ids))))
            case _:
                pass


def _check_result(result: TaskResult) -> None:
    assert result.state.is_terminal
    columns = task_rows.end_columns([result], at=RECORDED_AT)
    _check_row({name: values[0] for name, values in columns.items() if name != "at"})
    assert all(math.isfinite(value) for value in result.timings.values())


def _check_row(row: dict[str, Any]) -> None:
    """Check that PostgreSQL accepts a row: text without NUL, valid JSON, integers in range."""
    for name, value in row.items():
        if isinstance(value, str):
            assert "\0" not in value, name
            value.encode()
            if name in ("detail", "details", "error", "timings"):
                json.loads(value, parse_constant=_no_constant)
        elif isinstance(value, int):
            assert abs(value) < 2**31, name


def _no_constant(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")


def is_served(world: World) -> bool:
    """Whether an agent with valid messages is admitted."""
    ticket = TICKETS.issue(HONEST, expires_at=EPOCH + 1_000_000)
    own_hello = hello(endpoint_id=OTHER_ID, ticket=ticket, instance_id=OTHER_ID, spool_id=OTHER_ID)
    claimed = world.hears(own_hello, peer=HONEST, routing_id=b"honest")
    assert [type(action) for action in claimed] == [do.ClaimEndpoint]
    world.on(ev.EndpointClaimed(OTHER_ID, claimed[0].generation, 9))  # type: ignore[attr-defined]
    welcomed = world.on(ev.LeasesRead(OTHER_ID, 9, {}))
    return [type(message) for message in sent(welcomed)] == [wire.Welcome]
