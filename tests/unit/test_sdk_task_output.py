"""Output of tasks on the client's side: read while they run, reported in lines, and shown by commands."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest

from farcall import Client, Executor, OutputPart, TaskUnknown
from farcall._client import connection_of
from farcall._task_output import OutputCursor, OutputReader, OutputWatch
from farcall.testing import FakeCloud
from farcall_common.wire import new_task_id
from tests.unit.sdk_cli_runner import Farcall
from tests.waiting import WAIT_S, wait_until


@pytest.fixture
def off() -> Iterator[FakeCloud]:
    with FakeCloud(workers=0) as cloud:
        yield cloud


def submitted(cloud: FakeCloud, client: Client) -> str:
    return client.run(-7, endpoint_id=cloud.endpoint_id, function_id=client.register_function(abs))


# -- the position in a task's output -----------------------------------------------------------------------------------


def answer(**changes: Any) -> dict[str, Any]:
    empty = {"from": 0, "next": 0, "text": ""}
    known = {"status": "running", "attempt": 1, "source": "endpoint", "complete": False, "reason": None}
    return {**known, "stdout": empty, "stderr": empty} | changes


def piece(first: int, text: str) -> dict[str, Any]:
    return {"from": first, "next": first + len(text), "text": text}


def test_reading_continues_where_the_last_piece_ended() -> None:
    cursor = OutputCursor("t", first=0)
    assert list(cursor.take(answer(stdout=piece(0, "abc")))) == [OutputPart("t", "stdout", "abc")]
    assert cursor.to_json() == {"task_id": "t", "stdout_from": 3, "stderr_from": 0}
    assert list(cursor.take(answer())) == []
    assert cursor.to_json()["stdout_from"] == 3


def test_bytes_that_are_not_kept_any_more_are_counted() -> None:
    cursor = OutputCursor("t", first=0)
    [part] = cursor.take(answer(stderr=piece(100, "x\n")))
    assert (part.skipped_bytes, str(part)) == (100, "[100 bytes are not kept]\nx")
    [first_of_a_tail] = OutputCursor("t").take(answer(stderr=piece(100, "x\n")))
    assert first_of_a_tail.skipped_bytes == 0


def test_output_of_another_attempt_is_read_from_its_start() -> None:
    cursor = OutputCursor("t", first=0)
    list(cursor.take(answer(stdout=piece(0, "abc"))))
    assert list(cursor.take(answer(attempt=2, complete=True, stdout=piece(3, "def")))) == []
    assert (cursor.to_json()["stdout_from"], cursor.complete) == (0, False)
    [part] = cursor.take(answer(attempt=2, stdout=piece(0, "abcdef")))
    assert (part.text, str(part)) == ("abcdef", "[the task was started again]\nabcdef")
    [part] = cursor.take(answer(attempt=2, stdout=piece(6, "g")))
    assert str(part) == "g"


class ScriptedApi:
    """Gives these answers in turn, the last one for ever."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self._answers = list(answers)
        self.requests: list[list[str]] = []

    def batch_output(self, tasks: list[dict[str, Any]], *, stop: object) -> dict[str, Any]:
        self.requests.append([each["task_id"] for each in tasks])
        found = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return {each["task_id"]: found[each["task_id"]] for each in tasks}

    def opened_output(self, _: str, found: dict[str, Any]) -> dict[str, Any]:
        return found


def test_output_that_comes_again_is_left_out_and_codes_are_plain() -> None:
    cursor = OutputCursor("t", first=0)
    assert [part.text for part in cursor.take(answer(stdout=piece(0, "abc")))] == ["abc"]
    assert list(cursor.take(answer(stdout=piece(0, "abc"), reason="a\x1b[31m"))) == []
    assert "\x1b" not in str(cursor.reason)
    assert [part.text for part in cursor.take(answer(stdout=piece(3, "d")))] == ["d"]


@pytest.mark.parametrize("first", [-16, 0])
def test_an_end_behind_what_was_asked_is_no_end(first: int) -> None:
    cursor = OutputCursor("t", first=first)
    assert list(cursor.take(answer(complete=True, stdout={"from": 9, "next": 9, "text": ""}))) == []
    assert not cursor.complete
    assert [part.text for part in cursor.take(answer(complete=True, stdout=piece(0, "abc")))] == ["abc"]
    assert cursor.complete


