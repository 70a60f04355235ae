"""Fake audit log, in memory."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Collection, Sequence
from typing import Any, Self, cast

from farcall_common.store.model import FORBIDDEN, AuditEntry, Quota
from tests.support.stores.reach import Reach


class FakeAudit(Reach):
    """:class:`~farcall_common.store.ports.Audit` in memory; a part of FakeDatabase."""

    def __init__(self) -> None:
        super().__init__()
        self._audit: list[AuditEntry] = []

    def audited(self, *entries: AuditEntry, quota: Quota | None = None) -> Self:
        return cast(Self, _Audited(self, entries, quota))

    def _owned(self, quota: Quota) -> tuple[int, int]:
        """How many things of its kind the owner of a quota has, and their bytes."""
        raise NotImplementedError

    def add_entries(self, entries: Sequence[AuditEntry]) -> None:
        with self._call():
            first = self._audit[-1].audit_id + 1 if self._audit else 1
            self._audit += [dataclasses.replace(entry, audit_id=first + n) for n, entry in enumerate(entries)]

    def list_entries(
        self,
        identity_ids: Collection[str],
        *,
        since: dt.datetime | None = None,
        until: dt.datetime | None = None,
        after: tuple[dt.datetime, int] | None = None,
        limit: int = 100,
    ) -> Sequence[AuditEntry]:
        with self._call():
            found = [
                entry
                for entry in self._audit
                if (entry.owner_id in identity_ids or (entry.identity_id in identity_ids and entry.action != FORBIDDEN))
                and (since is None or entry.at >= since)
                and (until is None or entry.at < until)
                and (after is None or (entry.at, entry.audit_id) > after)
            ]
        return sorted(found, key=lambda entry: (entry.at, entry.audit_id))[:limit]

    def purge_entries(self, *, before: dt.datetime, limit: int) -> int:
        with self._call():
            old = [entry for entry in self._audit if entry.at < before][:limit]
            self._audit = [entry for entry in self._audit if entry not in old]
            return len(old)


class _Audited:
    """The records, whose calls append entries when they have succeeded."""

    def __init__(self, records: FakeAudit, entries: Sequence[AuditEntry], quota: Quota | None) -> None:
        self._records = records
        self._entries = entries
        self._quota = quota

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._records, name)

        def audited(*args: Any, **kwargs: Any) -> Any:
            with self._records._call():
                if self._quota:
                    self._quota.check(*self._records._owned(self._quota))
                answer = method(*args, **kwargs)
                self._records.add_entries(self._entries)
            return answer

        return audited
