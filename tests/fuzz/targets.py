"""Targets of fuzzing: each one takes bytes and fails when a promise is broken. Targets of an endpoint are in
:mod:`~tests.fuzz.endpoint`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from farcall_common import wire
from farcall_common.errors import ProtocolError
from farcall_common.store.model import BlobRef
from tests.fuzz.frames import pack, unpack
from tests.unit.test_forwarder_core import OWNER_ID, POLICY, World, hello, leased
from tests.unit.test_forwarder_fuzz import PEERS, REAL, event_of, is_connected, is_served, settle

GOLDEN: Final = Path(__file__).parents[1] / "contract" / "data" / "wire"
_MOST_FRAMES: Final = 4
_MOST_MESSAGES: Final = 12


def decode_and_encode(data: bytes, *, decode: Callable[[Sequence[bytes]], wire.Envelope] = wire.decode) -> None:
    """What cannot be read is a ProtocolError and nothing else; what can be read is the same after writing it."""
    try:
        envelope = decode(list(unpack(data)))
    except ProtocolError:
        return
    again = decode(wire.encode(envelope))
    assert again == envelope or "nan" in repr(envelope)


def converse(data: bytes) -> None:
    """Whatever peers say, in whatever order: the forwarder goes on, and an honest agent is let in afterwards. The first
    byte of each message says which peer says it, and how many frames it has."""
    world = World()
    world.serve(credit=10)
    big = BlobRef(f"{OWNER_ID}/{'0' * 64}", 3 * POLICY.relay_piece_bytes, "0" * 64)
    world.dispatch(leased(1), leased(2), leased(3, idempotent=False), leased(4, payload=None, payload_ref=big))
    world.open_stream("group")
    parts = list(unpack(data))
    for _ in range(_MOST_MESSAGES):
        if not parts:
            break
        how = parts.pop(0)[:1] or b"\0"
        peer, routing_id = PEERS[how[0] % len(PEERS)]
        count = 1 + (how[0] // len(PEERS)) % _MOST_FRAMES
        frames, parts = parts[:count], parts[count:]
        if not is_connected(world):  # sent away, and back again
            settle(world, world.hears(hello()))
        settle(world, world.on(event_of(routing_id, peer, frames)))
    settle(world, world.after(10))
    assert is_served(world)


def _golden() -> Iterator[list[bytes]]:
    for path in sorted(GOLDEN.glob("*.json")):
        yield [bytes.fromhex(line) for line in json.loads(path.read_text())]


def _conversations() -> Iterator[list[bytes]]:
    """Each message that a peer could really send, by each peer; then all of them in a row."""
    headers = [wire.encode(wire.Envelope(message, (b"result",)))[0] for message in REAL]
    said = [[bytes([peer + len(PEERS)]), header, b"result"] for header in headers for peer in (0, 4, 6)]
    yield from said
    yield [part for message in said[::3] for part in message]
    yield from ([bytes([len(frames) - 1]), *frames] for frames in _golden())


def seeds(name: str) -> list[bytes]:
    """First inputs of the fuzzer."""
    frames = {"codec": _golden, "forwarder": _conversations}[name]()
    return [pack(each) for each in frames]


TARGETS: Final[Mapping[str, Callable[[bytes], None]]] = {"codec": decode_and_encode, "forwarder": converse}
