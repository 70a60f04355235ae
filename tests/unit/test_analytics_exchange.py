"""Exchange of partitions: whatever attempts do, the rows of one of them count; and the shaper."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.analytics.shaper import Shape, ShapedBlocks, SharedTimes
from farcall_analytics import passing
from farcall_analytics.exchange import Written, divided, read_combined, read_pairs, write_combined, write_pairs
from farcall_analytics.passing import Way
from farcall_common.errors import ConfigurationError, ObjectGone, StoreBusy, StoreUnavailable
from farcall_common.objects.blocks import Blocks, Part, open_blocks, prefix_number
from farcall_common.objects.pace import Pace
from farcall_common.payload import Piece
from tests.support.blocks import WrappedBlocks

T = TypeVar("T")

PARTITIONS = st.lists(st.lists(st.binary(max_size=20), max_size=3), min_size=1, max_size=8)


class FailingBlocks(WrappedBlocks):
    """Fails from the given write on, which is done or not."""

    def __init__(self, blocks: Blocks, *, writes: int, is_done: bool) -> None:
        super().__init__(blocks)
        self._left = writes
        self._is_done = is_done

    def create(self, name: str, pieces: Sequence[Piece]) -> bool:
        if self._left <= 0:
            if self._is_done:
                super().create(name, pieces)
            raise StoreUnavailable("it was cut off")
        self._left -= 1
        return super().create(name, pieces)


def write(kind: str, blocks: Blocks, name: str, attempt: str, partitions: Sequence[Sequence[Piece]]) -> Written:
    if kind == "combined":
        return write_combined(blocks, name, partitions)
    return write_pairs(blocks, name, attempt, partitions)


def contents(blocks: Blocks, written: Sequence[Written], count: int, *, step: int = 1) -> list[list[bytes]]:
    """What each partition is, of each task, if so many are read at once."""
    found: list[list[bytes]] = [[] for _ in range(count)]
    for each in written:
        for first in range(0, count, step):
            place = first
            for part, sizes, checks in each.parts(first, min(first + step, count)):
                data = blocks.read(part)
                assert len(data) == sum(sizes)
                for own in divided(part, data, sizes, checks):
                    found[place].append(bytes(own))
                    place += 1
    return found


@given(st.sampled_from(["combined", "pairs"]), PARTITIONS, st.integers(1, 4), st.integers(1, 8))
def test_each_partition_is_read_as_each_task_has_written_it(
    kind: str, partitions: list[list[bytes]], tasks: int, step: int
) -> None:
    with open_blocks("memory:") as blocks:
        written = [write(kind, blocks, f"job/{task}", "a", partitions) for task in range(tasks)]
        expected = [[b"".join(pieces)] * tasks for pieces in partitions]
        assert contents(blocks, written, len(partitions), step=step) == expected
        assert len(list(blocks.names("job/"))) == tasks * (1 if kind == "combined" else len(partitions) + 1)


@given(PARTITIONS, st.integers(1, 8), st.integers(1, 8))
def test_blocks_of_several_partitions_are_read_whole_or_in_part(
    partitions: list[list[bytes]], per_block: int, step: int
) -> None:
    with open_blocks("memory:") as blocks:
        written = write_pairs(blocks, "job/0", "a", partitions, per_block=per_block)
        assert contents(blocks, [written], len(partitions), step=step) == [[b"".join(each)] for each in partitions]
        assert len(list(blocks.names("job/"))) == math.ceil(len(partitions) / per_block) + 1
        for first in range(0, len(partitions), per_block):
            parts = list(written.parts(first, min(first + per_block, len(partitions))))
            assert [part.end for part, *_ in parts] == [None], "a whole block is one request without a range"


@pytest.mark.parametrize("kind", ["combined", "pairs"])
@pytest.mark.parametrize("is_done", [True, False])
@pytest.mark.parametrize("writes", range(5))
def test_an_attempt_that_is_cut_off_anywhere_leaves_one_result(kind: str, is_done: bool, writes: int) -> None:
    first, second = [[b"aa"], [b"a"], [b""]], [[b"b"], [b""], [b"bbb"]]
    with open_blocks("memory:") as blocks:
        failing = FailingBlocks(blocks, writes=writes, is_done=is_done)
        try:
            before = write(kind, failing, "job/0", "one", first)
        except StoreUnavailable:
            before = None
        after = write(kind, blocks, "job/0", "two", second)
        assert before in (None, after), "all attempts know the same result"
        found = [each for [each] in contents(blocks, [after], 3)]
        assert found in ([b"aa", b"a", b""], [b"b", b"", b"bbb"])
        if before is not None:
            assert found == [b"aa", b"a", b""]
        assert write(kind, blocks, "job/0", "three", first) == after


class ForgetfulBlocks(FailingBlocks):
    """Each request is made twice, as when the first answer is lost."""

    def create(self, name: str, pieces: Sequence[Piece]) -> bool:
        super().create(name, pieces)
        return super().create(name, pieces)


@pytest.mark.parametrize("kind", ["combined", "pairs"])
def test_an_attempt_whose_answers_are_lost_counts_all_the_same(kind: str) -> None:
    with ForgetfulBlocks(open_blocks("memory:"), writes=100, is_done=True) as blocks:
        written = write(kind, blocks, "job/0", "one", [[b"x"], [b"y"]])
        assert contents(blocks, [written], 2) == [[b"x"], [b"y"]]


@given(PARTITIONS, st.integers(0, 3), st.data())
def test_some_partitions_of_what_was_written_are_read_as_before(
    partitions: list[list[bytes]], per_block: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(partitions)))
    last = data.draw(st.integers(first, len(partitions)))
    with open_blocks("memory:") as blocks:
        if per_block:
            written = write_pairs(blocks, "job/0", "a", partitions, per_block=per_block)
        else:
            written = write_combined(blocks, "job/0", partitions)
        found = [
            bytes(blocks.read(part))
            for own in written.within(first, last)
            for number in range(own.first, own.first + len(own.offsets) - 1)
            for part, *_ in own.parts(number, number + 1)
        ]
    assert found == [b"".join(pieces) for pieces in partitions[first:last]]


@given(st.sampled_from(["combined", "pairs"]), PARTITIONS, st.data())
def test_no_reader_gets_other_bytes_than_were_written(
    kind: str, partitions: list[list[bytes]], data: st.DataObject
) -> None:
    """One bit of any block is changed: readers get the right bytes, or an error that names the block."""
    with open_blocks("memory:") as blocks, open_blocks("memory:") as damaged:
        write(kind, blocks, "job/0", "a", partitions)
        names = sorted(blocks.names("job/"))
        chosen = data.draw(st.sampled_from(names))
        for name in names:
            content = bytearray(blocks.read(Part(name)))
            if name == chosen and content:
                bit = data.draw(st.integers(0, 8 * len(content) - 1))
                content[bit // 8] ^= 1 << bit % 8
            damaged.create(name, [bytes(content)])
        count = len(partitions)
        expected = [[b"".join(pieces)] for pieces in partitions]
        said = ""
        try:
            found = read_combined(damaged, "job/0", count) if kind == "combined" else read_pairs(damaged, "job/0")
            assert contents(damaged, [found], count) == expected
        except (ObjectGone, ValueError) as error:
            said = str(error)
        assert not said or chosen in said


def test_of_attempts_that_lost_nothing_is_left() -> None:
    with open_blocks("memory:") as blocks:
        for attempt in ("one", "two", "three"):
            write_pairs(blocks, "job/0", attempt, [[b"x"], [b"y"]])
        assert sorted(blocks.names("job/")) == ["job/0/committed", "job/0/one/0", "job/0/one/1"]


def test_what_is_no_block_of_partitions_is_refused() -> None:
    with open_blocks("memory:") as blocks:
        blocks.create("other", [bytes(100)])
        with pytest.raises(ValueError, match="other: expected a block with 3 partitions"):
            read_combined(blocks, "other", 3)
        write_combined(blocks, "job/0", [[b"x"]])
        with pytest.raises(ObjectGone):
            read_combined(blocks, "job/0", 50)
        with pytest.raises(ObjectGone):
            contents(blocks, [Written("job/none", (0, 5))], 1)


# -- runs of a job -----------------------------------------------------------------------------------------------------


class EndingBlocks(WrappedBlocks):
    """A storage where the run that is there ends before it is read."""

    def read(self, part: Part) -> memoryview:
        super().delete([part.name])
        return super().read(part)


def test_a_run_begins_although_another_one_has_just_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = [Way(f"file://{tmp_path}", job="nightly")]
    first = passing.begin_job(ways)
    with monkeypatch.context() as patched:
        patched.setattr(passing, "open_storage", lambda url: EndingBlocks(open_blocks(url)))
        second = passing.begin_job(ways)
    assert second != first
    assert passing.begin_job(ways) == second


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nightly").mkdir()
    (tmp_path / "nightly" / "running").touch()
    with pytest.raises(ConfigurationError, match="nightly/running in the storage was not written by a job"):
        passing.begin_job([Way(f"file://{tmp_path}", job="nightly")])


def test_a_run_is_continued_until_it_ends_and_nothing_of_it_counts_later(tmp_path: Path) -> None:
    ways = [Way(f"file://{tmp_path}", job="nightly")]
    first = passing.begin_job(ways)
    assert passing.begin_job(ways) == first, "another program continues it"
    table = pa.table({"a": [1]})
    written = passing.write_tables(first, 0, "0-0-0", [table])
    assert passing.find_written(first, 0, "0-0-0", 1) == written
    passing.end_job(first, "")
    second = passing.begin_job(ways)
    assert second != first
    assert passing.find_written(second, 0, "0-0-0", 1) is None
    with pytest.raises(ObjectGone, match="nightly: it has ended, in this program or another one"):
        passing.write_tables(first, 0, "0-0-1", [table])  # by a task that has outlived its run
    passing.end_job(second, "")
    with open_blocks(f"file://{tmp_path}") as blocks:
        assert list(blocks.names("")) == []


def test_an_output_is_that_of_the_last_job_which_has_taken_it(tmp_path: Path) -> None:
    one, other = (passing.begin_job([Way(f"file://{tmp_path}", job=name)]) for name in ("one", "other"))
    passing.take_output(one, "/out")
    passing.check_output(one, "/out")
    passing.take_output(other, "/out")
    passing.check_output(other, "/out")
    with pytest.raises(ObjectGone, match="another one writes to the same output"):
        passing.check_output(one, "/out")
    passing.end_job(one, "/out")
    passing.check_output(other, "/out")
    passing.end_job(other, "/out")
    with open_blocks(f"file://{tmp_path}") as blocks:
        assert list(blocks.names("")) == []


# -- shaper ------------------------------------------------------------------------------------------------------------


class Time:
    """A clock that a sleep moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def shaped(tmp_path: Path, shape: Shape, time: Time, *, seed: int = 1) -> ShapedBlocks:
    times = SharedTimes(tmp_path / "times")
    return ShapedBlocks(open_blocks("memory:"), shape, times, seed=seed, clock=lambda: time.now, sleep=time.sleep)


