"""Compatibility checks: calls that an endpoint cannot read or run are refused before they are queued."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from farcall import Client, EndpointIncompatible, Executor, PayloadTooLarge
from farcall._compatibility import _rewritten, unmet
from farcall._endpoints import EndpointRuntime
from farcall._functions import THIS_PYTHON, FunctionTable, PackedFunction, Requirements, pack_call
from farcall.testing import FakeCloud
from farcall_common.payload import STRATEGIES, DillCode, Serializer
from tests.waiting import WAIT_S

OTHER = {"python_version": "3.99.1", "packages": {}}


class Local:
    """A class that no worker can import."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Local)

    __hash__ = None  # type: ignore[assignment]


def plain(x: int) -> int:
    return x + 1


def same(x: Any) -> Any:
    return x


def closing_over(value: Any) -> Callable[[], Any]:
    def get() -> Any:
        return value

    return get


@pytest.fixture
def cloud() -> Iterator[FakeCloud]:
    with FakeCloud() as cloud:
        cloud.runtime = OTHER
        yield cloud


@pytest.fixture
def executor(cloud: FakeCloud) -> Iterator[Executor]:
    with cloud.client() as client, Executor(cloud.endpoint_id, client) as executor:
        yield executor


def test_requirements_of_calls_and_functions() -> None:
    def of_call(*args: Any) -> Requirements | None:
        return pack_call(args, {}, function_name="f").requirements

    def of_function(function: Callable[..., Any], serializer: Serializer) -> Requirements | None:
        return PackedFunction.of(serializer.serialize_function(function)).requirements

    assert of_call(1, "text", [None]) is None
    assert of_call() is None
    assert of_call(b"bytes") == Requirements(frozenset({"f0", "11"}), None)
    assert of_call(Local()) == Requirements(frozenset({"f1", "11"}), THIS_PYTHON)
    assert of_function(plain, Serializer()) is None
    assert of_function(pow, Serializer()) == Requirements(frozenset({"f2"}), None)
    assert of_function(plain, Serializer(code=(DillCode(),))) == Requirements(frozenset({"01"}), THIS_PYTHON)
    assert FunctionTable().handle(plain).function is None  # nothing is kept that is not needed


def test_requirements_are_compared_with_the_runtime() -> None:
    requirements = Requirements(frozenset({"f1"}), "3.11")
    assert unmet(requirements, EndpointRuntime()) == ""
    assert unmet(requirements, EndpointRuntime("3.11", frozenset({"f1", "00"}))) == ""
    assert "holds byte code of Python 3.11, and the endpoint runs Python 3.12" in unmet(
        requirements, EndpointRuntime("3.12")
    )
    assert "strategy f1, which the endpoint does not read" in unmet(
        requirements, EndpointRuntime("3.11", frozenset({"00"}))
    )


def test_universal_strategies_are_sent_to_every_endpoint(executor: Executor, cloud: FakeCloud) -> None:
    assert executor.submit(plain, 1).result(WAIT_S) == 2
    assert executor.submit(len, b"abc").result(WAIT_S) == 3  # a name, and bytes
    assert executor.submit(pow, 2, 3).result(WAIT_S) == 8


def test_function_that_changed_after_its_call_is_not_rewritten_with_the_change() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__", "RATE": [1]}
    exec("def rate(): return RATE[0]", namespace)
    handle = FunctionTable(Serializer(code=(DillCode(),))).handle(namespace["rate"])
    namespace["RATE"][0] = 2
    old = EndpointRuntime("3.11", frozenset({"f2"}))
    with pytest.raises(EndpointIncompatible, match="has changed since the call was submitted"):
        _rewritten(handle, handle.requirements or Requirements(frozenset(), None), old)


def test_a_function_that_is_byte_code_is_refused_with_the_reason(executor: Executor, cloud: FakeCloud) -> None:
    future = executor.submit(closing_over(5))
    with pytest.raises(EndpointIncompatible) as caught:
        future.result(WAIT_S)
    error = caught.value
    assert error.record.message == (
        f"function get holds byte code of Python {THIS_PYTHON}, and the endpoint runs Python 3.99; "
        "its source text alone is not enough: get is a closure: it uses 'value' of the function around it"
    )
    assert "Run this program with Python 3.99" in error.hint
    assert future.task_id not in cloud._tasks
    with pytest.raises(EndpointIncompatible, match="not a plain function"):
        executor.submit(functools.partial(closing_over(5))).result(WAIT_S)
    assert executor.submit(plain, 1).result(WAIT_S) == 2


def test_byte_code_is_rewritten_as_source_text_for_another_python(cloud: FakeCloud) -> None:
    with (
        Client(
            "https://farcall.test", cloud.token, code_serialization_strategy=DillCode, transport=cloud.transport
        ) as c,
        Executor(cloud.endpoint_id, c) as executor,
    ):
        assert [executor.submit(plain, n).result(WAIT_S) for n in range(3)] == [1, 2, 3]
        assert [each["metadata"]["serde_identifier"] for each in c.get_functions()] == ["st"]


