"""What a client reads of a result: only data from endpoints of others, and only what was asked for."""

from __future__ import annotations

import base64
import concurrent.futures
import dataclasses
import json
import os
import pickle
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from farcall import Client, ConfigurationError, Executor, ResultRefused, TaskFailed
from farcall._trust import allowed_strategies, trusted_endpoints
from farcall.testing import FakeCloud
from farcall_common.payload import DATA_ONLY, STRATEGIES, JSONData, PickleDataBase64, Serializer
from farcall_common.payload.framing import pack
from tests.waiting import WAIT_S

OTHER = str(uuid.uuid4())


@dataclasses.dataclass
class Attack:
    """Makes a directory where it is read."""

    directory: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.directory),)

    @property
    def worked(self) -> bool:
        return self.directory.exists()

    def buffer(self, strategy_id: str) -> str:
        """The attack as a buffer of a strategy."""
        pickled = base64.b64encode(pickle.dumps(self)).decode()
        source = f"call:import os\nos.mkdir({str(self.directory)!r})\ndef call():\n    pass\n"
        texts = {"f0": pickled, "00": pickled, "01": pickled, "03": pickled, "f1": f"{{}}\n{pickled}"}
        texts |= {"f2": f"{{}}\n{pickled}", "st": source, "sd": source, "04": source, "05": source, "02": source}
        if strategy_id in ("10", "12", "13"):
            parts = ["00" if strategy_id == "13" else "01", "st", "f0"]
            return f"{strategy_id}\n" + pack(self.buffer(part).encode() for part in parts).decode()
        if strategy_id == "f3":
            text = json.dumps({"sizes": [0]}) + "\n"
            return f"f3\n{text}{pickled}"
        return f"{strategy_id}\n{texts[strategy_id]}"


@pytest.fixture
def attack(tmp_path: Path) -> Attack:
    return Attack(tmp_path / "stolen")


class Forged:
    """A cloud whose endpoint belongs to another user, and answers what it likes."""

    def __init__(self, cloud: FakeCloud) -> None:
        self.cloud = cloud
        self.fields: dict[str, Any] = {}
        self.asked: list[str] = []
        self.owned: object = False
        cloud.is_owned = False
        self.transport = httpx.MockTransport(self._answer)

    def client(self, **options: Any) -> Client:
        return Client("http://127.0.0.1", self.cloud.token, transport=self.transport, **options)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == f"/v2/endpoints/{self.cloud.endpoint_id}":
            self.asked.append(path)
        answer = self.cloud.transport.handle_request(request)
        if answer.status_code != 200 or not self.fields:
            return answer
        body = msgspec.json.decode(answer.read())
        tasks: Mapping[str, Any] = {}
        if path == "/v2/batch_status" or path.endswith("/submit"):
            tasks = body.get("results", {})
        elif path.startswith("/v2/tasks/"):
            tasks = {"": body}
        for task in tasks.values():
            if task["status"] in ("success", "failed"):
                task.update(self.fields)
        return httpx.Response(200, content=msgspec.json.encode(body))


@pytest.fixture
def forged() -> Iterator[Forged]:
    with FakeCloud() as cloud:
        yield Forged(cloud)


def one() -> Any:
    return 1


def pair() -> tuple[int, int]:
    return 1, 2


def fail() -> None:
    raise ValueError("no")


def by_future(client: Client, endpoint_id: str) -> Any:
    with Executor(endpoint_id, client) as executor:
        return executor.submit(one).result(WAIT_S)


def by_argument(client: Client, endpoint_id: str) -> Any:
    with Executor(endpoint_id, client) as executor:
        executor.submit(abs, executor.submit(one)).exception(WAIT_S)
        return executor.submit(one).result(WAIT_S)


def by_map(client: Client, endpoint_id: str) -> Any:
    with Executor(endpoint_id, client) as executor:
        return list(executor.map(abs, [1]))


def by_group(client: Client, endpoint_id: str) -> Any:
    with Executor(endpoint_id, client) as executor:
        first = executor.submit(one)
        concurrent.futures.wait([first], WAIT_S)
    with Executor(client=client) as again:
        [future] = again.reload_tasks(first.task_group_id)
        return future.result(WAIT_S)