@pytest.mark.parametrize(
    ("shape", "written_s", "read_s"),
    [
        (Shape(), 0.0, 0.0),
        (Shape(writes=10, reads=20), 2.0, 1.0),
        (Shape(written_bytes=1000, read_bytes=500), 2.0, 4.0),
        (Shape(worker_written_bytes=500, worker_read_bytes=1000), 4.0, 2.0),
        (Shape(latency_s=0.5), 10.0, 10.0),
        (Shape(worker_read_bytes=1000, slow_workers=1, slow_factor=4.0), 0.0, 8.0),
    ],
)
def test_requests_and_bytes_take_the_time_of_the_shape(
    tmp_path: Path, shape: Shape, written_s: float, read_s: float
) -> None:
    time = Time()
    with shaped(tmp_path, shape, time) as blocks:
        for number in range(20):
            assert blocks.create(f"{number}", [bytes(100)])
        assert time.now == pytest.approx(100 + written_s)
        for number in range(20):
            assert len(blocks.read(Part(f"{number}"))) == 100
        assert time.now == pytest.approx(100 + written_s + read_s)
    with contextlib.closing(SharedTimes(tmp_path / "times")) as times:
        assert times.counts() == (20, 20, 2000, 2000)


def test_processes_share_the_limits_of_a_storage_and_not_those_of_a_worker(tmp_path: Path) -> None:
    shape, time = Shape(writes=10, worker_written_bytes=1000), Time()
    with shaped(tmp_path, shape, time) as one, shaped(tmp_path, shape, time) as other:
        for number, blocks in itertools.product(range(10), (one, other)):
            blocks.create(f"{number}", [bytes(10)])
        assert time.now == pytest.approx(102)
        time.now = 200.0
        started = [time.now]
        for blocks in (one, other):
            time.now = 200.0
            blocks.create("large", [bytes(1000)])
            started.append(time.now)
        assert started == pytest.approx([200, 201, 201])


