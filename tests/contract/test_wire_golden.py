"""The bytes of protocol version 1 never change: what an older release wrote is read, what we write is what it wrote.

A new message, or a new field of one that has a file, adds a file: run ``python -m tests.contract.test_wire_golden``. It
never overwrites one: changed bytes are a new protocol version, not a new golden file.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farcall_common.wire import Envelope, Message, decode, encode
from tests.contract.wire_samples import LATER_FIELDS, SAMPLES

ALL = SAMPLES | LATER_FIELDS
GOLDEN = Path(__file__).parent / "data" / "wire"


def _read(kind: str) -> list[bytes]:
    return [bytes.fromhex(line) for line in json.loads((GOLDEN / f"{kind}.json").read_text())]


def test_every_message_has_a_sample() -> None:
    assert set(SAMPLES) == {cls.__name__ for cls in Message.__subclasses__()}


def test_every_golden_file_has_a_message() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(ALL)


@pytest.mark.parametrize("kind", sorted(ALL))
def test_old_bytes_are_read(kind: str) -> None:
    assert decode(_read(kind)) == ALL[kind]


@pytest.mark.parametrize("kind", sorted(ALL))
def test_the_same_bytes_are_written(kind: str) -> None:
    assert encode(ALL[kind]) == _read(kind)


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
