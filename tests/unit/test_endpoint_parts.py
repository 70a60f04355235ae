"""The small parts of an endpoint: scheduling, prefetching, configuration, directory, API client, channel."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from farcall_common import wire
from farcall_common.credentials import Credentials
from farcall_common.errors import (
    ConfigurationError,
    EndpointInUse,
    EndpointUnknown,
    FarcallError,
    Fault,
    Forbidden,
    ProtocolError,
    Unavailable,
)
from farcall_common.http_errors import REQUEST_ID
from farcall_common.task_options import TaskOptions
from farcall_endpoint.agent.core import actions as do
from farcall_endpoint.agent.core.loads import Lifetime, ManagerLoad
from farcall_endpoint.agent.core.relay import TransferFailed
from farcall_endpoint.agent.core.reports import messages_of
from farcall_endpoint.agent.core.scheduling import ChoicePolicy, SchedulingPolicy, round_robin
from farcall_endpoint.agent.core.tasks import Stage, Task, TaskResult
from farcall_endpoint.agent.shell.spool import Spool
from farcall_endpoint.agent.shell.transfers import Transfers
from farcall_endpoint.config.schema import Config
from farcall_endpoint.config.template import write_config
from farcall_endpoint.contracts.manager_worker import (
    MALFORMED,
    CallEnded,
    Channel,
    Done,
    DropCalls,
    NewModules,
    Order,
    Packet,
    Progressed,
    Run,
    Sync,
    channel_pair,
)
from farcall_endpoint.contracts.prefetch import PrefetchPolicy
from farcall_endpoint.services.cloud import Cloud
from farcall_endpoint.services.directory import AgentProcess, EndpointDirectory, list_endpoints

# -- scheduling --------------------------------------------------------------------------------------------------------


def tasks(count: int, *, idempotent: bool = True) -> list[Task]:
    return [
        Task(
            number,
            wire.TaskSpec(
                task_id=f"t{number}",
                attempt=1,
                function_id="f",
                function_hash="h",
                options=TaskOptions(idempotent=idempotent),
            ),
            1,
            Stage.QUEUED,
            0.0,
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("policy", [ChoicePolicy(random.Random(1).choice), round_robin()])
def test_policies_fill_slots_before_they_prefetch_and_keep_the_order(policy: SchedulingPolicy) -> None:
    loads = [ManagerLoad("a", 2, 2), ManagerLoad("b", 2, 1), ManagerLoad("full", 2, -2)]
    placed = policy.place(tasks(10), loads, depth=1, now=0.0)
    assert [task.task_id for task, _ in placed] == [f"t{number}" for number in range(7)]
    first = [name for _, name in placed[:3]]
    assert sorted(first) == ["a", "a", "b"]
    assert {name: [n for _, n in placed].count(name) for name in "ab"} == {"a": 4, "b": 3}
    assert [load.free for load in loads] == [-2, -2, -2]


@pytest.mark.parametrize("policy", [ChoicePolicy(random.Random(1).choice), round_robin()])
def test_short_tasks_go_to_one_manager_in_a_row_while_it_has_free_slots(policy: SchedulingPolicy) -> None:
    placed = policy.place(tasks(9), [ManagerLoad(name, 4, 4) for name in "abcd"], depth=2, now=0.0)
    names = [name for _, name in placed]
    assert names[0] == names[1] == names[2]
    few_slots = policy.place(tasks(8), [ManagerLoad(name, 2, 2) for name in "abcd"], depth=5, now=0.0)
    assert all(few_slots[at][1] == few_slots[at + 1][1] for at in range(0, 8, 2))
    assert {name for _, name in few_slots} == set("abcd")


@pytest.mark.parametrize("policy", [ChoicePolicy(random.Random(1).choice), round_robin()])
def test_task_overtakes_only_tasks_that_fit_no_manager(policy: SchedulingPolicy) -> None:
    queue = tasks(3)
    queue[0].spec = msgspec.structs.replace(queue[0].spec, options=TaskOptions(walltime_s=100.0))
    loads = [ManagerLoad("short", 8, 8, Lifetime(50.0)), ManagerLoad("long", 1, 1, Lifetime(500.0))]
    placed = policy.place(queue, loads, depth=4, now=0.0)
    assert [task.task_id for task, _ in placed] == ["t0", "t1", "t2"]
    assert placed[0][1] == "long"
    late = policy.place(queue, [ManagerLoad("short", 8, 8, Lifetime(50.0))], depth=4, now=0.0)
    assert [task.task_id for task, _ in late] == ["t1", "t2"]


def test_round_robin_takes_turns() -> None:
    loads = [ManagerLoad(name, 10, 10) for name in "abc"]
    names = [name for _, name in round_robin().place(tasks(6), loads, depth=0, now=0.0)]
    assert names[:3] == names[3:]
    assert len(set(names)) == 3


def test_non_idempotent_task_is_never_prefetched() -> None:
    placed = round_robin().place(tasks(5, idempotent=False), [ManagerLoad("a", 2, 2)], depth=49, now=0.0)
    assert len(placed) == 2


# -- prefetching -------------------------------------------------------------------------------------------------------


def test_prefetching_is_deep_for_short_tasks_and_absent_for_long_ones() -> None:
    policy = PrefetchPolicy(horizon_s=0.1, limit=50, unseen=3)
    assert policy.depth == 3
    assert policy.mean_s is None
    policy.observe(0.0)
    assert policy.depth == 50
    for _ in range(200):
        policy.observe(0.01)
    assert policy.depth in (9, 10)
    policy.observe(60.0)
    assert policy.depth == 0


def test_prefetching_can_be_switched_off() -> None:
    policy = PrefetchPolicy(horizon_s=10.0, limit=0, unseen=5)
    policy.observe(0.001)
    assert policy.depth == 0


# -- directory ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> EndpointDirectory:
    directory = EndpointDirectory.of(tmp_path, "lab")
    directory.create()
    write_config(directory.config_file, Config())
    return directory


def test_only_one_agent_runs_per_directory(directory: EndpointDirectory) -> None:
    with directory.lock():
        assert directory.read_agent() == AgentProcess.current()
        with pytest.raises(EndpointInUse, match=f"process {os.getpid()}"), directory.lock():
            pass
    assert directory.read_agent() is None


@pytest.mark.parametrize("removed", [[], ["daemon.pid"], ["daemon.pid", "spool.sqlite3", "spool.sqlite3-wal"]])
def test_agent_is_found_after_its_files_were_removed(directory: EndpointDirectory, removed: list[str]) -> None:
    code = f"""
        import pathlib
        from farcall_endpoint.agent.shell.spool import Spool
        from farcall_endpoint.services.directory import EndpointDirectory
        directory = EndpointDirectory(pathlib.Path({str(directory.path)!r}))
        with directory.lock():
            spool = Spool(directory.spool_file)
            print("open", flush=True)
            input()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        for name in removed:
            (directory.path / name).unlink(missing_ok=True)
        found = directory.read_agent()
        assert found is not None
        assert (found.pid, found.find() is not None) == (holder.pid, True)
        for _ in range(2):  # what a refused one leaves changes nothing
            with pytest.raises(EndpointInUse, match=f"process {holder.pid} "), directory.lock():
                pass
        with pytest.raises(EndpointInUse):
            directory.archive_spool()
        found = directory.read_agent()
        assert found is not None
        assert found.pid == holder.pid
        if "spool.sqlite3" not in removed:
            with pytest.raises(EndpointInUse, match="open in another process"):
                Spool(directory.spool_file)
        holder.communicate("\n")
    assert directory.read_agent() is None
    if directory.spool_file.exists():
        kept = directory.archive_spool()
        assert kept is not None
        assert kept.exists()
    assert (directory.spool_file.exists(), directory.archive_spool()) == (False, None)


