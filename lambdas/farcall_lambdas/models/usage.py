"""Usage shapes."""

from __future__ import annotations

from farcall_lambdas.models.fields import Maybe, Shape


class UsageEntry(Shape):
    """Sums over tasks that ended: seconds of the last attempt of each, and those times the cores and accelerators that
    it had. Those of a graph are the seconds of its calls together; ``stages`` is how many calls of graphs ran. ``day``
    is in UTC. Fields that the sums are not made by are left out."""

    day: Maybe[str] = None
    identity_id: Maybe[str] = None
    endpoint_id: Maybe[str] = None
    function_id: Maybe[str] = None
    account: Maybe[str] = None
    tasks: int
    failed: int
    stages: int
    wall_s: float
    core_s: float
    gpu_s: float


class UsageList(Shape):
    """In the order of day, identity, endpoint, function, account. With ``next`` there may be more: pass it as
    ``after``."""

    usage: list[UsageEntry]
    next: Maybe[int] = None
