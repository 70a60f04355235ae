"""Which tasks an endpoint refuses at once, because they could never run here."""

from __future__ import annotations

from collections.abc import Mapping

from farcall_common.errors import ErrorRecord
from farcall_common.wire import TaskSpec
from farcall_endpoint import outcomes
from farcall_endpoint.protocol import RANKS

__all__ = ["refusal"]


def refusal(spec: TaskSpec, *, knows_function: bool, block_s: float | None, no_nodes: str) -> ErrorRecord | None:
    """What a task fails with before it is queued; None for one that is welcome.

    :param block_s: seconds that a block of managers lives; None if it has no end.
    :param no_nodes: why no manager can be had; empty if one can.
    """
    if not knows_function:
        return outcomes.function_missing(spec.function_hash)
    if spec.container_id is not None:
        return outcomes.containers_unsupported(spec.container_id)
    if spec.resource_specification and (wrong := _wrong_limit(spec.resource_specification)):
        return outcomes.limit_invalid(*wrong)
    if block_s is not None and (spec.walltime_s or 0.0) > block_s:
        return outcomes.walltime_too_long(spec.walltime_s or 0.0, block_s=block_s)
    return outcomes.nodes_unavailable(no_nodes) if no_nodes else None


def _wrong_limit(specification: Mapping[str, object]) -> tuple[str, object] | None:
    """The name and value of a limit that is none."""
    for name in ("memory_bytes", "max_output_bytes", *RANKS):
        value = specification.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value <= 0):
            return name, value
    return None