def test_an_agent_of_a_directory_that_was_moved_or_whose_files_are_old_is_found(directory: EndpointDirectory) -> None:
    with directory.lock():
        directory.pid_file.write_text(json.dumps({"pid": 1, "started_at": 0.0, "hostname": socket.gethostname()}))
        assert directory.read_agent() == AgentProcess.current()
        moved = EndpointDirectory(directory.path.rename(directory.path.with_name("moved")))
        moved.pid_file.unlink()
        assert moved.read_agent() == AgentProcess.current()
        with pytest.raises(EndpointInUse), moved.lock():
            pass


@pytest.mark.parametrize("row", ["0 0 0 0 1 1 {inode}", ""])
def test_unrelated_socket_name_is_no_agent(directory: EndpointDirectory, row: str) -> None:
    """A process that is found is ended by `stop`; names of sockets may have a line's end in them, and be any user's."""
    with socket.socket(socket.AF_UNIX) as innocent, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as forged:
        inode = os.fstat(innocent.fileno()).st_ino
        forged.bind(b"\0\n" + row.format(inode=inode).encode() + b" @" + directory._socket_name()[1:])
        assert directory.read_agent() is None


def test_crash_prints_a_traceback_and_an_error_does_not(directory: EndpointDirectory) -> None:
    with pytest.raises(Unavailable), directory.lock():
        raise Unavailable("an error of ours")
    assert directory.read_agent() is None
    with pytest.raises(ZeroDivisionError), directory.lock():
        raise ZeroDivisionError
    agent = directory.read_agent()
    assert agent is not None
    assert agent.find() is not None, "this process lives"
    assert AgentProcess(agent.pid, agent.started_at - 100, agent.hostname).find() is None
    assert not AgentProcess(1, 0.0, "elsewhere").is_here()


