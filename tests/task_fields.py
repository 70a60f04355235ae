"""Fields of tasks as tests write them: options next to the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farcall_common.task_options import TaskOptions


def with_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, those of them that are options as one field."""
    given = {name: fields[name] for name in TaskOptions.__struct_fields__ if name in fields}
    others = {name: value for name, value in fields.items() if name not in given}
    return {**others, "options": TaskOptions(**given)} if given else others
