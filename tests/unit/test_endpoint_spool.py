"""The spool: tasks and results on disk."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import shutil
from pathlib import Path

import msgspec
import pytest

from farcall_common import wire
from farcall_common.errors import ConfigurationError
from farcall_common.task_options import TaskOptions
from farcall_common.wire import TaskState
from farcall_endpoint.agent.core.actions import WriteSpool
from farcall_endpoint.agent.core.tasks import Stage, Task, TaskResult
from farcall_endpoint.agent.shell.spool import Spool, SpoolUnwritable
from farcall_endpoint.host.shared_memory import Frame, bytes_of
from tests.support.agent import load


def make_task(seq: int, *, payload: bytes | None = b"p", function_hash: str = "h") -> Task:
    spec = wire.TaskSpec(
        task_id=f"t{seq}", attempt=1, function_id="f", function_hash=function_hash, options=TaskOptions(), payload=0
    )
    stage = Stage.QUEUED if payload is not None else Stage.FETCHING
    return Task(seq, spec, 1, stage, 12.5, payload=payload)


def test_a_task_keeps_its_submitter() -> None:
    spool = Spool(None)
    spec = wire.TaskSpec(
        task_id="t1", attempt=1, function_id="f", function_hash="h", options=TaskOptions(), payload=0, submitter="alice"
    )
    task = Task(1, spec, 1, Stage.QUEUED, 12.5, payload=b"p")
    spool.commit(WriteSpool(accepted=[task]))
    assert [loaded.spec.submitter for loaded in load(spool)[0]] == ["alice"]
    spool.commit(WriteSpool(finished=[finish(task)]))
    assert [loaded.spec.submitter for loaded in load(spool)[0]] == ["alice"]


def test_a_sealed_call_keeps_its_key_until_its_result_and_is_known_after_that(tmp_path: Path) -> None:
    path = tmp_path / "spool.sqlite3"
    held, ended, fetched = make_task(1), make_task(2), make_task(3, payload=None)
    held.answer_key, ended.answer_key = b"k1", b"k2"
    with contextlib.closing(Spool(path)) as spool:
        spool.commit(WriteSpool(accepted=[held, ended, fetched, make_task(4)]))
        assert [spool.was_opened(f"t{seq}") for seq in range(1, 6)] == [True, True, False, False, False]
        fetched.payload, fetched.answer_key = b"p", b"k3"
        spool.commit(WriteSpool(fetched=[fetched], finished=[finish(ended)]))
    with contextlib.closing(Spool(path)) as spool:
        assert [task.answer_key for task in load(spool)[0]] == [b"k1", b"", b"k3", b""]
        spool.commit(WriteSpool(forgotten=[2], dropped=[1], finished=[finish(fetched)]))
        assert [spool.was_opened(f"t{seq}") for seq in (1, 2, 3)] == [True, True, True]
        spool.forget_calls(before=held.at)
        assert spool.was_opened("t2")
        spool.forget_calls(before=held.at + 1)
        assert [spool.was_opened(f"t{seq}") for seq in (1, 2, 3)] == [False, False, False]


def test_a_sealed_call_whose_arguments_a_power_cut_took_may_be_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "spool.sqlite3"
    task = make_task(1, payload=b"x" * 100_000)
    task.answer_key = b"k"
    with contextlib.closing(Spool(path)) as spool:
        spool.commit(WriteSpool(accepted=[task]))
    shutil.rmtree(path.with_suffix(".bodies"))
    with contextlib.closing(Spool(path)) as spool:
        [found] = load(spool)[0]
        assert found.stage is Stage.FETCHING
        assert not spool.was_opened("t1")


def finish(task: Task, body: bytes | None = b"r") -> Task:
    task.stage = Stage.FINISHED
    task.result = TaskResult(TaskState.SUCCESS, size_bytes=len(body or b""), started_at=1.0, ended_at=2.0, body=body)
    return task


def test_tasks_reload_in_order_with_attempts() -> None:
    spool = Spool(None)
    first, second, third = make_task(1), make_task(2, payload=None), make_task(3)
    first.starts = 1
    spool.commit(WriteSpool(accepted=[first, second, third], starts=[first]))
    third.starts, third.attempt = 2, 5
    spool.commit(WriteSpool(starts=[third], redelivered=[third]))
    tasks, _ = load(spool)
    assert [(task.seq, task.task_id, task.starts, task.attempt, task.stage) for task in tasks] == [
        (1, "t1", 1, 1, Stage.QUEUED),
        (2, "t2", 0, 1, Stage.FETCHING),
        (3, "t3", 2, 5, Stage.QUEUED),
    ]
    assert tasks[0].payload is None
    assert spool.payload(tasks[0]) == b"p"


def test_a_fetched_payload_is_kept() -> None:
    spool = Spool(None)
    task = make_task(1, payload=None)
    spool.commit(WriteSpool(accepted=[task]))
    task.payload = b"fetched"
    spool.commit(WriteSpool(fetched=[task]))
    [loaded], _ = load(spool)
    assert loaded.stage is Stage.QUEUED
    assert spool.payload(loaded) == b"fetched"


def test_result_replaces_its_task_until_deleted() -> None:
    spool = Spool(None)
    task = make_task(1)
    spool.commit(WriteSpool(accepted=[task]))
    spool.commit(WriteSpool(finished=[finish(task)]))
    [loaded], _ = load(spool)
    assert loaded.result is not None
    assert (loaded.result.state, loaded.result.size_bytes, loaded.result.started_at) == (TaskState.SUCCESS, 1, 1.0)
    assert loaded.result.body is None
    assert spool.body(loaded) == b"r"
    task.attempt = 2
    spool.commit(WriteSpool(redelivered=[task]))
    assert load(spool)[0][0].attempt == 2
    spool.commit(WriteSpool(forgotten=[1]))
    assert load(spool)[0] == []


def test_result_stores_whether_an_attempt_was_left() -> None:
    spool = Spool(None)
    tasks = [make_task(1), make_task(2)]
    for task, exhausted in zip(tasks, (True, False), strict=True):
        task.result = TaskResult(TaskState.FAILED, {"code": "WORKER_DIED", "message": "it died"}, exhausted=exhausted)
    spool.commit(WriteSpool(accepted=tasks, finished=tasks))
    assert [task.result.exhausted for task in load(spool)[0] if task.result] == [True, False]


def test_deletion_is_lazy_and_drop_is_immediate(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    ended, unwanted = finish(make_task(1)), make_task(2)
    spool.commit(WriteSpool(accepted=[make_task(1), unwanted], finished=[ended]))
    spool.commit(WriteSpool(forgotten=[1]))
    assert spool.body(ended) == b"r", "this turn had nothing else to write"
    spool.commit(WriteSpool(dropped=[2]))
    with pytest.raises(TypeError):
        spool.body(ended)
    spool.commit(WriteSpool(accepted=[make_task(3)], finished=[finish(make_task(3))]))
    spool.commit(WriteSpool(forgotten=[3]))
    spool.close()
    again = Spool(tmp_path / "spool")
    assert load(again)[0] == []
    again.close()


def test_task_may_end_in_the_turn_of_its_acceptance() -> None:
    spool = Spool(None)
    task = finish(make_task(1), None)
    spool.commit(WriteSpool(accepted=[task], finished=[task]))
    [loaded], _ = load(spool)
    assert loaded.stage is Stage.FINISHED


def test_second_result_replaces_the_first() -> None:
    spool = Spool(None)
    task = finish(make_task(1))
    spool.commit(WriteSpool(accepted=[task], finished=[task]))
    task.result = TaskResult(TaskState.FAILED, {"code": "RESULT_UPLOAD_FAILED"})
    spool.commit(WriteSpool(finished=[task]))
    [loaded], _ = load(spool)
    assert loaded.result is not None
    assert loaded.result.error == {"code": "RESULT_UPLOAD_FAILED"}


def test_functions_are_kept_while_they_are_needed() -> None:
    spool = Spool(None)
    functions = [(wire.FunctionSpec(function_hash=name, name="f", body=0), name.encode()) for name in ("h", "unused")]
    spool.commit(WriteSpool(functions=functions, accepted=[make_task(1)]))
    assert spool.function("unused") == b"unused"
    assert load(spool)[1] == {"h"}
    assert spool.function("h") == b"h"


def test_signatures_are_kept_with_their_functions() -> None:
    spool = Spool(None)
    function = wire.FunctionSpec(function_hash="h", name="f", body=0)
    unused = wire.FunctionSpec(function_hash="unused", name="f", body=0, signature="s")
    spool.commit(WriteSpool(functions=[(function, b"body"), (unused, b"unused")], accepted=[make_task(1)]))
    assert spool.signed_functions() == [unused]
    for name, signature in (("f", "first"), ("g", "second")):
        function = msgspec.structs.replace(function, name=name, signature=signature)
        spool.commit(WriteSpool(functions=[(function, b"body")]))
    assert load(spool)[1] == {"h"}
    assert spool.signed_functions() == [function]


def test_turn_is_committed_atomically() -> None:
    spool = Spool(None)
    spool.commit(WriteSpool(accepted=[make_task(1)]))
    with pytest.raises(Exception, match="UNIQUE"):
        spool.commit(WriteSpool(accepted=[make_task(2), make_task(1)]))
    assert [task.seq for task in load(spool)[0]] == [1]
    spool.commit(WriteSpool(accepted=[make_task(2)]))


def test_a_spool_keeps_its_id_and_a_new_one_has_another(tmp_path: Path) -> None:
    first = Spool(tmp_path / "a")
    spool_id = first.spool_id
    first.commit(WriteSpool(accepted=[make_task(1)]))
    first.close()
    again = Spool(tmp_path / "a")
    assert again.spool_id == spool_id
    assert [task.task_id for task in load(again)[0]] == ["t1"]
    again.close()
    other = Spool(tmp_path / "b")
    assert other.spool_id != spool_id
    other.close()


def test_turn_with_a_non_idempotent_start_is_flushed(tmp_path: Path) -> None:
    """And no other turn: a flush costs milliseconds."""
    with contextlib.closing(Spool(tmp_path / "spool")) as spool:
        said: list[str] = []
        spool._database.set_trace_callback(said.append)
        often, once = make_task(1), make_task(2)
        once.spec = msgspec.structs.replace(once.spec, options=TaskOptions(idempotent=False))
        spool.commit(WriteSpool(accepted=[often, once], starts=[often]))
        assert spool.generation == 0
        assert not [statement for statement in said if "PRAGMA" in statement]
        said.clear()
        spool.commit(WriteSpool(starts=[once]))
        assert spool.generation == 1
        kinds = [statement.split(" ")[0] if "PRAGMA" not in statement else statement for statement in said]
        assert (kinds[0], kinds[-1]) == ("PRAGMA synchronous=FULL", "PRAGMA synchronous=NORMAL")
        assert kinds.index("BEGIN") < kinds.index("COMMIT")
        assert spool._database.execute("PRAGMA synchronous").fetchone() == (1,)
    with contextlib.closing(Spool(tmp_path / "spool")) as spool:
        assert spool.generation == 1


def test_unreadable_spool_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Spool(path)


@pytest.mark.parametrize("other", ["3", "99"])
def test_spool_of_another_format_is_refused_and_not_changed(tmp_path: Path, other: str) -> None:
    path = tmp_path / "spool"
    with contextlib.closing(Spool(path)) as spool:
        spool._database.execute("UPDATE meta SET value = ? WHERE key = 'format'", (other,))
    former = path.read_bytes()
    with pytest.raises(ConfigurationError, match=f"format {other}, this version reads 4"):
        Spool(path)
    assert path.read_bytes() == former


def test_specs_of_later_versions_can_be_read() -> None:
    spool = Spool(None)
    task = make_task(1)
    spool.commit(WriteSpool(accepted=[task]))
    newer = {**msgspec.to_builtins(task.spec), "field_of_tomorrow": 1}
    spool._database.execute("UPDATE tasks SET spec = ?", (msgspec.msgpack.encode(newer),))
    assert load(spool)[0][0].task_id == "t1"


MEGABYTE = 2**20


def space_bytes(path: Path) -> int:
    """What a spool takes on disk, with its log and its files."""
    files = [*path.parent.glob(f"{path.name}*"), *path.with_suffix(".bodies").iterdir()]
    return sum(file.stat().st_size for file in files)


def large_results(spool: Spool, count: int) -> None:
    tasks = [make_task(seq) for seq in range(1, count + 1)]
    spool.commit(WriteSpool(accepted=tasks))
    for task in tasks:
        spool.commit(WriteSpool(finished=[finish(task, bytes(MEGABYTE))]))


def test_space_of_recorded_results_is_freed(tmp_path: Path) -> None:
    path = tmp_path / "spool.sqlite3"
    spool = Spool(path)
    large_results(spool, 40)
    assert space_bytes(path) > 40 * MEGABYTE
    spool.commit(WriteSpool(forgotten=list(range(1, 41))))
    for _ in range(25):
        spool.give_back()
    assert space_bytes(path) < 20 * MEGABYTE
    assert load(spool)[0] == []
    spool.close()


LARGE = 300_000
"""Bytes of a body that is a file."""


def large_task(seq: int, payload: bytes) -> Task:
    """One whose arguments are in the blob store."""
    task = make_task(seq, payload=None)
    sha256 = hashlib.sha256(payload).hexdigest()
    blob = wire.BlobLocation(blob_key="k", size_bytes=len(payload), sha256=sha256)
    task.spec = msgspec.structs.replace(task.spec, payload=None, payload_blob=blob)
    return task


def value(frame: Frame) -> bytes:
    return bytes(bytes_of(frame))


def files(path: Path) -> list[str]:
    """Which bodies are files; their full names end in what no other start of an agent has."""
    return sorted(file.stem for file in path.with_suffix(".bodies").iterdir())


def fetched(spool: Spool, seq: int, payload: bytes) -> Task:
    task = large_task(seq, payload)
    spool.commit(WriteSpool(accepted=[task]))
    task.payload = payload
    spool.commit(WriteSpool(fetched=[task]))
    return task


@pytest.mark.parametrize("payload_bytes", [60_000, LARGE])
def test_a_start_and_a_new_attempt_rewrite_no_body(tmp_path: Path, payload_bytes: int) -> None:
    path = tmp_path / "spool.sqlite3"
    with contextlib.closing(Spool(path)) as spool:
        task = make_task(1, payload=b"p" * payload_bytes)
        spool.commit(WriteSpool(accepted=[task]))
        log = Path(f"{path}-wal")
        spool._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        task.starts, task.attempt = 1, 2
        spool.commit(WriteSpool(starts=[task], redelivered=[task]))
        assert 0 < log.stat().st_size < 20_000
        assert value(spool.payload(task)) == b"p" * payload_bytes


def test_a_large_body_is_a_file_for_as_long_as_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "spool.sqlite3"
    with contextlib.closing(Spool(path)) as spool:
        task = fetched(spool, 1, b"p" * LARGE)
        assert files(path) == ["1.payload"]
        spool.commit(WriteSpool(finished=[finish(task, b"r" * LARGE)]))
        assert files(path) == ["1.result"]
        assert value(spool.body(task)) == b"r" * LARGE
        assert path.stat().st_size + Path(f"{path}-wal").stat().st_size < LARGE
        spool.commit(WriteSpool(forgotten=[1]))
        assert files(path) == [], "its space is given back at once"
        fetched(spool, 2, b"p" * LARGE)
        spool.commit(WriteSpool(dropped=[2]))
        assert files(path) == []


def test_files_of_a_failed_turn_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "spool.sqlite3"
    with contextlib.closing(Spool(path)) as spool:
        tasks = [make_task(seq) for seq in (1, 2)]
        spool.commit(WriteSpool(accepted=tasks))
        ends = WriteSpool(finished=[finish(task, b"r" * LARGE) for task in tasks])
        with monkeypatch.context() as disk:
            disk.setattr("farcall_endpoint.agent.shell.spool.Spool._write", full)
            with pytest.raises(SpoolUnwritable):
                spool.commit(ends)
        assert files(path) == []
        spool.commit(ends)
        assert [value(spool.body(task)) for task in tasks] == [b"r" * LARGE] * 2


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_unreferenced_files_are_deleted(tmp_path: Path) -> None:
    """A process can die between a file and the commit for it, and between a commit and the end of a file."""
    path = tmp_path / "spool.sqlite3"
    with contextlib.closing(Spool(path)) as spool:
        kept = fetched(spool, 1, b"p" * LARGE)
        (path.with_suffix(".bodies") / "7.result.x").write_bytes(b"stray")
    with contextlib.closing(Spool(path)) as spool:
        assert [task.seq for task in load(spool)[0]] == [1]
        assert files(path) == ["1.payload"]
        assert value(spool.payload(kept)) == b"p" * LARGE


def test_undeletable_file_does_not_prevent_the_start(tmp_path: Path) -> None:
    """An NFS client refuses to delete ``.nfs...``, what is left of a file that a worker still maps."""
    path = tmp_path / "spool.sqlite3"
    with contextlib.closing(Spool(path)) as spool:
        (path.with_suffix(".bodies") / ".nfs0001").mkdir()
        (path.with_suffix(".bodies") / "7.result.x").write_bytes(b"stray")
        assert load(spool) == ([], set())
        assert files(path) == [".nfs0001"]


def test_backup_without_large_bodies_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "spool.sqlite3"
    with contextlib.closing(Spool(path)) as spool:
        tasks = [fetched(spool, seq, b"p" * LARGE) for seq in (1, 2)]
        tasks[1].starts = 1
        spool.commit(WriteSpool(starts=[tasks[1]]))
        load(spool)
        assert caplog.text == ""
    shutil.rmtree(path.with_suffix(".bodies"))
    with contextlib.closing(Spool(path)) as spool:
        assert [(task.seq, task.stage) for task in load(spool)[0]] == [(1, Stage.FETCHING)]
    assert "2 large arguments or results are missing or damaged" in caplog.text
    assert "1 tasks are given back" in caplog.text


def test_unreadable_body_is_not_dropped(tmp_path: Path) -> None:
    """A backup that was restored as another user."""
    path = tmp_path / "spool.sqlite3"
    with contextlib.closing(Spool(path)) as spool:
        fetched(spool, 1, b"p" * LARGE)
        [file] = path.with_suffix(".bodies").iterdir()
        file.unlink()
        file.mkdir()
        with pytest.raises(ConfigurationError, match="cannot be read"):
            load(spool)
        file.rmdir()
        file.write_bytes(b"p" * LARGE)
        assert [task.stage for task in load(spool)[0]] == [Stage.QUEUED]


@pytest.mark.parametrize("loss", ["gone", "short", "zeros"])
def test_bodies_lost_in_a_power_cut_are_fetched_or_delivered_again(tmp_path: Path, loss: str) -> None:
    path = tmp_path / "spool.sqlite3"
    payload = b"p" * LARGE
    with contextlib.closing(Spool(path)) as spool:
        load(spool)
        tasks = [fetched(spool, seq, payload) for seq in (1, 2, 3, 4)]
        tasks[1].starts = 1
        spool.commit(WriteSpool(starts=[tasks[1]]))
        finish(tasks[2], payload)
        assert tasks[2].result is not None
        tasks[2].result.sha256 = hashlib.sha256(payload).hexdigest()
        spool.commit(WriteSpool(finished=[tasks[2]]))
        spool._database.execute("UPDATE meta SET value = 'an earlier one' WHERE key = 'boot_id'")
    for name in ("1.payload", "2.payload", "3.result"):
        [file] = path.with_suffix(".bodies").glob(f"{name}.*")
        match loss:
            case "gone":
                file.unlink()
            case "short":
                file.write_bytes(payload[:1000])
            case _:
                file.write_bytes(bytes(LARGE))
    for _ in range(2):  # and it stays so
        with contextlib.closing(Spool(path)) as spool:
            stages = {task.seq: task.stage for task in load(spool)[0]}
            # The second had started: the cloud decides about it, as about the third, whose result is lost.
            assert stages == {1: Stage.FETCHING, 4: Stage.QUEUED}
            assert value(spool.payload(tasks[3])) == payload
            assert files(path) == ["4.payload"]


def test_files_are_verified_only_after_a_reboot(tmp_path: Path) -> None:
    path = tmp_path / "spool.sqlite3"
    with contextlib.closing(Spool(path)) as spool:
        load(spool)
        fetched(spool, 1, b"p" * LARGE)
    [file] = path.with_suffix(".bodies").iterdir()
    file.write_bytes(bytes(LARGE))
    with contextlib.closing(Spool(path)) as spool:
        assert [task.stage for task in load(spool)[0]] == [Stage.QUEUED]


def test_body_folder_changed_by_tasks_does_not_stop_the_endpoint(tmp_path: Path) -> None:
    path = tmp_path / "spool.sqlite3"
    spool = Spool(path)
    shutil.rmtree(path.with_suffix(".bodies"))
    task, body = make_task(1), b"r" * 100_000
    spool.commit(WriteSpool(accepted=[task]))
    spool.commit(WriteSpool(finished=[finish(task, body)]))
    spool.close()
    (path.with_suffix(".bodies") / "folder").mkdir()
    spool = Spool(path)
    [loaded], _ = load(spool)
    assert bytes(bytes_of(spool.body(loaded))) == body
    spool.close()


def test_copied_spool_does_not_use_foreign_bodies(tmp_path: Path) -> None:
    """The database of some time ago, put back over a spool that has used the same numbers for other tasks since."""
    path, backup = tmp_path / "spool.sqlite3", tmp_path / "backup"
    with contextlib.closing(Spool(path)) as spool:
        load(spool)
        fetched(spool, 1, b"1" * LARGE)
    shutil.copy(path, backup)
    with contextlib.closing(Spool(path)) as spool:
        load(spool)
        spool.commit(WriteSpool(dropped=[1]))
        fetched(spool, 2, b"2" * LARGE)
        spool.commit(WriteSpool(dropped=[2]))
    with contextlib.closing(Spool(path)) as spool:
        load(spool)
        fetched(spool, 1, b"3" * LARGE)
    shutil.copy(backup, path)
    with contextlib.closing(Spool(path)) as spool:
        assert [task.stage for task in load(spool)[0]] == [Stage.FETCHING]
