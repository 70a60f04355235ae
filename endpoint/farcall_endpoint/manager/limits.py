"""What a running task may use."""

from __future__ import annotations

from typing import Final

import msgspec

from farcall_common.errors import ErrorRecord
from farcall_endpoint import outcomes
from farcall_endpoint.protocol import TaskOrder

LIMIT_PERIOD_S: Final = 0.1
"""How often a task that has limits is measured: what it may take beyond them is what it can take in this time. Its
worker looks once more at its end, so that no task which went beyond them ends well."""
OUTPUT_PERIOD_S: Final = 0.01
"""The same for what it prints, while it prints."""


def has_limits(order: TaskOrder) -> bool:
    """Whether a task must be measured while it runs."""
    return order.options.memory_bytes is not None or order.options.max_output_bytes is not None


def capped(order: TaskOrder, memory_bytes: int | None) -> TaskOrder:
    """The order with no more memory than its worker's share, if workers have one."""
    wanted_bytes = order.options.memory_bytes
    if memory_bytes is None or (wanted_bytes is not None and wanted_bytes <= memory_bytes):
        return order
    options = msgspec.structs.replace(order.options, memory_bytes=memory_bytes)
    return msgspec.structs.replace(order, options=options)


def breach(order: TaskOrder, *, memory_bytes: int, output_bytes: int) -> ErrorRecord | None:
    """The record to end a task with, if it uses more than it may."""
    return outcomes.limit_exceeded(
        memory_bytes=memory_bytes,
        memory_limit_bytes=order.options.memory_bytes,
        output_bytes=output_bytes,
        output_limit_bytes=order.options.max_output_bytes,
    )
