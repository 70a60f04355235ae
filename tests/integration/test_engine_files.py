"""Files in an engine, mostly ``file://``: in calls, stages of graphs, and functions that call others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farcall_common.errors import TaskError
from farcall_endpoint import Engine, File, Graph
from tests.support.file_servers import WebServer
from tests.waiting import WAIT_S


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(max_workers=2) as started:
        started.wait_ready()
        yield started


def copy(source: File, out: File) -> File:
    out.path.write_text(source.path.read_text() + "!")
    return out


def read(source: File) -> str:
    return source.path.read_text()


def copy_by_call(source: File, out: File) -> str:
    from farcall import current

    current().submit(copy, source, out).result()
    return out.path.read_text()


def test_call_reads_and_writes_files_of_the_endpoint(engine: Engine, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("text")
    written = engine.submit(copy, File(source.as_uri()), out=File(target.as_uri())).result(WAIT_S)
    assert (written.url, written.mode, target.read_text()) == (target.as_uri(), "r", "text!")
    assert engine.submit(read, written).result(WAIT_S) == "text!"


def test_file_goes_from_stage_to_stage(engine: Engine, tmp_path: Path) -> None:
    source, target, last = tmp_path / "source", tmp_path / "target", tmp_path / "last"
    source.write_text("text")
    graph = Graph()
    first = graph.call(copy, File(source.as_uri()), out=File(target.as_uri()))
    second = graph.call(copy, first, out=File(last.as_uri()))
    for _ in range(2):  # the second time its arguments are known
        result: dict[str, Any] = engine.submit(graph, {"text": graph.call(read, second), "file": second}).result(WAIT_S)
        assert (result["text"], result["file"].url) == ("text!!", last.as_uri())
        assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


def test_function_gives_its_files_to_what_it_calls(engine: Engine, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("text")
    future = engine.submit(copy_by_call, File(source.as_uri()), out=File(target.as_uri()))
    assert (future.result(WAIT_S), target.read_text()) == ("text!", "text!")


def test_file_that_is_missing_fails_the_call(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="does not exist") as caught:
        engine.submit(read, File(f"file://{tmp_path}/typo")).result(WAIT_S)
    assert caught.value.record.code == "FILE_NOT_FOUND"


def test_file_in_storage_is_copied_to_the_engine(engine: Engine) -> None:
    web = WebServer()
    try:
        web.files["/data"] = b"text"
        file = File(f"{web.url}/data", sha256=hashlib.sha256(b"text").hexdigest())
        futures = [engine.submit(read, file) for _ in range(3)]
        assert [future.result(WAIT_S) for future in futures] == ["text"] * 3
        assert web.requests["GET", "/data"] == 1
        with pytest.raises(TaskError, match="/none does not exist"):
            engine.submit(read, File(f"{web.url}/none", sha256="0" * 64)).result(WAIT_S)
    finally:
        web.close()
