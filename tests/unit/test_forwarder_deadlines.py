"""Deadline queue: each key is due at its earliest deadline, and once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farcall_forwarder.core.deadlines import DeadlineQueue

SECONDS = st.integers(0, 20).map(float)


def test_keys_are_due_in_order_and_once() -> None:
    deadlines = DeadlineQueue[str]()
    for key, at in (("later", 3.0), ("soon", 1.0), ("between", 2.0)):
        deadlines.enter(key, at=at)
    assert deadlines.due(0.9) == []
    assert deadlines.due(2.0) == ["soon", "between"]
    assert deadlines.due(9.0) == ["later"]
    assert deadlines.due(9.0) == []


def test_the_earliest_deadline_of_a_key_counts() -> None:
    deadlines = DeadlineQueue[str]()
    deadlines.enter("a", at=5.0)
    deadlines.enter("a", at=2.0)
    deadlines.enter("a", at=8.0)
    assert deadlines.due(2.0) == ["a"]
    deadlines.enter("a", at=6.0)
    assert deadlines.due(5.0) == [], "the replaced deadline"
    assert deadlines.due(6.0) == ["a"]


def test_a_key_entered_again_is_due_at_the_next_check() -> None:
    deadlines = DeadlineQueue[str]()
    deadlines.enter("blocked", at=1.0)
    for now in (1.0, 1.5, 2.0):
        assert deadlines.due(now) == ["blocked"]
        deadlines.enter("blocked", at=1.0)


@given(st.lists(st.one_of(st.tuples(st.sampled_from("abc"), SECONDS), SECONDS), max_size=60))
def test_each_key_is_due_at_its_earliest_deadline(steps: list[tuple[str, float] | float]) -> None:
    deadlines, expected = DeadlineQueue[str](), dict[str, float]()
    for step in steps:
        if isinstance(step, tuple):
            key, at = step
            deadlines.enter(key, at=at)
            expected[key] = min(at, expected.get(key, at))
        else:
            due = sorted((key for key, at in expected.items() if at <= step), key=lambda key: expected[key])
            found = deadlines.due(step)
            assert sorted(found) == sorted(due)
            assert [expected[key] for key in found] == sorted(expected[key] for key in due)
            for key in due:
                del expected[key]
