"""Rights of identities that send no request at the moment: those who have submitted open tasks, and own tokens."""

from __future__ import annotations

import datetime as dt
from typing import Final

from farcall_common.store.model import Endpoint, Right
from farcall_common.store.ports import Records

#: How long groups of a person who sends no requests are believed, in seconds.
GROUPS_KEPT_S: Final = 30 * 86_400.0


def recorded_principals(records: Records, identity_id: str, *, now: float) -> frozenset[str]:
    """The texts by which shares name an identity, as they were last recorded; groups only for a time.

    :param now: epoch seconds.
    """
    since = dt.datetime.fromtimestamp(now - GROUPS_KEPT_S, dt.UTC)
    return records.shares.get_principals(identity_id, groups_since=since)


def may_use(records: Records, object_id: str, owner_id: str, identity_id: str, *, now: float) -> bool:
    """Whether an identity has a right to an object of someone else: by a share, or because it is linked with its
    owner."""
    principals = recorded_principals(records, identity_id, now=now)
    if f"identity {owner_id}" in principals:
        return True
    return records.shares.find_rights([object_id], principals).get(object_id, 0) >= Right.USE


def may_use_endpoint(records: Records, endpoint: Endpoint, identity_id: str, *, now: float) -> bool:
    """Whether an identity may use an endpoint."""
    if endpoint.public or identity_id == endpoint.owner_id:
        return True
    return may_use(records, endpoint.endpoint_id, endpoint.owner_id, identity_id, now=now)
