"""Use of tasks with calls up to now: the places that their calls have had, and those that they have. No I/O, no clock.

A call counts for its owner when it has ended. An owner can end before its calls do; what these have used until then is
part of its result. So can the owner of that, and so on: a call counts once for each owner above it that has not ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from farcall_endpoint.contracts.agent_manager import Used
from farcall_endpoint.manager.core.events import Job, Owner
from farcall_endpoint.manager.core.workers import Worker


class Uses:
    """Use of the owners of calls. Instants are monotonic seconds.

    :param workers: all of the manager.
    :param waits: whether a call was sent to a worker, and waits there for the value of another call.
    :param away: returns the calls that other managers run, and what these have used.
    """

    def __init__(
        self,
        *,
        workers: Mapping[int, Worker],
        waits: Callable[[Job], bool],
        away: Callable[[float], Iterable[tuple[Job, Used]]],
    ) -> None:
        self._workers = workers
        self._waits = waits
        self._away = away
        #: The running tasks with calls.
        self.drivers: Mapping[str, Owner] = {}

    def of(self, owner: Owner, now: float) -> Used:
        """Return the use of the calls of one owner."""
        sums = owner.sums
        return self.all(now).get(owner, Used(sums.run_s, sums.calls))

    def all(self, now: float) -> dict[Owner, Used]:
        """Return the use of all owners with calls that have not ended."""
        found: dict[Owner, Used] = {}
        for worker in self._workers.values():
            head = worker.jobs[0] if worker.is_ready and worker.jobs else None
            if head is not None and head.owner is not None and not self._waits(head):
                _add(found, head.owner, Used(now - worker.since, 1, 1))
        for driver in self.drivers.values():
            _add(found, driver.above, Used(driver.sums.run_s, driver.sums.calls))
        for job, used in self._away(now):
            _add(found, job.owner, used)
        return found

    def of_worker(self, worker_id: int, now: float) -> Used:
        """Return the use of the task that a worker runs, without its calls."""
        worker = self._workers.get(worker_id)
        return Used() if worker is None or not worker.jobs else Used(now - worker.since, 0, 1)


def _add(found: dict[Owner, Used], owner: Owner | None, used: Used) -> None:
    """Count a call for all owners above it."""
    while owner is not None and not owner.sums.is_over:
        known = found.get(owner) or Used(owner.sums.run_s, owner.sums.calls)
        found[owner] = added(known, used)
        owner = owner.above


def added(one: Used, other: Used) -> Used:
    """The sum of both."""
    return Used(one.run_s + other.run_s, one.calls + other.calls, one.places + other.places)
