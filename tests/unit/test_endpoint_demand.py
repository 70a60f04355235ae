"""How many slots are missing, where not every node can run every task."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_endpoint.agent.core.demand import NodeLoad, missing_slots

KEYS = ("", "a", "b", "c")


def node(slots: int, *unable: str, **tasks: int) -> NodeLoad:
    return NodeLoad(slots, tasks, frozenset(unable))


def missing(tasks: int, limited: Mapping[str, int], *nodes: NodeLoad) -> int:
    return max(0, round(missing_slots(tasks, limited, nodes)))


def test_slots_count_only_for_tasks_that_can_run_there() -> None:
    assert missing(4, {"a": 4}, node(8, "a")) == 4
    assert missing(4, {"a": 4}, node(8, "a"), node(4)) == 0
    assert missing(12, {"a": 4}, node(8, "a"), node(4)) == 0, "each task where it can run"
    assert missing(14, {"a": 4}, node(8, "a"), node(4)) == 2
    assert missing(6, {"a": 3, "b": 3}, node(4, "a"), node(4, "b")) == 0
    assert missing(12, {"a": 6, "b": 6}, node(4, "a"), node(4, "b"), node(4)) == 0
    assert missing(13, {"a": 9, "b": 4}, node(4, "a"), node(4, "b"), node(4)) == 1


def test_a_task_that_runs_does_not_move_to_make_room() -> None:
    own = {"": 4}
    assert missing(8, {"a": 4}, NodeLoad(4, own), NodeLoad(4, {}, frozenset("a"))) == 4
    queued = {"": 9}
    assert missing(9, {"a": 0}, NodeLoad(4, queued), NodeLoad(4, {}, frozenset("a"))) == 1, (
        "those behind count elsewhere"
    )


def test_tasks_of_the_default_environment_may_be_those_that_cannot_run() -> None:
    assert missing(4, {}, node(8, "")) == 4
    assert missing(6, {"a": 4}, node(8, "")) == 2


@st.composite
def some_nodes(draw: st.DrawFn) -> NodeLoad:
    unable = draw(st.frozensets(st.sampled_from(KEYS)))
    tasks = draw(st.dictionaries(st.sampled_from(KEYS), st.integers(0, 8)))
    return NodeLoad(draw(st.integers(0, 6)), {key: tasks[key] for key in tasks if key not in unable}, unable)


@st.composite
def situations(draw: st.DrawFn) -> tuple[int, dict[str, int], list[NodeLoad]]:
    limited = draw(st.dictionaries(st.sampled_from(KEYS[1:]), st.integers(0, 12)))
    return sum(limited.values()) + draw(st.integers(0, 12)), limited, draw(st.lists(some_nodes(), max_size=6))


def most_lacking(counts: Mapping[str, int], nodes: Sequence[NodeLoad]) -> int:
    """P. Hall's theorem: some set of environments lacks as many slots as are missing at all."""
    sets = itertools.chain.from_iterable(itertools.combinations(counts, size) for size in range(len(counts) + 1))
    return max(
        sum(counts[key] for key in keys) - sum(node.slots for node in nodes if not set(keys) <= node.unable)
        for keys in sets
    )


@given(situations())
def test_without_running_tasks_as_few_are_missing_as_can_be(
    situation: tuple[int, dict[str, int], list[NodeLoad]],
) -> None:
    tasks, limited, nodes = situation
    waiting = [NodeLoad(each.slots, {}, each.unable) for each in nodes]
    counts = {**limited, "": tasks - sum(limited.values())}
    assert missing(tasks, limited, *waiting) == most_lacking(counts, waiting)


@given(situations())
def test_what_runs_only_makes_more_slots_necessary_and_no_slot_counts_twice(
    situation: tuple[int, dict[str, int], list[NodeLoad]],
) -> None:
    tasks, limited, nodes = situation
    free = [NodeLoad(each.slots, {}, each.unable) for each in nodes]
    assert missing(tasks, limited, *free) <= missing(tasks, limited, *nodes) <= tasks
    assert missing(tasks, limited, *nodes) >= tasks - sum(each.slots for each in nodes)
    assert missing(tasks, limited, *nodes, node(tasks)) == 0, "a node for all of them is enough"


@given(
    tasks=st.integers(0, 1000),
    slots=st.lists(st.integers(0, 64), max_size=8),
    parallelism=st.floats(0.01, 1.0),
)
def test_where_all_nodes_run_all_tasks_they_are_two_numbers(tasks: int, slots: list[int], parallelism: float) -> None:
    nodes = [NodeLoad(each, {"": each}) for each in slots]
    expected = tasks * parallelism - sum(slots)
    assert missing_slots(tasks, {}, nodes, parallelism=parallelism) == expected
    elsewhere = [*nodes, NodeLoad(0, {}, frozenset({"a"}))]
    found = missing_slots(tasks, {"a": tasks // 2}, elsewhere, parallelism=parallelism)
    assert max(0.0, found) == pytest.approx(max(0.0, expected), abs=1e-5)


@pytest.mark.parametrize("parallelism", [0.3, 0.5])
def test_parallelism_is_a_part_of_a_slot_for_each_task(parallelism: float) -> None:
    found = missing_slots(20, {"a": 10}, [node(8, "a"), node(1)], parallelism=parallelism)
    assert math.isclose(found, 10 * parallelism - 1)
