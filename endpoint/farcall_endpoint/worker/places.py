"""Directories of a running task, each made when its function asks for it first: scratch, shared and in memory."""

from __future__ import annotations

import _thread
import contextlib
import tempfile
from pathlib import Path
from typing import Final

from farcall_common.objects import block_files
from farcall_endpoint.contracts.manager_worker import Order
from farcall_endpoint.host.removal import remove_tree
from farcall_endpoint.worker.directories import name_of, submitter_directory
from farcall_endpoint.worker.settings import WorkerSettings

SHARED: Final = ".farcall-shared"
"""In the working directory of the owner's tasks, and in that of each other submitter's."""
_SCRATCH: Final = "scratch-"


def scratch_name(worker_id: int | str) -> str:
    """The directory, below the temporary one of its submitter, in which a worker makes those of its tasks."""
    return f"{_SCRATCH}{worker_id}"


class TaskPlaces:
    """The directories of one task.

    ``has_other_nodes``: whether the memory of this node is not that of all. ``block_key``: of the seals of blocks.

    :param root: the endpoint's working directory.
    :param worker_id: the worker's, unique in its manager.
    """

    def __init__(self, order: Order, *, root: str, worker_id: str, settings: WorkerSettings) -> None:
        self._order = order
        self._root = Path(root)
        self._temporary = settings.temporary
        self._worker_id = worker_id
        self._memory = settings.memory
        self.has_other_nodes = settings.is_of_node
        self.block_key = settings.block_key.encode()
        # Of a worker that serves several submitters, this is the only thing that tells them apart.
        other = order.submitter if order.submitter != settings.submitter else ""
        self._other = name_of(other) if other else ""
        self._lock = _thread.allocate_lock()
        self._scratch: Path | None = None

    def scratch(self) -> Path:
        """See :attr:`farcall_common.running.RunningTask.scratch`."""
        with self._lock:
            if self._scratch is None:
                self._scratch = self._make_scratch()
            return self._scratch

    def _make_scratch(self) -> Path:
        if not self._temporary:  # the manager could not make it; perhaps there is room by now
            return Path(tempfile.mkdtemp(prefix="farcall-scratch-"))
        name = f"{name_of(self._order.task_id)}-{self._order.attempt}"
        path = Path(self._temporary, scratch_name(self._worker_id), name)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def shared_dir(self) -> Path:
        """See :attr:`farcall_common.running.RunningTask.shared_dir`."""
        submitter = self._order.submitter
        home = submitter_directory(self._root, name_of(submitter)) if submitter else self._root
        path = home / SHARED
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def memory_dir(self) -> Path | None:
        """See :attr:`farcall_common.running.RunningTask.memory_dir`."""
        return None if self.has_other_nodes else self._in_memory()

    def blocks_dir(self) -> Path | None:
        """For blocks in the memory of this node, which may not exist yet."""
        memory = self._in_memory()
        return None if memory is None else memory / block_files.DIRECTORY

    def _in_memory(self) -> Path | None:
        if not self._memory:
            return None
        path = Path(self._memory, self._other)
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except OSError:  # a full memory file system, or one that is not there in a container
            return None
        return path

    def remove_scratch(self) -> None:
        """The task has ended, and its result was sent."""
        with self._lock:
            path = self._scratch
        if path is None:
            return
        remove_tree(str(path))
        if self._temporary:
            with contextlib.suppress(OSError):
                path.parent.rmdir()
