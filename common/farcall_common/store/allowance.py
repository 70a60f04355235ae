"""Allowances: what a share lets a person use of an endpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

import msgspec

from farcall_common.errors import InvalidRequest
from farcall_common.store.model import RunningLimit

_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_Hours = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Allowance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Limits of a person on an endpoint; None is no limit.

    :param max_running: tasks that the endpoint has at a time.
    :param max_waiting: tasks that wait in the cloud at a time.
    :param max_walltime_s: the longest walltime of a task, in seconds, and the one of tasks without any.
    :param core_hours_per_month: of tasks whose end was recorded in this month, in UTC.
    :param gpu_hours_per_month: likewise, by accelerators.
    :param weight: how many tasks may run for each one of a person with weight 1; None: as the endpoint's configuration
        has it.
    """

    max_running: _Count | None = None
    max_waiting: _Count | None = None
    max_walltime_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None
    core_hours_per_month: _Hours | None = None
    gpu_hours_per_month: _Hours | None = None
    weight: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Allowance:
        """Read what :meth:`to_json` wrote, or a request's body.

        :raises InvalidRequest: for an unknown field, or a value that a limit cannot have; the message names it.
        """
        try:
            allowance = msgspec.convert(dict(value), Allowance)
        except msgspec.ValidationError as error:
            names = ", ".join(Allowance.__struct_fields__)
            raise InvalidRequest(f"An allowance is not valid: {error}.", hint=f"Its limits are {names}.") from None
        for name, each in allowance.to_json().items():
            if not math.isfinite(each):
                raise InvalidRequest(f"An allowance is not valid: {name} is not a finite number.")
        return allowance

    @classmethod
    def stored(cls, value: Mapping[str, Any]) -> Allowance:
        """What :meth:`to_json` wrote, perhaps in a later release, whose other limits are left out."""
        return cls.from_json({name: each for name, each in value.items() if name in cls.__struct_fields__})

    def to_json(self) -> dict[str, Any]:
        """The limits that are set."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    @property
    def running_limit(self) -> RunningLimit:
        """The part that the queue enforces."""
        return RunningLimit(self.max_running, self.weight)


#: The allowance of those whose share names none.
NO_LIMITS: Final = Allowance()


def most_generous(allowances: Iterable[Allowance]) -> Allowance:
    """Return the highest value of each limit; None, no limit, is the highest. If only some allowances have a weight,
    the others count as weight 1. Without allowances there is no limit."""
    given = list(allowances)
    limits: dict[str, Any] = {}
    for name in Allowance.__struct_fields__:
        values = [getattr(each, name) for each in given]
        if name == "weight":
            weights = [value for value in values if value is not None]
            limits[name] = max(weights) if weights else None
        else:
            limits[name] = None if None in values or not values else max(values)
    return Allowance(**limits)
