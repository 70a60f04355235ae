"""Limits of running tasks: memory and output."""

from __future__ import annotations

from typing import Final

import msgspec

from farcall_common.errors import ErrorRecord
from farcall_endpoint import outcomes
from farcall_endpoint.protocol import TaskOrder

LIMIT_PERIOD_S: Final = 0.1
"""How often a task with limits is measured. Its worker checks again at its end, so that no task which exceeded them
succeeds."""
OUTPUT_PERIOD_S: Final = 0.01
"""The same for its output, while that grows."""


def has_limits(order: TaskOrder) -> bool:
    """Whether a task must be measured while it runs."""
    return order.options.memory_bytes is not None or order.options.max_output_bytes is not None


def capped(order: TaskOrder, memory_bytes: int | None) -> TaskOrder:
    """The order with its memory limited to the share of its worker, if workers have one."""
    requested_bytes = order.options.memory_bytes
    if memory_bytes is None or (requested_bytes is not None and requested_bytes <= memory_bytes):
        return order
    options = msgspec.structs.replace(order.options, memory_bytes=memory_bytes)
    return msgspec.structs.replace(order, options=options)


def breach(order: TaskOrder, *, memory_bytes: int, output_bytes: int) -> ErrorRecord | None:
    """The error of a task that exceeds a limit, or None."""
    return outcomes.limit_exceeded(
        memory_bytes=memory_bytes,
        memory_limit_bytes=order.options.memory_bytes,
        output_bytes=output_bytes,
        output_limit_bytes=order.options.max_output_bytes,
    )
