"""Copies of files between two nodes: threads, sockets and disks, with readers and sources that misbehave."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farcall_endpoint.contracts.agent_manager import FileContent, NodeFile
from farcall_endpoint.manager.core.actions import Copy, FileAction, Link, RemoveCopies, Unlink
from farcall_endpoint.manager.core.events import CopyEnded, Event, Linked
from farcall_endpoint.manager.shell import file_copies, file_server
from farcall_endpoint.manager.shell.file_copies import FileCopies, address_towards
from tests.support.hung_mount import hung_mount
from tests.waiting import WAIT_S, wait_until

KEY = b"k" * 32
DATA = os.urandom(3 * 2**20 + 7)


def content(data: bytes = DATA, submitter: str = "") -> FileContent:
    return FileContent(submitter, hashlib.sha256(data).hexdigest(), len(data))


class Node:
    """The copies of a node, and the endpoint's directory."""

    def __init__(self, path: Path, *, key: bytes = KEY) -> None:
        self.working_dir = path / "work"
        self.working_dir.mkdir(exist_ok=True)
        self.copies = FileCopies(path, working_dir=self.working_dir, host="127.0.0.1")
        if key:
            self.copies.set_key(key)
        self.events: list[Event] = []

    def perform(self, *actions: FileAction) -> list[Event]:
        """Perform actions that are answered; the answers."""
        for each in actions:
            self.copies.perform(each)
        self.events = []

        def answered() -> bool:
            self.events += self.copies.events()
            return len(self.events) >= len(actions)

        wait_until(answered, "answers")
        return self.events

    def copy(self, wanted: FileContent, source: str = "", path: str = "") -> CopyEnded:
        [event] = self.perform(Copy(wanted, source, path))
        assert isinstance(event, CopyEnded)
        return event

    def staged(self, data: bytes = DATA, name: str = "task") -> str:
        """The endpoint's copy."""
        path = self.working_dir / "staged" / name / "r" / "hash" / "file"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        return str(path)

    def files(self) -> list[str]:
        return sorted(each.name for each in self.copies.root.rglob("*") if each.is_file())


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with contextlib.ExitStack() as stack:
        node = Node(tmp_path)
        stack.callback(node.copies.close)
        yield node


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Node]:
    with contextlib.ExitStack() as stack:
        node = Node(tmp_path)
        stack.callback(node.copies.close)
        yield node


def test_a_file_goes_from_the_endpoint_to_a_node_and_from_there_to_another_one(node: Node, other: Node) -> None:
    assert node.copy(content(), path=node.staged()) == CopyEnded(content())
    assert other.copy(content(), node.copies.address) == CopyEnded(content())
    [event] = other.perform(Link(7, "", (NodeFile("hash/scan.h5", content().sha256, len(DATA)),)))
    assert isinstance(event, Linked)
    linked = Path(event.read_dir, "r/hash/scan.h5")
    assert linked.read_bytes() == DATA
    assert (linked.stat().st_nlink, linked.stat().st_mode & 0o777) == (2, 0o444)
    other.copies.perform(Unlink(7, ""))
    wait_until(lambda: not Path(event.read_dir).exists(), "the links are removed")
    assert other.files() == [content().sha256]
    root = other.copies.root
    other.copies.perform(RemoveCopies((content(),)))
    wait_until(lambda: other.files() == [], "the copy is removed")
    assert root.is_dir()


def test_an_empty_file_is_copied_too(node: Node, other: Node) -> None:
    assert not node.copy(content(b""), path=node.staged(b"")).problem
    assert not other.copy(content(b""), node.copies.address).problem


def test_a_copy_that_is_removed_and_wanted_again_stays(node: Node) -> None:
    path = node.staged()
    for _ in range(20):
        node.copy(content(), path=path)
        node.copies.perform(RemoveCopies((content(),)))
    assert not node.copy(content(), path=path).problem
    assert node.files() == [content().sha256]


@pytest.mark.parametrize("data", [DATA[:-1], DATA + b"x", DATA[:-1] + b"x", b""])
def test_what_has_another_size_or_sha256_is_no_copy(node: Node, data: bytes) -> None:
    event = node.copy(content(), path=node.staged(data))
    assert "another size or SHA-256" in event.problem
    assert not event.is_local
    assert node.files() == []


