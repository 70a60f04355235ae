"""How an agent gets, keeps and regains its session, as lists of actions."""

from __future__ import annotations

import random

import pytest

from farcall_common import wire
from farcall_common.errors import (
    ConfigurationError,
    ErrorRecord,
    FarcallError,
    Forbidden,
    NoForwarder,
    ProtocolError,
    RequestTooLarge,
    Unauthenticated,
    Unavailable,
)
from farcall_endpoint.agent.core.connection import (
    Action,
    Address,
    ApiAnswered,
    ApiFailed,
    Close,
    Closed,
    Connection,
    ConnectionLost,
    Deliver,
    GiveUp,
    HandshakeDone,
    Log,
    MalformedReceived,
    Opened,
    OpenSocket,
    Received,
    RequestForwarders,
    SendHeartbeat,
    SendHello,
    Sent,
    Started,
    Tick,
)

A, B = Address("tcp://a", "ka"), Address("tcp://b", "kb")
HELLO = wire.Hello(endpoint_id="e", ticket="t", instance_id="i", spool_id="s", protocol_versions=(1,), heartbeat_s=10.0)
WELCOME = wire.Welcome(session_id="s", forwarder_id="f", protocol_version=1, heartbeat_s=10.0)


def make(seed: int = 1) -> Connection:
    return Connection(heartbeat_s=10.0, rng=random.Random(seed))


def asked(connection: Connection, *forwarders: Address, now: float = 0.0) -> list[Action]:
    return connection.handle([ApiAnswered(forwarders, "t", 3600.0)], now)


def open_session(connection: Connection, *forwarders: Address, now: float = 0.0) -> None:
    assert connection.handle([Started()], 0.0) == [RequestForwarders()]
    [opening] = asked(connection, *(forwarders or (A,)), now=now)
    assert isinstance(opening, OpenSocket)
    greet(connection, now=now)


def greet(connection: Connection, *, now: float) -> None:
    assert connection.handle([HandshakeDone()], now) == [SendHello("t")]
    connection.handle([Sent(HELLO)], now)
    assert connection.handle([Received(wire.Envelope(WELCOME))], now) == [Opened(WELCOME)]


def wait_out(connection: Connection) -> tuple[float, list[Action]]:
    due_at = connection.next_deadline()
    assert due_at is not None
    return due_at, connection.handle([Tick()], due_at)


def test_connection_is_established_and_welcomed() -> None:
    connection = make()
    before = connection.is_open
    open_session(connection)
    assert (before, connection.is_open) == (False, True)
    assert connection.problem == ""
    assert connection.may_send(wire.TaskResults)


def test_each_forwarder_is_tried_and_then_the_api_after_a_wait() -> None:
    connection = make()
    connection.handle([Started()], 0.0)
    tried = asked(connection, A, B)
    tried += connection.handle([ConnectionLost("refused")], 1.0)
    waiting = connection.handle([ConnectionLost("refused")], 2.0)
    assert {action.to for action in tried if isinstance(action, OpenSocket)} == {A, B}
    assert waiting == [Close()]
    assert connection.handle([Tick()], 2.0) == []
    due_at, actions = wait_out(connection)
    assert 2.0 <= due_at <= 2.4
    assert actions == [RequestForwarders()]
    assert connection.problem == "refused"


def test_waits_grow_with_full_jitter_up_to_a_cap() -> None:
    longest = [0.0] * 12
    for seed in range(200):
        connection = make(seed)
        connection.handle([Started()], 0.0)
        now = 0.0
        for failure in range(12):
            connection.handle([ApiFailed(NoForwarder("none").record)], now)
            due_at, actions = wait_out(connection)
            assert actions == [RequestForwarders()]
            longest[failure] = max(longest[failure], due_at - now)
            now = due_at
    assert longest[0] <= 0.4
    assert longest[3] <= 3.2
    assert 25 < longest[-1] <= 30


def test_an_outage_of_a_day_does_not_end_the_agent() -> None:
    connection = make()
    connection.handle([Started()], 0.0)
    now = 0.0
    while now < 24 * 3600.0:
        connection.handle([ApiFailed(NoForwarder("none").record)], now)
        now, actions = wait_out(connection)
        assert actions == [RequestForwarders()]


def test_session_resets_the_failures_before_it() -> None:
    for seed in range(200):
        connection = make(seed)
        connection.handle([Started()], 0.0)
        for _ in range(12):  # by now it waits for up to half a minute
            connection.handle([ApiFailed(NoForwarder("none").record)], 0.0)
            wait_out(connection)
        asked(connection, A)
        greet(connection, now=0.0)
        connection.handle([ConnectionLost("killed")], 0.5)
        assert wait_out(connection)[0] - 0.5 <= 0.8


