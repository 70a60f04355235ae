"""The experiment of routing, on a small scale."""

from __future__ import annotations

import pytest

from benchmarks import warm_routing


@pytest.mark.parametrize("arm", warm_routing.ARMS)
def test_all_tasks_are_done_and_the_warm_arm_starts_few_workers(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_routing, "TASKS", 300)
    found = warm_routing.measure(arm, duration_s=0.0, start_s=1.8, arrival="batch", seed=1)
    assert found["completion_s"] >= 1.8
    if arm == "warming-aware":
        assert found["cold_starts"] == warm_routing.ENVIRONMENTS
        assert found["completion_s"] < 3.0


def test_long_tasks_use_every_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_routing, "TASKS", 300)
    found = warm_routing.measure("warming-aware", duration_s=20.0, start_s=1.8, arrival="batch", seed=1)
    assert found["completion_s"] < 300 * 20.0 / 100 * 1.5
