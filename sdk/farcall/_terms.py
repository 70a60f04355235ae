"""Where and how calls run: values that each call takes along, and that may be set anew for the calls to come."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farcall_common.task_options import TaskOptions


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a call takes along. Calls of equal terms may travel in one request."""

    endpoint_id: str | None
    task_group_id: str
    options: TaskOptions
    #: Whether futures raise what the function raised (see :attr:`Executor.raise_original`).
    raise_original: bool = False
