"""Progress of a running task, in a real worker; the test is its manager."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farcall_endpoint.contracts.manager_worker import CallOrder, Done, Progressed
from tests.support.worker import WorkerUnderTest, values_of, worker_under_test
from tests.waiting import wait_until

EDGE = CallOrder(is_edge=True)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerUnderTest]:
    with worker_under_test(tmp_path) as started:
        yield started


def ended(worker: WorkerUnderTest, function: Any, *args: object) -> tuple[Any, list[Progressed]]:
    """The value of a task, and what it said before."""
    worker.order(function, *args, call=EDGE, task_id="t/5")
    said: list[Progressed] = []
    while True:
        packet, body = worker.receive()
        if isinstance(packet, Progressed):
            assert packet.task_id == "t/5"
            said.append(packet)
            continue
        assert isinstance(packet, Done), packet
        assert packet.error is None, packet.error
        return values_of(packet, body)[0], said


def test_the_last_progress_comes_before_the_end(worker: WorkerUnderTest) -> None:
    def loop(count: int) -> int:
        from farcall import current

        for number in range(count):
            current().progress(number, count, "looping")
        return count

    for _ in range(2):
        value, said = ended(worker, loop, 20_000)
        assert value == 20_000
        assert 2 <= len(said) < 20
        assert (said[0].done, said[0].total, said[0].text) == (0, 20_000, "looping")
        assert said[-1].done == 19_999


def test_progress_starts_no_thread_and_loads_nothing_for_calls(worker: WorkerUnderTest) -> None:
    def look() -> tuple[int, bool]:
        import sys
        import threading

        from farcall_common.running import current

        current().progress(1)
        return threading.active_count(), "farcall_endpoint.worker.nested" in sys.modules

    value, said = ended(worker, look)
    assert tuple(value) == (1, False)
    assert len(said) == 1


def test_a_call_of_progress_is_cheap(worker: WorkerUnderTest) -> None:
    def measure(count: int) -> float:
        import time

        from farcall_common.running import current

        numbers = range(count)
        current().progress(0, count, "text")
        best_s = 1.0
        for _ in range(20):
            began_s = time.perf_counter()
            for number in numbers:
                current().progress(number, count, "text")
            best_s = min(best_s, (time.perf_counter() - began_s) / count)
        return best_s

    best_s, _ = ended(worker, measure, 10_000)
    assert best_s < 2e-6, "a quarter of a microsecond, on a machine that does nothing else"


def test_a_forked_child_cannot_report(worker: WorkerUnderTest) -> None:
    def fork() -> str:
        import multiprocessing

        from farcall_common.running import current

        current().progress(1)

        def child(end: Any) -> None:
            try:
                current().progress(2)
            except Exception as error:  # noqa: BLE001 - it is the value
                end.send(str(error))

        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=child, args=(there,))
        process.start()
        text: str = here.recv()
        process.join()
        return text

    value, said = ended(worker, fork)
    assert "the task has started this one" in value
    assert [each.done for each in said] == [1]


def test_a_thread_that_is_left_is_refused(worker: WorkerUnderTest, tmp_path: Path) -> None:
    def leave(path: str) -> None:
        import threading
        import time
        from pathlib import Path

        from farcall_common.running import current

        task = current()
        task.progress(1)

        def later() -> None:
            time.sleep(0.2)
            try:
                task.progress(2)
            except Exception as error:  # noqa: BLE001 - the test reads it
                Path(path).write_text(str(error))

        threading.Thread(target=later, daemon=True).start()

    path = tmp_path / "error"
    _, said = ended(worker, leave, str(path))
    assert len(said) == 1
    wait_until(lambda: path.exists() and path.read_text())
    assert "The task has ended" in path.read_text()
