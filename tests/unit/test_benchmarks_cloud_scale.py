"""Simulation for docs/scale.md: its arithmetic, its two models, and the figures on the page."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.cloud_scale.__main__ import PAGE, SECTIONS, with_figures
from benchmarks.cloud_scale.inputs import Deployment, Inputs, deployment, read_inputs
from benchmarks.cloud_scale.load import Load, forwarders_needed, most_endpoints, most_tasks, uses
from benchmarks.cloud_scale.queueing import latency
from benchmarks.cloud_scale.storm import storm

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "forwarder.json"


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return read_inputs()


@pytest.fixture(scope="module")
def size() -> Deployment:
    return deployment("facility")


def test_page_has_the_figures_of_the_simulation() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_figures(text) == text, "run: python -m benchmarks.cloud_scale"
    assert all(f"<!-- {name} -->\n|" in text for name in SECTIONS)


def test_inputs_are_near_the_last_measurement(inputs: Inputs) -> None:
    figures = {figure["name"]: figure["value"] for figure in json.loads(RESULTS.read_text())["figures"]}
    handshake_us = 1000 * figures["4,000 clients at once: forwarder's CPU time per client"]
    assert handshake_us / 4 < inputs.forwarder["handshake_us"] < 4 * handshake_us


# -- utilisation -------------------------------------------------------------------------------------------------------


def test_use_is_proportional_to_the_load(size: Deployment, inputs: Inputs) -> None:
    once = {use.resource: use.used for use in uses(Load(500, 300), size, inputs)}
    twice = {use.resource: use.used for use in uses(Load(1000, 600), size, inputs)}
    others = ("Lambda's concurrency", "database's commits")
    linear = {name: twice[name] / used for name, used in once.items() if used and name not in others}
    assert linear == pytest.approx(dict.fromkeys(linear, 2.0))


def test_presences_share_commits_up_to_the_batch_size(size: Deployment, inputs: Inputs) -> None:
    def commits(endpoints: int) -> float:
        found = uses(Load(endpoints, 0), dataclasses.replace(size, forwarders=2), inputs)
        return next(use.used for use in found if use.resource == "database's commits")

    assert commits(30) == pytest.approx(1)  # one commit each
    assert commits(1_000) == commits(10_000) == pytest.approx(4)  # two per second and forwarder
    assert commits(2_000_000) == pytest.approx(2 * commits(1_000_000))


def test_fullest_resource_is_first_and_bounds_the_capacity(size: Deployment, inputs: Inputs) -> None:
    endpoints, bound = most_endpoints(size, inputs)
    at_most = uses(Load(endpoints, 0), size, inputs)
    assert at_most[0].resource == bound
    assert at_most[0].share == pytest.approx(1.0, abs=0.01)
    assert [use.share for use in at_most] == sorted((use.share for use in at_most), reverse=True)
    tasks, bound = most_tasks(size, inputs, passing=False)
    assert uses(Load(0, tasks), size, inputs)[0].resource == bound
    assert most_tasks(size, inputs, passing=True)[0] > tasks


def test_required_forwarders_suffice_and_one_fewer_does_not(size: Deployment, inputs: Inputs) -> None:
    load = Load(100_000, 5_000)
    count = forwarders_needed(load, size, inputs)

    def fullest(forwarders: int) -> float:
        found = uses(load, dataclasses.replace(size, forwarders=forwarders), inputs)
        return max(use.share for use in found if use.resource.startswith("forwarders'"))

    assert fullest(count) <= 0.8 < fullest(count - 1)


def test_forwarders_that_a_load_needs_have_database_connections(size: Deployment, inputs: Inputs) -> None:
    load = Load(100_000, 0)
    found = {use.resource: use for use in uses(load, size, inputs)}["database's connections"]
    count = forwarders_needed(load, size, inputs)
    assert (count - 1) * size.forwarder_connections < found.used <= count * size.forwarder_connections
    assert (found.share > 1, found.available) == (True, 117)


# -- a reconnect storm -------------------------------------------------------------------------------------------------


def test_storm_is_deterministic_and_all_endpoints_reconnect(size: Deployment, inputs: Inputs) -> None:
    first = storm(5_000, size, inputs, uses_api=True)
    assert storm(5_000, size, inputs, uses_api=True) == first
    assert first.most_s <= first.settled_s < 60
    assert storm(5_000, size, inputs, uses_api=True, seed=2) != first


def test_storm_takes_at_least_the_time_of_its_slowest_part(size: Deployment, inputs: Inputs) -> None:
    """10,000 endpoints at 1,000 requests a second; as many handshakes of 0.748 ms on two processors."""
    by_api = storm(10_000, size, inputs, uses_api=True)
    assert by_api.settled_s >= 10_000 / size.requests_per_s
    directly = storm(10_000, size, inputs, uses_api=False)
    assert directly.settled_s >= 10_000 * 748e-6 / 2
    assert (directly.refused, directly.settled_s < by_api.settled_s) == (0, True)


def test_larger_deployment_reconnects_sooner(size: Deployment, inputs: Inputs) -> None:
    larger = dataclasses.replace(size, requests_per_s=10 * size.requests_per_s, forwarders=20)
    small, large = (storm(20_000, each, inputs, uses_api=True) for each in (size, larger))
    assert large.settled_s < small.settled_s
    assert large.refused < small.refused


def test_endpoint_that_queues_for_too_long_starts_over(size: Deployment, inputs: Inputs) -> None:
    slow = dataclasses.replace(size, forwarders=1, forwarder_vcpus=0.1)
    found = storm(5_000, slow, inputs, uses_api=False)  # 37 s of handshakes, and a time-out of 15 s
    assert found.timed_out > 0
    assert found.settled_s >= 5_000 * 748e-6 / 0.1


# -- latency of tasks --------------------------------------------------------------------------------------------------


def test_latency_of_an_idle_tier_is_the_time_of_the_work(size: Deployment, inputs: Inputs) -> None:
    task = inputs.per_task
    work_ms = 100 * sum(task[f"{part}_us"] for part in ("api", "postgres", "valkey", "forwarder")) / 1000
    assert latency(100, size, inputs).p50_ms == pytest.approx(work_ms, rel=0.01)


def test_latency_grows_with_the_load_up_to_the_slowest_part(size: Deployment, inputs: Inputs) -> None:
    slowest_per_s = 1e6 / inputs.per_task["valkey_us"]
    below, above = latency(0.9 * slowest_per_s, size, inputs), latency(1.2 * slowest_per_s, size, inputs)
    assert latency(1000, size, inputs).p99_ms < below.p99_ms < above.p99_ms
    assert (below.settled, above.settled) == (True, False)
