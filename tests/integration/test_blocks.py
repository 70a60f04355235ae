"""Storages of blocks: one suite for all of them, with real servers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import mmap
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
import redis

from farcall_common.errors import ConfigurationError, ObjectGone, StoreFull, StoreUnavailable
from farcall_common.objects import node_blocks
from farcall_common.objects.blocks import Blocks, Part, open_blocks
from farcall_common.objects.node_blocks import NodeBlocks, OneNode, open_node_blocks
from farcall_common.objects.s3 import open_bucket
from tests.integration import store_servers
from tests.waiting import WAIT_S

BUCKET = "blocks"
STORAGES = ("memory", "directory", "directory, 16 prefixes", "node", "valkey", "cluster", "s3", "s3, 20 prefixes")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Valkey in cluster mode that has all slots, as ElastiCache Serverless shows itself."""
    server = store_servers.Valkey(tmp_path_factory.mktemp("cluster"))
    try:
        # The default port of its nodes is 10,000 above, which may be none.
        server.start(**{"cluster-enabled": "yes", "cluster-port": store_servers.free_port()})
        with contextlib.closing(redis.Redis.from_url(server.url)) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)  # type: ignore[no-untyped-call]
            deadline = time.monotonic() + WAIT_S
            while b"cluster_state:ok" not in client.execute_command("CLUSTER", "INFO"):  # type: ignore[no-untyped-call]
                assert time.monotonic() < deadline
        yield server.url
    finally:
        server.kill()


