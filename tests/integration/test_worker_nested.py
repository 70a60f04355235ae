"""Calls of running tasks, in a real worker; the test answers them as its manager does."""

from __future__ import annotations

import dataclasses
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farcall_common
import farcall_endpoint
from farcall_common.errors import ErrorRecord
from farcall_common.payload import Serializer, describe_exception, pack_exception
from farcall_common.payload.functions import Included
from farcall_common.payload.serializer import BINARY_DATA
from farcall_common.task_options import Callee, TaskOptions
from farcall_endpoint.contracts.manager_worker import (
    Call,
    CallEnded,
    CallOrder,
    Calls,
    Done,
    DropCalls,
    Sync,
    Synced,
    Waits,
)
from farcall_endpoint.host.shared_memory import Body, Frame, MemoryFile, SharedBytes, bytes_of, cut
from tests.support.worker import WorkerUnderTest, values_of, worker_under_test
from tests.waiting import WAIT_S, wait_until

EDGE = CallOrder(is_edge=True)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerUnderTest]:
    with worker_under_test(tmp_path) as started:
        yield started


@dataclasses.dataclass
class Made:
    """A call that the worker made."""

    call: Call
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Manager:
    """What the test plays: it learns functions, and answers calls."""

    def __init__(self, worker: WorkerUnderTest) -> None:
        self.worker = worker
        self.functions: dict[str, Any] = {}
        self.waits: list[bool] = []
        self.packets = 0

    def take(self, packet: Calls, body: Body) -> list[Made]:
        self.packets += 1
        parts = cut(body, [size for _, size in packet.functions] + [call.payload_bytes for call in packet.calls])
        for (function_hash, _), code in zip(packet.functions, parts, strict=False):
            assert function_hash not in self.functions
            self.functions[function_hash] = Serializer().unpack_function(bytes(bytes_of(code)))
        unpacked = [Serializer().unpack_call(bytes_of(part)) for part in parts[len(packet.functions) :]]
        return [Made(call, *arguments) for call, arguments in zip(packet.calls, unpacked, strict=True)]

    def calls(self) -> list[Made]:
        """The next calls, after what the worker says about waiting."""
        while True:
            packet, body = self.worker.receive()
            if isinstance(packet, Calls):
                return self.take(packet, body)
            assert isinstance(packet, Waits), packet
            self.waits.append(not packet.over)

    def answer(self, made: Made) -> None:
        """Make a call."""
        try:
            value = self.functions[made.call.function_hash](*made.args, **made.kwargs)
        except Exception as error:  # noqa: BLE001 - as a worker does
            record = dataclasses.replace(describe_exception(error), exception_data=pack_exception(error), attempt=1)
            self.worker.send(CallEnded(made.call.number, record.to_json()))
        else:
            self.end(made, value)

    def end(self, made: Made, value: object) -> None:
        self.worker.send(CallEnded(made.call.number), [edge(value)])

    def serve(self) -> Any:
        """Answer all calls until the task has ended; its value."""
        while True:
            packet, body = self.worker.receive()
            if isinstance(packet, Calls):
                for made in self.take(packet, body):
                    self.answer(made)
            elif isinstance(packet, Waits):
                self.waits.append(not packet.over)
            else:
                assert isinstance(packet, Done), packet
                assert packet.error is None, packet.error
                return values_of(packet, body)[0]


def edge(value: object) -> Frame:
    buffer = b"".join(Serializer().pieces(value, strategies=BINARY_DATA))
    return SharedBytes(MemoryFile.of([buffer]), 0, len(buffer)) if len(buffer) > 64 * 1024 else buffer


def test_a_call_goes_to_the_manager_and_its_value_comes_back(worker: WorkerUnderTest) -> None:
    manager = Manager(worker)

    def add(a: int, b: int) -> int:
        return a + b

    def driver() -> Any:
        from farcall_common.running import current

        task = current()
        return [task.task_id, task.attempt, task.submit(add, 1, b=2).result(), task.call(add, 3, 4)]

    for round_number in range(2):
        worker.order(driver, call=EDGE, task_id="t/5")
        packet, body = worker.expect(Calls)
        assert packet.task_id == "t/5"
        [made] = manager.take(packet, body)
        assert len(packet.functions) == (1 if round_number == 0 else 0)  # sent once in the life of a worker
        assert (made.call.name, made.call.options, made.args, made.kwargs) == ("add", None, (1,), {"b": 2})
        assert worker.expect(Waits)[0] == Waits("t/5")
        manager.answer(made)
        assert worker.expect(Waits)[0] == Waits("t/5", over=True)
        assert manager.serve() == ["t/5", 1, 3, 7]


