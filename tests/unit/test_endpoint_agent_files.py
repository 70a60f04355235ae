"""Tasks with files, as an agent decides them: no process, no clock, a spool in memory or on disk."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from farcall_common import wire
from farcall_common.event_log import UserBytes
from farcall_common.sealing import is_sealed
from farcall_common.staged_files import FileUse, pack_files
from farcall_common.wire import TaskState
from farcall_endpoint.agent.core import actions as do
from farcall_endpoint.agent.core import events as ev
from farcall_endpoint.agent.core.agent import AgentCore
from farcall_endpoint.agent.core.scheduling import round_robin
from farcall_endpoint.agent.core.tasks import OpenedCall, SpooledTask, Stage, Task
from farcall_endpoint.agent.shell.sealing import seal_result
from farcall_endpoint.agent.shell.spool import Spool
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.contracts.agent_manager import Died, Finished, Progress
from farcall_endpoint.contracts.prefetch import PrefetchPolicy
from farcall_endpoint.files import orders
from farcall_endpoint.files.plan import Staging
from farcall_endpoint.host.shared_memory import bytes_of
from tests.support.agent import CoreDriver, Turn, load
from tests.unit.test_endpoint_agent_core import BODY, FUNCTION, HASH, finish, ids, spec

IN, OUT = FileUse("s3://lab/raw/a"), FileUse("s3://lab/out/a", "w")
SHA256 = "ab" * 32


def make_core(**options: Any) -> CoreDriver:
    return CoreDriver(
        AgentCore(
            endpoint_id="e",
            policy=round_robin(),
            slots_hint=2,
            prefetch=PrefetchPolicy(horizon_s=1.0, limit=0),
            window=PrefetchPolicy(horizon_s=1.0, limit=0),
            max_window=100,
            **{"staging": Staging(), **options},
        )
    )


def connected(**options: Any) -> CoreDriver:
    core = make_core(**options)
    core.manager_registered("m", slots=2)
    core.progress("m", Progress(workers=2))
    core.opened()
    core.decide(now=0.0)
    return core


def submit(core: CoreDriver, *uses: FileUse, task_id: str = "a", **options: Any) -> Turn:
    message = wire.RunTasks(tasks=(spec(task_id, **options),), functions=(FUNCTION,))
    core.run_tasks(message, [BODY, pack_files(uses, b"call")])
    return core.decide(now=0.0)


def moved(turn: Turn) -> list[orders.Order]:
    return [each for action in turn.actions if isinstance(action, do.MoveFiles) for each in action.orders]


def hear(core: CoreDriver, *reports: orders.Report, now: float = 0.0) -> Turn:
    core.add(ev.TransfersReported(reports))
    return core.decide(now=now)


def stage_in(core: CoreDriver, task_id: str = "a", *, now: float = 0.0) -> Turn:
    """Let a task have all that it reads; the last turn."""
    turn = hear(core, orders.Made(task_id), now=now)
    while fetches := [each for each in moved(turn) if isinstance(each, orders.Fetch)]:
        turn = hear(core, *[orders.Fetched(each.number, 3, SHA256, cached=True) for each in fetches], now=now)
    return turn


def stored(turn: Turn) -> list[orders.Report]:
    return [orders.Stored(each.number, 5, SHA256) for each in moved(turn) if isinstance(each, orders.Store)]


# -- in ----------------------------------------------------------------------------------------------------------------


def test_a_task_is_queued_when_its_files_are_there() -> None:
    core = connected()
    turn = submit(core, IN)
    assert ids(turn.accepted) == ids(turn.acknowledged) == ["a"]
    assert moved(turn) == [orders.Make("a", "", ())]
    [task] = turn.accepted
    assert task.stage is Stage.STAGING
    assert core.demand().tasks == 0
    [row] = core.report().detail["staging"]
    assert (row["task_id"], row["state"]) == ("a", "staging-in")
    assert ids(stage_in(core).orders["m"]) == ["a"]
    assert core.demand().tasks == 1
    assert "staging" not in core.report().detail
    [task] = finish(core, "a").finished
    assert task.result is not None
    assert task.result.details == {
        "files": [{"url": IN.url, "mode": "r", "size_bytes": 3, "sha256": SHA256, "cached": True}]
    }


def test_a_task_without_files_has_nothing_to_do_with_transfers() -> None:
    core = connected()
    core.run_tasks(wire.RunTasks(tasks=(spec("a"),), functions=(FUNCTION,)), [BODY, b"payload"])
    [task] = core.decide(now=0.0).orders["m"]
    assert task.files is None
    turn = finish(core, "a")
    assert moved(turn) == []
    assert task.result is not None
    assert not task.result.details


def test_files_of_the_endpoint_itself_need_no_staging() -> None:
    core = connected()
    [task] = submit(core, FileUse("file:///data/a"), FileUse("file:///data/b", "w")).orders["m"]
    assert task.files is not None
    turn = finish(core, "a")
    assert (ids(turn.results), moved(turn)) == (["a"], [])


def test_a_payload_from_the_blob_store_may_have_a_list() -> None:
    core = connected()
    blob = wire.BlobLocation(blob_key="k", size_bytes=7, sha256="0" * 64, url="https://x")
    core.run_tasks(wire.RunTasks(tasks=(spec("a", payload=None, payload_blob=blob),), functions=(FUNCTION,)), [BODY])
    [task] = core.decide(now=0.0).fetches
    core.fetched(task, pack_files([IN], b"call"))
    turn = core.decide(now=0.0)
    assert (ids(turn.fetched), task.stage, turn.orders) == (["a"], Stage.STAGING, {})
    assert ids(stage_in(core).orders["m"]) == ["a"]


def test_a_file_that_cannot_be_had_fails_its_task_and_is_logged() -> None:
    core = connected()
    submit(core, IN)
    [fetch] = moved(hear(core, orders.Made("a")))
    assert isinstance(fetch, orders.Fetch)
    turn = hear(core, orders.Failed(fetch.number, outcomes.file_not_found(IN.url).to_json()))
    [task] = turn.finished
    assert task.result is not None
    assert task.result.error is not None
    assert task.result.error["code"] == "FILE_NOT_FOUND"
    assert [each.messages for each in turn.actions if isinstance(each, do.LogFiles)] == [
        ("The file s3://lab/raw/a does not exist.",)
    ]
    assert moved(turn) == [orders.Remove("a", "")]


@pytest.mark.parametrize("payload", [b"fl\nnone\n", pack_files([FileUse("ftp://h/a")], b"call")])
def test_a_list_that_cannot_be_staged_fails_its_task(payload: bytes) -> None:
    core = connected()
    core.run_tasks(wire.RunTasks(tasks=(spec("a"),), functions=(FUNCTION,)), [BODY, payload])
    turn = core.decide(now=0.0)
    assert ids(turn.finished) == ["a"]
    assert moved(turn) == []


def test_a_task_is_cancelled_while_its_files_move() -> None:
    core = connected()
    submit(core, IN)
    [fetch] = moved(hear(core, orders.Made("a")))
    assert isinstance(fetch, orders.Fetch)
    core.cancel(["a"])
    turn = core.decide(now=1.0)
    assert [task.result.state for task in turn.finished if task.result] == [TaskState.CANCELLED]
    assert moved(turn) == [orders.Cancel(fetch.number), orders.Remove("a", "")]


def test_another_attempt_finds_its_files_in_place() -> None:
    core = connected()
    submit(core, IN)
    stage_in(core)
    core.progress("m", Progress(workers=2, died=(Died("a", "signal 9"),)))
    turn = core.decide(now=1.0)
    assert ids(turn.orders["m"]) == ["a"]
    assert moved(turn) == []
    core.manager_lost("m", "it is gone")
    core.manager_registered("n", slots=2)
    core.progress("n", Progress(workers=2))
    turn = core.decide(now=2.0)
    assert ids(turn.orders["n"]) == ["a"]
    assert moved(turn) == []


def test_tasks_whose_files_move_do_not_use_up_the_credit() -> None:
    core = connected()
    for number in range(4):
        submit(core, IN, task_id=f"t{number}")
    core.closed()
    core.opened()
    assert core.decide(now=1.0).credit == 4  # as without them: two for each slot


def test_a_session_that_ends_before_the_acknowledgement_stops_the_transfers() -> None:
    core = connected()
    core.run_tasks(wire.RunTasks(tasks=(spec("a"),), functions=(FUNCTION,)), [BODY, pack_files([IN], b"call")])
    core.closed()
    turn = core.decide(now=0.0)
    assert turn.accepted == []
    assert moved(turn) == []
    assert core.held() == ()


# -- out ---------------------------------------------------------------------------------------------------------------


def run_and_write(core: CoreDriver, **options: Any) -> tuple[Task, Turn]:
    """A task that has returned; its files are on their way out."""
    [task] = submit(core, IN, OUT, **options).accepted
    assert ids(stage_in(core).orders["m"]) == ["a"]
    return task, finish(core, "a")


def test_a_task_succeeds_when_all_that_it_has_written_is_stored() -> None:
    core = connected()
    task, turn = run_and_write(core)
    assert (turn.finished, turn.results, ids(turn.write.storing)) == ([], [], ["a"])
    assert task.stage is Stage.STAGING_OUT
    assert core.demand().tasks == 0
    assert [each.finished for each in core.held()] == [False]
    [row] = core.report().detail["staging"]
    assert (row["state"], row["files"]) == ("staging-out", 1)
    core.written(now=1.0)
    assert task.kept is not None
    assert task.kept.body is None  # the spool has it
    turn = hear(core, *stored(turn), now=2.0)
    assert ids(turn.finished) == ids(turn.results) == ["a"]
    assert task.result is not None
    assert task.result.state is TaskState.SUCCESS
    assert task.result.details is not None
    assert [each["url"] for each in task.result.details["files"]] == [IN.url, OUT.url]
    assert moved(turn) == [orders.Remove("a", "")]


def test_a_slot_is_free_while_files_are_stored() -> None:
    core = connected()
    run_and_write(core)
    core.run_tasks(wire.RunTasks(tasks=(spec("b"), spec("c")), functions=(FUNCTION,)), [BODY, b"payload"])
    assert ids(core.decide(now=2.0).orders["m"]) == ["b", "c"]


def test_files_of_a_run_that_failed_are_not_stored() -> None:
    core = connected()
    submit(core, OUT)
    stage_in(core)
    error = {"code": "TASK_FAILED", "message": "no", "fault": "user_code"}
    core.progress("m", Progress(workers=2, finished=(Finished("a", TaskState.FAILED, None, error, 0.0, 0.5),)))
    turn = core.decide(now=1.0)
    assert ids(turn.results) == ["a"]
    assert moved(turn) == [orders.Remove("a", "")]


def test_a_file_that_cannot_be_stored_fails_its_task() -> None:
    core = connected()
    task, turn = run_and_write(core)
    release, store = moved(turn)
    assert release == orders.Release("a", "")
    assert isinstance(store, orders.Store)
    turn = hear(core, orders.Failed(store.number, outcomes.file_denied(OUT.url, "no").to_json()), now=2.0)
    assert ids(turn.results) == ["a"]
    assert task.result is not None
    assert (task.result.state, task.result.size_bytes) == (TaskState.FAILED, 0)
    assert task.result.error is not None
    assert task.result.error["code"] == "FILE_DENIED"
    assert task.result.started_at == 0.0


def test_a_task_is_cancelled_while_its_files_are_stored() -> None:
    core = connected()
    task, turn = run_and_write(core)
    release, store = moved(turn)
    assert release == orders.Release("a", "")
    assert isinstance(store, orders.Store)
    core.cancel(["a"])
    turn = core.decide(now=2.0)
    assert task.result is not None
    assert task.result.state is TaskState.CANCELLED
    assert moved(turn) == [orders.Cancel(store.number), orders.Remove("a", "")]
    assert hear(core, orders.Stored(store.number, 5, SHA256), now=3.0).results == []


def test_a_task_that_was_cancelled_while_it_ran_stores_nothing() -> None:
    core = connected()
    submit(core, OUT)
    stage_in(core)
    core.cancel(["a"])
    core.decide(now=0.5)
    turn = finish(core, "a")
    assert [task.result.state for task in turn.finished if task.result] == [TaskState.CANCELLED]
    assert moved(turn) == [orders.Remove("a", "")]


def test_a_second_result_of_a_task_whose_files_are_stored_is_not_heard() -> None:
    core = connected()
    run_and_write(core)
    turn = finish(core, "a", b"other")
    assert (turn.finished, moved(turn)) == ([], [])


def test_the_cloud_may_forget_a_task_while_its_files_are_stored() -> None:
    core = connected()
    task, turn = run_and_write(core)
    release, store = moved(turn)
    assert release == orders.Release("a", "")
    assert isinstance(store, orders.Store)
    core.recorded([wire.TaskRef(task_id="a", attempt=1)])
    turn = core.decide(now=2.0)
    assert turn.dropped == [task.seq]
    assert moved(turn) == [orders.Cancel(store.number), orders.Remove("a", "")]


def test_details_of_a_sealed_call_are_sealed_and_its_report_has_no_url() -> None:
    core = connected(seal=seal_result)
    opened = OpenedCall(bytes(32))
    payload = UserBytes([pack_files([IN, OUT], b"call")])
    core.add(ev.TasksReceived([spec("a")], payload, [FUNCTION], UserBytes([BODY]), [opened]))
    [task] = core.decide(now=0.0).accepted
    assert "s3://" not in repr(core.report())
    stage_in(core)
    turn = finish(core, "a")
    assert "s3://" not in repr(core.report())
    hear(core, *stored(turn), now=2.0)
    assert task.result is not None
    assert task.result.details is not None
    assert task.result.details.keys() == {"sealed"}
    assert task.kept is None
    assert task.result.body is not None
    assert is_sealed(task.result.body) or task.result.size_bytes > len(b"r")


# -- the spool ---------------------------------------------------------------------------------------------------------


def test_a_restarted_agent_stages_again_what_had_not_run(tmp_path: Path) -> None:
    core = connected()
    with contextlib.closing(Spool(tmp_path / "spool.sqlite3")) as spool:
        spool.commit(submit(core, IN, OUT).write)
    with contextlib.closing(Spool(tmp_path / "spool.sqlite3")) as spool:
        tasks, functions = spool.load()
    again = make_core()
    again.add(ev.Restored(tasks, sorted(functions), has_leftovers=True))
    turn = again.decide(now=9.0)
    tidy, make = moved(turn)
    assert tidy == orders.Tidy(()), "only what tasks have written is not made again"
    assert isinstance(make, orders.Make)
    again.manager_registered("m", slots=2)
    again.progress("m", Progress(workers=2))
    again.opened()
    again.decide(now=9.0)
    assert ids(stage_in(again, now=9.0).orders["m"]) == ["a"]


def test_a_task_of_an_endpoint_that_stages_no_files_any_more_fails() -> None:
    spool = Spool(None)
    spool.commit(submit(connected(), IN).write)
    again = make_core(staging=Staging(refusal="it is switched off"))
    again.add(ev.Restored(spool.load()[0], [HASH]))
    [task] = again.decide(now=9.0).finished
    assert task.result is not None
    assert task.result.error is not None
    assert task.result.error["code"] == "FILE_UNSUPPORTED"


def test_a_task_that_was_running_is_staged_again_before_its_next_attempt() -> None:
    spool = Spool(None)
    core = connected()
    spool.commit(submit(core, IN).write)
    spool.commit(stage_in(core).write)
    again = make_core()
    again.add(ev.Restored(spool.load()[0], [HASH]))
    turn = again.decide(now=9.0)
    assert [type(each) for each in moved(turn)] == [orders.Make]


def test_a_task_that_may_not_run_twice_is_staged_when_the_session_is_open() -> None:
    spool = Spool(None)
    spool.commit(submit(connected(), IN, idempotent=False).write)
    again = make_core()
    again.add(ev.Restored(spool.load()[0], [HASH]))
    assert moved(again.decide(now=9.0)) == []
    again.opened()
    assert [type(each) for each in moved(again.decide(now=9.0))] == [orders.Make]


@pytest.mark.parametrize("size_bytes", [5, 100_000])
def test_a_restarted_agent_finishes_what_was_on_its_way_out(tmp_path: Path, size_bytes: int) -> None:
    path, core, body = tmp_path / "spool.sqlite3", connected(max_inline_bytes=10**6), bytes(size_bytes)
    with contextlib.closing(Spool(path)) as spool:
        spool.commit(submit(core, IN, OUT).write)
        spool.commit(stage_in(core).write)
        spool.commit(finish(core, "a", body).write)
    with contextlib.closing(Spool(path)) as spool:
        [spooled], _ = spool.load()
        assert spooled.files is not None
        again = make_core(max_inline_bytes=10**6)
        again.add(ev.Restored([spooled], [HASH]))
        again.opened()
        turn = again.decide(now=9.0)
        assert turn.results == []
        turn = hear(again, *stored(turn), now=10.0)
        [task] = turn.results
        spool.commit(turn.write)
        assert bytes(bytes_of(spool.body(task))) == body
        assert task.result is not None
        assert task.result.details is not None
        assert [each["url"] for each in task.result.details["files"]] == [IN.url, OUT.url]
    with contextlib.closing(Spool(path)) as spool:
        [task] = load(spool)[0]
        assert (task.stage, task.kept) == (Stage.FINISHED, None)
        spool.commit(do.WriteSpool(forgotten=[task.seq]))
    with contextlib.closing(Spool(path)) as spool:
        assert spool.load()[0] == []


def test_a_task_that_failed_to_store_its_files_has_no_body_in_the_spool() -> None:
    spool = Spool(None)
    core = connected()
    spool.commit(submit(core, OUT).write)
    spool.commit(stage_in(core).write)
    turn = finish(core, "a", b"result")
    spool.commit(turn.write)
    core.written(now=1.0)
    [store] = moved(turn)
    assert isinstance(store, orders.Store)
    denied = outcomes.file_denied(OUT.url, "no").to_json()
    spool.commit(hear(core, orders.Failed(store.number, denied), now=2.0).write)
    [task] = load(spool)[0]
    assert task.result is not None
    assert (task.stage, task.result.state) == (Stage.FINISHED, TaskState.FAILED)


def test_a_forgotten_task_on_its_way_out_leaves_nothing_in_the_spool(tmp_path: Path) -> None:
    core = connected()
    with contextlib.closing(Spool(tmp_path / "spool.sqlite3")) as spool:
        spool.commit(submit(core, OUT).write)
        spool.commit(stage_in(core).write)
        spool.commit(finish(core, "a", bytes(100_000)).write)
        assert len(list((tmp_path / "spool.bodies").iterdir())) == 1
        core.recorded([wire.TaskRef(task_id="a", attempt=1)])
        spool.commit(core.decide(now=2.0).write)
        assert list((tmp_path / "spool.bodies").iterdir()) == []
        assert spool.load()[0] == []


def test_a_write_that_fails_keeps_the_result_until_the_spool_has_it() -> None:
    spool = Spool(None)
    core = connected()
    spool.commit(submit(core, OUT).write)
    spool.commit(stage_in(core).write)
    turn = finish(core, "a", b"result")
    assert ids(turn.write.storing) == ["a"]
    core.fail_write(now=1.0)
    core.add(ev.SpoolRetryOrdered())
    turn = core.decide(now=2.0)
    assert [type(each) for each in moved(turn)] == [orders.Store]
    spool.commit(turn.write)
    [task] = load(spool)[0]
    assert task.stage is Stage.STAGING_OUT


def test_the_log_of_events_has_no_url_and_no_packed_list() -> None:
    [task] = submit(connected(), IN).accepted
    spooled = SpooledTask(1, task.spec, 1, 0.0, files=task.files)
    failed = orders.Failed(1, outcomes.file_denied(IN.url, "secret").to_json())
    for event in (ev.Restored([spooled], []), ev.TransfersReported([failed])):
        logged, _ = ev.for_log(event)
        assert "s3://" not in repr(logged)
        assert task.files is not None
        assert repr(task.files.packed) not in repr(logged)
