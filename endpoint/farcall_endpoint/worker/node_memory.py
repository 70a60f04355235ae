"""Memory of nodes for blocks, as a task of a worker has it: its manager gets what is on other nodes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from farcall_common.errors import StoreUnavailable
from farcall_endpoint.worker.nested import CallsOfTask

if TYPE_CHECKING:
    from farcall_common.running import Range


class WorkerNodeMemory:
    """See :class:`farcall_common.running.NodeMemory`.

    :param calls: sends requests to the manager.
    :param has_other_nodes: whether the memory of this node is not that of all.
    """

    def __init__(self, directory: Path | None, calls: CallsOfTask, *, has_other_nodes: bool, key: bytes) -> None:
        self.directory = directory
        self.key = key
        self._calls = calls
        self._has_other_nodes = has_other_nodes

    def address(self) -> str:
        """See :class:`farcall_common.running.NodeMemory`."""
        if not self._has_other_nodes:
            return ""
        return self._calls.blocks()[0]

    def fetch(self, node: str, parts: Sequence[Range]) -> list[memoryview]:
        """See :class:`farcall_common.running.NodeMemory`."""
        wanted = tuple((name, start, end or 0) for name, start, end in parts)
        _, body = self._calls.blocks(node, wanted)
        ends = itertools.accumulate((end - start for _, start, end in wanted), initial=0)
        return [memoryview(body[first:end]) for first, end in itertools.pairwise(ends)]

    def delete_below(self, node: str, prefix: str) -> None:
        """See :class:`farcall_common.running.NodeMemory`."""
        with contextlib.suppress(StoreUnavailable):
            self._calls.blocks(node, below=prefix)
