"""Answers about sealed calls in which a hostile service puts code in the place of each field: none of it runs."""

from __future__ import annotations

import base64
import contextlib
import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from typer.testing import CliRunner

from farcall import Client, Executor
from farcall._client import connection_of, info_of
from farcall._future import ComputeFuture
from farcall._results import result_from_json
from farcall._sealing import SealMode
from farcall._task_info import TaskInfo
from farcall.cli._app import app
from farcall.cli._connect import CommandEnvironment
from farcall_common.errors import ProtocolError
from farcall_common.sealing import Answer, answer_key, decode_secret, seal_answer
from farcall_common.wire import new_id, new_task_id
from tests.support.answer_fields import Use, entries
from tests.waiting import WAIT_S

ENDPOINT: Final = new_id()
GROUP: Final = new_id()
_MODELS: Final = json.loads(Path("docs/openapi.json").read_text())["components"]["schemas"]
#: Fields of objects that the schema does not describe.
_OPEN: Final = {
    "error": (
        "code",
        "message",
        "hint",
        "sealed",
        "exception_data",
        "traceback",
        "stdout_tail",
        "reasons",
        "builtin_type",
    ),
    "details": ("sealed", "values", "stages", "progress", "staging", "files", "stdout_tail", "memoized_from", "cpu_s"),
}


@dataclasses.dataclass
class Attack:
    """Makes a directory where it is read."""

    directory: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.directory),)

    @property
    def ran(self) -> bool:
        return self.directory.exists()

    @property
    def buffer(self) -> str:
        return "f0\n" + base64.b64encode(pickle.dumps(self)).decode()

    def forms(self) -> Iterator[Any]:
        """The attack as text, and in each object in which the client looks for a value."""
        text, value = self.buffer, base64.b64encode(self.buffer.encode()).decode()
        stage = {"number": 0, "name": "load", "state": "done"}
        yield from (text, value, [text], {"0": value}, {"sealed": text})
        yield {"code": "TASK_FAILED", "message": text, "exception_data": text, "traceback": text, "stdout_tail": text}
        yield {"stages": [stage], "values": {"0": value}, "progress": {"done": 1, "text": text}, "stdout_tail": text}
        yield [{**stage, "error": {"code": "X", "message": text, "exception_data": text}}]


class Service:
    """The API of a hostile service: answers about tasks, by id. The endpoint is the caller's own."""

    def __init__(self, attack: Attack) -> None:
        self.tasks: dict[str, dict[str, Any]] = {}
        self.output: dict[str, Any] = {}
        self._attack = attack

    def client(self, mode: SealMode) -> Client:
        transport = httpx.MockTransport(self._answer)
        return Client("http://127.0.0.1", "token", sealed=mode, transport=transport, retry_timeout_s=0)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == f"/v2/endpoints/{ENDPOINT}":
            return httpx.Response(200, json={"owned": True})
        if path == f"/v2/taskgroup/{GROUP}":
            return httpx.Response(200, json={"tasks": [{"id": id_} for id_ in self.tasks]})
        if path == "/v2/batch_status":
            ids = json.loads(request.content)["task_ids"]
            return httpx.Response(200, json={"results": {id_: self.tasks[id_] for id_ in ids}})
        if path == "/v3/batch_output":
            ids = [each["task_id"] for each in json.loads(request.content)["tasks"]]
            return httpx.Response(200, json={"results": dict.fromkeys(ids, self.output)})
        if path == "/blob":
            return httpx.Response(200, content=self._attack.buffer.encode())
        if (task := self.tasks.get(path.rpartition("/")[2])) is not None:
            return httpx.Response(200, json=task)
        return httpx.Response(404, json={"code": "NOT_FOUND", "message": path})


@pytest.fixture
def attack(tmp_path: Path) -> Attack:
    return Attack(tmp_path / "ran")


@pytest.fixture
def service(attack: Attack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path / "home"))
    return Service(attack)


