"""Base of the services: stores, settings and clock, the audit entries of changes, and lists that fit an answer."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from farcall_common.nested_json import sent_bytes
from farcall_common.store import Stores
from farcall_common.store.model import AuditEntry, Endpoint
from farcall_lambdas.identity import Identity
from farcall_lambdas.services.access import Access
from farcall_lambdas.services.limits import Storage
from farcall_lambdas.settings import ApiSettings

#: The detail of an audit entry that has the caller's address.
SOURCE_IP: Final = "source_ip"

#: Bytes of an entry of a list without its texts.
_ENTRY_BYTES: Final = 500

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Context:
    """What services share. ``clock`` gives epoch seconds."""

    stores: Stores
    settings: ApiSettings
    access: Access
    storage: Storage
    clock: Callable[[], float]


def token_detail(identity: Identity) -> dict[str, object]:
    """The detail of an audit entry that names the caller's token."""
    return {"token_id": identity.token_id, "token": identity.grant.name} if identity.grant else {}


def submitters_of(identity: Identity, endpoint: Endpoint) -> frozenset[str]:
    """The caller as reports of an endpoint name its submitters: its owner has an empty name, too."""
    return frozenset(identity.identity_set) | ({""} if identity.owns(endpoint.owner_id) else frozenset())


class Service:
    """A service over a context. Subclasses take the services that they call, too."""

    def __init__(self, context: Context) -> None:
        self._stores = context.stores
        self._settings = context.settings
        self._access = context.access
        self._storage = context.storage
        self._clock = context.clock

    def now(self) -> dt.datetime:
        return self._now()

    def _now(self) -> dt.datetime:
        return dt.datetime.fromtimestamp(self._clock(), dt.UTC)

    def _entry(
        self, identity: Identity, action: str, object_id: str, *, owner_id: str = "", **detail: object
    ) -> AuditEntry:
        """The audit entry of a change by the caller now. ``owner_id`` is the owner of the object, by default the
        caller."""
        detail |= token_detail(identity)
        if identity.source_ip:
            detail[SOURCE_IP] = identity.source_ip
        return AuditEntry(
            self._now(), identity.identity_id, action, object_id, owner_id or identity.identity_id, detail
        )

    def _fitting(self, items: Sequence[T], *, shown: Callable[[T], object]) -> Sequence[T]:
        """Return the first items that together fit one answer, at least one if there are any. ``shown`` returns those
        texts of an item that the answer has."""
        room = self._settings.max_response_bytes
        for count, item in enumerate(items):
            room -= _ENTRY_BYTES + sent_bytes(shown(item))
            if room < 0 and count:
                return items[:count]
        return items
