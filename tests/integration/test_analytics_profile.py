"""Profiles: measured on workers that are processes, kept in a file, and what plans are made from."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import farcall_analytics as fa
from benchmarks.analytics.shaper import Shape, describe
from farcall_analytics import profile_files
from farcall_analytics.curves import constant
from farcall_analytics.measuring import compute_rates, find_workers, measure
from farcall_common.objects.blocks import open_blocks
from farcall_endpoint import Engine

WORKERS = 2
MB = 1e6


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(max_workers=WORKERS) as found:
        yield found


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path / "home"))


def test_workers_are_counted_and_share_the_memory_of_their_host(engine: Engine) -> None:
    found = find_workers(engine)
    assert len(found) == WORKERS
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert {each.memory for each in found} == {host / WORKERS}


def test_a_storage_has_the_limits_that_its_shape_gives_it(engine: Engine, tmp_path: Path) -> None:
    """Limits are times that requests have to wait, so a slow machine can only be below them."""
    shape = Shape(reads=100.0, writes=50.0, worker_read_bytes=20 * MB, worker_written_bytes=10 * MB, latency_s=0.005)
    url = describe(tmp_path / "slow.json", f"file://{tmp_path}/blocks", shape)
    said: list[str] = []
    found = measure(engine, [url], dollars_per_hour=0.36, progress=said.append)
    assert said == ["workers", "processors", "Benchmarks.analytics.shaper", "memory of nodes"]
    assert found.tiers["node:"].read_bytes_per_s.at(1e9) > 30 * MB
    tier = found.tiers[url]
    assert 10 < tier.reads_per_s.at(1e4) <= 110
    assert 5 < tier.writes_per_s.at(1e4) <= 60
    assert 2 * MB < tier.read_bytes_per_s.at(1e9) <= 30 * MB
    assert 1 * MB < tier.write_bytes_per_s.at(1e9) <= 15 * MB
    assert tier.latency_s >= 0.004
    assert found.workers.most == WORKERS
    assert found.workers.price.byte_s * found.workers.memories[0] == pytest.approx(0.0001)
    assert [each.name for each in found.codecs] == ["none", "lz4", "zstd"]
    assert all(0.1 < each.ratio < 1 for each in found.codecs[1:])
    with open_blocks(f"file://{tmp_path}/blocks") as blocks:
        assert list(blocks.names("")) == [], "nothing is left in the storage"


def test_rows_partition_and_combine_at_some_rate() -> None:
    found = compute_rates(1)
    assert found.partition > 1 * MB
    assert found.combine > 1 * MB


def test_plans_are_made_from_a_profile_until_it_is_stale(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = f"file://{tmp_path}/blocks"
    rows = pa.table({"a": list(range(50_000)), "b": ["text"] * 50_000})
    dataset = fa.from_arrow(rows, executor=engine, storage=storage).sort("a")
    before = dataset.plan()
    assert "Nothing was measured here" in before.explain()
    path = profile_files.profile_path(engine)
    own = profile_files.profile_of(engine, storage)
    slow = dataclasses.replace(own.tiers["shared files"], read_bytes_per_s=constant(1_000.0))
    kept = profile_files.save(path, dataclasses.replace(own, tiers={storage: slow}), [storage])
    assert profile_files.load(path) == kept
    assert kept.has([storage])
    assert not kept.has([storage, "file:///other"])
    found = dataset.plan()
    assert found.estimate.seconds > 10 * before.estimate.seconds
    assert "measured" not in found.explain()
    monkeypatch.setattr(profile_files, "STALE_S", -1.0)
    assert "was measured 0 days ago: run `farcall analytics profile` again" in dataset.plan().explain()
    path.write_bytes(b"of another version")
    assert dataset.plan() == before


def test_a_report_has_what_was_predicted_beside_what_was_measured(engine: Engine, tmp_path: Path) -> None:
    rows = pa.table({"a": list(range(10_000))})
    dataset = fa.from_arrow(rows, executor=engine, storage=f"file://{tmp_path}/blocks").sort("a", descending=True)
    outcome = dataset.write_parquet(str(tmp_path / "out"))
    lines = outcome.report.splitlines()
    assert lines[0].split()[:3] == ["stage", "tasks", "rows"]
    assert [each.split()[0] for each in lines[1:]] == ["1", "2", "all"]
    assert lines[2].split()[2] == "10,000"
    assert outcome.plan.estimate.seconds > 0
