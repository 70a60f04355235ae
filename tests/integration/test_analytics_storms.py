"""Queries while the object store refuses requests, loses answers and does not answer: a real S3 behind a proxy that
makes the faults, and storages with a shape."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest

import farcall_analytics as fa
from benchmarks.analytics.shaper import Shape, ShapedBlocks, SharedTimes, describe
from farcall_analytics.exchange import write_combined, write_pairs
from farcall_common.errors import StoreUnavailable
from farcall_common.objects import pace
from farcall_common.objects.blocks import Blocks, ObjectBlocks, Part, open_blocks
from farcall_common.objects.pace import MOST, Pace
from tests.support.analytics_data import files, oracle, random_rows
from tests.support.file_servers import FaultyProxy


class Storm:
    """A bucket behind a proxy.

    :param name: of the bucket.
    """

    def __init__(self, name: str, proxy: FaultyProxy) -> None:
        self.name = name
        self.url = f"s3://{name}/exchange"
        self.proxy = proxy
        self._s3 = boto3.client("s3")  # of the server itself
        self._s3.create_bucket(Bucket=name)

    def keys(self) -> list[str]:
        """What is in the bucket."""
        return [each["Key"] for each in self._s3.list_objects_v2(Bucket=self.name).get("Contents", [])]


@pytest.fixture
def storm(s3_server: str, s3_environment: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storm]:
    proxy = FaultyProxy(s3_server, lambda *_: None)
    found = Storm(f"storm-{uuid.uuid4().hex}", proxy)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.setitem(pace.PACES, f"s3://{found.name}", Pace(sleep=lambda _: None))
    yield found
    proxy.close()


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def often(part: float, *faults: str) -> Callable[[str, str], str | None]:
    """A part of requests has one of these faults."""
    chance = random.Random(7)
    return lambda *_: chance.choice(faults) if chance.random() < part else None


def once(fault: str, *methods: str) -> Callable[[str, str], str | None]:
    """The first request of each of these methods has a fault."""
    left = set(methods)

    def found(method: str, _: str) -> str | None:
        if method not in left:
            return None
        left.remove(method)
        return fault

    return found


# -- requests to a bucket ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["busy", "reset", "lost"])
def test_a_request_with_a_fault_is_made_again(storm: Storm, fault: str) -> None:
    storm.proxy.fault = once(fault, "GET", "PUT", "POST", "HEAD")
    with open_blocks(storm.url) as blocks:
        assert blocks.create("job/a", [b"0123"]) is (fault != "lost"), "it was written by the request without an answer"
        assert bytes(blocks.read(Part("job/a"))) == b"0123"
        assert bytes(blocks.read(Part("job/a", 2))) == b"23"
        assert bytes(blocks.read(Part("job/a", 1, 3))) == b"12"
        blocks.delete_below("job/")
    assert storm.proxy.made[fault] == 4
    assert storm.keys() == []
    assert pace.pace_of(f"s3://{storm.name}").window.size < MOST


def test_an_answer_that_is_cut_off_is_read_again(storm: Storm) -> None:
    with open_blocks(storm.url) as blocks:
        blocks.create("a", [bytes(100_000)])
        for part in (Part("a"), Part("a", 5, 90_000)):
            storm.proxy.fault = once("cut", "GET")
            assert len(blocks.read(part)) == (part.end or 100_000) - part.start
    assert storm.proxy.made["cut"] == 2


def test_a_read_without_an_answer_is_made_again(storm: Storm) -> None:
    storm.proxy.fault = once("hung", "GET")
    with ObjectBlocks(storm.url, stall_s=1.0) as blocks:
        blocks.create("a", [b"x"])
        assert bytes(blocks.read(Part("a"))) == b"x"
    assert storm.proxy.made["hung"] == 1


def test_a_block_that_others_create_at_the_same_time_is_tried_again(storm: Storm) -> None:
    """S3 answers 409 to a conditional write while another one of the same name is under way, and that one may fail."""
    storm.proxy.fault = once("conflict", "PUT")
    with open_blocks(storm.url) as blocks:
        assert blocks.create("a", [b"x"])
        assert bytes(blocks.read(Part("a"))) == b"x"
        assert not blocks.create("a", [b"y"])
    assert storm.proxy.made["conflict"] == 1


@pytest.mark.parametrize("address", ["", "?prefixes=3"])
def test_names_come_in_pages_each_of_which_is_made_again(
    storm: Storm, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr("farcall_common.objects.blocks._PAGE", 3)
    with open_blocks(storm.url + address) as blocks:
        names = [f"job/{number:02}" for number in range(21)]
        for each in names:
            blocks.create(each, [b"x"])
        storm.proxy.fault = often(0.5, "busy")
        assert sorted(blocks.names("job/")) == names
    assert storm.proxy.made["busy"] > 0


@pytest.mark.parametrize("kind", ["combined", "pairs"])
def test_attempts_whose_answers_are_lost_know_what_is_written(storm: Storm, kind: str) -> None:
    storm.proxy.fault = often(0.5, "lost")
    with open_blocks(storm.url) as blocks:
        for task in range(10):
            partitions = [[b"%d" % task], [b"x"]]
            if kind == "combined":
                found = [write_combined(blocks, f"job/{task}", partitions) for _ in range(2)]
            else:
                found = [write_pairs(blocks, f"job/{task}", attempt, partitions) for attempt in ("one", "two")]
            assert found[0] == found[1]
            for number, expected in enumerate((b"%d" % task, b"x")):
                [(part, *_)] = found[0].parts(number, number + 1)
                assert bytes(blocks.read(part)) == expected
    assert len(storm.keys()) == 10 * (1 if kind == "combined" else 3)
    assert storm.proxy.made["lost"] > 10


# -- whole queries -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "prefixes"), [("combined", 1), ("combined", 4), ("slow", 1), ("two-level", 4)])
def test_a_sort_in_a_storm_gives_its_rows(
    storm: Storm, executor: ThreadPoolExecutor, tmp_path: Path, method: str, prefixes: int
) -> None:
    storm.proxy.fault = often(0.3, "busy", "reset", "lost", "cut")
    rows = random_rows(2000)
    source = fa.read_parquet(
        files(tmp_path / "in", rows),
        executor=executor,
        storage=f"{storm.url}?prefixes={prefixes}",
        share_bytes=2000,
        partitions=4,
        method=method,
    )
    assert source.sort("a").to_arrow().equals(oracle("select * from t order by a", t=rows))
    assert all(storm.proxy.made[fault] > 0 for fault in ("busy", "reset", "lost", "cut"))
    assert storm.keys() == []


@pytest.mark.parametrize("created", [0, 6])
def test_a_store_that_refuses_all_from_some_time_on_ends_the_job_and_leaves_nothing(
    storm: Storm, executor: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, created: int
) -> None:
    time = Time()
    monkeypatch.setitem(pace.PACES, f"s3://{storm.name}", Pace(clock=time.look, sleep=time.sleep))
    puts = iter(range(created))
    storm.proxy.fault = lambda method, _: "busy" if method == "PUT" and next(puts, None) is None else None
    source = fa.read_parquet(
        files(tmp_path / "in", random_rows(1000)), executor=executor, storage=storm.url, share_bytes=2000, partitions=4
    )
    with pytest.raises(StoreUnavailable, match=r"503 Service Unavailable: .*SlowDown.* It was tried \d+ times"):
        source.sort("a").to_arrow()
    assert storm.keys() == []
    assert storm.proxy.made["busy"] > 10


# -- storages with a shape ---------------------------------------------------------------------------------------------


class Time:
    """A clock that sleeps and looks at it move: time is counted in requests, so that no machine is too slow."""

    def __init__(self, *, look_s: float = 0.0) -> None:
        self._now = 100.0
        self._look_s = look_s
        self._lock = threading.Lock()

    def look(self) -> float:
        with self._lock:
            self._now += self._look_s
            return self._now

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds


class CountedTimes(SharedTimes):
    """Counts what is refused."""

    refused = 0

    def admit(self, limit: int, seconds: float, now: float) -> bool:
        is_admitted = super().admit(limit, seconds, now)
        CountedTimes.refused += not is_admitted
        return is_admitted


def test_a_sort_on_a_storage_that_refuses_requests_beyond_its_rates(
    executor: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Time(look_s=0.001)
    own = Pace(limit_s=1e9, clock=time.look, sleep=time.sleep)
    storage = f"file://{tmp_path}/blocks"
    shape = Shape(reads=50, writes=50, refuses=True)

    def open_refusing(url: str) -> Blocks:
        times = CountedTimes(tmp_path / "times")
        return ShapedBlocks(open_blocks(url), shape, times, pace=own, clock=time.look, sleep=time.sleep)

    monkeypatch.setattr(CountedTimes, "refused", 0)
    monkeypatch.setattr("farcall_analytics.passing.open_storage", open_refusing)
    rows = random_rows(2000)
    source = fa.read_parquet(
        files(tmp_path / "in", rows), executor=executor, storage=storage, share_bytes=2000, partitions=4
    )
    assert source.sort("a").to_arrow().equals(oracle("select * from t order by a", t=rows))
    assert CountedTimes.refused > 0
    assert own.window.size < MOST
    assert (own.window.running, list(open_blocks(storage).names(""))) == (0, [])


def test_a_storage_is_described_that_refuses_and_fails(executor: ThreadPoolExecutor, tmp_path: Path) -> None:
    shape = Shape(reads=1_000, writes=1_000, refuses=True, error_part=0.3)
    storage = describe(tmp_path / "shape.json", f"file://{tmp_path}/blocks?prefixes=4", shape)
    rows = random_rows(1000)
    options: dict[str, Any] = {"storage": storage, "share_bytes": 5000, "partitions": 3}
    source = fa.read_parquet(files(tmp_path / "in", rows), executor=executor, **options)
    assert source.sort("a").to_arrow().equals(oracle("select * from t order by a", t=rows))
    window = pace.pace_of(storage).window
    assert (window.size < MOST, window.running) == (True, 0)
    assert [each for each in (tmp_path / "blocks").rglob("*") if each.is_file()] == []
