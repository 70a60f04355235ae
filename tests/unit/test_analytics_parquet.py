"""Files of Parquet as one table: shares, and what is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farcall_analytics.parquet import InputProblem, delete_other_parts, find_input, find_paths, read_share, write_table
from tests.support.analytics_data import files, random_rows


def test_shares_have_all_row_groups_once(tmp_path: Path) -> None:
    source = find_input(find_paths(files(tmp_path / "in", random_rows(3000))), share_bytes=2000)
    assert source.rows == 3000
    assert len(source.shares) > 10
    read = pa.concat_tables([read_share(each) for each in source.shares])
    assert read.equals(random_rows(3000).replace_schema_metadata(None))
    assert source.size == sum(each.size for each in source.shares) > 0


@pytest.mark.parametrize(("groups", "chosen"), [(1, 1), (2, 2), (4, 4), (30, 4)])
def test_a_sample_has_row_groups_from_the_first_to_the_last(tmp_path: Path, groups: int, chosen: int) -> None:
    pattern = files(tmp_path / "in", random_rows(groups * 10), count=1, group_rows=10)
    [share] = find_input(find_paths(pattern), share_bytes=10**9).shares
    sampled = share.sampled()
    assert len(sampled.row_groups) == chosen
    assert {sampled.row_groups[0], sampled.row_groups[-1]} == {0, groups - 1}
    assert read_share(sampled).num_rows == 10 * chosen


def test_files_that_are_not_one_table_are_refused_with_the_reason(tmp_path: Path) -> None:
    def path(name: str, table: pa.Table) -> str:
        pq.write_table(table, tmp_path / name)
        return str(tmp_path / name)

    first = path("first", pa.table({"a": [1], "b": ["x"]}))
    for other, reason in (
        (path("fewer", pa.table({"a": [1]})), "fewer: other columns than in .*first: without b"),
        (path("more", pa.table({"a": [1], "b": ["x"], "c": [1]})), "with c"),
        (path("type", pa.table({"a": [1.5], "b": ["x"]})), "a is double, not int64"),
        (path("order", pa.table({"b": ["x"], "a": [1]})), "in another order"),
        (str(tmp_path / "none"), "none: "),
    ):
        with pytest.raises(InputProblem, match=reason):
            find_input([first, other], share_bytes=1000)
    with pytest.raises(InputProblem, match="there are no files"):
        find_input([], share_bytes=1000)
    (tmp_path / "first").write_bytes(b"changed")
    with pytest.raises(InputProblem, match="first: "):
        find_input([first], share_bytes=1000)


def test_a_share_whose_file_has_changed_is_refused(tmp_path: Path) -> None:
    pattern = files(tmp_path / "in", random_rows(10), count=1)
    [share] = find_input(find_paths(pattern), share_bytes=1000).shares
    files(tmp_path / "in", random_rows(11), count=1)
    with pytest.raises(InputProblem, match="it has changed meanwhile"):
        read_share(share)


def test_a_file_is_written_whole_and_replaces_an_earlier_one(tmp_path: Path) -> None:
    for table in (random_rows(10), random_rows(20)):
        write_table(str(tmp_path / "x.parquet"), table)
        assert pq.read_table(tmp_path / "x.parquet").equals(table)
    assert [each.name for each in tmp_path.iterdir()] == ["x.parquet"]


def test_drafts_of_tasks_that_were_killed_are_deleted_and_not_read(tmp_path: Path) -> None:
    write_table(str(tmp_path / "part-00000.parquet"), random_rows(10))
    for name in (".part-00001.parquet-0123456789abcdef", "part-00001.parquet", ".other.parquet"):
        (tmp_path / name).touch()
    assert find_paths(f"{tmp_path}/*") == [f"{tmp_path}/part-00000.parquet", f"{tmp_path}/part-00001.parquet"]
    delete_other_parts(str(tmp_path), [f"{tmp_path}/part-00000.parquet"])
    assert sorted(each.name for each in tmp_path.iterdir()) == [".other.parquet", "part-00000.parquet"]


def test_attempts_that_write_a_file_at_the_same_time_do_not_meet(tmp_path: Path) -> None:
    tables = [random_rows(count) for count in (100, 20_000)]
    path = tmp_path / "new" / "x.parquet"
    with ThreadPoolExecutor(4) as executor:
        list(executor.map(write_table, [str(path)] * 20, tables * 10))
    assert any(pq.read_table(path).equals(table) for table in tables)
    assert [each.name for each in path.parent.iterdir()] == ["x.parquet"]