def test_what_does_not_block_does_not_wait(worker: WorkerUnderTest) -> None:
    def driver() -> Any:
        import time

        from farcall_common.running import current

        futures = [current().submit(abs, -n) for n in range(3)]
        while not all(future.done() for future in futures):
            time.sleep(0.001)
        return [future.result() for future in futures]

    manager = Manager(worker)
    worker.order(driver, call=EDGE)
    assert manager.serve() == [0, 1, 2]
    assert manager.waits == []


def test_a_map_gives_values_in_order_and_sends_calls_together(worker: WorkerUnderTest) -> None:
    def driver() -> Any:
        from farcall_common.running import current

        return list(current().map(pow, range(2000), [2] * 3000))

    manager = Manager(worker)
    worker.order(driver, call=EDGE)
    open_calls: list[Made] = []
    most = taken = 0
    while taken < 2000:
        made = manager.calls()
        taken += len(made)
        open_calls += made
        most = max(most, len(open_calls))
        if taken >= 960:  # answered out of order
            for each in reversed(open_calls):
                manager.answer(each)
            open_calls.clear()
    assert manager.serve() == [n**2 for n in range(2000)]
    assert most <= 1000
    assert manager.packets < 50


def test_a_map_that_is_closed_drops_its_calls(worker: WorkerUnderTest) -> None:
    def driver() -> Any:
        from farcall_common.running import current

        values: Any = current().map(abs, range(-3, 0))
        first = next(values)
        values.close()
        return first

    manager = Manager(worker)
    worker.order(driver, call=EDGE)
    first, *others = manager.calls()
    manager.answer(first)
    dropped: list[int] = []
    while not isinstance((received := worker.receive())[0], Done):
        packet = received[0]
        assert isinstance(packet, Waits | DropCalls)
        dropped += packet.numbers if isinstance(packet, DropCalls) else ()
    assert dropped == [each.call.number for each in others]
    assert isinstance(received[0], Done)
    assert values_of(*received) == [3]  # type: ignore[arg-type]  # as the loop has found


def test_an_exception_of_a_call_is_raised_as_the_sdk_raises_it(worker: WorkerUnderTest) -> None:
    def refuse() -> None:
        raise KeyError("no such key")

    def driver() -> Any:
        from farcall_common.errors import TaskFailed
        from farcall_common.running import current

        try:
            current().call(refuse)
        except KeyError as error:
            notes = "".join(getattr(error, "__notes__", ()))
            return [isinstance(error, TaskFailed), type(error.__cause__).__name__, "in refuse" in notes]

    manager = Manager(worker)
    worker.order(driver, call=EDGE)
    assert manager.serve() == [True, "KeyError", True]


@pytest.mark.parametrize(
    ("code", "name"),
    [("WORKER_DIED", "TaskFailed"), ("TASK_CANCELLED", "TaskCancelled"), ("TASK_LOST", "TaskLost")],
)
def test_calls_that_end_otherwise(worker: WorkerUnderTest, code: str, name: str) -> None:
    def driver() -> Any:
        from farcall_common.running import current

        error = current().submit(abs, 1).exception()
        return [type(error).__name__, str(error)]

    manager = Manager(worker)
    worker.order(driver, call=EDGE)
    [made] = manager.calls()
    worker.channel.send(CallEnded(made.call.number, ErrorRecord(code, "It ended.").to_json()))
    kind, text = manager.serve()
    assert kind == name
    assert "It ended." in text


