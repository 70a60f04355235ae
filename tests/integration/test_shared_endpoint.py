"""A shared endpoint under attack by one of its users: what that user's tasks get of the owner's and of others'."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from farcall_endpoint.isolation.landlock import is_available
from tests.support.endpoint import EndpointProcess, FakeCloud, running_endpoint
from tests.waiting import wait_until

ATTACKER = "018f0000-0000-7000-8000-00000000000a"
VICTIM = "018f0000-0000-7000-8000-00000000000b"
SECRETS = {
    "FARCALL_CLIENT_SECRET": "hush",
    "GLOBUS_COMPUTE_CLIENT_SECRET": "hush",
    "AWS_SECRET_ACCESS_KEY": "hush",
    "SSH_AUTH_SOCK": "hush",
}
LEVELS = ["none", "process", *(["landlock"] if is_available() else [])]


@pytest.fixture(scope="module", params=LEVELS)
def endpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndpointProcess]:
    """An endpoint with one worker, so that attacker and victim follow one another."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in SECRETS.items():
            environment.setenv(name, value)
        home = tmp_path_factory.mktemp("home")
        with running_endpoint(home, workers=1, engine={"isolation": request.param}) as endpoint:
            wait_until(lambda: endpoint.directory.read_status().get("workers") == 1)
            yield endpoint


@pytest.fixture
def cloud(endpoint: EndpointProcess) -> FakeCloud:
    return endpoint.cloud


@pytest.fixture
def level(endpoint: EndpointProcess) -> str:
    return str(endpoint.directory.read_status()["isolation"])


def variables() -> dict[str, str]:
    import os

    return dict(os.environ)


def read_as_an_ordinary_user(path: str) -> str:
    """Without the rights of root, under which tests may run."""
    import ctypes
    import os
    import pathlib

    reader, writer = os.pipe()
    if os.fork() == 0:
        header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        ctypes.CDLL(None).capset(header, data)
        try:
            answer = pathlib.Path(path).read_bytes()
        except OSError as error:
            answer = type(error).__name__.encode()
        os.write(writer, answer[:4000])
        os._exit(0)
    os.wait()
    return os.read(reader, 4000).decode(errors="replace")


def patch_the_worker() -> None:
    """What follows in this process is answered with a lie."""
    import gc

    from farcall_endpoint.worker.runner import Runner

    for runner in [each for each in gc.get_objects() if isinstance(each, Runner)]:
        runner._serialized = lambda value, order: (b'11\n"a lie"',)  # type: ignore[method-assign]


def truth(argument: str) -> str:
    return argument


def start_a_process() -> int:
    import subprocess

    return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid


def forge(packet: bytes) -> None:
    """Write to the socket by which this task's worker speaks with its manager."""
    import os
    import socket
    import stat
    import time

    packet = packet.replace(b"0" * 36, os.environ["FARCALL_TASK_ID"].encode())
    for descriptor in range(3, 200):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                end = socket.socket(fileno=os.dup(descriptor))
                if end.type == socket.SOCK_SEQPACKET:
                    end.send(packet)
        except OSError:
            continue
    time.sleep(100)  # until the manager ends this worker


def test_no_task_gets_credentials_of_the_agent(cloud: FakeCloud, endpoint: EndpointProcess, level: str) -> None:
    mine = cloud.end(cloud.submit(variables)).value
    theirs = cloud.end(cloud.submit(variables, submitter=ATTACKER)).value
    assert isinstance(mine, dict)
    assert isinstance(theirs, dict)
    for name in ("FARCALL_TOKEN", "FARCALL_CLIENT_SECRET", "GLOBUS_COMPUTE_CLIENT_SECRET"):
        assert name not in mine | theirs
    assert mine["AWS_SECRET_ACCESS_KEY"] == "hush", "the owner's tasks are the owner's"
    if level == "none":
        return
    assert "hush" not in theirs.values()
    assert Path(theirs["HOME"]) == endpoint.directory.path / "tasks_working_dir" / "submitters" / ATTACKER
    assert theirs["TMPDIR"] != mine.get("TMPDIR")
    assert theirs["PATH"] == mine["PATH"]