def test_key_pair_is_readable_by_its_owner_only(directory: EndpointDirectory) -> None:
    keys = directory.read_keys()
    assert len(keys.public) == len(keys.secret) == 40
    assert keys.secret not in repr(keys)
    (directory.path / "curve.secret").unlink()
    with pytest.raises(ConfigurationError, match="cannot be read"):
        directory.read_keys()


def test_endpoint_id_is_stored(directory: EndpointDirectory, tmp_path: Path) -> None:
    assert directory.read_endpoint_id() is None
    directory.write_endpoint_id("an id")
    assert directory.read_endpoint_id() == "an id"
    assert [found.name for found in list_endpoints(tmp_path)] == ["lab"]
    assert list_endpoints(tmp_path / "nowhere") == []


# -- the API client ----------------------------------------------------------------------------------------------------


@pytest.fixture
def cloud_answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[httpx.Response], Cloud]]:
    made: list[Cloud] = []

    def make(response: httpx.Response) -> Cloud:
        cloud = Cloud(Credentials("http://api", "token"))
        cloud._client = httpx.Client(base_url="http://api", transport=httpx.MockTransport(lambda request: response))
        made.append(cloud)
        return cloud

    yield make
    for cloud in made:
        cloud.close()


@pytest.mark.parametrize(
    ("status", "body", "kind", "retryable"),
    [
        (404, {"code": "ENDPOINT_UNKNOWN", "message": "no", "fault": "caller"}, EndpointUnknown, False),
        (503, {"code": "NO_FORWARDER", "message": "no", "fault": "us", "retryable": True}, Unavailable, True),
        (503, {"message": "Service Unavailable"}, Unavailable, True),
        (403, {"message": "Forbidden"}, Forbidden, False),
        (404, ["not found"], ProtocolError, False),
    ],
)
def test_http_answers_become_farcall_errors(
    cloud_answering: Callable[[httpx.Response], Cloud],
    status: int,
    body: object,
    kind: type[FarcallError],
    retryable: bool,
) -> None:
    cloud = cloud_answering(httpx.Response(status, json=body))
    with pytest.raises(kind) as caught:
        cloud.register(name="n", display_name="d", metadata={})
    assert caught.value.record.retryable is retryable


def test_answer_that_is_not_json_is_refused(cloud_answering: Callable[[httpx.Response], Cloud]) -> None:
    with pytest.raises(Unavailable, match="not a JSON object"):
        cloud_answering(httpx.Response(200, text="<html>log in to the hotel's network</html>")).register(
            name="n", display_name="d", metadata={}
        )


def test_incomplete_answer_is_refused(
    cloud_answering: Callable[[httpx.Response], Cloud],
) -> None:
    with pytest.raises(Unavailable, match="endpoint_id"):
        cloud_answering(httpx.Response(200, json={})).register(name="n", display_name="d", metadata={})


def test_an_answer_to_another_request_is_refused(cloud_answering: Callable[[httpx.Response], Cloud]) -> None:
    answer = httpx.Response(200, headers={REQUEST_ID: "another"}, json={"endpoint_id": "e"})
    with pytest.raises(Unavailable, match="answer to another request"):
        cloud_answering(answer).register(name="n", display_name="d", metadata={})


def test_unreachable_network_is_a_network_fault() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        cloud = Cloud(Credentials(f"http://127.0.0.1:{unused.getsockname()[1]}", "token"))
        with pytest.raises(Unavailable) as caught:
            cloud.delete("e")
        cloud.close()
    assert caught.value.record.fault is Fault.NETWORK
    assert caught.value.record.retryable


