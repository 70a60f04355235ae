"""One payer's tasks with files do not hold up those of another one: a simulated endpoint with a small cache."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farcall_common.wire import TaskState
from farcall_endpoint.agent.core.scheduling import DEFAULT_POLICY, POLICIES
from tests.support.cache_simulation import SimulatedEndpoint

MB = 10**6
BUDGET = 50 * MB
MOVE_S = 3.0
"""More than it takes to move all files of these tests, with the waits for room."""


def with_backlog(
    size_bytes: int, *, tasks: int, run_s: float, places: int = 2, policy: str = DEFAULT_POLICY
) -> SimulatedEndpoint:
    """An endpoint whose places, and whose cache, a backlog of mallory's has taken."""
    endpoint = SimulatedEndpoint(budget_bytes=BUDGET, places=places, policy=policy)
    for number in range(tasks):
        endpoint.submit("mallory", f"m{number}", size_bytes, run_s=run_s)
    endpoint.run(lambda: False, 4)
    return endpoint


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("sizes", "run_s"), [((5 * MB,), 1.5), ((45 * MB,), 1.5), ((MB,) * 20, 1.5), ((MB,), 600.0)])
def test_a_backlog_that_fills_the_cache_does_not_hold_up_a_single_task(
    policy: str, sizes: tuple[int, ...], run_s: float
) -> None:
    endpoint = with_backlog(900_000, tasks=100, run_s=run_s, policy=policy)
    endpoint.submit("grace", "g", *sizes, run_s=0.1)
    assert endpoint.run(endpoint.has_ended("g"), run_s + MOVE_S)
    assert endpoint.run(endpoint.has_ended(), 100 * run_s), "and the backlog goes on"
    assert set(endpoint.states.values()) == {TaskState.SUCCESS}
    assert endpoint.fetches <= 2 * 121


def test_accounts_of_a_person_have_one_share() -> None:
    endpoint = SimulatedEndpoint(budget_bytes=BUDGET, places=2)
    for number in range(100):
        endpoint.submit("mallory", f"m{number}", 900_000, run_s=1.5, account=f"robot-{number}")
    endpoint.run(lambda: False, 4)
    endpoint.submit("grace", "g", 20 * MB, run_s=0.1)
    assert endpoint.run(endpoint.has_ended("g"), 1.5 + MOVE_S)


def test_tasks_that_run_keep_their_files_and_what_they_free_is_not_their_payers() -> None:
    endpoint = with_backlog(12 * MB, tasks=20, run_s=1000.0, places=4)
    endpoint.submit("grace", "g", 10 * MB, run_s=0.1)
    endpoint.submit("carol", "c", 10 * MB, run_s=0.1)
    assert endpoint.run(endpoint.has_ended("g", "c"), 1000.0 + MOVE_S)


def test_one_task_that_takes_all_of_the_cache_is_followed_by_another_payer() -> None:
    endpoint = with_backlog(49 * MB, tasks=10, run_s=100.0)
    endpoint.submit("grace", "g", 49 * MB, run_s=0.1)
    endpoint.submit("carol", "c", 5 * MB, run_s=0.1)
    assert endpoint.run(endpoint.has_ended("g", "c"), 100.0 + 2 * MOVE_S)
    assert endpoint.run(endpoint.has_ended(), 1100.0)
    assert endpoint.fetches <= 20


def test_a_task_that_waits_for_all_of_the_cache_does_not_hold_up_others_for_long() -> None:
    """Bob's small file is held for a day, so mallory's large one has no room until then."""
    endpoint = SimulatedEndpoint(budget_bytes=BUDGET, places=4)
    endpoint.submit("bob", "b", MB, run_s=86_400.0)
    endpoint.run(lambda: False, 4)
    endpoint.submit("mallory", "m", BUDGET, run_s=1.0)
    held_up_s = 0.0
    for number in itertools.count():
        endpoint.run(lambda: False, 200)
        if endpoint.now > 80_000:
            break
        endpoint.submit("grace", f"g{number}", MB, run_s=1.0)
        assert endpoint.run(endpoint.has_ended(f"g{number}"), 86_400)
        held_up_s += endpoint.waited(f"g{number}")
    assert held_up_s < 0.1 * endpoint.now
    assert endpoint.run(endpoint.has_ended("m"), 86_400), "and it runs when that ends"


def test_a_large_task_has_its_turn_among_small_ones_that_never_end() -> None:
    endpoint = SimulatedEndpoint(budget_bytes=BUDGET, places=8)
    numbers = itertools.count()

    def submit_another(payer: str) -> None:
        endpoint.submit(payer, f"{payer}-{next(numbers)}", 9 * MB, run_s=50.0)
        endpoint.after(20.0, lambda: submit_another(payer))

    for payer in ("alice", "bob", "carol"):
        submit_another(payer)
    endpoint.run(lambda: False, 100)
    endpoint.submit("dave", "d", 49 * MB, run_s=1.0)
    assert endpoint.run(endpoint.has_ended("d"), 3000.0)


_task = st.tuples(
    st.sampled_from(["alice", "bob", "carol", "dave"]),
    st.lists(st.integers(1, 20), min_size=1, max_size=3),  # MB
    st.sampled_from([0.1, 1.0, 30.0]),
    st.sampled_from([0.0, 0.0, 5.0]),  # before the next one
)


@given(tasks=st.lists(_task, min_size=1, max_size=40), places=st.integers(1, 4), removal_s=st.sampled_from([0.0, 0.7]))
@settings(max_examples=25, deadline=None)
def test_all_tasks_run_and_files_move_a_few_times_at_most(
    tasks: list[tuple[str, list[int], float, float]], places: int, removal_s: float
) -> None:
    endpoint = SimulatedEndpoint(budget_bytes=BUDGET, places=places, removal_s=removal_s)
    for number, (payer, sizes, run_s, wait_s) in enumerate(tasks):
        endpoint.submit(payer, f"t{number}", *[size * MB * 5 // 6 for size in sizes], run_s=run_s)
        endpoint.run(lambda: False, wait_s)
    longest_s = sum(run_s for _, _, run_s, _ in tasks)
    assert endpoint.run(endpoint.has_ended(), 25 * longest_s + 600.0)
    assert set(endpoint.states.values()) == {TaskState.SUCCESS}
    assert endpoint.fetches <= 6 * sum(len(sizes) for _, sizes, _, _ in tasks)


@given(
    backlogs=st.lists(
        st.tuples(st.integers(1, 10), st.sampled_from([2.0, 20.0]), st.integers(1, 60)), min_size=1, max_size=5
    ),
    size=st.integers(1, 8),
    places=st.integers(1, 4),
)
@settings(max_examples=25, deadline=None)
def test_a_single_task_waits_for_one_task_at_each_place(
    backlogs: list[tuple[int, float, int]], size: int, places: int
) -> None:
    """It waits so much longer at most than with a cache that is never full. Its files are an equal share at most."""
    waited_s = []
    for budget_bytes in (10_000 * MB, BUDGET):
        endpoint = SimulatedEndpoint(budget_bytes=budget_bytes, places=places)
        for payer, (size_mb, run_s, tasks) in enumerate(backlogs):
            for number in range(tasks):
                endpoint.submit(f"payer-{payer}", f"p{payer}-{number}", size_mb * MB, run_s=run_s)
        endpoint.run(lambda: False, 7)
        endpoint.submit("grace", "g", size * MB, run_s=0.1)
        assert endpoint.run(endpoint.has_ended("g"), 1000.0)
        waited_s.append(endpoint.waited("g"))
    assert waited_s[1] <= waited_s[0] + 20.0 + MOVE_S