def by_id(client: Client, endpoint_id: str) -> Any:
    task_id = client.run(endpoint_id=endpoint_id, function_id=client.register_function(one))
    return client.get_result(task_id, wait_s=WAIT_S)


def by_batch(client: Client, endpoint_id: str) -> Any:
    task_id = client.run(endpoint_id=endpoint_id, function_id=client.register_function(one))
    with pytest.raises(ResultRefused) as caught:
        client.get_result(task_id, wait_s=WAIT_S)
    [info] = client.get_batch_result([task_id]).values()
    assert str(info.exception) == str(caught.value)
    return info.result()


def by_memory(client: Client, endpoint_id: str) -> Any:
    with Executor(endpoint_id, client, memoize=True) as executor:
        executor.submit(one).exception(WAIT_S)
        return executor.submit(one).result(WAIT_S)


@pytest.mark.parametrize("way", [by_future, by_argument, by_map, by_group, by_id, by_batch, by_memory])
def test_an_endpoint_of_others_runs_no_code_in_the_client(
    forged: Forged, attack: Attack, way: Callable[[Client, str], Any]
) -> None:
    forged.fields = {"result": attack.buffer("f0")}
    with forged.client() as client, pytest.raises(ResultRefused) as caught:
        way(client, forged.cloud.endpoint_id)
    assert not attack.worked
    assert f"endpoint {forged.cloud.endpoint_id}, which is not yours" in str(caught.value)
    assert f"farcall config set trust {forged.cloud.endpoint_id}" in caught.value.hint
    assert caught.value.record.code == "RESULT_REFUSED"


@pytest.mark.parametrize("strategy_id", sorted(set(STRATEGIES) - {"11"}))
def test_no_strategy_with_code_is_read_from_an_endpoint_of_others(
    forged: Forged, attack: Attack, strategy_id: str
) -> None:
    forged.fields = {"result": attack.buffer(strategy_id)}
    with forged.client() as client, pytest.raises(ResultRefused):
        by_future(client, forged.cloud.endpoint_id)
    assert not attack.worked


@pytest.mark.parametrize("strategy_id", ["f0", "f1", "00", "13", "st"])
def test_the_attack_works_where_the_endpoint_is_trusted(forged: Forged, attack: Attack, strategy_id: str) -> None:
    forged.fields = {"result": attack.buffer(strategy_id)}
    with forged.client(trust={forged.cloud.endpoint_id}) as client:
        by_future(client, forged.cloud.endpoint_id)
    assert attack.worked


def test_plain_data_is_read_from_any_endpoint_without_asking_whose_it_is(forged: Forged) -> None:
    combined = b"13\n" + pack([b"00\nAAAA", b'11\n{"a":[1]}'])
    for buffer in (b'11\n{"a":[1]}', combined):
        forged.fields = {"result": buffer.decode()}
        with (
            forged.client() as client,
            Executor(forged.cloud.endpoint_id, client, result_serializers=["AllDataStrategies"]) as executor,
        ):
            assert executor.submit(one).result(WAIT_S) == {"a": [1]}
    assert forged.asked == []


@pytest.mark.parametrize("owned", [False, None, "true", 1])
def test_only_the_api_says_whose_an_endpoint_is(forged: Forged, owned: object) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        found = forged.cloud.transport.handle_request(request)
        if request.url.path == f"/v2/endpoints/{forged.cloud.endpoint_id}":
            body = {**msgspec.json.decode(found.read()), "owned": owned, "runtime": {"owned": True}}
            return httpx.Response(200, content=msgspec.json.encode({k: v for k, v in body.items() if v is not None}))
        return found

    with (
        Client("http://127.0.0.1", forged.cloud.token, transport=httpx.MockTransport(answer)) as client,
        Executor(forged.cloud.endpoint_id, client) as executor,
    ):
        assert isinstance(executor.submit(pair).exception(WAIT_S), ResultRefused)


