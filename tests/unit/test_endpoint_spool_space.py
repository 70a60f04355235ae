"""A spool that cannot be written: what is decided waits as it is, nothing is promised meanwhile, nothing is lost."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from farcall_common import wire
from farcall_common.errors import ConfigurationError
from farcall_common.task_options import TaskOptions
from farcall_common.wire import TaskState
from farcall_endpoint.agent.core.actions import WriteSpool
from farcall_endpoint.agent.core.spool_space import SpoolSpace
from farcall_endpoint.agent.core.tasks import Stage, Task, TaskResult
from farcall_endpoint.agent.shell.spool import Spool, SpoolUnwritable
from farcall_endpoint.contracts.agent_manager import Died, Finished, Progress
from farcall_endpoint.host.shared_memory import bytes_of
from tests.support.agent import load
from tests.unit.test_endpoint_agent_core import BODY, FUNCTION, connected, finish, ids, send, spec


def a_task(seq: int, *, payload_bytes: int = 1) -> Task:
    task_spec = wire.TaskSpec(
        task_id=f"t{seq}", attempt=1, function_id="f", function_hash="h", options=TaskOptions(), payload=0
    )
    return Task(seq, task_spec, 1, Stage.QUEUED, 12.5, payload=b"p" * payload_bytes)


def pages(spool: Spool, limit: int) -> None:
    """Let the database have no more than so many pages beyond those that it has."""
    [[count]] = spool._database.execute("PRAGMA page_count").fetchall()
    spool._database.execute(f"PRAGMA max_page_count = {count + limit}").fetchall()


@contextlib.contextmanager
def file_limit(size_bytes: int) -> Iterator[None]:
    """Files of this process may not grow beyond this: writing more is an I/O error, as with a quota. Not for longer
    than must be, because it holds for the test runner's own output too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# -- the spool ---------------------------------------------------------------------------------------------------------


def test_full_disk_differs_from_a_defect_and_keeps_the_spool() -> None:
    spool = Spool(None)
    spool.commit(WriteSpool(accepted=[a_task(1)]))
    pages(spool, 10)
    accepted = [a_task(seq, payload_bytes=10_000) for seq in range(2, 20)]
    for _ in range(2):
        with pytest.raises(SpoolUnwritable, match="full"):
            spool.commit(WriteSpool(accepted=accepted))
        assert [task.seq for task in load(spool)[0]] == [1]
    pages(spool, 1000)
    spool.commit(WriteSpool(accepted=accepted))
    assert [task.seq for task in load(spool)[0]] == list(range(1, 20))


def test_deletion_is_rolled_back_on_a_full_disk() -> None:
    spool = Spool(None)
    ended = a_task(1)
    ended.stage, ended.result = Stage.FINISHED, TaskResult(TaskState.SUCCESS, size_bytes=1, body=b"r")
    spool.commit(WriteSpool(accepted=[ended], finished=[ended]))
    pages(spool, 2)
    big = [a_task(2, payload_bytes=100_000)]
    with pytest.raises(SpoolUnwritable):
        spool.commit(WriteSpool(accepted=big, forgotten=[1]))
    pages(spool, 100)
    spool.commit(WriteSpool(accepted=big, forgotten=[1]))
    assert [task.seq for task in load(spool)[0]] == [2]