@pytest.mark.parametrize("silent", [1, 4, 5])
def test_an_endpoint_that_does_not_answer_is_asked_again(silent: int) -> None:
    busy = answer(status="success", source="none", reason="NO_ANSWER")
    heard = answer(status="success", complete=True, stdout=piece(0, "abc"))
    api = ScriptedApi(*[{"a": heard, "b": busy}] * silent, {"a": heard, "b": heard})
    found = OutputReader(cast("Any", api), cast("Any", api)).last(["a", "b"])
    assert found["a"].stdout == "abc"
    assert (found["b"].stdout, found["b"].reason) == (("abc", None) if silent < 5 else ("", "NO_ANSWER"))
    assert api.requests == [["a", "b"], *[["b"]] * min(silent, 4)]


def test_an_answer_without_the_endpoint_is_no_other_attempt() -> None:
    cursor = OutputCursor("t", first=0)
    list(cursor.take(answer(attempt=3, stdout=piece(0, "abc"))))
    assert list(cursor.take(answer(attempt=1, source="none", reason="NO_ANSWER"))) == []
    [part] = cursor.take(answer(attempt=3, stdout=piece(3, "def")))
    assert str(part) == "def"


def test_a_burst_of_calls_makes_no_burst_of_requests(off: FakeCloud) -> None:
    with off.client() as client:
        watch = OutputWatch(connection_of(client).output)
        watch.add(new_task_id(), print)
        assert watch._wake.is_set()
        watch._wake.clear()
        watch.add(new_task_id(), print)
        assert not watch._wake.is_set()


def test_text_of_a_part_has_no_control_characters() -> None:
    assert "\x1b" not in str(OutputPart("t", "stdout", "\x1b[31mred\n"))


# -- reports of a watch ------------------------------------------------------------------------------------------------


class Watched:
    def __init__(self, cloud: FakeCloud, client: Client) -> None:
        self.cloud, self.mono, self.parts = cloud, 0.0, list[OutputPart]()
        self.watch = OutputWatch(connection_of(client).output, clock=lambda: self.mono)
        self.task_id = submitted(cloud, client)
        self.watch.add(self.task_id, self.parts.append)

    def reported(self, **written: str) -> list[str]:
        self.cloud.write_output(self.task_id, **written)
        self.watch.check()
        texts = [part.text for part in self.parts]
        self.parts.clear()
        return texts


@pytest.fixture
def watched(off: FakeCloud) -> Iterator[Watched]:
    with off.client() as client:
        yield Watched(off, client)


def test_lines_are_reported_whole_if_their_end_comes_soon(watched: Watched) -> None:
    assert watched.reported(stdout="one\ntw") == ["one\n"]
    assert watched.reported(stdout="o\n") == ["two\n"]
    assert watched.reported(stdout="50%") == []
    assert watched.reported() == ["50%"]
    assert watched.reported(stdout=" 60%") == []
    assert watched.reported(stdout=" 70%") == [" 60% 70%"]
    assert watched.reported(stderr="progress\r") == ["progress\r"]


def test_the_rest_of_a_line_is_reported_when_the_task_ends(watched: Watched) -> None:
    watched.cloud.run_waiting()
    watched.watch.ended(watched.task_id)
    assert watched.reported(stdout="no newline") == ["no newline"]
    assert watched.reported(stdout="nothing is read of a complete task") == []


def test_a_callback_that_raises_is_logged_and_called_again(off: FakeCloud, caplog: pytest.LogCaptureFixture) -> None:
    def fail(part: OutputPart) -> None:
        calls.append(part.text)
        raise ValueError("no room")

    calls = list[str]()
    with off.client() as client:
        watched = Watched(off, client)
        watched.watch.add(watched.task_id, fail)
        watched.reported(stdout="one\n")
        watched.reported(stdout="two\n")
    assert calls == ["one\n", "two\n"]
    assert "no room" in caplog.text


