"""State tables: complete, and consistent with the design."""

from __future__ import annotations

import itertools

from farcall_common.wire.states import LEGAL_TRANSITIONS, REPORTERS, TERMINAL_STATES, Reporter, TaskState, is_legal


def test_tables_are_complete() -> None:
    assert set(LEGAL_TRANSITIONS) == set(REPORTERS) == set(TaskState)


def test_terminal_states_have_no_transition() -> None:
    for before, after, reporter in itertools.product(TERMINAL_STATES, TaskState, Reporter):
        assert not is_legal(before, after, reporter=reporter)


def test_every_open_state_may_reach_every_terminal_state() -> None:
    for before in set(TaskState) - TERMINAL_STATES:
        assert LEGAL_TRANSITIONS[before] >= TERMINAL_STATES
        assert not before.is_terminal


def test_only_an_agent_reports_success() -> None:
    assert REPORTERS[TaskState.SUCCESS] == {Reporter.AGENT}
    assert not is_legal(TaskState.RUNNING, TaskState.SUCCESS, reporter=Reporter.API)
    assert is_legal(TaskState.RUNNING, TaskState.SUCCESS, reporter=Reporter.AGENT)


def test_every_open_state_can_be_reached_from_received() -> None:
    reached, frontier = {TaskState.RECEIVED}, [TaskState.RECEIVED]
    while frontier:
        for after in LEGAL_TRANSITIONS[frontier.pop()] - reached:
            reached.add(after)
            frontier.append(after)
    assert reached == set(TaskState)
