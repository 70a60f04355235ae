"""Refused store steps: one endpoint's fails alone, and a kind that fails for all makes the forwarder unhealthy."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import pytest

from farcall_common.store.model import SpoolMark, TaskEvent, TaskResult
from farcall_common.wire import Reporter, TaskState
from farcall_forwarder.adapters.pool import StorePool
from farcall_forwarder.adapters.steps import StoreSteps
from farcall_forwarder.core.actions import FlushResults, RecordSpoolGeneration, RecordTransitions, ResultBatch, Withdraw
from farcall_forwarder.core.events import Flushed, SpoolGenerationRecorded, StepFailed, TransitionsRecorded
from tests.support.stores import FakeDatabase, FakeQueue, single
from tests.unit.test_forwarder_parts import queue_of, steps_on
from tests.unit.test_store_records import at, make_task


class PickyDatabase(FakeDatabase):
    """Refuses rows of the endpoint "bad", as a server refuses a value that it cannot store."""

    bad = frozenset({"bad"})

    def raise_spools(self, marks: Mapping[str, SpoolMark]) -> None:
        self._refuse(marks)
        super().raise_spools(marks)

    def record_results(self, results: Sequence[TaskResult], *, at: dt.datetime) -> Mapping[str, TaskResult]:
        self._refuse(result.endpoint_id for result in results)
        return super().record_results(results, at=at)

    def record_transitions(self, events: Sequence[TaskEvent]) -> Sequence[str]:
        self._refuse(event.task_id for event in events)
        return super().record_transitions(events)

    def _refuse(self, names: Iterable[str]) -> None:
        if not self.bad.isdisjoint(names):
            raise ValueError("a text may not have NUL characters")


def on_pool(steps: StoreSteps, scenario: Callable[[StorePool], Awaitable[None]]) -> None:
    async def run() -> None:
        pool = StorePool(steps)
        try:
            await scenario(pool)
        finally:
            pool.close()

    asyncio.run(run())


def test_a_step_refused_for_one_endpoint_is_performed_for_the_others(caplog: pytest.LogCaptureFixture) -> None:
    good, bad, other = (RecordSpoolGeneration(name, 1, "spool", 3) for name in ("good", "bad", "other"))

    async def scenario(pool: StorePool) -> None:
        assert await pool.perform([good, bad, other]) == [
            SpoolGenerationRecorded("good", 1, 3),
            StepFailed(bad),
            SpoolGenerationRecorded("other", 1, 3),
        ]
        assert not pool.is_degraded
        assert [record.__dict__["endpoint_id"] for record in caplog.records if record.levelno == logging.ERROR] == [
            "bad"
        ]

    on_pool(steps_on(FakeQueue(), PickyDatabase().records), scenario)


def test_a_kind_of_step_that_fails_for_all_endpoints_makes_the_forwarder_unhealthy() -> None:
    database = PickyDatabase()
    database.bad = frozenset("abc")

    async def scenario(pool: StorePool) -> None:
        degraded = []
        for name in "aabcd":
            await pool.perform([RecordSpoolGeneration(name, 1, "spool", 3)])
            degraded.append(pool.is_degraded)
        assert degraded == [False, False, False, True, False]

    on_pool(steps_on(FakeQueue(), database.records), scenario)


def test_an_error_that_concerns_no_endpoint_propagates() -> None:
    class Broken(FakeQueue):
        def withdraw(self, forwarder_id: str) -> None:
            raise ValueError(forwarder_id)

    async def scenario(pool: StorePool) -> None:
        with pytest.raises(ValueError, match="forwarder"):
            await pool.perform([Withdraw("forwarder")])

    on_pool(steps_on(Broken(), FakeDatabase().records), scenario)


def test_only_the_refused_endpoints_results_stay_unrecorded() -> None:
    queue, fences = queue_of("good", "bad")
    for endpoint_id, fence in fences.items():
        single.mark_restored(queue, endpoint_id, fence)
    records = PickyDatabase().records
    records.tasks.add_tasks([make_task(f"{name}-task", endpoint_id=name) for name in fences])
    batches = [
        ResultBatch(
            name, 1, fence, [TaskResult(f"{name}-task", name, 1, TaskState.SUCCESS, Reporter.AGENT)], frozenset()
        )
        for name, fence in fences.items()
    ]

    async def scenario(pool: StorePool) -> None:
        [flushed] = await pool.perform([FlushResults(batches, frozenset(), 60)])
        assert isinstance(flushed, Flushed)
        assert {each.batch.endpoint_id: each.failed for each in flushed.batches} == {"good": False, "bad": True}
        assert flushed.first.keys() == {"good-task"}

    on_pool(steps_on(queue, records), scenario)


def test_a_transition_that_cannot_be_recorded_is_skipped() -> None:
    records = PickyDatabase().records
    records.tasks.add_tasks([make_task("t1"), make_task("t2")])
    transitions = [
        TaskEvent(name, TaskState.WAITING_FOR_NODES, Reporter.AGENT, at(1), attempt=1) for name in ("t1", "bad", "t2")
    ]

    async def scenario(pool: StorePool) -> None:
        assert set(await pool.perform([RecordTransitions(transitions)])) == {TransitionsRecorded()}

    on_pool(steps_on(FakeQueue(), records), scenario)
    assert {task.state for task in records.tasks.get_tasks(["t1", "t2"]).values()} == {TaskState.WAITING_FOR_NODES}
