"""The experiments on Ray: tasks, and a compiled graph of actors."""

from __future__ import annotations

from typing import Any

from benchmarks.graphs import functions
from benchmarks.graphs.measuring import (
    FAN_OUT,
    PAUSE_S,
    SMALL,
    STAGES,
    TIMEOUT_S,
    WORKERS,
    Counts,
    Figures,
    Results,
    chain,
    chain_figures,
    fan_out_figures,
    nested_figures,
    size_figures,
)


def measure(results: Results, counts: Counts) -> None:
    """All experiments that Ray has something for."""
    import ray

    # A compiled graph holds an actor for each stage; a task that waits for others gives up its processor.
    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False, logging_level="error")
    remotes = {
        name: ray.remote(getattr(functions, name))
        for name in ("pass_on", "produce", "consume", "numbers", "increment", "increment_at", "total_of")
    }

    def got(reference: Any) -> Any:
        return ray.get(reference, timeout=TIMEOUT_S)

    def edge(size: int, mark: int) -> functions.Stops:
        made = remotes["produce"].remote(size, mark, PAUSE_S)
        stops: functions.Stops = got(remotes["consume"].remote(made, size, mark))
        return stops

    def run_chain() -> Any:
        return got(chain(remotes["pass_on"].remote))

    def fan_out() -> int:
        values = remotes["numbers"].remote(FAN_OUT)
        calls = [remotes["increment_at"].remote(values, place) for place in range(FAN_OUT)]
        result: int = got(remotes["total_of"].remote(*calls))
        return result

    increment = remotes["increment"]

    def drive(count: int) -> int:
        return sum(ray.get([increment.remote(number) for number in range(count)]))

    try:
        few = max(2, counts.fan_outs // 3)
        results.add("edge", lambda: size_figures("Ray tasks", edge, counts, between=None))
        results.add("again", lambda: chain_figures("Ray tasks", run_chain, max(10, counts.chains // 4)))
        results.add("fan-out", lambda: fan_out_figures(fan_out, few))
        results.add("nested", lambda: nested_figures(lambda: got(ray.remote(drive).remote(FAN_OUT)), few))
        results.add("again, compiled", lambda: _compiled(ray, counts))
    finally:
        ray.shutdown()


def _compiled(ray: Any, counts: Counts) -> Figures:
    from ray.dag import InputNode

    class Stage:
        def pass_on(self, carried: Any) -> Any:
            return functions.pass_on(carried)

    actor_class: Any = ray.remote(num_cpus=0)(Stage)
    actors = [actor_class.remote() for _ in range(STAGES)]
    with InputNode() as given:
        value = given
        for actor in actors:
            value = actor.pass_on.bind(value)
    compiled = value.experimental_compile()
    try:
        return chain_figures(
            "Ray Compiled Graph", lambda: ray.get(compiled.execute(((), SMALL)), timeout=TIMEOUT_S), counts.chains
        )
    finally:
        compiled.teardown()
