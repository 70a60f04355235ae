"""Functions that tasks call: sent with them, once a session."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from farcall_common import wire
from farcall_common.environments import Environment
from farcall_common.limits import MAX_ENVELOPE_BYTES, MAX_FRAMES, MAX_HEADER_BYTES
from farcall_common.store.model import FunctionBody, LeasedTask
from farcall_common.task_options import Callee
from farcall_common.wire import TaskState
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.policy import Policy
from farcall_forwarder.core.run_tasks import orders
from tests.unit.test_forwarder_core import ENDPOINT_ID, SIGNED, World, leased, not_signed, sent, task_id, the_flush

OWN = ("function", "hash")
LOAD, RESIZE = ("f-load", "h-load"), ("f-resize", "h-resize")


def graph(number: int, *functions: tuple[str, str], **fields: Any) -> LeasedTask:
    callees = tuple(Callee(id_, hash_, 1) for id_, hash_ in functions or (LOAD, RESIZE))
    return leased(number, callees=callees, **fields)


def serving(**hello_fields: Any) -> World:
    world = World()
    world.serve(credit=500, **hello_fields)
    return world


def bodies(
    *functions: tuple[str, str], signature: str = "", body: bytes = b"body"
) -> Mapping[str, Mapping[str, FunctionBody]]:
    return {id_: {hash_: FunctionBody(f"name of {id_}", body, signature)} for id_, hash_ in functions}


def lease(world: World, *tasks: LeasedTask) -> list[do.Action]:
    return world.on(ev.TasksLeased(ENDPOINT_ID, 7, 500, tasks))


def prepared(world: World, prepare: do.Action, found: Mapping[str, Mapping[str, FunctionBody]]) -> list[do.Action]:
    assert isinstance(prepare, do.PrepareTasks)
    return world.on(ev.TasksPrepared(prepare, found, {}, frozenset()))


def runs(actions: Sequence[do.Action]) -> list[tuple[list[str], list[str]]]:
    """Tasks and hashes of functions of each RunTasks among actions."""
    orders_ = [message for message in sent(actions) if isinstance(message, wire.RunTasks)]
    return [([t.task_id for t in o.tasks], sorted(f.function_hash for f in o.functions)) for o in orders_]


def test_functions_of_a_graph_are_fetched_and_sent_once_a_session() -> None:
    world = serving()
    [prepare] = lease(world, graph(1))
    assert isinstance(prepare, do.PrepareTasks)
    assert prepare.functions == [LOAD, RESIZE, OWN]
    actions = prepared(world, prepare, bodies(LOAD, RESIZE, OWN, signature="s"))
    assert runs(actions) == [([task_id(1)], ["h-load", "h-resize", "hash"])]
    [order] = sent(actions)
    assert isinstance(order, wire.RunTasks)
    assert {(each.name, each.signature) for each in order.functions} == {
        (f"name of {id_}", "s") for id_, _ in (LOAD, RESIZE, OWN)
    }
    assert order.tasks[0].options.callees == (Callee(*LOAD, 1), Callee(*RESIZE, 1))
    world.on(ev.WorkAvailable([ENDPOINT_ID]))
    assert runs(lease(world, graph(2), leased(3))) == [([task_id(2), task_id(3)], [])]


def test_cached_functions_are_not_fetched() -> None:
    world = serving()
    for id_, hash_ in (OWN, LOAD, RESIZE):
        world.core._context.functions.add(id_, hash_, FunctionBody("name", b"body"))
    assert runs(lease(world, graph(1))) == [([task_id(1)], ["h-load", "h-resize", "hash"])]


def test_what_one_task_has_fetched_another_uses() -> None:
    world = serving()
    [prepare] = lease(world, graph(1), graph(2, RESIZE), leased(3))
    actions = prepared(world, prepare, bodies(LOAD, RESIZE, OWN))
    assert runs(actions) == [([task_id(1), task_id(2), task_id(3)], ["h-load", "h-resize", "hash"])]


@pytest.mark.parametrize("missing", [LOAD, RESIZE, OWN])
def test_task_of_which_a_function_was_deleted_ends(missing: tuple[str, str]) -> None:
    world = serving()
    [prepare] = lease(world, graph(1), leased(2))
    found = bodies(*({LOAD, RESIZE, OWN} - {missing}))
    actions = prepared(world, prepare, found)
    [result] = [each for each in the_flush(actions).batches[0].results if each.task_id == task_id(1)]
    assert result.error is not None
    assert (result.state, result.error.code) == (TaskState.FAILED, "FUNCTION_UNKNOWN")
    assert f"The function {missing[0]} was deleted" in result.error.message
    assert [tasks for tasks, _ in runs(actions)] == ([] if missing == OWN else [[task_id(2)]])


def test_graph_is_not_sent_to_an_agent_that_does_not_run_the_environment_of_a_callee() -> None:
    world = serving(capabilities=wire.Capabilities(containers=("uv",)))
    sci = Environment(type="apptainer", location="/images/sci.sif", name="sci")
    actions = lease(world, leased(1, callees=(Callee(*LOAD, 1), Callee(*RESIZE, 1, sci))))
    assert runs(actions) == []
    [result] = the_flush(actions).batches[0].results
    assert result.error is not None
    assert result.error.code == "ENDPOINT_INCOMPATIBLE"
    assert "requires environment sci (apptainer)" in result.error.message


def test_each_callee_has_its_own_signature() -> None:
    """Where signatures count, a function with the same body is another one."""
    world = serving(capabilities=SIGNED)
    [prepare] = lease(world, graph(1, LOAD, ("f-other", LOAD[1])))
    assert isinstance(prepare, do.PrepareTasks)
    found = {**bodies(OWN, LOAD, signature="a"), **bodies(("f-other", LOAD[1]), signature="b")}
    actions = prepared(world, prepare, found)
    [order] = sent(actions)
    assert isinstance(order, wire.RunTasks)
    signatures = {(each.function_hash, each.signature) for each in order.functions}
    assert signatures == {("hash", "a"), ("h-load", "a"), ("h-load", "b")}
    assert runs(lease(world, graph(2, LOAD)))[0][1] == []
    world.hears(not_signed(1))  # it may be signed by now: all are read again
    [again] = lease(world, graph(3, LOAD))
    assert isinstance(again, do.PrepareTasks)
    assert again.functions == [LOAD, OWN]


def test_functions_that_do_not_fit_the_cache_together_are_sent_all_the_same() -> None:
    world = World(dataclasses.replace(Policy(), function_cache_bytes=15))
    world.serve(credit=5)
    world.core._context.functions.add(*LOAD, FunctionBody("name", b"0123456789"))
    [prepare] = lease(world, graph(1))
    actions = prepared(world, prepare, bodies(LOAD, RESIZE, OWN, body=b"0123456789"))
    assert runs(actions) == [([task_id(1)], ["h-load", "h-resize", "hash"])]


def test_function_that_the_agent_has_to_be_sent_again_meanwhile_is_fetched() -> None:
    world = serving(capabilities=SIGNED)
    [first] = lease(world, graph(1, LOAD))
    prepared(world, first, bodies(OWN, LOAD))
    [second] = lease(world, graph(2))
    assert isinstance(second, do.PrepareTasks)
    assert second.functions == [RESIZE]
    world.hears(not_signed(1))  # the session's functions are forgotten
    [third] = prepared(world, second, bodies(RESIZE))
    assert isinstance(third, do.PrepareTasks)
    assert third.functions == [LOAD, RESIZE, OWN]
    actions = prepared(world, third, bodies(LOAD, RESIZE, OWN))
    assert runs(actions) == [([task_id(2)], ["h-load", "h-resize", "hash"])]


def test_a_thousand_functions_go_ahead_in_messages_that_agents_accept() -> None:
    callees = tuple(Callee(f"{number:036}", f"{number:064}", 1) for number in range(1000))
    tasks = [leased(number, callees=callees) for number in range(100)]
    large = [(f"{number:064}", FunctionBody("name", bytes(100_000))) for number in range(500)]
    small = [(f"{number:064}", FunctionBody("name", b"")) for number in range(500, 5000)]
    messages = list(orders(tasks, new_functions=[*large, *small], urls={}, limit_bytes=4 * 2**20))
    assert [each.function_hash for order, _ in messages for each in order.functions] == [h for h, _ in (*large, *small)]
    assert [each.task_id for order, _ in messages for each in order.tasks] == [each.task.task_id for each in tasks]
    has_tasks = [bool(order.tasks) for order, _ in messages]
    assert has_tasks == sorted(has_tasks), "functions first"
    for order, frames in messages:
        header, *rest = wire.encode(wire.Envelope(order, frames))
        assert len(header) < MAX_HEADER_BYTES
        assert len(rest) < MAX_FRAMES
        assert len(header) + sum(map(len, rest)) < MAX_ENVELOPE_BYTES
        assert all(frames[function.body] is not None for function in order.functions)
        assert wire.decode([header, *rest]).message == order


def test_tasks_with_very_many_functions_are_leased_a_few_at_a_time() -> None:
    world = serving()
    callees = tuple(Callee(f"f{number}", "hash", 1) for number in range(1000))
    found = {"function": {"hash": FunctionBody("name", b"body")}}
    found |= {each.function_id: {"hash": FunctionBody("name", b"body")} for each in callees}

    def next_limit(*tasks: LeasedTask) -> int:
        actions = world.on(ev.TasksLeased(ENDPOINT_ID, 7, len(tasks), tasks))
        leases = [each for each in actions if isinstance(each, do.LeaseTasks)]
        for prepare in actions:
            if isinstance(prepare, do.PrepareTasks):
                prepared(world, prepare, found)
        return leases[-1].limit

    assert next_limit(leased(1)) == 499
    assert next_limit(*[leased(number, callees=callees) for number in (2, 3)]) == 20
    assert next_limit(leased(4), leased(5, callees=callees)) == 40
    assert next_limit(leased(6)) == 494
