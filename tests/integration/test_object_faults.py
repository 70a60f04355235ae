"""Faults of object stores: killed writers, full disks, hostile files, servers that are gone, forks, and leaks."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import boto3
import httpx
import numpy as np
import psutil
import pytest
import redis

from farcall_common.errors import (
    ConfigurationError,
    DeserializationError,
    ObjectDamaged,
    ObjectGone,
    StoreDenied,
    StoreFull,
    StoreUnavailable,
)
from farcall_common.objects import S3, Directory, Key, Memory, Reference, Store, Valkey
from farcall_common.objects.directory import DRAFT_PREFIX, sweep
from farcall_common.objects.memory import REUSED_BYTES
from farcall_common.objects.references import _reference
from tests.integration.store_servers import Valkey as Server
from tests.integration.store_servers import free_port
from tests.waiting import wait_until

LARGE: Final = np.arange(200_000, dtype=np.float64)
#: Programs get the class and the path of a connector.
PRELUDE: Final = """
import gc, json, os, pickle, resource, sys
import numpy as np
from farcall_common.objects import Directory, Memory, Store
path = sys.argv[2]
store = Store({"Directory": Directory, "Memory": Memory}[sys.argv[1]](path))
"""


@pytest.fixture(params=[Directory, Memory])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Directory:
    made: Directory = request.param(tmp_path / "objects")
    return made


def start(connector: Directory, program: str, *prefix: str) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-c", PRELUDE + program, type(connector).__name__, connector.path]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(connector: Directory, program: str, *prefix: str) -> Any:
    """What a program prints, as JSON."""
    out, error = start(connector, program, *prefix).communicate()
    assert out, error
    return json.loads(out)


def names(connector: Directory) -> list[str]:
    return [name for name in os.listdir(connector.path) if name != ".swept"]  # noqa: PTH208


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_reader_continues_when_its_object_is_evicted(directory: Directory) -> None:
    reference = Store(directory).put(LARGE)
    reader = start(
        directory,
        "r = pickle.loads(bytes.fromhex(input())); v = r.get(); print(len(v), flush=True); input(); print(v.sum())",
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    reader.stdin.write(pickle.dumps(reference).hex() + "\n")
    reader.stdin.flush()
    assert reader.stdout.readline() == "200000\n"
    reference.evict()
    assert names(directory) == []
    out, _ = reader.communicate("\n")
    assert float(out) == LARGE.sum()


def test_a_writer_that_is_killed_leaves_no_object(directory: Directory) -> None:
    program = """
real = os.write
def write(descriptor, data):
    if descriptor > 2 and len(data) > 1000:
        real(descriptor, data[:1000])
        print("half", flush=True)
        input()
    return real(descriptor, data)
os.write = write
store.put(np.ones(1_000_000))
"""
    writer = start(directory, program)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "half\n"
    [draft] = names(directory)
    assert draft.startswith(DRAFT_PREFIX)
    writer.kill()
    writer.communicate()
    sweep(directory.path)
    assert names(directory) == [draft]  # its writer could still be at it
    os.utime(Path(directory.path, draft), (0, 0))
    assert sweep(directory.path) == 1
    assert names(directory) == []


@pytest.mark.parametrize("value", ["np.ones(1_000_000)", "'x' * 1_000_000", "[np.ones(50_000)] * 2 + [b'x' * 900_000]"])
def test_a_file_that_may_not_grow_is_a_full_store(directory: Directory, value: str) -> None:
    """By a limit of the process for files, which every user can set."""
    program = f"""
resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
try:
    store.put({value})
except Exception as error:
    print(json.dumps([type(error).__name__, error.hint, store.put("small").get()]))
"""
    name, hint, small = run(directory, program)
    assert (name, small) == ("StoreFull", "small")
    assert "Evict objects" in hint
    assert len(names(directory)) == 1


def mounted() -> list[str]:
    """A command that runs another one in a namespace with a file system of 4 MiB at /mnt."""
    script = 'mount -t tmpfs -o size=4m farcall /mnt && exec "$@"'
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]


@pytest.mark.skipif(
    subprocess.run([*mounted(), "true"], capture_output=True, check=False).returncode != 0,
    reason="this machine does not let users mount file systems in namespaces",
)
@pytest.mark.parametrize("kind", [Directory, Memory])
def test_a_full_file_system(kind: type[Directory]) -> None:
    program = """
