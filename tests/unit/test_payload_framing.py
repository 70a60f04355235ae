"""Framing: several buffers in one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_common.errors import DeserializationError
from farcall_common.payload.framing import pack, unpack

texts = st.text(st.characters(exclude_categories=["Cs"])).map(str.encode)


@given(st.lists(texts))
def test_packed_buffers_round_trip(buffers: list[bytes]) -> None:
    assert unpack(pack(buffers)) == buffers


def test_lengths_count_characters_as_globus_compute_counts_them() -> None:
    assert pack(["st\nf:é".encode(), b"11\n{}"]) == "6\nst\nf:é5\n11\n{}".encode()


@given(st.lists(texts, min_size=1), st.data())
def test_truncation_is_detected_or_lies_between_buffers(buffers: list[bytes], data: st.DataObject) -> None:
    packed = pack(buffers)
    cut = packed[: data.draw(st.integers(0, len(packed) - 1))]
    try:
        found = unpack(cut)
    except DeserializationError:
        assert cut not in [pack(buffers[:count]) for count in range(len(buffers))]
    else:
        assert found == buffers[: len(found)]
        assert len(found) < len(buffers)


@given(st.binary())
def test_garbage_gives_buffers_or_a_clear_error(garbage: bytes) -> None:
    try:
        buffers = unpack(garbage)
    except DeserializationError:
        return
    assert all(isinstance(buffer, bytes) for buffer in buffers)


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param(b"5", id="no newline"),
        pytest.param(b"\nabc", id="no length"),
        pytest.param(b"-1\nabc", id="negative"),
        pytest.param(b"1_0\n0123456789", id="python number"),
        pytest.param("²\nab".encode(), id="digit that is no decimal"),
        pytest.param(b"9" * 5000 + b"\nabc", id="endless length"),
        pytest.param(b"4\nabc", id="cut off"),
        pytest.param(b"\xff\xfe", id="not UTF-8"),
    ],
)
def test_damaged_text_is_refused(packed: bytes) -> None:
    with pytest.raises(DeserializationError):
        unpack(packed)
