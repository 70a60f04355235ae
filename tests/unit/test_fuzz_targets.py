"""What ``make fuzz`` begins with holds, and its targets can fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import pytest

from farcall_common import wire
from tests.fuzz.frames import pack
from tests.fuzz.targets import TARGETS, decode_and_encode, seeds


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_seeds_pass_every_target(name: str) -> None:
    found = seeds(name)
    assert len(found) > 20
    for seed in found:
        TARGETS[name](seed)


def test_golden_bytes_are_accepted() -> None:
    kinds = {kind.__name__ for kind in wire.Message.__subclasses__()}
    found = b"".join(seeds("codec"))
    assert {kind for kind in kinds if kind.encode() not in found} == set()


@pytest.mark.parametrize("name", sorted(TARGETS))
@pytest.mark.parametrize("data", [b"", b"\0", b"\xff" * 100, bytes(1000), b"\0\x01\0" * 50])
def test_random_bytes_pass_every_target(name: str, data: bytes) -> None:
    TARGETS[name](data)


def test_broken_target_is_detected() -> None:
    def broken(_frames: Sequence[bytes]) -> NoReturn:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        decode_and_encode(pack([b"\x01"]), decode=broken)
