"""Actions of Globus Flows in PostgreSQL."""

# ruff: noqa: S608 - statements are put together from the constants in this file, never from values

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from farcall_common.store.audit_postgres import PostgresPort
from farcall_common.store.model import Action

_NAMES: Final = tuple(field.name for field in dataclasses.fields(Action))
#: Columns by name: a later release may have added some.
_COLUMNS: Final = ", ".join(_NAMES)


class PostgresActions(PostgresPort):
    """:class:`~farcall_common.store.ports.Actions` on psycopg 3."""

    def add_action(self, action: Action) -> Action:
        # An update that changes nothing: the row is returned, also if it was there before.
        [row] = self._database.rows(
            f"""
            INSERT INTO flow_action ({_COLUMNS}) VALUES ({", ".join(f"%({name})s" for name in _NAMES)})
            ON CONFLICT (owner_id, request_id) DO UPDATE SET request_id = excluded.request_id
            RETURNING {_COLUMNS}
            """,
            {**vars(action), "monitor_by": list(action.monitor_by), "manage_by": list(action.manage_by)},
        )
        return msgspec.convert(row, Action)

    def get_action(self, action_id: str) -> Action | None:
        rows = self._database.rows(f"SELECT {_COLUMNS} FROM flow_action WHERE action_id = %(id)s", {"id": action_id})
        return msgspec.convert(rows[0], Action) if rows else None

    def list_actions(self, owner_ids: Collection[str], *, limit: int = 100) -> Sequence[Action]:
        query = f"""
            SELECT {_COLUMNS} FROM flow_action WHERE owner_id = ANY(%(ids)s) ORDER BY action_id DESC LIMIT %(limit)s
        """
        rows = self._database.rows(query, {"ids": sorted(owner_ids), "limit": limit})
        return [msgspec.convert(row, Action) for row in rows]

    def delete_action(self, action_id: str) -> bool:
        return self._database.run("DELETE FROM flow_action WHERE action_id = %(id)s", {"id": action_id}) > 0

    def find_overdue(self, *, at: dt.datetime, limit: int = 100) -> Sequence[Action]:
        query = f"SELECT {_COLUMNS} FROM flow_action WHERE deadline <= %(at)s ORDER BY deadline LIMIT %(limit)s"
        return [msgspec.convert(row, Action) for row in self._database.rows(query, {"at": at, "limit": limit})]

    def forget_deadline(self, action_id: str) -> None:
        self._database.run("UPDATE flow_action SET deadline = NULL WHERE action_id = %(id)s", {"id": action_id})

    def purge_actions(self, *, created_before: dt.datetime, limit: int) -> int:
        return self._database.run(
            """
            DELETE FROM flow_action WHERE action_id IN (
                SELECT action_id FROM flow_action WHERE created_at < %(before)s ORDER BY created_at LIMIT %(limit)s
            )
            """,
            {"before": created_before, "limit": limit},
        )
