"""Requests of tasks for blocks, in the manager: whose they are, and who gets the answer."""

from __future__ import annotations

import itertools
import threading

import pytest

from farcall_common.objects import node_blocks
from farcall_common.objects.node_blocks import AT_A_TIME
from farcall_endpoint.contracts.manager_worker import BlocksAnswer, BlocksRequest
from farcall_endpoint.manager.core.actions import Answer, ServeBlocks
from farcall_endpoint.manager.core.blocks import MOST_BYTES, MOST_PARTS
from farcall_endpoint.manager.core.events import BlocksServed, PacketsReceived
from farcall_endpoint.manager.shell.block_server import Turns
from farcall_endpoint.manager.shell.file_server import SourceFailed
from tests.support.manager import Rig
from tests.waiting import WAIT_S


def running(*names: str) -> Rig:
    rig = Rig(slots=len(names))
    rig.jobs(*names)
    rig.start_all()
    for worker in range(len(names)):
        rig.read(worker)
    return rig


def test_a_request_is_for_the_submitter_of_the_task_and_answered_to_it() -> None:
    rig = running("a", "b")
    wanted = BlocksRequest("a", 5, "node", (("job/a", 0, 10),))
    [serve] = rig.handle(PacketsReceived(0, [(wanted, b""), (BlocksRequest("b", 6), b"")]))
    assert serve == ServeBlocks(0, "", wanted, "")
    [answer] = rig.handle(BlocksServed(0, "a", BlocksAnswer(5), (b"x" * 10,)))
    assert answer == Answer(0, BlocksAnswer(5), (b"x" * 10,))
    assert rig.killed == []


def test_an_answer_to_a_task_that_has_ended_or_a_worker_that_has_died_is_dropped() -> None:
    rig = running("a", "b")
    for worker, name in enumerate(("a", "b")):
        rig.handle(PacketsReceived(worker, [(BlocksRequest(name, 5), b"")]))
    rig.done(0)
    rig.die(1)
    for worker, name in enumerate(("a", "b")):
        assert not any(
            isinstance(each, Answer) for each in rig.handle(BlocksServed(worker, name, BlocksAnswer(5), (b"x",)))
        )


def test_a_task_that_wants_blocks_without_end_is_ended() -> None:
    rig = running("a")
    requests = [(BlocksRequest("a", number), b"") for number in range(257)]
    rig.handle(PacketsReceived(0, requests[:-1]))
    assert rig.killed == []
    rig.handle(PacketsReceived(0, requests[-1:]))
    assert rig.killed == [0]


def test_readers_ask_for_as_much_as_their_manager_permits() -> None:
    assert (node_blocks.MOST_PARTS, node_blocks.MOST_BYTES) == (MOST_PARTS, MOST_BYTES)


def test_a_task_that_wants_more_bytes_than_its_manager_may_hold_is_ended() -> None:
    for parts in (
        [("a", 0, 1)] * (MOST_PARTS + 1),
        [("a", 0, MOST_BYTES // 2 + 1)] * 2,
        [("sparse", 0, MOST_BYTES + 1)],
        [("a", 2, 1)],
        [("a", -1, 1)],
        [("a", 0, 2**62), ("b", 2**62, 0)],
    ):
        rig = running("a")
        rig.handle(PacketsReceived(0, [(BlocksRequest("a", 1, "", tuple(parts)), b"")]))
        assert rig.killed == [0]
    rig = running("a")
    large = (("a", 0, MOST_BYTES),)
    requests = [(BlocksRequest("a", number, "", large), b"") for number in range(AT_A_TIME + 1)]
    rig.handle(PacketsReceived(0, requests[:-1]))
    rig.handle(BlocksServed(0, "a", BlocksAnswer(1), (b"",)))
    rig.handle(PacketsReceived(0, requests[-1:]))
    assert rig.killed == [], "an answer makes room for the next request"
    rig.handle(PacketsReceived(0, [(BlocksRequest("a", 9, "", (("a", 0, 1),)), b"")]))
    assert rig.killed == [0]


def test_requests_of_a_worker_that_has_ended_are_dropped() -> None:
    turns = Turns(3)
    requests = [
        ServeBlocks(worker, "one", BlocksRequest("a", number), "one") for worker in (0, 1) for number in range(2)
    ]
    for each in requests:
        turns.put(each)
    assert turns.take() == requests[0]
    pieces = turns.while_wanted(requests[0], itertools.repeat(b"x"))
    assert next(pieces) == b"x"
    assert turns.drop(0) == [requests[1]]
    with pytest.raises(SourceFailed, match="has ended"):
        next(pieces)
    turns.end(requests[0])
    assert [turns.take(), turns.take()] == requests[2:]
    assert next(turns.while_wanted(requests[2], [b"y"])) == b"y"


def test_no_payer_has_all_threads() -> None:
    turns = Turns(3)
    own = [ServeBlocks(0, f"robot-{number}", BlocksRequest("a", number), "one") for number in range(4)]
    other = ServeBlocks(1, "other", BlocksRequest("b", 9), "other")
    for each in (*own, other):
        turns.put(each)
    assert [turns.take() for _ in range(3)] == [own[0], other, own[1]]
    turns.end(own[0])
    assert turns.take() == own[2]
    taken: list[ServeBlocks | None] = []
    thread = threading.Thread(target=lambda: taken.append(turns.take()))
    thread.start()
    turns.end(own[1])
    thread.join(WAIT_S)
    assert taken == [own[3]]
    turns.close()
    assert turns.take() is None
