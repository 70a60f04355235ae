"""Values that a process remembers for a time."""

from __future__ import annotations

from farcall_lambdas.recent import Recent


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_values_are_forgotten_when_they_are_old_or_the_clock_is_set_back() -> None:
    clock = Clock()
    recent: Recent[str, int] = Recent(clock, good_s=10.0)
    recent.set("a", 1)
    clock.now += 9.9
    assert recent.get("a") == 1
    clock.now += 0.1
    assert recent.get("a") is None
    recent.set("a", 2)
    clock.now -= 0.1
    assert recent.get("a") is None


def test_the_values_that_were_set_first_make_room() -> None:
    recent: Recent[str, int] = Recent(Clock(), good_s=10.0, most=2)
    for key in ("a", "b", "a", "c"):
        recent.set(key, 0)
    assert [key for key in "abc" if recent.get(key) is not None] == ["a", "c"]


def test_a_value_is_read_once_while_it_is_young_also_if_there_is_none() -> None:
    clock = Clock()
    recent: Recent[str, int | None] = Recent(clock, good_s=10.0)
    asked = []

    def read(key: str) -> None:
        asked.append(key)

    for _ in range(3):
        assert recent.get_or_read("a", read) is None
    clock.now += 10.0
    recent.get_or_read("a", read)
    assert asked == ["a", "a"]
