"""Bodies of packets between manager and worker: parts inline and in memory files, in any mix."""

from __future__ import annotations

import fcntl
import os
import random
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farcall_endpoint.contracts.bodies import pack, ranges_of, unpack
from farcall_endpoint.contracts.manager_worker import (
    MALFORMED,
    CallOrder,
    Channel,
    Done,
    InputOrder,
    Order,
    Run,
    channel_pair,
)
from farcall_endpoint.contracts.output import Printed, split, tails
from farcall_endpoint.host.shared_memory import (
    Body,
    Frame,
    FrameList,
    MemoryFile,
    SharedBytes,
    ancillary,
    bytes_of,
    copy_of,
    cut,
)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    manager, end, claims = channel_pair()
    pair = manager, Channel(end, claims)
    yield pair
    for each in pair:
        each.close()


def shared(data: bytes, *, before: int = 0) -> SharedBytes:
    return SharedBytes(MemoryFile.of([bytes(before), data, b"behind"]), before, len(data))


def contents(frames: Sequence[Frame]) -> list[bytes]:
    return [bytes(bytes_of(frame)) for frame in frames]


def parts_of(body: Body, sizes: Sequence[int]) -> list[bytes]:
    """What a worker finds in a body, and a manager, which is the same."""
    parts = contents(cut(body, sizes))
    readable = body if isinstance(body, FrameList) else bytes_of(body)
    at = 0
    for size, part in zip(sizes, parts, strict=True):
        assert bytes(readable[at : at + size]) == part
        at += size
    return parts


_part = st.tuples(st.sampled_from(["bytes", "own file", "one file"]), st.integers(0, 100))


@settings(max_examples=60, deadline=None)
@given(st.lists(_part, max_size=90), st.booleans())
def test_parts_of_any_mix_arrive(described: list[tuple[str, int]], inline: bool) -> None:
    memory = MemoryFile.of([bytes(number % 251 for number in range(100 * len(described) + 1))])
    body: list[Frame] = []
    for number, (kind, size) in enumerate(described):
        data = bytes([number]) * size
        if kind == "one file":
            body.append(SharedBytes(memory, 100 * number, size))
        else:
            body.append(data if kind == "bytes" else shared(data, before=number))
    packed, memories = pack(body, inline=inline)
    assert len(memories) <= 60
    received = unpack(memoryview(b"".join(packed)), memories)
    assert parts_of(received, list(map(len, body))) == contents(body)


def test_a_packet_has_inline_parts_and_several_files(ends: tuple[Channel, Channel]) -> None:
    manager, worker = ends
    body = (b"function", b"payload", shared(os.urandom(200_000)), b"small", shared(os.urandom(70_000), before=64))
    inputs = (InputOrder((0,), (200_000,)), InputOrder((1,), (5,)), InputOrder((2,), (70_000,)))
    run = Run((Order("t", 1, "h", 7, call=CallOrder(inputs)),), (("h", 8),))
    manager.order(run, body)
    received = worker.receive()
    assert received is not None
    assert received[0] == run
    assert parts_of(received[1], [8, 7, 200_000, 5, 70_000]) == contents(body)


def test_a_result_of_many_large_parts_is_received_without_mapping_it(ends: tuple[Channel, Channel]) -> None:
    """A packet has room for 60 descriptors; the largest parts are passed on, and all others are in one file."""
    manager, worker = ends
    sizes = [50_000 + 1_000 * number for number in range(100)]
    body = [shared(bytes([number]) * size) for number, size in enumerate(sizes)]
    done = Done("t", 1.0, 2.0, parts=tuple(sizes), printed=Printed(1, 1, 1, 1))
    worker.send(done, [*body, b"oe"])
    received = manager.receive_shared()
    assert received is not None
    packet, result = received
    assert packet == done
    assert isinstance(result, FrameList)
    frames = cut(result, sizes)
    assert all(isinstance(frame, SharedBytes) for frame in frames)
    assert len(ranges_of(result)) == 60
    assert contents(frames) == contents(body)
    assert tails(result, Printed(1, 1, 1, 1)) == b"oe"
    with pytest.raises(ValueError, match="not in one frame"):
        split(result, Printed(1, 1, 1, 1))


def test_parts_of_one_file_take_one_descriptor(ends: tuple[Channel, Channel]) -> None:
    manager, worker = ends
    memory = MemoryFile.of([os.urandom(300_000)])
    body = [SharedBytes(memory, 100 * number, 50) for number in range(3_000)]
    worker.send(Done("t", 1.0, 2.0, parts=(50,) * 3_000), body)
    received = manager.receive_shared()
    assert received is not None
    assert len(ranges_of(received[1])) == 2  # of which the first has what the table had no room for
    assert contents(cut(received[1], [50] * 3_000)) == contents(body)


def test_what_follows_parts_of_another_file_is_aligned(ends: tuple[Channel, Channel]) -> None:
    manager, worker = ends
    large = os.urandom(100_000)
    worker.send(Done("t", 1.0, 2.0), [b"x" * 100_001, shared(b"y" * 9), large])
    received = manager.receive_shared()
    assert received is not None
    [_, _, last] = cut(received[1], [100_001, 9, 100_000])
    assert isinstance(last, SharedBytes)
    assert last.start % 64 == 0
    assert bytes(last.view()) == large


