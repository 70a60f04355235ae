"""Compatibility with ``globus_compute_sdk``: argument names, attributes, methods, and unsupported ones."""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

import farcall
from farcall import Client, ConfigurationError, Executor, TaskFailed, TaskPending, Unauthenticated, Unsupported
from farcall._client import connection_of
from farcall.testing import FakeCloud
from farcall_common.payload import DillCode, DillDataBase64, JSONData, Serializer
from tests.waiting import WAIT_S

#: Of globus_compute_sdk 4.19.
EXECUTOR_ARGUMENTS = [
    "endpoint_id",
    "client",
    "task_group_id",
    "resource_specification",
    "user_endpoint_config",
    "label",
    "batch_size",
    "amqp_port",
    "api_burst_limit",
    "api_burst_window_s",
    "serializer",
    "result_serializers",
]
EXECUTOR_ATTRIBUTES = [*EXECUTOR_ARGUMENTS, "task_count_submitted"]
EXECUTOR_METHODS = [
    "get_worker_hardware_details",
    "map",
    "register_function",
    "register_source_code",
    "reload_tasks",
    "shutdown",
    "submit",
    "submit_to_registered_function",
]
CLIENT_ARGUMENTS = [
    "environment",
    "local_compute_services",
    "do_version_check",
    "code_serialization_strategy",
    "data_serialization_strategy",
    "app",
    "authorizer",
]
CLIENT_METHODS = [
    "batch_run",
    "create_batch",
    "delete_endpoint",
    "delete_function",
    "get_allowed_functions",
    "get_batch_result",
    "get_endpoint_metadata",
    "get_endpoint_status",
    "get_endpoints",
    "get_function",
    "get_result",
    "get_result_amqp_url",
    "get_task",
    "get_worker_hardware_details",
    "logout",
    "register_endpoint",
    "register_function",
    "register_source_code",
    "run",
    "stop_endpoint",
    "version_check",
]


def double(x: int) -> int:
    return 2 * x


@pytest.fixture
def bodies() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def client(cloud: FakeCloud, bodies: list[dict[str, Any]]) -> Iterator[Client]:
    """A client whose submits and registrations are kept."""

    def spy(request: httpx.Request) -> httpx.Response:
        if request.method == "POST" and request.url.path.endswith(("/submit", "/functions")):
            bodies.append(msgspec.json.decode(request.content))
        return cloud.transport.handle_request(request)

    with Client("https://farcall.test", cloud.token, transport=httpx.MockTransport(spy)) as client:
        yield client


def test_globus_compute_names_exist(cloud: FakeCloud) -> None:
    assert set(EXECUTOR_ARGUMENTS) <= inspect.signature(Executor).parameters.keys()
    assert set(CLIENT_ARGUMENTS) <= inspect.signature(Client).parameters.keys()
    assert list(inspect.signature(Executor).parameters)[:2] == EXECUTOR_ARGUMENTS[:2]
    with cloud.client() as client, Executor(client=client) as executor:
        assert [name for name in [*EXECUTOR_ATTRIBUTES, *EXECUTOR_METHODS] if not hasattr(executor, name)] == []
        assert [name for name in [*CLIENT_METHODS, "fx_serializer"] if not hasattr(client, name)] == []


def test_an_executor_refuses_unsupported_arguments(client: Client) -> None:
    with pytest.raises(Unsupported, match="amqp_port") as caught:
        Executor(client=client, amqp_port=443)
    assert caught.value.hint


@pytest.mark.parametrize(
    "argument",
    [{"environment": "production"}, {"local_compute_services": True}, {"app": object()}],
    ids=lambda each: next(iter(each)),
)
def test_a_client_refuses_unsupported_arguments(argument: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match=next(iter(argument))):
        Client("https://farcall.test", "token", **argument)


def test_unsupported_methods_raise(client: Client, cloud: FakeCloud) -> None:
    with pytest.raises(Unsupported, match="farcall-endpoint stop"):
        client.stop_endpoint(cloud.endpoint_id)
    with pytest.raises(Unsupported, match="broker"):
        client.get_result_amqp_url()
    with pytest.raises(Unsupported, match="FARCALL_TOKEN"):
        client.logout()
    with pytest.raises(Unsupported, match=re.escape('share_function(function_id, "group:ID")')):
        client.register_function(double, group=str(uuid.uuid4()))
    with pytest.raises(Unsupported, match="create_websocket_queue"):
        client.create_batch(create_websocket_queue=True)
    with Executor(client=client) as executor, pytest.raises(Unsupported):
        executor.amqp_port = 5671


