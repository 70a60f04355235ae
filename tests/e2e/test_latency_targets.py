"""Latency targets, through the whole system: functions with a target, baselines, and what the endpoint reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import farcall
from farcall import QoS
from farcall_local.deployment import Deployment
from tests.waiting import WAIT_S, wait_until


def double(number: int) -> int:
    return 2 * number


@pytest.mark.smoke
def test_the_target_of_a_function_is_held_and_reported(
    cloud: Deployment, client: farcall.Client, executor: farcall.Executor, tmp_path: Path
) -> None:
    endpoint_id = executor.endpoint_id
    function_id = client.register_function(double, qos=QoS(target_ms=60_000, percentile=90))
    futures = [executor.submit_to_registered_function(function_id, (number,)) for number in range(20)]
    assert [future.result(WAIT_S) for future in futures] == [2 * number for number in range(20)]
    task = client.get_task(futures[0].task_id)
    assert task.target == "60000 ms for 90 % of the calls"

    def row() -> farcall.FunctionLatency | None:
        report = client.qos.report(endpoint_id)
        return next((each for each in report.functions if each.function_id == function_id), None)

    wait_until(lambda: (found := row()) is not None and found.tasks > 0)
    found = row()
    assert found is not None
    assert (found.function, found.target_ms, found.percentile, found.violations) == ("double", 60_000, 90, 0)
    assert found.p99_ms is not None
    assert found.p50_ms is not None
    assert 0 < found.p50_ms <= found.p99_ms < 60_000
    assert sum(count for _, count in found.histogram) == found.tasks
    command = [sys.executable, "-c", "from farcall.cli import main; main()", "qos", "report", "--json"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FARCALL_")}
    environ |= {**cloud.environment("ada"), "FARCALL_HOME": str(tmp_path)}
    command += ["--endpoint", str(endpoint_id)]
    shown = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    rows = json.loads(shown.stdout)["functions"]
    assert [each["function_id"] for each in rows if each["function_id"] == function_id] == [function_id]


def test_a_baseline_makes_a_multiple_of_it_a_target(client: farcall.Client, executor: farcall.Executor) -> None:
    baseline = client.qos.baseline(double, (21,), endpoint=executor.endpoint_id, runs=5)
    assert baseline.runs == 5
    assert 0 <= baseline.run_ms < baseline.total_ms
    view = executor.options(qos=QoS(max_slowdown=900))
    assert [view.submit(double, number).result(WAIT_S) for number in range(3)] == [0, 2, 4]

    def targets() -> list[float]:
        report = client.qos.report(executor.endpoint_id)
        return [each.target_ms for each in report.functions if each.max_slowdown == 900 and each.target_ms is not None]

    wait_until(targets)
    assert targets()[0] > 900 * 0.01
