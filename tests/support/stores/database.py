"""Fake database: all ports of the records in one object, in memory."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable

from farcall_common.store import Records
from farcall_common.store.model import Quota, Quotable
from tests.support.stores.tasks import FakeTasks


class FakeDatabase(FakeTasks):
    """:class:`~farcall_common.store.ports.Database`, and the ports of :attr:`records`, as long as the object lasts."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self._locks: dict[str, float] = {}
        #: What :meth:`size_bytes` returns.
        self.stored_bytes = 0

    @property
    def records(self) -> Records:
        return Records(self, self, self, self, self, self, self, self, self)

    def size_bytes(self) -> int:
        with self._call():
            return self.stored_bytes

    def try_lock(self, name: str, *, ttl_s: float) -> bool:
        with self._call():
            if self._locks.get(name, 0.0) > time.monotonic():
                return False
            self._locks[name] = time.monotonic() + ttl_s
            return True

    def unlock(self, name: str) -> None:
        with self._call():
            self._locks.pop(name, None)

    def count_functions(self, owner_id: str, *, limit: int) -> int:
        return self._of_group(super().count_functions, owner_id, limit=limit)

    def count_endpoints(self, owner_id: str, *, limit: int) -> int:
        return self._of_group(super().count_endpoints, owner_id, limit=limit)

    def count_containers(self, owner_id: str, *, limit: int) -> int:
        return self._of_group(super().count_containers, owner_id, limit=limit)

    def _of_group(self, count: Callable[..., int], owner_id: str, *, limit: int) -> int:
        return min(limit, sum(count(each, limit=limit) for each in self.quota_group(owner_id)))

    def _owned(self, quota: Quota) -> tuple[int, int]:
        group = self.quota_group(quota.owner_id)
        versions = [version for each in group for version in self._versions_of(each)]
        now = dt.datetime.fromtimestamp(self._clock(), dt.UTC)
        tokens = [each for each in self.list_tokens([quota.owner_id]) if not each.revoked_at and each.expires_at > now]
        counts = {
            Quotable.ACCOUNT: len(self.list_accounts([quota.owner_id])),
            Quotable.TOKEN: len(tokens),
            Quotable.ALIAS: sum(alias.name != quota.but for each in group for alias in self.list_aliases(each)),
            Quotable.CONTAINER: self.count_containers(quota.owner_id, limit=quota.limit),
            Quotable.ENDPOINT: self.count_endpoints(quota.owner_id, limit=quota.limit),
            Quotable.FUNCTION: len(versions),
            Quotable.MEMBER: sum(each.member != quota.but for each in self.list_members(quota.owner_id)),
            Quotable.SHARE: sum(each.grantee != quota.but for each in self.list_shares(quota.owner_id)),
            Quotable.TEAM: sum(len(self.list_teams(each, ())) for each in group),
        }
        return counts[quota.kind], sum(len(version.body) for version in versions)
