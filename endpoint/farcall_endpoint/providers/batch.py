"""Batch provider: blocks as jobs of a batch system. A thread runs the scheduler's commands, which may be slow.

The ids of unfinished jobs are kept in a file: after a kill, the next agent cancels the jobs of the former one.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import queue
import re
import shlex
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from farcall_common.files import make_directory, write_whole
from farcall_endpoint.host.transport import FLEET_VARIABLES
from farcall_endpoint.providers.base import BlockStatus, Phase

_logger = logging.getLogger(__name__)

_CANCEL_TRIES: Final = 5
_KEEP_BLOCKS: Final = 10
"""Ended blocks whose scripts and output are kept, for a look at what went wrong."""
_ADDED: Final = re.compile(r"^(?:parsl\.|cmd_)")
"""What Parsl puts in front of the names of some files."""
_NOT_IN_NAMES: Final = re.compile(r"[^a-z0-9]+")
_NO_ANSWER: Final = re.compile(
    r"connect|contact|commlib|tim(?:ed|e)[ -]?out|temporar|try (?:again )?later|unreachable|max retries", re.IGNORECASE
)
"""Words in the errors of a command that could not reach its scheduler, or whose scheduler is not ready. Any other error
is the scheduler's answer."""
_MAX_NAME: Final = 40
"""Characters of an endpoint's name in the names of its jobs: with the rest they are a DNS label, as pods need."""


class SchedulerError(Exception):
    """A scheduler refused, or its output is not understood. The text is from the scheduler."""


class Scheduler(Protocol):
    """Commands of a batch system; each may take seconds.

    Raises :class:`SchedulerError` if the system refuses or does not answer.
    """

    #: Whether the nodes see the agent's files; if not, a job's command must be self-contained.
    shares_files: bool

    def submit(self, command: str, *, name: str, secrets: Mapping[str, str] | None = None, image: str = "") -> str:
        """Submit a job that runs a shell command on each of its nodes; its id. ``secrets``: variables of its
        environment that the job's description must not show; only where files are not shared. ``image``: of its pod,
        instead of the configured one."""

    def statuses(self, job_ids: Sequence[str]) -> Mapping[str, BlockStatus]:
        """The statuses of jobs; unknown jobs are left out."""

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs, waiting or running."""


@dataclasses.dataclass
class BatchBlock:
    """A :class:`Block` that is a job. Only the provider's thread writes attributes other than ``unwanted``."""

    block_id: str
    provider: BatchProvider
    command: str
    secrets: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    image: str = ""
    job_id: str | None = None
    latest: BlockStatus = BlockStatus(Phase.WAITING, "being submitted")  # noqa: RUF009 - frozen
    unwanted: bool = False
    cancels: int = 0
    missing_since: float | None = None
    pipe: None = None

    def status(self) -> BlockStatus:
        return self.latest

    def kill(self) -> None:
        if not self.unwanted:
            self.unwanted = True
            self.provider.wake()

    def close(self) -> None:
        """No operation: a job has no resources on this machine."""