def test_latencies_have_a_tail_and_are_those_of_the_seed(tmp_path: Path) -> None:
    shape = Shape(latency_s=0.1, latency_sigma=1.0)
    took = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        time = Time()
        with shaped(tmp_path / name, shape, time) as blocks:
            instants = [time.now]
            for number in range(200):
                blocks.create(f"{number}", [b"x"])
                instants.append(time.now)
        took.append([after - before for before, after in itertools.pairwise(instants)])
    assert took[0] == took[1]
    ordered = sorted(took[0])
    assert ordered[100] == pytest.approx(0.1, rel=0.3)
    assert ordered[-1] > 5 * ordered[100]
    assert math.isfinite(ordered[-1])


class NoPace(Pace):
    """Makes each request once."""

    def run(self, request: Callable[[], T]) -> T:
        return request()


def refusing(tmp_path: Path, shape: Shape, time: Time, *, prefixes: int = 1) -> ShapedBlocks:
    times = SharedTimes(tmp_path / "times", prefixes=prefixes)
    blocks = open_blocks("memory:")
    return ShapedBlocks(blocks, shape, times, pace=NoPace(), seed=1, clock=lambda: time.now, sleep=time.sleep)


def attempted(blocks: Blocks, numbers: Iterable[int]) -> list[str]:
    """Try to create blocks with these numbers as names; the names of those that were created."""
    created = []
    for number in numbers:
        with contextlib.suppress(StoreBusy):
            assert blocks.create(f"{number}", [b"x"])
            created.append(f"{number}")
    return created


