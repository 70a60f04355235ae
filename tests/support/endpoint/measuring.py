"""Measuring of a task, whole."""

from __future__ import annotations

from farcall_endpoint.manager.core.limits import TaskUse
from farcall_endpoint.manager.shell.processes import MeasuredTask, measure


def use_of(task: MeasuredTask) -> TaskUse:
    """What a task uses."""
    steps = measure(task)
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            use: TaskUse = ended.value
            return use