def test_short_sessions_back_off_until_one_lasts() -> None:
    longest = [0.0] * 13
    for seed in range(200):
        connection = make(seed)
        open_session(connection)
        now = 0.0
        for number, lasted_s in enumerate([0.0] * 12 + [1.5]):
            now += lasted_s
            connection.handle([ConnectionLost("shown out")], now)
            due_at, actions = wait_out(connection)
            assert actions == [OpenSocket(A)]
            longest[number] = max(longest[number], due_at - now)
            now = due_at
            greet(connection, now=now)
    assert 0.4 < longest[0] <= 0.8
    assert 25 < longest[11] <= 30
    assert longest[12] <= 0.4


@pytest.mark.parametrize("is_foreign", [False, True])
def test_retry_after_of_the_api_is_the_minimum_wait(is_foreign: bool) -> None:
    connection = make()
    connection.handle([Started()], 0.0)
    record = ErrorRecord("NO_FORWARDER", "none", retryable=True, retry_after_s=7.0)
    connection.handle([ApiFailed(NoForwarder("none", record=record).record, is_foreign=is_foreign)], 0.0)
    assert ((connection.next_deadline() or 0) >= 7.0) is not is_foreign


@pytest.mark.parametrize(
    "error",
    [
        ProtocolError("HTTP 302 of a portal"),
        ConfigurationError("HTTP 407 of a proxy"),
        Forbidden("HTTP 403 of a firewall"),
        RequestTooLarge("HTTP 413 of a proxy"),
    ],
)
def test_an_answer_of_another_server_ends_only_an_agent_that_has_never_connected(error: FarcallError) -> None:
    connection = make()
    connection.handle([Started()], 0.0)
    failed = ApiFailed(error.record, is_foreign=True)
    assert isinstance(connection.handle([failed], 0.0)[0], GiveUp)
    connection = make()
    open_session(connection)
    now, actions = 0.0, connection.handle([ConnectionLost("reset")], 0.0)
    while RequestForwarders() not in actions:
        now = connection.next_deadline() or 0.0
        actions = [*connection.handle([Tick()], now), *connection.handle([ConnectionLost("refused")], now)]
    assert connection.handle([failed], now) == []
    assert connection.problem == str(error)
    assert (connection.next_deadline() or 0.0) > now


def test_permanent_error_ends_the_agent() -> None:
    connection = make()
    connection.handle([Started()], 0.0)
    error = Unauthenticated("no")
    [give_up] = connection.handle([ApiFailed(error.record)], 0.0)
    assert isinstance(give_up, GiveUp)
    assert isinstance(give_up.error, Unauthenticated)
    assert give_up.error.record == error.record
    assert connection.next_deadline() is None


def test_lost_session_reconnects_to_its_forwarder_then_through_the_api() -> None:
    connection = make()
    open_session(connection)
    assert connection.handle([ConnectionLost("gone")], 50.0) == [Close(), Closed("gone")]
    due_at, actions = wait_out(connection)
    assert due_at <= 50.4
    assert actions == [OpenSocket(A)]
    assert connection.handle([ConnectionLost("refused")], 51.0) == [Close(), RequestForwarders()]


def test_an_expired_ticket_is_not_tried() -> None:
    connection = make()
    open_session(connection)
    connection.handle([ConnectionLost("gone")], 3590.0)
    assert wait_out(connection)[1] == [RequestForwarders()]


def test_refused_key_reconnects_through_the_api() -> None:
    connection = make()
    connection.handle([Started()], 0.0)
    asked(connection, A, B)
    assert connection.handle([ConnectionLost("unknown key", key_refused=True)], 0.0) == [Close()]
    assert wait_out(connection)[1] == [RequestForwarders()]


def test_forwarder_that_does_not_answer_times_out() -> None:
    connection = make()
    connection.handle([Started()], 0.0)
    asked(connection, A)
    due_at, actions = wait_out(connection)
    assert due_at == 15.0
    assert actions == [Close()]


def refuse(connection: Connection, code: str, *, retryable: bool = False, now: float = 0.0) -> list[Action]:
    connection.handle([HandshakeDone()], now)
    connection.handle([Sent(HELLO)], now)
    error = ErrorRecord(code, "no", retryable=retryable).to_json()
    return connection.handle([Received(wire.Envelope(wire.Refused(error=error)))], now)


