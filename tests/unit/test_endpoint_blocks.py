"""When blocks are started and given back, and when starts end."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_endpoint.agent.core.blocks import BlockLoad, Blocks, Monitor, Orders, Scaling, SimpleScaling
from farcall_endpoint.agent.core.demand import NodeLoad

SLOTS = 4


def scaling(**changes: float) -> SimpleScaling:
    fields = {"min_blocks": 0, "max_blocks": 5, "parallelism": 1.0, "idle_release_s": 120.0} | changes
    return SimpleScaling(**fields)  # type: ignore[arg-type]


class Site:
    """Blocks, a clock, and what was asked for so far."""

    def __init__(
        self, *, first: int = 0, max_failures: int = 3, failure_period_s: float = 0.0, **policy: float
    ) -> None:
        numbers = itertools.count(1)
        self.now = 1000.0
        self.blocks = Blocks(
            policy=scaling(**policy),
            first_blocks=first,
            slots_per_block=SLOTS,
            max_failures=max_failures,
            failure_period_s=failure_period_s,
            backoff_s=1.0,
            new_block_id=lambda: f"b{next(numbers)}",
        )

    def decide(self, *, tasks: int = 0, busy: Collection[str] = (), after_s: float = 0.0) -> Orders:
        self.now += after_s
        return self.blocks.decide(tasks=tasks, busy=busy, now=self.now)

    def next_try(self) -> tuple[str, float]:
        """Wait until a block is started for a task: its id, and the seconds until then."""
        began = self.now
        while not (started := self.decide(tasks=1).start):
            self.now += 0.5
        return started[0], self.now - began

    def join(self, block_id: str, *, slots: int = SLOTS, manager_id: str = "m") -> None:
        self.blocks.joined(block_id, f"{block_id}-{manager_id}", slots=slots, now=self.now)
        self.blocks.working(block_id)

    def end(self, block_id: str, reason: str = "FAILED") -> None:
        self.blocks.ended(block_id, reason, now=self.now)


# -- the policy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tasks", "parallelism", "more"), [(0, 1.0, 0), (1, 1.0, 1), (4, 1.0, 1), (5, 1.0, 2), (100, 1.0, 5), (8, 0.5, 1)]
)
def test_a_slot_for_each_task_as_parallelism_says(tasks: int, parallelism: float, more: int) -> None:
    assert scaling(parallelism=parallelism).scale(Monitor(tasks, SLOTS)).more == more


def test_pending_blocks_count() -> None:
    assert scaling().scale(Monitor(8, SLOTS, [BlockLoad("a", 0), BlockLoad("b", 0)])) == Scaling()


def test_min_blocks_are_kept_and_longest_idle_are_released_first() -> None:
    blocks = [BlockLoad("a", 4, 130.0), BlockLoad("b", 4, 500.0), BlockLoad("c", 4), BlockLoad("d", 4, 119.0)]
    assert scaling().scale(Monitor(0, SLOTS, blocks)).release == ("b", "a")
    assert scaling(min_blocks=3).scale(Monitor(0, SLOTS, blocks)).release == ("b",)
    assert scaling(min_blocks=4).scale(Monitor(0, SLOTS, blocks)).release == ()


@given(
    tasks=st.integers(0, 10_000),
    slots=st.lists(st.integers(0, 64), max_size=8),
    idle=st.lists(st.none() | st.floats(0, 1000), min_size=8, max_size=8),
    least=st.integers(0, 4),
    span=st.integers(0, 6),
    parallelism=st.floats(0.01, 1.0),
    unable=st.lists(st.booleans(), min_size=8, max_size=8),
    sci=st.integers(0, 10_000),
)
def test_block_count_stays_within_its_bounds(
    tasks: int,
    slots: list[int],
    idle: list[float | None],
    least: int,
    span: int,
    parallelism: float,
    unable: list[bool],
    sci: int,
) -> None:
    most = max(1, least + span)
    policy = scaling(min_blocks=least, max_blocks=most, parallelism=parallelism)
    blocks = [
        BlockLoad(
            str(index),
            count,
            idle[index] if count else None,
            nodes=[NodeLoad(count, unable=frozenset({"sci"} if unable[index] else ()))] if count else (),
        )
        for index, count in enumerate(slots[: most + 1])
    ]
    decision = policy.scale(Monitor(tasks, SLOTS, blocks, limited={"sci": min(sci, tasks)}))
    assert not (decision.more > 0 and decision.release)
    assert len(blocks) + decision.more <= max(most, len(blocks))
    assert len(blocks) - len(decision.release) >= min(least, len(blocks))
    by_id = {block.block_id: block for block in blocks}
    assert all((by_id[block_id].idle_s or 0.0) >= 120.0 for block_id in decision.release)


@given(
    idle=st.lists(st.floats(121, 1000), min_size=1, max_size=6),
    warm=st.lists(st.booleans(), min_size=6, max_size=6),
    least=st.integers(0, 6),
)
def test_a_block_that_is_warm_for_waiting_tasks_is_released_after_others(
    idle: list[float], warm: list[bool], least: int
) -> None:
    blocks = [
        BlockLoad(str(index), SLOTS, idle_s, nodes=[NodeLoad(SLOTS, warm=warm[index])])
        for index, idle_s in enumerate(idle)
    ]
    release = scaling(min_blocks=least, max_blocks=6).scale(Monitor(1, SLOTS, blocks)).release
    assert len(release) == max(0, len(blocks) - least)
    kept = {index for index in range(len(blocks)) if str(index) not in release}
    assert not kept or all(warm[index] for index in kept) or not any(warm[int(block_id)] for block_id in release)


def test_free_slots_do_not_count_for_tasks_that_cannot_run_there() -> None:
    unable = [BlockLoad("a", SLOTS, 10.0, nodes=[NodeLoad(SLOTS, unable=frozenset({"sci"}))])]
    assert scaling().scale(Monitor(4, SLOTS, unable)).more == 0
    assert scaling().scale(Monitor(4, SLOTS, unable, limited={"sci": 4})).more == 1
    coming = [*unable, BlockLoad("b", 0)]
    assert scaling().scale(Monitor(4, SLOTS, coming, limited={"sci": 4})) == Scaling(), "a block that comes counts"
    assert scaling().scale(Monitor(9, SLOTS, coming, limited={"sci": 4})).more == 1


def test_blocks_that_come_and_cannot_run_a_task_are_no_reason_for_ever_more() -> None:
    site = Site(max_blocks=5)
    started: list[str] = []
    for _ in range(600):
        nodes = {f"{each}-m": NodeLoad(unable=frozenset({"sci"})) for each in started}
        orders = site.blocks.decide(tasks=1, busy=(), now=site.now, limited={"sci": 1}, nodes=nodes)
        for block_id in orders.start:
            started.append(block_id)
            site.join(block_id)
        site.now += 1.0
    assert 6 <= len(started) <= 12, "two in two minutes"


# -- blocks ------------------------------------------------------------------------------------------------------------


def test_init_blocks_are_requested_once_without_tasks() -> None:
    site = Site(first=2)
    assert site.decide().start == ("b1", "b2")
    assert site.decide() == Orders()
    for block_id in ("b1", "b2"):
        site.join(block_id)
    assert site.decide(after_s=121.0).release == ("b1", "b2")
    assert site.decide() == Orders()


def test_block_with_a_busy_manager_is_not_idle() -> None:
    site = Site(first=1)
    site.decide()
    site.join("b1")
    assert site.decide(busy={"b1"}, tasks=1, after_s=500.0).release == ()
    assert site.decide(after_s=1.0).release == ()  # idle from now on
    assert site.decide(after_s=119.0).release == ()
    assert site.decide(after_s=2.0).release == ("b1",)


def test_blocks_know_what_their_nodes_cannot_run() -> None:
    site = Site(first=1, max_blocks=2)
    site.decide()
    site.join("b1", slots=2, manager_id="m1")
    site.join("b1", slots=2, manager_id="m2")
    able = {"b1-m1": NodeLoad(2, unable=frozenset({"sci"}))}
    both = {**able, "b1-m2": NodeLoad(2, unable=frozenset({"sci"}))}
    assert site.blocks.decide(tasks=2, busy=(), now=site.now, limited={"sci": 2}, nodes=able).start == ()
    assert site.blocks.decide(tasks=2, busy=(), now=site.now, limited={"sci": 2}, nodes=both).start == ("b2",)


def test_released_block_is_replaced_when_tasks_wait() -> None:
    site = Site(first=1, max_blocks=1)
    site.decide()
    site.join("b1")
    assert site.decide(after_s=121.0).release == ("b1",)
    assert site.decide(tasks=1).start == ("b2",)


def test_slots_per_block_are_learned_from_managers() -> None:
    site = Site()
    assert len(site.decide(tasks=8).start) == 2
    site.join("b1", slots=32, manager_id="m1")
    site.join("b1", slots=32, manager_id="m2")
    assert site.decide(tasks=128).start == ()  # 64 here, 64 on their way
    assert len(site.decide(tasks=200).start) == 2


def test_a_lost_block_is_replaced_at_once_but_not_in_a_hot_loop() -> None:
    site = Site(first=1, min_blocks=1)
    site.decide()
    site.join("b1")
    site.now += 10
    site.end("b1", "killed by signal 9")
    assert site.decide().start == ("b2",)
    site.join("b2")
    site.end("b2", "exit code 1")
    assert site.decide(after_s=0.5).start == ()
    assert site.decide(after_s=0.6).start == ("b3",)


# -- the circuit breaker -----------------------------------------------------------------------------------------------


def test_failures_in_a_row_open_the_breaker_when_they_span_the_period() -> None:
    site = Site(max_failures=3, failure_period_s=3600.0, max_blocks=1)
    began, waits = site.now, list[float]()
    while not site.blocks.refusal:
        assert bool(site.blocks.blocked) is (len(waits) >= 3), "tasks wait, and blocks are tried"
        block_id, waited_s = site.next_try()
        waits.append(waited_s)
        site.end(block_id, "killed by signal 9")
        assert "signal 9" in site.blocks.problem
    assert site.now - began == pytest.approx(3600.0, abs=61.0)
    assert waits[:9] == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert f"{len(waits)} blocks in a row ended before they brought a manager" in site.blocks.refusal


@pytest.mark.parametrize(("answers", "period_s"), [([True], 300.0), ([False], 3600.0), ([True, False], 3600.0)])
def test_refusals_of_the_scheduler_open_the_breaker_sooner(answers: list[bool], period_s: float) -> None:
    site = Site(max_failures=3, failure_period_s=3600.0, max_blocks=1)
    began, refused = site.now, itertools.cycle(answers)
    while not site.blocks.refusal:
        block_id, _ = site.next_try()
        site.blocks.ended(block_id, "sbatch: error: invalid account", now=site.now, refused=next(refused))
    assert site.now - began == pytest.approx(period_s, abs=61.0)
    assert "invalid account" in site.blocks.refusal


def test_time_without_demand_is_no_time_of_failures() -> None:
    site = Site(max_failures=3, failure_period_s=300.0, max_blocks=1)
    for number in (1, 2, 3):
        site.decide(tasks=1)
        site.end(f"b{number}")
        site.decide(tasks=0, after_s=1000.0)
    assert site.blocks.refusal == ""
    assert site.blocks.blocked


def test_after_a_pause_one_block_is_tried_and_tasks_wait_for_it() -> None:
    site = Site(max_failures=1, failure_period_s=0.0)
    site.decide(tasks=1)
    site.end("b1")
    assert site.blocks.refusal
    assert site.decide(tasks=100, after_s=0.9).start == ()
    assert site.decide(tasks=100, after_s=0.2).start == ("b2",)
    assert (site.blocks.refusal, bool(site.blocks.blocked)) == ("", True)
    site.end("b2")
    assert site.blocks.refusal
    assert site.decide(tasks=100, after_s=2.1).start == ("b3",)
    site.join("b3")
    assert (site.blocks.problem, site.blocks.blocked) == ("", "")
    assert len(site.decide(tasks=100).start) == 4


def test_blocks_whose_managers_start_no_worker_open_the_breaker_too() -> None:
    site = Site(max_failures=2, failure_period_s=0.0, max_blocks=1)
    for number in (1, 2):
        assert site.decide(tasks=1, after_s=5.0).start == (f"b{number}",)
        site.blocks.joined(f"b{number}", f"m{number}", slots=SLOTS, now=site.now)
        site.blocks.failed(f"b{number}")
        site.end(f"b{number}", "no space left on device")
    assert "could not start workers" in site.blocks.refusal
    assert "no space left on device" in site.blocks.refusal
    assert site.decide(tasks=1, after_s=1.0).start == ()
    assert site.decide(tasks=1, after_s=60.0).start == ("b3",)
    site.join("b3")
    assert site.blocks.problem == ""


def test_a_block_that_worked_before_its_workers_failed_is_replaced() -> None:
    site = Site(first=1, min_blocks=1, max_failures=1)
    site.decide()
    site.join("b1")
    site.now += 10
    site.blocks.failed("b1")
    site.end("b1", "no space left on device")
    assert site.decide().start == ("b2",)
    assert site.blocks.refusal == ""


def test_a_manager_closes_the_breaker() -> None:
    site = Site(max_failures=2)
    assert site.decide(tasks=8).start == ("b1", "b2")
    site.end("b1")
    site.join("b2")
    site.decide(tasks=8, after_s=2.0)
    site.end("b3")
    assert site.blocks.refusal == "", "not in a row"


def test_block_released_while_pending_is_no_failure() -> None:
    site = Site(first=1, max_failures=1)
    site.decide()
    site.join("b1")
    site.decide(after_s=121.0)
    site.end("b1", "cancelled")
    assert site.blocks.problem == ""


# -- images ------------------------------------------------------------------------------------------------------------


def busy(name: str, image: str = "", *, age_s: float = 300.0) -> BlockLoad:
    return BlockLoad(name, SLOTS, None, image, age_s)


def free(name: str, image: str = "", idle_s: float = 10.0) -> BlockLoad:
    return BlockLoad(name, SLOTS, idle_s, image, 300.0)


def images(monitor: list[BlockLoad], tasks: dict[str, int], **policy: float) -> Scaling:
    return scaling(**policy).scale(Monitor(sum(tasks.values()), SLOTS, monitor, tasks))


def test_each_image_is_scaled_by_its_own_tasks() -> None:
    assert images([], {"": 0, "a": 5, "b": 1}).images == ("a", "b", "a")
    assert images([busy("x", "a")], {"": 0, "a": 4, "b": 1}).images == ("b",)
    assert images([], {"": 0}, min_blocks=1).images == ("",)
    assert images([busy("x", "a")], {"": 0, "a": 1}, min_blocks=1) == Scaling()


def test_images_share_what_may_be_had() -> None:
    assert sorted(images([], {"": 100, "a": 100, "b": 100}, max_blocks=3).images) == ["", "a", "b"]
    assert images([busy("x", "a"), busy("y", "a")], {"": 0, "a": 100, "b": 100}, max_blocks=3).images == ("b",)


def test_an_idle_block_makes_room_for_an_image_that_waits() -> None:
    blocks = [free("x", "a"), busy("y", "c")]
    assert images(blocks, {"": 0, "b": 1, "c": 1}, max_blocks=2) == Scaling(release=("x",))
    assert images(blocks, {"": 0, "b": 1, "c": 1}, max_blocks=3).images == ("b",), "there is room"
    assert images([free("x", ""), busy("y", "c")], {"b": 1, "c": 1}, max_blocks=2, min_blocks=2).release == ("x",)
    assert images(blocks, {"": 0, "c": 1}, max_blocks=2) == Scaling(), "it is wanted again soon, perhaps"
    assert images([free("x", "a", 200.0)], {"": 0}).release == ("x",)


def test_a_busy_block_makes_room_when_it_has_none_left_to_do() -> None:
    both = [busy("x", "a"), busy("y", "a")]
    assert images(both, {"": 0, "a": 100, "b": 1}, max_blocks=2) == Scaling(drain=("x",))
    both[0] = free("x", "a", 0.1)
    assert images(both, {"": 0, "a": 100, "b": 1}, max_blocks=2) == Scaling(release=("x",))
    young = [busy("x", "a", age_s=5.0), busy("y", "a", age_s=5.0)]
    assert images(young, {"": 0, "a": 100, "b": 1}, max_blocks=2) == Scaling()
    fair = [busy("x", "a"), busy("y", "b")]
    assert images(fair, {"": 0, "a": 100, "b": 100}, max_blocks=2) == Scaling()


def prewarmed(monitor: list[BlockLoad], tasks: dict[str, int], wanted: dict[str, int], **policy: float) -> Scaling:
    return scaling(**policy).scale(Monitor(sum(tasks.values()), SLOTS, monitor, tasks, prewarmed=wanted))


def test_images_that_are_prewarmed_have_their_blocks_without_tasks() -> None:
    assert prewarmed([], {"": 0}, {"a": SLOTS + 1}).images == ("a", "a")
    assert prewarmed([], {"": 1, "b": 1}, {"a": 1}, max_blocks=2).images == ("", "b"), "tasks come first"
    idle = [free("x", "a", 500.0), free("y", "a", 900.0), free("z", "b", 500.0)]
    assert prewarmed(idle, {"": 0}, {"a": 1}).release == ("y", "z")
    assert prewarmed(idle, {"": 0}, {"a": 2 * SLOTS, "b": 1}) == Scaling()
    assert prewarmed([busy("x", "a")], {"": 0, "a": 1}, {"a": 1}) == Scaling()


def test_prewarmed_blocks_make_room_for_tasks_and_for_no_other_prewarmed_ones() -> None:
    idle = [free("x", "a"), free("y", "b")]
    assert prewarmed(idle, {"": 0, "c": 1}, {"a": 1, "b": 1}, max_blocks=2).release == ("x",)
    assert prewarmed(idle, {"": 0}, {"a": 1, "b": 1, "c": 1}, max_blocks=2) == Scaling()
    assert prewarmed(idle, {"": 0}, {"a": 1, "c": 1}, max_blocks=2).release == ("y",), "it is not wanted any more"


def test_blocks_remember_their_image() -> None:
    site = Site(first=1, max_blocks=2)
    orders = site.blocks.decide(tasks=2, busy=(), now=site.now, images={"": 0, "a": 1, "b": 1})
    assert orders.images == {"b1": "a", "b2": "b"}
    for block_id in orders.start:
        site.join(block_id)
    site.now += 10
    later = site.blocks.decide(tasks=2, busy={"b2"}, now=site.now, images={"": 1, "b": 1})
    assert later == Orders(release=("b1",))
    assert site.blocks.decide(tasks=2, busy={"b2"}, now=site.now, images={"": 1, "b": 1}).start == ("b3",)
