"""Reports of latency targets: what an endpoint writes is checked and limited."""

from __future__ import annotations

import math
import uuid
from typing import Any

import msgspec
import pytest

from farcall_common.qos import QoS
from farcall_common.qos_report import (
    FunctionQos,
    Infeasible,
    InfeasibleTarget,
    QosReport,
    WindowNumbers,
    infeasible_of,
    infeasible_targets,
    read_report,
    target_text,
)

NOW = 1_800_000_000.0
FUNCTION, OTHER, SUBMITTER = (str(uuid.uuid4()) for _ in range(3))


def row(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "function_id": FUNCTION,
        "function": "resize",
        "submitter": "",
        "target_ms": 200.0,
        "percentile": 95.0,
        "weight": 180.0,
        "weights": [[NOW - 5, 100], [NOW, 180.0]],
        "windows": {"1m": {"tasks": 10, "violations": 1, "p50_ms": 20}, "10m": {"tasks": 40, "cold_starts": 2}},
        "histogram": [[20.0, 30], [250, 10]],
    }
    return found | changes


def read(*rows: Any, **fields: Any) -> QosReport:
    found = read_report({"policy": "pi", "functions": list(rows), **fields}, now=NOW)
    assert found is not None
    return found


def test_report_is_read() -> None:
    infeasible = {"reason": "it waits", "fix": "add workers"}
    report = read(row(infeasible=infeasible), actuator="cgroup v1", admission="refuse")
    assert (report.policy, report.actuator, report.admission, report.reported_at) == ("pi", "cgroup v1", "refuse", NOW)
    [found] = report.functions
    assert found.weights == ((NOW - 5, 100.0), (NOW, 180.0))
    assert found.histogram == ((20.0, 30.0), (250.0, 10.0))
    assert found.window("1m") == WindowNumbers(tasks=10, violations=1, p50_ms=20.0)
    assert found.window("1m").violated == 0.1
    assert found.window("1h") == WindowNumbers()
    assert found.window("1h").violated == 0.0
    assert str(found.infeasible) == "it waits. add workers."


@pytest.mark.parametrize("value", [None, 1, "text", [], [row()]])
def test_what_is_no_report_is_none(value: Any) -> None:
    assert read_report(value, now=NOW) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"function_id": "x"},
        {"function_id": FUNCTION.upper()},
        {"submitter": "you"},
        {"submitter": SUBMITTER + "\n"},
        {"target_ms": math.nan},
        {"target_ms": math.inf},
        {"target_ms": -1},
        {"percentile": 101},
        {"weight": "100"},
        {"weight": 10**400},
        {"weights": [[NOW, 1.0]] * 61},
        {"weights": [[NOW]]},
        {"histogram": [[1.0, 1.0]] * 61},
        {"histogram": {"1": 1}},
        {"windows": {"1m": {"tasks": -1}}},
        {"windows": {"1m": {"tasks": 2**60}}},
        {"windows": [1]},
        {"infeasible": "no"},
        {"infeasible": {"fix": "no reason"}},
    ],
)
def test_malformed_functions_are_left_out(changes: dict[str, Any]) -> None:
    assert read(row(**changes), row(function_id=OTHER), None, 3).functions == read(row(function_id=OTHER)).functions


def test_control_characters_and_long_texts_are_dropped() -> None:
    report = read(
        row(function="re\x1b[31msize\n\u202e", infeasible={"reason": "a\0b" + "c" * 1000}),
        problem="no\x07 rights",
        policy=7,
    )
    assert (report.problem, report.policy, report.admission) == ("no rights", "", "warn")
    [found] = report.functions
    assert found.function == "re [31msize"
    assert found.infeasible is not None
    assert len(found.infeasible.reason) == 400
    assert found.infeasible.reason.isprintable()


def test_other_windows_and_times_of_other_years_are_dropped() -> None:
    [found] = read(row(weights=[[5.0, 1], [NOW, 2]], windows={"1m": {"tasks": 1}, "x": {}})).functions
    assert found.weights == ((NOW, 2.0),)
    assert found.windows.keys() == {"1m"}


def test_report_has_a_limited_size() -> None:
    points = [[NOW + n / 7, n * 1.23456789] for n in range(60)]
    report = read(*(row(function_id=str(uuid.uuid4()), weights=points, histogram=points) for _ in range(150)))
    assert len(report.functions) == 100
    assert len(msgspec.json.encode(report)) < 160 * 1024
    assert report.functions[0].weights
    assert not report.functions[-1].weights
    texts = {"reason": "r" * 2000, "fix": "f" * 2000}
    assert len(infeasible_targets(read(*(row(infeasible=texts) for _ in range(100))))) == 50


def test_report_of_a_submitter_has_no_others() -> None:
    report = read(row(), row(submitter=SUBMITTER))
    assert [each.submitter for each in report.of([SUBMITTER]).functions] == [SUBMITTER]
    assert report.of(["", SUBMITTER]) == report
    assert report.of([]).functions == ()


def test_reports_that_say_the_same_are_alike() -> None:
    one, two = read(row()), read_report({"policy": "pi", "functions": [row()]}, now=NOW + 5)
    assert one.is_like(two)
    assert one != two
    assert not one.is_like(None)
    assert not one.is_like(read(row(weight=1.0)))


@pytest.mark.parametrize(
    ("qos", "is_ruled_out"),
    [
        (QoS(target_ms=200), True),
        (QoS(target_ms=100, percentile=99), True),
        (QoS(target_ms=201), False),
        (QoS(target_ms=100, percentile=90), False),
        (QoS(max_slowdown=2), False),
        (QoS(), False),
        (None, False),
    ],
)
def test_a_target_that_is_not_looser_cannot_be_met_either(qos: QoS | None, is_ruled_out: bool) -> None:
    targets = [InfeasibleTarget(function_id=FUNCTION, target_ms=200.0, reason="it waits")]
    assert (infeasible_of(targets, FUNCTION, [""], qos) is not None) is is_ruled_out
    assert infeasible_of(targets, OTHER, [""], qos) is None
    assert infeasible_of(targets, FUNCTION, [SUBMITTER], qos) is None


def test_slowdowns_are_compared_with_slowdowns() -> None:
    targets = [InfeasibleTarget(function_id=FUNCTION, target_ms=90.0, max_slowdown=3.0, reason="it waits")]
    assert infeasible_of(targets, FUNCTION, [""], QoS(max_slowdown=3)) is targets[0]
    assert infeasible_of(targets, FUNCTION, [""], QoS(max_slowdown=4)) is None
    assert infeasible_of(targets, FUNCTION, [""], QoS(target_ms=80)) is targets[0]


def test_targets_in_words() -> None:
    assert target_text(200.0, None, 95.0) == "200 ms for 95 % of the calls"
    assert target_text(None, 3.0, 99.9) == "3 times the baseline for 99.9 % of the calls"
    assert target_text(None, None, 95.0) == ""
    assert str(Infeasible("It waits.", "")) == "It waits."


def test_infeasible_targets_name_the_function_and_its_target() -> None:
    report = read(row(), row(function_id=OTHER, submitter=SUBMITTER, infeasible={"reason": "it waits", "fix": "no"}))
    [target] = infeasible_targets(report)
    assert target == InfeasibleTarget(
        function_id=OTHER, submitter=SUBMITTER, target_ms=200.0, reason="it waits", fix="no"
    )
    assert str(target) == "it waits. no."
    assert FunctionQos(function_id=OTHER).infeasible is None