def transfers(*statuses: int) -> tuple[Transfers, list[float]]:
    left = iter(statuses)
    pauses: list[float] = []
    transport = httpx.MockTransport(lambda request: httpx.Response(next(left), content=b"data"))
    return Transfers(transport=transport, pause=pauses.append), pauses


def test_transfers_are_retried_after_server_errors_and_not_after_refusals() -> None:
    good, pauses = transfers(503, 500, 200)
    sha256 = "3a6eb0790f39ac87c94f3856b2dd2c5d110e6811602261a9a923d3bb23adc8b7"
    assert good.download("http://store/x", sha256=sha256, size_bytes=4) == b"data"
    assert pauses == sorted(pauses)
    assert len(pauses) == 2
    slow, pauses = transfers(408, 429, 200)
    assert slow.download("http://store/x", sha256=sha256, size_bytes=4) == b"data"
    assert len(pauses) == 2
    expired, pauses = transfers(403)
    with pytest.raises(TransferFailed, match="HTTP 403") as caught:
        expired.upload("http://store/x", b"data", headers={})
    assert caught.value.retryable
    assert not pauses
    for wrong in ({"sha256": "0" * 64, "size_bytes": 4}, {"sha256": sha256, "size_bytes": 5}):
        spoiled, _ = transfers(200)
        with pytest.raises(TransferFailed, match="not what was uploaded"):
            spoiled.download("http://store/x", **wrong)  # type: ignore[arg-type]
    for each in (good, expired, spoiled):
        each.close()


def test_download_stops_at_its_size_and_is_not_decoded() -> None:
    bomb = gzip.compress(bytes(10_000_000))
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while True:
            sent += len(bomb)
            yield bomb

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-encoding": "gzip"}, content=endless())

    bounded = Transfers(transport=httpx.MockTransport(answer))
    with contextlib.closing(bounded), pytest.raises(TransferFailed, match="not what was uploaded"):
        bounded.download("http://store/x", sha256="0" * 64, size_bytes=3 * len(bomb))
    assert sent <= 5 * len(bomb)


# -- between manager and worker ----------------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    manager, end, claims = channel_pair()
    pair = manager, Channel(end, claims)
    yield pair
    for each in pair:
        each.close()


def orders(*names: str, payload_bytes: int = 0) -> Run:
    return Run(tuple(Order(name, 1, "h", payload_bytes) for name in names))


@pytest.mark.parametrize("size_bytes", [0, 1, 60_000, 70_000, 3_000_000])
def test_packets_of_any_size_arrive_whole(ends: tuple[Channel, Channel], size_bytes: int) -> None:
    manager, worker = ends
    body = os.urandom(size_bytes)
    run = Run((Order("t", 1, "h", size_bytes, TaskOptions(result_serializers=("JSONData",))),), (("h", 3),), True)
    manager.order(run, (b"fun", body))
    assert worker.receive() == (run, b"fun" + body)
    done = Done("t", 1.0, 2.0, {"code": "X"})
    worker.send(done, (body,))
    assert manager.receive() == (done, body)  # a view equals the bytes that it shows


def test_an_error_with_long_texts_arrives(ends: tuple[Channel, Channel]) -> None:
    manager, worker = ends
    done = Done("t", 1.0, 2.0, {"code": "TASK_FAILED", "traceback": "x" * 64_000, "stdout_tail": "y" * 4_096})
    worker.send(done)
    assert manager.receive() == (done, b"")


@pytest.mark.parametrize(
    "forged",
    [DropCalls("t", (1,) * 1001), NewModules(("m",) * 1001), Progressed("t", 1, 2, "x" * 1001), Run(()), CallEnded(1)],
)
def test_a_manager_reads_no_packet_that_a_worker_does_not_send(ends: tuple[Channel, Channel], forged: Packet) -> None:
    manager, worker = ends
    worker.send(forged)
    with pytest.raises(MALFORMED):
        manager.receive()


def test_headers_in_files_count_as_received(ends: tuple[Channel, Channel]) -> None:
    manager, worker = ends
    worker.send(Done("t", 1.0, 2.0, parts=(1,) * 100_000))
    manager.receive()
    assert manager.received_bytes > 100_000


@pytest.mark.parametrize("field", ["error", "details"])
def test_forged_packets_are_not_nested(ends: tuple[Channel, Channel], field: str) -> None:
    """The agent, which reads them as a part of a larger message, could exceed its limit of recursion."""
    manager, worker = ends
    forged: dict[str, Any] = {field: {"stdout_tail": {"a": 1}}}
    worker.send(Done("t", 1.0, 2.0, **forged))
    with pytest.raises(MALFORMED):
        manager.receive()


