"""Which tasks an endpoint refuses at once, because they could never run here."""

from __future__ import annotations

from farcall_common.errors import ErrorRecord
from farcall_common.wire import TaskSpec
from farcall_endpoint import outcomes


def refusal(spec: TaskSpec, *, knows_function: bool, block_s: float | None, no_nodes: str) -> ErrorRecord | None:
    """What a task fails with before it is queued; None for one that is welcome.

    :param block_s: seconds that a block of managers lives; None if it has no end.
    :param no_nodes: why no manager can be had; empty if one can.
    """
    if not knows_function:
        return outcomes.function_missing(spec.function_hash)
    options = spec.options
    if options.container is not None:
        return outcomes.containers_unsupported(options.container)
    if options.resource_specification and (wrong := options.untranslatable()):
        return outcomes.limit_invalid(*wrong)
    if block_s is not None and (options.walltime_s or 0.0) > block_s:
        return outcomes.walltime_too_long(options.walltime_s or 0.0, block_s=block_s)
    return outcomes.nodes_unavailable(no_nodes) if no_nodes else None