def test_no_task_reads_the_environment_of_agent_or_manager(
    cloud: FakeCloud, endpoint: EndpointProcess, tmp_path: Path
) -> None:
    own = cloud.end(cloud.submit(read_as_an_ordinary_user, "/proc/self/environ", submitter=ATTACKER)).value
    assert "FARCALL_ENDPOINT_ID" in str(own), "that a process can be read at all"
    assert endpoint.agent is not None
    for process in (endpoint.agent.pid, *(manager.pid for manager in endpoint.managers())):
        found = cloud.end(cloud.submit(read_as_an_ordinary_user, f"/proc/{process}/environ", submitter=ATTACKER))
        assert found.value == "PermissionError"


def test_nothing_of_one_submitter_is_left_for_another(cloud: FakeCloud, level: str) -> None:
    process = cloud.end(cloud.submit(start_a_process, submitter=ATTACKER)).value
    cloud.end(cloud.submit(patch_the_worker, submitter=ATTACKER))
    answer = cloud.end(cloud.submit(truth, "the truth", submitter=VICTIM)).value
    if level == "none":
        assert answer == "a lie", "the attack works where nothing separates submitters"
        return
    assert answer == "the truth"
    assert isinstance(process, int)
    assert not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE


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


def test_a_body_in_a_file_that_can_shrink_ends_its_own_worker_only(cloud: FakeCloud, endpoint: EndpointProcess) -> None:
    """The agent would be killed when it reads what is no longer there; a directory has a size, too."""

    def send_files() -> None:
        import array
        import os
        import socket
        import stat
        import struct
        import time

        header = b"\x93\xa4Done" + b"\xd9\x24" + os.environ["FARCALL_TASK_ID"].encode() + b"\x00"
        header = b"\x94" + header[1:] + b"\x01"
        memory = os.memfd_create("forged")
        os.write(memory, b"x" * 100_000)
        for descriptor in range(3, 200):
            try:
                if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    continue
                end = socket.socket(fileno=os.dup(descriptor))
                if end.type == socket.SOCK_SEQPACKET:
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


@pytest.mark.skipif("landlock" not in LEVELS, reason="this kernel has no Landlock")
def test_confined_tasks_reach_no_files_and_processes_of_others(
    cloud: FakeCloud, endpoint: EndpointProcess, level: str
) -> None:
    if level != "landlock":
        pytest.skip("files are separated by Landlock")

    def look(paths: list[str], processes: list[int]) -> list[str]:
        import os
        import pathlib

        def outcome(action: Callable[..., object], *arguments: object) -> str:
            try:
                action(*arguments)
            except OSError as error:
                return type(error).__name__
            return "done"

        found = [outcome(pathlib.Path(path).read_bytes) for path in paths]
        found += [outcome(pathlib.Path(path).write_bytes, b"") for path in paths]
        return [*found, *[outcome(os.kill, process, 0) for process in processes]]

    def keep(name: str) -> str:
        import pathlib

        pathlib.Path(name).write_text("private")
        return str(pathlib.Path(name).absolute())

    secrets = [str(cloud.end(cloud.submit(keep, "note", submitter=who)).value) for who in (VICTIM, cloud.submitter)]
    directory = endpoint.directory.path
    secrets += [str(path) for path in directory.rglob("*") if path.is_file() and "tasks_working_dir" not in path.parts]
    assert any("curve" in path for path in secrets)
    assert any("spool" in path for path in secrets)
    assert endpoint.agent is not None
    processes = [endpoint.agent.pid, *(manager.pid for manager in endpoint.managers()), os.getpid()]
    found = cloud.end(cloud.submit(look, secrets, processes, submitter=ATTACKER)).value
    assert isinstance(found, list)
    assert set(found) == {"PermissionError"}, json.dumps(
        dict(zip([*secrets, *secrets, *processes], found, strict=True))
    )
    assert cloud.end(cloud.submit(keep, "note", submitter=ATTACKER)).value != secrets[0]


def test_status_says_which_level_holds(endpoint: EndpointProcess, request: pytest.FixtureRequest, level: str) -> None:
    assert level == request.node.callspec.params["endpoint"]
