"""CPU shares of functions: the kernel's numbers for weights, the order of changes, names of groups."""

from __future__ import annotations

import errno
import itertools
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_endpoint.host.cgroups import Cgroups
from farcall_endpoint.host.process_reaper import Process
from farcall_endpoint.qos import autogroup
from farcall_endpoint.qos.actuators import Actuator, NoActuator
from farcall_endpoint.qos.autogroup import AutogroupShares, NiceQueue, read_autogroup
from farcall_endpoint.qos.cgroup_shares import CgroupShares, group_name, try_directory
from farcall_endpoint.qos.weights import check_weight, cpu_shares, cpu_weight, nice_values

WEIGHTS = st.floats(1, 10_000)


@given(st.dictionaries(st.text(max_size=5), WEIGHTS, min_size=1))
def test_nice_values_keep_the_order_of_weights(weights: dict[str, float]) -> None:
    nices = nice_values(weights)
    assert nices.keys() == weights.keys()
    ordered = [nices[name] for name in sorted(weights, key=lambda name: -weights[name])]
    assert ordered == sorted(ordered)
    assert ordered[0] == 0
    assert ordered[-1] <= 19


@given(WEIGHTS, st.floats(1, 68))
def test_nice_values_have_the_ratio_of_weights(weight: float, ratio: float) -> None:
    steps = nice_values({"a": weight * ratio, "b": weight})["b"]
    assert abs(1.25**steps / ratio - 1) < 0.16  # half a step, and the kernel's table is rounded


def test_nice_values_of_equal_weights_are_equal_and_large_ratios_have_a_limit() -> None:
    assert nice_values({"a": 300, "b": 300}) == {"a": 0, "b": 0}
    assert nice_values({"a": 400, "b": 100}) == {"a": 0, "b": 6}
    assert nice_values({"a": 2000, "b": 20}) == {"a": 0, "b": 19}
    assert nice_values({}) == {}


def test_each_version_of_cgroups_gets_its_own_unit() -> None:
    assert [cpu_weight(weight) for weight in (0.1, 20, 100, 2000, 1e6)] == [1, 20, 100, 2000, 10_000]
    assert [cpu_shares(weight) for weight in (0.1, 20, 100, 2000, 1e6)] == [2, 205, 1024, 20_480, 262_144]


@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf])
def test_weights_are_positive_numbers(weight: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        check_weight(weight)
    for actuator in (CgroupShares(Cgroups([]), 1), AutogroupShares()):
        with pytest.raises(ValueError, match="positive"):
            actuator.set_weights({"a": 100, "b": weight})


# -- changes of autogroups ---------------------------------------------------------------------------------------------


def test_the_largest_change_is_made_first_and_one_in_each_period() -> None:
    queue = NiceQueue()
    queue.replace({"a": 0, "b": 0, "c": 5, "d": 7}, {"a": 3, "b": 19, "c": 0, "d": 7, "unknown": 4})
    made = []
    now = 50.0
    while (delay := queue.delay(now)) is not None:
        now += delay
        change = queue.due(now)
        assert change is not None
        queue.done(change[0], now)
        assert queue.due(now + 0.099) is None
        made.append((round(now, 3), *change))
    assert made == [(50.0, "b", 19), (50.1, "c", 0), (50.2, "a", 3)]


def test_the_newest_values_replace_those_that_wait() -> None:
    queue = NiceQueue()
    queue.replace({"a": 0, "b": 0}, {"a": 10, "b": 5})
    queue.done("a", 1.0)
    queue.replace({"a": 10, "b": 0}, {"a": 10, "b": 3})
    assert queue.due(1.1) == ("b", 3)
    queue.replace({"a": 10, "b": 0}, {"a": 10, "b": 0})
    assert (queue.due(1.1), queue.delay(1.1)) == (None, None)


def test_a_change_that_the_kernel_refuses_for_now_waits_and_one_that_it_refuses_is_dropped() -> None:
    queue = NiceQueue()
    queue.replace({"a": 0, "b": 0}, {"a": 10, "b": 5})
    queue.refused(1.0)
    assert (queue.due(1.05), queue.due(1.1)) == (None, ("a", 10))
    queue.drop("a")
    assert queue.due(1.1) == ("b", 5)


@given(st.lists(st.dictionaries(st.sampled_from("abcde"), st.integers(0, 19), min_size=1), min_size=1, max_size=8))
def test_at_most_ten_changes_are_made_in_a_second_and_all_of_the_last_ones(plans: list[dict[str, int]]) -> None:
    queue, values, times, now = NiceQueue(), dict.fromkeys("abcde", 0), [], 0.0
    for number, plan in enumerate(plans):
        queue.replace(values, plan)
        until = now + (0.25 if number < len(plans) - 1 else 10)
        while now < until:
            if change := queue.due(now):
                values[change[0]] = change[1]
                queue.done(change[0], now)
                times.append(now)
            now += 0.01
    assert {name: values[name] for name in plans[-1]} == plans[-1]
    assert all(after - before > 0.099 for before, after in itertools.pairwise(times))


def test_what_is_no_autogroup_is_none(tmp_path: Path) -> None:
    for pid, text in (("1", ""), ("2", "nonsense\n"), ("3", "/autogroup-12 nice -5\n")):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "autogroup").write_text(text)
    found = [read_autogroup(pid, proc=tmp_path) for pid in (1, 2, 3, 4)]
    assert found == [None, None, ("/autogroup-12", -5), None]


