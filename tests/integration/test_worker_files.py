"""Files of a task in a real worker: paths, checks before and after the call, and files that a task returns."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farcall_common.file_arguments import File, collecting, place_of, with_outputs
from farcall_common.payload import Serializer
from farcall_common.payload.data import edge_pieces
from farcall_common.payload.native import dump_call
from farcall_common.staged_files import pack_files, uses
from farcall_endpoint.contracts.manager_worker import CallOrder, Done, InputOrder
from farcall_endpoint.worker.settings import WorkerSettings
from tests.support.worker import WorkerUnderTest, value_of, worker_under_test

EDGE = CallOrder(is_edge=True)
NESTED = CallOrder(is_edge=True, is_nested=True)
SCAN = "s3://lab/raw/scan7.txt"
MASK = "s3://lab/out/mask.txt"


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerUnderTest]:
    with worker_under_test(tmp_path) as started:
        yield started


class Staged:
    """A directory as the agent prepares it for a task."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.scan = Path(place_of(str(directory), SCAN, "r"))
        self.mask = Path(place_of(str(directory), MASK, "w"))
        for path in (self.scan, self.mask):
            path.parent.mkdir(parents=True)
        self.scan.write_text("5 7")


@pytest.fixture
def staged(tmp_path: Path) -> Staged:
    return Staged(tmp_path / "staged" / "t")


def payload_of(*args: object, native: bool = False, **kwargs: object) -> bytes:
    """A call as the SDK sends it, or as an engine does."""
    with collecting() as found:
        named = with_outputs(kwargs)
        call = dump_call(args, named) if native else Serializer().pack_call(args, named)
    return pack_files(uses(found), call)


def answer(
    worker: WorkerUnderTest, directory: Path, function: Callable[..., Any], payload: bytes, **order: Any
) -> tuple[Done, Any]:
    """The end of a task, and its value if it has one."""
    worker.order(function, payload=payload, files_dir=str(directory), **order)
    done, body = worker.expect(Done)
    return done, None if done.error is not None else value_of(body)


def error_of(worker: WorkerUnderTest, directory: Path, function: Callable[..., Any], payload: bytes) -> tuple[str, str]:
    done, _ = answer(worker, directory, function, payload)
    assert done.error is not None
    return str(done.error["code"]), str(done.error["message"])


def double(scan: Any, out: Any) -> str:
    """Writes twice the numbers of a file."""
    with open(scan) as source, out.open() as target:  # noqa: PTH123 - a File is a path for all libraries
        target.write(" ".join(str(2 * int(word)) for word in source.read().split()))
    return f"{scan.name} {os.path.basename(out)}"  # noqa: PTH119 - the same


@pytest.mark.parametrize("native", [False, True])
def test_the_function_gets_paths(tmp_path: Path, staged: Staged, native: bool) -> None:
    with worker_under_test(tmp_path, WorkerSettings(native=native)) as worker:
        payload = payload_of(File(SCAN), out=File(MASK), native=native)
        done, value = answer(worker, staged.directory, double, payload)
    assert done.error is None
    assert (value, staged.mask.read_text()) == ("scan7.txt mask.txt", "10 14")


def test_worker_without_code_reads_files_from_json(worker: WorkerUnderTest, staged: Staged) -> None:
    done, _ = answer(worker, staged.directory, double, payload_of(File(SCAN), out=File(MASK)), data_only=True)
    assert done.error is None
    assert staged.mask.read_text() == "10 14"


def test_output_that_was_not_written_fails_the_task(worker: WorkerUnderTest, staged: Staged) -> None:
    def nothing(out: Any) -> None:
        pass

    def link(out: Any) -> None:
        out.path.symlink_to("/etc/hostname")

    def directory(out: Any) -> None:
        out.path.mkdir()

    for function in (nothing, link, directory):
        code, message = error_of(worker, staged.directory, function, payload_of(out=File(MASK)))
        assert code == "FILE_NOT_WRITTEN"
        assert MASK in message
        assert str(staged.mask) in message


def test_output_of_a_former_attempt_is_not_stored(worker: WorkerUnderTest, staged: Staged) -> None:
    def nothing(out: Any) -> None:
        pass

    staged.mask.write_text("of an attempt that was killed")
    code, _ = error_of(worker, staged.directory, nothing, payload_of(out=File(MASK)))
    assert (code, staged.mask.exists()) == ("FILE_NOT_WRITTEN", False)


def test_file_that_the_agent_has_not_copied_is_named(worker: WorkerUnderTest, staged: Staged) -> None:
    staged.scan.unlink()
    code, message = error_of(worker, staged.directory, double, payload_of(File(SCAN), out=File(MASK)))
    assert (code, str(staged.scan) in message) == ("FILE_UNSUPPORTED", True)


