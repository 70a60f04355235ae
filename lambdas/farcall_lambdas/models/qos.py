"""Shape of a latency target."""

from __future__ import annotations

from typing import Self

from pydantic import ConfigDict, model_validator

from farcall_common.qos import QoS
from farcall_lambdas.models.fields import Shape


class QosShape(Shape):
    """The latency that calls are to hold, from their arrival at the endpoint to their end: ``target_ms`` milliseconds,
    or ``max_slowdown`` times what a call takes on an idle endpoint; so many of 100 calls as ``percentile`` says.
    ``is_baseline``: measure what a call takes. An unknown field is refused: the calls would have no target."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target_ms: float | None = None
    max_slowdown: float | None = None
    percentile: float = 95.0
    is_baseline: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.qos()
        return self

    def qos(self) -> QoS:
        """The same for tasks.

        :raises ValueError: for values that make no sense.
        """
        return QoS(
            target_ms=self.target_ms,
            max_slowdown=self.max_slowdown,
            percentile=self.percentile,
            is_baseline=self.is_baseline,
        )
