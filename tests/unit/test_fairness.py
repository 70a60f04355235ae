"""Fair share among submitters."""

from __future__ import annotations

import random

import pytest

from farcall_common.fairness import FairQueue


def taken(queue: FairQueue[str], count: int = 1000, *, new_submitters_only: bool = False) -> list[str]:
    found: list[str] = []
    while len(found) < count and (next_one := queue.take(new_submitters_only=new_submitters_only)) is not None:
        found.append(next_one[1])
    return found


def filled(weights: dict[str, int] | None = None, **counts: int) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue(weights)
    for submitter, count in counts.items():
        for number in range(count):
            queue.add(submitter, f"{submitter}{number}")
    return queue


def test_one_submitter_is_served_in_order() -> None:
    queue = filled(a=5)
    assert (len(queue), queue.submitters) == (5, 1)
    assert taken(queue) == ["a0", "a1", "a2", "a3", "a4"]
    assert (len(queue), queue.submitters, queue.take()) == (0, 0, None)


def test_a_single_item_does_not_wait_behind_a_backlog() -> None:
    queue = filled(a=1000)
    taken(queue, 3)
    queue.add("b", "b0")
    assert taken(queue, 2) == ["b0", "a3"]


def test_submitter_without_tasks_goes_first() -> None:
    queue = filled(a=3)
    taken(queue, 1)
    queue.add("b", "b0")
    queue.done("a")  # neither has anything taken now
    assert taken(queue, 2) == ["b0", "a1"]


def test_submitter_with_constant_load_does_not_starve_others() -> None:
    queue = filled(a=3)
    order = []
    queue.add("b", "b0")
    for number in range(1, 4):
        order += taken(queue, 1)
        queue.add("b", f"b{number}")
        queue.done(order[-1][0])
    assert order == ["a0", "b0", "a1"]


def test_submitters_take_turns() -> None:
    assert taken(filled(a=4, b=2, c=1)) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_submitters_with_one_item_each_are_served_in_order_of_arrival() -> None:
    queue = filled(None, **{f"s{number}": 1 for number in range(500)})
    assert taken(queue) == [f"s{number}0" for number in range(500)]


def test_weights_give_a_larger_share() -> None:
    queue = filled({"a": 3}, a=100, b=100)
    assert [sum(name.startswith(letter) for name in taken(queue, 40)) for letter in "ab"] == [30, 10]


def test_submitter_with_fewest_items_taken_is_next() -> None:
    queue = filled(a=100)
    taken(queue, 10)
    for number in range(5):
        queue.add("b", f"b{number}")
    for number in range(5):  # the items of b end at once, those of a do not
        assert taken(queue, 1) == [f"b{number}"]
        queue.done("b")
    for _ in range(10):
        queue.done("a")
    assert taken(queue, 1) == ["a10"]


def test_submitters_without_taken_items_are_listed() -> None:
    queue = filled(a=2, b=1)
    assert taken(queue, 1) == ["a0"]
    assert taken(queue, new_submitters_only=True) == ["b0"]
    queue.done("a")
    assert taken(queue, new_submitters_only=True) == ["a1"]


def test_returned_item_is_next_and_does_not_count() -> None:
    queue = filled(a=3, b=2)
    assert taken(queue, 3) == ["a0", "b0", "a1"]
    queue.put_back("a", "a1")
    queue.done("a")
    assert taken(queue) == ["b1", "a1", "a2"]


def test_peeked_item_keeps_its_turn() -> None:
    queue = filled(a=3, b=3, c=1)
    looked_at = [found for _ in range(5) if (found := queue.take())]
    for found in reversed(looked_at):
        queue.undo(*found)
    assert taken(queue) == ["a0", "b0", "c0", "a1", "b1", "a2", "b2"]


def test_all_items_can_be_removed_at_once() -> None:
    queue = filled(a=3, b=2)
    taken(queue, 2)
    assert (queue.clear(), len(queue), queue.take()) == (["a1", "a2", "b1"], 0, None)
    queue.add("c", "c0")
    queue.add("a", "a9")
    assert taken(queue) == ["c0", "a9"]


def test_removal_keeps_the_order_of_other_items() -> None:
    queue = filled(a=3, b=1)
    queue.remove("a", "a1")
    queue.remove("b", "b0")
    with pytest.raises(ValueError, match="not in deque"):
        queue.remove("b", "b0")
    assert (taken(queue), len(queue)) == (["a0", "a2"], 0)


