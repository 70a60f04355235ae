"""Pace of requests: what a storage refuses is made again, and fewer requests go on at the same time."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.analytics.shaper import SharedTimes
from farcall_common.errors import ObjectGone, StoreBusy, StoreUnavailable
from farcall_common.objects.pace import MOST, Pace, Window, pace_of
from tests.waiting import WAIT_S


class Time:
    """A clock that a sleep moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)


class Storage:
    """Refuses so many requests, and answers the next ones."""

    def __init__(self, refused: int) -> None:
        self.refused = refused
        self.requests = 0

    def __call__(self) -> str:
        self.requests += 1
        if self.requests <= self.refused:
            raise StoreBusy("503 SlowDown.")
        return "answer"


def paced(time: Time, *, limit_s: float = 60.0) -> Pace:
    return Pace(limit_s=limit_s, clock=lambda: time.now, sleep=time.sleep, random=lambda: 1.0)


# -- how many at a time ------------------------------------------------------------------------------------------------


def test_a_refusal_halves_and_answers_add_a_little() -> None:
    window = Window(8)
    sizes = []
    for _ in range(5):
        window.refuse(window.begin())
        sizes.append(window.size)
    assert sizes == [4, 2, 1, 1, 1]
    answers = 0
    while window.size < 8:
        window.begin()
        window.answer()
        answers += 1
        assert window.size <= 8
    assert 250 < answers < 350
    assert window.running == 0


def test_requests_that_are_refused_together_halve_once() -> None:
    window = Window(8)
    begun = [window.begin() for _ in range(8)]
    assert not window.is_open
    for each in begun:
        window.refuse(each)
    assert window.size == 4
    window.refuse(window.begin())
    assert window.size == 2


def refusals(times: SharedTimes, *, rate: float, until: float, is_fixed: bool) -> tuple[list[float], int]:
    """Requests of four processes with eight threads each, of 50 ms, to a storage that refuses those beyond a rate: when
    it has refused one, in seconds from the begin; and how many it has answered."""
    chance = random.Random(1)
    windows = [Window() for _ in range(4)]
    order = itertools.count()
    events = [(chance.random() / 20, next(order), number, -1, 0) for number in range(4) for _ in range(MOST)]
    heapq.heapify(events)
    refused, answered = [], 0
    while events[0][0] < until:
        now, _, process, begun, tries = heapq.heappop(events)
        window = windows[process]
        if begun < 0:
            if window.is_open:
                heapq.heappush(events, (now + 0.05, next(order), process, window.begin(), tries))
            else:
                heapq.heappush(events, (now + 0.01, next(order), process, -1, tries))
            continue
        if times.admit(2, 1 / rate, now):
            window.answer()
            answered += 1
            heapq.heappush(events, (now, next(order), process, -1, 0))
        else:
            refused.append(now)
            window.refuse(begun)
            if is_fixed:
                window.size = MOST
            again = now + chance.random() * min(5.0, 0.1 * 2**tries)
            heapq.heappush(events, (again, next(order), process, -1, tries + 1))
    return refused, answered


def test_a_storage_refuses_less_after_a_while_and_is_used_all_the_same(tmp_path: Path) -> None:
    (adapted, answered), (fixed, _) = (
        refusals(SharedTimes(tmp_path / f"{is_fixed}"), rate=150, until=60.0, is_fixed=is_fixed)
        for is_fixed in (False, True)
    )
    first = sum(each < 1 for each in adapted)
    later_each_s = sum(each >= 10 for each in adapted) / 50
    assert later_each_s < first / 3
    assert len(adapted) < len(fixed) / 5, "it is not the waits alone"
    assert answered > 0.95 * 150 * 60


def test_no_more_requests_go_on_than_the_window_has() -> None:
    pace = Pace(sleep=lambda _: None)
    together = threading.Barrier(MOST)
    lock = threading.Lock()
    running: list[int] = [0]
    most: list[int] = [0]

    def request(meets: bool) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        if meets:
            together.wait(WAIT_S)
        with lock:
            running[0] -= 1

    with ThreadPoolExecutor(4 * MOST) as threads:
        list(threads.map(lambda _: pace.run(lambda: request(True)), range(4 * MOST)))
        assert most == [MOST]
        for _ in range(3):
            pace.run(Storage(1))
        pace.window.size = most[0] = 1
        list(threads.map(lambda _: pace.run(lambda: request(False)), range(3)))
    assert most == [1]


# -- requests ----------------------------------------------------------------------------------------------------------


def test_waits_double_up_to_a_limit() -> None:
    time, storage = Time(), Storage(9)
    assert paced(time).run(storage) == "answer"
    assert time.slept == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5])


def test_waits_are_a_random_part_of_their_limit() -> None:
    time = Time()
    Pace(clock=lambda: time.now, sleep=time.sleep).run(Storage(9))
    limits = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5]
    assert all(0 <= slept <= most for slept, most in zip(time.slept, limits, strict=True))
    assert sum(time.slept) < sum(limits)


def test_a_storage_that_stays_busy_is_given_up_at_the_limit() -> None:
    time, storage = Time(), Storage(1000)
    with pytest.raises(StoreUnavailable, match=r"503 SlowDown\. It was tried 17 times in 56 s\.") as given_up:
        paced(time).run(storage)
    assert not isinstance(given_up.value, StoreBusy), "nothing makes it again"
    assert 155 < time.now < 160
    assert storage.requests == len(time.slept) + 1


def test_the_limit_begins_with_the_first_refusal() -> None:
    time, storage = Time(), Storage(3)

    def slow() -> str:
        time.now += 1000
        return storage()

    with pytest.raises(StoreUnavailable):
        paced(time).run(slow)
    assert storage.requests == 2, "it was made again once although the first one took long"


def test_other_errors_are_not_tried_again_and_end_their_turn() -> None:
    pace = paced(Time())
    requests = itertools.count()

    def gone() -> None:
        next(requests)
        raise ObjectGone("there is none")

    for _ in range(2 * MOST):
        with pytest.raises(ObjectGone):
            pace.run(gone)
    assert next(requests) == 2 * MOST
    assert (pace.window.running, pace.window.size) == (0, MOST)


def test_a_request_that_waits_lets_others_go_on() -> None:
    running: list[int] = []
    pace = Pace(sleep=lambda _: running.append(pace.window.running))
    pace.run(Storage(3))
    assert running == [0, 0, 0]
    assert pace.window.running == 0


def test_a_process_has_one_pace_for_a_storage() -> None:
    assert pace_of("s3://pace-one") is pace_of("s3://pace-one")
    assert pace_of("s3://pace-one") is not pace_of("s3://pace-other")