found = []
kept = store.put(np.ones(200_000))
tries = [lambda: store.put(np.ones(400_000)), lambda: store.put(b"x" * 5_000_000)]
if sys.argv[1] == "Memory":
    tries.append(lambda: store.buffer(5_000_000))
for each in tries:
    try:
        each()
    except Exception as error:
        found.append(type(error).__name__)
found.append(sorted(name[:1] for name in os.listdir(path)))
found.append(kept.get().sum())
kept.evict()
found.append(store.put(np.ones(400_000)).get().sum())
print(json.dumps(found))
"""
    found = run(kind("/mnt/objects"), program, *mounted())
    assert found[:-3] == ["StoreFull"] * (2 + (kind is Memory))
    assert found[-3].count(".") == 1  # the mark of the sweeper: no draft is left
    assert found[-2:] == [200_000, 400_000]


def test_a_buffer_that_is_not_put_leaves_nothing(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "objects")
    buffer = memory.buffer(1_000_000)
    assert len(names(memory)) == 1
    view = np.frombuffer(buffer[8:])
    del buffer
    gc.collect()
    assert len(names(memory)) == 1  # the view needs it
    del view
    gc.collect()
    assert names(memory) == []


def test_a_buffer_is_put_without_a_copy(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "objects")
    array = np.frombuffer(memory.buffer(LARGE.nbytes))
    array[:] = LARGE
    [draft] = names(memory)
    inode = Path(memory.path, draft).stat().st_ino
    reference = Store(memory).put([array, "x"])
    assert Path(memory.path, reference.key.name).stat().st_ino == inode
    assert names(memory) == [reference.key.name]
    np.testing.assert_equal(reference.get(), [LARGE, "x"])
    array[:] = 1
    assert array.sum() == len(array)
    np.testing.assert_equal(reference.get(), [LARGE, "x"])
    del array
    gc.collect()
    np.testing.assert_equal(reference.get(), [LARGE, "x"])


HUGE: Final = np.arange(REUSED_BYTES // 8, dtype=np.float64)


def _files(memory: Memory) -> dict[int, str]:
    return {Path(memory.path, name).stat().st_ino: name for name in names(memory)}


def test_memory_of_an_evicted_object_is_written_again(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "objects")
    store = Store(memory)
    first = store.put(HUGE)
    [inode] = _files(memory)
    first.evict()
    assert not first.exists()
    second = store.put(-HUGE)
    assert list(_files(memory)) == [inode]
    np.testing.assert_equal(second.get(), -HUGE)
    second.evict()
    array = np.frombuffer(memory.buffer(HUGE.nbytes - 4096))
    array[:] = 7
    third = store.put(array)
    assert list(_files(memory)) == [inode]
    assert set(third.get()) == {7}


def test_memory_that_is_read_is_not_written_again(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "objects")
    store = Store(memory)
    first = store.put(HUGE)
    value = first.get()
    first.evict()
    second = store.put(-HUGE)
    np.testing.assert_equal(value, HUGE)
    np.testing.assert_equal(second.get(), -HUGE)
    array = np.frombuffer(memory.buffer(HUGE.nbytes))
    array[:] = HUGE
    written = store.put(array)
    written.evict()
    third = store.put(-HUGE)  # the writer still has its buffer
    np.testing.assert_equal(array, HUGE)
    np.testing.assert_equal(third.get(), -HUGE)


def test_memory_that_is_kept_is_limited(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "objects")
    references = [Store(memory).put(HUGE) for _ in range(8)]
    for each in references:
        each.evict()
    assert len(names(memory)) == 4


def test_readers_never_see_another_object(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "objects")
    readers = """
from farcall_common.errors import ObjectGone
seen = gone = 0
for line in sys.stdin:
    number, reference = pickle.loads(bytes.fromhex(line))
    try:
        value = reference.get()
    except ObjectGone:
        gone += 1
        continue
    assert value[0] == value[-1] == number and (value == number).all(), (number, value[:3])
    seen += 1
