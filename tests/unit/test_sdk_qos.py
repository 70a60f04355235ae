"""Latency targets in the SDK and on the command line."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint

import farcall
from farcall import (
    Client,
    Executor,
    FunctionLatency,
    InvalidRequest,
    LatencyReport,
    LimitExceeded,
    QoS,
    QosWarning,
)
from farcall._latencies import infeasible_lines, milliseconds, row_of
from farcall._metrics import record_latencies
from farcall.cli._qos_plot import density, write_png
from farcall.testing import FakeCloud
from farcall_common.errors import ConfigurationError, ProtocolError
from farcall_common.qos_report import Infeasible
from tests.unit.sdk_cli_runner import Farcall

FIX = {"reason": "its calls wait for workers", "fix": "Add workers"}


def resize(number: int) -> int:
    return number


@pytest.fixture
def cloud() -> Iterator[FakeCloud]:
    with FakeCloud(workers=1) as found:
        yield found


def row(function_id: str, **changes: Any) -> dict[str, Any]:
    now = time.time()
    numbers = {"tasks": 40, "violations": 4, "cold_starts": 2, "p50_ms": 20, "p99_ms": 1500.0, "queue_p95_ms": 5.5}
    return {
        "function_id": function_id,
        "function": "resize",
        "target_ms": 200.0,
        "percentile": 95.0,
        "weight": 180.0,
        "weights": [[now - 5, 100.0], [now, 180.0]],
        "windows": {"1m": {"tasks": 5}, "10m": numbers},
        "histogram": [[20.0, 30], [250.0, 10]],
        **changes,
    }


def test_function_keeps_its_target(client: Client) -> None:
    function_id = client.register_function(resize, qos=QoS(target_ms=200, percentile=90))
    kept = client.find_function(function_id)["metadata"]["task_qos"]
    assert kept == {"target_ms": 200.0, "percentile": 90.0}
    assert client.update_function(function_id, description="d") == 1
    assert client.update_function(function_id, qos={"max_slowdown": 3}) == 2
    assert client.find_function(function_id)["metadata"]["task_qos"] == {"max_slowdown": 3.0, "percentile": 95.0}
    assert client.update_function(function_id, qos=QoS()) == 3
    assert "task_qos" not in client.find_function(function_id)["metadata"]


@pytest.mark.parametrize("qos", [QoS(is_baseline=True), {"target": 5}, {"target_ms": -1}])
def test_targets_that_make_no_sense_are_refused_here(client: Client, qos: Any) -> None:
    with pytest.raises(ValueError, match=r"qos|target"):
        client.register_function(resize, qos=qos)


def test_tasks_have_the_target_of_their_function(cloud: FakeCloud, client: Client) -> None:
    with Executor(cloud.endpoint_id, client=client) as executor:
        executor.register_function(resize, qos=QoS(target_ms=200))
        first = executor.submit(resize, 1)
        second = executor.options(qos=QoS()).submit(resize, 1)
        third = executor.options(qos=QoS(max_slowdown=2)).submit(resize, 1)
        assert [each.result() for each in (first, second, third)] == [1, 1, 1]
    targets = [client.get_task(each.task_id).target for each in (first, second, third)]
    assert targets == ["200 ms for 95 % of the calls", "", "2 times the baseline for 95 % of the calls"]


def test_decorated_function_has_its_target(cloud: FakeCloud, client: Client) -> None:
    decorated = farcall.function(qos=QoS(target_ms=50))(resize)
    with Executor(cloud.endpoint_id, client=client) as executor:
        future = executor.submit(decorated, 1)
        assert future.result() == 1
    assert client.get_task(future.task_id).target == "50 ms for 95 % of the calls"


def test_report_has_the_numbers_of_its_window(cloud: FakeCloud, client: Client) -> None:
    function_id = client.register_function(resize)
    cloud.report_latencies({"policy": "pi", "actuator": "cgroup v1", "functions": [row(function_id, infeasible=FIX)]})
    report = client.qos.report(cloud.endpoint_id)
    assert (report.endpoint_id, report.window, report.policy) == (cloud.endpoint_id, "10m", "pi")
    [found] = report.functions
    assert (found.tasks, found.violated, found.cold_starts, found.p50_ms) == (40, 0.1, 2, 20.0)
    assert found.infeasible == Infeasible(**FIX)
    assert client.qos.report(window="1m").functions[0].tasks == 5
    assert "its calls wait for workers. Add workers." in str(report)
    with pytest.raises(InvalidRequest, match="no window '1h'"):
        client.qos.report(window="1h")  # type: ignore[arg-type]


def test_endpoint_without_a_report_has_no_functions(cloud: FakeCloud, client: Client) -> None:
    report = client.qos.report(cloud.endpoint_id)
    assert (report.functions, report.reported_at) == ([], None)


def test_report_that_cannot_be_read_is_an_error(
    cloud: FakeCloud, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud._targets, "_report", QosReportOfAnotherService())
    with pytest.raises(ProtocolError):
        client.qos.report(cloud.endpoint_id)


class QosReportOfAnotherService(dict[str, Any]):
    """An answer without what a report has."""

    reported_at = 0.0

    def __init__(self) -> None:
        super().__init__(functions=3)


def test_baseline_is_the_median_of_some_runs(cloud: FakeCloud, client: Client) -> None:
    started: list[str] = []
    cloud.on_start = started.append
    baseline = client.qos.baseline(resize, (1,), endpoint=cloud.endpoint_id, runs=3)
    assert (baseline.endpoint_id, baseline.runs, len(started)) == (cloud.endpoint_id, 3, 3)
    assert 0 <= baseline.run_ms <= baseline.run_p95_ms <= baseline.total_ms * 3
    assert {cloud._tasks[task_id].qos for task_id in started} == {QoS(is_baseline=True)}


def test_baseline_of_a_decorated_function_is_without_its_target(cloud: FakeCloud, client: Client) -> None:
    decorated = farcall.function(qos=QoS(target_ms=50), memoize=True)(resize)
    client.qos.baseline(decorated, kwargs={"number": 2}, endpoint=cloud.endpoint_id, runs=2)
    assert {task.qos for task in cloud._tasks.values()} == {QoS(is_baseline=True)}
    assert not any(task.memo_key for task in cloud._tasks.values())
    with pytest.raises(InvalidRequest, match="runs"):
        client.qos.baseline(decorated, (1,), runs=0)


def test_baseline_of_an_endpoint_that_runs_nothing_ends_after_its_timeout(offline: FakeCloud) -> None:
    with offline.client() as client, pytest.raises(TimeoutError, match=r"has not ended after 0\.05 s"):
        client.qos.baseline(resize, (1,), endpoint=offline.endpoint_id, timeout_s=0.05)
    assert len(offline._tasks) == 1


def test_target_that_cannot_be_met_is_warned_of_once(cloud: FakeCloud, client: Client) -> None:
    with Executor(cloud.endpoint_id, client=client, qos=QoS(target_ms=200)) as executor:
        function_id = executor.register_function(resize)
        cloud.report_latencies({"functions": [row(function_id, infeasible=FIX)]})
        with pytest.warns(QosWarning, match="target of resize: its calls wait for workers. Add workers.") as caught:
            assert [executor.submit(resize, number).result() for number in range(3)] == [0, 1, 2]
        assert len(caught) == 1


def test_a_program_that_makes_errors_of_warnings_gets_its_results(cloud: FakeCloud, client: Client) -> None:
    with Executor(cloud.endpoint_id, client=client, qos=QoS(target_ms=200)) as executor:
        cloud.report_latencies({"functions": [row(executor.register_function(resize), infeasible=FIX)]})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert executor.submit(resize, 7).result() == 7


def test_batch_is_warned_of_too(cloud: FakeCloud, client: Client) -> None:
    function_id = client.register_function(resize, qos=QoS(target_ms=100))
    cloud.report_latencies({"functions": [row(function_id, infeasible=FIX)]})
    with pytest.warns(QosWarning, match=function_id):
        client.run(1, endpoint_id=cloud.endpoint_id, function_id=function_id)


def test_endpoint_may_refuse_such_targets(cloud: FakeCloud, client: Client) -> None:
    with Executor(cloud.endpoint_id, client=client, qos=QoS(target_ms=200)) as executor:
        cloud.report_latencies(
            {"admission": "refuse", "functions": [row(executor.register_function(resize), infeasible=FIX)]}
        )
        futures = [executor.submit(resize, number) for number in range(20)]
        for future in futures:
            error = future.exception()
            assert isinstance(error, LimitExceeded)
            assert error.record.code == "TARGET_INFEASIBLE"
            assert not error.record.retryable
        assert executor.options(qos=QoS()).submit(resize, 1).result() == 1


def test_why_says_that_the_target_cannot_be_met() -> None:
    with FakeCloud(workers=0) as cloud, cloud.client() as client:
        function_id = client.register_function(resize, qos=QoS(target_ms=100))
        task_id = client.run(1, endpoint_id=cloud.endpoint_id, function_id=function_id)
        cloud.report_latencies({"functions": [row(function_id, infeasible=FIX)]})
        why = client.why(task_id)
        assert why.target == "100 ms for 95 % of the calls"
        assert why.infeasible == "its calls wait for workers. Add workers."
        farcall_ = Farcall(cloud)
        assert "its calls wait for workers" in farcall_("tasks", "why", task_id).stdout
        assert "100 ms for 95 %" in farcall_("tasks", "show", task_id).stdout
        assert "100 ms for 95 %" in farcall_("functions", "show", function_id).stdout


def test_command_shows_the_table(cloud: FakeCloud, client: Client) -> None:
    function_id = client.register_function(resize)
    hostile = row(function_id, function="re\x1b[2Jsize", infeasible=FIX)
    cloud.report_latencies({"functions": [hostile], "problem": "no rights"})
    result = Farcall(cloud)("qos", "report", "--endpoint", "fake")
    assert result.exit_code == 0, result.output
    cells = result.stdout.splitlines()[0].split("\t")
    assert cells == [
        "re [2Jsize",
        "40",
        "4 (10.0%)",
        "20 ms",
        "",
        "",
        "1.5 s",
        "",
        "5.5 ms",
        "2",
        "200 ms P95",
        "180",
    ]
    assert "the target cannot be met: its calls wait for workers. Add workers." in result.stderr
    assert "Weights are not set: no rights." in result.stderr
    found = json.loads(Farcall(cloud)("qos", "report", "--window", "1m", "--json").stdout)
    assert (found["window"], found["functions"][0]["tasks"], found["functions"][0]["violated"]) == ("1m", 5, 0.0)
    refused = Farcall(cloud)("qos", "report", "--window", "1h")
    assert refused.exit_code != 0
    assert "there is no window" in refused.stderr


def test_command_shows_the_table_again_until_an_interruption(cloud: FakeCloud, client: Client) -> None:
    cloud.report_latencies({"functions": [row(client.register_function(resize))]})
    command = Farcall(cloud)
    paused = 0

    def pause(_: float) -> None:
        nonlocal paused
        paused += 1
        if paused == 3:
            raise KeyboardInterrupt

    command.pause = pause
    result = command("qos", "watch", "--json")
    assert [json.loads(line)["functions"][0]["tasks"] for line in result.stdout.splitlines()] == [5, 5, 5]
    paused = 0
    assert len(command("qos", "watch", "-e", "fake").stdout.splitlines()) == 3


def test_plots_are_written(cloud: FakeCloud, client: Client, tmp_path: Path) -> None:
    rows = [row(client.register_function(resize)), row(client.register_function(resize), target_ms=None, weights=[])]
    cloud.report_latencies({"functions": rows})
    path = tmp_path / "report.png"
    result = Farcall(cloud)("qos", "report", "--png", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        write_png(LatencyReport(cloud.endpoint_id), tmp_path / "none" / "report.png")


def test_plots_without_matplotlib_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match="matplotlib") as raised:
        write_png(LatencyReport("e"), tmp_path / "report.png")
    assert raised.value.record.hint == "Run `pip install matplotlib`."


def test_density_has_an_area_of_one() -> None:
    buckets = density([(100.0, 30), (10.0, 10), (0.0, 5), (50.0, 0)])
    assert [(low, high) for low, high, _ in buckets] == [(1.0, 10.0), (10.0, 100.0)]
    assert sum(each for *_, each in buckets) == pytest.approx(1.0)
    assert density([]) == []
    [(low, high, _)] = density([(10.0, 1)])
    assert (low, high) == (9.0, 10.0)


def test_cells_of_a_function() -> None:
    latency = FunctionLatency("id", "", target_ms=90.0, max_slowdown=3.0, percentile=99.0, tasks=3)
    assert row_of(latency)[0] == "id"
    assert row_of(latency)[2] == "0 (0.0%)"
    assert row_of(latency)[-2] == "90 ms (3x) P99"
    assert row_of(FunctionLatency("id", "f", max_slowdown=3.0))[-2] == "(3x) P95"
    assert row_of(FunctionLatency("id", "f"))[-2:] == ("", "")
    assert infeasible_lines(LatencyReport("e")) == []
    assert [milliseconds(each) for each in (None, 0.1234, 999.0, 12345.0)] == ["", "0.123 ms", "999 ms", "12.3 s"]


def test_numbers_are_recorded_as_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)
    report = LatencyReport("e", functions=[FunctionLatency("id", "resize", tasks=4, violations=1, p50_ms=20.0)])
    for _ in range(2):
        record_latencies(report)
    data = reader.get_metrics_data()
    assert data is not None
    [scope] = data.resource_metrics[0].scope_metrics
    found = {each.name: list(each.data.data_points) for each in scope.metrics}
    assert found.keys() == {"farcall.qos.tasks", "farcall.qos.violations", "farcall.qos.latency"}
    [point] = found["farcall.qos.latency"]
    assert isinstance(point, NumberDataPoint)
    assert point.value == 20.0
    assert dict(point.attributes or {}) == {
        "farcall.endpoint_id": "e",
        "farcall.function": "resize",
        "farcall.function_id": "id",
        "farcall.submitter": "",
        "farcall.window": "10m",
        "quantile": 0.5,
    }
    provider.shutdown()


def test_programs_without_opentelemetry_record_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.metrics")
    record_latencies(LatencyReport("e", functions=[FunctionLatency("id", "resize")]))
    assert "opentelemetry.metrics" not in sys.modules