def test_an_io_error_counts_as_a_full_disk_and_the_spool_recovers(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    for seq in range(5):
        spool.commit(WriteSpool(accepted=[a_task(seq, payload_bytes=20_000)]))
    many = [a_task(seq, payload_bytes=60_000) for seq in range(5, 10)]
    with file_limit(300_000), pytest.raises(SpoolUnwritable, match="I/O error"):
        spool.commit(WriteSpool(accepted=many))
    spool.commit(WriteSpool(accepted=many))
    spool.close()
    again = Spool(tmp_path / "spool")
    assert [task.seq for task in load(again)[0]] == list(range(10))
    again.close()


def test_large_body_without_space_fails_the_commit_and_the_spool_recovers(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    large = a_task(1, payload_bytes=400_000)
    with file_limit(300_000), pytest.raises(SpoolUnwritable, match="too large"):
        spool.commit(WriteSpool(accepted=[a_task(0), large]))
    assert load(spool)[0] == []
    spool.commit(WriteSpool(accepted=[a_task(0), large]))
    assert [task.seq for task in load(spool)[0]] == [0, 1]
    assert bytes(bytes_of(spool.payload(large))) == b"p" * 400_000
    spool.close()


def test_open_load_and_close_need_no_space(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    functions = [(wire.FunctionSpec(function_hash="unused", name="f", body=0), b"body")]
    spool.commit(WriteSpool(functions=functions, accepted=[a_task(1, payload_bytes=100_000)]))
    spool.close()
    with file_limit(0):
        full = Spool(tmp_path / "spool")
        tasks, _ = load(full)
        payload = full.payload(a_task(1))
        with pytest.raises(SpoolUnwritable):
            full.commit(WriteSpool(accepted=[a_task(2)]))
        full.close()
    assert [task.seq for task in tasks] == [1]
    assert bytes(bytes_of(payload)) == b"p" * 100_000


def test_new_spool_on_a_full_disk_is_an_error(tmp_path: Path) -> None:
    message = r"cannot be written.*full, over its quota, or broken"
    with file_limit(0), pytest.raises(ConfigurationError, match=message):
        Spool(tmp_path / "spool")


def test_missing_or_read_only_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be written"):
        Spool(tmp_path / "nowhere" / "spool")


def test_free_space_is_known_for_files_only(tmp_path: Path) -> None:
    assert Spool(None).room() is None
    spool = Spool(tmp_path / "spool")
    room = spool.room()
    spool.close()
    assert room is not None
    free_bytes, reserve_bytes = room
    disk = os.statvfs(tmp_path)
    assert 0 < reserve_bytes <= disk.f_blocks * disk.f_frsize / 20
    assert abs(free_bytes - disk.f_bavail * disk.f_frsize) < 2**30


# -- when to try again -------------------------------------------------------------------------------------------------


def test_write_retries_back_off_until_one_succeeds() -> None:
    space, now, waits = SpoolSpace(), 100.0, []
    for _ in range(10):
        space.failed("full", now=now)
        assert space.retry_at is not None
        waits.append(round(space.retry_at - now, 3))
        now = space.retry_at
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0]
    assert "full" in space.problem
    space.written()
    assert space.problem == ""
    space.failed("full", now=now)
    assert space.retry_at == pytest.approx(now + 0.1)
    space.written()
    assert space.retry_at is None


def test_below_the_reserve_there_is_a_problem_although_the_spool_can_be_written() -> None:
    space = SpoolSpace()
    space.measured((300 * 2**20, 256 * 2**20))
    assert space.problem == ""
    space.measured((100 * 2**20, 256 * 2**20))
    assert "100 MiB are free" in space.problem
    assert space.retry_at is None
    space.measured(None)
    assert space.problem == ""


# -- what the agent decides --------------------------------------------------------------------------------------------


def test_spool_problem_stops_credit_and_not_accepted_tasks() -> None:
    core = connected()
    core.measured((100 * 2**20, 256 * 2**20))
    turn = send(core, spec("a"), spec("b"), spec("c"))
    assert ids(turn.orders["m"]) == ["a", "b"]
    assert turn.credit == 0
    assert "nearly full" in core.report().detail["problem"]
    assert finish(core, "a").credit == 0
    core.measured(None)
    assert core.decide(now=2.0).credit > 0
    assert core.report().detail == {}


def test_unwritten_turn_is_decided_again_once() -> None:
    core = connected()
    send(core, spec("a"), spec("b"), spec("c"))
    core.fail_write(now=0.0)
    core.run_tasks(wire.RunTasks(tasks=(spec("d"),), functions=(FUNCTION,)), [BODY, b"payload"])
    second = core.decide(now=1.0)
    assert ids(second.accepted) == ids(second.acknowledged) == ["a", "b", "c", "d"]
    assert len(second.functions) == 1
    assert ids(second.orders["m"]) == ["a", "b"]
    assert [(task.task_id, task.starts) for task in second.starts] == [("a", 1), ("b", 1)]
    third = core.decide(now=2.0)
    assert not third.accepted
    assert not third.orders


def test_withheld_credit_is_given_later() -> None:
    core = connected()
    core.opened()
    first = send(core, spec("a"))
    assert first.credit > 0
    given = first.credit
    core.fail_write(now=0.0)
    assert core.decide(now=1.0).credit == 0
    assert core.written(now=1.0).credit == given


def test_unwritten_result_is_not_reported_or_finished() -> None:
    core = connected()
    send(core, spec("a"))
    first = finish(core, "a")
    assert ids(first.results) == ["a"]
    core.fail_write(now=1.0)
    assert [held.finished for held in core.held()] == [False]
    second = core.decide(now=2.0)
    assert ids(second.finished) == ids(second.results) == ["a"]
    assert second.finished[0].result is not None
    assert second.finished[0].result.body == b"r"
    assert [held.finished for held in core.held()] == [True]


def test_unsent_task_does_not_count_as_started_when_its_manager_is_lost() -> None:
    core = connected()
    send(core, spec("a", idempotent=False))
    core.fail_write(now=0.0)
    core.manager_lost("m", "it died")
    core.manager_registered("n", slots=2)
    core.progress("n", Progress(workers=2))
    second = core.decide(now=2.0)
    assert ids(second.orders["n"]) == ["a"]
    assert second.starts[0].starts == 1
    assert not second.finished


def test_earlier_worker_death_still_counts() -> None:
    core = connected()
    [task] = send(core, spec("a")).starts
    core.progress("m", Progress(workers=2, died=(Died("a", "killed"),)))
    core.decide(now=1.0)
    assert task.starts == 2
    core.fail_write(now=1.0)
    assert task.starts == 1
    second = core.decide(now=2.0)
    assert ids(second.orders["m"]) == ["a"]
    assert task.starts == 2


def test_cancels_do_not_wait_for_the_spool() -> None:
    core = connected()
    send(core, spec("a"), spec("b"), spec("c"))
    core.cancel(["a"])
    core.recorded([wire.TaskRef(task_id="c", attempt=1)])
    assert core.decide(now=1.0).cancels == {"m": ["a"]}
    assert core.fail_write(now=1.0).actions == []
    core.cancel(["b"])
    waiting = core.decide(now=1.01)
    assert waiting.cancels == {"m": ["b"]}
    assert len(waiting.actions) == 1
    assert not core.decide(now=2.0).cancels


def test_unacknowledged_tasks_are_dropped_with_their_session() -> None:
    core = connected()
    send(core, spec("kept"))
    send(core, spec("a"), spec("b", container="c"))
    core.fail_write(now=0.0)
    core.closed()
    core.decide(now=0.01)
    assert [held.task_id for held in core.held()] == ["kept"]
    assert core.report().outstanding_tasks == 1
    core.opened()
    turn = core.decide(now=1.0)
    assert [turn.accepted, turn.acknowledged, turn.finished, dict(turn.orders)] == [[], [], [], {}]
    again = send(core, spec("a", attempt=2))
    assert ids(again.accepted) == ["a"]
    assert ids(again.orders["m"]) == ["a"]
    assert again.accepted[0].attempt == 2


def test_results_survive_a_lost_session_on_a_full_disk() -> None:
    core = connected()
    send(core, spec("a"))
    finish(core, "a")
    core.fail_write(now=1.0)
    core.closed()
    core.opened()
    turn = core.decide(now=2.0)
    assert ids(turn.finished) == ids(turn.results) == ["a"]


def test_events_during_an_outage_are_committed_together() -> None:
    core, spool = connected(), Spool(None)
    message = wire.RunTasks(tasks=(spec("a"), spec("b"), spec("c")), functions=(FUNCTION,))
    core.run_tasks(message, [BODY, b"p" * 100_000])
    first = core.decide(now=0.0)
    pages(spool, 10)
    with pytest.raises(SpoolUnwritable):
        spool.commit(first.write)
    core.fail_write(now=0.0)
    core.cancel(["a"])
    pages(spool, 1000)
    second = core.decide(now=1.0)
    spool.commit(second.write)
    tasks, functions = load(spool)
    assert [(task.task_id, task.starts, task.result is not None) for task in tasks] == [
        ("a", 0, True),
        ("b", 1, False),
        ("c", 1, False),
    ]
    assert tasks[0].result is not None
    assert tasks[0].result.state is TaskState.CANCELLED
    assert functions == {FUNCTION.function_hash}
    finished = Finished("b", TaskState.SUCCESS, 0, None, 0.0, 0.5)
    core.progress("m", Progress(workers=2, finished=(finished,)), [b"r"])
    spool.commit(core.decide(now=2.0).write)
    assert spool.body(tasks[1]) == b"r"
