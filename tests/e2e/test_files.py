"""Files of the endpoint (``file://``) as arguments, through the whole system."""

from __future__ import annotations

from pathlib import Path

import pytest

import farcall
from farcall import File, Graph
from farcall_common.errors import TaskFailed
from tests.waiting import WAIT_S


def double(table: File, out: File) -> File:
    """Write twice the numbers of a file."""
    with table.open() as source, out.open() as target:
        target.write("".join(f"{2 * int(line)}\n" for line in source))
    return out


def total(table: File) -> int:
    return sum(map(int, table.path.read_text().split()))


def half(out: File) -> None:
    out.path.write_text("half")
    raise ValueError("no")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "my table.txt"
    path.write_text("1\n2\n3\n")
    return path


@pytest.mark.smoke
def test_a_task_reads_and_writes_files_of_its_endpoint(executor: farcall.Executor, table: Path, tmp_path: Path) -> None:
    doubled = tmp_path / "new" / "doubled.txt"
    future = executor.submit(double, File(table.as_uri()), out=File(doubled.as_uri()))
    written = future.result(WAIT_S)
    assert (written, doubled.read_text()) == (File(doubled.as_uri()), "2\n4\n6\n")
    assert executor.submit(total, future).result(WAIT_S) == 12
    assert [each.name for each in doubled.parent.iterdir()] == ["doubled.txt"]


def test_the_stages_of_a_graph_have_the_files(executor: farcall.Executor, table: Path, tmp_path: Path) -> None:
    graph = Graph()
    once = graph.call(double, File(table.as_uri()), out=File((tmp_path / "once.txt").as_uri()))
    twice = graph.call(double, once, out=File((tmp_path / "twice.txt").as_uri()))
    assert executor.submit(graph, [graph.call(total, once), graph.call(total, twice)]).result(WAIT_S) == [12, 24]


def test_what_is_wrong_with_a_file_is_said(executor: farcall.Executor, table: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.txt"
    output.write_text("old")
    missing = executor.submit(total, File(f"file://{tmp_path}/typo"))
    other = executor.submit(total, File(table.as_uri(), size_bytes=7))
    raised = executor.submit(half, out=File(output.as_uri()))
    for future, code in ((missing, "FILE_NOT_FOUND"), (other, "FILE_CHANGED"), (raised, "TASK_FAILED")):
        with pytest.raises(TaskFailed) as caught:
            future.result(WAIT_S)
        assert caught.value.record.code == code
    assert output.read_text() == "old"