def test_a_header_of_any_length_arrives(ends: tuple[Channel, Channel]) -> None:
    manager, worker = ends
    inputs = tuple([InputOrder((0, number), (2,)) for number in range(50_000)])
    run = Run((Order("t", 1, "h", 3, call=CallOrder(inputs)),))
    manager.order(run, [b"abc", b"xy" * 50_000, shared(b"z" * 10)])
    received = worker.receive()
    assert received is not None
    packet, body = received
    assert packet == run
    assert bytes(body[:3]) == b"abc"
    assert bytes(body[100_003:100_013]) == b"z" * 10
    worker.send(Done("t", 1.0, 2.0, {"code": "X", "traceback": "x" * 500_000}))
    answer = manager.receive_shared()
    assert answer is not None
    assert answer[1] == b""


def test_a_part_that_is_split_is_refused() -> None:
    body = FrameList([b"ab", shared(b"cd")])
    assert body[1:2] == b"b"
    for start, size in ((1, 2), (3, 2), (4, 1)):
        with pytest.raises(ValueError, match="not in one frame"):
            body.frame(start, size)
    for sizes in ([5], [-1, 2]):
        with pytest.raises(ValueError, match="parts of"):
            cut(body, sizes)


def test_a_file_on_a_disk_is_passed_on(ends: tuple[Channel, Channel], tmp_path: Path) -> None:
    manager, worker = ends
    descriptor = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    os.write(descriptor, b"x" * 100_000)
    worker.send(Done("t", 1.0, 2.0, parts=(100_000,)), [SharedBytes(MemoryFile(descriptor), 0, 100_000)])
    received = manager.receive_shared()
    assert received is not None
    body = received[1]
    assert isinstance(body, SharedBytes)
    assert not body.memory.is_sealed
    manager.order(Run((Order("u", 1, "h", 0),)), [body])
    os.truncate(body.memory.descriptor, 10)
    with pytest.raises(MALFORMED, match="incomplete"):
        worker.receive()


@pytest.mark.parametrize("seed", range(200))
def test_forged_packets_with_descriptors_are_malformed(ends: tuple[Channel, Channel], seed: int) -> None:
    """Whatever a task writes to its worker's socket: the manager gets an error that it expects, or a body of files that
    are as long as it says."""
    manager, worker = ends
    random_ = random.Random(seed)
    worker.send(Done("t", 1.0, 2.0), [b"x" * random_.choice([10, 70_000]), shared(b"abc"), b"y"])
    size, received, _, _ = manager.socket.recvmsg_into([manager._buffer], 4096)
    packet = bytearray(manager._buffer[:size])
    for _ in range(random_.randint(1, 4)):
        packet[random_.randrange(size)] = random_.choice([0, 1, 2, 255, random_.randrange(256)])
    worker.socket.sendmsg([packet[: random_.choice([size, random_.randrange(1, size)])]], received)
    for _, _, data in received:
        for at in range(0, len(data), 4):
            os.close(int.from_bytes(data[at : at + 4], "little"))
    try:
        answer = manager.receive_shared()
    except MALFORMED:
        return
    assert answer is not None
    assert all(part.is_complete for part in ranges_of(answer[1]))


def memory_of(data: bytes, *, flags: int = 0) -> int:
    memory = os.memfd_create("forged", os.MFD_ALLOW_SEALING | flags)
    if data:
        os.write(memory, data)
    return memory


def unreadable(kind: str, directory: Path) -> int:
    """A descriptor that cannot be read as a memory file, or only after a long time."""
    match kind:
        case "pipe":
            return os.pipe()[0]
        case "directory":
            return os.open(directory, os.O_RDONLY)
        case "slow":
            return os.open("/proc/self/smaps", os.O_RDONLY)
        case "file":
            (directory / "file").write_bytes(b"x" * 1000)
            return os.open(directory / "file", os.O_RDWR)
    memory = memory_of(b"" if kind == "short" else b"x" * 1000)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return memory if kind == "short" else os.open(f"/proc/self/fd/{memory}", getattr(os, kind))


KINDS = ["pipe", "directory", "slow", "file", "short", "O_WRONLY", "O_PATH"]


@pytest.mark.parametrize("kind", KINDS)
def test_headers_in_unreadable_files_are_malformed(ends: tuple[Channel, Channel], tmp_path: Path, kind: str) -> None:
    manager, worker = ends
    packet = struct.pack("<IIIiQQ", 0, 500, 1, 0, 0, 500)
    file = MemoryFile(unreadable(kind, tmp_path))
    worker.socket.sendmsg([packet], ancillary([file]))
    with pytest.raises(MALFORMED, match=r"header|incomplete"):
        manager.receive_shared()


def test_bytes_are_read_however_large_their_file_is() -> None:
    """A file without end cannot be mapped as a whole, and memory in large pages may not be there."""
    memory = memory_of(b"x" * 10_000)
    os.ftruncate(memory, 2**62)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    frame = SharedBytes(MemoryFile(memory), 5_000, 5_000)
    assert frame.is_complete
    assert copy_of(frame) == bytes(frame.view()) == bytes(FrameList([b"a", frame])[1:5_001]) == b"x" * 5_000
    assert copy_of(SharedBytes(frame.memory, 2**61, 3)) == bytes(3)


@pytest.mark.parametrize("segments", [[(0, 2**63, 1)], [(0, 0, 2**63)], [(0, 0, 2**62)] * 2])
def test_forged_lengths_that_no_file_has_are_malformed(segments: list[tuple[int, int, int]]) -> None:
    table = struct.pack("<I", len(segments)) + b"".join(struct.pack("<iQQ", *each) for each in segments)
    with pytest.raises(ValueError, match="segment of"):
        unpack(memoryview(table), [MemoryFile.of([b"x"])])
