"""Blocks that managers read for tasks: memory of the manager, proofs of servers, and seals."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farcall_common.errors import ObjectDamaged
from farcall_common.objects import block_files, node_blocks
from farcall_common.objects.blocks import Part
from farcall_common.objects.node_blocks import MOST_BYTES, NodeBlocks, OneNode
from farcall_endpoint.contracts.manager_worker import BlocksRequest
from farcall_endpoint.host.memory_directories import MemoryDirectories
from farcall_endpoint.host.shared_memory import FrameList, MemoryFile, SharedBytes
from farcall_endpoint.manager.core.actions import ServeBlocks
from farcall_endpoint.manager.core.events import BlocksServed
from farcall_endpoint.manager.shell import block_server
from farcall_endpoint.manager.shell.block_server import BlockServer
from tests.waiting import WAIT_S, wait_until

KEY = b"k" * 32
DATA = os.urandom(300_000)


@pytest.fixture(autouse=True)
def _no_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a node is a directory on a disk here, which may be nearly full."""
    monkeypatch.setattr(node_blocks, "_RESERVED_PART", 2**40)


class Node:
    """The blocks of a node, and what tasks of its only submitter write there."""

    def __init__(self, path: Path, *, is_sealed: bool = False, key: bytes = KEY) -> None:
        path.mkdir()
        directories = MemoryDirectories(path, path.name.encode(), is_sealed=is_sealed)
        self.directory = Path(directories.of("")) / block_files.DIRECTORY
        memory = OneNode(self.directory)
        memory.key = directories.block_key("").encode()
        self.blocks = NodeBlocks(memory)
        self.server = BlockServer(directories, host=lambda: "127.0.0.1")
        self.server.set_key(key)

    def ask(self, node: str = "", *parts: tuple[str, int, int]) -> BlocksServed:
        self.server.perform(ServeBlocks(0, "", BlocksRequest("a", 1, node, parts), ""))
        return self.answer()

    def answer(self) -> BlocksServed:
        events: list[BlocksServed] = []

        def answered() -> bool:
            events.extend(self.server.events())
            return bool(events)

        wait_until(answered, "an answer")
        return events[0]

    def address(self) -> str:
        return self.ask().packet.address

    def file(self, name: str) -> Path:
        return self.directory / block_files.file_name(name)


Make = Callable[..., Node]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with contextlib.ExitStack() as stack:

        def made(name: str, **given: Any) -> Node:
            node = Node(tmp_path / name, **given)
            stack.callback(node.server.close)
            return node

        yield made


def content(event: BlocksServed) -> bytes:
    assert event.packet.error is None, event.packet.error
    body = FrameList(event.body)
    return b"".join(bytes(each.view() if isinstance(each, SharedBytes) else each) for each in body.frames if each)


@pytest.mark.parametrize("is_sealed", [False, True])
def test_blocks_of_this_node_and_of_another_one_are_read(make: Make, is_sealed: bool) -> None:
    here, there = make("here", is_sealed=is_sealed), make("there", is_sealed=is_sealed)
    for node in (here, there):
        node.blocks.create("job/a", [DATA[:100], memoryview(DATA)[100:]])
        node.blocks.create("job/b", [b"small"])
        node.blocks.create("job/empty", [])
    parts = (("job/a", 70_000, 290_000), ("job/b", 1, 5), ("job/a", 65_536, 131_072), ("job/empty", 0, 0))
    wanted = DATA[70_000:290_000] + b"mall" + DATA[65_536:131_072]
    for address in ("", there.address()):
        assert content(here.ask(address, *parts)) == wanted
        assert content(here.ask(address, parts[1])) == b"mall"
        for missing in (("job/none", 0, 1), ("job/a", 0, len(DATA) + 1), ("job/a", 2**62, 2**62 + 1)):
            error = here.ask(address, missing).packet.error
            assert error is not None
            assert error["code"] == "OBJECT_GONE"


# -- memory of the manager ---------------------------------------------------------------------------------------------