def test_whose_an_endpoint_is_costs_one_request_for_all_of_its_tasks(forged: Forged) -> None:
    forged.cloud.is_owned = True
    with forged.client() as client:
        with Executor(forged.cloud.endpoint_id, client) as executor:
            assert {future.result(WAIT_S) for future in [executor.submit(pair) for _ in range(50)]} == {(1, 2)}
        ids = client.get_task_group(executor.task_group_id)
        assert {info.result() for info in client.get_batch_result(ids).values()} == {(1, 2)}
    assert len(forged.asked) == 1


def test_an_endpoint_that_was_deleted_is_not_ones_own(forged: Forged) -> None:
    forged.cloud.is_owned = True
    with forged.client() as client:
        task_id = client.run(endpoint_id=forged.cloud.endpoint_id, function_id=client.register_function(pair))
        assert client.get_result(task_id, wait_s=WAIT_S) == (1, 2)
        client.delete_endpoint(forged.cloud.endpoint_id)
        assert client.get_result(task_id) == (1, 2)
    with forged.client() as fresh, pytest.raises(ResultRefused):
        fresh.get_result(task_id)
    with forged.client(trust="*") as trusting:
        assert trusting.get_result(task_id) == (1, 2)


def test_a_memoized_result_of_another_endpoint_is_not_of_ones_own(forged: Forged, attack: Attack) -> None:
    forged.cloud.is_owned = True
    for source in ({"memoized_endpoint_id": OTHER}, {"memoized_endpoint_id": ["x"]}, {}):
        forged.fields = {"result": attack.buffer("f0"), "details": {"memoized_from": OTHER, **source}}
        with forged.client() as client, pytest.raises(ResultRefused):
            by_future(client, forged.cloud.endpoint_id)
        assert not attack.worked
    forged.cloud.is_owned = False
    forged.fields["details"]["memoized_endpoint_id"] = OTHER  # it says that a trusted one wrote it
    with forged.client(trust=[OTHER]) as client, pytest.raises(ResultRefused):
        by_future(client, forged.cloud.endpoint_id)
    assert not attack.worked


@pytest.mark.parametrize("raise_original", [False, True])
def test_an_exception_of_an_endpoint_of_others_is_text(forged: Forged, attack: Attack, raise_original: bool) -> None:
    error = {"code": "TASK_FAILED", "message": "ValueError: no", "builtin_type": "ValueError"}
    forged.fields = {"error": error | {"exception_data": attack.buffer("f0")}}
    with (
        forged.client() as client,
        Executor(forged.cloud.endpoint_id, client, raise_original=raise_original) as executor,
    ):
        caught = executor.submit(fail).exception(WAIT_S)
    assert isinstance(caught, TaskFailed)
    assert isinstance(caught, ValueError)
    assert caught.__cause__ is None
    assert any("exception itself was not read" in note and "not yours" in note for note in caught.__notes__)
    assert not attack.worked
    forged.fields |= {"status": "failed", "result": None}
    with forged.client() as client, pytest.raises(TaskFailed):
        by_id(client, forged.cloud.endpoint_id)
    assert not attack.worked


@pytest.mark.parametrize("data", [7, ["x"], {}, "", "f0\n"])
def test_a_malformed_exception_is_only_text(forged: Forged, data: object) -> None:
    forged.cloud.is_owned = True
    forged.fields = {"error": {"code": "TASK_FAILED", "message": "no", "exception_data": data}}
    with forged.client() as client, Executor(forged.cloud.endpoint_id, client) as executor:
        assert str(executor.submit(fail).exception(WAIT_S)) == "[TASK_FAILED] no"


@pytest.mark.parametrize("owned", [True, False])
def test_no_strategy_is_read_that_was_not_asked_for(forged: Forged, attack: Attack, owned: bool) -> None:
    forged.cloud.is_owned = owned
    forged.fields = {"result": attack.buffer("f0")}
    with (
        forged.client(trust="*") as client,
        Executor(forged.cloud.endpoint_id, client, result_serializers=[JSONData]) as executor,
    ):
        future = executor.submit(one)
        caught = future.exception(WAIT_S)
        [later] = client.get_batch_result([future.task_id]).values()  # the API knows what was asked for, too
    for error in (caught, later.exception):
        assert isinstance(error, ResultRefused)
        assert "the task asked for JSONData" in str(error)
    assert not attack.worked


