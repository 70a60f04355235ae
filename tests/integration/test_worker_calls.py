"""Calls with inputs, and their values, in a real worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farcall_common.errors import ErrorRecord
from farcall_common.payload import Serializer, parse_allowed
from farcall_common.payload.native import NATIVE, dump_call, load_native
from farcall_common.payload.serializer import BINARY_DATA
from farcall_common.task_options import TaskOptions
from farcall_endpoint.contracts.bodies import ranges_of
from farcall_endpoint.contracts.manager_worker import CallOrder, Done, InputOrder
from farcall_endpoint.host.shared_memory import Frame, MemoryFile, SharedBytes, bytes_of, cut
from farcall_endpoint.worker.settings import WorkerSettings
from tests.support.worker import WorkerUnderTest, value_of, worker_under_test

EDGE = CallOrder(is_edge=True)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerUnderTest]:
    with worker_under_test(tmp_path_factory.mktemp("worker")) as started:
        yield started


def edge(value: object) -> Frame:
    """A value as a worker writes it for other calls."""
    buffer = b"".join(Serializer().pieces(value, strategies=BINARY_DATA))
    return SharedBytes(MemoryFile.of([buffer]), 0, len(buffer)) if len(buffer) > 64 * 1024 else buffer


def given(*inputs: tuple[tuple[int | str, ...], object]) -> dict[str, Any]:
    """Order of a call with these whole values."""
    frames = [edge(value) for _, value in inputs]
    orders = tuple(InputOrder(path, (len(frame),)) for (path, _), frame in zip(inputs, frames, strict=True))
    pairs = [(order, [frame]) for order, frame in zip(orders, frames, strict=True)]
    return {"call": CallOrder(orders, is_edge=True), "inputs": pairs}


def error_of(done: Done) -> ErrorRecord:
    assert done.error is not None
    return ErrorRecord.from_json(done.error)


def told(*args: object, **kwargs: object) -> list[object]:
    return [list(args), kwargs]


def test_inputs_are_put_into_the_arguments(worker: WorkerUnderTest) -> None:
    inputs = given((("x",), {"a": 1}), ((1, 0), "first"), ((0,), (1, 2)))
    assert worker.values(told, None, [None, "second"], kwargs={"x": None, "y": 5}, **inputs) == [
        [[(1, 2), ["first", "second"]], {"x": {"a": 1}, "y": 5}]
    ]


def test_without_a_function_inputs_are_collected(worker: WorkerUnderTest) -> None:
    frames = [edge(value) for value in (1, 2, 3)]
    several = InputOrder((2,), tuple(map(len, frames[1:])), is_list=True)
    orders = (InputOrder((0,), (len(frames[0]),)), InputOrder((1,), missing=True), several)
    inputs = [(orders[0], frames[:1]), (several, frames[1:])]
    assert worker.values(None, call=CallOrder(orders, is_edge=True), inputs=inputs) == [[1, [2, 3]]]
    done = worker.run(None, call=CallOrder(orders), inputs=inputs, options=TaskOptions(result_serializers=("11",)))
    assert (done.error, done.parts) == (None, ())


def test_a_large_input_is_read_in_place_and_written_to_for_itself(worker: WorkerUnderTest) -> None:
    def change(array: Any) -> Any:
        owner = array
        while not isinstance(owner, memoryview) and getattr(owner, "base", None) is not None:
            owner = owner.base
        before = [array[0], array.flags.owndata, type(owner).__name__]
        array += 1  # the mapping is private
        return [*before, array[0], array[-1]]

    frame = edge(np.zeros(100_000))
    order = InputOrder((0,), (len(frame),))
    arguments: dict[str, Any] = {"call": CallOrder((order,), is_edge=True), "inputs": [(order, [frame])]}
    for _ in range(2):
        [[first, owns, owner, now, last]] = worker.values(change, None, **arguments)
        assert (first, owns, now, last) == (0.0, False, 1.0, 1.0)
        assert owner in ("memoryview", "mmap")  # and not bytearray, which would be a copy


def test_a_value_for_other_calls_has_one_buffer(worker: WorkerUnderTest) -> None:
    done_and_value = worker.values(lambda: (1, {2}), call=EDGE)
    assert done_and_value == [(1, {2})]
    done = worker.run(lambda: None, call=EDGE)
    assert len(done.parts) == 1


def test_a_spread_value_has_a_buffer_for_each_element(worker: WorkerUnderTest) -> None:
    call = CallOrder(is_edge=True, spread=True)
    assert worker.values(lambda: [1, "two", {"three": (3,)}], call=call) == [1, "two", {"three": (3,)}]
    assert worker.values(lambda: (n * n for n in range(4)), call=call) == [0, 1, 4, 9]
    worker.order(list, call=call)
    done, body = worker.expect(Done)
    assert (done.error, done.parts, body) == (None, (), b"")


def test_large_elements_are_aligned_in_one_file_and_readable_in_place(worker: WorkerUnderTest) -> None:
    def split() -> list[Any]:
        import numpy

        return ["small", *[numpy.full(10_001, n) for n in range(70)], "last"]

    worker.order(split, call=CallOrder(is_edge=True, spread=True))
    done, body = worker.expect(Done)
    frames = cut(body, done.parts)
    assert len(ranges_of(body)) == 1
    large = [frame for frame in frames if len(frame) > 64 * 1024]
    assert len(large) == 70
    assert all(isinstance(frame, SharedBytes) and frame.start % 64 == 0 for frame in large)
    values = [value_of(frame) for frame in frames]
    assert [values[0], values[-1]] == ["small", "last"]
    assert [value[0] for value in values[1:-1]] == list(range(70))
    assert not any(value.flags.owndata for value in values[1:-1])
    # They go on as they are, one by one.
    order = InputOrder((0,), (len(frames[5]),))
    arguments: dict[str, Any] = {"call": CallOrder((order,), is_edge=True), "inputs": [(order, [frames[5]])]}
    assert worker.values(lambda array: int(array.sum()), None, **arguments) == [4 * 10_001]


def test_a_value_beyond_its_room_is_in_a_file_on_the_disk(worker: WorkerUnderTest) -> None:
    def many() -> Any:
        import numpy

        return [numpy.arange(50_000) + n for n in range(3)]

    for spread in (False, True):
        worker.order(many, call=CallOrder(is_edge=True, spread=spread, room_bytes=100_000))
        done, body = worker.expect(Done)
        assert done.error is None
        frames = cut(body, done.parts)
        [file] = ranges_of(body)
        assert not file.memory.is_sealed
        where = os.fstat(file.memory.descriptor)
        assert (where.st_dev, where.st_nlink) == (worker.directory.stat().st_dev, 0)
        orders = (InputOrder((0,), done.parts, is_list=spread),)
        inputs = [(orders[0], frames)]
        total = worker.values(
            lambda arrays: [int(array.sum()) for array in arrays],
            None,
            call=CallOrder(orders, is_edge=True),
            inputs=inputs,
        )
        assert total == [[sum(range(50_000)) + 50_000 * n for n in range(3)]]


def test_a_value_that_is_too_large_is_an_error(worker: WorkerUnderTest) -> None:
    done = worker.run(lambda: b"x" * 200_000, call=CallOrder(is_edge=True, most_bytes=100_000))
    assert error_of(done).code == "VALUE_TOO_LARGE"
    assert "100000" in error_of(done).message
    assert worker.values(lambda: "still here", call=EDGE) == ["still here"]


def test_a_value_that_cannot_be_stored_is_an_error(worker: WorkerUnderTest) -> None:
    def fill() -> bytes:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, resource.RLIM_INFINITY))
        return b"x" * 200_000

    def restore() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    done = worker.run(fill, call=CallOrder(is_edge=True, room_bytes=1_000))
    assert error_of(done).code == "VALUE_NOT_STORED"
    assert error_of(done).retryable
    worker.run(restore)


def test_elements_that_do_not_exist_or_cannot_be_sent(worker: WorkerUnderTest) -> None:
    def split() -> int:
        return 7

    def locks() -> list[Any]:
        import socket

        return [1, socket.socket()]

    def breaks() -> Iterator[int]:
        yield 1
        raise OSError("the file ended")

    call = CallOrder(is_edge=True, spread=True)
    errors = [worker.run(each, call=call, options=TaskOptions(retries=1)) for each in (split, locks, breaks)]
    codes = [error_of(each).code for each in errors]
    messages = [error_of(each).message for each in errors]
    assert codes == ["TASK_FAILED", "RESULT_NOT_SERIALIZABLE", "TASK_FAILED"]
    assert "split returned an int, which has no elements" in messages[0]
    assert "Element 1: The value (of type socket) cannot be serialised" in messages[1]
    assert messages[2] == "OSError: the file ended"
    assert "raise OSError" in (error_of(errors[2]).traceback or "")
    assert errors[2].is_retried


def test_what_a_call_raised_goes_where_its_value_would_go(worker: WorkerUnderTest) -> None:
    def refuse() -> None:
        raise KeyError("no such key")

    data = error_of(worker.run(refuse, call=EDGE)).exception_data
    assert data is not None
    assert repr(Serializer().deserialize(data.encode())) == "KeyError('no such key')"
    assert error_of(worker.run(refuse)).exception_data is None


def test_an_input_of_another_python_is_a_clear_error(worker: WorkerUnderTest) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("class Point:\n    def __init__(self): self.x = 1", namespace)
    buffer = b"".join(Serializer().pieces(namespace["Point"](), strategies=BINARY_DATA))
    assert b'"python": "3.' in buffer
    start = buffer.index(b'"python": "') + len(b'"python": "')
    foreign = buffer[:start] + b"3.99" + buffer[buffer.index(b'"', start) :]
    order = InputOrder((0,), (len(foreign),))
    done = worker.run(told, None, call=CallOrder((order,), is_edge=True), inputs=[(order, [foreign])])
    assert error_of(done).code == "DESERIALIZATION_FAILED"
    assert (
        "The value for argument 1 cannot be read: This is byte code of Python 3.99 (the class Point)"
        in error_of(done).message
    )
    assert "Use Python 3.99 on both sides" in error_of(done).hint


def test_inputs_that_are_damaged_or_have_no_place(worker: WorkerUnderTest) -> None:
    for frame, path, text in ((b"zz\nx", (0,), "not a known strategy"), (b"11\n1", (4,), "has no argument 5")):
        order = InputOrder(path, (len(frame),))
        done = worker.run(told, None, call=CallOrder((order,)), inputs=[(order, [frame])])
        assert text in error_of(done).message


def test_output_limits_and_variables_are_those_of_tasks(worker: WorkerUnderTest) -> None:
    def prints(value: int) -> str:
        import os

        print("line", value)
        return os.environ["FARCALL_TASK_ID"]

    worker.order(prints, None, **given(((0,), 5)), task_id="t/1.2")
    done, body = worker.expect(Done)
    assert done.printed is not None
    assert value_of(cut(body, done.parts)[0]) == "t/1.2"
    assert bytes(bytes_of(cut(body, [7], sum(done.parts))[0])) == b"line 5\n"
    done = worker.run(prints, None, **given(((0,), "x" * 100)), options=TaskOptions(max_output_bytes=50))
    assert error_of(done).code == "OUTPUT_EXCEEDED"


def test_where_arguments_must_be_data_values_of_other_calls_may_be_pickles(tmp_path: Path) -> None:
    """Workers write them, from what functions of the endpoint's list return."""
    allowed = tuple(parse_allowed(["*Code", "JSONData"]))
    pickled = Serializer().pack_call(((1, 2),), strategies=BINARY_DATA)
    for settings, data_only in (
        (WorkerSettings(data_only=True), False),
        (WorkerSettings(allowed_serializers=allowed), True),
    ):
        with worker_under_test(tmp_path, settings) as worker:
            assert worker.values(told, None, **given(((0,), {(1, 2)})), data_only=data_only) == [[[{(1, 2)}], {}]]
            done = worker.run(told, payload=pickled, data_only=data_only)
            assert "may not be read here" in error_of(done).message
            nested = CallOrder(is_edge=True, is_nested=True)
            assert worker.values(told, call=nested, payload=pickled, data_only=data_only) == [[[(1, 2)], {}]]


def test_an_engine_gets_its_own_form_of_the_last_value(tmp_path: Path) -> None:
    with worker_under_test(tmp_path, WorkerSettings(native=True)) as worker:
        inputs = given(((0,), {1}))
        payload, options = dump_call((None,), {}), TaskOptions(result_serializers=NATIVE)
        assert worker.values(told, payload=payload, options=options, **inputs) == [[[{1}], {}]]
        last = inputs | {"call": CallOrder(inputs["call"].inputs)}
        worker.order(told, payload=payload, options=options, **last)
        done, body = worker.expect(Done)
        assert done.parts == ()
        assert isinstance(body, bytes)
        assert load_native(body) == [[{1}], {}]