def test_requests_beyond_the_rates_are_refused_and_take_no_time(tmp_path: Path) -> None:
    time = Time()
    with refusing(tmp_path, Shape(writes=128, reads=64, refuses=True), time) as blocks:
        assert len(attempted(blocks, range(100))) == 13, "as many as come in 0.1 s"
        assert time.now == 100
        time.now += 0.05
        created = attempted(blocks, range(100, 200))
        assert len(created) == 7
        for _ in range(7):
            blocks.read(Part("0"))
        with pytest.raises(StoreBusy, match="503 SlowDown"):
            blocks.read(Part("0"))
        time.now += 0.02
        assert bytes(blocks.read(Part("0"))) == b"x"


def test_each_prefix_has_rates_of_its_own(tmp_path: Path) -> None:
    shape, time = Shape(writes=128, reads=128, refuses=True), Time()
    with refusing(tmp_path, shape, time, prefixes=4) as blocks:
        created = attempted(blocks, range(200))
        assert [sum(prefix_number(each, 4) == prefix for each in created) for prefix in range(4)] == [13] * 4
        for name in created:
            blocks.read(Part(name))
    (tmp_path / "delayed").mkdir()
    with shaped(tmp_path / "delayed", Shape(writes=10), time) as blocks:
        started = time.now
        for number in range(20):
            blocks.create(f"{number}", [b"x"])
        assert time.now - started == pytest.approx(2)


def test_a_part_of_requests_fails_and_half_of_the_writes_were_done(tmp_path: Path) -> None:
    with refusing(tmp_path, Shape(error_part=0.2), Time()) as blocks:
        known = set(attempted(blocks, range(2000)))
        written = set(blocks.names(""))
        assert 0.75 < len(known) / 2000 < 0.85
        assert known < written
        assert 0.85 < len(written) / 2000 < 0.95
        failed = 0
        for name in known:
            try:
                blocks.read(Part(name))
            except StoreBusy:
                failed += 1
        assert 0.15 < failed / len(known) < 0.25


def test_the_errors_are_those_of_the_seed(tmp_path: Path) -> None:
    found = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        with refusing(tmp_path / name, Shape(error_part=0.5), Time()) as blocks:
            found.append(attempted(blocks, range(50)))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["combined", "pairs"])
def test_what_a_busy_storage_takes_is_what_was_written(tmp_path: Path, kind: str) -> None:
    """A write whose answer was lost finds its own block when it is made again."""
    chance = random.Random(3)
    pace = Pace(sleep=lambda _: None)
    with ShapedBlocks(
        open_blocks("memory:"), Shape(error_part=0.5), SharedTimes(tmp_path / "times"), pace=pace, seed=2
    ) as blocks:
        for task in range(30):
            partitions = [[chance.randbytes(5)] for _ in range(3)]
            written = [write(kind, blocks, f"job/{task}", attempt, partitions) for attempt in ("one", "two")]
            assert written[0] == written[1]
            assert contents(blocks, written[:1], 3) == [[pieces[0]] for pieces in partitions]
        assert len(list(blocks.names("job/"))) == 30 * (1 if kind == "combined" else 4)
    assert pace.window.size < 8
