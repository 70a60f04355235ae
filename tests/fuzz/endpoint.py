"""Targets of an endpoint, with real sockets: a worker's channel to its manager, and the servers of copies and blocks.

Whatever a peer sends, another one is served afterwards."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import hmac
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from farcall_common.objects import block_files, node_blocks
from farcall_common.objects.node_blocks import NodeBlocks, OneNode
from farcall_endpoint.contracts import bodies, manager_worker
from farcall_endpoint.contracts.agent_manager import BlocksWanted, FileContent
from farcall_endpoint.contracts.manager_worker import MALFORMED, Packet, channel_pair
from farcall_endpoint.graphs.values import GraphSettings
from farcall_endpoint.host.memory_directories import MemoryDirectories
from farcall_endpoint.host.shared_memory import Body, MemoryFile, SharedBytes, ancillary
from farcall_endpoint.manager.core.actions import ServeBlocks
from farcall_endpoint.manager.core.events import BlocksServed, Event, MalformedReceived, PacketsReceived
from farcall_endpoint.manager.shell.block_server import BlockServer
from farcall_endpoint.manager.shell.file_server import Answered, FileClient, FileServer, Range, Wanted
from farcall_endpoint.manager.shell.service import _check_files
from tests.fuzz.frames import unpack
from tests.support.manager import Rig
from tests.waiting import WAIT_S, wait_until

_encode: Final = msgspec.msgpack.Encoder().encode
_LENGTH: Final = struct.Struct("<I")
_MOST_PACKETS: Final = 12
_DATA: Final = b"0123456789" * 10_000
_KEY: Final = b"k" * 32
_PLACE: Final = "127.0.0.1:00000"
"""In place of the server's address, which has as many characters."""
_MOST_ANSWER_BYTES: Final = 2**20


# -- the channel of a worker -------------------------------------------------------------------------------------------


@functools.cache
def _files() -> list[MemoryFile]:
    """Files that go with packets: one that cannot shrink, one that can, an empty one."""
    sealed = MemoryFile.of([bytes(1000)])
    return [sealed, MemoryFile(os.memfd_create("fuzz")), MemoryFile.of([])]


def say(data: bytes) -> None:
    """Send packets from a worker to a manager's channel, and let the core handle them: another worker's task ends. The
    first byte of each packet says which files go with it."""
    rig = Rig(slots=2, graphs=GraphSettings(memory_bytes=1000, disk_bytes=1000, files=2))
    rig.jobs("a", "b")
    rig.start_all()
    for worker in (0, 1):
        rig.read(worker)
    manager_end, worker_end, claims = channel_pair()
    with contextlib.closing(manager_end), worker_end, claims:
        worker_end.setblocking(False)
        received: list[tuple[Packet, Body]] = []
        events: list[Event] = [PacketsReceived(0, received)]
        try:
            for part in list(unpack(data))[:_MOST_PACKETS]:
                chosen = [each for number, each in enumerate(_files()) if part[:1] and part[0] >> number & 1]
                with contextlib.suppress(BlockingIOError):
                    worker_end.sendmsg([part[1:]], ancillary(chosen))
                with contextlib.suppress(BlockingIOError):
                    while part[1:] and (found := manager_end.receive_shared()) is not None:
                        _check_files(*found)
                        received.append(found)
        except MALFORMED as error:
            events.append(MalformedReceived(0, str(error)))
        rig.handle(*events)
    rig.done(1)
    assert "b" in {each.task_id for each in rig.progress().finished}


def _packets() -> Iterator[list[bytes]]:
    packets: list[Packet] = [
        manager_worker.Ready(1),
        manager_worker.Begun("a", {1: 2, 3: 4}),
        manager_worker.Done(
            "a", 0.0, 1.0, {"code": "X", "message": "m"}, {"os": "linux"}, None, False, (1, 2), (0,), (1, 2)
        ),
        manager_worker.Done("a", 0.0, 1.0),
        manager_worker.Synced(),
        manager_worker.NewModules(("json", "os")),
        manager_worker.Calls(
            "a", (manager_worker.Call(1, "h", 4, "f"), manager_worker.Call(2, "unknown", 2)), (("h2", 1),)
        ),
        manager_worker.Waits("a"),
        manager_worker.Waits("a", over=True),
        manager_worker.DropCalls("a", (1, 2)),
        manager_worker.Progressed("a", 1, 2.5, "half"),
        manager_worker.ValkeyRequest("a", 7),
        manager_worker.BlocksRequest("a", 7, "127.0.0.1:1:proof", (("job/a", 0, 10), ("job/b", 5, 9))),
        manager_worker.BlocksRequest("a", 8, "", (), "job/"),
        manager_worker.BlocksAnswer(7),
        manager_worker.CallEnded(1),
        manager_worker.Peer(1, first=True),
        manager_worker.Sync(),
        manager_worker.Run(()),
    ]
    headers = [_LENGTH.pack(len(header)) + header for header in map(_encode, packets)]
    table, _ = bodies.pack([SharedBytes(_files()[0], 10, 500), b"inline"], inline=True)
    for header in headers:
        yield [b"\0" + header + b"body"]
        yield [b"\1" + header + b"".join(table)]
        yield [b"\7" + header]
    yield [b"\0" + header for header in headers[:_MOST_PACKETS]]
    long, _ = bodies.pack([SharedBytes(_files()[0], 0, 100)], inline=True)
    yield [b"\1" + struct.pack("<II", 0, 50) + b"".join(long)]


