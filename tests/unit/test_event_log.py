"""Event logs: bounded, without user bytes, and enough to replay what a core did."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable, Sequence

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from farcall_common import wire
from farcall_common.environments import Environment
from farcall_common.errors import Unavailable
from farcall_common.event_log import EventLog, UserBytes, read_events
from farcall_common.limits import MAX_INLINE_BYTES
from farcall_common.ssh_signatures import AllowedSigners, Signer, public_blob, sign, statement
from farcall_common.wire import TaskState
from farcall_endpoint.agent.core import actions as do
from farcall_endpoint.agent.core import connection as c
from farcall_endpoint.agent.core import events as ev
from farcall_endpoint.agent.core.agent import AgentCore
from farcall_endpoint.agent.core.reports import tasks_received
from farcall_endpoint.agent.core.scheduling import ChoicePolicy
from farcall_endpoint.agent.core.signatures import SignatureCheck
from farcall_endpoint.agent.core.tasks import SpooledTask, StoredResult, Task
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.contracts.agent_manager import (
    CallEnd,
    CallNews,
    CallsTaken,
    Died,
    EnvironmentStatus,
    FileContent,
    FilesReported,
    Finished,
    GivenCall,
    PrewarmRequest,
    Progress,
    Started,
    TaskOrder,
)
from farcall_endpoint.contracts.output import Printed
from farcall_endpoint.contracts.prefetch import PrefetchPolicy
from farcall_endpoint.files import orders
from farcall_endpoint.files.plan import FileList, Staging
from tests.unit.test_endpoint_agent_core import BODY, FUNCTION, HASH, spec

SECRET = b"the user's own bytes"
URL = "https://bucket.example/key?X-Amz-Signature=abc"


# -- the log -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Arrived:
    names: Sequence[str]
    body: UserBytes = dataclasses.field(default_factory=UserBytes)


def for_log(event: Arrived) -> tuple[Arrived, int]:
    return dataclasses.replace(event, body=event.body.without_bytes()), len(event.names)


def test_the_oldest_turns_are_dropped() -> None:
    log: EventLog[Arrived, float] = EventLog(for_log, max_turns=3)
    for number in range(5):
        log.add([Arrived([str(number)])], float(number))
    assert [(now, [event.names for event in events]) for now, events in log] == [
        (2.0, [["2"]]),
        (3.0, [["3"]]),
        (4.0, [["4"]]),
    ]
    assert log.dropped_turns == 2


def test_large_turns_are_dropped_first_and_the_last_is_kept() -> None:
    log: EventLog[Arrived, float] = EventLog(for_log, max_size=10)
    for number in range(5):
        log.add([Arrived(["a"] * 4)], float(number))
    assert len(log) == 2
    log.add([Arrived(["a"] * 100)], 5.0)
    assert [now for now, _ in log] == [5.0]


def test_log_without_a_new_turn_is_not_written() -> None:
    log: EventLog[Arrived, float] = EventLog(for_log)
    assert log.has_grown  # an agent that restarts replaces the log of the last process
    log.has_grown = False
    log.to_json()
    assert not log.has_grown
    log.add([Arrived(["a"])], 1.0)
    assert log.has_grown


def test_written_log_has_no_control_characters_of_others() -> None:
    hostile = "a\x7f\x85\x9b2J\u202e\u2028\u200eb\x1b"
    log: EventLog[Arrived, float] = EventLog(for_log, about={"name": hostile})
    log.add([Arrived([hostile])], 1.5)
    text = log.to_json().decode()
    assert all(line.isprintable() for line in text.split("\n"))
    assert len(text.splitlines()) == 2
    [(_, [arrived])] = read_events(text.encode(), {"Arrived": Arrived})
    assert arrived.names == [hostile]


def test_log_round_trips() -> None:
    log: EventLog[Arrived, float] = EventLog(for_log, about={"seed": 7})
    log.add([Arrived(["a"], UserBytes([SECRET, None])), Arrived([])], 1.5)
    log.add([], 2.5)
    data = log.to_json()
    assert SECRET not in data
    assert json.loads(data.splitlines()[0]) == {"seed": 7, "dropped_turns": 0}
    (first_at, [arrived, other]), (second_at, none) = read_events(data, {"Arrived": Arrived})
    assert (first_at, second_at, none) == (1.5, 2.5, [])
    assert arrived.body.sizes == [len(SECRET), None]
    assert arrived.body.bodies == [bytes(len(SECRET)), None]
    assert other.names == []


# -- the agent's core --------------------------------------------------------------------------------------------------


KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))
SIGNED = msgspec.structs.replace(FUNCTION, signature=sign(statement(FUNCTION.name, HASH), KEY))


def make_core() -> AgentCore:
    return AgentCore(
        endpoint_id="e",
        policy=ChoicePolicy(random.Random(3).choice),
        slots_hint=2,
        prefetch=PrefetchPolicy(horizon_s=1.0, limit=4, unseen=2),
        window=PrefetchPolicy(horizon_s=1.0, limit=8),
        max_window=100,
        signatures=SignatureCheck(AllowedSigners([Signer("lab", public_blob(KEY))])),
        staging=Staging(),
    )


def outline(actions: Iterable[do.Action]) -> list[tuple[str, ...]]:
    """Actions with tasks by their ids, for these are other objects in each core."""
    return [(type(action).__name__, *(repr(_outline(each)) for each in _fields(action))) for action in actions]


def _fields(action: do.Action) -> list[object]:
    return list(msgspec.structs.astuple(action))


def _outline(value: object) -> object:
    match value:
        case Task():
            return value.task_id, value.attempt, value.starts, value.result.state if value.result else None
        case wire.FunctionSpec():
            return value.function_hash
        case wire.BlobGrant():
            return value.task_id
        case bytes():
            return len(value)
        case UserBytes():
            return value.sizes
        case tuple() | list():
            return [_outline(each) for each in value]
        case _:
            return value


def story() -> list[tuple[float, list[ev.Event]]]:
    """Turns with every kind of event."""
    environment = Environment(type="apptainer", location="/images/sci.sif")
    private = Environment(type="apptainer", location=f"docker://me:{SECRET.decode()}@registry.example/sci")
    status = EnvironmentStatus(environment.key, environment.label, "apptainer", warm=1, text=SECRET.decode())
    blob = wire.BlobLocation(blob_key="k", size_bytes=7, sha256="0" * 64, url=URL)
    message = wire.RunTasks(
        tasks=(
            *(spec(name) for name in "abcdef"),
            spec("blob", payload=None, payload_blob=blob),
            spec("once", idempotent=False),
            spec("special", resource_specification={"account": SECRET.decode()}),
            spec("contained", environment=private),
        ),
        functions=(SIGNED,),
    )
    error = {"code": "TASK_FAILED", "message": SECRET.decode(), "fault": "caller"}
    done = (
        Finished("a", TaskState.SUCCESS, 0, None, 0.0, 0.1, None, Printed(len(SECRET), 0, len(SECRET), 0), 2),
        Finished("b", TaskState.FAILED, None, error, 0.0, 0.1, {"stdout": SECRET.decode()}),
        Finished("c", TaskState.SUCCESS, 1, None, 0.0, 0.1),
    )
    large = bytes(MAX_INLINE_BYTES + 1)
    grant = wire.BlobGrant(task_id="c", attempt=1, blob_key="r", upload_url=URL, headers={"x": "y"})
    died = Died("d", "signal 9", SECRET.decode(), SECRET.decode(), Printed(0, len(SECRET), 0, 99), SECRET)
    stored = StoredResult(TaskState.FAILED, error, 0, "", None, None)
    spooled = [
        SpooledTask(1, spec("old"), 1, 0.0, 1),
        SpooledTask(2, spec("r"), 1, 0.0, result=stored),
        SpooledTask(3, spec("writes"), 1, 0.0, files=FileList(b"", writes=1)),
    ]
    progress = Progress(finished=done, workers=2)
    calls = tuple(GivenCall(TaskOrder(f"g/{number}", 1, HASH, number - 1), b"") for number in (1, 2))
    return [
        (0.0, [ev.Restored(spooled, [HASH], [SIGNED])]),
        (0.1, [ev.SpoolWritten()]),
        (
            0.15,
            [
                ev.TransfersLost("it was killed"),
                ev.TransfersReported([orders.Made("writes", outcomes.files_no_room("the disk is full").to_json())]),
            ],
        ),
        (0.2, [ev.SessionOpened(), ev.ManagerRegistered("m", 2), ev.ManagerRegistered("n", 2, 500.0)]),
        (0.3, [ev.ManagerProgress(name, Progress(workers=2)) for name in "mn"]),
        (0.32, [ev.ManagerRegistered("b", 1, None, "n1", {"apptainer": ""}), ev.ManagersDraining(["n"])]),
        (0.34, [ev.ManagerProgress("b", Progress(workers=1, environments=(status,)))]),
        (0.36, [ev.PrewarmRequested([PrewarmRequest(environment=environment, count=1)]), ev.ManagersDraining([])]),
        (0.4, [tasks_received(message, [BODY, SECRET])]),
        (0.5, [ev.SpoolWriteFailed("full"), ev.SpoolRetryOrdered()]),
        (0.6, [ev.SpoolWritten()]),
        (0.7, [ev.PayloadFetched("blob", 9, UserBytes([SECRET])), ev.NodesChanged("", "job 7 PENDING")]),
        (1.5, [ev.ManagerProgress("m", Progress(started=(Started("a", 0.6),), workers=2))]),
        (
            1.6,
            [ev.ManagerProgress(name, progress, UserBytes([SECRET, large, SECRET])) for name in "mn"],
        ),
        (1.7, [ev.BlobGranted(grant), ev.ManagerProgress("m", Progress(died=(died,), workers=2))]),
        (1.8, [ev.ResultUploaded("c", 5, blob), ev.CancelRequested(["e"]), ev.SpoolMeasured((1, 2))]),
        (1.9, [ev.ResultsRecorded([wire.TaskRef(task_id="a", attempt=1)]), ev.FetchFailed("x", 1, "HTTP 403")]),
        (1.92, [ev.ManagerRegistered("z", 20), ev.ManagerProgress("z", Progress(workers=20))]),
        (1.93, [ev.ManagerProgress("n", Progress(workers=2, waiting_calls=(("", 3),)))]),
        (1.94, [ev.CallsHandedOver("n", CallsTaken("z", "", 3, calls), UserBytes([SECRET, SECRET]))]),
        (1.95, [ev.CallsHeard("z", CallNews((CallEnd(1, "g/1", TaskState.SUCCESS, parts=1),)), UserBytes([SECRET]))]),
        (1.96, [ev.CallsNotNeeded("n", ["g/2"]), ev.OwnerKnown("someone")]),
        (1.965, [ev.WorkerEnding("n", "a")]),
        (1.97, [ev.CopiesReported("n", FilesReported(wanted=(FileContent("", "ab" * 32, 7),)))]),
        (2.0, [ev.ManagerLost("m", "it died"), ev.UploadFailed("c", 5, "HTTP 500", retryable=True)]),
        (2.4, [ev.ManagerProgress("b", Progress(started=(Started("d", 2.2),), workers=1))]),
        (2.5, [ev.ManagerProgress("b", Progress(workers=1, returned=("e",)))]),
        (9.0, []),
        (9.1, [ev.SessionClosed(), ev.DrainOrdered()]),
        (9.2, [ev.SessionOpened([wire.TaskRef(task_id="b", attempt=1)])]),
    ]


def test_a_log_of_the_agents_core_replays_the_same_actions() -> None:
    core, log = make_core(), EventLog[ev.Event, float](ev.for_log)
    original = []
    for now, events in story():
        log.add(events, now)
        original.append(outline(core.handle(events, now)))
    data = log.to_json()
    for turns in (list(log), list(read_events(data, ev.EVENTS))):
        again = make_core()
        assert [outline(again.handle(events, now)) for now, events in turns] == original
    assert {action[0] for turn in original for action in turn} == {kind.__name__ for kind in do.Action.__subclasses__()}
    assert {type(event) for _, events in story() for event in events} == set(ev.EVENTS.values())


def test_a_log_of_the_agents_core_has_no_user_bytes_and_no_url() -> None:
    log: EventLog[ev.Event, float] = EventLog(ev.for_log)
    for now, events in story():
        log.add(events, now)
    data = log.to_json()
    for secret in (SECRET, BODY, b"X-Amz-Signature", b"dGhlIHVzZXI"):
        assert secret not in data
    assert not any(SECRET in repr(events).encode() for _, events in log)


# -- the connection ----------------------------------------------------------------------------------------------------


def test_a_log_of_the_connection_replays_the_same_actions_and_has_no_ticket() -> None:
    def make() -> c.Connection:
        return c.Connection(heartbeat_s=10.0, rng=random.Random(5))

    hello = wire.Hello(
        endpoint_id="e", ticket="tick-et", instance_id="i", spool_id="s", protocol_versions=(1,), heartbeat_s=10.0
    )
    welcome = wire.Welcome(session_id="s", forwarder_id="f", protocol_version=1, heartbeat_s=10.0)
    turns: list[tuple[float, c.Event]] = [
        (0.0, c.Started()),
        (0.1, c.ApiFailed(Unavailable("not now").record)),
        (0.6, c.Tick()),
        (1.0, c.ApiAnswered((c.Address("tcp://a", "ka"), c.Address("tcp://b", "kb")), "tick-et", 600.0)),
        (1.1, c.ConnectionLost("refused", key_refused=False)),
        (1.2, c.HandshakeDone()),
        (1.2, c.Sent(hello)),
        (1.3, c.Received(wire.Envelope(welcome))),
        (1.4, c.Sent(wire.Credit(tasks=1))),
        (1.5, c.Received(wire.Envelope(wire.RunTasks(tasks=(spec("a"),)), (SECRET, SECRET)))),
        (1.6, c.Sent(wire.TasksAccepted(tasks=()))),
        (12.0, c.Tick()),
        (13.0, c.Received(wire.Envelope(wire.RunTasks(tasks=(spec("b"),)), (SECRET, SECRET)))),  # beyond the credit
        (14.0, c.MalformedReceived("late")),
    ]
    connection, log = make(), EventLog[c.Event, float](c.for_log)
    original = []
    for now, event in turns:
        log.add([event], now)
        original.append(connection.handle([event], now))
    again = make()
    replayed = [again.handle(events, now) for now, events in log]
    kinds = [[type(action) for action in actions] for actions in original]
    assert [[type(action) for action in actions] for actions in replayed] == kinds
    assert [c.SendHello] in kinds
    assert [c.Deliver] in kinds
    assert [c.Log, c.Close, c.Closed] in kinds
    data = log.to_json()
    assert b"tick-et" not in data
    assert SECRET not in data


@pytest.mark.parametrize("data", [b"{}\nnot JSON\n", b'{}\n{"at":1.0,"events":[["Arrived",{}]]}\n'])
def test_invalid_log_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        list(read_events(data, {"Arrived": Arrived}))