print(json.dumps([seen, gone]))
"""
    processes = [start(memory, readers) for _ in range(2)]
    store = Store(memory)
    for number in range(40):
        reference = store.put(np.full(HUGE.size, float(number)))
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(pickle.dumps((number, reference)).hex() + "\n")
            process.stdin.flush()
        for _ in range(number % 5):  # readers and eviction meet at different moments
            store.get(reference).sum()
        reference.evict()
    counts = []
    for process in processes:
        out, error = process.communicate()
        assert out, error
        counts.append(json.loads(out))
    assert all(seen + gone == 40 for seen, gone in counts)


def test_threads_put_the_same_buffer(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "objects")
    array = np.frombuffer(memory.buffer(LARGE.nbytes))
    array[:] = LARGE
    with ThreadPoolExecutor(8) as pool:
        references = list(pool.map(lambda number: Store(memory).put((array, number)), range(16)))
    for number, reference in enumerate(references):
        np.testing.assert_equal(reference.get(), (LARGE, number))


@pytest.mark.parametrize("part", [slice(1, None), slice(None, -1), slice(None, None, 2)])
def test_a_part_of_a_buffer_is_copied(tmp_path: Path, part: slice) -> None:
    memory = Memory(tmp_path / "objects")
    array = np.frombuffer(memory.buffer(LARGE.nbytes))
    array[:] = LARGE
    np.testing.assert_equal(Store(memory).put(array[part]).get(), LARGE[part])
    assert len(names(memory)) == 2


def test_a_buffer_whose_draft_was_deleted_is_copied(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "objects")
    array = np.frombuffer(memory.buffer(LARGE.nbytes))
    array[:] = LARGE
    [draft] = names(memory)
    Path(memory.path, draft).unlink()
    np.testing.assert_equal(Store(memory).put(array).get(), LARGE)


def test_a_child_cannot_change_what_its_parent_has_put(tmp_path: Path) -> None:
    program = """
buffer = store.buffer(1_600_000)
array = np.frombuffer(buffer)
array[:] = 1
begin, end = os.pipe(), os.pipe()
if os.fork() == 0:
    os.read(begin[0], 1)
    array[:] = 2
    os.write(end[1], b"x")
    os._exit(0)
reference = store.put(array)
os.write(begin[1], b"x")
os.read(end[0], 1)
print(json.dumps([reference.get().sum(), array.sum(), os.wait()[1]]))
"""
    [stored, own, status] = run(Memory(tmp_path / "objects"), program)
    assert (stored, status) == (200_000, 0)
    assert own == 400_000  # the buffer is theirs together, as shared memory is


@pytest.mark.parametrize("kind", ["link", "directory", "pipe"])
def test_what_is_no_file_is_not_opened(directory: Directory, tmp_path: Path, kind: str) -> None:
    reference = Store(directory).put(1)
    path = Path(directory.path, reference.key.name)
    path.rename(tmp_path / "moved")
    if kind == "link":
        path.symlink_to(tmp_path / "moved")
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(ObjectDamaged, match=r"is a link|regular file"):
        reference.get()


def test_a_directory_that_anyone_can_write_to_is_refused(directory: Directory) -> None:
    Path(directory.path).mkdir()
    Path(directory.path).chmod(0o777)
    with pytest.raises(ConfigurationError, match="Every user") as caught:
        directory.put(b"x")
    assert "chmod o-w" in caught.value.hint
    with pytest.raises(ConfigurationError, match="Every user"):
        directory.get(directory.new_key())
    Path(directory.path).chmod(0o700)
    assert Store(directory).put("x").get() == "x"


def test_a_directory_is_private(directory: Directory) -> None:
    key = directory.put(b"x")
    assert Path(directory.path).stat().st_mode & 0o777 == 0o700
    assert Path(directory.path, key.name).stat().st_mode & 0o777 == 0o600


def test_a_directory_that_is_deleted_is_made_again(directory: Directory) -> None:
    reference = Store(directory).put(1)
    for name in os.listdir(directory.path):  # noqa: PTH208
        Path(directory.path, name).unlink()
    Path(directory.path).rmdir()
    assert not reference.exists()
    reference.evict()
    directory.evict_group("a")
    with pytest.raises(ObjectGone):
        reference.get()
    assert Store(directory).put(2).get() == 2


def test_a_path_that_cannot_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError, match="is not a directory"):
        Directory(tmp_path / "file").put(b"x")
    with pytest.raises(StoreUnavailable, match="Not a directory"):
        Directory(tmp_path / "file" / "below").put(b"x")
    with pytest.raises(StoreDenied):
        Directory("/sys/farcall").put(b"x")


def test_use_keeps_an_object_and_the_sweeper_deletes_the_rest(directory: Directory) -> None:
    store = Store(directory)
    used = store.put("used", expires_s=100)
    idle, read, grouped = store.put("idle"), store.put("read", reads=5), store.put("grouped", group="g")
    kept = store.put("kept", explicit=True)
    assert read.get() == "read"
    now = time.time()
    for name in names(directory):
        os.utime(Path(directory.path, name), (0, now - 90))
    assert [each.get() for each in (used, read)] == ["used", "read"]
    for name in names(directory):
        age = now - Path(directory.path, name).stat().st_mtime
        os.utime(Path(directory.path, name), (0, now - age - 24 * 3600 + 50))
    Path(directory.path, "of another program").touch()
    assert not idle.exists()
    assert sweep(directory.path) == 3
    assert [each.exists() for each in (used, idle, read, grouped, kept)] == [False, False, True, False, True]
    assert "of another program" in names(directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_that_another_user_has_made_where_anyone_can_is_refused(directory: Directory) -> None:
    path = Path(directory.path)
    path.mkdir(mode=0o770)
    os.chown(path, 12345, -1)
    path.parent.chmod(0o1777)
    with pytest.raises(ConfigurationError, match="Another user"):
        Store(directory).put(1)
    path.parent.chmod(0o755)  # where only some can, it is shared on purpose
    Store(directory).put(1)


def test_writers_delete_what_has_expired(directory: Directory) -> None:
    store = Store(directory)
    old = store.put(1)
    mark = Path(directory.path, ".swept")
    os.utime(Path(directory.path, old.key.name), (0, 0))
    os.utime(mark, (0, 0))
    assert Store(type(directory)(directory.path)).put(2).get() == 2
    wait_until(lambda: not Path(directory.path, old.key.name).exists())
    assert mark.stat().st_mtime > 0


def test_many_objects_are_read_with_few_descriptors(directory: Directory) -> None:
    program = """
