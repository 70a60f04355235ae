"""Blocks from a batch system that refuses, forgets, or breaks: nothing waits for ever, and no job is left behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from farcall_endpoint.providers.base import BlockStatus, Phase
from farcall_endpoint.providers.batch import BatchBlock, BatchProvider, SchedulerError
from tests.waiting import wait_until


class Moody:
    """A scheduler whose jobs run at once; calls raise what the test puts in their way."""

    shares_files = False

    def __init__(self) -> None:
        self.jobs: list[str] = []
        self.refusals: dict[str, list[Exception]] = {"submit": [], "statuses": [], "cancel": []}
        self.calls: list[str] = []

    def submit(self, command: str, *, name: str, secrets: Mapping[str, str] | None = None, image: str = "") -> str:
        assert not image
        self._call("submit")
        self.jobs.append(name)
        return name

    def statuses(self, job_ids: Sequence[str]) -> Mapping[str, BlockStatus]:
        self._call("statuses")
        return {job_id: BlockStatus(Phase.RUNNING) for job_id in job_ids if job_id in self.jobs}

    def cancel(self, job_ids: Sequence[str]) -> None:
        self._call("cancel")
        for job_id in job_ids:
            self.jobs.remove(job_id)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.refusals[name]:
            raise self.refusals[name].pop(0)


@pytest.fixture
def scheduler() -> Moody:
    return Moody()


@pytest.fixture
def provider(scheduler: Moody, tmp_path: Path) -> Iterator[BatchProvider]:
    provider = BatchProvider(
        scheduler, name="lab", script_dir=tmp_path, walltime_s=None, first_poll_s=0.02, poll_s=0.02
    )
    yield provider
    provider.close()


@pytest.fixture
def start(provider: BatchProvider) -> Callable[[str], BatchBlock]:
    return lambda block_id: provider.start(["python", "manager"], block_id=block_id, environment={})


def has(block: BatchBlock, phase: Phase) -> Callable[[], bool]:
    return lambda: block.status().phase is phase


def test_a_burst_of_blocks_does_not_query_the_scheduler_for_each_block(scheduler: Moody, tmp_path: Path) -> None:
    provider = BatchProvider(scheduler, name="lab", script_dir=tmp_path, walltime_s=None, first_poll_s=600.0)
    blocks = [provider.start(["python", "manager"], block_id=str(number), environment={}) for number in range(50)]
    wait_until(lambda: len(scheduler.jobs) == 50)
    for block in blocks:
        block.kill()
    wait_until(lambda: not scheduler.jobs)
    provider.close()
    assert scheduler.calls == ["submit"] * 50 + ["cancel"] * 50


def test_jobs_of_a_killed_agent_are_cancelled_and_failed_cancels_are_repeated(scheduler: Moody, tmp_path: Path) -> None:
    scheduler.jobs = ["11", "12"]
    scheduler.refusals["cancel"] = [SchedulerError("not now")]
    journal = tmp_path / "jobs.json"
    journal.write_text(json.dumps(scheduler.jobs))
    provider = BatchProvider(scheduler, name="lab", script_dir=tmp_path, walltime_s=None, poll_s=600.0)
    wait_until(lambda: scheduler.jobs == ["11"])
    provider.close()
    assert json.loads(journal.read_text()) == ["11"]

    BatchProvider(scheduler, name="lab", script_dir=tmp_path, walltime_s=None).close()
    assert scheduler.jobs == []
    assert json.loads(journal.read_text()) == []


@pytest.mark.parametrize("call", ["submit", "statuses"])
def test_a_defect_ends_blocks_with_its_reason_and_their_jobs_with_them(
    scheduler: Moody, start: Callable[[str], BatchBlock], call: str
) -> None:
    scheduler.refusals[call] = [TypeError("cannot read this")]
    block = start("block-1")
    wait_until(has(block, Phase.ENDED))
    assert "cannot read this" in block.status().text
    wait_until(lambda: not scheduler.jobs)

    another = start("block-2")
    wait_until(has(another, Phase.RUNNING))


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination", True),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", True),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", False),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", False),
        ("LIM is down; try later", False),
        ("qsub: cannot connect to server pbs (errno=111)", False),
    ],
)
def test_a_refusal_differs_from_a_scheduler_that_does_not_answer(
    scheduler: Moody, start: Callable[[str], BatchBlock], words: str, refused: bool
) -> None:
    scheduler.refusals["submit"] = [SchedulerError(words)]
    block = start("block-1")
    wait_until(has(block, Phase.ENDED))
    assert words in block.status().text
    assert block.status().refused is refused


def test_a_refused_cancel_is_retried(scheduler: Moody, start: Callable[[str], BatchBlock]) -> None:
    block = start("block-1")
    wait_until(has(block, Phase.RUNNING))
    scheduler.refusals["cancel"] = [SchedulerError("not now")] * 2
    block.kill()
    wait_until(has(block, Phase.ENDED))
    assert scheduler.jobs == []
    assert scheduler.calls.count("cancel") == 3


def test_a_job_unknown_to_the_scheduler_has_ended(scheduler: Moody, tmp_path: Path) -> None:
    provider = BatchProvider(
        scheduler, name="lab", script_dir=tmp_path, walltime_s=None, first_poll_s=0.02, poll_s=0.02, missing_limit_s=0.1
    )
    block = provider.start(["python", "manager"], block_id="block-1", environment={})
    wait_until(has(block, Phase.RUNNING))
    scheduler.jobs.clear()
    wait_until(has(block, Phase.ENDED))
    assert "does not know job farcall-lab-1" in block.status().text
    provider.close()


def test_jobs_have_the_name_of_the_endpoint(scheduler: Moody, tmp_path: Path) -> None:
    provider = BatchProvider(scheduler, name="Lab_2.GPU", script_dir=tmp_path, walltime_s=None)
    provider.start(["python", "manager"], block_id="block-1f2e3d4c", environment={})
    wait_until(lambda: scheduler.jobs == ["farcall-lab-2-gpu-1f2e3d4c"])
    provider.close()


def test_scripts_and_output_of_the_last_blocks_are_kept(scheduler: Moody, tmp_path: Path) -> None:
    scheduler.shares_files = True
    of_former_agent = [tmp_path / f"block-{number:08d}.{end}" for number in range(20) for end in ("sh", "1.2.stderr")]
    for age, path in enumerate(reversed(of_former_agent)):
        path.touch()
        os.utime(path, (1e9 - age, 1e9 - age))
    provider = BatchProvider(
        scheduler, name="lab", script_dir=tmp_path, walltime_s=None, first_poll_s=0.02, poll_s=0.02
    )
    wait_until(lambda: set(tmp_path.glob("block-*")) == set(of_former_agent[-20:]), "the last ten blocks are kept")
    oldest = provider.start(["python", "manager"], block_id="block-oldest", environment={})
    wait_until(has(oldest, Phase.RUNNING))
    for number in range(15):
        (tmp_path / f"farcall-lab-{number}.1.2.stderr").write_text("Killed")
        (tmp_path / f"parsl.farcall-lab-{number}.1.2.submit").touch()
        block = provider.start(["python", "manager"], block_id=f"block-{number}", environment={})
        block.kill()
        wait_until(has(block, Phase.ENDED))
        assert "its standard error ends with: Killed" in block.status().text
    wait_until(lambda: not list(tmp_path.glob("block-*")))

    def kept(pattern: str) -> int:
        return len(list(tmp_path.glob(pattern)))

    wait_until(lambda: (kept("*.stderr"), kept("*.submit")) == (10, 10))
    assert (tmp_path / "farcall-lab-oldest.sh").exists(), "its job may still read it"
    assert (tmp_path / "farcall-lab-14.sh").exists()
    provider.close()
