"""Allowances of people on endpoints: what they may submit, and their limits in the queue. An owner has none.

A person and the service accounts of that person have one allowance together, the most generous one that any of them
has. At endpoints of that person each account has its own.
"""

from __future__ import annotations

import calendar
import contextlib
import datetime as dt
from collections.abc import Iterator, Sequence, Set
from typing import Final

import msgspec

from farcall_common.errors import AllowanceExceeded, QueueFull, Unavailable
from farcall_common.fairness import PAYS_FOR, identity_of
from farcall_common.store.allowance import Allowance, most_generous
from farcall_common.store.model import Endpoint, RunningLimit
from farcall_common.task_options import TaskOptions
from farcall_lambdas.identity import Identity
from farcall_lambdas.recent import Recent
from farcall_lambdas.services.base import Context, Service
from farcall_lambdas.services.limits import QUEUE_RETRY_S

#: How long used hours, and limits that were set, are remembered, in seconds.
_GOOD_S: Final = 60.0


class AllowanceService(Service):
    """Enforces the allowances of shares: of several that let a person use an endpoint, the most generous limits. A
    public endpoint has none."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        #: Core-hours and GPU-hours of this month, by endpoint and caller.
        self._used: Recent[tuple[str, str], tuple[float, float]] = Recent(context.clock, good_s=_GOOD_S)
        #: Limits that are recorded, likewise.
        self._limits: Recent[tuple[str, str], RunningLimit] = Recent(context.clock, good_s=_GOOD_S)
        #: Identities that have one allowance with an identity.
        self._groups: Recent[str, Sequence[str]] = Recent(context.clock, good_s=_GOOD_S)

    def of(self, identity: Identity, endpoint: Endpoint) -> Allowance:
        """The allowance of a caller."""
        if identity.owns(endpoint.owner_id) or endpoint.public:
            return Allowance()
        principals = self._access.principals_of(identity)
        if not _is_apart(identity, endpoint):
            principals |= self._principals_with(identity.identity_id)
        return most_generous(self._find(endpoint.endpoint_id, principals))

    def renew(self, endpoint_id: str, grantee: str) -> None:
        """Bring the limits in the queue up to date, after a share with ``grantee`` has changed. Others than those that
        are recorded get theirs with their next submit."""
        identities = set(self._stores.endpoints.find_running_limits([endpoint_id])[endpoint_id])
        kind, _, grantee_id = grantee.partition(" ")
        endpoint = self._stores.endpoints.get_endpoint(endpoint_id)
        owners = self._group(endpoint.owner_id) if endpoint else ()
        if kind == "identity":
            identities.add(grantee_id if grantee_id in owners else self._group(grantee_id)[0])
        for identity_id in sorted(identities):
            principals = self._access.recorded_principals(identity_id)
            if identity_id not in owners:
                principals |= self._principals_with(identity_id)
            # Limits of a person without shares stay: open tasks are being cancelled, or the groups are not recorded.
            if found := self._find(endpoint_id, principals):
                self.set(endpoint_id, identity_id, most_generous(found))

    def _group(self, identity_id: str) -> Sequence[str]:
        return self._groups.get_or_read(identity_id, self._stores.tokens.quota_group)

    def _principals_with(self, identity_id: str) -> Set[str]:
        """The recorded principals of the other identities that have one allowance with this one."""
        others = [each for each in self._group(identity_id) if each != identity_id]
        return frozenset[str]().union(*map(self._access.recorded_principals, others))

    def _find(self, endpoint_id: str, principals: Set[str]) -> Sequence[Allowance]:
        return [Allowance.stored(each) for each in self._stores.shares.find_allowances(endpoint_id, principals)]

    def limited(self, allowance: Allowance, options: TaskOptions) -> TaskOptions:
        """The options of tasks, with the walltime of the allowance if they have none, and its limit of calls.

        :raises AllowanceExceeded: for a longer one.
        """
        if options.max_calls != allowance.max_running:
            options = msgspec.structs.replace(options, max_calls=allowance.max_running)
        most = allowance.max_walltime_s
        if most is None or (options.walltime_s is not None and options.walltime_s <= most):
            return options
        if options.walltime_s is None:
            return options.changed(walltime_s=most)
        raise AllowanceExceeded(
            f"Tasks with a walltime of {options.walltime_s:g} s; your allowance on this endpoint is {most:g} s.",
            hint="Submit with a shorter walltime_s, or ask the endpoint's owner for more.",
        )

    @contextlib.contextmanager
    def room_for(self, identity: Identity, endpoint: Endpoint, allowance: Allowance, count: int) -> Iterator[None]:
        """Room for ``count`` more tasks of the caller, which are queued meanwhile.

        :raises AllowanceExceeded: if the hours of this month are used up, or for more tasks than may ever wait.
        :raises QueueFull: if too many of the caller's tasks wait now.
        """
        most = allowance.max_waiting
        if count:
            self._check_hours(identity, endpoint, allowance)
        if not count or most is None:
            yield
            return
        if count > most:
            raise AllowanceExceeded(
                f"{count} tasks in one request; your allowance on this endpoint is {most} waiting tasks.",
                hint="Submit fewer tasks at once.",
            )
        queue, of = self._stores.queue, (endpoint.endpoint_id, identity.quota_key(endpoint.owner_id))
        waiting = None
        with contextlib.suppress(Unavailable):  # tasks that are accepted now are queued when the queue is back
            waiting = queue.reserve(*of, count, most=most)
        if waiting is not None:
            raise QueueFull(
                f"{waiting} of your tasks wait for endpoint {endpoint.endpoint_id}; {count} more exceed your allowance "
                f"of {most}.",
                retry_after_s=QUEUE_RETRY_S,
            )
        try:
            yield
        finally:
            with contextlib.suppress(Unavailable):
                queue.free(*of, count)

    def limit_queue(self, identity: Identity, endpoint: Endpoint, allowance: Allowance) -> None:
        """Bring the caller's limit in the queue up to date, before tasks are queued."""
        if identity.owns(endpoint.owner_id):
            return
        limited_id = identity_of(identity.quota_key(endpoint.owner_id))
        key, limit = (endpoint.endpoint_id, limited_id), allowance.running_limit
        if self._limits.get(key) == limit:
            return
        recorded = self._stores.endpoints.find_running_limits([endpoint.endpoint_id])[endpoint.endpoint_id]
        if recorded.get(limited_id, RunningLimit()) != limit:
            self.set(endpoint.endpoint_id, limited_id, allowance)
        self._limits.set(key, limit)

    def set(self, endpoint_id: str, identity_id: str, allowance: Allowance) -> None:
        """Record a person's limit and set it in the queue: to call when an allowance changes. The reconciler sets it
        again if the queue cannot be reached, or has lost it."""
        limit = allowance.running_limit
        self._stores.endpoints.put_running_limit(endpoint_id, identity_id, limit)
        with contextlib.suppress(Unavailable):
            self._stores.queue.set_limits({endpoint_id: {identity_id: limit}}, complete=False)

    def _check_hours(self, identity: Identity, endpoint: Endpoint, allowance: Allowance) -> None:
        core_hours, gpu_hours = allowance.core_hours_per_month, allowance.gpu_hours_per_month
        if core_hours is None and gpu_hours is None:
            return
        used = self._used_hours(identity, endpoint)
        for has_used, most, unit in zip(used, (core_hours, gpu_hours), ("core-hours", "GPU-hours"), strict=True):
            if most is not None and has_used >= most:
                raise AllowanceExceeded(
                    f"You have used {has_used:.1f} {unit} on this endpoint this month; your allowance is {most:g}. "
                    f"It is renewed on {_month_of(self._now())[1]} (UTC).",
                    hint="Wait until then, or ask the endpoint's owner for more.",
                )

    def _used_hours(self, identity: Identity, endpoint: Endpoint) -> tuple[float, float]:
        def read(_: tuple[str, str]) -> tuple[float, float]:
            since, until = _month_of(self._now())
            owner_ids = identity.identity_set
            if not _is_apart(identity, endpoint):
                owner_ids = owner_ids | set(self._group(identity.identity_id))
            found = self._stores.usage.read_usage(
                (), since=since, until=until, owner_ids=owner_ids, endpoint_id=endpoint.endpoint_id
            )
            return (found[0].core_s / 3600, found[0].gpu_s / 3600) if found else (0.0, 0.0)

        return self._used.get_or_read((endpoint.endpoint_id, identity.identity_id), read)


def _is_apart(identity: Identity, endpoint: Endpoint) -> bool:
    """Whether the caller has an allowance apart from the other accounts of its creator, and from that."""
    return PAYS_FOR in identity.quota_key(endpoint.owner_id)


def _month_of(now: dt.datetime) -> tuple[dt.date, dt.date]:
    """The first days of a month and of the next one."""
    first = now.date().replace(day=1)
    return first, first + dt.timedelta(days=calendar.monthrange(first.year, first.month)[1])
