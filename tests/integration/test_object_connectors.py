"""Connectors of objects: one suite for all of them, with real servers, also by way of ProxyStore's own store."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
from proxystore.connectors.file import FileConnector
from proxystore.connectors.protocols import Connector as ProxyStoreConnector
from proxystore.connectors.protocols import DeferrableConnector
from proxystore.proxy import Proxy, extract, is_resolved
from proxystore.store import Store as ProxyStore
from proxystore.store import get_store
from proxystore.store.lifetimes import ContextLifetime
from proxystore.store.ref import OwnedProxy, borrow

from farcall_common.errors import InvalidRequest, ObjectDamaged, ObjectGone, Unsupported
from farcall_common.objects import S3, Directory, Key, Memory, Reference, Store, Valkey
from farcall_common.objects.connectors import ObjectConnector
from farcall_common.objects.references import connected, resolved
from tests.integration import store_servers

BUCKET = "objects"
CONNECTORS = ("directory", "memory", "valkey", "s3")
ARRAY = np.arange(100_000, dtype=np.float64)
#: Takes the whole of an object by one read in each of several processes, and prints how many got it.
READ = "import sys, pickle; r = pickle.load(sys.stdin.buffer); sys.stdin.buffer.close(); print(r.get())"


@pytest.fixture(params=CONNECTORS)
def connector(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectConnector]:
    if request.param == "directory":
        yield Directory(tmp_path / "objects")
    elif request.param == "memory":
        directory = Path("/dev/shm", f"farcall-test-{uuid.uuid4().hex}")
        yield Memory(directory)
        for path in directory.iterdir() if directory.exists() else ():
            path.unlink()
        if directory.exists():
            directory.rmdir()
    elif request.param == "valkey":
        server: store_servers.Valkey = request.getfixturevalue("valkey")
        made = Valkey(server.url)
        yield made
        made.close()
    else:
        request.getfixturevalue("s3_environment")
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield S3(f"s3://{BUCKET}/{uuid.uuid4().hex}")


@pytest.fixture
def store(connector: ObjectConnector) -> Store:
    return Store(connector)


class Point:
    """A class that travels by value."""

    def __init__(self, x: int) -> None:
        self.x = x


VALUES: dict[str, Any] = {
    "none": None,
    "text": "héllo",
    "empty bytes": b"",
    "bytes": bytes(range(256)) * 2000,
    "array": ARRAY,
    "fortran": np.asfortranarray(np.arange(60_000.0).reshape(200, 300)),
    "no elements": np.empty((0, 3)),
    "objects": np.array([None, "a", {}], dtype=object),
    "several": {"a": ARRAY, "b": [np.arange(20_000), "c"], "c": b"x" * 300_000},
}


# -- ours --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back(store: Store, name: str) -> None:
    reference = store.put(VALUES[name])
    for _ in range(2):
        np.testing.assert_equal(pickle.loads(pickle.dumps(reference)).get(), VALUES[name])


def test_a_value_whose_class_is_only_here_comes_back(store: Store) -> None:
    assert store.put([Point(3)]).get()[0].x == 3
    assert store.put(lambda: 7).get()() == 7


def test_a_reader_may_change_what_it_got(store: Store) -> None:
    reference = store.put({"array": ARRAY, "small": np.arange(3)})
    value = reference.get()
    value["array"][:] = 0
    value["small"][:] = 0
    np.testing.assert_equal(reference.get(), {"array": ARRAY, "small": np.arange(3)})


def test_a_writer_may_change_what_it_has_put(store: Store) -> None:
    array = ARRAY.copy()
    reference = store.put(array)
    array[:] = 0
    np.testing.assert_equal(reference.get(), ARRAY)


def test_arrays_are_aligned(store: Store) -> None:
    arrays: list[Any] = [ARRAY, ARRAY[1:]]
    for array in store.put(arrays).get():
        assert array.ctypes.data % 16 == 0


def test_a_buffer_is_put_as_it_is_then(store: Store) -> None:
    array = np.frombuffer(store.buffer(ARRAY.nbytes))
    array[:] = ARRAY
    reference = store.put({"name": "x", "array": array, "other": ARRAY})
    array[:] = 0
    np.testing.assert_equal(reference.get(), {"name": "x", "array": ARRAY, "other": ARRAY})
    np.testing.assert_equal(store.put(array).get(), np.zeros_like(ARRAY))


def test_an_evicted_object_is_gone(store: Store) -> None:
    reference = store.put(ARRAY)
    assert store.exists(reference)
    value = store.get(reference)
    store.evict(reference)
    store.evict(reference)
    assert not store.exists(reference)
    np.testing.assert_equal(value, ARRAY)  # who has it keeps it
    with pytest.raises(ObjectGone, match="is gone") as caught:
        store.get(reference)
    assert "Put it again" in caught.value.hint


def test_an_object_expires(store: Store) -> None:
    reference = store.put("x", expires_s=1)
    other = store.put("y", expires_s=1000)
    deadline = time.monotonic() + 60
    while reference.exists():
        assert time.monotonic() < deadline
    with pytest.raises(ObjectGone):
        reference.get()
    assert other.get() == "y"


def test_counted_reads(store: Store) -> None:
    reference = store.put("x", reads=3)
    assert reference.exists()
    assert [reference.get() for _ in range(3)] == ["x"] * 3
    assert not reference.exists()
    with pytest.raises(ObjectGone):
        reference.get()


def test_an_object_with_reads_left_can_be_evicted(store: Store) -> None:
    reference = store.put("x", reads=3)
    assert reference.get() == "x"
    reference.evict()
    assert not reference.exists()
    with pytest.raises(ObjectGone):
        reference.get()


def test_counted_reads_of_many_processes(store: Store) -> None:
    reads, readers = 5, 12
    reference = store.put("got it", reads=reads)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", READ], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(readers)
    ]
    for process in processes:  # they have imported nothing yet: all read at about the same time
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(reference))
        process.stdin.close()
        process.stdin = None
    ended = [process.communicate() for process in processes]
    assert sum(out == b"got it\n" for out, _ in ended) == reads
    assert sum(b"OBJECT_GONE" in error for _, error in ended) == readers - reads
    assert not reference.exists()


def test_a_group_is_evicted(store: Store) -> None:
    mine = [store.put(number, group="fold-1") for number in range(5)]
    others = [store.put(0, group="fold-10"), store.put(0), store.put(0, explicit=True), store.put(0, reads=2)]
    store.evict_group("fold-1")
    assert [each.exists() for each in mine] == [False] * 5
    assert [each.exists() for each in others] == [True] * 4
    store.evict_group("nothing")


def test_a_block_evicts_what_was_put_in_it(store: Store) -> None:
    kept, added = store.put(1), store.put(3)
    references: list[Reference[Any]] = [added]

    def fail() -> None:
        with store.lifetime() as lifetime:
            references.extend([lifetime.put(ARRAY), lifetime.put(2)])
            lifetime.add(added)
            assert all(each.exists() for each in references)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [each.exists() for each in (*references, kept)] == [False, False, False, True]


@pytest.mark.parametrize(
    "name",
    [
        *("../../etc/passwd", "/etc/passwd", "", ".", "a" * 32, f"{'a' * 32}.t/../x", f"{'a' * 32}.q"),
        *(f"{'a' * 32}.t-0", f"{'a' * 32}.c-0", f"{'a' * 32}.c-99999999", f"{'a' * 32}.g-a/b", f"{'A' * 32}.t"),
        *(f"{'a' * 32}.t\n", f"{'a' * 32}.g-{'a' * 65}", f"{'a' * 32}.g-*"),
    ],
)
def test_a_key_that_is_none_is_refused(connector: ObjectConnector, name: str) -> None:
    for use in (connector.get, connector.exists, connector.evict, lambda key: connector.set(key, b"x")):
        with pytest.raises(InvalidRequest, match="is not the key"):
            use(Key(name))
    for use in (connector.get, connector.exists, connector.evict):
        with pytest.raises(InvalidRequest):
            use((name, "second"))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            use((7,))  # type: ignore[arg-type]


def test_keys_cannot_be_guessed(connector: ObjectConnector) -> None:
    keys = {connector.new_key().name for _ in range(1000)}
    assert len(keys) == 1000
    assert all(len(name) == 34 for name in keys)


@pytest.mark.parametrize(
    "options",
    [
        *({"expires_s": 0}, {"expires_s": float("nan")}, {"expires_s": 1e12}, {"reads": 0}, {"reads": 1001}),
        *({"group": "a/b"}, {"group": ""}, {"group": "*"}, {"reads": 1, "explicit": True}),
    ],
)
def test_a_lifetime_that_is_none_is_refused(store: Store, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"between|group|one lifetime"):
        store.put(1, **options)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half a head": lambda data: data[:40],
    "truncated": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "foreign": lambda data: b"\x89HDF" + data[4:],
    "zeros": lambda data: bytes(len(data)),
    "another release": lambda data: data[:8] + b"\2" + data[9:],
    "forged start": lambda data: data[:16] + b"\xff" * 8 + data[24:],
    "forged size": lambda data: data[:24] + b"\xff" * 8 + data[32:],
    "another object": lambda data: other_object(),
}


def other_object() -> bytes:
    from farcall_common.objects.encoding import encode

    return b"".join(encode("another value"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_the_object_is_an_error(connector: ObjectConnector, damage: str) -> None:
    reference = Store(connector).put(ARRAY)
    key = connector.new_key()
    data = connector.get(reference.key)
    assert data is not None
    connector.set(key, DAMAGES[damage](bytes(data)))
    with pytest.raises(ObjectDamaged):
        Reference(key, reference.connector, reference.config, reference.size_bytes).get()


def test_a_damaged_value_is_an_error(connector: ObjectConnector) -> None:
    store = Store(connector)
    for value in ({"a": 1}, ARRAY, [ARRAY, "x"]):
        reference = store.put(value)
        data = connector.get(reference.key)
        assert data is not None
        key = connector.new_key()
        for at in range(64, min(len(data), 180)):
            changed = bytearray(data)
            changed[at] ^= 0xFF
            connector.set(key, bytes(changed))
            damaged: Reference[Any] = Reference(key, reference.connector, reference.config, reference.size_bytes)
            with contextlib.suppress(Exception):  # an error, or another value: never a crash
                damaged.get()


def test_a_reference_to_a_huge_object_takes_no_memory(store: Store) -> None:
    reference = store.put(1)
    with pytest.raises(ObjectDamaged):
        Reference(reference.key, reference.connector, reference.config, 2**62).get()


def test_a_reference_is_small_and_equal_to_its_copies(store: Store) -> None:
    reference = store.put(ARRAY)
    pickled = pickle.dumps(reference)
    assert len(pickled) < 400
    assert pickle.loads(pickled) == reference
    assert {reference: 1}[pickle.loads(pickled)] == 1
    assert reference != store.put(ARRAY)
    assert "800," in repr(reference)


def test_two_writers_do_not_meet(store: Store) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITE, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for number in range(2)
    ]
    config = pickle.dumps(store.put(0))
    for number, writer in enumerate(writers):
        out, _ = writer.communicate(config, timeout=240)
        for index, reference in enumerate(pickle.loads(out)):
            assert reference.get().tolist() == [number, index] * 1000


WRITE = """
import pickle, sys
import numpy as np
from farcall_common.objects import Store
from farcall_common.objects.references import connected
given = pickle.load(sys.stdin.buffer)
store = Store(connected(given.connector, given.config))
number = int(sys.argv[1])
pickle.dump([store.put(np.array([number, index] * 1000)) for index in range(100)], sys.stdout.buffer)
"""


# -- ProxyStore's store on our connectors ------------------------------------------------------------------------------


@pytest.fixture
def proxied(connector: ObjectConnector) -> Iterator[ProxyStore[Any]]:
    with ProxyStore(f"test-{uuid.uuid4().hex}", connector, cache_size=0, register=True) as store:
        yield store


def test_proxystore_knows_our_connectors(connector: ObjectConnector) -> None:
    assert isinstance(connector, ProxyStoreConnector)
    assert isinstance(connector, DeferrableConnector)
    assert type(connector).from_config(connector.config()).config() == connector.config()


def test_proxystore_puts_and_gets(proxied: ProxyStore[Any]) -> None:
    key = proxied.put(ARRAY)
    assert proxied.exists(key)
    np.testing.assert_equal(proxied.get(key), ARRAY)
    proxied.evict(key)
    assert not proxied.exists(key)
    assert proxied.get(key) is None


def test_proxystore_batches(proxied: ProxyStore[Any]) -> None:
    keys = proxied.put_batch(["a", b"b", ARRAY])
    np.testing.assert_equal([proxied.get(key) for key in keys], ["a", b"b", ARRAY])
    assert [bytes(each or b"") for each in proxied.connector.get_batch(keys[:2])] == [b"US\na", b"BS\nb"]
    proxied.evict(keys[0])
    assert proxied.connector.get_batch(keys[:1]) == [None]


def test_proxystore_proxies(proxied: ProxyStore[Any]) -> None:
    proxy: Proxy[Any] = proxied.proxy(ARRAY, populate_target=False)
    assert not is_resolved(proxy)
    copied = pickle.loads(pickle.dumps(proxy))
    np.testing.assert_equal(extract(copied), ARRAY)
    once: Proxy[Any] = proxied.proxy("x", evict=True, populate_target=False)
    copied = pickle.loads(pickle.dumps(once))
    assert copied == "x"
    assert [str(each) for each in proxied.proxy_batch(["a", "b"])] == ["a", "b"]
    assert get_store(proxied.name) is proxied


def test_a_proxy_is_resolved_in_another_process(proxied: ProxyStore[Any]) -> None:
    proxy: Proxy[Any] = proxied.proxy("from afar", populate_target=False)
    program = "import pickle, sys; print(str(pickle.load(sys.stdin.buffer)))"
    ran = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(proxy), capture_output=True, check=False)
    assert ran.stdout == b"from afar\n", ran.stderr.decode()


def test_proxystore_futures(proxied: ProxyStore[Any]) -> None:
    future: Any = proxied.future(polling_interval=0.01)
    proxy = future.proxy()
    future.set_result("later")
    assert proxy == "later"


def test_proxystore_lifetimes(proxied: ProxyStore[Any]) -> None:
    with ContextLifetime(proxied) as lifetime:
        key = proxied.put("value", lifetime=lifetime)
        proxy: Proxy[str] = proxied.proxy("value", lifetime=lifetime)
        assert proxied.exists(key)
        assert proxy == "value"
    assert not proxied.exists(key)


def test_proxystore_ownership(proxied: ProxyStore[Any]) -> None:
    owned: OwnedProxy[str] = proxied.owned_proxy("value")
    key = owned.__proxy_factory__.key
    lent = borrow(owned)
    assert lent == "value"
    del lent
    assert proxied.exists(key)
    del owned
    assert not proxied.exists(key)


# -- a connector of ProxyStore in our store ----------------------------------------------------------------------------


def test_a_connector_of_proxystore_in_our_store(tmp_path: Path) -> None:
    store = Store(FileConnector(str(tmp_path / "theirs")))
    reference = store.put({"a": ARRAY})
    assert reference.connector == "proxystore.connectors.file.FileConnector"
    copied = pickle.loads(pickle.dumps(reference))
    np.testing.assert_equal(copied.get(), {"a": ARRAY})
    np.testing.assert_equal(resolved([copied, 1], {"x": copied}), ([{"a": ARRAY}, 1], {"x": {"a": ARRAY}}))
    assert copied.exists()
    copied.evict()
    assert not copied.exists()
    with pytest.raises(Unsupported, match="until they are evicted"):
        store.put(1, reads=2)
    with pytest.raises(Unsupported, match="no groups"):
        store.evict_group("a")
    assert connected(reference.connector, reference.config) is store.connector
    assert "FileConnector" in repr(store)
    assert os.listdir(tmp_path / "theirs") == []  # noqa: PTH208
