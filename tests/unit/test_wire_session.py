"""Session: legal messages of each phase, credit, silence. A hypothesis test connects two sessions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_common.errors import ProtocolError
from farcall_common.task_options import TaskOptions
from farcall_common.wire import messages as m
from farcall_common.wire.session import SILENT_PERIODS, Phase, Role, Session

HELLO = m.Hello(endpoint_id="e", ticket="t", instance_id="i", spool_id="s", protocol_versions=(1,), heartbeat_s=30)
WELCOME = m.Welcome(session_id="x", forwarder_id="f", protocol_version=1, heartbeat_s=10)
OPEN_STREAM = m.OpenStream(ticket="t", protocol_versions=(1,), heartbeat_s=30)
OPENED = m.StreamOpened(session_id="x", protocol_version=1, heartbeat_s=10, cursor="f:0")
REFUSED = m.Refused(error={"code": "SESSION_REFUSED", "message": "no"})
BEAT = m.Heartbeat(at=0.0)


def _run(count: int) -> m.RunTasks:
    task = m.TaskSpec(task_id="t", attempt=1, function_id="f", function_hash="h", options=TaskOptions(), payload=0)
    return m.RunTasks(tasks=(task,) * count)


def _agent() -> Session:
    return Session(Role.AGENT, heartbeat_s=30, now=0)


def _opened() -> Session:
    session = _agent()
    session.sent(HELLO, now=1)
    session.received(WELCOME, now=2)
    return session


def test_an_agent_opens_a_session() -> None:
    session = _opened()
    assert session.phase is Phase.OPEN
    assert session.heartbeat_s == 10


def test_a_client_opens_a_stream() -> None:
    session = Session(Role.CLIENT, heartbeat_s=30, now=0)
    session.sent(OPEN_STREAM, now=0)
    session.received(OPENED, now=0)
    session.sent(m.Subscribe(task_group_ids=("g",)), now=0)
    session.received(m.ResultsReady(cursor="f:1", results=()), now=0)
    assert session.phase is Phase.OPEN


@pytest.mark.parametrize("first", [WELCOME, BEAT, _run(1), OPENED])
def test_only_a_refusal_may_precede_the_hello(first: m.Message) -> None:
    with pytest.raises(ProtocolError):
        _agent().received(first, now=0)


@pytest.mark.parametrize("early", [m.Credit(tasks=1), BEAT, HELLO, m.TasksAccepted(tasks=())])
def test_an_agent_waits_for_its_welcome(early: m.Message) -> None:
    session = _agent()
    session.sent(HELLO, now=0)
    with pytest.raises(ProtocolError):
        session.sent(early, now=0)


def test_an_agent_cannot_speak_as_a_client() -> None:
    with pytest.raises(ProtocolError):
        Session(Role.FORWARDER, facing=Role.CLIENT, heartbeat_s=1, now=0).received(HELLO, now=0)
    with pytest.raises(ProtocolError):
        _opened().sent(m.Subscribe(task_group_ids=()), now=0)


def test_a_session_has_one_forwarder() -> None:
    for role, facing in ((Role.FORWARDER, Role.FORWARDER), (Role.AGENT, Role.CLIENT)):
        with pytest.raises(ValueError, match="forwarder"):
            Session(role, facing=facing, heartbeat_s=1, now=0)


def test_credit_bounds_the_tasks() -> None:
    session = _opened()
    session.sent(m.Credit(tasks=3), now=3)
    session.received(_run(2), now=4)
    assert session.credit == 1
    with pytest.raises(ProtocolError, match="credit"):
        session.received(_run(2), now=5)
    assert session.credit == 1


def test_a_draining_session_accepts_results_but_no_new_tasks() -> None:
    session = _opened()
    session.sent(m.Credit(tasks=3), now=3)
    session.received(m.Redirect(reason="deploy"), now=4)
    assert session.phase is Phase.DRAINING
    session.sent(m.TaskResults(results=()), now=5)
    session.received(m.ResultsRecorded(tasks=()), now=5)
    with pytest.raises(ProtocolError):
        session.received(_run(1), now=6)


@pytest.mark.parametrize("last", [m.Goodbye(), REFUSED])
def test_no_message_is_legal_after_the_end(last: m.Message) -> None:
    session = _opened()
    if isinstance(last, m.Goodbye):
        session.sent(last, now=3)
    else:
        session.received(last, now=3)
    assert session.phase is Phase.CLOSED
    for message in (BEAT, m.Credit(tasks=1)):
        with pytest.raises(ProtocolError):
            session.sent(message, now=4)
    with pytest.raises(ProtocolError):
        session.received(BEAT, now=4)
    assert not session.is_dead(now=1e9)


def test_heartbeat_is_due_after_an_idle_period() -> None:
    session = _opened()
    session.sent(BEAT, now=5)
    assert not session.heartbeat_due(now=14.9)
    assert session.heartbeat_due(now=15)
    session.sent(BEAT, now=15)
    assert not session.heartbeat_due(now=15)


def test_silent_peer_is_lost() -> None:
    session = _opened()
    assert not session.is_dead(now=2 + SILENT_PERIODS * 10 - 0.1)
    assert session.is_dead(now=2 + SILENT_PERIODS * 10)


def test_next_deadline_is_the_earliest_event() -> None:
    session = _opened()
    session.sent(BEAT, now=20)
    assert session.next_deadline() == 30
    assert session.heartbeat_due(now=session.next_deadline())
    waiting = _agent()
    waiting.sent(HELLO, now=7)
    assert not waiting.heartbeat_due(now=1e9)
    assert waiting.next_deadline() == SILENT_PERIODS * 30
    assert waiting.is_dead(now=waiting.next_deadline())


AGENT_SAYS = st.sampled_from([HELLO, m.Credit(tasks=2), m.TasksAccepted(tasks=()), BEAT, m.Goodbye()])
FORWARDER_SAYS = st.sampled_from(
    [WELCOME, _run(1), _run(3), m.ResultsRecorded(tasks=()), BEAT, m.Redirect(reason=""), REFUSED]
)


@given(talk=st.lists(st.tuples(st.just("agent"), AGENT_SAYS) | st.tuples(st.just("forwarder"), FORWARDER_SAYS)))
def test_both_sides_agree_on_the_state(talk: list[tuple[str, m.Message]]) -> None:
    """Whatever one machine lets its end send, the other accepts, and the two never differ in phase or credit."""
    agent = _agent()
    forwarder = Session(Role.FORWARDER, facing=Role.AGENT, heartbeat_s=30, now=0)
    for now, (speaker, message) in enumerate(talk):
        sender, receiver = (agent, forwarder) if speaker == "agent" else (forwarder, agent)
        try:
            sender.sent(message, now=now)
        except ProtocolError:
            with pytest.raises(ProtocolError):
                receiver.received(message, now=now)
        else:
            receiver.received(message, now=now)
        assert (agent.phase, agent.credit) == (forwarder.phase, forwarder.credit)
        assert agent.credit >= 0
