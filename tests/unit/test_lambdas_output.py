"""Reading output of tasks: from the forwarder that answers for the endpoint, or from the record; the caller's only."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from farcall_common.errors import ErrorRecord, Fault
from farcall_common.store.model import OutputAnswer, OutputAsk
from farcall_common.wire.messages import OutputPiece, OutputText
from farcall_common.wire.states import TaskState
from farcall_lambdas.settings import ApiSettings
from tests.support.memory_api import ALICE, BOB
from tests.unit.test_lambdas_why import WhyLab
from tests.waiting import WAIT_S

Answers = Callable[[OutputAsk], Sequence[OutputAnswer]]
FAILED = ErrorRecord(code="TASK_FAILED", message="no", fault=Fault.USER_CODE, stdout_tail="the ñnd", stderr_tail="")


class OutputLab(WhyLab):
    """A lab with running tasks at an online endpoint, and a forwarder that a test scripts."""

    def __init__(self, settings: ApiSettings | None = None) -> None:
        super().__init__(settings)
        self.asks: list[OutputAsk] = []
        self.seen()

    def running(self, count: int = 1) -> list[str]:
        ids = self.tasks(count)
        self.lease(count)
        for task_id in ids:
            self.move(task_id, TaskState.RUNNING)
        return ids

    def read(self, *task_ids: str, caller: Any = ALICE, **offsets: int) -> Any:
        body = {"tasks": [{"task_id": task_id, **offsets} for task_id in task_ids]}
        answer = self.api.call("POST", "/v3/batch_output", body, caller=caller)
        assert answer.status == 200, answer.body
        return answer.body

    @contextmanager
    def forwarder(self, answers: Answers) -> Iterator[None]:
        """Answer requests in another thread."""
        wake_ups = self.queue.listen("f")
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                wake_ups.get(0.01)
                for ask in wake_ups.take_asks():
                    self.asks.append(ask)
                    for answer in answers(ask):
                        self.queue.answer_output(ask.request_id, answer, ttl_s=15.0)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(WAIT_S)
            wake_ups.close()


@pytest.fixture
def lab() -> OutputLab:
    return OutputLab()


def printed(ask: OutputAsk, text: str = "hi") -> list[OutputAnswer]:
    """An answer for each task: the text, from where it was requested."""
    pieces = [
        OutputPiece(
            task_id=each.task_id,
            attempt=1,
            stdout=OutputText(start=each.stdout_from, next=each.stdout_from + len(text), text=text),
            stderr=OutputText(start=each.stderr_from, next=each.stderr_from),
        )
        for each in ask.tasks
    ]
    return [OutputAnswer(ask.endpoint_id, (piece,)) for piece in pieces]


def nothing(ask: OutputAsk) -> list[OutputAnswer]:
    pieces = [OutputPiece(task_id=each.task_id, reason="NOT_KEPT") for each in ask.tasks]
    return [OutputAnswer(ask.endpoint_id, tuple(pieces))]


def test_output_of_running_tasks_comes_from_the_endpoint(lab: OutputLab) -> None:
    first, second = lab.running(2)
    with lab.forwarder(printed):
        answer = lab.read(first, second, stdout_from=7)
    assert answer["results"].keys() == {first, second}
    assert answer["results"][first] == {
        "status": "running",
        "attempt": 1,
        "stdout": {"from": 7, "next": 9, "text": "hi"},
        "stderr": {"from": 0, "next": 0, "text": ""},
        "complete": False,
        "source": "endpoint",
        "reason": None,
        "sealed": None,
    }
    [ask] = lab.asks
    assert (ask.endpoint_id, ask.max_bytes) == (lab.endpoint_id, 65_536)


def test_tasks_of_others_are_unknown_and_no_endpoint_is_asked(lab: OutputLab) -> None:
    [task_id] = lab.running()
    other = str(uuid.uuid4())
    with lab.forwarder(printed):
        assert lab.read(task_id, other, caller=BOB) == {"results": {}, "unknown": [task_id, other]}
    assert lab.asks == []


def test_answer_of_another_endpoint_is_ignored(lab: OutputLab) -> None:
    [task_id] = lab.running()

    def forged(ask: OutputAsk) -> list[OutputAnswer]:
        return [OutputAnswer(str(uuid.uuid4()), printed(ask, "forged")[0].pieces), *printed(ask)]

    with lab.forwarder(forged):
        assert lab.read(task_id)["results"][task_id]["stdout"]["text"] == "hi"


def test_what_is_missing_has_a_reason(lab: OutputLab, monkeypatch: pytest.MonkeyPatch) -> None:
    [waiting] = lab.tasks()
    [running] = lab.running()
    monkeypatch.setattr(lab.queue, "take_output", lambda *_, **__: None)
    found = lab.read(waiting, running)["results"]
    assert [(found[each]["reason"], found[each]["source"]) for each in (waiting, running)] == [
        ("NOT_STARTED", "none"),
        ("NO_ANSWER", "none"),
    ]
    lab.queue.reachable = False
    assert lab.read(running)["results"][running]["reason"] == "NO_ANSWER"
    lab.queue.reachable = True
    lab.seen(online=False)
    assert lab.read(running)["results"][running]["reason"] == "ENDPOINT_OFFLINE"


def test_an_endpoint_that_does_not_answer_in_time_may_have_more(
    lab: OutputLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, silent = lab.running(2)
    lab.end(failed, TaskState.FAILED, error=FAILED)
    lab.end(silent, TaskState.SUCCESS)
    monkeypatch.setattr(lab.queue, "take_output", lambda *_, **__: None)
    found = lab.read(failed, silent)["results"]
    assert {each: (found[each]["source"], found[each]["reason"], found[each]["complete"]) for each in found} == {
        failed: ("record", "NO_ANSWER", True),
        silent: ("none", "NO_ANSWER", False),
    }


def test_recorded_output_is_shown_if_the_endpoint_has_none(lab: OutputLab) -> None:
    failed, sealed, silent = lab.running(3)
    lab.end(failed, TaskState.FAILED, error=FAILED)
    lab.end(
        sealed,
        TaskState.FAILED,
        error=ErrorRecord(code="TASK_FAILED", message="", fault=Fault.USER_CODE, sealed="fs\n"),
    )
    lab.end(silent, TaskState.SUCCESS)
    with lab.forwarder(nothing):
        found = lab.read(failed, sealed, silent)["results"]
    assert found[failed]["stdout"] == {"from": 0, "next": 8, "text": "the ñnd"}
    assert {each: (found[each]["source"], found[each]["reason"], found[each]["complete"]) for each in found} == {
        failed: ("record", "NOT_KEPT", True),
        sealed: ("none", "SEALED", True),
        silent: ("none", "NOT_KEPT", True),
    }
    lab.seen(online=False)
    later = lab.read(failed, stdout_from=5)["results"][failed]
    assert (later["source"], later["stdout"]) == ("none", {"from": 5, "next": 5, "text": ""})


@pytest.mark.parametrize(
    "tasks",
    [
        [],
        [{"task_id": str(uuid.uuid4())}] * 101,
        [{"task_id": "x"}],
        [{"task_id": str(uuid.uuid4()), "stdout_from": -(2**53) - 1}],
    ],
)
def test_requests_over_the_limits_are_refused(lab: OutputLab, tasks: list[object]) -> None:
    assert lab.api.call("POST", "/v3/batch_output", {"tasks": tasks}).status == 422


def test_each_task_counts_and_an_endpoint_that_does_not_answer_more(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = OutputLab(ApiSettings(rate_per_s=0.001, rate_burst=50))
    [task_id] = lab.running()
    monkeypatch.setattr(lab.queue, "take_output", lambda *_, **__: None)
    body = {"tasks": [{"task_id": task_id}]}
    statuses = [lab.api.call("POST", "/v3/batch_output", body).status for _ in range(8)]
    assert statuses.count(200) in (4, 5)  # of eleven tokens each
    assert set(statuses) == {200, 429}
