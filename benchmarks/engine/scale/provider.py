"""The provider of simulated managers: real processes, started where a real one would start a node's manager."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Final

from farcall_endpoint.providers import LocalProvider
from farcall_endpoint.providers.local import LocalBlock

_MANAGER: Final = "farcall_endpoint.manager"
_SIMULATOR: Final = "benchmarks.engine.scale.simulator"


class SimulatedProvider(LocalProvider):
    """Blocks of many managers, each block one process on this machine.

    :param environment: of the processes.
    :param managers: in all blocks together.
    :param blocks: how many there will be.
    :param task_s: seconds that each task takes.
    """

    def __init__(self, environment: Mapping[str, str], *, managers: int, blocks: int, task_s: float) -> None:
        super().__init__(environment)
        share, over = divmod(managers, blocks)
        self._shares = itertools.cycle([share + (number < over) for number in range(blocks)])
        self._task_s = task_s

    def start(
        self,
        command: Sequence[str],
        *,
        block_id: str,  # noqa: ARG002 - the command has it
        environment: Mapping[str, str],
    ) -> LocalBlock:
        """As :meth:`Provider.start`."""
        at = command.index(_MANAGER)
        share = ["--agent-pid", str(os.getpid()), "--managers", str(next(self._shares)), "--task-s", str(self._task_s)]
        return self.spawn([*command[:at], _SIMULATOR, *command[at + 1 :], *share], environment)