def test_a_value_that_cannot_be_read_fails_its_future_only(worker: WorkerUnderTest) -> None:
    def driver() -> Any:
        from farcall_common.running import current

        bad, good = current().submit(abs, 1), current().submit(abs, -2)
        return [str(bad.exception()), good.result()]

    manager = Manager(worker)
    worker.order(driver, call=EDGE)
    [made] = manager.calls()
    worker.channel.send(CallEnded(made.call.number), [b"f0\nnot base64"])
    text, value = manager.serve()
    assert "Cannot be read here" in text
    assert value == 2


def test_threads_of_a_task_make_calls(worker: WorkerUnderTest) -> None:
    def driver() -> Any:
        import concurrent.futures

        from farcall_common.running import current

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda n: current().call(abs, -n), range(50)))

    manager = Manager(worker)
    worker.order(driver, call=EDGE)
    assert manager.serve() == list(range(50))
    assert manager.waits[:1] == [True]
    assert manager.waits == [number % 2 == 0 for number in range(len(manager.waits))]  # in turn: it waits, it does not


def test_a_task_with_asyncio_waits_while_calls_have_callbacks(worker: WorkerUnderTest) -> None:
    def driver() -> Any:
        import asyncio

        from farcall_common.running import current

        async def both() -> Any:
            task = current()
            return await asyncio.gather(*[asyncio.wrap_future(task.submit(abs, -n)) for n in (1, 2)])

        return asyncio.run(both())

    manager = Manager(worker)
    worker.order(driver, call=EDGE)
    first, second = manager.calls()[0], manager.calls()[0]
    if not manager.waits:
        assert worker.expect(Waits)[0] == Waits("t")
    manager.answer(second)
    manager.answer(first)
    assert manager.serve() == [1, 2]
    assert manager.waits[-1:] == [False]


def test_waiting_for_several_futures_is_waiting(worker: WorkerUnderTest) -> None:
    def driver() -> Any:
        import concurrent.futures

        from farcall_common.running import current

        futures = [current().submit(abs, -n) for n in (1, 2)]
        completed = [future.result() for future in concurrent.futures.as_completed(futures)]
        more = [current().submit(abs, -n) for n in (3, 4)]
        done, left = concurrent.futures.wait(more, return_when="FIRST_COMPLETED")
        return [completed, [future.result() for future in done], len(left)]

    manager = Manager(worker)
    worker.order(driver, call=EDGE)
    first, second = manager.calls()[0], manager.calls()[0]
    assert worker.expect(Waits)[0] == Waits("t")
    manager.answer(second)
    assert worker.expect(Waits)[0] == Waits("t", over=True)
    assert worker.expect(Waits)[0] == Waits("t")
    manager.answer(first)
    assert worker.expect(Waits)[0] == Waits("t", over=True)
    _, fourth = manager.calls()[0], manager.calls()[0]
    assert worker.expect(Waits)[0] == Waits("t")
    manager.answer(fourth)
    assert manager.serve() == [[2, 1], [4], 1]


def test_orders_are_kept_and_a_sync_is_answered_while_a_task_waits(worker: WorkerUnderTest) -> None:
    def driver() -> Any:
        from farcall_common.running import current

        return current().call(abs, -1)

    manager = Manager(worker)
    worker.order(driver, call=EDGE)
    [made] = manager.calls()
    worker.order(abs, -5, call=EDGE, task_id="revoked")
    assert worker.channel.revoke() == 1
    worker.channel.send(Sync())
    while isinstance((packet := worker.receive()[0]), Waits):
        pass
    assert isinstance(packet, Synced)
    worker.order(abs, -6, call=EDGE, task_id="kept")  # its claim is not for the one before
    manager.answer(made)
    assert manager.serve() == 1
    done, body = worker.expect(Done)
    assert (done.task_id, values_of(done, body)) == ("kept", [6])


def test_what_is_behind_a_driver_in_its_packet_is_not_started_after_a_sync(worker: WorkerUnderTest) -> None:
    def driver() -> Any:
        from farcall_common.running import current

        return current().call(abs, -1)

    manager = Manager(worker)
    worker.order(driver, call=EDGE, also=["second", "third"])
    [made] = manager.calls()
    assert worker.channel.revoke() == 2
    worker.channel.send(Sync())
    while isinstance((packet := worker.receive()[0]), Waits):
        pass
    assert isinstance(packet, Synced)
    worker.order(abs, -6, call=EDGE, task_id="later")
    manager.answer(made)
    assert manager.serve() == 1
    assert worker.expect(Done)[0].task_id == "later"