def test_items_held_without_waiting_count() -> None:
    queue = filled(a=2, b=2)
    queue.hold("a")
    assert taken(queue) == ["b0", "a0", "b1", "a1"]


def test_submitter_with_as_many_as_it_may_have_is_passed_over() -> None:
    queue = filled(a=3, b=2)
    queue.set_limits({"a": 1})
    assert taken(queue) == ["a0", "b0", "b1"]
    assert (queue.limit_reached("a"), queue.limit_reached("b"), len(queue)) == (1, 0, 2)
    queue.done("a")
    assert (queue.limit_reached("a"), taken(queue)) == (0, ["a1"])
    queue.set_limits({})
    assert taken(queue) == ["a2"]


def test_limit_of_a_submitter_is_for_both_lanes() -> None:
    queue = FairQueue[str]()
    queue.set_limits({"a": 2})
    for submitter in ("a", "a!", "b"):
        queue.add_several(submitter, [f"{submitter}{number}" for number in range(3)])
    assert taken(queue) == ["a0", "a!0", "b0", "b1", "b2"]
    assert (queue.limit_reached("a"), queue.limit_reached("a!"), queue.limit_reached("b")) == (2, 2, 0)
    queue.done("a")
    queue.hold("a")
    assert taken(queue) == []
    queue.done("a")
    assert taken(queue) == ["a1"]
    queue.done("a!")
    assert taken(queue) == ["a!1"]


def test_next_submitter_has_the_fewest_taken_in_random_runs() -> None:
    """Against a simple model, at random; and the heap stays small."""
    chance = random.Random(1)
    weights = {"a": 1, "b": 2, "c": 5}
    limits: dict[str, int] = {}
    queue: FairQueue[int] = FairQueue(weights)
    waiting: dict[str, list[int]] = {name: [] for name in weights}
    out = dict.fromkeys(weights, 0)
    for number in range(5000):
        name = chance.choice("abc")
        what = chance.random()
        if number % 50 == 0:
            limits = {each: chance.randint(1, 20) for each in chance.sample("abc", chance.randint(0, 3))}
            queue.set_limits(limits)
        if what < 0.4:
            queue.add(name, number)
            waiting[name].append(number)
        elif what < 0.7:
            found = queue.take()
            may = [each for each, items in waiting.items() if items and out[each] < limits.get(each, 9999)]
            levels = {each: out[each] // weights[each] for each in may}
            assert (found is None) == (not levels)
            if found:
                submitter, item, _ = found
                assert levels[submitter] == min(levels.values())
                assert waiting[submitter].pop(0) == item
                out[submitter] += 1
        elif what < 0.95:
            if out[name]:
                queue.done(name)
                out[name] -= 1
        elif waiting[name]:
            queue.remove(name, waiting[name].pop(chance.randrange(len(waiting[name]))))
        assert len(queue) == sum(map(len, waiting.values()))
        assert queue.submitters == sum(map(bool, waiting.values()))
        assert len(queue._heap) <= 65


def test_several_items_are_added_and_taken_as_one_after_the_other() -> None:
    """Two queues, at random: one gets and gives several at once."""
    chance = random.Random(2)
    together: FairQueue[int] = FairQueue({"b": 3})
    each: FairQueue[int] = FairQueue({"b": 3})
    out = dict.fromkeys("abc", 0)
    for number in range(2000):
        name, count, what = chance.choice("abc"), chance.randint(1, 4), chance.random()
        if what < 0.35:
            together.add_several(name, [number] * count)
            for _ in range(count):
                each.add(name, number)
        elif what < 0.6 and together.of(name):
            count = min(count, len(together.of(name)))
            taken_items = together.take_several(name, count)
            found = [item for _ in range(count) if (item := each.take(submitter=name)) is not None]
            assert taken_items == [item for _, item, _ in found]
            out[name] += count
        elif what < 0.8 and (one := together.take()) is not None:
            assert one == each.take()
            out[one[0]] += 1
        elif out[name]:
            together.done(name)
            each.done(name)
            out[name] -= 1
        assert (together.in_turn(), len(together)) == (each.in_turn(), len(each))