# -- cgroups -----------------------------------------------------------------------------------------------------------


@given(st.text(st.characters(), max_size=200))
def test_every_function_has_a_name_that_a_directory_can_have(function: str) -> None:
    name = group_name(function)
    assert name.startswith("function-")
    assert len(name) < 60
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert group_name(function + "x") != name


def test_ids_of_functions_are_legible() -> None:
    function = "0192f0c1-7b3a-7d55-8a11-0123456789ab"
    assert group_name(function) == f"function-{function}"
    assert group_name("\ud800") != group_name("\ud801")


def test_an_actuator_without_groups_says_so_and_does_nothing() -> None:
    for version in (1, 2):
        actuator = CgroupShares(Cgroups([]), version)
        actuator.set_weights({"f": 300})
        assert (actuator.problem, actuator.tick()) == ("", None)
        actuator.join(os.getpid(), "f")
        assert actuator.problem == f"process {os.getpid()} cannot join: cgroup v{version}: no group can be made"
        actuator.set_weights({"f": 300})
        assert actuator.problem == f"function f: cgroup v{version}: no group can be made"
        actuator.forget("f")
        actuator.close()


def test_the_reason_for_no_groups_is_what_the_kernel_says(tmp_path: Path) -> None:
    assert try_directory(tmp_path / "missing").endswith(": No such file or directory")
    assert try_directory(tmp_path) == f"{tmp_path}/cgroup.procs: Permission denied"
    assert list(tmp_path.iterdir()) == []


def test_no_actuator_does_nothing() -> None:
    actuator: Actuator = NoActuator("autogroup: switched off")
    actuator.join(1, "f")
    actuator.set_weights({"f": 300})
    with pytest.raises(ValueError, match="positive"):
        actuator.set_weights({"f": math.nan})
    actuator.forget("f")
    assert (actuator.name, actuator.tick(), actuator.problem) == ("none", None, "autogroup: switched off")
    actuator.close()


@pytest.mark.parametrize("closed", [(), (10,), (10, 11), (10, 11, 12)])
def test_a_session_is_set_by_a_process_that_permits_it(
    monkeypatch: pytest.MonkeyPatch, closed: tuple[int, ...]
) -> None:
    written: list[tuple[int, int]] = []

    def write(pid: int, nice: int, *, proc: Path) -> None:
        if pid in closed:
            raise PermissionError(errno.EACCES, "Permission denied")
        written.append((pid, nice))

    def group(pid: int | str, *, proc: Path) -> tuple[str, int]:
        return f"/autogroup-{'self' if pid == 'self' else int(pid) // 10}", 0

    monkeypatch.setattr(autogroup, "write_nice", write)
    monkeypatch.setattr(autogroup, "read_autogroup", group)
    monkeypatch.setattr(autogroup, "tree", lambda pid: [pid + 1, pid + 2])
    monkeypatch.setattr(
        autogroup, "read_process", lambda _: Process(parent=1, start=1, resident_bytes=0, is_zombie=False)
    )
    actuator = AutogroupShares()
    actuator.join(10, "batch")
    actuator.join(20, "fast")
    actuator.set_weights({"batch": 25, "fast": 100})
    assert written == ([(10 + len(closed), 6)] if len(closed) < 3 else [])
    assert bool(actuator.problem) is (len(closed) == 3)