def test_an_argument_that_is_byte_code_is_refused(executor: Executor, cloud: FakeCloud) -> None:
    refused = rf"an argument of same holds byte code of Python {THIS_PYTHON} \(the class Local\), and the endpoint"
    with pytest.raises(EndpointIncompatible, match=refused):
        executor.submit(same, Local()).result(WAIT_S)
    with cloud.client() as client:
        function_id = client.register_function(same)
        with pytest.raises(EndpointIncompatible, match=function_id):
            client.run(Local(), endpoint_id=cloud.endpoint_id, function_id=function_id)
    assert cloud._tasks == {}


def test_the_same_python_takes_everything(cloud: FakeCloud, executor: Executor) -> None:
    cloud.runtime = {"python_version": f"{THIS_PYTHON}.0", "packages": {}}
    assert executor.submit(closing_over(5)).result(WAIT_S) == 5
    assert executor.submit(same, Local()).result(WAIT_S) == Local()


def test_strategies_that_an_endpoint_does_not_read(cloud: FakeCloud, executor: Executor) -> None:
    cloud.runtime = {"python_version": f"{THIS_PYTHON}.0", "packages": {}, "serializers": ["01", "11", "st"]}
    assert executor.submit(closing_over(5)).result(WAIT_S) == 5
    with executor.client as client:
        assert [each["metadata"]["serde_identifier"] for each in client.get_functions()] == ["01"]
    with pytest.raises(EndpointIncompatible, match="strategy f0, which the endpoint does not read") as caught:
        executor.submit(same, b"bytes").result(WAIT_S)
    assert "Upgrade the endpoint" in caught.value.hint


@pytest.mark.parametrize(
    "strategies", [sorted(STRATEGIES), ["00", "11", "f0", "st"], []], ids=["all", "older", "unknown"]
)
def test_large_values_are_bytes_for_endpoints_that_read_them_and_text_for_others(
    cloud: FakeCloud, strategies: list[str]
) -> None:
    cloud.runtime = {"python_version": f"{THIS_PYTHON}.0", "serializers": strategies}
    uploaded: list[bytes] = []
    asked: list[object] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "PUT":
            uploaded.append(request.read()[:1])
        if request.url.path.endswith("/submit"):
            asked.append(json.loads(request.read()).get("result_serializers"))
        return cloud.transport.handle_request(request)

    array = np.arange(100_000, dtype=np.float64)
    with (
        Client("https://farcall.test", cloud.token, transport=httpx.MockTransport(answer)) as client,
        Executor(cloud.endpoint_id, client) as executor,
    ):
        result = executor.submit(same, array).result(WAIT_S)
        assert np.array_equal(result, array)
        result[0] = 5.0  # it is the caller's
        executor.submit(same, array[:3]).result(WAIT_S)
        executor.result_serializers = ("JSONData",)
        executor.submit(plain, 1).result(WAIT_S)
    reads_bytes = "f3" in strategies
    assert uploaded == [b"b" if reads_bytes else b"1"]
    assert asked == [["f3"] if reads_bytes else None, ["f3"] if reads_bytes else None, ["JSONData"]]


def test_ten_megabytes_of_array_fit_a_call_as_bytes(cloud: FakeCloud, executor: Executor) -> None:
    array = np.zeros(10_000_000, dtype=np.uint8)
    with pytest.raises(PayloadTooLarge):
        executor.submit(same, array)
    cloud.runtime = {"python_version": f"{THIS_PYTHON}.0", "serializers": sorted(STRATEGIES)}
    with cloud.client() as client, Executor(cloud.endpoint_id, client) as fresh:
        assert fresh.submit(same, array).result(WAIT_S).shape == array.shape


def test_the_runtime_is_cached_also_when_the_api_does_not_answer(cloud: FakeCloud) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET" and request.url.path.startswith("/v2/endpoints/"):
            asked.append(request.url.path)
            return httpx.Response(503)
        return cloud.transport.handle_request(request)

    with (
        Client("https://farcall.test", cloud.token, transport=httpx.MockTransport(answer)) as client,
        Executor(cloud.endpoint_id, client) as executor,
    ):
        assert executor.submit(plain, 1).result(WAIT_S) == 2
        assert len(asked) == 1
        assert [executor.submit(closing_over(n)).result(WAIT_S) for n in range(3)] == [0, 1, 2]
        assert len(asked) == 1


def test_requirements_of_text_beyond_ascii() -> None:
    packed = pack_call(("né" * 10,), {"where": b"bytes"}, function_name="f")
    assert packed.requirements == Requirements(frozenset({"11", "f0"}), None)
