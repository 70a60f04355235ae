"""A shared endpoint under attack by one of its users: what a task forges of its worker's messages to the manager."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.support.endpoint import EndpointProcess, FakeCloud
from tests.support.endpoint.levels import ATTACKER, VICTIM, endpoint_at_each_level

endpoint = endpoint_at_each_level(workers=1)


def truth(argument: str) -> str:
    return argument


def forge(packet: bytes) -> None:
    """Write to the socket by which this task's worker speaks with its manager, and wait until that ends this worker."""
    import time

    send_forged(packet)
    time.sleep(100)


def ends_of_worker() -> list[socket.socket]:
    """The sockets of packets of this task's worker; the manager has the other end of one."""
    import os
    import socket
    import stat

    found = []
    for descriptor in range(3, 200):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                end = socket.socket(fileno=os.dup(descriptor))
                if end.type == socket.SOCK_SEQPACKET:
                    found.append(end)
        except OSError:
            continue
    return found


def send_forged(packet: bytes, *, after_s: float = 0.0) -> None:
    """Write to the socket by which this task's worker speaks with its manager."""
    import os
    import time

    time.sleep(after_s)
    packet = packet.replace(b"0" * 36, os.environ["FARCALL_TASK_ID"].encode())
    for end in ends_of_worker():
        try:
            end.send(packet)
        except OSError:
            continue


OWN_TASK = "0" * 36
"""In a packet, the place of the id of the task that sends it."""


def packet(name: str, *fields: object) -> bytes:
    header = b"".join([bytes([0x90 + 1 + len(fields)]), *map(encoded, (name, *fields))])
    return len(header).to_bytes(4, "little") + header


def encoded(field: object) -> bytes:
    return field if isinstance(field, bytes) else msgspec.msgpack.encode(field)


def nested(depth: int) -> bytes:
    """A map with arrays in arrays, which no encoder writes."""
    return b"\x81\xa1x" + b"\x91" * depth + b"\xc0"


@pytest.mark.parametrize(
    "forged",
    [
        b"",
        b"\xff" * 100,
        b"\xff\xff\xff\xff",
        packet("Done", "another-task", 0.0, 1.0),
        packet("Done", 7),
        packet("Ready", 1),
        packet("Synced"),
        packet("Sync"),
        packet("Run", []),
        packet("Begun", "another-task", {1: -1}),
        packet("Done", OWN_TASK, float("nan"), 1.0),
        packet("Done", OWN_TASK, 0.0, float("inf")),
        packet("Done", OWN_TASK, 0.0, 1.0, None, nested(60_000)),
    ],
    ids=[
        "empty",
        "noise",
        "length",
        "result",
        "fields",
        "ready",
        "synced",
        "sync",
        "run",
        "begun",
        "nan",
        "inf",
        "deep",
    ],
)
def test_a_forged_packet_ends_its_own_worker_only(cloud: FakeCloud, endpoint: EndpointProcess, forged: bytes) -> None:
    [manager] = endpoint.managers()
    ended = cloud.end(cloud.submit(forge, forged, submitter=ATTACKER, max_attempts=1, walltime_s=3.0))
    assert ended.error["code"] in {
        "WORKER_DIED",
        "WALLTIME_EXCEEDED",
    }  # an empty packet, and an ignored one, do nothing
    after = cloud.end(cloud.submit(truth, "the truth", submitter=VICTIM))
    assert (after.value, after.spec.attempt) == ("the truth", 1)
    assert [each.pid for each in endpoint.managers()] == [manager.pid]


def spoil_descriptors() -> None:
    """Whatever of them is shared with the manager: it must not wait for them, nor depend on what it reads."""
    import contextlib
    import fcntl
    import os

    os.write(1, b"x" * 5000)
    for descriptor in range(200):
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)  # and no O_NONBLOCK
        with contextlib.suppress(OSError):
            os.eventfd_write(descriptor, 2**62)
    with contextlib.suppress(OSError):
        os.pread(1, 5000, 0)
    os._exit(1)


def test_spoiled_descriptors_end_their_own_worker_only(cloud: FakeCloud, endpoint: EndpointProcess) -> None:
    [manager] = endpoint.managers()
    for task_id in cloud.submit_many(spoil_descriptors, [()] * 3, submitter=ATTACKER, max_attempts=1):
        assert cloud.end(task_id).error["code"] == "WORKER_DIED"
    assert cloud.end(cloud.submit(truth, "the truth", submitter=VICTIM)).value == "the truth"
    assert [each.pid for each in endpoint.managers()] == [manager.pid]


