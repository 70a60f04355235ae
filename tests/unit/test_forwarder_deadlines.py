"""When the forwarder looks at what: everything at its time, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farcall_forwarder.core.deadlines import DeadlineQueue

SECONDS = st.integers(0, 20).map(float)


def test_the_earliest_come_first_and_each_once() -> None:
    agenda = DeadlineQueue[str]()
    for key, at in (("later", 3.0), ("soon", 1.0), ("between", 2.0)):
        agenda.enter(key, at=at)
    assert agenda.due(0.9) == []
    assert agenda.due(2.0) == ["soon", "between"]
    assert agenda.due(9.0) == ["later"]
    assert agenda.due(9.0) == []


def test_a_sooner_time_counts_and_a_later_one_does_not() -> None:
    agenda = DeadlineQueue[str]()
    agenda.enter("a", at=5.0)
    agenda.enter("a", at=2.0)
    agenda.enter("a", at=8.0)
    assert agenda.due(2.0) == ["a"]
    agenda.enter("a", at=6.0)
    assert agenda.due(5.0) == [], "the time that was given up"
    assert agenda.due(6.0) == ["a"]


def test_what_is_entered_again_while_it_is_due_waits_for_the_next_look() -> None:
    agenda = DeadlineQueue[str]()
    agenda.enter("blocked", at=1.0)
    for now in (1.0, 1.5, 2.0):
        assert agenda.due(now) == ["blocked"]
        agenda.enter("blocked", at=1.0)


@given(st.lists(st.one_of(st.tuples(st.sampled_from("abc"), SECONDS), SECONDS), max_size=60))
def test_it_is_the_smallest_time_of_each_key(steps: list[tuple[str, float] | float]) -> None:
    agenda, expected = DeadlineQueue[str](), dict[str, float]()
    for step in steps:
        if isinstance(step, tuple):
            key, at = step
            agenda.enter(key, at=at)
            expected[key] = min(at, expected.get(key, at))
        else:
            due = sorted((key for key, at in expected.items() if at <= step), key=lambda key: expected[key])
            found = agenda.due(step)
            assert sorted(found) == sorted(due)
            assert [expected[key] for key in found] == sorted(expected[key] for key in due)
            for key in due:
                del expected[key]