@pytest.mark.parametrize("name", ["PickleOutOfBand", "AllDataStrategies", "DillDataBase64", "CloudPickleDataBase64"])
def test_what_was_asked_for_is_read(forged: Forged, name: str) -> None:
    forged.cloud.is_owned = True
    with (
        forged.client() as client,
        Executor(forged.cloud.endpoint_id, client, result_serializers=[name]) as executor,
    ):
        assert executor.submit(pair).result(WAIT_S) == (1, 2)


def test_a_client_reads_only_what_it_allows(forged: Forged, monkeypatch: pytest.MonkeyPatch) -> None:
    forged.cloud.is_owned = True

    def refused(**options: Any) -> bool:
        with forged.client(**options) as client, Executor(forged.cloud.endpoint_id, client) as executor:
            return isinstance(executor.submit(pair).exception(WAIT_S), ResultRefused)

    assert not refused()
    assert not refused(allowed_deserializers=["globus_compute_sdk.*Data"])
    assert refused(allowed_deserializers=[JSONData])
    monkeypatch.setenv("FARCALL_ALLOWED_DESERIALIZERS", "JSONData, *Code")
    assert refused()
    assert not refused(allowed_deserializers=["*Data"])
    monkeypatch.delenv("FARCALL_ALLOWED_DESERIALIZERS")
    with (
        forged.client() as client,
        Executor(forged.cloud.endpoint_id, client, serializer=Serializer(allowed=frozenset({"11"}))) as executor,
    ):
        assert isinstance(executor.submit(pair).exception(WAIT_S), ResultRefused)


def test_names_of_strategies_and_endpoints_are_checked() -> None:
    assert allowed_strategies(None, environ={}) is None
    assert allowed_strategies([PickleDataBase64, JSONData(), "11"], environ={}) == frozenset({"11", "f0"})
    code = {each for each, strategy in STRATEGIES.items() if strategy.for_code}
    assert allowed_strategies("JSONData *Code", environ={}) == frozenset({"11", *code})
    for wrong in (["DillCode"], ["nothing"], []):
        with pytest.raises(ConfigurationError):
            allowed_strategies(wrong, environ={})
    with pytest.raises(ConfigurationError, match="FARCALL_TRUST: 'alice'"):
        trusted_endpoints(None, environ={"FARCALL_TRUST": f"{OTHER}, alice"})


def test_trust_is_an_argument_a_variable_or_a_setting(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f'[default]\ntrust = "{OTHER}"\n')
    variable = {"FARCALL_TRUST": f"{uuid.UUID(int=1)} *"}
    assert trusted_endpoints([OTHER.upper()], environ=variable, home=tmp_path)() == {OTHER}
    assert trusted_endpoints((), environ=variable, home=tmp_path)() == frozenset()
    assert trusted_endpoints(None, environ=variable, home=tmp_path)() == {str(uuid.UUID(int=1)), "*"}
    assert trusted_endpoints(None, environ={}, home=tmp_path)() == {OTHER}
    assert trusted_endpoints(None, environ={}, home=tmp_path / "none")() == frozenset()
    assert trusted_endpoints(None, environ={"FARCALL_HOME": str(tmp_path)})() == {OTHER}


def test_a_globus_serializer_brings_its_list_along(forged: Forged) -> None:
    class GlobusJson:
        identifier = "11\n"

    class GlobusSerializer:
        code_serializer = data_serializer = None
        allowed_deserializer_types = frozenset({GlobusJson})

    forged.cloud.is_owned = True
    serializer = GlobusSerializer()
    serializer.code_serializer, serializer.data_serializer = "DillCode", "JSONData"  # type: ignore[assignment]
    with (
        forged.client() as client,
        Executor(forged.cloud.endpoint_id, client, serializer=serializer) as executor,
    ):
        assert isinstance(executor.submit(pair).exception(WAIT_S), ResultRefused)


def test_data_only_are_the_strategies_that_run_no_code() -> None:
    assert {type(STRATEGIES[each]).__name__ for each in DATA_ONLY} == {"JSONData", "AllDataStrategies"}