def test_a_body_in_a_file_that_can_shrink_ends_its_own_worker_only(cloud: FakeCloud, endpoint: EndpointProcess) -> None:
    """The agent would be killed when it reads what is no longer there; a directory has a size, too."""

    def send_files() -> None:
        import array
        import os
        import socket
        import struct
        import time

        header = b"\x93\xa4Done" + b"\xd9\x24" + os.environ["FARCALL_TASK_ID"].encode() + b"\x00"
        header = b"\x94" + header[1:] + b"\x01"
        memory = os.memfd_create("forged")
        os.write(memory, b"x" * 100_000)
        for end in ends_of_worker():
            try:
                for body in (memory, os.open(".", os.O_RDONLY)):
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [body]))]
                    place = struct.pack("<QQ", 0, 10)
                    end.sendmsg([struct.pack("<I", len(header)), header, place], rights)
                os.ftruncate(memory, 0)
            except OSError:
                continue
        time.sleep(100)

    [manager] = endpoint.managers()
    ended = cloud.end(cloud.submit(send_files, submitter=ATTACKER, max_attempts=1, walltime_s=3.0))
    assert ended.error["code"] == "WORKER_DIED"
    after = cloud.end(cloud.submit(truth, "the truth", submitter=VICTIM))
    assert (after.value, after.spec.attempt) == ("the truth", 1)
    assert [each.pid for each in endpoint.managers()] == [manager.pid]


def forge_the_end(packet: bytes, run_s: float) -> None:
    """Report the end of this task, with other times than its own. The second report, of the worker itself, ends it."""
    send_forged(packet, after_s=run_s)


_DAYS_S = 400 * 24 * 3600.0


@pytest.mark.parametrize(
    "told",
    [(_DAYS_S, _DAYS_S), (-_DAYS_S, 0.0), (0.0, 0.0)],
    ids=["later", "long", "no time"],
)
def test_a_task_that_forges_its_times_has_those_of_the_manager(cloud: FakeCloud, told: tuple[float, float]) -> None:
    """Usage is charged by them."""
    began_at = time.time()
    times = [began_at + each for each in told]
    forged = packet("Done", OWN_TASK, *times) + b'11\n"a lie"'
    ended = cloud.end(cloud.submit(forge_the_end, forged, 1.0, submitter=ATTACKER))
    assert ended.value == "a lie", "a task may return what it likes"
    assert ended.spec.started_at is not None
    assert ended.spec.ended_at is not None
    assert 0.8 < ended.spec.ended_at - ended.spec.started_at < 300
    assert began_at - 60 < ended.spec.ended_at < time.time() + 60


def test_a_task_that_reports_its_end_and_runs_on_keeps_no_place(
    cloud: FakeCloud, endpoint: EndpointProcess, level: str
) -> None:
    if level == "none":
        pytest.skip("submitters share the worker at this level")

    def forge_and_run_on(packet: bytes) -> None:
        send_forged(packet)
        time.sleep(1000)

    [manager] = endpoint.managers()
    forged = packet("Done", OWN_TASK, time.time(), time.time()) + b'11\n"a lie"'
    assert cloud.end(cloud.submit(forge_and_run_on, forged, submitter=ATTACKER)).value == "a lie"
    assert cloud.end(cloud.submit(truth, "the truth", submitter=VICTIM)).value == "the truth"
    assert [each.pid for each in endpoint.managers()] == [manager.pid]


def ask_for_a_sparse_block(size_bytes: int, part_bytes: int) -> str:
    """Ask the manager for parts of a file that takes no memory."""
    from farcall import current

    task = current()
    assert task.memory_dir is not None
    file = task.memory_dir / "blocks" / "b-x"
    file.parent.mkdir(exist_ok=True)
    with file.open("wb") as opened:
        opened.truncate(size_bytes)
    try:
        task.node_memory().fetch("", [("x", start, start + part_bytes) for start in range(0, size_bytes, part_bytes)])
    finally:
        file.unlink()
    return "served"


def memory_files_of(process: psutil.Process) -> int:
    """Bytes of the memory files that a process has open."""
    found: dict[int, int] = {}
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:" in str(link.readlink()):
                state = link.stat()
                found[state.st_ino] = state.st_blocks * 512
    return sum(found.values())