def sealed_ids(service: Service, tmp_path: Path) -> Callable[[], str]:
    """Makes ids of sealed tasks, as a process of the user that has ended."""
    with service.client("offered") as client:
        sealer = connection_of(client).sealer
    assert sealer.new_task_id(None, endpoint_id=ENDPOINT)
    assert (tmp_path / "home" / "sealing.secret").exists()
    return lambda: sealer.new_task_id(None, endpoint_id=ENDPOINT)


def honest_answers(task_id: str, secret: bytes) -> Iterator[dict[str, Any]]:
    """Answers about a sealed task that succeeded, failed as a graph, and runs."""

    def seal(part: Answer, body: bytes) -> str:
        key = answer_key(secret, task_id=task_id)
        return bytes(seal_answer(body, key, part=part, task_id=task_id, max_text_bytes=10_000)).decode()

    stage = {"number": 0, "name": "load", "state": "done"}
    details = {"stages": [stage], "cpu_s": 1.0}
    kept = {**details, "values": {"0": base64.b64encode(b"11\n1").decode()}}
    known = {
        "task_id": task_id,
        "endpoint_id": ENDPOINT,
        "task_group_id": GROUP,
        "function_id": new_id(),
        "attempt": 1,
        "timings": {"started_at": 1.0, "ended_at": 2.0},
        "result_serializers": [],
    }
    ended = {**known, "completion_t": "3.0"}
    without, with_values = (
        {"cpu_s": 1.0, "sealed": seal(Answer.DETAILS, json.dumps(each).encode())} for each in (details, kept)
    )
    yield {**ended, "status": "success", "details": without, "result": seal(Answer.RESULT, b"11\n1")}
    text = seal(Answer.ERROR, b'{"code": "TASK_FAILED", "message": "m", "exception_data": "11\\n1"}')
    error = {"code": "TASK_FAILED", "message": "sealed", "sealed": text}
    yield {**ended, "status": "failed", "details": with_values, "error": error}
    moving = {"stages": [stage], "progress": {"done": 1}, "staging": {"state": "staging-in", "files": 1}}
    yield {**known, "status": "running", "details": {}, **moving}


def paths(model: str = "TaskAnswer") -> Iterator[tuple[str | int, ...]]:
    """Places in an answer: each field of the schema, and of what it refers to."""
    for name, schema in _MODELS[model]["properties"].items():
        yield (name,)
        for inside in _OPEN.get(name, ()):
            yield name, inside
        text = json.dumps(schema)
        for other in ("StageShape", "ProgressShape", "StagingShape", "ResultRefShape", "QosShape"):
            if f'/{other}"' in text:
                at = (name, 0) if other == "StageShape" else (name,)
                yield from ((*at, *inside) for inside in paths(other))


