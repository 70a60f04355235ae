"""Progress of tasks in the SDK and its command line, against a cloud in memory."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import farcall
from farcall import ConfigurationError, Executor, Graph, Progress, current
from farcall.cli import _tasks
from farcall.testing import FakeCloud
from tests.unit.sdk_cli_runner import Farcall
from tests.waiting import WAIT_S, wait_until


@pytest.fixture
def cloud() -> Iterator[FakeCloud]:
    with FakeCloud() as started:
        yield started


@pytest.fixture
def executor(cloud: FakeCloud) -> Iterator[Executor]:
    with cloud.client() as client, Executor(cloud.endpoint_id, client=client) as made:
        yield made


def fit(steps: int, text: str = "fitting") -> int:
    from farcall import current

    for step in range(steps + 1):
        current().progress(step, steps, text)
    return steps


def refuse() -> None:
    from farcall import current

    current().progress(2, 3)
    raise ValueError("no")


def idle() -> None:
    pass


def test_a_future_has_the_progress_of_a_task_that_runs_and_has_ended(cloud: FakeCloud, executor: Executor) -> None:
    started, go_on = threading.Event(), threading.Event()

    def wait(_: str) -> None:
        started.set()
        go_on.wait(WAIT_S)

    cloud.on_start = wait
    future = executor.submit(fit, 10)
    assert started.wait(WAIT_S)
    wait_until(lambda: "client_accepted_at" in future.timings)
    before = future.progress
    assert before is None
    cloud.report_progress(future.task_id, 3, 10, "loading\n")
    seen = future.progress
    assert seen is not None
    assert (seen.done, seen.total, seen.text) == (3, 10, "loading")
    assert "3 of 10 (30 %): loading" in future._repr_html_()
    go_on.set()
    assert future.result(WAIT_S) == 10
    last = future.progress
    assert last is not None
    assert str(last) == "10 of 10 (100 %): fitting"
    assert last.at >= seen.at
    assert "10 of 10 (100 %): fitting" in future._repr_html_()


def test_a_task_that_starts_again_begins_without_progress(cloud: FakeCloud, executor: Executor, tmp_path: Path) -> None:
    started, go_on, file = threading.Semaphore(0), threading.Semaphore(0), str(tmp_path / "ran")

    def wait(_: str) -> None:
        started.release()
        go_on.acquire(timeout=WAIT_S)

    def fail_once() -> None:
        if not Path(file).exists():
            Path(file).touch()
            raise ValueError("again")

    cloud.on_start = wait
    executor.retries, executor.retry_delay_s = 1, 0.0
    future = executor.submit(fail_once)
    assert started.acquire(timeout=WAIT_S)
    wait_until(lambda: "client_accepted_at" in future.timings)
    cloud.report_progress(future.task_id, 1, 2)
    before = future.progress
    assert before is not None
    go_on.release()
    assert started.acquire(timeout=WAIT_S)
    after = future.progress
    assert after is None
    assert "1 of 2" not in future._repr_html_()
    go_on.release()
    assert future.result(WAIT_S) is None
    assert future.progress is None


def test_a_task_that_failed_keeps_its_progress_and_one_that_says_nothing_has_none(executor: Executor) -> None:
    failed, silent = executor.submit(refuse), executor.submit(idle)
    assert isinstance(failed.exception(WAIT_S), ValueError)
    assert failed.progress is not None
    assert (failed.progress.done, failed.progress.total, failed.progress.text) == (2, 3, "")
    assert silent.result(WAIT_S) is None
    assert silent.progress is None
    assert "progress" not in silent._repr_html_()


def test_task_info_has_the_progress(cloud: FakeCloud, executor: Executor) -> None:
    future = executor.submit(fit, 4)
    future.result(WAIT_S)
    with cloud.client() as client:
        info = client.get_batch_result([future.task_id])[future.task_id]
    assert info.progress == future.progress
    assert "4 of 4 (100 %): fitting" in info._repr_html_()


def test_current_is_the_task_in_a_cloud_in_memory(executor: Executor) -> None:
    def ask() -> tuple[str, int, str]:
        task = current()
        with pytest.raises(ConfigurationError, match="makes no calls") as raised:
            task.submit(abs, -1)
        return task.task_id, task.attempt, str(raised.value.record.code)

    future = executor.submit(ask)
    assert future.result(WAIT_S)[:2] == (future.task_id, 1)
    with pytest.raises(ConfigurationError, match="no task runs here"):
        current()


def test_of_stages_nothing_is_shown(executor: Executor) -> None:
    graph = Graph()
    future = executor.submit(graph, graph.call(fit, 3))
    assert future.result(WAIT_S) == 3
    assert future.progress is None


def test_progress_is_a_frozen_value() -> None:
    progress = Progress(1, 2, "t", 3.0)
    assert progress == Progress(1, 2, "t", 3.0)
    assert hash(progress) == hash(Progress(1, 2, "t", 3.0))
    with pytest.raises(AttributeError):
        progress.done = 2  # type: ignore[misc]
    assert farcall.Progress is Progress


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def offline() -> Iterator[FakeCloud]:
    with FakeCloud(workers=0) as made:
        yield made


def submitted(cloud: FakeCloud, *functions: Any) -> list[str]:
    with cloud.client() as client:
        batch = client.create_batch()
        for function in functions:
            batch.add(client.register_function(function))
        found: list[str] = [id_ for ids in client.batch_run(cloud.endpoint_id, batch)["tasks"].values() for id_ in ids]
        return found


def test_tasks_show_has_the_progress(offline: FakeCloud) -> None:
    [task_id] = submitted(offline, idle)
    offline.report_progress(task_id, 3, 10, "loading")
    command = Farcall(offline)
    assert ["progress", "3 of 10 (30 %): loading"] in command.lines("tasks", "show", task_id)
    shown = json.loads(command("tasks", "show", task_id, "--json").stdout)
    assert (shown["progress"]["done"], shown["progress"]["text"]) == (3, "loading")


class Watching(Farcall):
    """``farcall tasks watch`` whose pauses let something happen."""

    def __init__(self, cloud: FakeCloud, *steps: Any) -> None:
        super().__init__(cloud)
        self.steps = iter(steps)
        self.pause = lambda _: next(self.steps)()


def test_watch_shows_a_line_for_each_change_until_all_have_ended(offline: FakeCloud) -> None:
    fitting, idling = submitted(offline, refuse, idle)
    watch = Watching(
        offline,
        lambda: offline.report_progress(fitting, 1, 3, "loading"),
        lambda: None,
        lambda: offline.report_progress(fitting, 2, 3),
        offline.run_waiting,
    )
    result = watch("tasks", "watch", fitting, idling, fitting)
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert lines == [
        [fitting, "received", ""],
        [idling, "received", ""],
        [fitting, "received", "1 of 3 (33 %): loading"],
        [fitting, "received", "2 of 3 (66 %)"],
        [fitting, "failed", "2 of 3 (66 %)"],
        [idling, "success", ""],
    ]
    assert result.exit_code == 1


def test_watch_in_json_has_a_line_for_each_change(offline: FakeCloud) -> None:
    [task_id] = submitted(offline, idle)
    watch = Watching(offline, lambda: offline.report_progress(task_id, 1), offline.run_waiting)
    result = watch("tasks", "watch", task_id, "--json")
    assert result.exit_code == 0
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["status"] for line in lines] == ["received", "received", "success"]
    assert "progress" not in lines[0]
    assert lines[2]["progress"]["done"] == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    made = Terminal()
    monkeypatch.setattr("sys.stdout", made)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "24")
    return made


def test_watch_rewrites_lines_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    shown = _tasks._Watched({"t1": "t1", "t2": "t2"}, as_json=False)
    shown.show({"t1": {"status": "running", "progress": {"done": 1, "text": "x" * 100, "at": 1.0}}})
    shown.show({"t1": {"status": "success"}, "t2": {"status": "running"}})
    text = terminal.getvalue()
    assert text.count("\x1b[1A") == 1
    lines = text.split("\n")
    assert lines[0] == "\r\x1b[Kt1  running   1: " + "x" * 21 + "…"
    assert lines[1].endswith("t1  success")


def test_a_line_of_watch_never_exceeds_a_line_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    shown = _tasks._Watched({"t1": "t1"}, as_json=False)
    task = {"status": "running", "progress": {"done": 1, "text": "計算" * 50, "at": 1.0}}
    shown.show({"t1": task})
    monkeypatch.setenv("COLUMNS", "21")  # the window is narrower now
    shown.show({"t1": task})
    first, second = [line.rpartition("\x1b[K")[2] for line in terminal.getvalue().split("\n")[:-1]]
    assert first == "t1  running   1: " + "計算" * 5 + "…"
    assert second == "t1  running   1: 計…"


def test_watch_writes_a_line_for_each_change_where_lines_cannot_be_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    shown = _tasks._Watched({"t1": "t1"}, as_json=False)
    for status in ("running", "running", "success"):
        shown.show({"t1": {"status": status}})
    assert terminal.getvalue() == "t1\trunning\t\nt1\tsuccess\t\n"


def test_watch_of_a_task_that_does_not_exist_is_refused(offline: FakeCloud) -> None:
    result = Farcall(offline)("tasks", "watch", "00000000-0000-7000-8000-000000000001")
    assert result.exit_code != 0
    assert "TASK_UNKNOWN" in result.stderr