def test_wrong_bytes_of_another_node_are_no_copy(node: Node) -> None:
    upstream = Upstream(DATA)
    with upstream.server:
        node.copies.perform(Copy(content(), upstream.address, ""))
        with upstream.accept() as connection:
            connection.sendall(DATA[:-1] + b"?" + upstream.proof)
            event = ended(node)
    assert "another size or SHA-256" in event.problem
    assert (event.is_local, event.reached) == (False, True)
    assert node.files() == []


@pytest.mark.parametrize("has_ended", [False, True])
def test_what_a_task_has_changed_is_no_copy_also_with_its_old_mtime(node: Node, other: Node, has_ended: bool) -> None:
    node.copy(content(), path=node.staged())
    link = linked(node, 1)
    before = link.stat()
    link.chmod(0o600)
    link.write_bytes(DATA[:-1] + b"?")
    link.chmod(0o444)
    os.utime(link, ns=(before.st_atime_ns, before.st_mtime_ns))
    if has_ended:
        node.copies.perform(Unlink(1, ""))
        wait_until(lambda: not link.exists(), "the links are removed")
    assert "does not have it" in other.copy(content(), node.copies.address).problem
    assert other.files() == []
    [event] = node.perform(Link(2, "", (NodeFile("a/b", content().sha256, len(DATA)),)))  # nor here
    assert isinstance(event, Linked)
    assert event.lost == (content(),)


def test_a_copy_stays_one_when_tasks_begin_and_end(node: Node, other: Node) -> None:
    node.copy(content(), path=node.staged())
    for number in range(20):
        link = linked(node, number)
        node.copies.perform(Unlink(number, ""))
    wait_until(lambda: not link.exists(), "the links are removed")
    assert not other.copy(content(), node.copies.address).problem
    assert linked(node, 20).read_bytes() == DATA


def test_a_task_with_a_lease_on_its_file_stops_neither_links_nor_copies_of_others(node: Node, other: Node) -> None:
    path = node.staged()
    node.copy(content(), path=path)
    with leased(linked(node, 1)):
        assert "does not have it" in other.copy(content(), node.copies.address).problem
        assert linked(node, 2).exists()
        assert not node.copy(content(submitter="ann"), path=path).problem
    assert not other.copy(content(), node.copies.address).problem
    with leased(Path(path)):
        assert "cannot be read" in node.copy(content(submitter="bob"), path=path).problem


def linked(node: Node, number: int) -> Path:
    """The link of a task."""
    [event] = node.perform(Link(number, "", (NodeFile("hash/scan.h5", content().sha256, len(DATA)),)))
    assert isinstance(event, Linked)
    assert not event.problem
    return Path(event.read_dir, "r/hash/scan.h5")


@contextlib.contextmanager
def leased(path: Path) -> Iterator[None]:
    """Another process has a lease on a file, and does not give it back."""
    program = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