def test_local_files_stay_where_they_are(worker: WorkerUnderTest, tmp_path: Path) -> None:
    source, target = tmp_path / "my scan.txt", tmp_path / "new" / "mask.txt"
    source.write_text("5")
    digest = hashlib.sha256(b"5").hexdigest()

    def look(scan: Any, out: Any) -> tuple[str, bool, str]:
        assert out.path.suffix == ".txt"
        out.path.write_text("x" + scan.path.read_text())
        return str(scan), out.path.exists(), str(out)

    payload = payload_of(File(source.as_uri(), size_bytes=1, sha256=digest), out=File(target.as_uri()))
    done, value = answer(worker, Path("/"), look, payload)
    assert done.error is None
    assert tuple(value[:2]) == (str(source), True)
    assert value[2] != str(target), "a draft"
    assert target.read_text() == "x5"
    assert [each.name for each in target.parent.iterdir()] == ["mask.txt"]


@pytest.mark.parametrize(
    ("name", "more", "code"),
    [
        ("missing", {}, "FILE_NOT_FOUND"),
        ("scan/below", {}, "FILE_NOT_FOUND"),
        ("", {}, "FILE_UNSUPPORTED"),
        ("scan", {"size_bytes": 9}, "FILE_CHANGED"),
        ("scan", {"sha256": "0" * 64}, "FILE_CHECKSUM"),
        ("loop", {}, "FILE_DENIED"),
    ],
)
def test_local_file_is_checked_before_the_call(
    worker: WorkerUnderTest, tmp_path: Path, name: str, more: dict[str, Any], code: str
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "scan").write_text("5")
    (tmp_path / "files" / "loop").symlink_to("loop")
    called = tmp_path / "called"

    def touch(scan: Any, flag: str) -> None:
        from pathlib import Path

        Path(flag).touch()

    found, _ = error_of(
        worker, Path("/"), touch, payload_of(File(f"file://{tmp_path}/files/{name}".rstrip("/"), **more), str(called))
    )
    assert (found, called.exists()) == (code, False)


@pytest.mark.parametrize("in_the_way", ["a directory", "no directory"])
def test_local_output_that_cannot_be_written_is_refused_before_the_call(
    worker: WorkerUnderTest, tmp_path: Path, in_the_way: str
) -> None:
    target = tmp_path / "out" / "mask.txt"
    if in_the_way == "a directory":
        target.mkdir(parents=True)
    else:
        target.parent.write_text("a file")
    code, message = error_of(worker, Path("/"), double, payload_of(1, out=File(target.as_uri())))
    assert code == "FILE_DENIED"
    assert target.as_uri() in message


@pytest.mark.parametrize("mode", ["r", "w"])
@pytest.mark.parametrize(
    ("configured", "submitter"),
    [(False, "5f0e"), (True, "5f0e"), (True, "")],
    ids=["other", "other, configured", "owner"],
)
def test_calls_of_certain_functions_only_name_no_paths(
    tmp_path: Path, mode: Any, configured: bool, submitter: str
) -> None:
    """Nothing tells whether there is such a file, and nothing is made. A list of functions in the configuration binds
    the owner, too: the cloud says whose task it is, and chooses the arguments."""
    (tmp_path / "there").touch()
    with worker_under_test(tmp_path, WorkerSettings(data_only=configured)) as worker:
        for name in ("there", "new/missing"):
            payload = payload_of(File(f"file://{tmp_path}/{name}", mode))
            done, _ = answer(worker, Path("/"), double, payload, data_only=True, submitter=submitter)
            assert done.error is not None
            assert done.error["code"] == "FILE_DENIED"
            assert "runs certain functions only" in str(done.error["message"])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("mode", ["r", "w"])
def test_the_owner_names_paths_where_the_list_of_functions_is_in_the_cloud(
    worker: WorkerUnderTest, tmp_path: Path, mode: Any
) -> None:
    def touch(file: Any) -> None:
        file.open(file.mode).close()

    (tmp_path / "there").touch()
    done, _ = answer(worker, Path("/"), touch, payload_of(File(f"file://{tmp_path}/there", mode)), data_only=True)
    assert done.error is None


def test_draft_of_a_task_that_raised_is_removed(worker: WorkerUnderTest, tmp_path: Path) -> None:
    target = tmp_path / "out" / "mask.txt"
    target.parent.mkdir()
    target.write_text("old")

    def fail(out: Any) -> None:
        out.path.write_text("half")
        raise ValueError(f"draft {out.path.exists()}")

    code, message = error_of(worker, Path("/"), fail, payload_of(out=File(target.as_uri())))
    assert (code, message) == ("TASK_FAILED", "ValueError: draft True")
    assert {each.name: each.read_text() for each in target.parent.iterdir()} == {"mask.txt": "old"}


