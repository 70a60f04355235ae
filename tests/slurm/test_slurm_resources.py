"""Workers share what a real Slurm has granted on their node, though nothing here watches over it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from farcall_common.errors import NodesUnavailable
from farcall_endpoint import Engine
from farcall_endpoint.config.providers import SlurmProviderConfig
from tests.slurm.cluster import SlurmCluster
from tests.waiting import WAIT_S

LOOPBACK = "127.0.0.1"
GB = 2**30


def engine_of(*, cores: int, memory_gb: int | None = None, **options: Any) -> Engine:
    provider = SlurmProviderConfig(
        exclusive=False, cores_per_node=cores, mem_per_node=memory_gb, max_blocks=1, walltime="00:05:00"
    )
    return Engine(provider=provider, address=LOOPBACK, **options)


@pytest.mark.parametrize(
    ("cores", "memory_gb", "options", "workers"),
    [
        (1, None, {}, 1),
        (2, None, {}, 2),
        (2, None, {"cores_per_worker": 2}, 1),
        (2, 1, {"mem_per_worker_bytes": GB // 4, "cores_per_worker": 0.25}, 4),
        (2, None, {"accelerators": ("a", "b", "c"), "max_workers": 8}, 3),
    ],
)
def test_a_node_has_as_many_workers_as_its_job_has_resources(
    cluster: SlurmCluster, cores: int, memory_gb: int | None, options: dict[str, Any], workers: int
) -> None:
    with engine_of(cores=cores, memory_gb=memory_gb, **options) as engine:
        assert engine.submit(os.getenv, "SLURM_CPUS_ON_NODE").result(WAIT_S) == str(cores)
        engine.wait_ready()
        assert (engine.stats().slots, engine.stats().workers) == (workers, workers)


def test_a_too_small_node_is_reported(cluster: SlurmCluster) -> None:
    with (
        engine_of(cores=1, cores_per_worker=2, max_block_failures=1, block_failure_period_s=0) as engine,
        pytest.raises(NodesUnavailable, match=r"2 cores .* provides 1: not even one worker fits"),
    ):
        engine.submit(os.getpid).result(WAIT_S)