fcntl.fcntl(os.open(sys.argv[1], os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("leased", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "leased\n"
        yield
        process.communicate()


def test_a_link_in_the_directory_of_a_task_is_not_followed(node: Node, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(DATA)
    path = Path(node.staged())
    path.unlink()
    path.symlink_to(secret)
    assert "cannot be read" in node.copy(content(), path=str(path)).problem
    shutil.rmtree(path.parents[2])
    (tmp_path / "r" / "hash").mkdir(parents=True)
    (tmp_path / "r" / "hash" / "file").write_bytes(DATA)
    path.parents[2].symlink_to(tmp_path)
    assert "cannot be read" in node.copy(content(), path=str(path)).problem
    assert "cannot be read" in node.copy(content(), path=str(secret)).problem  # not below the working directory


def test_who_lacks_the_key_gets_nothing(node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node.copy(content(), path=node.staged())
    with contextlib.closing(Node(tmp_path, key=b"x" * 32).copies) as outsider:
        for _ in range(3):
            outsider.perform(Copy(content(), node.copies.address, ""))
            events: list[Event] = []

            def answered(events: list[Event] = events) -> bool:
                events.extend(outsider.events())
                return bool(events)

            wait_until(answered, "the answer")
            [event] = events
            assert isinstance(event, CopyEnded)
            assert event.problem
    wait_until(lambda: "without the key" in caplog.text, "a line in the log")
    assert caplog.text.count("without the key") == 1, "once a minute"


@pytest.mark.parametrize("has_other_key", [False, True])
def test_server_without_the_key_gives_nothing(node: Node, has_other_key: bool) -> None:
    upstream = Upstream(DATA, key=b"x" * 32)
    with upstream.server:
        node.copies.perform(Copy(content(), upstream.address, ""))
        with upstream.accept() as connection:
            connection.sendall(DATA + (upstream.proof if has_other_key else bytes(32)))
            event = ended(node)
    assert "without the key" in event.problem
    assert node.files() == []


def test_copies_of_another_submitter_are_others(node: Node, other: Node) -> None:
    node.copy(content(submitter="ann"), path=node.staged())
    assert "does not have it" in other.copy(content(submitter="bob"), node.copies.address).problem
    assert "does not have it" in other.copy(content(), node.copies.address).problem
    assert not other.copy(content(submitter="ann"), node.copies.address).problem


@pytest.mark.parametrize(
    "sent", [b"", b"\x00", b"\x00\x04....", b"\xff\xff" + b"x" * 100, b"GET / HTTP/1.1\r\n\r\n" * 9]
)
def test_garbage_ends_a_connection_and_nothing_else(node: Node, other: Node, sent: bytes) -> None:
    node.copy(content(), path=node.staged())
    host, _, port = node.copies.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        with contextlib.suppress(OSError):  # the other side may have closed it before
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass
    assert not other.copy(content(), node.copies.address).problem


def test_many_connections_without_the_key_keep_no_manager_out(
    node: Node, other: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_server, "_HANDSHAKE_LIMIT_S", WAIT_S)  # none ends by itself
    node.copy(content(), path=node.staged())
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            connection = stack.enter_context(connected(node.copies.address))
            connection.sendall((1000).to_bytes(2) + b"x")
        assert not other.copy(content(), node.copies.address).problem


def test_a_handshake_has_one_limit_for_all_its_bytes(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_server, "_HANDSHAKE_LIMIT_S", 0.5)
    with connected(node.copies.address) as connection, pytest.raises(OSError, match=r"reset|pipe|closed"):
        drip(connection, b"\x04", step_s=0.4)  # of a request of 1,024 bytes; a limit for each byte would be kept


def test_a_request_that_is_too_long_is_not_read(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_server, "_HANDSHAKE_LIMIT_S", 10 * WAIT_S)
    with connected(node.copies.address) as connection:
        connection.sendall((1025).to_bytes(2))
        assert connection.recv(1) == b""


def test_the_proof_for_one_node_is_none_for_another_one(
    node: Node, other: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.copy(content(), path=node.staged())
    answers: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        other.copies.perform(Copy(content(), address, ""))
        host, _, port = node.copies.address.rpartition(":")
        victim = socket.create_connection((host, int(port)), timeout=WAIT_S)
        reader, _ = server.accept()
        with victim, reader:
            reader.sendall(victim.recv(32, socket.MSG_WAITALL))
            victim.sendall(reader.recv(4096))
            answers.append(victim.recv(8))
    assert answers == [b""]
    assert ended(other).problem
    assert "meant for the node at" in caplog.text


@pytest.mark.parametrize("has_size", [False, True])
def test_a_source_that_sends_a_byte_now_and_then_is_left(
    node: Node, monkeypatch: pytest.MonkeyPatch, has_size: bool
) -> None:
    monkeypatch.setattr(file_server, "_COPY_LIMIT_S", 0.5)
    upstream = Upstream(DATA)
    with upstream.server:
        node.copies.perform(Copy(content(), upstream.address, ""))
        connection, _ = upstream.server.accept()
        with connection:
            if has_size:
                connection.sendall(bytes(32))
                connection.recv(4096)
                connection.sendall(len(DATA).to_bytes(8))
            with contextlib.suppress(OSError):
                drip(connection, step_s=0.01 if has_size else 0.4)
    event = ended(node)
    assert "takes too long" in event.problem or "timed out" in event.problem
    assert (event.is_local, event.reached) == (False, True)


@pytest.mark.parametrize("name", ["farcall-links", "farcall-copies"])
def test_a_node_that_may_start_no_thread_says_so_and_copies_later(
    node: Node, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = node.staged()
    with monkeypatch.context() as patch:
        refuse_threads(patch, name)
        event = node.copy(content(), path=path)
        assert event.is_local
        assert "another thread" in event.problem
        node.copies.perform(Unlink(1, ""))
        [answer] = node.perform(Link(2, "", (NodeFile("a/b", content().sha256, len(DATA)),)))
        assert isinstance(answer, Linked)
        assert answer.problem
    assert not node.copy(content(), path=path).problem


@pytest.mark.parametrize("name", ["farcall-file-server", "farcall-file-reader"])
def test_a_server_that_may_start_no_thread_serves_later(
    other: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    node = Node(tmp_path, key=b"")
    with contextlib.closing(node.copies):
        with monkeypatch.context() as patch:
            refuse_threads(patch, name)
            node.copies.set_key(KEY)
            for _ in range(20):
                connected(node.copies.address, greets=False).close()
            wait_until(lambda: f"{name} cannot run" in caplog.text, "a line in the log")
        node.copy(content(), path=node.staged())
        assert not other.copy(content(), node.copies.address).problem


def connected(address: str, *, greets: bool = True) -> socket.socket:
    """A connection with a server, which has sent its challenge."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=WAIT_S)
    assert not greets or len(connection.recv(32, socket.MSG_WAITALL)) == 32
    return connection


def drip(connection: socket.socket, first: bytes = b"", *, step_s: float) -> None:
    """Send what comes first, and a byte now and then, until the other side has closed the connection.

    :raises OSError: then, if it is not seen before.
    """
    connection.settimeout(step_s)
    connection.sendall(first)
    deadline = time.monotonic() + WAIT_S
    while True:
        assert time.monotonic() < deadline, "it is still open"
        connection.sendall(b"\0")
        with contextlib.suppress(TimeoutError):
            if not connection.recv(1):
                raise ConnectionResetError("closed")


def refuse_threads(patch: pytest.MonkeyPatch, name: str) -> None:
    """No thread of this name can start."""
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        real(thread)

    patch.setattr(threading.Thread, "start", start)


def test_a_source_that_does_not_exist_was_not_reached(node: Node) -> None:
    for port in (0, 99_999):
        event = node.copy(content(), f"127.0.0.1:{port}")
        assert event.problem
        assert (event.reached, event.is_local) == (False, False)


def test_a_source_that_ends_in_the_middle_leaves_no_part(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(bytes(32))
                connection.recv(4096)
                connection.sendall(len(DATA).to_bytes(8) + DATA[:2_000_000])

        thread = threading.Thread(target=serve)
        thread.start()
        event = node.copy(content(), f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    assert event.problem
    assert (event.reached, event.is_local) == (True, False)
    assert node.files() == []


class Upstream:
    """A source that sends as much as the test says. ``proof``: the end of its answer."""

    def __init__(self, data: bytes, *, key: bytes = KEY) -> None:
        self.data = data
        self.key = key
        self.proof = b""
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"

    def accept(self) -> socket.socket:
        connection, _ = self.server.accept()
        connection.settimeout(WAIT_S)
        connection.sendall(bytes(32))
        request = connection.recv(4096)[2:-32]
        size = len(self.data).to_bytes(8)
        connection.sendall(size)
        self.proof = hmac.digest(self.key, b"answer" + bytes(32) + request + size, "sha256")
        return connection


def test_a_copy_is_passed_on_while_it_comes(node: Node, other: Node) -> None:
    upstream = Upstream(DATA)
    with upstream.server:
        node.copies.perform(Copy(content(), upstream.address, ""))
        other.copies.perform(Copy(content(), node.copies.address, ""))
        with upstream.accept() as connection:
            for start in range(0, len(DATA) - 10, 500_000):
                connection.sendall(DATA[start : min(start + 500_000, len(DATA) - 10)])
                least = start // 2**20 * 2**20  # it reads as much at a time, or less
                wait_until(lambda: drafted(other) >= least - 2**20, "the other node has nearly as much")  # noqa: B023
            assert not node.copies.events()
            connection.sendall(DATA[-10:] + upstream.proof)
    for each in (node, other):
        assert ended(each) == CopyEnded(content())
    assert other.files() == [content().sha256]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_what_fails_at_its_source_fails_at_those_who_get_it_from_there(node: Node, other: Node, is_wrong: bool) -> None:
    upstream = Upstream(DATA)
    with upstream.server:
        node.copies.perform(Copy(content(), upstream.address, ""))
        other.copies.perform(Copy(content(), node.copies.address, ""))
        with upstream.accept() as connection:
            connection.sendall(DATA[:-1] + b"?" + upstream.proof if is_wrong else DATA[: len(DATA) // 2])
    for each in (node, other):
        event = ended(each)
        assert event.problem
        assert (event.is_local, event.reached) == (False, True)
        assert each.files() == []
    assert not node.copy(content(), path=node.staged()).problem
    assert not other.copy(content(), node.copies.address).problem


def test_a_node_waits_a_moment_until_its_source_knows_of_the_copy(node: Node, other: Node) -> None:
    path = node.staged()
    other.copies.perform(Copy(content(), node.copies.address, ""))
    node.copies.perform(Copy(content(), "", path))
    for each in (node, other):
        assert ended(each) == CopyEnded(content())


def ended(node: Node) -> CopyEnded:
    """The next copy that has ended."""
    events: list[Event] = []

    def has_ended() -> bool:
        events.extend(node.copies.events())
        return bool(events)

    wait_until(has_ended, "a copy")
    [event] = events
    assert isinstance(event, CopyEnded)
    return event


def drafted(node: Node) -> int:
    return sum(each.stat().st_size for each in node.copies.root.rglob("drafts/*"))


def test_a_full_disk_is_the_nodes_problem(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    path = node.staged()
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda each: real(each)._replace(free=len(DATA) - 1))
    event = node.copy(content(), path=path)
    assert event.is_local
    assert "no room" in event.problem


def test_a_file_system_that_hangs_holds_neither_tasks_nor_other_copies(
    node: Node, other: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_copies, "_HUNG_LIMIT_S", 0.5)
    path = node.staged()
    other.copy(content(), path=path)
    with hung_mount(tmp_path / "work/staged/hung") as mount:
        hung = [content(str(number).encode()) for number in range(4)]
        ends = node.perform(*(Copy(each, "", f"{mount.directory}/r/hash/{each.sha256}") for each in hung))
        assert {each.content for each in ends if isinstance(each, CopyEnded) and each.is_local} == set(hung)
        event = node.copy(content(b"5"), path=f"{mount.directory}/r/hash/file")
        assert (event.is_local, "other copies hang" in event.problem) == (True, True)
        assert not node.copy(content(), other.copies.address).problem
        again = content(DATA, "someone")
        assert node.copy(again, path=path).is_local
        mount.fail()
        wait_until(lambda: not node.copy(again, path=path).problem, "what hung has come back")
    assert node.files() == [content().sha256] * 2


def test_copies_that_come_back_at_the_limit_leave_nothing_that_hangs(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_copies, "_HUNG_LIMIT_S", 0.3)
    monkeypatch.setattr(file_copies, "_LOOK_S", 0.01)
    never, real, path = threading.Event(), file_copies._open_below, node.staged()

    def late(root: Path, parts: Any) -> int:
        never.wait(0.3)
        return real(root, parts)

    with monkeypatch.context() as patch:
        patch.setattr(file_copies, "_open_below", late)
        ends = node.perform(*(Copy(content(submitter=str(number)), "", path) for number in range(16)))
    assert len(ends) == 16
    wait_until(lambda: not node.copy(content(), path=path).problem, "copies from the disk go on")
    assert not node.copies.events()


def test_a_thread_that_cannot_be_replaced_at_once_is_replaced_later(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_copies, "_HUNG_LIMIT_S", 0.5)
    hung = [content(str(number).encode()) for number in range(4)]
    path = node.staged()
    with hung_mount(tmp_path / "work/staged/hung") as mount:
        for each in hung:
            node.copies.perform(Copy(each, "", f"{mount.directory}/r/hash/{each.sha256}"))
        node.copies.perform(Copy(content(), "", path))
        with monkeypatch.context() as patch:
            refuse_threads(patch, "farcall-copies")
            ends: list[Event] = []

            def have_ended(count: int) -> bool:
                ends.extend(node.copies.events())
                return len(ends) >= count

            wait_until(lambda: have_ended(4), "all threads are given up")
            mount.fail()
        wait_until(lambda: have_ended(5), "the copy that waited has ended, too")


def test_a_manager_that_was_stopped_gives_no_copy_up(tmp_path: Path) -> None:
    path = tmp_path / "work/staged/task/r/hash/file"
    path.parent.mkdir(parents=True)
    path.write_bytes(DATA)
    program = """
import sys, threading, time
from pathlib import Path
from farcall_endpoint.manager.shell import file_copies
from farcall_endpoint.manager.core.actions import Copy
from farcall_endpoint.manager.shell.file_copies import FileCopies
from farcall_endpoint.contracts.agent_manager import FileContent
file_copies._HUNG_LIMIT_S, file_copies._STOPPED_S = 3.0, 2.0
real, go_on = file_copies._open_below, threading.Event()
def late(root, parts):
    go_on.wait()
    return real(root, parts)
file_copies._open_below = late
root = Path(sys.argv[1])
copies = FileCopies(root, working_dir=root / "work", host="127.0.0.1")
copies.set_key(b"k" * 32)
copies.perform(Copy(FileContent("", sys.argv[2], int(sys.argv[3])), "", sys.argv[4]))
print("copying", flush=True)
sys.stdin.readline()
go_on.set()
while not (events := copies.events()):
    time.sleep(0.01)
print(repr(events[0].problem), flush=True)
copies.close()
"""
    arguments = [str(tmp_path), content().sha256, str(len(DATA)), str(path)]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "copying\n"
        process.send_signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        wait_until(lambda: time.monotonic() > stopped_at + 4.0, "longer than the limit")
        process.send_signal(signal.SIGCONT)
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == "''\n"


def test_a_node_whose_file_system_hangs_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_copies, "_HUNG_LIMIT_S", 0.5)
    node = Node(tmp_path)
    with hung_mount(tmp_path / "work/staged/hung") as mount:
        assert node.copy(content(), path=f"{mount.directory}/r/hash/file").is_local
        node.copies.close()
        assert not node.copies.root.exists()


def test_a_node_that_ends_ends_its_copies_on_the_way(tmp_path: Path) -> None:
    node = Node(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        node.copies.perform(Copy(content(), f"127.0.0.1:{server.getsockname()[1]}", ""))
        connection, _ = server.accept()
        with connection:
            node.copies.close()
    assert not node.copies.root.exists()


def test_a_node_that_ends_ends_a_copy_that_has_just_connected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.create_connection
    has_connected, is_closing = threading.Event(), threading.Event()

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        connection = real(address, timeout)
        has_connected.set()
        assert is_closing.wait(WAIT_S)
        return connection

    monkeypatch.setattr(socket, "create_connection", connect)
    node = Node(tmp_path)
    real_close = file_server.FileServer.close

    def close(server: file_server.FileServer) -> None:
        real_close(server)
        is_closing.set()

    monkeypatch.setattr(file_server.FileServer, "close", close)
    with socket.create_server(("127.0.0.1", 0)) as server:
        node.copies.perform(Copy(content(), f"127.0.0.1:{server.getsockname()[1]}", ""))
        assert has_connected.wait(WAIT_S)
        node.copies.close()
        assert not [each for each in threading.enumerate() if each.name.startswith("farcall-copies")]


def test_the_next_manager_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    left = tmp_path / f"farcall-temporary-files-{socket.gethostname()}-dead"
    (left / "owner" / "copies").mkdir(parents=True)
    (left / "owner" / "copies" / "x").write_bytes(DATA)
    node = Node(tmp_path)
    with contextlib.closing(node.copies):
        wait_until(lambda: not left.exists(), "what is left is removed")
        second: Any = Node(tmp_path).copies
        with contextlib.closing(second):
            assert node.copies.root.exists()  # not what is in use


def test_the_address_towards_a_host_is_one_of_this_machine() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