def replaced(answer: dict[str, Any], path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """An answer with another value at a place."""
    changed: Any = copy.deepcopy(answer)
    at = changed
    for key, following in itertools.pairwise(path):
        if isinstance(at, dict) and not at.get(str(key)):
            at[str(key)] = [{}] if following == 0 else {}
        at = at[key]
    at[path[-1]] = value
    return dict(changed)


def hostile_answers(
    attack: Attack, new_id_: Callable[[], str], secret: bytes
) -> Iterator[tuple[tuple[str | int, ...], dict[str, Any]]]:
    """Honest answers with the attack in one place, and answers without any seal."""
    count = len(list(honest_answers(new_task_id(), secret)))
    content = attack.buffer.encode()
    ref = {"blob_key": "b", "size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    for which in range(count):
        for path in (*paths(), ("result_ref",)):
            for form in (*attack.forms(), {**ref, "url": "http://127.0.0.1/blob"}):
                honest = [*honest_answers(new_id_(), secret)][which]
                changed = replaced(honest, path, form)
                if path == ("result_ref",):
                    changed.pop("result", None)
                yield path, changed


def is_readable(answer: dict[str, Any]) -> bool:
    """Whether it is an answer about a task. An executor asks again for one that is not."""
    try:
        result_from_json(answer)
    except ProtocolError:
        return False
    return True


def touch(look: Callable[[], Any]) -> None:
    """Look at something, which may be refused."""
    with contextlib.suppress(Exception):
        look()


def touch_info(info: TaskInfo) -> None:
    """Look at all that a task shows."""
    for look in (info.result, lambda: dict(info), lambda: repr(info), info._repr_html_, info.stages._repr_html_):
        touch(look)
    for part in (info.stages, info.progress, info.staging, info.files, info.exception, info.details):
        touch(functools.partial(str, part))
    for stage in info.stages:
        touch(stage.result)


def touch_stages(future: ComputeFuture[Any]) -> None:
    """Read the values of the stages of a task."""
    for stage in future.stages:
        touch(stage.result)


MODES: Final[tuple[SealMode, ...]] = ("off", "offered", "required")


@pytest.mark.parametrize("mode", MODES)
def test_no_field_of_an_answer_about_a_sealed_task_runs_code(
    service: Service, attack: Attack, tmp_path: Path, mode: SealMode
) -> None:
    marked = sealed_ids(service, tmp_path)
    secret = decode_secret((tmp_path / "home" / "sealing.secret").read_text())
    make_id = new_task_id if mode == "required" else marked  # tasks that this user has never sent, too
    seen = set()
    with service.client(mode) as client:
        for path, answer in hostile_answers(attack, make_id, secret):
            task_id = answer["task_id"]
            asked = task_id if isinstance(task_id, str) and len(task_id) == 36 else make_id()
            service.tasks = {asked: answer}
            seen.add(path)
            with contextlib.suppress(Exception):
                touch_info(info_of(client, asked))
            assert not attack.ran, (path, answer)
            touch(functools.partial(client.get_result, asked))
            assert not attack.ran, (path, answer)
    assert {path[0] for path in seen} == set(_MODELS["TaskAnswer"]["properties"])


@pytest.mark.parametrize("mode", MODES)
def test_futures_of_sealed_tasks_of_another_process_run_no_code(
    service: Service, attack: Attack, tmp_path: Path, mode: SealMode
) -> None:
    marked = sealed_ids(service, tmp_path)
    secret = decode_secret((tmp_path / "home" / "sealing.secret").read_text())
    found = list(hostile_answers(attack, new_task_id if mode == "required" else marked, secret))
    service.tasks = {
        answer["task_id"]: answer for path, answer in found if path != ("task_id",) and is_readable(answer)
    }
    stream = {"from": 0, "next": 1, "text": attack.buffer}
    service.output = {"status": "running", "attempt": 1, "stdout": stream, "stderr": stream, "sealed": None}
    with service.client(mode) as client:
        executor = Executor(ENDPOINT, client)
        futures = executor.reload_tasks(GROUP)
        ended = [each for each in futures if service.tasks[each.task_id]["status"] != "running"]
        for future in ended:
            touch(functools.partial(future.exception, WAIT_S))
            assert future.done()
        for future in futures:
            touch(functools.partial(touch_stages, future))
            for look in (functools.partial(getattr, future, "progress"), future._repr_html_):
                touch(look)
        for future in (ended[0], next(each for each in futures if not each.done())):
            assert not future.stdout
            assert not future.stderr
        executor.shutdown(wait=False, cancel_futures=True)
    assert not attack.ran


@pytest.mark.parametrize("place", ["result", "error", "values", "blob"])
def test_the_same_answers_run_code_where_the_call_was_not_sealed(
    service: Service, attack: Attack, tmp_path: Path, place: str
) -> None:
    """The attack works: the endpoint is the caller's own."""
    task_id, forms = new_task_id(), list(attack.forms())
    content = attack.buffer.encode()
    ref = {"blob_key": "b", "size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    answers: dict[str, dict[str, Any]] = {
        "result": {"status": "success", "result": forms[0]},
        "error": {"status": "failed", "error": forms[5]},
        "values": {"status": "failed", "error": {"code": "X", "message": "m"}, "details": forms[6]},
        "blob": {"status": "success", "result_ref": {**ref, "url": "http://127.0.0.1/blob"}},
    }
    service.tasks[task_id] = {"task_id": task_id, "endpoint_id": ENDPOINT, **answers[place]}
    with service.client("offered") as client:
        touch_info(info_of(client, task_id))
    assert attack.ran


def test_fields_of_a_task_that_are_read_as_values_are_in_the_table() -> None:
    assert {name for model, name, entry in entries() if model == "TaskAnswer" and entry.use is Use.VALUE} == {
        *("result", "result_ref", "error", "details")
    }


def test_answer_about_another_task_is_refused(service: Service, tmp_path: Path) -> None:
    marked = sealed_ids(service, tmp_path)
    secret = decode_secret((tmp_path / "home" / "sealing.secret").read_text())
    asked, other = marked(), marked()
    service.tasks[asked] = next(honest_answers(other, secret))  # its seal is right
    with service.client("off") as client:
        with pytest.raises(ProtocolError, match=f"it is about task {other} instead of {asked}"):
            client.get_result(asked)
        with pytest.raises(ProtocolError):
            client.get_batch_result([asked])


def test_sealed_task_names_what_the_service_says(service: Service, tmp_path: Path) -> None:
    marked = sealed_ids(service, tmp_path)
    secret = decode_secret((tmp_path / "home" / "sealing.secret").read_text())
    with service.client("off") as client:

        def shown(which: int, **changes: Any) -> TaskInfo:
            task_id = marked()
            service.tasks[task_id] = {**[*honest_answers(task_id, secret)][which], **changes}
            return info_of(client, task_id)

        succeeded = shown(0)
        assert "state" not in succeeded.by_service
        assert {"endpoint_id", "attempt", "timings"} <= set(succeeded.by_service)
        assert repr(succeeded).endswith("(by the service)>")
        assert '<th style="text-align:left">by the service</th>' in succeeded._repr_html_()
        failed = shown(1)
        assert not {"state", "exception", "stages"} & set(failed.by_service)
        assert failed.stages[0].result() == 1
        assert "(by the service)" not in str(failed.stages)
        said = shown(1, error={"code": "TASK_FAILED", "message": "it broke"}, details={})
        assert {"state", "exception"} <= set(said.by_service)
        assert str(said.exception) == "[TASK_FAILED] it broke (the service says so, the endpoint has not signed it)"
        running = shown(2)
        assert {"state", "stages", "progress", "staging"} <= set(running.by_service)
        assert str(running.stages).endswith("\n(by the service)")
        assert (running.stages[0].name, running.stages[0].state) == ("", "done")
        open_id = new_task_id()
        service.tasks[open_id] = {"task_id": open_id, "status": "success", "endpoint_id": ENDPOINT, "result": "11\n1"}
        assert info_of(client, open_id).by_service == ()


def test_command_line_marks_what_the_service_says_of_a_sealed_task(service: Service, tmp_path: Path) -> None:
    marked = sealed_ids(service, tmp_path)
    secret = decode_secret((tmp_path / "home" / "sealing.secret").read_text())

    def farcall(*arguments: str) -> str:
        environment = CommandEnvironment(lambda *_: service.client("off"))
        return CliRunner().invoke(app, arguments, obj=environment).output

    task_id = marked()
    service.tasks[task_id] = {**[*honest_answers(task_id, secret)][2], "progress": {"done": 1, "text": "forged"}}
    shown = farcall("tasks", "show", task_id)
    assert "\nby the service" in shown
    assert "state, task group, endpoint, function, attempt" in shown
    assert shown.rstrip().endswith("(by the service)")
    assert json.loads(farcall("tasks", "show", task_id, "--json"))["by_service"]
    failed = {"code": "TASK_FAILED", "message": "forged", "traceback": "forged too"}
    service.tasks[task_id] = {**service.tasks[task_id], "status": "failed", "error": failed}
    for shown in (farcall("tasks", "show", task_id), farcall("groups", "show", GROUP)):
        assert "forged (the service says so, the endpoint has not signed it)" in shown
        assert "forged too" not in shown
    assert "forged" not in farcall("tasks", "watch", task_id)
    stream = {"from": 0, "next": 1, "text": "forged"}
    service.output = {"status": "failed", "attempt": 1, "stdout": stream, "stderr": stream, "sealed": None}
    shown = farcall("tasks", "logs", task_id)
    assert "forged" not in shown
    assert "what the service shows as its output is not: it is left out" in shown