def test_tasks_that_ended_and_the_twenty_oldest_others_are_asked_about(off: FakeCloud) -> None:
    asked: list[list[str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/batch_output"):
            asked.append([each["task_id"] for each in msgspec.json.decode(request.content)["tasks"]])
        return off.transport.handle_request(request)

    with Client("https://farcall.test", off.token, transport=httpx.MockTransport(answer)) as client:
        watch = OutputWatch(connection_of(client).output)
        ids = [new_task_id() for _ in range(250)]
        for task_id in ids:
            watch.add(task_id, print)
        watch.check()
        assert asked == [ids[:20]]
        asked.clear()
        for task_id in ids[100:]:
            watch.ended(task_id)
        watch.check()
        assert asked == [ids[100:200], [*ids[200:], *ids[:20]]]


def test_a_task_without_its_last_output_is_given_up_after_a_while(off: FakeCloud) -> None:
    with off.client() as client:
        watched = Watched(off, client)
        watched.watch.ended(watched.task_id)  # and the endpoint never says that it is complete
        watched.watch.stop()
        watched.mono = 20.0
        watched.watch.run()
        assert watched.reported(stdout="too late") == []


# -- futures and executors ---------------------------------------------------------------------------------------------


def test_on_output_gets_what_a_task_prints_until_the_executor_is_left(off: FakeCloud) -> None:
    parts, seen = list[OutputPart](), threading.Event()

    def take(part: OutputPart) -> None:
        parts.append(part)
        seen.set()

    with off.client() as client, Executor(off.endpoint_id, client) as executor:
        future = executor.options(on_output=take).submit(abs, -7)
        quiet = executor.submit(abs, -8)
        wait_until(lambda: future._record.accepted_at is not None and quiet._record.accepted_at is not None)
        off.write_output(future.task_id, stdout="half\n")
        off.write_output(quiet.task_id, stdout="not watched\n")
        assert seen.wait(WAIT_S)
        assert not future.done()
        off.write_output(future.task_id, stderr="the end")
        off.run_waiting()
    assert [(part.stream, part.text) for part in parts] == [("stdout", "half\n"), ("stderr", "the end")]
    assert {part.task_id for part in parts} == {future.task_id}


def test_stdout_of_a_future_is_known_while_the_task_runs_and_afterwards(off: FakeCloud) -> None:
    with off.client() as client, Executor(off.endpoint_id, client) as executor:
        future = executor.submit(abs, -7)
        wait_until(lambda: future._record.accepted_at is not None)
        assert (future.stdout, future.stderr) == (None, None)
        off.write_output(future.task_id, stdout="x" * 20_000)
        assert future.stdout == "x" * 16 * 1024
        off.run_waiting()
        assert future.result(WAIT_S) == 7
        assert future.stdout == "x" * 16 * 1024
        off.write_output(future.task_id, stdout="complete output is not asked for again")
        assert future.stdout == "x" * 16 * 1024


def test_output_of_many_tasks_by_their_ids(cloud: FakeCloud) -> None:
    with cloud.client() as client:
        task_id, unknown = submitted(cloud, client), new_task_id()
        cloud.write_output(task_id, stdout="out", stderr="err")
        assert client.get_result(task_id, wait_s=WAIT_S) == 7
        [(found_id, found)] = client.get_output([task_id, unknown]).items()
        assert (found_id, found.stdout, found.stderr, found.complete) == (task_id, "out", "err", True)
        assert [part.text for part in client.iter_output(task_id)] == ["out", "err"]
        with pytest.raises(TaskUnknown):
            list(client.iter_output(unknown))


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path / "home"))


def test_logs_follows_a_task_until_it_has_ended(cloud: FakeCloud) -> None:
    with cloud.client() as client:
        task_id = submitted(cloud, client)
        assert client.get_result(task_id, wait_s=WAIT_S) == 7
    cloud.write_output(task_id, stdout="one\ntwo", stderr="warning\n")
    for arguments in (["logs", task_id], ["logs", "--follow", task_id]):
        shown = Farcall(cloud)("tasks", *arguments)
        assert (shown.exit_code, shown.stdout, shown.stderr) == (0, "one\ntwo", "warning\n")
    lines = Farcall(cloud)("tasks", "logs", "-f", "--json", task_id).stdout.splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["one\ntwo", "warning\n"]
    assert json.loads(Farcall(cloud)("tasks", "logs", "--json", task_id).stdout)["stdout_tail"] == "one\ntwo"


def test_logs_says_why_there_is_no_output(off: FakeCloud) -> None:
    with off.client() as client:
        task_id = submitted(off, client)
    shown = Farcall(off)("tasks", "logs", task_id)
    assert shown.exit_code == 0
    assert f"No output of this task; it is received. `farcall tasks why {task_id}` says what it waits for." in (
        shown.stderr
    )
    assert Farcall(off)("tasks", "logs", new_task_id()).exit_code == 66


def test_run_shows_what_a_function_prints_on_standard_error(cloud: FakeCloud, tmp_path: Path) -> None:
    script = tmp_path / "calls.py"
    script.write_text("def half(n):\n    return n / 2\n")
    cloud.on_start = lambda task_id: cloud.write_output(task_id, stdout="halving\n")
    shown = Farcall(cloud)("run", f"{script}:half", "3", "--output")
    assert (shown.exit_code, shown.stdout, shown.stderr) == (0, "1.5\n", "halving\n")
    shown = Farcall(cloud)("run", f"{script}:half", "3", "--output", "--json")
    assert json.loads(shown.stderr)["output"]["text"] == "halving\n"
    shown = Farcall(cloud)("map", f"{script}:half", "3", "4", "--output")
    assert (shown.exit_code, shown.stdout) == (0, "1.5\n2.0\n")
    assert sorted(shown.stderr.splitlines()) == ["[0] halving", "[1] halving"]