def test_reports_of_failures_with_long_texts_stay_below_the_limit_of_a_header() -> None:
    spec = wire.TaskSpec(task_id="t", attempt=1, function_id="f", function_hash="h", options=TaskOptions(), payload=0)
    error = {"code": "TASK_FAILED", "message": "", "traceback": "x" * 64_000}
    result = TaskResult(wire.TaskState.FAILED, error=error)
    tasks = [Task(seq, spec, 1, Stage.FINISHED, 0.0, result=result) for seq in range(200)]
    messages = list(messages_of(do.ReportResults(tasks), body=lambda _: b""))
    headers = [wire.decode(wire.encode(each)).message for each in messages]
    assert sum(len(each.results) for each in headers if isinstance(each, wire.TaskResults)) == 200


def test_no_message_of_results_is_larger_than_the_cloud_accepts() -> None:
    """Also with what an older agent has left in the spool."""
    spec = wire.TaskSpec(task_id="t", attempt=1, function_id="f", function_hash="h", options=TaskOptions(), payload=0)
    sizes = [3, 3, 9, 1, 3]
    results = [TaskResult(wire.TaskState.SUCCESS, details={"stdout_tail": "x" * (size * 2**20)}) for size in sizes]
    results.append(TaskResult(wire.TaskState.FAILED, error={"code": "TASK_FAILED", "message": "x" * (9 * 2**20)}))
    tasks = [Task(seq, spec, 1, Stage.FINISHED, 0.0, result=result) for seq, result in enumerate(results)]
    messages = list(messages_of(do.ReportResults(tasks), body=lambda _: b""))
    headers = [wire.decode(wire.encode(each)).message for each in messages]
    sent = [result for each in headers if isinstance(each, wire.TaskResults) for result in each.results]
    codes = [None if each.error is None else each.error["code"] for each in sent]
    assert codes == [None, None, "RESULT_TOO_LARGE", None, None, "RESULT_TOO_LARGE"]
    assert [each.state is wire.TaskState.FAILED for each in sent] == [code is not None for code in codes]


def test_claim_has_one_holder(ends: tuple[Channel, Channel]) -> None:
    manager, worker = ends
    manager.order(orders("a", "b", "c"), ())
    assert worker.claim()
    manager.order(orders("d"), ())
    assert manager.revoke() == 3
    assert not worker.claim()
    assert manager.revoke() == 0
    manager.send(Sync())
    manager.order(orders("e"), ())
    assert worker.claim()


def test_the_manager_does_not_wait_for_a_worker_that_tampers_with_claims() -> None:
    manager, end, claims = channel_pair()
    manager.order(orders("a", "b"), ())
    claims.setblocking(True)
    claims.send(b"x" * 10)  # not those of the worker
    assert (manager.revoke(), manager.revoke()) == (2, 0)
    claims.shutdown(socket.SHUT_RDWR)
    assert manager.revoke() == 0
    with pytest.raises(OSError, match="pipe"):
        manager.order(orders("c"), ())
    for each in (manager, end, claims):
        each.close()


def test_racing_claims_have_one_holder(ends: tuple[Channel, Channel]) -> None:
    manager, worker = ends
    had = [0]
    over = threading.Event()

    def claim() -> None:
        while not over.is_set():
            had[0] += worker.claim()

    thread = threading.Thread(target=claim)
    thread.start()
    try:
        revoked = 0
        for _ in range(200):
            manager.order(orders("a", "b", "c"), ())
            worker.receive()
            revoked += manager.revoke()
    finally:
        over.set()
        thread.join()
    assert had[0] + revoked == 600


def test_a_full_socket_refuses_whole_packets(ends: tuple[Channel, Channel]) -> None:
    manager, worker = ends
    sent: list[str] = []

    def fill() -> None:
        while True:
            manager.order(orders(f"t{len(sent)}", payload_bytes=30_000), (b"x" * 30_000,))
            sent.append(f"t{len(sent)}")

    with pytest.raises(BlockingIOError):
        fill()
    assert len(sent) >= 3
    assert manager.revoke() == len(sent) + 1
    worker.socket.setblocking(False)
    for name in sent:
        assert worker.receive() == (orders(name, payload_bytes=30_000), b"x" * 30_000)


def test_closed_peer_is_detected(ends: tuple[Channel, Channel]) -> None:
    manager, worker = ends
    worker.socket.close()
    assert manager.receive() is None
