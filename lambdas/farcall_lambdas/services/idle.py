"""Forwarders that nobody is connected to are put to sleep, where the deployment wants that.

Nothing is claimed and nothing is locked: whoever comes at that very moment is sent away by the drain, asks the API for
the way in, and thereby wakes them again.
"""

from __future__ import annotations

from aws_lambda_powertools import Logger

from farcall_common.store import Queue
from farcall_lambdas.fleet import Fleet
from farcall_lambdas.logs import SERVICE

logger = Logger(service=SERVICE, child=True)


class IdleWatch:
    """Looks at what the forwarders say of themselves. Without a ``fleet`` they always run."""

    def __init__(self, queue: Queue, fleet: Fleet | None) -> None:
        self._queue = queue
        self._fleet = fleet

    def run(self) -> int:
        """One look; how many forwarders were put to sleep.

        :raises Unavailable: when the queue or the fleet cannot be reached; the next look starts over.
        """
        if self._fleet is None:
            return 0
        forwarders = self._queue.forwarders()
        idle = [each for each in forwarders if each.idle_s is not None and each.idle_s >= self._fleet.idle_s]
        if not forwarders or len(idle) < len(forwarders):
            return 0
        self._fleet.sleep()
        logger.info("forwarders put to sleep", forwarders=len(idle))
        return len(idle)
