"""Messages between processes of one machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_endpoint.host.pipe import Pipe, pipe_pair
from farcall_endpoint.host.shared_memory import SharedBytes, bytes_of

Pair = tuple[Pipe, Pipe]


@pytest.fixture
def pair() -> Iterator[Pair]:
    here, there = pipe_pair()
    other = Pipe(there)
    yield here, other
    here.close()
    other.close()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


SIZES = st.lists(st.sampled_from([0, 1, 100, 16 * 1024, 16 * 1024 + 1, 60_000, 70_000, 300_000]), max_size=12)


@given(sizes=SIZES)
def test_frames_arrive_as_they_were_sent(sizes: list[int]) -> None:
    here, there = pipe_pair()
    other = Pipe(there)
    frames = [bytes([index % 251]) * size for index, size in enumerate(sizes)]
    before = open_files()
    here.send(frames)
    received = other.receive()
    assert received is not None
    assert [bytes(frame) for frame in received] == frames
    del received
    assert open_files() == before
    here.close()
    other.close()


def test_large_frames_are_in_files_within_the_limit(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farcall_endpoint.host.pipe.most_file_bytes", lambda: 65_536)
    here, there = pair
    frames = [bytes([index]) * (30_000 if index % 3 else 100) for index in range(20)]
    here.send(frames)
    received = there.receive_shared()
    assert received is not None
    assert [bytes(bytes_of(frame)) for frame in received] == frames
    files = {frame.memory.descriptor for frame in received if isinstance(frame, SharedBytes)}
    assert max(os.fstat(each).st_size for each in files) <= 65_536


def test_frames_are_sent_without_copies(pair: Pair) -> None:
    here, other = pair
    onward, there = pipe_pair()
    last = Pipe(there)
    here.send([b"head", b"x" * 1_000_000, b"y" * 500_000])
    frames = other.receive_shared()
    assert frames is not None
    assert [type(frame) for frame in frames] == [bytes, SharedBytes, SharedBytes]
    onward.send([b"other head", frames[2], frames[1], b"more"])
    received = last.receive_shared()
    assert received is not None
    assert [len(frame) for frame in received] == [10, 500_000, 1_000_000, 4]
    assert bytes(bytes_of(received[1])) == b"y" * 500_000
    assert bytes(bytes_of(received[2])) == b"x" * 1_000_000
    one, other_one = (os.fstat(each.memory.descriptor).st_ino for each in (frames[1], received[2]))  # type: ignore[union-attr]
    assert one == other_one
    onward.close()
    last.close()


def test_frames_beyond_the_descriptor_limit_arrive(pair: Pair) -> None:
    here, other = pair
    onward, there = pipe_pair()
    last = Pipe(there)
    bodies: list[SharedBytes] = []
    for number in range(100):
        here.send([bytes([number]) * 20_000])
        [frame] = other.receive_shared() or []
        assert isinstance(frame, SharedBytes)
        bodies.append(frame)
    onward.send(bodies)
    received = last.receive() or []
    assert [frame[0] for frame in received] == list(range(100))
    assert {len(frame) for frame in received} == {20_000}
    onward.close()
    last.close()


def test_sends_never_block_and_frames_keep_their_order(pair: Pair) -> None:
    here, other = pair
    for number in range(500):
        here.send([number.to_bytes(2, "big"), b"." * 4000])
    assert here.is_congested
    seen_numbers: list[int] = []
    while len(seen_numbers) < 500:
        try:
            frames = other.receive()
        except BlockingIOError:
            here.flush()
            continue
        assert frames is not None
        seen_numbers.append(int.from_bytes(frames[0], "big"))
    assert seen_numbers == list(range(500))
    assert not here.is_congested


def test_closed_pipe_ends_receives_and_drops_sends(pair: Pair) -> None:
    here, other = pair
    with pytest.raises(BlockingIOError):
        here.receive()
    other.close()
    assert here.receive() is None
    before = open_files()
    here.send([b"x" * 100_000])
    assert not here.is_congested
    assert open_files() == before


def test_final_messages_are_sent_when_there_is_room(pair: Pair) -> None:
    here, other = pair
    here.send([b"last"])
    here.close(linger_s=1.0)
    assert other.receive() == [b"last"]
    assert other.receive() is None


def test_unsent_descriptors_are_closed_with_the_pipe(pair: Pair) -> None:
    here, _ = pair
    before = open_files()
    for _ in range(300):
        here.send([b"x" * 20_000])
    assert here.is_congested
    here.close(linger_s=0.01)
    assert open_files() <= before
