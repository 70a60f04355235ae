"""Limits of the tasks that a manager runs: memory and output."""

from __future__ import annotations

import msgspec

from farcall_common.errors import ErrorRecord
from farcall_common.task_options import TaskOptions
from farcall_endpoint import outcomes
from farcall_endpoint.protocol import TaskOrder


def is_limited(order: TaskOrder) -> bool:
    """Whether a task must be measured while it runs."""
    return order.options.memory_bytes is not None or order.options.max_output_bytes is not None


def limited_options(options: TaskOptions, memory_bytes: int | None) -> TaskOptions:
    """Options that allow no more memory than this, the share of a worker, if workers have one."""
    if memory_bytes is None or (options.memory_bytes is not None and options.memory_bytes <= memory_bytes):
        return options
    return msgspec.structs.replace(options, memory_bytes=memory_bytes)


def limited(order: TaskOrder, memory_bytes: int | None) -> TaskOrder:
    """The order of a task with such options."""
    options = limited_options(order.options, memory_bytes)
    return order if options is order.options else msgspec.structs.replace(order, options=options)


def breach(order: TaskOrder, *, memory_bytes: int, output_bytes: int) -> ErrorRecord | None:
    """The error of a task that exceeds a limit, or None."""
    return outcomes.limit_exceeded(
        memory_bytes=memory_bytes,
        memory_limit_bytes=order.options.memory_bytes,
        output_bytes=output_bytes,
        output_limit_bytes=order.options.max_output_bytes,
    )
