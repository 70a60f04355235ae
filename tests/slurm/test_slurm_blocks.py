"""Blocks from a real Slurm: they come when there is work, go when there is none, and may be taken away at any time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from farcall_common.errors import FarcallError, NodesUnavailable
from farcall_endpoint import Engine
from farcall_endpoint.config.providers import SlurmProviderConfig, SrunLauncherConfig
from tests.slurm.cluster import SlurmCluster
from tests.waiting import WAIT_S, wait_until

LOOPBACK = "127.0.0.1"


def engine_of(*, provider: dict[str, Any], **options: Any) -> Engine:
    fields: dict[str, Any] = {"exclusive": False, "cores_per_node": 2, "init_blocks": 0, "walltime": "00:05:00"}
    return Engine(2, provider=SlurmProviderConfig(**fields | provider), address=LOOPBACK, **options)


def where(seconds: float) -> tuple[str, str]:
    time.sleep(seconds)
    return os.environ["SLURM_JOB_ID"], os.environ["SLURMD_NODENAME"]


def variables() -> dict[str, str]:
    return dict(os.environ)


def submit_many(engine: Engine, function: Callable[..., Any], count: int, *args: Any) -> list[Any]:
    return [engine.submit(function, *args) for _ in range(count)]


def test_blocks_start_with_load_and_end_when_idle(cluster: SlurmCluster) -> None:
    with engine_of(provider={"max_blocks": 3}, max_idletime_s=2.0) as engine:
        assert not cluster.jobs(), "no block before there is work"
        places = [future.result(WAIT_S) for future in submit_many(engine, where, 24, 0.5)]
        assert len({job for job, _ in places}) == 3
        assert {node for _, node in places} == set(cluster.nodes)
        wait_until(lambda: not cluster.jobs())
        assert engine.submit(where, 0).result(WAIT_S)[0] not in {job for job, _ in places}


def test_a_block_with_work_is_not_released(cluster: SlurmCluster) -> None:
    with engine_of(provider={"max_blocks": 1}, max_idletime_s=1.0) as engine:
        assert engine.submit(where, 5.0).result(WAIT_S)


def test_a_block_of_several_nodes(cluster: SlurmCluster) -> None:
    provider = {"max_blocks": 1, "nodes_per_block": 2, "launcher": SrunLauncherConfig()}
    with engine_of(provider=provider) as engine:
        places = [future.result(WAIT_S) for future in submit_many(engine, where, 12, 0.5)]
    assert len({job for job, _ in places}) == 1
    assert len({node for _, node in places}) == 2


def test_tasks_of_a_cancelled_job_run_again(cluster: SlurmCluster) -> None:
    with engine_of(provider={"max_blocks": 2}) as engine:
        futures = submit_many(engine, where, 8, 1.0)
        wait_until(lambda: engine.stats().workers > 0)
        cancelled = next(iter(cluster.jobs("RUNNING")))
        cluster.command("scancel", cancelled)
        jobs = {future.result(WAIT_S)[0] for future in futures}
    assert jobs - {cancelled}


def test_non_idempotent_tasks_are_lost_with_their_job(cluster: SlurmCluster) -> None:
    with engine_of(provider={"max_blocks": 1}) as engine:
        once = engine.options(idempotent=False).submit(where, 1000.0)
        wait_until(lambda: engine.stats().workers > 0)
        wait_until(lambda: engine.stats().idle_workers == 1)
        cluster.command("scancel", *cluster.jobs("RUNNING"))
        with pytest.raises(FarcallError, match=r"SIGTERM|CANCELLED"):
            once.result(WAIT_S)


def test_a_node_that_goes_down(cluster: SlurmCluster) -> None:
    with engine_of(provider={"max_blocks": 2}, max_idletime_s=2.0) as engine:
        futures = submit_many(engine, where, 16, 1.0)
        wait_until(lambda: len(cluster.jobs("RUNNING")) == 2)
        wait_until(lambda: engine.stats().workers == 4)
        node = next(iter(cluster.jobs("RUNNING").values()))
        cluster.crash(node)
        assert len([future.result(WAIT_S) for future in futures]) == 16
    cluster.boot(node)
    wait_until(lambda: node in cluster.idle_nodes())


def test_the_message_of_the_scheduler_reaches_the_submitter(cluster: SlurmCluster) -> None:
    with engine_of(
        provider={"max_blocks": 1, "partition": "nowhere"}, max_block_failures=1, block_failure_period_s=0
    ) as engine:
        with pytest.raises(NodesUnavailable, match="invalid partition"):
            engine.submit(where, 0).result(WAIT_S)
        with pytest.raises(NodesUnavailable):
            engine.submit(where, 0).result(WAIT_S)  # the breaker is open
        assert "invalid partition" in engine.stats().problem


def test_jobs_that_fail_before_their_manager_are_not_resubmitted_for_ever(cluster: SlurmCluster) -> None:
    init = "echo 'module: no such module: nirvana' >&2; exit 3"
    with engine_of(
        provider={"max_blocks": 1, "worker_init": init}, max_block_failures=2, block_failure_period_s=0
    ) as engine:
        with pytest.raises(NodesUnavailable, match="no such module: nirvana"):
            engine.submit(where, 0).result(WAIT_S)
        submitted = len(cluster.command("squeue", "-h", "--states=all", "-o", "%i %T").splitlines())
        with pytest.raises(NodesUnavailable):
            engine.submit(where, 0).result(WAIT_S)
        seen = len(cluster.command("squeue", "-h", "--states=all", "-o", "%i %T").splitlines())
        assert seen <= submitted + 1, "one may be tried again"


def test_the_reason_of_a_waiting_block_is_shown(cluster: SlurmCluster) -> None:
    provider = {"max_blocks": 1, "scheduler_options": "#SBATCH --begin=now+1hour"}
    with engine_of(provider=provider) as engine:
        future = engine.submit(where, 0)
        wait_until(lambda: "PENDING (BeginTime)" in engine.stats().problem)
        assert future.cancel()
    wait_until(lambda: not cluster.jobs())


def test_a_task_that_no_block_has_time_for_is_refused(cluster: SlurmCluster) -> None:
    with engine_of(provider={"max_blocks": 1, "walltime": "00:02:00"}) as engine:
        with pytest.raises(FarcallError, match="LIMIT_INVALID"):
            engine.options(walltime_s=300.0).submit(where, 0).result(WAIT_S)
        assert not cluster.jobs()
        assert engine.options(walltime_s=30.0).submit(where, 0).result(WAIT_S)


def test_tasks_have_the_sites_environment_and_no_keys(cluster: SlurmCluster) -> None:
    provider = {"max_blocks": 1, "worker_init": "export SITE=here"}
    with engine_of(provider=provider) as engine:
        seen = engine.submit(variables).result(WAIT_S)
    assert seen["SITE"] == "here"
    assert not [name for name in seen if name.startswith("FARCALL_FLEET") or name == "FARCALL_TOKEN"]