def test_calls_that_a_task_forgets_end_with_it(worker: WorkerUnderTest) -> None:
    def driver() -> Any:
        import sys
        import threading

        from farcall_common.running import current

        task = current()
        sys.left = [task, task.submit(abs, 1)]  # type: ignore[attr-defined]
        threading.Thread(target=lambda: sys.left.append(sys.left[1].exception), daemon=True).start()  # type: ignore[attr-defined]
        return "forgets"

    def afterwards() -> Any:
        import sys

        task, future, *_ = sys.left  # type: ignore[attr-defined]
        try:
            task.submit(abs, 2)
        except Exception as error:  # noqa: BLE001
            return [future.cancelled(), str(error)]

    manager = Manager(worker)
    worker.order(driver, call=EDGE)
    [made] = manager.calls()
    assert manager.serve() == "forgets"
    manager.answer(made)  # too late
    worker.order(afterwards, call=EDGE)
    was_cancelled, text = manager.serve()
    assert was_cancelled
    assert "The task has ended" in text


def test_current_is_for_the_process_of_the_task(worker: WorkerUnderTest) -> None:
    def driver() -> Any:
        import os
        import subprocess
        import sys

        from farcall_common.running import current

        task = current()
        future = task.submit(abs, 1)

        def refused(step: Any) -> str:
            try:
                step()
            except Exception as error:  # noqa: BLE001
                return str(error)
            return "not refused"

        reading, writing = os.pipe()
        if os.fork() == 0:
            refusals = [refused(step) for step in (current, lambda: task.submit(abs, 1), future.result)]
            future.cancel()
            os.write(writing, "|".join(refusals).encode())
            os._exit(0)
        os.wait()
        future.result()
        program = "from farcall_common.running import current; current()"
        other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        return [*os.read(reading, 10_000).decode().split("|"), other.stderr]

    manager = Manager(worker)
    worker.order(driver, call=EDGE)
    [made] = manager.calls()
    assert worker.expect(Waits)[0] == Waits("t")  # the only one: none of the other process
    manager.answer(made)
    refusals = manager.serve()
    assert manager.waits == [False]
    assert len(refusals) == 4
    assert all("the task has started this one" in text for text in refusals)


def test_a_task_has_at_most_so_many_calls_under_way(worker: WorkerUnderTest) -> None:
    def driver() -> Any:
        from farcall_common.running import current

        task = current()
        return sum(future.result() for future in [task.submit(abs, -1) for _ in range(1002)])

    manager = Manager(worker)
    worker.order(driver, call=EDGE)
    made = [manager.calls()[0] for _ in range(1000)]
    assert worker.expect(Waits)[0] == Waits("t")  # in submit
    manager.answer(made[0])
    assert worker.expect(Waits)[0] == Waits("t", over=True)
    made += manager.calls()
    for each in made[1:]:
        manager.answer(each)
    assert manager.serve() == 1002


def test_callees_are_called_by_id_or_hash(worker: WorkerUnderTest) -> None:
    def driver() -> Any:
        from farcall_common.running import current

        futures: list[Any] = [current().submit(name, 1) for name in ("some-id@2", "h" * 64)]
        try:
            current().submit("another", 1)
        except Exception as error:  # noqa: BLE001
            return [*[future.result() for future in futures], str(error)]

    manager = Manager(worker)
    worker.order(driver, call=EDGE, options=TaskOptions(callees=(Callee("some-id@2", "h" * 64),)))
    for _ in range(2):
        [made] = manager.calls()
        assert made.call.function_hash == "h" * 64
        manager.end(made, "value")
    *values, text = manager.serve()
    assert values == ["value", "value"]
    assert "'another'" in text
    assert manager.functions == {}


