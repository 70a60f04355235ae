"""Output of tasks at an agent: pieces of streams, the store, and the answers to requests."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from farcall_common.sealing import Answer, open_answer
from farcall_common.task_options import TaskOptions
from farcall_common.wire import OutputRequest, OutputText, OutputWanted, TaskOutput, TaskState
from farcall_endpoint.agent.core import actions as do
from farcall_endpoint.agent.core.tasks import Kept, Stage, Task, TaskResult
from farcall_endpoint.agent.shell.output import OutputAnswers, piece
from farcall_endpoint.agent.shell.output_store import RETENTION_S, KeptOutput, OutputStore
from farcall_endpoint.contracts.agent_manager import (
    Died,
    Finished,
    Limits,
    OutputRead,
    Progress,
    ReadOutput,
    RunningOutput,
    WantedOutput,
)
from farcall_endpoint.contracts.output import NOTHING, Printed, Stream
from farcall_endpoint.worker.capture import read_end, read_from
from tests.unit.test_endpoint_agent_core import connected, send, spec

KEY = bytes(32)
DAY = 1_800_000_000.0


# -- pieces ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "limit", "final", "expected"),
    [
        (b"abc", 10, False, OutputText(next=3, text="abc")),
        ("añ".encode(), 2, False, OutputText(next=1, text="a")),
        ("añ".encode()[:2], 10, False, OutputText(next=1, text="a")),  # the rest is not written yet
        ("añ".encode()[:2], 10, True, OutputText(next=2, text="a\ufffd")),
        (b"a\xffb", 10, False, OutputText(next=3, text="a\ufffdb")),
        ("ñ".encode(), 1, False, OutputText(next=1, text="\ufffd")),
        (b"\xc3", 10, False, OutputText()),
        (b"", 10, True, OutputText()),
    ],
)
def test_pieces_end_at_characters(data: bytes, limit: int, final: bool, expected: OutputText) -> None:
    assert piece(Stream(0, data), wanted_from=0, max_bytes=limit, is_final=final) == expected


def test_pieces_together_are_the_text() -> None:
    text = "naïve 語 🙂\n" * 50
    found, at = "", 0
    while at < len(text.encode()):
        part = piece(Stream(0, text.encode()), wanted_from=at, max_bytes=7, is_final=True)
        assert part.start == at
        found, at = found + part.text, part.next
    assert found == text


def test_a_file_that_is_longer_than_offsets_go_has_no_output() -> None:
    """A task may set the length of its capture file; on XFS and in memory it can be that long."""
    descriptor = os.memfd_create("capture")
    try:
        os.ftruncate(descriptor, 2**62)
        assert read_end(descriptor, 10) == NOTHING
        assert read_from(descriptor, -10, 10) == NOTHING
        os.ftruncate(descriptor, 2**53)
        assert read_end(descriptor, 10) == read_from(descriptor, -10, 10) == Stream(2**53 - 10, bytes(10))
    finally:
        os.close(descriptor)


def test_piece_after_lost_bytes_begins_at_a_character() -> None:
    tail = "語b".encode()[1:]
    found = piece(Stream(100, tail), wanted_from=5, max_bytes=10, is_final=True)
    assert found == OutputText(start=102, next=103, text="b")
    assert piece(Stream(100, b"ab"), wanted_from=200, max_bytes=10, is_final=True) == OutputText(start=200, next=200)


# -- the store ---------------------------------------------------------------------------------------------------------


def kept(task_id: str, tails: bytes = b"out", *, attempt: int = 1, key: bytes = b"") -> Kept:
    return Kept(task_id, attempt, Printed(len(tails), 0, len(tails), 0), tails, key)


def read(store: OutputStore, task_id: str, *, at: int = 0, most_bytes: int = 10**6) -> KeptOutput | None:
    return store.read(task_id, stdout_from=at, stderr_from=at, most_bytes=most_bytes)


def found(tails: bytes = b"out", *, attempt: int = 1, key: bytes = b"") -> KeptOutput:
    return KeptOutput(attempt, Stream(0, tails), Stream(0, b""), len(tails), 0, key)


def test_store_lasts_and_has_the_last_attempt(tmp_path: Path) -> None:
    store = OutputStore(tmp_path / "output", budget_bytes=10_000)
    store.keep([kept("a", b"first"), kept("b"), kept("a", b"again", attempt=2, key=KEY)], now=DAY)
    store.keep([kept("b", b"more", attempt=3)], now=DAY)
    shutil.copy(tmp_path / "output", tmp_path / "killed")  # what kill -9 leaves behind
    again = OutputStore(tmp_path / "killed", budget_bytes=10_000)
    assert read(again, "a") == found(b"again", attempt=2, key=KEY)
    assert read(again, "b") == found(b"more", attempt=3)
    assert read(again, "c") is None
    assert (tmp_path / "output").stat().st_mode & 0o077 == 0


def test_store_reads_parts_of_streams(tmp_path: Path) -> None:
    store = OutputStore(tmp_path / "output", budget_bytes=10_000)
    store.keep([Kept("a", 1, Printed(5, 3, 105, 3), b"12345abc")], now=DAY)
    assert read(store, "a") == KeptOutput(1, Stream(100, b"12345"), Stream(0, b"abc"), 105, 3, b"")
    assert read(store, "a", at=2, most_bytes=2) == KeptOutput(1, Stream(100, b"12"), Stream(2, b"c"), 105, 3, b"")
    assert read(store, "a", at=102) == KeptOutput(1, Stream(102, b"345"), Stream(3, b""), 105, 3, b"")
    assert read(store, "a", at=2**53) == KeptOutput(1, Stream(105, b""), Stream(3, b""), 105, 3, b"")


def test_negative_offsets_are_before_the_end(tmp_path: Path) -> None:
    store = OutputStore(tmp_path / "output", budget_bytes=10_000)
    store.keep([Kept("a", 1, Printed(5, 3, 105, 3), b"12345abc")], now=DAY)
    assert read(store, "a", at=-2) == KeptOutput(1, Stream(103, b"45"), Stream(1, b"bc"), 105, 3, b"")
    assert read(store, "a", at=-(2**53)) == KeptOutput(1, Stream(100, b"12345"), Stream(0, b"abc"), 105, 3, b"")
    file = tmp_path / "captured"
    file.write_bytes("0äöü".encode())
    with file.open("rb") as opened:
        end = read_from(opened.fileno(), -5, 100)
        assert end == Stream(2, "0äöü".encode()[2:])
        assert read_from(opened.fileno(), -100, 100).start == 0
    assert piece(end, wanted_from=-5, max_bytes=100, is_final=True) == OutputText(start=3, next=7, text="öü")
    assert piece(Stream(0, b""), wanted_from=-5, max_bytes=100, is_final=True) == OutputText()


def test_store_drops_the_oldest_beyond_its_budget(tmp_path: Path) -> None:
    path = tmp_path / "output"
    store = OutputStore(path, budget_bytes=100_000)
    for start in range(0, 10_000, 500):
        store.keep([kept(f"task-{number}", b"x" * 500) for number in range(start, start + 500)], now=DAY)
    there = [number for number in range(10_000) if read(store, f"task-{number}")]
    assert there == list(range(10_000 - len(there), 10_000))
    assert 100 < len(there) <= 100_000 // 500
    store.keep([kept("too large", b"x" * 200_000)], now=DAY)
    assert read(store, "too large") is None
    assert read(store, "task-9999")
    store.close()
    assert path.stat().st_size < 1_000_000
    smaller = OutputStore(path, budget_bytes=5_000)
    assert 0 < sum(read(smaller, f"task-{number}") is not None for number in range(9_000, 10_000)) <= 10
    smaller.close()
    assert read(OutputStore(path, budget_bytes=0), "task-9999") is None
    assert not path.exists()


def test_store_forgets_after_a_day(tmp_path: Path) -> None:
    store = OutputStore(tmp_path / "output", budget_bytes=10_000)
    store.keep([kept("old")], now=DAY)
    store.keep([kept("new")], now=DAY + 10.0)
    store.expire(now=DAY + RETENTION_S + 5.0)
    assert (read(store, "old"), read(store, "new")) == (None, found())


def test_store_that_cannot_be_written_harms_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "output").mkdir()
    store = OutputStore(tmp_path / "output", budget_bytes=10_000)
    for _ in range(3):
        store.keep([kept("a")], now=DAY)
    assert read(store, "a") is None
    store.expire(now=DAY)
    assert caplog.text.count("output of tasks is not kept") == 1
    (tmp_path / "output").rmdir()
    store.keep([kept("a")], now=DAY)
    assert read(store, "a") == found()


def test_damaged_store_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "output").write_bytes(b"no database" * 1000)
    store = OutputStore(tmp_path / "output", budget_bytes=10_000)
    store.keep([kept("a")], now=DAY)
    assert read(store, "a") == found()
    assert "cannot be read, and is dropped" in caplog.text


# -- answers -----------------------------------------------------------------------------------------------------------


class Bench:
    """The answers of an agent, with tasks that a test sets."""

    def __init__(self, path: Path) -> None:
        self.tasks: dict[str, Task] = {}
        self.asked: list[tuple[str, ReadOutput]] = []
        self.sent: list[TaskOutput] = []
        self.store = OutputStore(path / "output", budget_bytes=10**6)
        self.answers = OutputAnswers(self.store, find=self.tasks.get, ask=self._ask, send=self.sent.append)

    def _ask(self, manager_id: str, request: ReadOutput) -> None:
        self.asked.append((manager_id, request))

    def task(self, task_id: str, stage: Stage, *, starts: int = 1, key: bytes = b"") -> Task:
        task = Task(1, spec(task_id), 1, stage, 0.0, starts=starts, answer_key=key)
        if stage is Stage.DISPATCHED:
            task.manager_id = "m"
        if stage is Stage.FINISHED:
            task.result = TaskResult(TaskState.SUCCESS)
        self.tasks[task_id] = task
        return task

    def request(self, *task_ids: str, at: int = 0, max_bytes: int = 100) -> None:
        wanted = tuple(OutputWanted(task_id=each, stdout_from=at, stderr_from=at) for each in task_ids)
        self.answers.requested(OutputRequest(request_id="r", tasks=wanted, max_bytes=max_bytes))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_tasks_that_do_not_run_are_answered_from_the_store(bench: Bench) -> None:
    bench.task("queued", Stage.QUEUED)
    bench.task("again", Stage.QUEUED)
    bench.task("finished", Stage.FINISHED)
    bench.task("silent", Stage.FINISHED)
    for task_id in ("again", "finished", "recorded"):
        bench.store.keep([Kept(task_id, 2, Printed(3, 2, 13, 2), b"outer")], now=DAY)
    bench.request("queued", "again", "finished", "silent", "recorded", "unknown")
    [answer] = bench.sent
    answers = {each.task_id: (each.reason, each.complete, each.stdout.text) for each in answer.pieces}
    assert answers == {
        "queued": ("NOT_STARTED", False, ""),
        "again": ("", False, "out"),
        "finished": ("", True, "out"),
        "silent": ("NOT_KEPT", True, ""),
        "recorded": ("", True, "out"),
        "unknown": ("NOT_KEPT", True, ""),
    }
    recorded = answer.pieces[4]
    assert (recorded.attempt, recorded.stdout.start, recorded.stderr) == (2, 10, OutputText(next=2, text="er"))
    bench.request("recorded", max_bytes=1)
    assert not bench.sent[-1].pieces[0].complete
    assert not bench.asked


def test_running_tasks_are_answered_by_their_managers(bench: Bench) -> None:
    bench.task("a", Stage.DISPATCHED, starts=2)
    bench.task("b", Stage.DISPATCHED)
    bench.request("a", "b", at=5)
    wanted = WantedOutput("a", 2, 5, 5), WantedOutput("b", 1, 5, 5)
    assert bench.asked == [("m", ReadOutput("r", wanted, 100))]
    assert not bench.sent
    # b has ended meanwhile, and its result is here already.
    bench.task("b", Stage.FINISHED)
    bench.store.keep([kept("b", b"12345the end")], now=DAY)
    read = RunningOutput(wanted[0], is_running=True, stdout=b"now", stdout_at=5), RunningOutput(wanted[1])
    bench.answers.read([OutputRead("r", 100, read)])
    [answer] = bench.sent
    a, b = answer.pieces
    assert (a.attempt, a.stdout, a.stderr, a.complete) == (
        2,
        OutputText(start=5, next=8, text="now"),
        OutputText(start=5, next=5),
        False,
    )
    assert (b.stdout, b.complete) == (OutputText(start=5, next=12, text="the end"), True)
    bench.answers.read([OutputRead("r", 100, (RunningOutput(wanted[0], is_running=True, is_kept=False),))])
    assert bench.sent[-1].pieces[0].reason == "NOT_KEPT"


def test_output_of_sealed_calls_leaves_the_endpoint_sealed(bench: Bench) -> None:
    bench.task("a", Stage.DISPATCHED, key=KEY)
    bench.store.keep([kept("b", b"secret too", key=KEY)], now=DAY)
    bench.request("b")
    running = RunningOutput(WantedOutput("a", 1, 0, 0), is_running=True, stdout=b"a secret", stderr=b"!")
    bench.answers.read([OutputRead("r", 100, (running,))])
    pieces = [each for answer in bench.sent for each in answer.pieces]
    assert "secret" not in str(pieces)
    assert pieces[1].stdout == OutputText(next=8)
    opened = [
        json.loads(bytes(open_answer(each.sealed.encode(), KEY, part=Answer.OUTPUT, task_id=each.task_id)))
        for each in pieces
    ]
    assert opened == [
        {
            "attempt": 1,
            "complete": True,
            "stdout": {"from": 0, "next": 10, "text": "secret too"},
            "stderr": {"from": 0, "next": 0, "text": ""},
        },
        {
            "attempt": 1,
            "complete": False,
            "stdout": {"from": 0, "next": 8, "text": "a secret"},
            "stderr": {"from": 0, "next": 1, "text": "!"},
        },
    ]


# -- the agent's core --------------------------------------------------------------------------------------------------


def test_output_is_kept_before_the_result_is_reported() -> None:
    core = connected()
    send(core, spec("a"), spec("b"))
    finished = (
        Finished("a", TaskState.SUCCESS, 0, None, 0.0, 0.5, None, Printed(3, 0, 3, 0), 1),
        Finished("b", TaskState.SUCCESS, 2, None, 0.0, 0.5),
    )
    core.progress("m", Progress(workers=2, finished=finished), [b"result", b"out", b"result"])
    turn = core.decide(now=1.0)
    [keep] = [each for each in turn.actions if isinstance(each, do.KeepOutput)]
    assert list(keep.outputs) == [Kept("a", 1, Printed(3, 0, 3, 0), b"out")]
    kinds = [type(each) for each in turn.actions]
    assert kinds.index(do.WriteSpool) < kinds.index(do.KeepOutput) < kinds.index(do.ReportResults)
    assert len(turn.results) == 2


def test_output_of_an_attempt_that_died_is_kept_with_its_number() -> None:
    core = connected()
    send(core, spec("a"))
    core.progress("m", Progress(workers=2, died=(Died("a", "killed", "", "", Printed(3, 0, 3, 0), b"out"),)))
    turn = core.decide(now=1.0)
    [keep] = [each for each in turn.actions if isinstance(each, do.KeepOutput)]
    assert [(each.task_id, each.attempt, each.tails) for each in keep.outputs] == [("a", 1, b"out")]
    assert [task.starts for task in turn.orders["m"]] == [2]


def test_tasks_that_print_nothing_cause_no_action() -> None:
    core = connected()
    send(core, spec("a"))
    core.progress("m", Progress(workers=2, finished=(Finished("a", TaskState.SUCCESS, 0, None, 0.0, 0.5),)), [b"r"])
    assert not any(isinstance(each, do.KeepOutput) for each in core.decide(now=1.0).actions)


def test_an_endpoint_may_keep_less_than_a_task_requests() -> None:
    options = TaskOptions(output_bytes=5000)
    kept_bytes = [Limits(kept_bytes=limit).applied_to(options).output_bytes for limit in (None, 0, 100, 10_000)]
    assert kept_bytes == [5000, 0, 100, 5000]
