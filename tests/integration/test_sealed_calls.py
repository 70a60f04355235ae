"""Sealed calls at an endpoint: each runs once, whatever the cloud sends again or elsewhere, also after a restart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from farcall_common import wire
from farcall_common.payload import Serializer
from farcall_common.sealing import Answer, answer_key, new_secret, open_answer, seal_call
from farcall_common.task_options import Callee
from farcall_common.wire import TaskState
from tests.support.endpoint import EndpointProcess, FakeCloud, running_endpoint
from tests.waiting import wait_until

SERIALIZER = Serializer()
SECRET = new_secret()


def note(path: str, text: str, pause_s: float = 0.0) -> str:
    import pathlib
    import time

    with pathlib.Path(path).open("a") as notes:
        notes.write("run\n")
    time.sleep(pause_s)
    return text


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[EndpointProcess]:
    with running_endpoint(tmp_path / "home", workers=1, start=False) as endpoint:
        file = endpoint.directory.config_file
        file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "sealed": "offered"}))
        endpoint.start()
        yield endpoint


class Caller:
    """Submits sealed calls of :func:`note`."""

    def __init__(self, endpoint: EndpointProcess, notes: Path) -> None:
        self._endpoint, self._notes = endpoint, notes
        self.cloud: FakeCloud = endpoint.cloud
        self.function_id = wire.new_id()

    def seal(self, task_id: str, *args: object, callees: Sequence[str] = ()) -> bytes:
        secrets, endpoint_id = self._endpoint.directory.read_sealing(), self._endpoint.directory.read_endpoint_id()
        assert secrets is not None
        assert endpoint_id is not None
        return seal_call(
            SERIALIZER.pack_call((str(self._notes), *args)),
            to=secrets.public(endpoint_id=endpoint_id),
            endpoint_id=endpoint_id,
            function=self.function_id,
            task_id=task_id,
            key=answer_key(SECRET, task_id=task_id),
            max_text_bytes=65536,
            callees=callees,
        )

    def submit(self, task_id: str, sealed: bytes, **options: Any) -> None:
        body = SERIALIZER.pack_function(note)
        self.cloud.submit_raw(body, [sealed], task_id=task_id, function_id=self.function_id, **options)

    def answer(self, task_id: str) -> object:
        end = self.cloud.end(task_id)
        assert end.state is TaskState.SUCCESS, end.error
        assert isinstance(end.value, bytes)
        opened = open_answer(end.value, answer_key(SECRET, task_id=task_id), part=Answer.RESULT, task_id=task_id)
        return SERIALIZER.deserialize(opened)

    def codes(self, task_id: str) -> list[str]:
        return [str((each.error or {}).get("code", "")) for each in self.cloud.results if each.task_id == task_id]

    @property
    def runs(self) -> int:
        return self._notes.read_text().count("run") if self._notes.exists() else 0


@pytest.fixture
def caller(endpoint: EndpointProcess, tmp_path: Path) -> Caller:
    return Caller(endpoint, tmp_path / "notes")


@pytest.mark.parametrize("size", [10, 60_000, 500_000])
def test_a_sealed_call_is_run_once_and_only_as_its_task(caller: Caller, endpoint: EndpointProcess, size: int) -> None:
    task_id, text = wire.new_task_id(), "x" * size
    sealed = caller.seal(task_id, text)
    caller.submit(task_id, sealed)
    assert caller.answer(task_id) == text

    # The same bytes as another task, and the same task again: at once, and after a restart.
    other = wire.new_task_id()
    caller.submit(other, sealed)
    assert caller.cloud.end(other).error["code"] == "SEALED_CALL_REFUSED"
    wait_until(lambda: not endpoint.directory.read_status().get("unfinished_tasks"))
    for count in (2, 3):
        caller.cloud.redeliver(task_id)
        wait_until(lambda count=count: len(caller.codes(task_id)) == count)  # type: ignore[misc]
        endpoint.stop()
        endpoint.start()
    assert caller.codes(task_id) == ["", "SEALED_CALL_REFUSED", "SEALED_CALL_REFUSED"]
    assert caller.runs == 1


def test_a_call_that_runs_while_the_agent_dies_is_still_answered_under_its_seal(
    caller: Caller, endpoint: EndpointProcess
) -> None:
    task_id = wire.new_task_id()
    caller.submit(task_id, caller.seal(task_id, "done", 1.0))
    wait_until(lambda: caller.runs == 1)
    endpoint.kill_agent()
    endpoint.start()
    assert caller.answer(task_id) == "done"
    assert caller.runs == 2  # an attempt, as of any task


def test_a_damaged_call_is_refused(caller: Caller) -> None:
    task_id = wire.new_task_id()
    sealed = bytearray(caller.seal(task_id, "x"))
    sealed[100] = sealed[100] % 26 + ord("A") if sealed[100] != ord("A") else ord("B")
    caller.submit(task_id, bytes(sealed))
    assert caller.cloud.end(task_id).error["code"] == "SEALED_CALL_REFUSED"
    assert caller.runs == 0


def test_a_call_is_run_with_the_functions_that_it_was_sealed_with(caller: Caller) -> None:
    function_hash = hashlib.sha256(SERIALIZER.pack_function(note)).hexdigest()
    for callees in (("one", "two"), ("two", "one"), ("one",), ()):
        task_id = wire.new_task_id()
        sealed = caller.seal(task_id, "x", callees=["one", "two"])
        caller.submit(task_id, sealed, callees=tuple(Callee(each, function_hash) for each in callees))
        if callees == ("one", "two"):
            assert caller.answer(task_id) == "x"
        else:
            assert caller.cloud.end(task_id).error["code"] == "SEALED_CALL_REFUSED"
    assert caller.runs == 1