def test_calls_have_options(worker: WorkerUnderTest) -> None:
    def driver() -> Any:
        from farcall_common.running import current

        refusals = []
        wrongs: list[Any] = [{"walltimes": 1}, {"walltime_s": -1}]
        for wrong in wrongs:
            try:
                current().options(**wrong)
            except (TypeError, ValueError) as error:
                refusals.append(str(error))
        limited = current().options(walltime_s=5, idempotent=False).options(retries=2)
        return [limited.call(abs, 1), *refusals]

    manager = Manager(worker)
    worker.order(driver, call=EDGE)
    [made] = manager.calls()
    assert made.call.options == TaskOptions(walltime_s=5, idempotent=False, retries=2)
    manager.answer(made)
    value, unknown, invalid = manager.serve()
    assert value == 1
    assert "Did you mean 'walltime_s'?" in unknown
    assert "walltime_s" in invalid


def test_a_call_can_be_cancelled(worker: WorkerUnderTest) -> None:
    def driver() -> Any:
        from farcall_common.running import current

        future = current().submit(abs, 1)
        return [future.cancel(), future.cancel(), future.cancelled(), future.done()]

    manager = Manager(worker)
    worker.order(driver, call=EDGE)
    [made] = manager.calls()
    assert worker.expect(DropCalls)[0] == DropCalls("t", (made.call.number,))
    manager.answer(made)
    assert manager.serve() == [True, True, True, True]


def test_a_callback_may_make_calls_and_must_not_wait(worker: WorkerUnderTest) -> None:
    def driver() -> Any:
        import queue

        from farcall_common.running import current

        seen: Any = queue.Queue()

        def callback(future: Any) -> None:
            other = current().submit(abs, -2)
            try:
                other.result()
            except Exception as error:  # noqa: BLE001
                seen.put((other, str(error)))

        current().submit(abs, -1).add_done_callback(callback)
        other, text = seen.get()
        return [other.result(), text]

    manager = Manager(worker)
    worker.order(driver, call=EDGE)
    [made] = manager.calls()
    assert worker.expect(Waits)[0] == Waits("t")  # so it has its callback
    manager.answer(made)
    value, text = manager.serve()
    assert value == 2
    assert "waits for another call" in text


def test_large_arguments_and_values_are_not_copied_by_their_readers(worker: WorkerUnderTest) -> None:
    def double(array: Any) -> Any:
        return array * 2

    def driver() -> Any:
        import numpy

        from farcall_common.running import current

        array = current().call(double, numpy.ones(100_000))
        return [float(array.sum()), bool(array.flags.owndata)]

    manager = Manager(worker)
    worker.order(driver, call=EDGE)
    packet, body = worker.expect(Calls)
    parts = cut(body, [size for _, size in packet.functions] + [call.payload_bytes for call in packet.calls])
    assert isinstance(parts[1], SharedBytes)
    assert parts[1].start == 0
    [made] = manager.take(packet, body)
    assert isinstance(made.args[0], np.ndarray)
    assert not made.args[0].flags.owndata
    manager.answer(made)
    assert manager.serve() == [200_000.0, False]


def test_modules_that_travel_with_a_task_travel_on_with_its_calls(worker: WorkerUnderTest) -> None:
    def driver() -> Any:
        import travelling  # type: ignore[import-not-found]

        from farcall_common.running import current

        point = current().call(travelling.shifted, travelling.Point(1))
        return [type(point) is travelling.Point, point.x]

    text = """
class Point:
    def __init__(self, x):
        self.x = x

def shifted(point):
    return Point(point.x + 1)
"""
    included = Included({"travelling": (False, text)}, "d" * 32)
    worker.order(driver, call=EDGE, included=included)
    packet, body = worker.expect(Calls)
    [code, payload] = cut(body, [size for _, size in packet.functions] + [call.payload_bytes for call in packet.calls])
    called: Any = Serializer().unpack_function(bytes(bytes_of(code)))
    assert packet.calls[0].name == "shifted"
    with called.farcall_modules:
        args, _ = Serializer().unpack_call(bytes_of(payload))
        value = edge(called.farcall_function(*args))
    worker.send(CallEnded(packet.calls[0].number), [value])
    assert Manager(worker).serve() == [True, 2]