def test_attributes_apply_to_later_calls(client: Client, cloud: FakeCloud, bodies: list[dict[str, Any]]) -> None:
    other_group = uuid.uuid4()
    with Executor(client=client, resource_specification={"num_nodes": 2}) as executor:
        executor.endpoint_id = uuid.UUID(cloud.endpoint_id)
        assert executor.endpoint_id == cloud.endpoint_id
        first = executor.submit(double, 1)
        first.result(WAIT_S)
        executor.resource_specification = {"num_nodes": 4, "ranks_per_node": 2}
        executor.result_serializers = [JSONData, "globus_compute_sdk.serialize.DillDataBase64"]
        executor.task_group_id = other_group
        executor.batch_size = 7
        second = executor.submit(double, 2)
        assert second.result(WAIT_S) == 4
        executor.resource_specification = None
        executor.submit(double, 3).result(WAIT_S)
        assert executor.task_count_submitted == 3
    _, *submits = bodies  # the first one is the registration
    specifications = [each.get("resource_specification") for each in submits]
    assert specifications == [{"num_nodes": 2}, {"num_nodes": 4, "ranks_per_node": 2}, None]
    assert [each.get("result_serializers") for each in submits] == [None, *[["JSONData", "DillDataBase64"]] * 2]
    assert (first.task_group_id, second.task_group_id) == (submits[0]["task_group_id"], str(other_group))


def test_calls_with_other_options_go_in_separate_requests(
    client: Client, cloud: FakeCloud, bodies: list[dict[str, Any]]
) -> None:
    with Executor(cloud.endpoint_id, client) as executor:
        quick, slow = executor.options(walltime_s=1), executor.options(walltime_s=3600, max_attempts=1)
        futures = [view.submit(double, n) for n in range(20) for view in (quick, slow)]
        assert [future.result(WAIT_S) for future in futures] == [2 * n for n in range(20) for _ in range(2)]
        assert executor.walltime_s is None
        quick.shutdown()
        assert executor.submit(double, 1).result(WAIT_S) == 2
    submits = [each for each in bodies if "tasks" in each]
    assert {(each.get("walltime_s"), each["max_attempts"]) for each in submits} == {(1, 3), (3600, 1), (None, 3)}


def test_views_can_map_and_register_functions(client: Client, cloud: FakeCloud) -> None:
    with Executor(client=client) as executor:
        view = executor.options(endpoint_id=cloud.endpoint_id, idempotent=False)
        assert list(view.map(double, range(5), chunksize=2, timeout=WAIT_S)) == [0, 2, 4, 6, 8]
        function_id = executor.register_function(double)
        assert view.submit_to_registered_function(uuid.UUID(function_id), [4]).result(WAIT_S) == 8


@pytest.mark.parametrize("name", ["resource_specification", "user_endpoint_config"])
@pytest.mark.parametrize("bad", [["a list"], {"not": {object()}}])
def test_a_value_that_is_not_a_json_object_is_a_type_error(client: Client, name: str, bad: Any) -> None:
    with Executor(client=client) as executor, pytest.raises(TypeError, match=name):
        setattr(executor, name, bad)


def test_options_are_copied(client: Client) -> None:
    mine = {"num_nodes": 2}
    with Executor(client=client, resource_specification=mine) as executor:
        mine["num_nodes"] = 99
        assert executor.resource_specification == {"num_nodes": 2}


