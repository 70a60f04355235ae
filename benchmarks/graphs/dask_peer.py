"""The experiments on Dask's distributed scheduler."""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import psutil

from benchmarks.graphs import functions
from benchmarks.graphs.measuring import (
    FAN_OUT,
    NODES,
    TIMEOUT_S,
    WORKERS,
    Counts,
    Figures,
    Results,
    chain,
    chain_figures,
    cpu_s,
    expect,
    fan_out_figures,
    layers,
    layers_result,
)


def measure(results: Results, counts: Counts) -> None:
    """All experiments that Dask has something for."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address=None, silence_logs=50) as cluster,
        Client(cluster) as client,
    ):
        submit = client.submit

        def run_chain() -> Any:
            return chain(functools.partial(submit, functions.pass_on, pure=False)).result(timeout=TIMEOUT_S)

        def fan_out() -> int:
            values = submit(functions.numbers, FAN_OUT, pure=False)
            calls = [submit(functions.increment_at, values, place, pure=False) for place in range(FAN_OUT)]
            result: int = submit(functions.total, calls, pure=False).result(timeout=TIMEOUT_S)
            return result

        results.add("again", lambda: chain_figures("Dask", run_chain, max(10, counts.chains // 4)))
        results.add("fan-out", lambda: fan_out_figures(fan_out, max(2, counts.fan_outs // 3)))
        results.add("layers", lambda: _layers(client, counts.slow_layers))


def _layers(client: Any, count: int) -> Figures:
    """Time and CPU per node; the scheduler and the client are this process."""
    from dask import delayed

    join = delayed(functions.join, pure=False)
    check, took, used = expect(layers_result()), [], []
    for _ in range(count):
        values = layers(join)
        before, began = cpu_s([psutil.Process()]), time.perf_counter()
        result = client.gather(client.compute(values, optimize_graph=False))
        took.append(time.perf_counter() - began)
        used.append(cpu_s([psutil.Process()]) - before)
        check(result)
    return {
        "layers/node_us": statistics.median(took) / NODES * 1e6,
        "layers/scheduler_cpu_us": statistics.median(used) / NODES * 1e6,
    }