def test_without_its_manager_a_task_loses_its_calls(tmp_path: Path) -> None:
    def driver() -> None:
        import pathlib

        from farcall_common.running import current

        pathlib.Path("lost").write_text(repr(current().submit(abs, 1).exception()))

    with worker_under_test(tmp_path) as worker:
        worker.order(driver, call=EDGE)
        Manager(worker).calls()
    assert "TaskLost" in (tmp_path / "home" / "lost").read_text()


def test_a_first_call_without_the_manager_is_lost(tmp_path: Path) -> None:
    def driver() -> None:
        import pathlib
        import time

        from farcall_common.running import current

        task = current()
        pathlib.Path("begun").touch()
        while not pathlib.Path("closed").exists():
            time.sleep(0.01)
        try:
            task.submit(abs, 1)
        except Exception as error:  # noqa: BLE001
            pathlib.Path("lost").write_text(repr(error))

    with worker_under_test(tmp_path) as worker:
        worker.order(driver, call=EDGE)
        wait_until((worker.directory / "begun").exists, "the driver")
        worker.channel.close()
        (worker.directory / "closed").touch()
    assert "TaskLost" in (tmp_path / "home" / "lost").read_text()


def test_a_worker_that_has_missed_a_packet_during_a_task_ends_after_it(tmp_path: Path) -> None:
    """There was no room for its descriptors; it may have had orders."""

    def driver() -> Any:
        import os
        import resource

        from farcall_common.running import current

        future = current().submit(abs, 1)
        free = os.dup(0)
        os.close(free)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        text = repr(future.exception())
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        return text

    with worker_under_test(tmp_path) as worker:
        manager = Manager(worker)
        worker.order(driver, call=EDGE)
        [made] = manager.calls()
        assert worker.expect(Waits)[0] == Waits("t")
        manager.end(made, np.zeros(100_000))
        text = manager.serve()
        assert "TaskLost" in text
        assert "no room for the descriptors of a packet" in text
        assert worker.process.wait(WAIT_S) == 1


def test_a_thread_that_asks_for_its_first_call_while_its_task_ends(worker: WorkerUnderTest) -> None:
    def driver() -> None:
        import sys
        import threading
        import time
        from pathlib import Path

        from farcall_common.running import current

        class Slow:
            """The first calls of a worker import a module."""

            def find_spec(self, name: str, *_: object) -> None:
                if name == "farcall_endpoint.worker.nested":
                    importing.set()
                    time.sleep(0.5)

        def submit() -> None:
            try:
                current().submit(abs, 1).result()
            except BaseException as error:  # noqa: BLE001
                Path("ended").write_text(repr(error))

        importing = threading.Event()
        sys.meta_path.insert(0, Slow())
        threading.Thread(target=submit, daemon=True).start()
        importing.wait()

    worker.order(driver, call=EDGE)
    while not isinstance(worker.receive()[0], Done):
        pass
    wait_until((worker.directory / "ended").exists, "the end of the thread")
    for number in range(20):  # nothing else receives packets
        assert worker.values(abs, -number, call=EDGE) == [number]
    assert re.search("CancelledError|The task has ended", (worker.directory / "ended").read_text())


def test_where_the_sdk_is_not_installed_current_is_importable(tmp_path: Path) -> None:
    def driver() -> Any:
        import farcall
        from farcall import current  # type: ignore[attr-defined, unused-ignore]

        @farcall.function
        def decorated() -> int:
            return 1

        try:
            farcall.Executor()
        except ModuleNotFoundError as error:
            missing = str(error)
        return [current().call(abs, -decorated()), getattr(farcall, "__file__", None), missing]

    places = [str(Path(each.__file__).parent.parent) for each in (farcall_common, farcall_endpoint) if each.__file__]
    variables = {"PYTHONPATH": ":".join([*places, sysconfig.get_path("purelib")])}
    without_sdk = tmp_path / "python"
    without_sdk.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # no .pth files: packages that are linked
    without_sdk.chmod(0o755)
    with worker_under_test(tmp_path, variables=variables, python=str(without_sdk)) as worker:
        worker.order(driver, call=EDGE)
        assert Manager(worker).serve() == [1, None, "the package farcall is not installed on this endpoint"]
