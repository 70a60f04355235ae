"""Usage in PostgreSQL: sums by day, and the parts that were not added to them yet."""

# ruff: noqa: S608 - statements are put together from the constants in this file, never from values

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Sequence
from typing import Final

from farcall_common.store.audit_postgres import PostgresPort
from farcall_common.store.model import Usage, UsageBy

_KEYS: Final = "day, owner_id, function_id, endpoint_id, account"
_COUNTS: Final = ("tasks", "failed", "stages")
_SUMS: Final = (*_COUNTS, "wall_s", "core_s", "gpu_s")
_SUMMED: Final = ", ".join(f"sum({name}) AS {name}" for name in _SUMS)
_COLUMN_OF: Final = {UsageBy.IDENTITY: "owner_id", UsageBy.FUNCTION: "function_id", UsageBy.ENDPOINT: "endpoint_id"}

#: One statement, so that each part is added once, whatever fails. Rows are locked in the order of their keys.
_FOLD: Final = f"""
    WITH parts AS (
        DELETE FROM usage_part WHERE part_id IN (
            SELECT part_id FROM usage_part ORDER BY part_id LIMIT %(limit)s FOR UPDATE SKIP LOCKED
        ) RETURNING {_KEYS}, {", ".join(_SUMS)}
    ), added AS (
        INSERT INTO usage ({_KEYS}, {", ".join(_SUMS)})
        SELECT {_KEYS}, {_SUMMED} FROM parts GROUP BY {_KEYS} ORDER BY owner_id, day, endpoint_id, function_id, account
        ON CONFLICT (owner_id, day, endpoint_id, function_id, account) DO UPDATE SET
            {", ".join(f"{name} = usage.{name} + excluded.{name}" for name in _SUMS)}
    )
    SELECT count(*) FROM parts
"""

_WANTED: Final = """
    day >= %(since)s AND day < %(until)s
    AND (%(owners)s::text[] IS NULL OR owner_id = ANY(%(owners)s))
    AND (%(endpoint_id)s::text IS NULL OR endpoint_id = %(endpoint_id)s)
    AND (%(endpoint_owners)s::text[] IS NULL OR endpoint_id IN (
        SELECT endpoint.endpoint_id FROM endpoint WHERE endpoint.owner_id = ANY(%(endpoint_owners)s)
    ))
"""


class PostgresUsage(PostgresPort):
    """:class:`~farcall_common.store.ports.UsageSums` on psycopg 3."""

    def read_usage(
        self,
        by: Collection[UsageBy],
        *,
        since: dt.date,
        until: dt.date,
        owner_ids: Collection[str] | None = None,
        endpoint_id: str | None = None,
        endpoint_owner_ids: Collection[str] | None = None,
        after: int = 0,
        limit: int = 1000,
    ) -> Sequence[Usage]:
        names = [_COLUMN_OF.get(each, each.value) for each in UsageBy if each in by]
        columns = ", ".join((*names, *_SUMS))
        rows = self._database.rows(
            f"""
            SELECT {", ".join((*names, _SUMMED))} FROM (
                SELECT {columns} FROM usage WHERE {_WANTED}
                UNION ALL
                SELECT {columns} FROM usage_part WHERE {_WANTED}
            ) AS found
            {f"GROUP BY {', '.join(names)} ORDER BY {', '.join(names)}" if names else "HAVING count(*) > 0"}
            LIMIT %(limit)s OFFSET %(after)s
            """,
            {
                "since": since,
                "until": until,
                "owners": None if owner_ids is None else list(owner_ids),
                "endpoint_id": endpoint_id,
                "endpoint_owners": None if endpoint_owner_ids is None else list(endpoint_owner_ids),
                "after": after,
                "limit": limit,
            },
        )
        return [Usage(**{**row, **{name: int(row[name]) for name in _COUNTS}}) for row in rows]

    def fold_usage(self, *, limit: int) -> int:
        [row] = self._database.rows(_FOLD, {"limit": limit})
        return int(row["count"])

    def purge_usage(self, *, before: dt.date, limit: int) -> int:
        return self._database.run(
            """
            DELETE FROM usage WHERE ctid IN (
                SELECT ctid FROM usage WHERE day < %(before)s ORDER BY day LIMIT %(limit)s
            )
            """,
            {"before": before, "limit": limit},
        )