def test_draft_of_an_attempt_that_was_killed_is_removed_by_the_next(worker: WorkerUnderTest, tmp_path: Path) -> None:
    target = tmp_path / "mask.txt"

    def die(out: Any) -> None:
        import os
        import signal

        out.path.write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)

    def write(out: Any) -> None:
        out.path.write_text("whole")

    with worker_under_test(tmp_path) as first:
        first.order(die, payload=payload_of(out=File(target.as_uri())), files_dir="/", task_id="t/5")
        with pytest.raises(AssertionError, match="the worker has ended"):
            first.receive()
    left = [each for each in tmp_path.iterdir() if each.name.endswith(".mask.txt")]
    assert [each.read_text() for each in left] == ["half"]
    done, _ = answer(worker, Path("/"), write, payload_of(out=File(target.as_uri())), task_id="t/5", attempt=2)
    assert done.error is None
    assert target.read_text() == "whole"
    assert not left[0].exists()


def write_both(out: Any, outputs: Any) -> Any:
    for each in (out, *outputs):
        each.path.write_text(each.name)
    return [out, outputs]


@pytest.mark.parametrize("call", [None, EDGE])
def test_file_that_a_task_returns_is_one_to_read(
    worker: WorkerUnderTest, staged: Staged, tmp_path: Path, call: CallOrder | None
) -> None:
    local = tmp_path / "local.txt"
    payload = payload_of(out=File(MASK), outputs=[File(local.as_uri())])
    _, (out, [other]) = answer(worker, staged.directory, write_both, payload, call=call)
    assert [(each.url, each.mode) for each in (out, other)] == [(MASK, "r"), (local.as_uri(), "r")]
    if call is None:
        assert (out._path, other._path) == (None, None)
    else:  # the next stage opens them where they are
        assert (out.path.read_text(), other.path.read_text()) == ("mask.txt", "local.txt")


def test_file_in_a_value_of_another_call_is_not_looked_for(worker: WorkerUnderTest, staged: Staged) -> None:
    """A stage may return files that a person wants to know of."""
    value = edge_pieces([File("s3://lab/other")])
    order = InputOrder((0,), (sum(map(len, value)),))

    def urls(files: Any) -> list[str]:
        return [each.url for each in files]

    payload = Serializer().pack_call((None,))
    [found] = worker.values(
        urls,
        payload=payload,
        inputs=[(order, value)],
        call=CallOrder((order,), is_edge=True),
        files_dir=str(staged.directory),
    )
    assert found == ["s3://lab/other"]


def test_user_code_that_changes_its_file_does_not_end_the_worker(worker: WorkerUnderTest, staged: Staged) -> None:
    def change(out: Any) -> None:
        out.path.write_text("x")
        out.url, out._path, out._mode = 5, None, object()

    done, _ = answer(worker, staged.directory, change, payload_of(out=File(MASK)))
    assert (done.error, staged.mask.read_text()) == (None, "x")


def test_nested_call_writes_the_file_of_its_caller(worker: WorkerUnderTest, staged: Staged, tmp_path: Path) -> None:
    """The file has its path already: the caller's draft is not the call's to publish."""
    draft = tmp_path / ".draft"
    given = File((tmp_path / "final").as_uri(), "w")
    given._path = str(draft)

    def write(out: Any) -> None:
        out.path.write_text("by the call")

    done, _ = answer(worker, staged.directory, write, Serializer().pack_call((given,)), call=NESTED)
    assert done.error is None
    assert draft.read_text() == "by the call"
    assert not (tmp_path / "final").exists()


def test_child_of_a_task_leaves_its_files_alone(worker: WorkerUnderTest, tmp_path: Path) -> None:
    target = tmp_path / "mask.txt"

    def fork(out: Any) -> int:
        import os

        out.path.write_text("parent")
        child = os.fork()
        if child == 0:
            return 0
        return os.waitpid(child, 0)[1]

    done, value = answer(worker, Path("/"), fork, payload_of(out=File(target.as_uri())))
    assert (done.error, value, target.read_text()) == (None, 0, "parent")


def test_task_without_files_loads_nothing_for_them(worker: WorkerUnderTest) -> None:
    def loaded() -> list[str]:
        import sys

        return [name for name in sys.modules if name.endswith(("worker.files", "staged_files"))]

    assert worker.values(loaded, call=EDGE) == [[]]