def test_strategies_can_be_chosen(cloud: FakeCloud, bodies: list[dict[str, Any]]) -> None:
    class GlobusCode:
        identifier = "01\n"

    class GlobusSerializer:
        code_serializer = GlobusCode()
        data_serializer = JSONData()

    def spy(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith(("/submit", "/functions")):
            bodies.append(msgspec.json.decode(request.content))
        return cloud.transport.handle_request(request)

    with Client(
        "https://farcall.test",
        cloud.token,
        code_serialization_strategy=GlobusCode,
        data_serialization_strategy="DillDataBase64",
        transport=httpx.MockTransport(spy),
    ) as client:
        assert client.fx_serializer == Serializer(code=(DillCode(),), data=(DillDataBase64(),))
        function_id = client.register_function(double)
        task_id = client.run(3, endpoint_id=uuid.UUID(cloud.endpoint_id), function_id=uuid.UUID(function_id))
        assert client.get_result(uuid.UUID(task_id), wait_s=WAIT_S) == 6
        with Executor(cloud.endpoint_id, client) as executor:
            assert executor.serializer is client.fx_serializer
            assert executor.submit(double, 4).result(WAIT_S) == 8
            executor.serializer = GlobusSerializer()
            assert executor.submit(double, 5).result(WAIT_S) == 10
    registered, submitted = bodies[0], bodies[1]
    assert registered["meta"]["serde_identifier"] == "01"
    assert "\n00\n" in next(iter(submitted["tasks"].values()))[0]
    assert "\n11\n" in next(iter(bodies[-1]["tasks"].values()))[0]


@pytest.mark.parametrize("name", ["DillCodeSource", "DillCodeTextInspect", "CombinedCode"])
def test_functions_travel_by_strategies_that_globus_compute_calls_deprecated(cloud: FakeCloud, name: str) -> None:
    settings: Any = {"code_serialization_strategy": name, "transport": cloud.transport}
    client = Client("https://farcall.test", cloud.token, **settings)
    with client, Executor(cloud.endpoint_id, client) as executor:
        assert executor.submit(double, 4).result(WAIT_S) == 8


@pytest.mark.parametrize("bad", ["NoSuchStrategy", 5, JSONData])
def test_a_strategy_for_data_is_refused_for_functions(bad: object) -> None:
    with pytest.raises(ConfigurationError):
        Client("https://farcall.test", "token", code_serialization_strategy=bad)


def test_an_authorizer_provides_the_credentials(cloud: FakeCloud) -> None:
    class Renewing:
        """Its first tokens have expired."""

        def __init__(self) -> None:
            self.tokens = ["expired", "expired", cloud.token]

        def get_authorization_header(self) -> str | None:
            return f"Bearer {self.tokens[0]}"

        def handle_missing_authorization(self) -> bool:
            self.tokens.pop(0)
            return len(self.tokens) > 1 or self.tokens == [cloud.token]

    with Client("https://farcall.test", authorizer=Renewing(), transport=cloud.transport) as client:
        with pytest.raises(Unauthenticated):
            client.get_functions()
        assert client.get_functions() == []

    class Silent(Renewing):
        def get_authorization_header(self) -> str | None:
            return None

    with pytest.raises(Unauthenticated, match="authorizer"):
        Client("https://farcall.test", authorizer=Silent())


def test_a_version_check_finds_an_api_that_is_not_there(cloud: FakeCloud) -> None:
    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    Client("https://farcall.test", cloud.token, do_version_check=True, transport=cloud.transport).close()
    with pytest.raises(farcall.Unavailable):
        Client(
            "https://farcall.test", "t", do_version_check=True, retry_timeout_s=0, transport=httpx.MockTransport(away)
        )


def test_source_text_is_registered_as_it_is(client: Client, cloud: FakeCloud) -> None:
    source = "import math\n\nBASE = 10\n\ndef area(r):\n    return round(math.pi * r**2, BASE)\n"
    with Executor(cloud.endpoint_id, client) as executor:
        function_id = executor.register_source_code(source, "area", description="of a circle")
        assert executor.submit_to_registered_function(function_id, (1,)).result(WAIT_S) == 3.1415926536
    assert client.get_function(uuid.UUID(function_id))["description"] == "of a circle"
    with pytest.raises(farcall.SerializationError, match="not a function name"):
        client.register_source_code(source, "not a name")


def test_worker_details_are_returned(client: Client, cloud: FakeCloud) -> None:
    with Executor(cloud.endpoint_id, client) as executor:
        assert sys.version.split()[0] in executor.get_worker_hardware_details()
    task_id = client.get_worker_hardware_details(cloud.endpoint_id)
    assert "cores" in client.get_result(task_id, wait_s=WAIT_S)


def test_a_function_may_be_known_by_an_id_already(client: Client, cloud: FakeCloud) -> None:
    function_id = client.register_function(double)
    with Executor(cloud.endpoint_id, client) as executor:
        assert executor.register_function(double, function_id) == function_id
        assert executor.submit(double, 21).result(WAIT_S) == 42
    assert len(client.get_functions()) == 1


def test_task_can_be_read_as_a_mapping() -> None:
    with FakeCloud(workers=0) as offline, offline.client() as client:
        task_id = client.run(21, endpoint_id=offline.endpoint_id, function_id=client.register_function(double))
        waiting = client.get_task(task_id)
        assert (waiting["status"], waiting["pending"], waiting.get("result")) == ("received", True, None)
        with pytest.raises(TaskPending):
            client.get_result(task_id)
        offline.run_waiting()
        done = client.get_batch_result([uuid.UUID(task_id)])[task_id]
        assert (done["status"], done["pending"], done["result"]) == ("success", False, 42)
        assert float(done["completion_t"]) == done.finished_at
        assert "exception" not in done
        assert dict(done)["task_id"] == task_id


@pytest.mark.parametrize(
    ("args", "kwargs"), [("abc", None), (b"abc", None), ({"x": 1}, None), (5, None), (None, "abc"), ((), {1: 2})]
)
def test_arguments_of_the_wrong_kind_are_refused_at_once(
    client: Client, cloud: FakeCloud, args: Any, kwargs: Any
) -> None:
    function_id = client.register_function(double)
    with pytest.raises(TypeError, match=r"^k?w?args: expected"):
        client.create_batch().add(function_id, args, kwargs)
    with Executor(cloud.endpoint_id, client) as executor, pytest.raises(TypeError, match=r"^k?w?args: expected"):
        executor.submit_to_registered_function(function_id, args=args, kwargs=kwargs)


def test_the_task_group_of_a_batch_is_a_uuid(client: Client) -> None:
    batch = client.create_batch()
    with pytest.raises(ValueError, match="not a UUID"):
        batch.task_group_id = "a"
    group_id = uuid.uuid4()
    batch.task_group_id = group_id
    assert batch.task_group_id == str(group_id)


@pytest.mark.parametrize("access", [lambda info: info["result"], lambda info: info.get("result")])
def test_a_task_that_failed_raises_where_globus_computes_client_does(
    client: Client, cloud: FakeCloud, access: Any
) -> None:
    task_id = client.run("x", endpoint_id=cloud.endpoint_id, function_id=client.register_function(math.sqrt))
    with pytest.raises(TaskFailed):
        client.get_result(task_id, wait_s=WAIT_S)
    with pytest.raises(TaskFailed):
        client.get_task(task_id)
    info = client.get_batch_result([task_id])[task_id]
    assert (info["status"], info["pending"], "result" in info) == ("failed", False, False)
    assert isinstance(info["exception"], TaskFailed)
    with pytest.raises(TaskFailed):
        access(info)


def test_batch_can_be_serialized_for_another_transport(client: Client, cloud: FakeCloud) -> None:
    batch = client.create_batch(str(uuid.uuid4()), {"num_nodes": 2}, None, False, ["JSONData"])
    task_id = batch.add(client.register_function(double), [21])
    body = json.loads(json.dumps(batch.prepare()))
    assert (body["resource_specification"], body["result_serializers"]) == ({"num_nodes": 2}, ["JSONData"])
    connection_of(client).api.http.call("POST", f"/v3/endpoints/{cloud.endpoint_id}/submit", body=body)
    assert client.get_result(task_id, wait_s=WAIT_S) == 42
    assert client.get_task_group(batch.task_group_id) == [task_id]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parsls_executor_for_globus_compute_runs_on_ours(
    client: Client, cloud: FakeCloud, bodies: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "globus_compute_sdk", farcall)
    monkeypatch.delitem(sys.modules, "parsl.executors.globus_compute", raising=False)
    from parsl.executors.globus_compute import GlobusComputeExecutor

    parsls = GlobusComputeExecutor(Executor(cloud.endpoint_id, client, resource_specification={"num_nodes": 1}))
    parsls.start()
    default, special = parsls.submit(double, {}, 4), parsls.submit(double, {"num_nodes": 3}, 5)
    assert [default.result(WAIT_S), special.result(WAIT_S)] == [8, 10]
    submits = [each for each in bodies if "tasks" in each]
    assert [each["resource_specification"]["num_nodes"] for each in submits] == [1, 3]
    parsls.shutdown()
