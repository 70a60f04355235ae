"""Result stream over a CURVE socket: lost, resumed, missed and duplicate results; polling without a stream."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from farcall import Client, ComputeFuture, Executor, ResultRefused, TaskFailed
from farcall.testing import FakeCloud
from farcall_common.errors import ForwarderWaking
from farcall_common.errors import TaskFailed as RemoteFailure
from farcall_common.payload import PickleDataBase64, Serializer, describe_exception
from farcall_common.wire import (
    SILENT_PERIODS,
    BlobLocation,
    Goodbye,
    Heartbeat,
    OpenStream,
    Redirect,
    Refused,
    StreamOpened,
    StreamResult,
    Subscribe,
    TaskState,
)
from tests.integration.sdk_scripted_forwarder import ScriptedForwarder
from tests.waiting import WAIT_S, wait_until

serializer = Serializer()


class StreamingCloud:
    """A fake cloud whose endpoint never runs anything, with a stream, and an eye on what is polled.

    While ``asleep``, which each question for the stream makes one less, the forwarder is being woken.
    """

    def __init__(self, forwarder: ScriptedForwarder | None) -> None:
        self.cloud = FakeCloud(workers=0)
        self.way: dict[str, Any] | None = forwarder.connection if forwarder else None
        self.polls_allowed = threading.Event()
        self.polls_allowed.set()
        self.refusal = 503
        self.polls = 0
        self.refusals = 0
        self.asleep = 0
        self.client = Client("https://farcall.test", self.cloud.token, transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v3/stream" and self.asleep:
            self.asleep -= 1
            waking = ForwarderWaking("it sleeps", retry_after_s=0.0)
            return httpx.Response(503, content=msgspec.json.encode(waking.record.to_json()))
        if request.url.path == "/v3/stream" and self.way is not None:
            assert len(msgspec.json.decode(request.content)["public_key"]) == 40
            return httpx.Response(200, content=msgspec.json.encode(self.way))
        if request.url.path == "/v2/batch_status":
            self.polls += 1
            if not self.polls_allowed.is_set():
                self.refusals += 1
                return httpx.Response(self.refusal)
        return self.cloud.transport.handle_request(request)

    def executor(self) -> Executor:
        return Executor(self.cloud.endpoint_id, client=self.client)


def success(future: ComputeFuture[Any], frame: int | None = None, **fields: Any) -> StreamResult:
    return StreamResult(
        task_id=future.task_id,
        task_group_id=future.task_group_id,
        state=TaskState.SUCCESS,
        attempt=1,
        result=frame,
        timings={"started_at": 5.0, "ended_at": 7.0},
        details={"python_version": "3.12.1"},
        **fields,
    )


def failure(future: ComputeFuture[Any], state: TaskState = TaskState.FAILED, **fields: Any) -> StreamResult:
    return StreamResult(task_id=future.task_id, task_group_id=future.task_group_id, state=state, attempt=2, **fields)


@pytest.fixture
def forwarder() -> Iterator[ScriptedForwarder]:
    with ScriptedForwarder() as forwarder:
        yield forwarder


@pytest.fixture
def cloud(forwarder: ScriptedForwarder) -> Iterator[StreamingCloud]:
    cloud = StreamingCloud(forwarder)
    yield cloud
    cloud.client.close()


@pytest.fixture
def executor(cloud: StreamingCloud, forwarder: ScriptedForwarder) -> Iterator[Executor]:
    executor = cloud.executor()
    wait_until(executor._engine._stream.is_open, "the stream is open")
    yield executor
    executor.shutdown(cancel_futures=True)


def test_pushed_results_resolve_futures(executor: Executor, forwarder: ScriptedForwarder) -> None:
    futures = [executor.submit(pow, 2, n) for n in range(3)]
    forwarder.push([success(f, n) for n, f in enumerate(futures)], [serializer.serialize(2**n) for n in range(3)])
    assert [future.result(WAIT_S) for future in futures] == [1, 2, 4]
    assert futures[0].attempt == 1
    assert futures[0].details == {"python_version": "3.12.1"}
    assert futures[0].timings["ended_at"] - futures[0].timings["started_at"] == 2.0
    opening = forwarder.said(OpenStream)[0]
    assert isinstance(opening, OpenStream)
    assert opening.task_group_ids == (executor.task_group_id,)
    assert opening.ticket == "a-ticket"
    assert opening.cursor is None


def test_pushed_pickles_of_an_endpoint_of_others_are_not_read(
    cloud: StreamingCloud, executor: Executor, forwarder: ScriptedForwarder
) -> None:
    cloud.cloud.is_owned = False
    value, error, trusted = (executor.submit(pow, 2, n) for n in range(3))
    data = PickleDataBase64()
    pickled = data.prefix + data.dump((1, 2))
    record = RemoteFailure("no", record=describe_exception(ValueError("no"))).record.to_json()
    record["exception_data"] = pickled.decode()
    forwarder.push([success(value, 0), failure(error, error=record)], [pickled])
    with pytest.raises(ResultRefused, match=f"task {value.task_id} comes from endpoint {cloud.cloud.endpoint_id}"):
        value.result(WAIT_S)
    with pytest.raises(ValueError, match="no") as caught:
        error.result(WAIT_S)
    assert caught.value.__cause__ is None
    forwarder.push([success(trusted, 0)], [serializer.serialize([1])])
    assert trusted.result(WAIT_S) == [1]


def test_pushed_results_of_other_programs_are_polled(
    cloud: StreamingCloud, executor: Executor, forwarder: ScriptedForwarder
) -> None:
    client = cloud.cloud.client()
    batch = client.create_batch(executor.task_group_id)
    batch.add(client.register_function(abs), [-7])
    client.batch_run(cloud.cloud.endpoint_id, batch)
    cloud.polls_allowed.clear()
    [future] = executor.reload_tasks()
    own: ComputeFuture[Any] = executor.submit(abs, -1)
    forwarder.push([success(future, 0), success(own, 0)], [serializer.serialize("from nowhere")])
    assert own.result(WAIT_S) == "from nowhere"
    assert not future.done()
    cloud.cloud.run_waiting()
    cloud.polls_allowed.set()
    assert future.result(WAIT_S) == 7
    client.close()


def test_a_new_group_is_subscribed_when_it_is_used(executor: Executor, forwarder: ScriptedForwarder) -> None:
    executor.submit(pow, 2, 1)
    executor.task_group_id = other = "99999999-0000-4000-8000-000000000001"
    future = executor.submit(pow, 2, 2)
    forwarder.wait_for(lambda: bool(forwarder.said(Subscribe)))
    assert forwarder.said(Subscribe) == [Subscribe(task_group_ids=(other,))]
    forwarder.push([success(future, 0)], [serializer.serialize(4)])
    assert future.result(WAIT_S) == 4
    executor.submit(pow, 2, 3)
    forwarder.send(Redirect(reason="draining", retry_after_s=0.0))
    forwarder.wait_for(lambda: forwarder.streams_opened == 2)
    opening = forwarder.said(OpenStream)[1]
    assert isinstance(opening, OpenStream)
    assert opening.task_group_ids[1:] == (other,)
    assert len(forwarder.said(Subscribe)) == 1


def test_a_group_used_while_the_stream_opens_is_subscribed() -> None:
    with ScriptedForwarder(silent=True) as forwarder:
        cloud = StreamingCloud(forwarder)
        executor = cloud.executor()
        forwarder.wait_for(lambda: bool(forwarder.said(OpenStream)))
        executor.task_group_id = other = "99999999-0000-4000-8000-000000000002"
        future = executor.submit(pow, 2, 2)
        assert executor._engine.flush(WAIT_S)  # by now the stream has heard of the group
        forwarder.send(StreamOpened(session_id="s", protocol_version=1, heartbeat_s=30.0, cursor="0", resumed=False))
        forwarder.wait_for(lambda: forwarder.said(Subscribe) == [Subscribe(task_group_ids=(other,))])
        forwarder.push([success(future, 0)], [serializer.serialize(4)])
        assert future.result(WAIT_S) == 4
        executor.shutdown()
        cloud.client.close()


def test_a_pushed_failure_raises_with_the_remote_traceback(executor: Executor, forwarder: ScriptedForwarder) -> None:
    future = executor.submit(pow, 2, 3)
    record = RemoteFailure("ValueError: no").record.to_json() | {
        "exception_type": "ValueError",
        "traceback": "Traceback (most recent call last):\n  …\nValueError: no\n",
        "stderr_tail": "warming up\n",
        "attempt": 2,
        "endpoint_id": "e-1",
    }
    forwarder.push([failure(future, error=record)])
    with pytest.raises(TaskFailed, match="ValueError: no") as caught:
        future.result(WAIT_S)
    (note,) = caught.value.__notes__
    assert note.startswith("Remote traceback (endpoint e-1, attempt 2):\nTraceback (most recent call last):")
    assert note.endswith("Last stderr of the task:\nwarming up")
    assert future.attempt == 2


def test_a_task_cancelled_by_another_client_is_a_cancelled_future(
    executor: Executor, forwarder: ScriptedForwarder
) -> None:
    future = executor.submit(pow, 2, 3)
    forwarder.push([failure(future, TaskState.CANCELLED)])
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(WAIT_S)
    assert future.cancelled()
    assert concurrent.futures.wait([future], WAIT_S).done == {future}


def test_a_result_in_a_blob_is_fetched(executor: Executor, forwarder: ScriptedForwarder, cloud: StreamingCloud) -> None:
    future = executor.submit(str.upper, "x")
    data = serializer.serialize("x" * 100_000)
    sha256 = hashlib.sha256(data).hexdigest()
    cloud.cloud._blobs[f"owner/{sha256}"] = data
    blob = BlobLocation(
        blob_key=f"owner/{sha256}",
        size_bytes=len(data),
        sha256=sha256,
        url=f"https://blobs.farcall.test/owner/{sha256}",
    )
    forwarder.push([success(future, result_blob=blob)])
    assert future.result(WAIT_S) == "x" * 100_000


def test_a_repeated_result_counts_once(executor: Executor, forwarder: ScriptedForwarder) -> None:
    first, second = executor.submit(pow, 2, 3), executor.submit(pow, 2, 4)
    calls: list[object] = []
    first.add_done_callback(calls.append)
    forwarder.push([success(first, 0)], [serializer.serialize(8)])
    forwarder.push([success(first, 0), success(second, 1)], [serializer.serialize("wrong"), serializer.serialize(16)])
    assert second.result(WAIT_S) == 16
    assert first.result(WAIT_S) == 8
    assert calls == [first]


def test_a_stream_interrupted_within_a_batch_loses_nothing(cloud: StreamingCloud) -> None:
    with ScriptedForwarder() as first:
        cloud.way = first.connection
        executor = cloud.executor()
        futures = [executor.submit(pow, 2, n) for n in range(10)]
        first.wait_for(lambda: first.streams_opened == 1)
        first.push([success(f, n) for n, f in enumerate(futures[:4])], [serializer.serialize(n) for n in range(4)])
        assert [future.result(WAIT_S) for future in futures[:4]] == [0, 1, 2, 3]
        cloud.way = None  # until the forwarder is back, there is only polling
    cloud.cloud.start()
    try:
        assert [future.result(WAIT_S) for future in futures[4:]] == [2**n for n in range(4, 10)]
    finally:
        executor.shutdown()
        cloud.cloud.close()


def test_an_interrupted_stream_resumes_where_it_ended(cloud: StreamingCloud) -> None:
    with ScriptedForwarder() as second, contextlib.ExitStack() as stack:
        with ScriptedForwarder() as first:
            cloud.way = first.connection
            executor = stack.enter_context(cloud.executor())
            first.wait_for(lambda: first.streams_opened == 1)
            futures = [executor.submit(pow, 2, n) for n in range(2)]
            first.push([success(futures[0], 0)], [serializer.serialize(1)], cursor="cursor-7")
            assert futures[0].result(WAIT_S) == 1
            cloud.way = second.connection
        second.wait_for(lambda: second.streams_opened == 1)
        opening = second.said(OpenStream)[0]
        assert isinstance(opening, OpenStream)
        assert opening.cursor == "cursor-7"
        second.push([success(futures[1], 0)], [serializer.serialize(2)])
        assert futures[1].result(WAIT_S) == 2


def test_a_redirect_is_followed_after_a_goodbye(
    executor: Executor, forwarder: ScriptedForwarder, cloud: StreamingCloud
) -> None:
    future = executor.submit(pow, 2, 3)
    other = executor.submit(pow, 2, 4)
    forwarder.push([success(other, 0)], [serializer.serialize(16)], cursor="cursor-7")
    assert other.result(WAIT_S) == 16
    with ScriptedForwarder() as next_forwarder:
        cloud.way = next_forwarder.connection
        forwarder.send(Redirect(reason="drain", retry_after_s=0.0))
        forwarder.wait_for(lambda: bool(forwarder.said(Goodbye)))
        next_forwarder.wait_for(lambda: next_forwarder.streams_opened == 1)
        opening = next_forwarder.said(OpenStream)[0]
        assert isinstance(opening, OpenStream)
        assert opening.cursor == "cursor-7"
        next_forwarder.push([success(future, 0)], [serializer.serialize(8)])
        assert future.result(WAIT_S) == 8


def test_a_starting_forwarder_is_reported_and_used_once_it_is_awake(
    cloud: StreamingCloud, forwarder: ScriptedForwarder, caplog: pytest.LogCaptureFixture
) -> None:
    cloud.asleep = 3
    with cloud.executor() as executor:
        future = executor.submit(pow, 2, 3)
        forwarder.wait_for(lambda: forwarder.streams_opened == 1)
        forwarder.push([success(future, 0)], [serializer.serialize(8)])
        assert future.result(WAIT_S) == 8
    assert [(each.name, each.levelname) for each in caplog.records] == [("farcall._stream", "WARNING")] * 2
    asleep, awake = (each.getMessage() for each in caplog.records)
    assert "about a minute" in asleep
    assert "awake" in awake


@pytest.mark.parametrize("frames", [[b"\x01garbage"], [b"\x09\x80"], [b""]])
def test_malformed_messages_end_the_stream_and_not_the_executor(
    executor: Executor, forwarder: ScriptedForwarder, frames: list[bytes]
) -> None:
    future = executor.submit(pow, 2, 3)
    forwarder.send_raw(frames)
    forwarder.wait_for(lambda: forwarder.streams_opened == 2)
    forwarder.push([success(future, 0)], [serializer.serialize(8)])
    assert future.result(WAIT_S) == 8


def test_a_refused_stream_is_opened_again(executor: Executor, forwarder: ScriptedForwarder) -> None:
    future = executor.submit(pow, 2, 3)
    forwarder.send(Refused(error=RemoteFailure("not you").record.to_json()))
    forwarder.wait_for(lambda: forwarder.streams_opened == 2)
    forwarder.push([success(future, 0)], [serializer.serialize(8)])
    assert future.result(WAIT_S) == 8


def test_a_silent_forwarder_is_disconnected() -> None:
    with ScriptedForwarder(heartbeat_s=0.1, silent=True) as forwarder:
        cloud = StreamingCloud(forwarder)
        with cloud.executor() as executor:
            forwarder.wait_for(lambda: forwarder.streams_opened >= 2)
            future = executor.submit(pow, 2, 3)
            cloud.cloud.start()
            assert future.result(WAIT_S) == 8  # polled
        cloud.cloud.close()
        cloud.client.close()


def test_a_lost_connection_is_detected_and_opened_again() -> None:
    with ScriptedForwarder(heartbeat_s=0.1) as lost, ScriptedForwarder() as other:
        cloud = StreamingCloud(lost)
        with cloud.executor() as executor:
            future = executor.submit(pow, 2, 3)
            lost.wait_for(lambda: lost.streams_opened >= 1)
            cloud.way = other.connection
            lost.mute = True  # the line stays up: no event tells of it
            other.wait_for(lambda: other.streams_opened == 1)
            other.push([success(future, 0)], [serializer.serialize(8)])
            assert future.result(WAIT_S) == 8
        cloud.client.close()


def test_both_sides_send_heartbeats() -> None:
    with ScriptedForwarder(heartbeat_s=0.7) as forwarder:
        cloud = StreamingCloud(forwarder)
        with cloud.executor():
            forwarder.wait_for(lambda: len(forwarder.said(Heartbeat)) > SILENT_PERIODS)
            assert forwarder.streams_opened == 1
        forwarder.wait_for(lambda: bool(forwarder.said(Goodbye)))
        cloud.client.close()


def test_without_a_reachable_forwarder_results_are_polled() -> None:
    with socket.socket() as reserved, ScriptedForwarder() as forwarder:
        reserved.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        cloud = StreamingCloud(forwarder)
        assert cloud.way is not None
        cloud.way["forwarders"][0]["address"] = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"
        with cloud.executor() as executor:
            future = executor.submit(pow, 2, 3)
            cloud.cloud.start()
            assert future.result(WAIT_S) == 8
        cloud.cloud.close()
        cloud.client.close()


def test_a_wrong_server_key_means_polling(forwarder: ScriptedForwarder, cloud: StreamingCloud) -> None:
    with ScriptedForwarder() as impostor:
        assert cloud.way is not None
        cloud.way["forwarders"][0]["address"] = impostor.address
        with cloud.executor() as executor:
            future = executor.submit(pow, 2, 3)
            cloud.cloud.start()
            assert future.result(WAIT_S) == 8
            assert impostor.heard == []
        cloud.cloud.close()


def test_results_from_before_the_stream_are_polled(cloud: StreamingCloud) -> None:
    cloud.cloud.start()
    with cloud.executor() as executor:
        assert executor.submit(pow, 2, 3).result(WAIT_S) == 8  # the scripted forwarder pushed nothing
    cloud.cloud.close()


def test_a_stream_without_results_is_detected(cloud: StreamingCloud, forwarder: ScriptedForwarder) -> None:
    with cloud.executor() as executor:
        forwarder.wait_for(lambda: forwarder.streams_opened == 1)
        first, second = executor.submit(pow, 2, 2), executor.submit(pow, 2, 3)
        forwarder.push([success(first, 0)], [serializer.serialize(4)])
        assert first.result(WAIT_S) == 4
        assert executor._engine.flush(WAIT_S)
        cloud.cloud.run_waiting()  # the other ends too, and no push tells of it
        assert second.result(WAIT_S) == 8


def test_an_expired_token_does_not_stop_pushed_results(cloud: StreamingCloud, forwarder: ScriptedForwarder) -> None:
    with Executor(cloud.cloud.endpoint_id, client=cloud.client, retry_timeout_s=0.2) as executor:
        forwarder.wait_for(lambda: forwarder.streams_opened == 1)
        future = executor.submit(pow, 2, 3)
        assert executor._engine.flush(WAIT_S)
        cloud.refusal = 401
        cloud.polls_allowed.clear()
        deadline = time.monotonic() + WAIT_S
        while cloud.refusals < 2:  # samples behind the stream, two seconds apart
            assert time.monotonic() < deadline
            concurrent.futures.wait([future], 0.05)
        forwarder.push([success(future, 0)], [serializer.serialize(8)])
        assert future.result(WAIT_S) == 8


def test_an_open_stream_replaces_polling(
    executor: Executor, forwarder: ScriptedForwarder, cloud: StreamingCloud
) -> None:
    began = time.monotonic()
    for n in range(30):
        future = executor.submit(pow, 2, n)
        assert executor._engine.flush(WAIT_S)
        forwarder.push([success(future, 0)], [serializer.serialize(2**n)])
        assert future.result(WAIT_S) == 2**n
    samples = (time.monotonic() - began) / 2.0  # seconds between the first two
    assert cloud.polls <= 1 + samples, "one when the stream opened, and samples"