@pytest.fixture(autouse=True)
def _no_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a node is a directory on a disk here, which may be nearly full."""
    monkeypatch.setattr(node_blocks, "_RESERVED_PART", 2**40)


@pytest.fixture(params=STORAGES)
def blocks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Blocks]:
    if request.param == "node":
        yield NodeBlocks(OneNode(tmp_path / "node"))
        return
    if request.param == "memory":
        url = "memory:"
    elif request.param.startswith("directory"):
        url = f"file://{tmp_path}/blocks{'?prefixes=16' if ',' in request.param else ''}"
    elif request.param == "valkey":
        server: store_servers.Valkey = request.getfixturevalue("valkey")
        url = server.url
    elif request.param == "cluster":
        url = request.getfixturevalue("cluster")
    else:
        request.getfixturevalue("s3_environment")
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        url = f"s3://{BUCKET}/{uuid.uuid4().hex}{'?prefixes=20' if ',' in request.param else ''}"
    with open_blocks(url) as storage:
        yield storage
        storage.delete_below("")


def test_a_block_is_written_once_and_read_in_parts(blocks: Blocks) -> None:
    assert blocks.create("job/a", [b"0123", memoryview(b"456789")])
    assert bytes(blocks.read(Part("job/a"))) == b"0123456789"
    assert bytes(blocks.read(Part("job/a", 2, 5))) == b"234"
    assert bytes(blocks.read(Part("job/a", 7))) == b"789"
    assert bytes(blocks.read(Part("job/a", 3, 3))) == b""
    assert not blocks.create("job/a", [b"another"])
    assert bytes(blocks.read(Part("job/a"))) == b"0123456789"


def test_a_directory_keeps_nothing_of_what_is_deleted(tmp_path: Path) -> None:
    with open_blocks(f"file://{tmp_path}/blocks") as blocks:
        for name in ("job/a/0", "job/b", "job2/a"):
            blocks.create(name, [b"x"])
        (tmp_path / "blocks" / "job" / "b#1").write_bytes(b"a draft of a writer that was killed")
        (tmp_path / "own").mkdir()
        blocks.delete_below("job/")
        assert [each.name for each in (tmp_path / "blocks").iterdir()] == ["job2"]
        for elsewhere in ("../own/", f"{tmp_path}/own/", "job2/../../own/"):
            with contextlib.suppress(StoreUnavailable, ValueError):
                blocks.delete_below(elsewhere)
        assert (tmp_path / "own").is_dir()
        assert list(blocks.names("")) == ["job2/a"]


def test_blocks_are_spread_over_prefixes_by_their_names(tmp_path: Path) -> None:
    with open_blocks(f"file://{tmp_path}/blocks?prefixes=16") as blocks:
        for number in range(100):
            blocks.create(f"job/{number}", [b"x"])
    found = {f"{each.parent.parent.name}/{each.name}" for each in (tmp_path / "blocks").glob("*/job/*")}
    assert len(found) == 100
    assert {each.split("/")[0] for each in found} == {f"0{number:x}" for number in range(16)}
    assert {"00/0", "09/11", "06/3"} <= found, "it is the same hash in each version"
    with open_blocks(f"file://{tmp_path}/blocks?prefixes=1") as blocks:
        blocks.create("job/0", [b"x"])
    assert (tmp_path / "blocks" / "job" / "0").is_file()


def test_of_several_attempts_at_the_same_time_one_succeeds(blocks: Blocks) -> None:
    with concurrent.futures.ThreadPoolExecutor(16) as attempts:
        created = list(attempts.map(lambda number: blocks.create("job/a", [b"%02d" % number * 1000]), range(16)))
    assert created.count(True) == 1
    winner = created.index(True)
    assert bytes(blocks.read(Part("job/a"))) == b"%02d" % winner * 1000


def test_parts_come_in_their_order(blocks: Blocks) -> None:
    for number in range(20):
        blocks.create(f"job/{number}", [bytes([number]) * 100])
    parts = [Part(f"job/{number}", number, number + 2) for number in range(20)]
    assert [bytes(each) for each in blocks.read_all(parts)] == [bytes([number]) * 2 for number in range(20)]


def test_what_is_not_there_is_said(blocks: Blocks) -> None:
    blocks.create("job/short", [b"123"])
    for part in (Part("job/none"), Part("job/none", 1, 2), Part("job/short", 1, 9)):
        with pytest.raises(ObjectGone):
            blocks.read(part)


def test_all_of_an_exchange_is_deleted_and_nothing_else(blocks: Blocks) -> None:
    for name in ("one/a", "one/b/c", "other/a", "one-more/a"):
        blocks.create(name, [b"x"])
    assert sorted(blocks.names("one/")) == ["one/a", "one/b/c"]
    blocks.delete(["one/a", "one/never"])
    assert sorted(blocks.names("one/")) == ["one/b/c"]
    blocks.delete_below("one/")
    assert sorted(blocks.names("")) == ["one-more/a", "other/a"]
    blocks.delete_below("none/")
    assert blocks.create("one/a", [b"again"])


def test_an_empty_block_and_one_with_a_strange_name(blocks: Blocks) -> None:
    assert blocks.create("job/[a]*?", [])
    assert blocks.create("job/b", [])
    assert bytes(blocks.read(Part("job/[a]*?"))) == b""
    assert sorted(blocks.names("job/")) == ["job/[a]*?", "job/b"]


OPTIONS = (
    *(
        "s3://b/p?prefixes=0",
        "s3://b/p?prefixes=257",
        "s3://b/p?prefixes=²",
        "s3://b/p?prefixes=",
        "s3://b/p?prefix=16",
    ),
    *("s3://b/p?x=1&prefixes=16", "file:///tmp/x?prefixes=many"),
)


@pytest.mark.parametrize(
    "url", ["", "ftp://x", "file://relative", "s3:/x", "valkey:x", "memory", "no.module:x", *OPTIONS]
)
def test_an_address_that_cannot_be_one_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError):
        open_blocks(url)


@pytest.mark.parametrize(("name", "is_express"), [("lab--use1-az4--x-s3", True), ("lab", False), ("x-s3", False)])
def test_directory_buckets_are_told_by_their_names(name: str, is_express: bool) -> None:
    config = open_bucket(f"s3://{name}/prefix--x-s3", region="us-east-1").config
    assert ("s3_express" in config) == is_express


def test_a_storage_that_does_not_answer_is_said() -> None:
    with open_blocks("valkey://127.0.0.1:1/0") as storage, pytest.raises(StoreUnavailable):
        storage.create("a", [b"x"])


def test_a_directory_is_for_its_user_alone(tmp_path: Path) -> None:
    with open_blocks(f"file://{tmp_path}/new/blocks") as storage:
        storage.create("a", [b"x"])
    assert (tmp_path / "new" / "blocks").stat().st_mode & 0o777 == 0o700
    assert [each.name for each in (tmp_path / "new" / "blocks").iterdir()] == ["a"]


# -- the memory of nodes -----------------------------------------------------------------------------------------------


def test_no_name_of_a_block_leads_out_of_the_memory_of_a_node(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"of another user")
    blocks = NodeBlocks(OneNode(tmp_path / "node"))
    blocks.create("job/a", [b"x"])
    for name in ("../secret", "..", f"{tmp_path}/secret", "job/../../secret", ".", ""):
        with pytest.raises(ObjectGone):
            blocks.read(Part(name))
        assert blocks.create(name, [b"own"])
        assert bytes(blocks.read(Part(name))) == b"own"
    assert (tmp_path / "secret").read_bytes() == b"of another user"
    assert {each.name for each in tmp_path.iterdir()} == {"node", "secret"}
    assert (tmp_path / "node").stat().st_mode & 0o777 == 0o700


def test_links_and_pipes_in_the_memory_of_a_node_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"of another user")
    blocks = NodeBlocks(OneNode(tmp_path / "node"))
    blocks.create("job/a", [b"x"])
    (tmp_path / "node" / "b-job%2Flink").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "node" / "b-job%2Fpipe")
    for name in ("job/link", "job/pipe"):
        with pytest.raises(StoreUnavailable):
            blocks.read(Part(name))
        assert not blocks.create(name, [b"y"])
    assert (tmp_path / "secret").read_bytes() == b"of another user"


def test_large_parts_of_the_memory_of_a_node_are_mapped_at_any_offset(tmp_path: Path) -> None:
    content = bytes(range(256)) * 8_000
    blocks = NodeBlocks(OneNode(tmp_path / "node"))
    blocks.create("job/a", [content])
    for start, end in ((0, None), (1, None), (4_095, 4_097 + 300_000), (5_000, 1_000_001)):
        assert bytes(blocks.read(Part("job/a", start, end))) == content[start:end]
    read = blocks.read(Part("job/a"))
    assert read.readonly
    assert isinstance(read.obj, mmap.mmap)
    blocks.delete(["job/a"])
    assert bytes(read) == content, "what is read stays"


def test_blocks_without_room_are_refused_and_old_ones_make_room(tmp_path: Path) -> None:
    blocks = NodeBlocks(OneNode(tmp_path / "node"), most_bytes=1000)
    blocks.create("killed/a", [bytes(600)])
    blocks.create("job/a", [bytes(300)])
    with pytest.raises(StoreFull):
        blocks.create("job/b", [bytes(200)])
    assert sorted(blocks.names("")) == ["job/a", "killed/a"]
    two_days_ago = time.time() - 2 * 86_400
    os.utime(tmp_path / "node" / "b-killed%2Fa", (two_days_ago, two_days_ago))
    assert blocks.create("job/b", [bytes(200)])
    assert sorted(blocks.names("")) == ["job/a", "job/b"]
    with pytest.raises(StoreFull):
        NodeBlocks(OneNode(None)).create("job/a", [b"x"])
    with pytest.raises(ObjectGone):
        NodeBlocks(OneNode(None)).read(Part("job/a"))


def test_the_memory_of_nodes_is_for_tasks() -> None:
    with pytest.raises(ConfigurationError, match="for tasks of Farcall"):
        open_node_blocks("node:")
    with pytest.raises(ConfigurationError, match="Invalid storage of blocks node:many"):
        open_node_blocks("node:many")


@pytest.mark.parametrize("url", ["no.such.module:/x", "os.path:/x", "xml.dom:/x", ".x:/x", "..:/x"])
def test_a_scheme_that_names_no_module_with_a_storage_is_unknown(url: str) -> None:
    with pytest.raises(ConfigurationError, match="Unknown storage of blocks"):
        open_blocks(url)


def test_a_module_with_a_storage_that_lacks_a_library_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "storages").mkdir()
    (tmp_path / "storages" / "lacking.py").write_text("import no_such_library\n")
    (tmp_path / "storages" / "whole.py").write_text("def open_storage(url):\n    return url.upper()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        open_blocks("storages.lacking:/x")
    assert str(open_blocks("storages.whole:/x")) == "STORAGES.WHOLE:/X"
