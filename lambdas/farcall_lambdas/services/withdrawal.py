"""Withdrawn rights: open tasks are cancelled whose submitters may not use the endpoint or the function any more.

The request that withdraws a right records that first, and cancels for a limited time after the change. The reconciler
does the rest; also for tasks whose submit was under way meanwhile.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from aws_lambda_powertools import Logger

from farcall_common.errors import RightWithdrawn, Unavailable
from farcall_common.store.model import Endpoint, Function, Task, Withdrawal
from farcall_common.store.rights import may_use
from farcall_lambdas.identity import Identity
from farcall_lambdas.logs import SERVICE
from farcall_lambdas.services.base import Context, Service
from farcall_lambdas.services.cancel import CancelService

logger = Logger(service=SERVICE, child=True)

#: How long a request cancels tasks, in seconds.
_REQUEST_S: Final = 10.0

#: The longest time between the checks of a submit and its commit, with a margin.
_SUBMIT_S: Final = 60.0

#: Of tasks with a thousand callees each, so many take 60 MB.
_PAGE: Final = 200


class WithdrawalService(Service):
    """Cancels open tasks without rights."""

    def __init__(self, context: Context, cancel: CancelService) -> None:
        super().__init__(context)
        self._cancel = cancel

    def begin(
        self,
        identity: Identity,
        shared: Endpoint | Function,
        *,
        cancels_tasks: bool = True,
        ends_sessions: bool = False,
    ) -> Withdrawal:
        """Record that the caller withdraws a right to an object, before the change: a crash after it leaves nothing
        undone. The tasks of its owner keep it."""
        object_id = shared.endpoint_id if isinstance(shared, Endpoint) else shared.function_id
        owner_ids = identity.identity_set if identity.owns(shared.owner_id) else {shared.owner_id}
        withdrawal = Withdrawal(
            object_id,
            identity.identity_id,
            sorted(owner_ids),
            self._now(),
            cancels_tasks=cancels_tasks,
            ends_sessions=ends_sessions,
        )
        self._stores.endpoints.put_withdrawal(withdrawal)
        return withdrawal

    def carry_out(self, withdrawal: Withdrawal) -> None:
        """Do as much as a request has time for, after the change. The reconciler does the rest."""
        until = self._clock() + _REQUEST_S
        try:
            for _ in self._carry_out(withdrawal):
                if self._clock() >= until:
                    break
        except Unavailable:
            logger.warning("queue unavailable; the reconciler will cancel tasks", object_id=withdrawal.object_id)

    def continue_all(self, *, until: float) -> int:
        """Do the rest of all withdrawals, until ``until`` (epoch seconds). Returns how many tasks were cancelled.

        Those who withdraw rights take turns, a page of tasks each: many tasks of one do not delay the others. Another
        one begins in each round, in case a round has time for a few pages only.
        """
        by_identity: dict[str, deque[tuple[Withdrawal, Iterator[int]]]] = defaultdict(deque)
        for withdrawal in self._stores.endpoints.list_withdrawals():
            by_identity[withdrawal.identity_id].append((withdrawal, self._carry_out(withdrawal)))
        turns = deque(by_identity.values())
        turns.rotate(-int(self._clock() // self._settings.reconcile_period_s))
        cancelled = 0
        while turns:
            own = turns.popleft()
            withdrawal, pages = own[0]
            count = next(pages, None)
            cancelled += count or 0
            if count is None:
                own.popleft()
                if self._clock() - withdrawal.at.timestamp() > _SUBMIT_S:
                    self._stores.endpoints.delete_withdrawal(withdrawal)
            if own:
                turns.append(own)
            if self._clock() >= until:
                break
        return cancelled

    def _carry_out(self, withdrawal: Withdrawal) -> Iterator[int]:
        """End the sessions and cancel open tasks without rights, a page at a time. Yields how many tasks were
        cancelled."""
        if withdrawal.ends_sessions:
            self._stores.queue.evict(withdrawal.object_id)
            self._stores.endpoints.note_ended_sessions(withdrawal)
        if not withdrawal.cancels_tasks:
            return
        object_id = withdrawal.object_id
        endpoint = self._stores.endpoints.get_endpoint(object_id)
        function = None
        if endpoint is None:
            function = self._stores.functions.get_functions([object_id], with_bodies=False).get(object_id)
        shared = endpoint or function
        may_use = functools.cache(functools.partial(self._may_use, object_id, shared.owner_id if shared else ""))
        check: Callable[[Task], str | None]
        if endpoint is not None:
            find = functools.partial(self._stores.tasks.find_open_tasks, endpoint_id=object_id, with_options=True)
            check = functools.partial(_refused_by_endpoint, endpoint, withdrawal.owner_ids, may_use)
        else:
            find = functools.partial(self._stores.tasks.find_open_tasks, function_id=object_id)
            check = functools.partial(_refused_by_function, object_id, function, withdrawal.owner_ids, may_use)
        after = ""
        while page := find(after=after, limit=_PAGE):
            cancelled, refused = 0, defaultdict(list)
            for task in page:
                if reason := check(task):
                    refused[task.endpoint_id, reason].append(task)
            for (endpoint_id, reason), tasks in refused.items():
                outcome = self._cancel.cancel_of_others(
                    withdrawal.identity_id, endpoint_id, tasks, RightWithdrawn(reason).record
                )
                cancelled += sum(each.outcome == "cancelled" for each in outcome.values())
            yield cancelled
            if len(page) < _PAGE:
                break
            after = page[-1].task_id

    def _may_use(self, object_id: str, owner_id: str, identity_id: str) -> bool:
        return may_use(self._stores, object_id, owner_id, identity_id, now=self._clock())


def _refused_by_endpoint(
    endpoint: Endpoint, owner_ids: Sequence[str], may_use: Callable[[str], bool], task: Task
) -> str | None:
    """Why a task may not run on its endpoint any more; None if it may."""
    is_owners = task.owner_id == endpoint.owner_id or task.owner_id in owner_ids
    if not (endpoint.public or is_owners or may_use(task.owner_id)):
        return f"The right to use endpoint {endpoint.endpoint_id} was withdrawn while the task was open."
    allowed = endpoint.allowed_functions
    if allowed is None:
        return None
    functions = [(task.function_id, task.function_version)]
    functions += [(each.function_id, each.version) for each in task.options.callees]
    for function_id, number in functions:
        version = f"{function_id}@{number}"
        if function_id not in allowed and version not in allowed:
            what = f"function {version} on endpoint {endpoint.endpoint_id}"
            return f"The right to run {what} was withdrawn while the task was open."
    return None


def _refused_by_function(
    function_id: str,
    function: Function | None,
    owner_ids: Sequence[str],
    may_use: Callable[[str], bool],
    task: Task,
) -> str | None:
    """Why a task may not run the function any more, which is its own or one that it calls; None if it may. Tasks of the
    function's owner may."""
    if task.owner_id in owner_ids:
        return None
    if function is not None and (function.public or task.owner_id == function.owner_id or may_use(task.owner_id)):
        return None
    return f"The right to run function {function_id} was withdrawn while the task was open."


def narrows(endpoint: Endpoint, changes: dict[str, object]) -> bool:
    """Whether a change takes rights to an endpoint away."""
    if endpoint.public and changes.get("public") is False:
        return True
    allowed = changes.get("allowed_functions", endpoint.allowed_functions)
    if not isinstance(allowed, Sequence):
        return False
    return endpoint.allowed_functions is None or not set(endpoint.allowed_functions) <= set(allowed)
