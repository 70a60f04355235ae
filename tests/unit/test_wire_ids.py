"""Task ids: UUIDv7, increasing, unique."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from farcall_common.wire.ids import has_mark, is_uuid, new_id, new_task_id


def test_task_ids_are_uuid_version_7_with_their_creation_time() -> None:
    before_ms = time.time_ns() // 1_000_000
    made = uuid.UUID(new_task_id())
    assert made.version == 7
    assert made.variant == uuid.RFC_4122
    assert before_ms <= made.int >> 80 <= time.time_ns() // 1_000_000 + 1


def test_task_ids_increase() -> None:
    ids = [new_task_id() for _ in range(20_000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids)


def test_task_ids_increase_when_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    first = new_task_id()
    monkeypatch.setattr(time, "time_ns", lambda: 1_000_000_000_000_000_000)
    assert new_task_id() > first


def test_task_ids_of_many_threads_differ() -> None:
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda _: new_task_id(), range(10_000)))
    assert len(set(ids)) == len(ids)


def test_only_the_holder_of_a_secret_recognises_its_mark() -> None:
    marked = [new_task_id(b"secret") for _ in range(1000)]
    assert marked == sorted(set(marked))
    assert {(uuid.UUID(each).version, uuid.UUID(each).variant) for each in marked} == {(7, uuid.RFC_4122)}
    assert all(has_mark(each, b"secret") for each in marked)
    assert not any(has_mark(each, b"other") for each in marked)
    assert not any(has_mark(new_task_id(), b"secret") for _ in range(1000))
    # An id that differs in any place has no mark.
    value = uuid.UUID(marked[0]).int
    assert not any(has_mark(str(uuid.UUID(int=value ^ (1 << bit))), b"secret") for bit in range(128))


@pytest.mark.parametrize("text", [new_id(), new_task_id()], ids=["random", "task"])
def test_is_uuid(text: str) -> None:
    assert is_uuid(text)
    assert not is_uuid(text.upper())
    assert not is_uuid(text[:-1])
    assert not is_uuid(f"{{{text}}}")