def test_blocks_of_this_node_take_no_memory_of_the_manager(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    node = make("here")
    node.blocks.create("job/a", [DATA])

    def refuse(_parts: object) -> MemoryFile:
        raise AssertionError("copied")

    monkeypatch.setattr(MemoryFile, "of", refuse)
    [frame] = node.ask("", ("job/a", 1_000, 200_000)).body
    assert isinstance(frame, SharedBytes)
    assert os.path.samestat(os.fstat(frame.memory.descriptor), node.file("job/a").stat())
    assert bytes(frame.view()) == DATA[1_000:200_000]


def test_sparse_file_is_not_a_block(make: Make) -> None:
    here, there = make("here"), make("there")
    for node in (here, there):
        node.blocks.create("job/a", [b"x"])
        with node.file("job/a").open("r+b") as file:
            file.truncate(3 * 2**30)
    for address in ("", there.address()):
        error = here.ask(address, ("job/a", 0, MOST_BYTES)).packet.error
        assert error is not None
        assert error["code"] == "OBJECT_GONE"
        assert content(here.ask(address, ("job/a", 0, 1))) == b"x", "bytes that exist are read"


def test_large_parts_are_read_in_requests_of_limited_size(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_blocks, "MOST_BYTES", 100_000)
    here, there = make("here"), make("there")
    there.blocks.create("job/a", [DATA])
    address = there.address()
    sizes: list[int] = []

    class Fetching(OneNode):
        def address(self) -> str:
            return "here"

        def fetch(self, node: str, parts: Any) -> list[memoryview]:
            sizes.append(sum(end - start for _, start, end in parts))
            return [memoryview(content(here.ask(node, *parts)))]

    blocks = NodeBlocks(Fetching(here.directory))
    assert bytes(blocks.read(Part(f"{address}//job/a", 10, 290_010))) == DATA[10:290_010]
    assert sizes == [100_000, 100_000, 90_000]


def test_copying_stops_when_the_worker_has_ended(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that sends a little, and no end: as long as the worker lives, its manager waits for the rest."""
    node = make("here")
    monkeypatch.setattr(block_server.BlockServer, "_checked", lambda _, address: address)
    with socket.create_server(("127.0.0.1", 0)) as source:
        address = f"127.0.0.1:{source.getsockname()[1]}"
        for number in range(2):
            request = BlocksRequest("a", number, address, (("job/a", 0, MOST_BYTES),))
            node.server.perform(ServeBlocks(7, "", request, ""))
        connections = [source.accept()[0] for _ in range(2)]
        for connection in connections:
            connection.settimeout(WAIT_S)
            connection.sendall(bytes(32))
            connection.recv(4096)
            connection.sendall(MOST_BYTES.to_bytes(8) + b"x" * 1000)
        node.server.drop(7)
        sent = 0
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for connection in connections:
                stack.enter_context(connection)
            while sent < MOST_BYTES:
                sent += connections[0].send(b"x" * 2**20)
        assert sent < MOST_BYTES, "the manager has closed the connection"
    error = node.answer().packet.error
    assert error is not None
    assert error["code"] == "OBJECT_GONE"


# -- proofs of servers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proof", ["none", "another key", "another answer"])
def test_server_without_the_key_gives_no_blocks(make: Make, monkeypatch: pytest.MonkeyPatch, proof: str) -> None:
    node = make("here")
    monkeypatch.setattr(block_server.BlockServer, "_checked", lambda _, address: address)
    kept: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for _ in range(4):  # two tries for each request
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(bytes(32))
                    request = connection.recv(4096)[2:-32]
                    answer = (5).to_bytes(8) + b"false"
                    key = KEY if proof == "another answer" and not kept else b"x" * 32
                    mac = hmac.digest(key, b"answer" + bytes(32) + request + answer, "sha256")
                    kept.append(mac)
                    connection.sendall(answer + {"none": b"", "another key": mac, "another answer": kept[0]}[proof])

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if proof == "another answer":  # of a server with the key: it counts once, for this request
            assert content(node.ask(address, ("job/a", 0, 5))) == b"false"
        error = node.ask(address, ("job/a", 0, 5)).packet.error
        assert error is not None
        assert error["code"] == "OBJECT_GONE"
        while thread.is_alive():
            socket.create_connection(server.getsockname()).close()
            thread.join(0.1)


# -- seals -------------------------------------------------------------------------------------------------------------


def changed(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "a byte": lambda data: changed(data, 100_000),
    "a seal": lambda data: changed(data, 0),
    "chunks in another order": lambda data: data[65_552:131_104] + data[:65_552] + data[131_104:],
    "an end that is cut off": lambda data: data[: 2 * 65_552],
    "an end that is added": lambda data: data + bytes(65_552),
    "no seals": lambda _: DATA,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_block_is_refused(make: Make, change: str) -> None:
    here, there = make("here", is_sealed=True), make("there", is_sealed=True)
    for node in (here, there):
        node.blocks.create("job/a", [DATA])
        node.file("job/a").write_bytes(CHANGES[change](node.file("job/a").read_bytes()))
    with pytest.raises(ObjectDamaged, match="seal does not fit"):
        here.blocks.read(Part("job/a"))
    for address in ("", there.address()):
        assert here.ask(address, ("job/a", 0, len(DATA))).packet.error is not None


def test_block_of_another_name_or_submitter_is_refused(make: Make) -> None:
    here, there = make("here", is_sealed=True), make("there", is_sealed=True)
    here.blocks.create("job/a", [DATA])
    there.blocks.create("job/a", [DATA])
    here.file("job/b").write_bytes(here.file("job/a").read_bytes())
    here.file("job/c").write_bytes(b"")
    for name in ("job/b", "job/c"):
        with pytest.raises(ObjectDamaged):
            here.blocks.read(Part(name, 0, None))
    here.file("job/a").write_bytes(there.file("job/a").read_bytes())
    with pytest.raises(ObjectDamaged):
        here.blocks.read(Part("job/a"))


def test_sealed_block_that_is_read_is_a_copy(make: Make) -> None:
    node = make("here", is_sealed=True)
    node.blocks.create("job/a", [DATA])
    found = node.blocks.read(Part("job/a"))
    node.file("job/a").write_bytes(bytes(len(DATA)))
    assert bytes(found) == DATA
