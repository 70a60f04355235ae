"""Why a task is where it is."""

from __future__ import annotations

from farcall_lambdas.models.endpoints import EndpointDetails
from farcall_lambdas.models.fields import Maybe, Shape

__all__ = ["WhyAnswer", "WhyEndpoint"]


class WhyEndpoint(Shape):
    """The endpoint of a task. ``seen_at`` is its last heartbeat, in epoch seconds; ``problem`` is what is
    wrong with it, in its own words."""

    endpoint_id: str
    name: str
    status: str
    seen_at: float | None
    details: EndpointDetails
    problem: str


class WhyAnswer(Shape):
    """``reason`` is for programs, ``text`` is one sentence. ``state_since`` is in epoch seconds. ``queue_position`` is
    how many tasks of the endpoint leave the queue before this one, null when it is not in the queue. ``endpoint`` is
    left out when it is not registered any more."""

    task_id: str
    reason: str
    text: str
    state: str
    state_since: float
    state_age_s: float
    attempt: int
    queue_position: int | None
    queue_depth: int | None
    endpoint: Maybe[WhyEndpoint] = None
