"""Fake endpoints, in memory."""

from __future__ import annotations

import dataclasses
import datetime as dt
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from farcall_common.errors import Conflict, EndpointUnknown
from farcall_common.qos_report import QosReport
from farcall_common.store.model import Endpoint, EndpointKey, Presence, RunningLimit, SpoolMark, Withdrawal
from tests.support.stores.functions import FakeFunctions
from tests.support.stores.reach import moment


class FakeEndpoints(FakeFunctions):
    """:class:`~farcall_common.store.ports.Endpoints` in memory; a part of FakeDatabase."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__()
        self._clock = clock
        self._endpoints: dict[str, Endpoint] = {}
        self._spools: dict[str, SpoolMark] = {}
        self._keys: dict[str, tuple[str, dt.datetime]] = {}
        self._revoked: dict[str, dt.datetime] = {}
        self._withdrawals: dict[str, Withdrawal] = {}
        self._running_limits: dict[tuple[str, str], RunningLimit] = {}
        self._qos: dict[str, QosReport] = {}

    def put_endpoint(self, endpoint: Endpoint) -> None:
        with self._call():
            known = self._endpoints.get(endpoint.endpoint_id)
            kept = known or Endpoint(
                endpoint.endpoint_id,
                endpoint.owner_id,
                endpoint.name,
                created_at=endpoint.created_at or dt.datetime.now(dt.UTC),
            )
            self._endpoints[endpoint.endpoint_id] = dataclasses.replace(
                endpoint,
                owner_id=kept.owner_id,
                created_at=kept.created_at,
                seen_at=kept.seen_at,
                online=kept.online,
                status=kept.status,
                credential_id=kept.credential_id,
            )

    def change_endpoint(self, endpoint_id: str, changes: Mapping[str, object]) -> None:
        with self._call():
            if endpoint := self._endpoints.get(endpoint_id):
                self._endpoints[endpoint_id] = dataclasses.replace(endpoint, **dict[str, Any](changes))

    def get_endpoint(self, endpoint_id: str) -> Endpoint | None:
        with self._call():
            found = self._endpoints.get(endpoint_id)
            return found and dataclasses.replace(found, silent_s=self._silent_s(found))

    def _silent_s(self, endpoint: Endpoint) -> float | None:
        return None if endpoint.seen_at is None else self._clock() - endpoint.seen_at.timestamp()

    def list_endpoints(
        self, owner_id: str, *, shared: Collection[str] | None = None, limit: int = 1000
    ) -> Sequence[Endpoint]:
        with self._call():
            found = [
                endpoint
                for endpoint in self._endpoints.values()
                if endpoint.owner_id == owner_id
                or (shared is not None and (endpoint.public or endpoint.endpoint_id in shared))
            ]
        newest = sorted(found, key=lambda e: (moment(e.created_at), e.endpoint_id), reverse=True)[:limit]
        return [
            Endpoint(
                e.endpoint_id,
                e.owner_id,
                e.name,
                display_name=e.display_name,
                created_at=e.created_at,
                online=e.online,
                silent_s=self._silent_s(e),
            )
            for e in newest
        ]

    def count_endpoints(self, owner_id: str, *, limit: int) -> int:
        return min(limit, len(self.list_endpoints(owner_id)))

    def delete_endpoint(self, endpoint_id: str) -> bool:
        with self._call():
            self._keys = {key: (id_, at) for key, (id_, at) in self._keys.items() if id_ != endpoint_id}
            self._revoked = {key: at for key, at in self._revoked.items() if key in self._keys}
            self._spools.pop(endpoint_id, None)
            self._qos.pop(endpoint_id, None)
            self._running_limits = {key: each for key, each in self._running_limits.items() if key[0] != endpoint_id}
            return self._endpoints.pop(endpoint_id, None) is not None

    def set_presence(self, presences: Sequence[Presence]) -> None:
        seen_at = dt.datetime.fromtimestamp(self._clock(), dt.UTC)
        with self._call():
            for each in presences:
                if endpoint := self._endpoints.get(each.endpoint_id):
                    self._endpoints[each.endpoint_id] = dataclasses.replace(
                        endpoint, online=each.online, status=each.status, seen_at=seen_at
                    )
                    if each.qos is not None:
                        self._qos[each.endpoint_id] = each.qos

    def get_qos_report(self, endpoint_id: str) -> QosReport | None:
        with self._call():
            return self._qos.get(endpoint_id)

    def add_endpoint_key(self, endpoint_id: str, public_key: str, *, at: dt.datetime, most: int = 2) -> Sequence[str]:
        with self._call():
            if endpoint_id not in self._endpoints:
                raise EndpointUnknown(f"there is no endpoint {endpoint_id}")
            if self._keys.get(public_key, (endpoint_id,))[0] != endpoint_id or public_key in self._revoked:
                raise Conflict("the key belongs to another endpoint, or was revoked")
            self._keys.setdefault(public_key, (endpoint_id, at))
            others = [each.public_key for each in self.list_endpoint_keys(endpoint_id) if each.public_key != public_key]
            deleted = others[: max(0, len(others) + 1 - most)]
            for key in deleted:
                del self._keys[key]
            return deleted

    def list_endpoint_keys(self, endpoint_id: str) -> Sequence[EndpointKey]:
        with self._call():
            found = [EndpointKey(key, at) for key, (id_, at) in self._keys.items() if id_ == endpoint_id]
            usable = [each for each in found if each.public_key not in self._revoked]
            return sorted(usable, key=lambda each: (each.added_at, each.public_key))

    def revoke_endpoint_key(self, endpoint_id: str, public_key: str, *, at: dt.datetime) -> bool:
        with self._call():
            if self.find_endpoints_by_key([public_key]).get(public_key) != endpoint_id:
                return False
            self._revoked[public_key] = at
            of_endpoint = [key for key in self._revoked if self._keys[key][0] == endpoint_id]
            for key in of_endpoint[:-100]:
                del self._revoked[key], self._keys[key]
            return True

    def find_endpoints_by_key(self, public_keys: Sequence[str]) -> Mapping[str, str]:
        with self._call():
            usable = (key for key in public_keys if key in self._keys and key not in self._revoked)
            return {key: self._keys[key][0] for key in usable}

    # spools

    def find_spools(self, endpoint_ids: Sequence[str]) -> Mapping[str, SpoolMark]:
        with self._call():
            return {id_: self._spools.get(id_, SpoolMark("", 0)) for id_ in endpoint_ids if id_ in self._endpoints}

    def claim_spools(self, marks: Mapping[str, SpoolMark]) -> None:
        self._mark_spools(marks, is_claim=True)

    def raise_spools(self, marks: Mapping[str, SpoolMark]) -> None:
        self._mark_spools(marks, is_claim=False)

    def _mark_spools(self, marks: Mapping[str, SpoolMark], *, is_claim: bool) -> None:
        for endpoint_id, known in self.find_spools(list(marks)).items():
            mark = marks[endpoint_id]
            if known.generation < mark.generation if known.spool_id == mark.spool_id else is_claim:
                self._spools[endpoint_id] = mark

    # withdrawn rights

    def find_restricted(self, endpoint_ids: Sequence[str]) -> frozenset[str]:
        with self._call():
            found = (self._endpoints[id_] for id_ in endpoint_ids if id_ in self._endpoints)
            return frozenset(each.endpoint_id for each in found if each.allowed_functions is not None)

    def put_withdrawal(self, withdrawal: Withdrawal) -> None:
        with self._call():
            former = self._withdrawals.get(withdrawal.object_id)
            cancels = withdrawal.cancels_tasks or (former is not None and former.cancels_tasks)
            ends = withdrawal.ends_sessions or (former is not None and former.ends_sessions)
            self._withdrawals[withdrawal.object_id] = dataclasses.replace(
                withdrawal, owner_ids=list(withdrawal.owner_ids), cancels_tasks=cancels, ends_sessions=ends
            )

    def list_withdrawals(self, *, limit: int = 100) -> Sequence[Withdrawal]:
        with self._call():
            found = sorted(self._withdrawals.values(), key=lambda each: (each.at, each.object_id))
            places: dict[str, Iterator[int]] = defaultdict(itertools.count)
            return sorted(found, key=lambda each: next(places[each.identity_id]))[:limit]

    def note_ended_sessions(self, withdrawal: Withdrawal) -> None:
        with self._call():
            known = self._withdrawals.get(withdrawal.object_id)
            if known is not None and known.at == withdrawal.at:
                self._withdrawals[withdrawal.object_id] = dataclasses.replace(known, ends_sessions=False)

    def delete_withdrawal(self, withdrawal: Withdrawal) -> None:
        with self._call():
            known = self._withdrawals.get(withdrawal.object_id)
            if known is not None and known.at == withdrawal.at:
                del self._withdrawals[withdrawal.object_id]

    def put_running_limit(self, endpoint_id: str, owner_id: str, limit: RunningLimit) -> None:
        with self._call():
            self._running_limits.pop((endpoint_id, owner_id), None)
            if limit != RunningLimit() and endpoint_id in self._endpoints:
                self._running_limits[endpoint_id, owner_id] = limit

    def find_running_limits(self, endpoint_ids: Sequence[str]) -> Mapping[str, Mapping[str, RunningLimit]]:
        with self._call():
            found: dict[str, dict[str, RunningLimit]] = {endpoint_id: {} for endpoint_id in endpoint_ids}
            for (endpoint_id, owner_id), limit in self._running_limits.items():
                if endpoint_id in found and endpoint_id in self._endpoints:
                    found[endpoint_id][owner_id] = limit
            return found
