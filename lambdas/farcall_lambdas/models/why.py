"""Why a task is where it is."""

from __future__ import annotations

from farcall_lambdas.models.endpoints import EndpointDetails
from farcall_lambdas.models.fields import Maybe, Shape


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
    """``reason`` is for programs, ``text`` is for people. ``state_since`` is in epoch seconds, as is ``expires_at``: if
    the task has not started by then, it ends as failed; null when it runs or has ended. ``queue_position`` is how many
    of the caller's own tasks leave the endpoint's queue before this one, null when it is not in the queue.
    ``queue_depth`` is how many tasks wait there, ``queue_submitters`` of how many submitters, who take turns.
    ``endpoint`` is left out when it is not registered any more."""

    task_id: str
    reason: str
    text: str
    state: str
    state_since: float
    state_age_s: float
    expires_at: float | None
    attempt: int
    queue_position: int | None
    queue_depth: int | None
    queue_submitters: int | None
    endpoint: Maybe[WhyEndpoint] = None
