"""Direct edges between workers: values, memory that is used again, and what ends in the middle. Real processes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import multiprocessing
import os
import random
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from farcall_common.payload import Serializer
from farcall_endpoint.contracts.manager_worker import ITSELF, Delivery
from farcall_endpoint.host.shared_memory import MemoryFile, ancillary
from farcall_endpoint.worker.arenas import LEDGER_BYTES, SLOTS, Arenas, Ledger, Place, Placed, new_ledger
from farcall_endpoint.worker.edges import Edge, Edges, Incoming, Key, Value, edge_pair
from tests.waiting import wait_until

MIB: Final = 2**20
SERIALIZER: Final = Serializer()


def digest(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}:{digest(part)}" for name, part in value.items())
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{hashlib.sha256(value.tobytes()).hexdigest()}"
    return hashlib.sha256(repr(value).encode()).hexdigest()


class Reader:
    """What a reader's process does, order by order."""

    def __init__(self, edges: Edges) -> None:
        self.edges = edges
        self.held: dict[str, Any] = {}

    def take(self, key: Key) -> str | None:
        """Hold a value, and say what it is."""
        found = self.edges.wait([key])
        if found is None:
            return None
        self.held[key[0]] = SERIALIZER.deserialize(found.pop())
        return digest(self.held[key[0]])

    def look(self, name: str) -> str:
        return digest(self.held[name])

    def change(self, name: str) -> None:
        self.held[name][:] = 0

    def drop(self, *names: str) -> None:
        for name in names:
            del self.held[name]

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    def fork(self) -> int:
        """A child that has all values which this process holds, and changes nothing."""
        if pid := os.fork():
            return pid
        self.held.clear()  # a child returns nothing
        signal.pause()
        os._exit(0)

    def reap(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class Process:
    """A reader's process, as the test sees it."""

    def __init__(self) -> None:
        (here, ledger), (there, _) = edge_pair()
        self._orders, orders = multiprocessing.Pipe()
        self._manager, manager = socket.socketpair()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=self._serve, args=(here, there, ledger, orders, manager))
        self.process.start()
        for end in (there, orders, manager):
            end.close()
        self.edge = Edge(here, ledger, first=True)

    def _serve(
        self, other: socket.socket, end: socket.socket, ledger: MemoryFile, orders: Connection, manager: socket.socket
    ) -> None:
        for inherited in (other, self._orders, self._manager):
            inherited.close()
        edges = Edges(manager.fileno())
        edges.add(0, Edge(end, ledger, first=False))
        reader = Reader(edges)
        with contextlib.suppress(EOFError):
            while True:
                name, arguments = orders.recv()
                orders.send(getattr(reader, name)(*arguments))

    def ask(self, order: Callable[..., Any], *arguments: Any) -> Any:
        self.order(order, *arguments)
        return self._orders.recv()

    def order(self, order: Callable[..., Any], *arguments: Any) -> None:
        self._orders.send((order.__name__, arguments))

    def answer(self) -> Any:
        return self._orders.recv()

    def say(self) -> None:
        """As the manager."""
        self._manager.send(b"x")

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def close(self) -> None:
        self._orders.close()
        self._manager.close()
        self.process.join()
        self.edge.close()


@pytest.fixture
def reader() -> Iterator[Process]:
    process = Process()
    yield process
    process.close()


@pytest.fixture
def edges(reader: Process) -> Iterator[Edges]:
    """The writer's, with the reader as number 0."""
    silent, _other = socket.socketpair()
    found = Edges(silent.fileno())
    found.add(0, reader.edge)
    yield found
    silent.close()
    _other.close()


def send(edges: Edges, values: list[Any], *names: str, stays_as: str = "") -> list[int]:
    """Send the only value of a list, which is empty then; which deliveries failed. With ``stays_as``, it also stays
    with the writer."""
    pieces = SERIALIZER.edge_pieces(values.pop())
    value = edges.outgoing(pieces)
    del pieces
    if isinstance(value, Placed):
        value = edges.arenas.settle(value)
    itself = [Delivery(ITSELF, stays_as, 0)] if stays_as else []
    failed = edges.deliver(value, [*[Delivery(0, name, 0) for name in names], *itself])
    edges.arenas.end_task()
    return failed


def stayed(edges: Edges, name: str) -> Incoming:
    """The value that stays with the writer."""
    found = edges.wait([(name, 0)])
    assert found is not None
    return found[0]


def written(edges: Edges, size: int, number: int) -> np.ndarray[Any, Any]:
    array = np.frombuffer(edges.arenas.buffer(size), np.uint8)
    array[:] = number % 251
    return array


def arenas_made(edges: Edges) -> int:
    return next(edges.arenas._numbers)