# -- servers of nodes --------------------------------------------------------------------------------------------------


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="farcall-fuzz-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def _file_server() -> str:
    path = _root() / "copy"
    path.write_bytes(_DATA)

    def read(wanted: Wanted) -> Answered:
        if wanted != _content():
            raise KeyError(wanted)
        with path.open("rb", buffering=0) as file:
            yield Range(file, 0, len(_DATA))

    server = FileServer("127.0.0.1", read=read)
    server.start(_KEY)
    atexit.register(server.close)
    return server.address


def _content() -> FileContent:
    return FileContent("", hashlib.sha256(_DATA).hexdigest(), len(_DATA))


@functools.cache
def _directories() -> tuple[MemoryDirectories, Path]:
    directories = MemoryDirectories(_root(), b"memory")
    return directories, Path(directories.of("")) / block_files.DIRECTORY


def _blocks() -> NodeBlocks:
    node_blocks._RESERVED_PART = 2**40  # type: ignore[misc]  # of a disk that may be nearly full
    return NodeBlocks(OneNode(_directories()[1]))


@functools.cache
def _block_server() -> str:
    directories, directory = _directories()
    _blocks().create("job/a", [_DATA])
    (directory / block_files.file_name("job/link")).symlink_to("/etc/passwd")
    with (directory / block_files.file_name("job/sparse")).open("wb") as file:
        file.truncate(2**40)
    server = BlockServer(directories, host=lambda: "127.0.0.1")
    server.set_key(_KEY)
    server.perform(ServeBlocks(0, "", manager_worker.BlocksRequest("a", 1), ""))
    events: list[BlocksServed] = []

    def answered() -> bool:
        events.extend(server.events())
        return bool(events)

    wait_until(answered, "the address of the server")
    atexit.register(server.close)
    return events[0].packet.address.rpartition(":")[0]


def _wanted_blocks() -> BlocksWanted:
    _blocks().create("job/a", [_DATA])  # unless a request has deleted it, there is one
    return BlocksWanted("", (("job/a", 5, 105), ("job/a", 0, 1000)))


def ask(data: bytes, *, address: Callable[[], str], wanted: Callable[[], Wanted], expected: bytes) -> None:
    """Send a server of a node anything, with the first byte 0 behind a correct proof: an honest manager gets what it
    wants, and no answer is without end."""
    host, _, port = address().rpartition(":")
    sent = data[1:].replace(_PLACE.encode(), address().encode())
    connection = socket.create_connection((host, int(port)), timeout=WAIT_S)
    with connection, contextlib.suppress(OSError):  # it may be closed before
        challenge = connection.recv(32, socket.MSG_WAITALL)
        if data[:1] == b"\0":
            proof = hmac.digest(_KEY, challenge + sent, "sha256")
            sent = min(len(sent), 0xFFFF).to_bytes(2) + sent + proof
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        answered = 0
        while piece := connection.recv(2**16):
            answered += len(piece)
            assert answered < _MOST_ANSWER_BYTES
    client = FileClient()
    client.set_key(_KEY)
    assert b"".join(map(bytes, client.read(wanted(), address()))) == expected


def _requests() -> Iterator[list[bytes]]:
    """Requests as managers send them: whole, and with what no server has."""
    for blocks in (
        _wanted_blocks(),
        BlocksWanted("bob", (("job/a", 0, 1),)),
        BlocksWanted("", (("../job/a", 0, 10), ("job/link", 0, 10))),
        BlocksWanted("", (("job/sparse", 0, 2**39),)),
        BlocksWanted("", (("job/a", 10, 5), ("job/a", -5, 2**62))),
        BlocksWanted("", (), "other/"),
    ):
        yield [b"\0" + _encode([_PLACE, None, blocks, b"nonce"])]
    for content in (_content(), FileContent("ann", "x", 5), FileContent("", "", -1)):
        yield [b"\0" + _encode([_PLACE, content])]
    yield [b"\0" + _encode(["127.0.0.1:1", _content(), None])]
    yield [b"\1\x00\x05hello" + bytes(32)]
    yield [b"\1GET / HTTP/1.1\r\n\r\n"]


_HONEST: Final[Mapping[str, Callable[[bytes], None]]] = {
    "files": functools.partial(ask, address=_file_server, wanted=_content, expected=_DATA),
    "blocks": functools.partial(
        ask, address=_block_server, wanted=_wanted_blocks, expected=_DATA[5:105] + _DATA[:1000]
    ),
}
TARGETS: Final[Mapping[str, Callable[[bytes], None]]] = {"channel": say, **_HONEST}


def seeds(name: str) -> list[list[bytes]]:
    """First inputs of the fuzzer. Packets of the channel are frames."""
    return list(_packets() if name == "channel" else _requests())