@pytest.mark.parametrize("code", ["ENDPOINT_TAKEN_OVER", "SPOOL_OUTDATED", "SOMETHING_NEW"])
def test_final_refusal_ends_the_agent(code: str) -> None:
    connection = make()
    connection.handle([Started()], 0.0)
    asked(connection, A)
    close, give_up = refuse(connection, code)
    assert close == Close()
    assert isinstance(give_up, GiveUp)
    assert give_up.error.record.code == code


def test_endpoint_in_use_is_retried_for_a_short_time() -> None:
    """Which may have died: its spool was lost, and this one has a new one."""
    connection = make()
    connection.handle([Started()], 0.0)
    asked(connection, A)
    now = 0.0
    while (last := refuse(connection, "ENDPOINT_IN_USE", now=now)[-1]) == Close():
        now, actions = wait_out(connection)
        if actions == [RequestForwarders()]:
            asked(connection, A, now=now)
    assert isinstance(last, GiveUp)
    assert 10.0 <= now < 60.0


def test_retriable_refusal_is_retried() -> None:
    connection = make()
    connection.handle([Started()], 0.0)
    asked(connection, A)
    assert refuse(connection, "BUSY", retryable=True) == [Close()]
    assert wait_out(connection)[1] == [RequestForwarders()]


def test_a_bad_ticket_is_renewed_once() -> None:
    connection = make()
    connection.handle([Started()], 0.0)
    asked(connection, A)
    assert refuse(connection, "TICKET_INVALID") == [Close()]
    due_at, actions = wait_out(connection)
    assert actions == [RequestForwarders()]
    asked(connection, A, now=due_at)
    assert isinstance(refuse(connection, "TICKET_INVALID")[-1], GiveUp)


def test_heartbeats_are_sent_and_missing_ones_end_the_session() -> None:
    connection = make()
    open_session(connection)
    assert connection.handle([Tick()], 9.9) == []
    assert connection.next_deadline() == 10.0
    assert connection.handle([Tick()], 10.0) == [SendHeartbeat()]
    connection.handle([Sent(wire.Heartbeat(at=0.0))], 10.0)
    connection.handle([Received(wire.Envelope(wire.Heartbeat(at=0.0)))], 12.0)
    assert connection.handle([Tick()], 12.0) == []
    assert Closed("the forwarder has been silent for too long") in connection.handle([Tick()], 42.0)


def test_a_draining_forwarder_is_left_after_the_time_that_it_names() -> None:
    connection = make()
    open_session(connection)
    connection.handle([Received(wire.Envelope(wire.Redirect(reason="new version", retry_after_s=3.0)))], 1.0)
    assert not connection.is_open
    assert connection.may_send(wire.TaskResults)
    assert connection.handle([Tick()], 3.9) == []
    actions = connection.handle([Tick()], 4.0)
    assert actions == [
        Close(politely=True),
        Closed("the forwarder asks the agent to reconnect: new version"),
        RequestForwarders(),
    ]
    assert connection.may_send(wire.Goodbye)


def test_illegal_message_ends_the_session() -> None:
    connection = make()
    open_session(connection)
    log, *others = connection.handle([Received(wire.Envelope(WELCOME))], 1.0)
    assert isinstance(log, Log)
    assert "Welcome" in log.message
    assert others[0] == Close()
    assert isinstance(others[1], Closed)


def test_malformed_message_ends_the_session() -> None:
    connection = make()
    open_session(connection)
    actions = connection.handle([MalformedReceived("no header")], 1.0)
    assert actions == [Log("the forwarder broke the protocol: no header"), Close(), Closed("no header")]


def test_messages_about_tasks_are_delivered_while_there_is_a_session() -> None:
    connection = make()
    envelope = wire.Envelope(wire.CancelTasks(task_ids=("a",)))
    assert connection.handle([Received(envelope)], 0.0) == []
    open_session(connection)
    assert connection.handle([Received(envelope)], 0.0) == [Deliver(envelope)]
    with pytest.raises(ProtocolError):
        connection.handle([Sent(HELLO)], 0.0)


def test_late_answers_are_ignored() -> None:
    connection = make()
    open_session(connection)
    assert asked(connection, B) == []
    assert connection.handle([ApiFailed(Unavailable("late").record)], 0.0) == []
    assert connection.handle([HandshakeDone()], 0.0) == []
    connection.handle([ConnectionLost("gone")], 0.0)
    assert connection.handle([ConnectionLost("gone again")], 0.0) == []