@pytest.mark.parametrize(
    ("size_bytes", "part_bytes"),
    [(3 * 2**30, 3 * 2**30), (3 * 2**30, 60 * 2**20), (60 * 2**20, 60 * 2**20)],
    ids=["one large part", "many parts", "one part"],
)
def test_a_sparse_block_takes_no_memory_of_the_manager(
    cloud: FakeCloud, endpoint: EndpointProcess, size_bytes: int, part_bytes: int
) -> None:
    [manager] = endpoint.managers()
    before = manager.memory_info().rss
    task_id = cloud.submit(ask_for_a_sparse_block, size_bytes, part_bytes, submitter=ATTACKER, max_attempts=1)
    most = 0
    while not cloud.has_ended(task_id):
        most = max(most, memory_files_of(manager) + manager.memory_info().rss - before)
    assert cloud.end(task_id).error["code"] in {"WORKER_DIED", "TASK_FAILED"}
    assert most < 2**28
    assert cloud.end(cloud.submit(truth, "the truth", submitter=VICTIM)).value == "the truth"
    assert [each.pid for each in endpoint.managers()] == [manager.pid]


def send_result_in(kind: str) -> None:
    """Send the manager a result, or a header, in what it and the agent cannot read. The worker's own report ends it."""
    import array
    import fcntl
    import os
    import socket
    import struct

    header = b"\x94\xa4Done\xd9\x24" + os.environ["FARCALL_TASK_ID"].encode() + b"\x00\x01"
    packet = struct.pack("<I", len(header)) + header
    memory = os.memfd_create("forged", os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if kind == "large pages" else 0))
    if kind != "large pages":
        os.write(memory, b'11\n"' + b"x" * 99_995 + b'"')
    os.ftruncate(memory, {"sparse": 2**62, "large pages": 2**22}.get(kind, 100_000))
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, 0x2)  # F_SEAL_SHRINK
    if kind == "write-only":
        memory = os.open(f"/proc/self/fd/{memory}", os.O_WRONLY)
    if kind in ("pipe", "slow"):
        memory = os.pipe()[0] if kind == "pipe" else os.open("/proc/self/smaps", os.O_RDONLY)
        packet = struct.pack("<II", 0, 500)
    packet += struct.pack("<IiQQ", 1, 0, 0, 100_000)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory]))]
    for end in ends_of_worker():
        try:
            end.sendmsg([packet], rights)
            if kind == "shut down":
                end.shutdown(socket.SHUT_WR)
        except OSError:
            continue


@pytest.mark.parametrize("kind", ["sparse", "large pages", "write-only", "pipe", "slow", "shut down"])
def test_a_result_that_cannot_be_read_stops_no_other_task(
    cloud: FakeCloud, endpoint: EndpointProcess, kind: str
) -> None:
    """Neither the manager nor the agent, which read it."""
    assert endpoint.agent is not None
    [manager] = endpoint.managers()
    cloud.end(cloud.submit(send_result_in, kind, submitter=ATTACKER, max_attempts=1, walltime_s=3.0))
    after = cloud.end(cloud.submit(truth, "the truth", submitter=VICTIM))
    assert (after.value, after.spec.attempt) == ("the truth", 1)
    assert [each.pid for each in endpoint.managers()] == [manager.pid]
    assert endpoint.agent.poll() is None


def close_slowly() -> None:
    """Pass the manager a connection whose data is never read, so that closing the connection waits."""
    import array
    import os
    import socket
    import struct
    import time

    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 100))
    client.setblocking(False)
    accepted = server.accept()[0]
    try:
        while client.send(b"x" * 100_000):
            pass
    except BlockingIOError:
        pass
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [client.detach()]))]
    for end in ends_of_worker():
        try:
            end.sendmsg([struct.pack("<I", 0)], rights)
            os.close(rights[0][2][0])
        except OSError:
            continue
    time.sleep(100)
    accepted.close()


def test_a_connection_that_is_slow_to_close_stops_no_other_task(
    cloud: FakeCloud, endpoint: EndpointProcess, level: str
) -> None:
    if level in ("none", "process"):
        pytest.skip("a task may stop the manager at this level")
    began_at = time.monotonic()
    attack = cloud.submit(close_slowly, submitter=ATTACKER, max_attempts=1, walltime_s=5.0)
    assert cloud.end(cloud.submit(truth, "the truth", submitter=VICTIM)).value == "the truth"
    cloud.end(attack)
    assert time.monotonic() - began_at < 90, "the manager waited"
