"""Details of sealed calls: which of them are under the seal of the endpoint, and which are the word of the service."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

BY_SERVICE: Final = "by the service"
"""Label of what is shown of a sealed call and is not under its seal."""


class SealedDetails(dict[str, Any]):
    """Details of a sealed call.

    :param unsigned: those that are not under the seal. The service wrote them; they are numbers and known states only.
    """

    def __init__(self, signed: Mapping[str, Any], unsigned: Mapping[str, Any]) -> None:
        super().__init__({**unsigned, **signed})
        self.unsigned: frozenset[str] = frozenset(unsigned.keys() - signed.keys())


def is_signed(details: Mapping[str, Any], name: str) -> bool:
    """Whether a detail was under the seal of a sealed call."""
    return isinstance(details, SealedDetails) and name in details and name not in details.unsigned


def unsigned_of(details: Mapping[str, Any]) -> frozenset[str]:
    """The names of the details of a sealed call that are the service's word; empty for other calls."""
    return details.unsigned if isinstance(details, SealedDetails) else frozenset()


def fields_by_service(details: Mapping[str, Any], *, state: bool, error: bool) -> tuple[str, ...]:
    """The fields of a task that the service wrote, if its call was sealed: all but those that the seal has.

    :param state: whether the state is among them; ``error``: the error likewise.
    """
    if not isinstance(details, SealedDetails):
        return ()
    unproven = (("state", state), ("exception", error))
    return (*(name for name, is_said in unproven if is_said), *_OF_SERVICE, *sorted(details.unsigned))


_OF_SERVICE: Final = (
    *("task_group_id", "endpoint_id", "function_id", "attempt", "finished_at"),
    *("retry_of", "environment", "timings", "staging", "target"),
)


def listed(names: Iterable[str]) -> str:
    """Names in a line, for :data:`BY_SERVICE`."""
    return ", ".join(dict.fromkeys(names))
