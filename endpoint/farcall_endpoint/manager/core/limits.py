"""Limits of the tasks that a manager runs: memory, output and processes."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from farcall_common.errors import ErrorRecord
from farcall_common.task_options import TaskOptions
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.contracts.agent_manager import TaskOrder

OWN_BYTES: Final = 512 * 2**20
"""Memory of a start or a template beyond the limit of a task: Python, and the modules that it loads for tasks."""


class TaskUse(NamedTuple):
    """Use of a task: resident memory and files in memory, beyond those that its worker held before, and the number of
    processes and threads of the worker. If this number exceeds the limit, the memory is not measured."""

    resident_bytes: int = 0
    file_bytes: int = 0
    processes: int = 0


def is_limited(order: TaskOrder, *, processes: int) -> bool:
    """Whether a task must be measured while it runs.

    :param processes: limit for tasks of other submitters than the owner; 0: there is none.
    """
    options = order.options
    return (
        options.memory_bytes is not None
        or options.max_output_bytes is not None
        or (processes > 0 and bool(order.submitter))
    )


def limited_options(options: TaskOptions, memory_bytes: int | None) -> TaskOptions:
    """Options that allow no more memory than this, the share of a worker, if workers have one."""
    if memory_bytes is None or (options.memory_bytes is not None and options.memory_bytes <= memory_bytes):
        return options
    return msgspec.structs.replace(options, memory_bytes=memory_bytes)


def limited(order: TaskOrder, memory_bytes: int | None) -> TaskOrder:
    """The order of a task with such options."""
    options = limited_options(order.options, memory_bytes)
    return order if options is order.options else msgspec.structs.replace(order, options=options)


def start_bytes(*limits: int | None) -> int | None:
    """Return the limit of the start of a worker for another submitter than the owner, and of a template, with these
    limits of a task; None: there is none."""
    least = min((each for each in limits if each is not None), default=None)
    return None if least is None else least + OWN_BYTES


def breach(
    order: TaskOrder | None, use: TaskUse, *, output_bytes: int, processes: int, most_start_bytes: int | None = None
) -> ErrorRecord | None:
    """The error of a task that exceeds a limit, or None.

    :param order: None: a worker of another submitter than the owner starts, or is ended.
    :param processes: as of :func:`is_limited`.
    :param most_start_bytes: as of :func:`start_bytes`.
    """
    if processes and (order is None or order.submitter) and use.processes > processes:
        return outcomes.processes_exceeded(processes)
    used_bytes = use.resident_bytes + use.file_bytes
    if order is None:
        if most_start_bytes is None or used_bytes <= most_start_bytes:
            return None
        return outcomes.start_memory_exceeded(used_bytes / 2**20, most_start_bytes / 2**20)
    return outcomes.limit_exceeded(
        memory_bytes=used_bytes,
        memory_limit_bytes=order.options.memory_bytes,
        output_bytes=output_bytes,
        output_limit_bytes=order.options.max_output_bytes,
    )
