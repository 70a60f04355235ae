"""Resources of a worker, as the agent reports them of its configuration, for the usage of tasks."""

from __future__ import annotations

from typing import Annotated

import msgspec

_Number = Annotated[float, msgspec.Meta(ge=0, le=1_000_000)]


class WorkerShare(msgspec.Struct, frozen=True, kw_only=True):
    """Cores and accelerators of a worker, those of a node (for tasks that have whole nodes), and the account that the
    endpoint's scheduler charges; empty if there is none."""

    cores: _Number = 1.0
    gpus: _Number = 0.0
    node_cores: _Number = 1.0
    node_gpus: _Number = 0.0
    account: Annotated[str, msgspec.Meta(max_length=200)] = ""