class BatchProvider:
    """A :class:`Provider` whose blocks are jobs.

    :param name: the endpoint's name; its jobs are named ``farcall-NAME-BLOCK``.
    :param script_dir: private directory for scripts and the jobs' output, on a file system that the nodes share.
    :param worker_init: shell lines to run on each node before the manager.
    :param first_poll_s: seconds from the newest block to the first poll of the jobs' statuses.
    :param poll_s: maximum seconds between two polls; at first they are closer together.
    :param missing_limit_s: seconds for which the scheduler must not know a job before it counts as ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        name: str,
        script_dir: Path,
        walltime_s: float | None,
        worker_init: str = "",
        first_poll_s: float = 1.0,
        poll_s: float = 5.0,
        missing_limit_s: float = 30.0,
    ) -> None:
        self.walltime_s = walltime_s
        self._scheduler = scheduler
        self._script_dir = script_dir
        self._worker_init = worker_init
        self._first_poll_s = first_poll_s
        self._poll_s = poll_s
        self._missing_limit_s = missing_limit_s
        self._job_prefix = f"farcall-{_NOT_IN_NAMES.sub('-', name.lower())[:_MAX_NAME].strip('-')}"
        self._journal = script_dir / "jobs.json"
        self._blocks: list[BatchBlock] = []
        self._open_jobs: set[str] = set()  # names, from the start of a block to its end
        self._new: queue.SimpleQueue[BatchBlock] = queue.SimpleQueue()
        self._changes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake = threading.Event()
        self._closed = False
        self._wait_s = first_poll_s
        self._poll_at = 0.0
        make_directory(script_dir, mode=0o700)
        self._thread = threading.Thread(target=self._work, name="farcall-scheduler", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._changes

    def changed(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._changes)

    def start(
        self, command: Sequence[str], *, block_id: str, environment: Mapping[str, str], image: str = ""
    ) -> BatchBlock:
        """Start a block without waiting for the scheduler, whose answer appears in the block's status."""
        secrets: Mapping[str, str] = {}
        if not self._scheduler.shares_files:
            command = ["python3", *command[1:]]  # the nodes' own
            secrets = {name: value for name, value in environment.items() if name in FLEET_VARIABLES}
            environment = {name: value for name, value in environment.items() if name not in secrets}
        self._open_jobs.add(self._job_name(block_id))
        script = node_script(command, environment=environment, worker_init=self._worker_init)
        if self._scheduler.shares_files:  # launchers put a command into shell code of theirs: a path survives that
            path = self._script_dir / f"{self._job_name(block_id)}.sh"
            path.touch(0o700)
            path.write_text(script)
            script = f"/bin/bash {shlex.quote(str(path))}"
        block = BatchBlock(block_id, self, script, secrets, image)
        self._new.put(block)
        self.wake()
        return block

    def _job_name(self, block_id: str) -> str:
        return f"{self._job_prefix}-{block_id.removeprefix('block-')}"

    def wake(self) -> None:
        """Wake the thread."""
        self._wake.set()

    def close(self) -> None:
        """Stop the thread; wait up to ``missing_limit_s`` seconds until it has cancelled unwanted jobs."""
        self._closed = True
        self.wake()
        self._thread.join(self._missing_limit_s)
        if not self._thread.is_alive():
            os.close(self._changes)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        self._cancel_leftovers()
        self._delete_old_files()
        while True:
            try:
                self._turn()
            except Exception as error:
                _logger.exception("blocks are lost because of a bug")
                self._give_up(f"the endpoint failed to use the scheduler: {error!r}")
            if self._closed:
                return
            self._wake.wait(max(0.0, self._poll_at - time.monotonic()) if self._blocks else None)
            self._wake.clear()

    def _turn(self) -> None:
        """Submit new blocks and cancel unwanted ones at once; poll the others when it is time."""
        while not self._new.empty():
            block = self._new.get()
            self._blocks.append(block)
            self._wait_s = self._first_poll_s
            self._poll_at = time.monotonic() + self._first_poll_s
            self._submit(block)
        is_time = time.monotonic() >= self._poll_at
        self._cancel_unwanted(again=is_time)
        if is_time and self._blocks and not self._closed:
            self._poll_at = time.monotonic() + self._wait_s
            self._wait_s = min(2 * self._wait_s, self._poll_s)
            self._poll(self._blocks)

    def _give_up(self, reason: str) -> None:
        """Report all blocks as ended, and cancel their jobs."""
        for block in list(self._blocks):
            self._set_status(block, BlockStatus(Phase.ENDED, reason))
            if block.job_id is not None and not block.unwanted:
                self._adopt(block.job_id)

    def _submit(self, block: BatchBlock) -> None:
        if block.unwanted:
            self._set_status(block, BlockStatus(Phase.ENDED, "released before it was submitted"))
            return
        try:
            block.job_id = self._scheduler.submit(
                block.command, name=self._job_name(block.block_id), secrets=block.secrets, image=block.image
            )
        except SchedulerError as error:
            _logger.error("the scheduler refused a block: %s", error)
            is_answer = not _NO_ANSWER.search(str(error))
            self._set_status(block, BlockStatus(Phase.ENDED, f"the scheduler refused it: {error}", refused=is_answer))
            return
        _logger.info("block %s is job %s", block.block_id, block.job_id)
        self._set_status(block, BlockStatus(Phase.WAITING, "submitted"))
        self._keep_journal()

    def _cancel_unwanted(self, *, again: bool) -> None:
        """Cancel unwanted jobs; with ``again``, also those that could not be cancelled before."""
        unwanted = [block for block in self._blocks if block.unwanted and (again or not block.cancels)]
        for block in unwanted:
            assert block.job_id is not None, "a block without a job has ended"
            block.cancels += 1
            try:
                self._scheduler.cancel([block.job_id])
            except SchedulerError as error:
                _logger.warning("job %s cannot be cancelled: %s", block.job_id, error)
                if block.cancels < _CANCEL_TRIES:
                    continue
            self._set_status(block, BlockStatus(Phase.ENDED, "cancelled by the endpoint"))
        if unwanted:
            self._keep_journal()

    def _poll(self, blocks: Sequence[BatchBlock]) -> None:
        by_job = {block.job_id: block for block in blocks if block.job_id is not None}
        try:
            statuses = self._scheduler.statuses(list(by_job))
        except SchedulerError as error:
            _logger.warning("cannot poll the scheduler: %s", error)
            return
        now = time.monotonic()
        for job_id, block in by_job.items():
            status = statuses.get(job_id)
            if status is not None:
                block.missing_since = None
                self._set_status(block, status)
            elif block.missing_since is None:
                block.missing_since = now
            elif now - block.missing_since >= self._missing_limit_s:
                self._set_status(block, BlockStatus(Phase.ENDED, f"the scheduler does not know job {job_id} any more"))
        self._keep_journal()

    def _set_status(self, block: BatchBlock, status: BlockStatus) -> None:
        if status == block.latest:
            return
        _logger.info("block %s, job %s: %s", block.block_id, block.job_id, status.text or status.phase.name)
        if status.phase is Phase.ENDED:
            status = dataclasses.replace(status, text=f"{status.text}{self._output(block)}")
            self._blocks.remove(block)
        block.latest = status
        os.eventfd_write(self._changes, 1)
        if status.phase is Phase.ENDED:
            self._open_jobs.discard(self._job_name(block.block_id))
            self._delete_old_files()

    def _output(self, block: BatchBlock) -> str:
        """The last lines of a job's standard error, which tell why it failed."""
        for path in sorted(self._script_dir.glob(f"*{self._job_name(block.block_id)}.*.stderr")):
            with contextlib.suppress(OSError):
                lines = path.read_text(errors="replace").strip().splitlines()
                if lines:
                    return "; its standard error ends with: " + " / ".join(line.strip() for line in lines[-3:])
        return ""

    def _delete_old_files(self) -> None:
        """Delete the scripts and the output of blocks that have ended, those of former agents too, but for the last
        ones."""
        by_job: dict[str, list[Path]] = collections.defaultdict(list)
        with contextlib.suppress(OSError):
            for path in self._script_dir.iterdir():
                job = _ADDED.sub("", path.name).partition(".")[0]
                if path != self._journal and job not in self._open_jobs:
                    by_job[job].append(path)
            ended = sorted(by_job.values(), key=lambda paths: max(path.stat().st_mtime for path in paths))
            for path in itertools.chain.from_iterable(ended[:-_KEEP_BLOCKS]):
                path.unlink()

    def _keep_journal(self) -> None:
        ids = [block.job_id for block in self._blocks if block.job_id is not None]
        with contextlib.suppress(OSError):
            write_whole(self._journal, json.dumps(ids).encode())

    def _cancel_leftovers(self) -> None:
        """Cancel the jobs of a former agent, which was killed."""
        try:
            leftovers: Iterable[str] = json.loads(self._journal.read_text())
        except (OSError, ValueError):
            return
        for job_id in leftovers:
            _logger.info("job %s belongs to a former agent; cancelling it", job_id)
            self._adopt(job_id)

    def _adopt(self, job_id: str) -> None:
        """Add a job only to cancel it."""
        self._blocks.append(BatchBlock("leftover", self, "", job_id=job_id, unwanted=True))


def node_script(command: Sequence[str], *, environment: Mapping[str, str], worker_init: str) -> str:
    """The script for each node of a block. As a file it contains the fleet's keys: only its owner may read it."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    return "\n".join(
        ["#!/bin/bash", "unset FARCALL_TOKEN", worker_init.strip(), *exports, f"exec {shlex.join(command)}", ""]
    )
