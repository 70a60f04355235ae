"""Requests that a task can send its manager: each one, forged to take as much of the manager's memory as it can. The
manager stays small, and serves other tasks."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farcall_endpoint.contracts import manager_worker
from tests.support.endpoint.fake_agent import FakeAgent, connected_agent

MOST_BYTES = 256 * 2**20
"""Growth of a manager, whatever one task says. A few packets are read at a time, each with up to 64 KiB of its own."""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    with connected_agent(tmp_path) as agent:
        yield agent


def seven() -> int:
    return 7


def send_without_end(kind: str) -> None:
    """Send packets of a kind, from four processes, until the worker is ended; or 4,000 of them."""
    import gc
    import os

    from farcall_endpoint.contracts import manager_worker

    [end] = [each for each in gc.get_objects() if isinstance(each, manager_worker.Channel)]
    body = b"x" * 60_000
    long = "x" * 60_000
    packet: Any = {
        "Run": manager_worker.Run(()),
        "Sync": manager_worker.Sync(),
        "Ready": manager_worker.Ready(1),
        "Begun": manager_worker.Begun("a", {}),
        "Done": manager_worker.Done("unknown", 0.0, 1.0, parts=(1,) * 10),
        "Synced": manager_worker.Synced(),
        "NewModules": manager_worker.NewModules((long,)),
        "Calls": manager_worker.Calls("a", (manager_worker.Call(1, "unknown", 60_000),)),
        "Waits": manager_worker.Waits("a"),
        "DropCalls": manager_worker.DropCalls("a", (1, 2, 3)),
        "CallEnded": manager_worker.CallEnded(1),
        "Peer": manager_worker.Peer(1, first=True),
        "Progressed": manager_worker.Progressed("a", 1, 2, long),
        "ValkeyRequest": manager_worker.ValkeyRequest("a", 1),
        "ValkeyAnswer": manager_worker.ValkeyAnswer(1),
        "BlocksRequest": manager_worker.BlocksRequest("a", 1, "", (("x", 0, 2**26),)),
        "BlocksAnswer": manager_worker.BlocksAnswer(1),
    }[kind]
    room = () if kind in ("NewModules", "Progressed") else (body,)
    children = []
    for _ in range(3):  # together they write faster than one process reads
        if (child := os.fork()) == 0:
            try:
                for _ in range(4_000):
                    end.send(packet, room)
            finally:
                os._exit(0)  # it must not take tasks as its parent does
        children.append(child)
    for _ in range(4_000):
        end.send(packet, room)
    for child in children:
        os.waitpid(child, 0)


def send_long_header(kind: str) -> None:
    """Send a packet whose header has millions of items, each of one byte: in memory they take many times that."""
    import gc
    import signal
    import struct

    from farcall_endpoint.contracts import bodies, manager_worker
    from farcall_endpoint.host.shared_memory import MemoryFile, SharedBytes, ancillary

    [end] = [each for each in gc.get_objects() if isinstance(each, manager_worker.Channel)]

    def text(value: str) -> bytes:
        return bytes([0xA0 + len(value)]) + value.encode()

    row = b"\xdd" + struct.pack(">I", 30 * 2**20)
    begin, item = {
        "NewModules": (b"\x92" + text("NewModules") + row, b"\xa0"),
        "DropCalls": (b"\x93" + text("DropCalls") + text("a") + row, b"\x01"),
        "Done": (b"\x9a" + text("Done") + text("a") + b"\x01\x01\xc0\xc0\xc0\xc2" + row, b"\x01"),
        "Begun": (b"\x93" + text("Begun") + text("a") + b"\xdf" + struct.pack(">I", 2**21), b""),
    }[kind]
    items = item * (30 * 2**20) or b"".join(b"\xce" + struct.pack(">I", each) + b"\x01" for each in range(2**21))
    memory = MemoryFile.of([begin, items])
    length = len(begin) + len(items)
    packed, memories = bodies.pack([SharedBytes(memory, 0, length)], inline=True)
    end.socket.sendmsg([struct.pack("<II", 0, length), *packed], ancillary(memories))
    signal.pause()


def send_large_headers(kind: str) -> None:
    """Send packets without end whose headers are in files: each takes many times its length in memory."""
    import gc
    import signal

    from farcall_endpoint.contracts import manager_worker

    [end] = [each for each in gc.get_objects() if isinstance(each, manager_worker.Channel)]
    packet: Any = {
        "Done": manager_worker.Done("unknown", 0.0, 1.0, parts=tuple(range(2**32, 2**32 + 900_000))),
        "DropCalls": manager_worker.DropCalls("a", tuple(range(2**32, 2**32 + 100_000))),
        "Begun": manager_worker.Begun("a", {number: number for number in range(2**32, 2**32 + 100_000)}),
    }[kind]
    for _ in range(50):
        end.send(packet)
    signal.pause()


def peak_bytes(agent: FakeAgent) -> int:
    status = Path(f"/proc/{agent.manager.pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


KINDS = [each.__name__ for each in typing.get_args(manager_worker.Packet)]
HOSTILE: list[tuple[Callable[[str], None], str]] = [
    *((send_without_end, kind) for kind in KINDS),
    *((send_long_header, kind) for kind in ("NewModules", "DropCalls", "Done", "Begun")),
    *((send_large_headers, kind) for kind in ("Done", "DropCalls", "Begun")),
]


@pytest.mark.parametrize(("hostile", "kind"), HOSTILE)
def test_no_request_of_a_task_fills_its_manager(agent: FakeAgent, hostile: Callable[[str], None], kind: str) -> None:
    agent.run("first", seven)
    assert agent.value("first") == 7
    before = peak_bytes(agent)
    agent.run("a", hostile, kind)
    agent.listen(lambda: "a" in agent.finished or any(each.died for each in agent.progress))
    agent.run("good", seven)
    assert agent.value("good") == 7
    grown = peak_bytes(agent) - before
    assert grown < MOST_BYTES
