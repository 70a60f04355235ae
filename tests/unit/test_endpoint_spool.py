"""The spool keeps what it was told to keep."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from farcall_common import wire
from farcall_common.errors import ConfigurationError
from farcall_common.wire import TaskState
from farcall_endpoint.agent.spool import Spool
from farcall_endpoint.agent.tasks import Decisions, End, Stage, Task


def make_task(seq: int, *, payload: bytes | None = b"p", function_hash: str = "h") -> Task:
    spec = wire.TaskSpec(task_id=f"t{seq}", attempt=1, function_id="f", function_hash=function_hash, payload=0)
    stage = Stage.QUEUED if payload is not None else Stage.FETCHING
    return Task(seq, spec, 1, stage, 12.5, payload=payload)


def finish(task: Task, body: bytes | None = b"r") -> Task:
    task.stage = Stage.ENDED
    task.end = End(TaskState.SUCCESS, size_bytes=len(body or b""), started_at=1.0, ended_at=2.0, body=body)
    return task


def test_tasks_come_back_in_order_with_their_counts() -> None:
    spool = Spool(None)
    first, second, third = make_task(1), make_task(2, payload=None), make_task(3)
    first.starts = 1
    spool.commit(Decisions(accepted=[first, second, third], starts=[first]))
    third.starts, third.attempt = 2, 5
    spool.commit(Decisions(starts=[third], redelivered=[third]))
    tasks, _ = spool.load()
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
    spool.commit(Decisions(accepted=[task]))
    task.payload = b"fetched"
    spool.commit(Decisions(fetched=[task]))
    [loaded], _ = spool.load()
    assert loaded.stage is Stage.QUEUED
    assert spool.payload(loaded) == b"fetched"


def test_an_end_replaces_its_task_until_it_is_forgotten() -> None:
    spool = Spool(None)
    task = make_task(1)
    spool.commit(Decisions(accepted=[task]))
    spool.commit(Decisions(ended=[finish(task)]))
    [loaded], _ = spool.load()
    assert loaded.end is not None
    assert (loaded.end.state, loaded.end.size_bytes, loaded.end.started_at) == (TaskState.SUCCESS, 1, 1.0)
    assert loaded.end.body is None
    assert spool.body(loaded) == b"r"
    task.attempt = 2
    spool.commit(Decisions(redelivered=[task]))
    assert spool.load()[0][0].attempt == 2
    spool.commit(Decisions(forgotten=[1]))
    assert spool.load()[0] == []


def test_an_end_says_whether_an_attempt_was_left() -> None:
    spool = Spool(None)
    tasks = [make_task(1), make_task(2)]
    for task, exhausted in zip(tasks, (True, False), strict=True):
        task.end = End(TaskState.FAILED, {"code": "WORKER_DIED", "message": "it died"}, exhausted=exhausted)
    spool.commit(Decisions(accepted=tasks, ended=tasks))
    assert [task.end.exhausted for task in spool.load()[0] if task.end] == [True, False]


def test_forgetting_has_no_hurry_and_dropping_has(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    ended, unwanted = finish(make_task(1)), make_task(2)
    spool.commit(Decisions(accepted=[make_task(1), unwanted], ended=[ended]))
    spool.commit(Decisions(forgotten=[1]))
    assert spool.body(ended) == b"r", "this turn had nothing else to write"
    spool.commit(Decisions(dropped=[2]))
    with pytest.raises(TypeError):
        spool.body(ended)
    spool.commit(Decisions(accepted=[make_task(3)], ended=[finish(make_task(3))]))
    spool.commit(Decisions(forgotten=[3]))
    spool.close()
    again = Spool(tmp_path / "spool")
    assert again.load()[0] == []
    again.close()


def test_a_task_that_ends_in_the_turn_of_its_acceptance() -> None:
    spool = Spool(None)
    task = finish(make_task(1), None)
    spool.commit(Decisions(accepted=[task], ended=[task]))
    [loaded], _ = spool.load()
    assert loaded.stage is Stage.ENDED


def test_a_second_end_wins() -> None:
    spool = Spool(None)
    task = finish(make_task(1))
    spool.commit(Decisions(accepted=[task], ended=[task]))
    task.end = End(TaskState.FAILED, {"code": "RESULT_UPLOAD_FAILED"})
    spool.commit(Decisions(ended=[task]))
    [loaded], _ = spool.load()
    assert loaded.end is not None
    assert loaded.end.error == {"code": "RESULT_UPLOAD_FAILED"}


def test_functions_are_kept_while_they_are_needed() -> None:
    spool = Spool(None)
    functions = [(wire.FunctionSpec(function_hash=name, name="f", body=0), name.encode()) for name in ("h", "unused")]
    spool.commit(Decisions(functions=functions, accepted=[make_task(1)]))
    assert spool.function("unused") == b"unused"
    assert spool.load()[1] == {"h"}
    assert spool.function("h") == b"h"


def test_a_turn_is_kept_as_a_whole_or_not_at_all() -> None:
    spool = Spool(None)
    spool.commit(Decisions(accepted=[make_task(1)]))
    with pytest.raises(Exception, match="UNIQUE"):
        spool.commit(Decisions(accepted=[make_task(2), make_task(1)]))
    assert [task.seq for task in spool.load()[0]] == [1]
    spool.commit(Decisions(accepted=[make_task(2)]))


def test_a_spool_keeps_its_id_and_a_new_one_has_another(tmp_path: Path) -> None:
    first = Spool(tmp_path / "a")
    spool_id = first.spool_id
    first.commit(Decisions(accepted=[make_task(1)]))
    first.close()
    again = Spool(tmp_path / "a")
    assert again.spool_id == spool_id
    assert [task.task_id for task in again.load()[0]] == ["t1"]
    again.close()
    other = Spool(tmp_path / "b")
    assert other.spool_id != spool_id
    other.close()


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Spool(path)


def test_a_spool_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    spool._database.execute("UPDATE meta SET value = '99' WHERE key = 'format'")
    spool.close()
    with pytest.raises(ConfigurationError, match="format 99"):
        Spool(tmp_path / "spool")


def test_specs_of_later_versions_can_be_read() -> None:
    spool = Spool(None)
    task = make_task(1)
    spool.commit(Decisions(accepted=[task]))
    newer = {**msgspec.to_builtins(task.spec), "field_of_tomorrow": 1}
    spool._database.execute("UPDATE tasks SET spec = ?", (msgspec.msgpack.encode(newer),))
    assert spool.load()[0][0].task_id == "t1"
