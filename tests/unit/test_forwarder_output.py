"""Output of tasks at the forwarder: what is sent to an agent, and what of its answers counts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from farcall_common import wire
from farcall_common.store.model import OutputAsk
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.event_log import EventLog
from farcall_forwarder.core.output import MAX_REQUESTS
from tests.unit.test_forwarder_core import AGENT, ENDPOINT_ID, World, sent, task_id

OTHER_ID = "00000000-0000-4000-8000-00000000000f"
WANTED = (
    wire.OutputWanted(task_id=task_id(1), stdout_from=10),
    wire.OutputWanted(task_id=task_id(2)),
)
ASK = OutputAsk("r1", ENDPOINT_ID, WANTED, 100)


def piece(number: int = 1, start: int = 10, text: str = "abc", **fields: Any) -> wire.OutputPiece:
    stdout = wire.OutputText(start=start, next=start + len(text), text=text)
    values: dict[str, Any] = {"stdout": stdout, "attempt": 1} | fields
    return wire.OutputPiece(task_id=task_id(number), **values)


def asked(ask: OutputAsk = ASK, **hello_fields: Any) -> World:
    """A world in which an agent has been asked."""
    world = World()
    world.serve(**hello_fields)
    [request] = sent(world.on(ev.OutputRequested([ask])))
    assert request == wire.OutputRequest(request_id=ask.request_id, tasks=ask.tasks, max_bytes=ask.max_bytes)
    return world


def answered(world: World, *pieces: wire.OutputPiece, request_id: str = "r1") -> list[wire.OutputPiece]:
    """The pieces that the API gets of an agent's answer."""
    actions = world.hears(wire.TaskOutput(request_id=request_id, pieces=pieces))
    for action in actions:
        assert isinstance(action, do.AnswerOutput)
        assert (action.request_id, action.endpoint_id) == ("r1", ENDPOINT_ID)
    return [each for action in actions if isinstance(action, do.AnswerOutput) for each in action.pieces]


def test_answers_in_parts_are_passed_on_once() -> None:
    world = asked()
    assert answered(world, piece(2, 0)) == [piece(2, 0)]
    assert answered(world, piece(2, 0), piece(1)) == [piece(1)]
    assert answered(world, piece(1), piece(2, 0)) == []


def test_what_was_not_requested_is_not_passed_on() -> None:
    world = asked()
    assert answered(world, piece(3), piece(1), request_id="r2") == []
    assert answered(world, piece(3)) == []
    world.mono += 6.0
    assert answered(world, piece(1)) == []


@pytest.mark.parametrize(
    "forged",
    [
        piece(1, 9),  # before what was requested
        piece(1, text="x" * 101),
        piece(1, stdout=wire.OutputText(start=10, next=11, text="more than one byte")),
        piece(1, stdout=wire.OutputText(start=10, next=5)),
        piece(1, stderr=wire.OutputText(start=0, next=101)),
        piece(1, sealed="x" * 3000),
        piece(1, sealed="\N{GRINNING FACE}" * 1000),  # too many bytes
        piece(1, sealed="\0" * 1000),  # too many as JSON
        piece(1, text="both", sealed="and"),
        piece(1, reason="ENDPOINT_OFFLINE"),
        piece(1, reason="x" * 1000),
    ],
)
def test_pieces_that_cannot_be_are_not_passed_on(forged: wire.OutputPiece) -> None:
    world = asked()
    assert answered(world, forged, piece(2, 0)) == [piece(2, 0)]
    assert answered(world, piece(1)) == [piece(1)]


def test_agent_that_cannot_be_asked_is_answered_for() -> None:
    world = World()
    world.serve()
    [answer] = world.on(ev.OutputRequested([msgspec.structs.replace(ASK, endpoint_id=OTHER_ID)]))
    assert isinstance(answer, do.AnswerOutput)
    assert [(each.task_id, each.reason) for each in answer.pieces] == [(task_id(n), "ENDPOINT_OFFLINE") for n in (1, 2)]


def test_requests_at_one_agent_are_bounded() -> None:
    world = asked()
    asks = [msgspec.structs.replace(ASK, request_id=f"more-{number}") for number in range(2 * MAX_REQUESTS)]
    actions = world.on(ev.OutputRequested(asks))
    assert len(sent(actions)) == MAX_REQUESTS - 1
    busy = [each for each in actions if isinstance(each, do.AnswerOutput)]
    assert len(busy) == len(asks) - MAX_REQUESTS + 1
    assert {piece.reason for each in busy for piece in each.pieces} == {"NO_ANSWER"}
    world.mono += 6.0
    assert len(sent(world.on(ev.OutputRequested(asks)))) == MAX_REQUESTS


def test_answer_after_the_session_is_not_passed_on() -> None:
    world = asked()
    world.on(ev.PeerDisconnected(b"agent"))
    world.hears(wire.TaskOutput(request_id="r1", pieces=(piece(1),)))
    [answer] = world.on(ev.OutputRequested([ASK]))
    assert isinstance(answer, do.AnswerOutput)
    assert answer.pieces[0].reason == "ENDPOINT_OFFLINE"


def test_event_log_has_no_output() -> None:
    world, log = asked(), EventLog()
    envelope = wire.Envelope(wire.TaskOutput(request_id="r1", pieces=(piece(text="secret", sealed="sealed secret"),)))
    log.add([ev.Received(b"agent", AGENT, envelope)], world.now)
    assert "secret" not in str(list(log.records()))