references = [store.put(np.full(40_000, number)) for number in range(200)]
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
values = [each.get() for each in references]
print(json.dumps([bool((value == number).all()) for number, value in enumerate(values)]))
"""
    assert run(directory, program) == [True] * 200


def test_puts_and_gets_leave_nothing(directory: Directory) -> None:
    """Descriptors and memory are the same after thousands of objects. The benchmark does it with more."""
    process, store = psutil.Process(), Store(directory)

    def rounds(count: int) -> tuple[int, int]:
        for _ in range(count):
            for value in (b"small", LARGE):
                reference = store.put(value)
                reference.get()
                reference.evict()
        buffer = store.buffer(LARGE.nbytes)
        array = np.frombuffer(buffer)
        store.put(array).evict()
        del array, buffer
        gc.collect()
        return process.num_fds(), process.memory_info().rss

    rounds(50)
    before = rounds(50)
    after = rounds(1500)
    assert after[0] == before[0]
    assert after[1] - before[1] < 8 * 2**20  # 1,500 arrays would be 2.4 GB
    assert names(directory) == []


# -- references --------------------------------------------------------------------------------------------------------


def test_a_reference_of_a_newer_release(directory: Directory) -> None:
    reference = Store(directory).put(1)
    maker, fields = reference.__reduce__()
    assert maker is _reference
    with pytest.raises(DeserializationError, match="of a newer release") as caught:
        maker(99, *fields[1:], "more")
    assert "Upgrade" in caught.value.hint


@pytest.mark.parametrize("name", ["no.such.Connector", "os.nothing", "nothing", ""])
def test_a_reference_to_an_unknown_connector(name: str) -> None:
    reference: Reference[int] = Reference(Key("x"), name, {}, 1)
    with pytest.raises(ConfigurationError, match="cannot be imported"):
        reference.get()


def test_a_child_has_connections_of_its_own(valkey: Server) -> None:
    reference = Store(Valkey(valkey.url)).put("x")
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os._exit(0 if [reference.get() for _ in range(100)] == ["x"] * 100 else 1)
        os._exit(2)
    assert [reference.get() for _ in range(100)] == ["x"] * 100
    assert os.waitpid(child, 0)[1] == 0


# -- servers -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.start()
    yield server
    server.kill()


def test_a_valkey_that_is_killed(own_server: Server) -> None:
    store = Store(Valkey(own_server.url, timeout_s=5))
    reference = store.put(1)
    own_server.kill()
    for use in (reference.get, reference.exists, reference.evict, lambda: store.put(1), lambda: store.evict_group("g")):
        with pytest.raises(StoreUnavailable, match="Valkey at") as caught:
            use()
        assert caught.value.record.retryable
    own_server.start()
    with pytest.raises(ObjectGone):
        reference.get()
    assert store.put(2).get() == 2


def test_a_valkey_takes_no_object_that_is_too_large(valkey: Server) -> None:
    with pytest.raises(StoreFull, match="up to 536,870,912 bytes"):
        Store(Valkey(valkey.url)).put(np.empty(2**29, dtype=np.uint8))


def test_a_valkey_that_hangs(own_server: Server) -> None:
    reference = Store(Valkey(own_server.url, timeout_s=0.2)).put(1)
    assert own_server._process is not None
    own_server._process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(StoreUnavailable):
            reference.get()
    finally:
        own_server._process.send_signal(signal.SIGCONT)


def test_a_valkey_without_memory(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.start(maxmemory="4mb")
    try:
        store = Store(Valkey(server.url))
        kept = store.put("kept")
        with pytest.raises(StoreFull, match="no memory left"):
            store.put([store.put(b"x" * 2**20) for _ in range(10)])
        assert kept.get() == "kept"
    finally:
        server.kill()


def test_a_wrong_password_is_refused_and_not_shown(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.start()
    try:
        with contextlib.closing(redis.Redis.from_url(server.url)) as client:
            client.config_set("requirepass", "right")
        for password in ("wr0ng", ""):
            url = server.url.replace("redis://", f"valkey://user:{password}@" if password else "valkey://")
            store = Store(Valkey(url))
            with pytest.raises(StoreDenied, match="refuses this user") as caught:
                store.put(1)
            assert "wr0ng" not in str(caught.value) + repr(store) + repr(caught.value.__cause__)
        reference = Store(Valkey(server.url.replace("redis://", "valkey://:right@"))).put(1)
        assert pickle.loads(pickle.dumps(reference)).get() == 1
        assert "right" not in repr(reference)
    finally:
        server.kill()


@pytest.mark.parametrize("url", ["valkey://host:port/0", "nonsense", "http://host", "valkey://:s3cret@host:99999999/0"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigurationError, match="is not the URL") as caught:
        Valkey(url)
    assert "s3cret" not in str(caught.value)


def test_an_s3_without_credentials(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    store = Store(S3("s3://lab/objects", endpoint_url=s3_server, region="us-east-1"))
    with pytest.raises(StoreDenied, match="no credentials for s3://lab/objects"):
        store.put(1)


def test_a_url_of_s3_without_a_bucket_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigurationError, match="cannot be a store") as caught:
        S3("s3://")
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("s3_environment")
def test_an_s3_that_denies(s3_server: str) -> None:
    boto3.client("s3").create_bucket(Bucket="denied")
    store = Store(S3("s3://denied/objects"))
    reference = store.put(1)
    httpx.post(f"{s3_server}/moto-api/reset-auth", content=b"0").raise_for_status()
    try:
        for use in (reference.get, reference.exists, lambda: store.put(2)):
            with pytest.raises(StoreDenied, match="refuses these credentials"):
                use()
    finally:
        httpx.post(f"{s3_server}/moto-api/reset-auth", content=b"inf")
    assert reference.get() == 1


@pytest.mark.usefixtures("s3_environment")
def test_an_s3_that_is_not_there() -> None:
    store = Store(S3("s3://bucket/objects", endpoint_url=f"http://127.0.0.1:{free_port()}"))
    with pytest.raises(StoreUnavailable, match="s3://bucket/objects"):
        store.put(1)


@pytest.mark.usefixtures("s3_environment")
def test_a_bucket_that_is_not_there() -> None:
    name = f"missing-{uuid.uuid4().hex}"
    with pytest.raises(ConfigurationError, match="no bucket"):
        Store(S3(f"s3://{name}/objects")).put(1)
    for url in ("bucket", "https://bucket", "s3://"):
        with pytest.raises(ConfigurationError):
            S3(url)
