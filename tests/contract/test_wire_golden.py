"""The messages of protocol version 1 never change: what an older release wrote is read, what we write is what it wrote.

Only the header of a map may differ, which MessagePack has in three sizes: msgspec takes a larger one for a structure
with more than 15 fields, also if most of them are left out.

A new message, or a new field of one that has a file, adds a file: run ``python -m tests.contract.test_wire_golden``. It
never overwrites one: a changed message is a new protocol version, not a new golden file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from farcall_common.wire import Envelope, Message, decode, encode
from tests.contract.wire_samples import LATER_FIELDS, SAMPLES

ALL = SAMPLES | LATER_FIELDS
GOLDEN = Path(__file__).parent / "data" / "wire"


def _read(kind: str) -> list[bytes]:
    return [bytes.fromhex(line) for line in json.loads((GOLDEN / f"{kind}.json").read_text())]


def _content(frames: Sequence[bytes]) -> list[bytes]:
    """The frames of an envelope, its header as JSON: with the fields in their order, and the types of numbers."""
    header = frames[0]
    return [header[:1], msgspec.json.encode(msgspec.msgpack.decode(header[1:])), *frames[1:]]


def test_every_message_has_a_sample() -> None:
    assert set(SAMPLES) == {cls.__name__ for cls in Message.__subclasses__()}


def test_every_golden_file_has_a_message() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(ALL)


@pytest.mark.parametrize("kind", sorted(ALL))
def test_old_bytes_are_read(kind: str) -> None:
    assert decode(_read(kind)) == ALL[kind]


@pytest.mark.parametrize("kind", sorted(ALL))
def test_the_same_is_written(kind: str) -> None:
    assert _content(encode(ALL[kind])) == _content(_read(kind))


@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_samples_set_every_field(kind: str) -> None:
    """A sample that leaves a field at its default would not pin that field's bytes."""

    samples = [envelope.message for name, envelope in ALL.items() if name.partition(".")[0] == kind]
    headers = b"".join(encode(Envelope(message))[0] for message in samples)
    assert [name for name in samples[0].__struct_fields__ if name.encode() not in headers] == []


if __name__ == "__main__":
    for kind, envelope in ALL.items():
        path = GOLDEN / f"{kind}.json"
        if not path.exists():
            path.write_text(json.dumps([frame.hex() for frame in encode(envelope)], indent=1) + "\n")