@pytest.mark.parametrize("size", [0, 1, 1000, 32_768, 65_535, 65_536, 65_537, MIB, 10_000_000])
def test_values_of_all_sizes_arrive_as_they_were(edges: Edges, reader: Process, size: int) -> None:
    array = np.random.default_rng(size).integers(0, 255, size, np.uint8)
    values: list[Any] = [
        array,
        array.tobytes(),
        {"a": array, "b": [1, "x"], "c": array[::-1].astype(np.float32)},
        array.tobytes().hex(),
        written(edges, size, 7) if size else None,
        {"in place": written(edges, size, 8), "small": 3} if size else None,
        {"first": array[: size // 2], "in place": written(edges, size, 9), "last": array} if size else None,
    ]
    for number, value in enumerate(values):
        expected = digest(value)
        assert send(edges, [value], str(number)) == []
        assert reader.ask(Reader.take, (str(number), 0)) == expected


@pytest.mark.parametrize("in_place", [False, True])
def test_arenas_are_used_again(edges: Edges, reader: Process, in_place: bool) -> None:
    """Neither descriptors nor memory grow with the number of values."""
    descriptors: list[tuple[int, int]] = []
    for number in range(500):
        values: list[Any] = [written(edges, 200_000, number) if in_place else np.full(200_000, number % 251, np.uint8)]
        expected = digest(values[0])
        assert send(edges, values, "x") == []
        assert reader.ask(Reader.take, ("x", 0)) == expected
        reader.ask(Reader.drop, "x")
        descriptors.append((len(list(Path("/proc/self/fd").iterdir())), reader.ask(Reader.descriptors)))
    assert descriptors[-1] == descriptors[10]
    assert arenas_made(edges) <= 2


def test_in_place_values_are_not_copied(edges: Edges) -> None:
    array = written(edges, MIB, 1)
    value = edges.outgoing(SERIALIZER.edge_pieces({"nested": [array]}))
    assert isinstance(value, Placed)
    assert value.in_place
    del array
    assert edges.arenas.settle(value) is value


def test_a_part_of_a_buffer_is_copied_unless_it_is_the_beginning(edges: Edges) -> None:
    array = written(edges, MIB, 1)
    for part, in_place in ((array[:-1000], True), (array[1000:], False)):
        value = edges.outgoing(SERIALIZER.edge_pieces(part))
        assert isinstance(value, Placed)
        assert value.in_place == in_place
    # Other bytes behind it would destroy what the function has there.
    value = edges.outgoing(SERIALIZER.edge_pieces([array[:-200_000], np.zeros(100_000, np.uint8)]))
    assert isinstance(value, Placed)
    assert not value.in_place


def test_nothing_changes_under_a_value_that_is_held(edges: Edges, reader: Process) -> None:
    """The reader holds some values for a while and changes some of them, in any order."""
    choice = random.Random(7)
    expected: dict[str, str] = {}
    for number in range(300):
        size = choice.choice([70_000, 200_000, MIB])
        value = written(edges, size, number) if choice.random() < 0.5 else np.full(size, number % 251, np.uint8)
        name = str(number)
        expected[name] = digest(value)
        values: list[Any] = [value]
        del value
        assert send(edges, values, name) == []
        assert reader.ask(Reader.take, (name, 0)) == expected[name]
        if choice.random() < 0.2:
            reader.ask(Reader.change, name)
            expected[name] = reader.ask(Reader.look, name)
        for other in [each for each in expected if choice.random() < 0.3]:
            assert reader.ask(Reader.look, other) == expected.pop(other)
            reader.ask(Reader.drop, other)
    assert arenas_made(edges) < 60


def test_a_value_that_the_function_keeps_is_copied(edges: Edges, reader: Process) -> None:
    kept = written(edges, MIB, 1)
    expected = digest(kept)
    assert send(edges, [kept], "x") == []
    kept[:] = 2
    assert reader.ask(Reader.take, ("x", 0)) == expected
    # Its memory is not used again before it is gone.
    for number in range(20):
        assert send(edges, [written(edges, MIB, number)], "y") == []
        reader.ask(Reader.take, ("y", 0))
        reader.ask(Reader.drop, "y")
        assert kept[0] == kept[-1] == 2


def test_two_calls_that_get_the_same_value_do_not_see_each_others_changes(edges: Edges, reader: Process) -> None:
    value = np.full(MIB, 5, np.uint8)
    expected = digest(value)
    assert send(edges, [value], "x", "y") == []
    assert reader.ask(Reader.take, ("x", 0)) == expected
    reader.ask(Reader.change, "x")
    assert reader.ask(Reader.take, ("y", 0)) == expected
    reader.ask(Reader.drop, "x")
    assert reader.ask(Reader.look, "y") == expected
    reader.ask(Reader.drop, "y")
    for _ in range(5):
        assert send(edges, [np.full(MIB, 6, np.uint8)], "x") == []
        assert reader.ask(Reader.take, ("x", 0)) == digest(np.full(MIB, 6, np.uint8))
        reader.ask(Reader.drop, "x")
    assert arenas_made(edges) == 1


@pytest.mark.parametrize("in_place", [False, True])
def test_a_value_that_stays_in_its_worker_is_read_where_it_was_written(
    edges: Edges, reader: Process, in_place: bool
) -> None:
    for number in range(100):
        values: list[Any] = [written(edges, MIB, number) if in_place else np.full(MIB, number, np.uint8)]
        expected = digest(values[0])
        assert send(edges, values, "x", stays_as="y") == []
        view = stayed(edges, "y")
        found: Any = SERIALIZER.deserialize(view)
        assert np.shares_memory(found, np.frombuffer(view, np.uint8))
        del view
        assert digest(found) == expected
        found[:] = 255  # its own copy
        assert reader.ask(Reader.take, ("x", 0)) == expected
        reader.ask(Reader.drop, "x")
        del found
    assert arenas_made(edges) == 1


def test_a_value_that_stays_and_is_held_does_not_change(edges: Edges) -> None:
    held: list[Any] = []
    for number in range(10):
        assert send(edges, [np.full(MIB, number, np.uint8)], stays_as="x") == []
        held.append(SERIALIZER.deserialize(stayed(edges, "x")))
    assert [(each[0], each[-1]) for each in held] == [(number, number) for number in range(10)]


def test_memory_beyond_the_ledger_is_given_back(edges: Edges, reader: Process) -> None:
    """A reader may hold more values than a ledger has places; the memory of the others is not used again."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    count = SLOTS + 20
    for number in range(count):
        assert send(edges, [np.full(100_000, number, np.uint8)], str(number)) == []
        reader.ask(Reader.take, (str(number), 0))
    assert len(edges.arenas._lent) == SLOTS
    for number in range(count):
        assert reader.ask(Reader.look, str(number)) == digest(np.full(100_000, number, np.uint8))
    reader.ask(Reader.drop, *map(str, range(count)))
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 2 * SLOTS + 1


def test_memory_that_a_fork_of_the_reader_may_see_is_not_used_again(edges: Edges, reader: Process) -> None:
    assert send(edges, [np.full(MIB, 1, np.uint8)], "x") == []
    reader.ask(Reader.take, ("x", 0))
    pid = reader.ask(Reader.fork)
    reader.ask(Reader.drop, "x")
    try:
        lent = edges.arenas._lent[0]
        for number in range(5):
            assert send(edges, [np.full(MIB, number, np.uint8)], "y") == []
            reader.ask(Reader.take, ("y", 0))
            reader.ask(Reader.drop, "y")
        assert lent not in edges.arenas._idle
        assert lent not in edges.arenas._lent  # but let go
    finally:
        reader.ask(Reader.reap, pid)


def test_memory_that_a_fork_of_the_writer_may_change_is_not_used_again(edges: Edges, reader: Process) -> None:
    array = written(edges, MIB, 1)
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        [arena] = edges.arenas._taken
        values: list[Any] = [array]
        del array
        assert send(edges, values, "x") == []
        reader.ask(Reader.take, ("x", 0))
        reader.ask(Reader.drop, "x")
        assert send(edges, [written(edges, MIB, 2)], "x") == []
        assert arena not in (*edges.arenas._taken, *edges.arenas._lent, *edges.arenas._idle)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_child_of_the_writer_has_arenas_of_its_own() -> None:
    arenas = Arenas()
    arenas.buffer(MIB)
    arenas.end_task()
    [parents] = arenas._idle
    answer, told = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        buffer = arenas.buffer(MIB)
        buffer[:3] = b"new"
        told.send((parents in arenas._taken, bytes(parents.view[:3])))
        os._exit(0)
    assert answer.recv() == (False, bytes(3))
    os.waitpid(pid, 0)


def test_a_reader_that_is_killed_ends_its_edge_and_its_memory_is_not_used_again(edges: Edges, reader: Process) -> None:
    assert send(edges, [np.full(MIB, 1, np.uint8)], "x") == []
    reader.ask(Reader.take, ("x", 0))
    [lent] = edges.arenas._lent
    reader.kill()
    assert send(edges, [1], "y") == [0]
    edges.receive()
    assert edges._edges == {}
    assert send(edges, [np.full(MIB, 1, np.uint8)], "y") == [0]
    assert lent not in edges.arenas._idle
    assert len(edges.arenas._lent) == 0


def test_values_outlive_a_writer_that_ends_before_it_has_read_its_own() -> None:
    (here, ledger), (there, _) = edge_pair()
    with contextlib.closing(Edge(there, ledger, first=False)) as edge:
        with contextlib.closing(Edge(here, ledger, first=True)) as writer:
            assert writer.send(("x", 0), b"sent")
            assert edge.send(("y", 0), b"not read")
        assert edge.receive() == (("x", 0), b"sent")
        assert edge.receive() is None


def test_values_outlive_a_writer_that_is_killed(reader: Process) -> None:
    """The reader keeps waiting: the manager knows what to do."""
    pid = os.fork()
    if pid == 0:
        silent, _other = socket.socketpair()
        edges = Edges(silent.fileno())
        edges.add(0, reader.edge)
        send(edges, [np.full(MIB, 3, np.uint8)], "x")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    reader.edge.close()
    expected = digest(np.full(MIB, 3, np.uint8))
    assert reader.ask(Reader.take, ("x", 0)) == expected
    reader.order(Reader.take, ("y", 0))
    reader.say()
    assert reader.answer() is None
    assert reader.ask(Reader.look, "x") == expected


def test_a_full_socket_does_not_stop_the_writer(edges: Edges, reader: Process) -> None:
    sent = 0
    while not send(edges, [b"x" * 30_000], str(sent)):
        sent += 1
    assert sent > 0
    assert send(edges, [np.zeros(MIB)], "large") == [0]
    for number in range(sent):  # what was sent arrives
        assert reader.ask(Reader.take, (str(number), 0)) is not None
    assert send(edges, [1], "x") == []
    assert reader.ask(Reader.take, ("x", 0)) == digest(1)


def test_a_wait_ends_when_the_manager_says_something_and_nothing_is_lost(edges: Edges, reader: Process) -> None:
    reader.order(Reader.take, ("x", 0))
    reader.say()
    assert reader.answer() is None
    assert send(edges, [1], "x") == []
    wait_until(lambda: reader.ask(Reader.take, ("x", 0)) == digest(1), "the value")  # the manager's byte is not read


def test_many_small_values(edges: Edges, reader: Process) -> None:
    before = len(list(Path("/proc/self/fd").iterdir())), reader.ask(Reader.descriptors)
    for _ in range(2000):
        assert send(edges, [b"x" * 1000], "x") == []
        reader.ask(Reader.take, ("x", 0))
    assert (len(list(Path("/proc/self/fd").iterdir())), reader.ask(Reader.descriptors)) == before


def test_idle_memory_has_a_limit() -> None:
    arenas = Arenas(idle_bytes=3 * MIB)
    buffers = [arenas.buffer(MIB) for _ in range(4)]
    del buffers
    arenas.end_task()
    assert len(arenas._idle) == 2
    assert arenas._idle_bytes <= 3 * MIB


# -- what a hostile task may send --------------------------------------------------------------------------------------


def forged(*, arena: int = 0, start: int = 4096, size: int = 10, file: MemoryFile | None = None) -> bool:
    """Whether an edge accepts a message; it closes otherwise."""
    (here, ledger), (there, _) = edge_pair()
    with here, contextlib.closing(Edge(there, ledger, first=False)) as edge:
        header = msgspec.msgpack.encode(Value("x", 0, Place(arena, 0, start, size)))
        here.sendmsg([struct.pack("<I", len(header)), header], ancillary([] if file is None else [file]))
        return edge.receive() is not None


def memory(size: int, *, sealed: bool = True) -> MemoryFile:
    file = MemoryFile(os.memfd_create("x", os.MFD_ALLOW_SEALING))
    os.ftruncate(file.descriptor, size)
    if sealed:
        fcntl.fcntl(file.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return file


def test_forged_places_are_refused() -> None:
    assert forged(file=memory(MIB))
    assert not forged()
    assert not forged(file=memory(MIB, sealed=False))
    assert not forged(file=memory(0))
    assert not forged(file=memory(MIB), size=MIB)
    assert not forged(file=memory(MIB), start=-1)
    assert not forged(file=memory(MIB), size=-1)
    assert not forged(file=memory(MIB), start=2**63)


@pytest.mark.parametrize("garbage", [b"x", b"\xff\xff\xff\xff", b"\1\0\0\0\x90", struct.pack("<I", 9) + b"x" * 9])
def test_garbage_closes_the_edge(garbage: bytes) -> None:
    (here, ledger), (there, _) = edge_pair()
    with here, contextlib.closing(Edge(there, ledger, first=False)) as edge:
        here.send(garbage)
        assert edge.receive() is None


def test_a_ledger_cannot_shrink() -> None:
    Ledger(new_ledger(), first=True)
    for other in (memory(LEDGER_BYTES, sealed=False), memory(LEDGER_BYTES + 1)):
        with pytest.raises(ValueError, match="not a ledger"):
            Ledger(other, first=True)
