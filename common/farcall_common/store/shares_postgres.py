"""Shares in PostgreSQL: rights to objects of others, teams, and the principals of people."""

# ruff: noqa: S608 - statements are put together from the constants in this file, never from values

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from farcall_common.errors import NotFound
from farcall_common.store.audit_postgres import PostgresPort
from farcall_common.store.model import ObjectKind, Right, Share, SharedObject, Team, TeamMember
from farcall_common.store.postgres import to_json

_SHARE: Final = 'share_id, kind, object_id, grantee, rank AS "right", granted_by, granted_at, ends_at, note, allowance'
_OPEN: Final = "(ends_at IS NULL OR ends_at > now())"

#: The grantees that a person is: the principals, and the teams with one of them.
_GRANTEES: Final = """
    SELECT unnest(%(principals)s::text[])
    UNION ALL SELECT 'team ' || team_id FROM team_member WHERE member = ANY(%(principals)s)
"""

_PUT_SHARE: Final = f"""
    INSERT INTO share (share_id, kind, object_id, grantee, rank, granted_by, granted_at, ends_at, note, allowance)
    VALUES (%(share_id)s, %(kind)s, %(object_id)s, %(grantee)s, %(right)s, %(granted_by)s, %(granted_at)s,
            %(ends_at)s, %(note)s, %(allowance)s)
    ON CONFLICT (object_id, grantee) DO UPDATE SET
        rank = excluded.rank, granted_by = excluded.granted_by, granted_at = excluded.granted_at,
        ends_at = excluded.ends_at, note = excluded.note, allowance = excluded.allowance
    RETURNING {_SHARE}
"""

_FIND_OBJECTS: Final = f"""
    SELECT {_SHARE}, coalesce(endpoint.name, function.name) AS name,
           coalesce(endpoint.owner_id, function.owner_id) AS owner_id
    FROM share
    LEFT JOIN endpoint ON kind = 'endpoint' AND endpoint.endpoint_id = object_id
    LEFT JOIN function ON kind = 'function' AND function.function_id = object_id
    WHERE grantee IN ({_GRANTEES}) AND {_OPEN}
        AND (endpoint.endpoint_id IS NOT NULL OR function.function_id IS NOT NULL)
    ORDER BY granted_at DESC, share_id LIMIT %(limit)s
"""

_PUT_PERSON: Final = """
    WITH former AS (SELECT principals FROM person WHERE identity_id = %(identity_id)s FOR UPDATE),
    written AS (
        INSERT INTO person (identity_id, principals) VALUES (%(identity_id)s, %(principals)s)
        ON CONFLICT (identity_id) DO UPDATE SET principals = excluded.principals, seen_at = now()
    )
    SELECT unnest(principals) AS principal FROM former EXCEPT SELECT unnest(%(principals)s::text[])
"""


class PostgresShares(PostgresPort):
    """:class:`~farcall_common.store.ports.Shares` on psycopg 3."""

    def put_share(self, share: Share) -> Share:
        values = {
            **vars(share),
            "kind": share.kind.value,
            "right": int(share.right),
            "allowance": to_json(share.allowance),
        }
        return _share(self._database.rows(_PUT_SHARE, values)[0])

    def get_share(self, object_id: str, share_id: str) -> Share | None:
        query = f"SELECT {_SHARE} FROM share WHERE share_id = %(share_id)s AND object_id = %(object_id)s"
        rows = self._database.rows(query, {"share_id": share_id, "object_id": object_id})
        return _share(rows[0]) if rows else None

    def find_share(self, object_id: str, grantee: str) -> Share | None:
        query = f"SELECT {_SHARE} FROM share WHERE object_id = %(object_id)s AND grantee = %(grantee)s"
        rows = self._database.rows(query, {"object_id": object_id, "grantee": grantee})
        return _share(rows[0]) if rows else None

    def list_shares(self, object_id: str, *, limit: int = 1000) -> Sequence[Share]:
        query = f"""
            SELECT {_SHARE} FROM share WHERE object_id = %(object_id)s ORDER BY granted_at, share_id LIMIT %(limit)s
        """
        return [_share(row) for row in self._database.rows(query, {"object_id": object_id, "limit": limit})]

    def delete_share(self, object_id: str, share_id: str, *, if_ended: bool = False) -> bool:
        query = """
            DELETE FROM share WHERE share_id = %(share_id)s AND object_id = %(object_id)s
                AND (NOT %(if_ended)s OR ends_at <= now())
        """
        return self._database.run(query, {"share_id": share_id, "object_id": object_id, "if_ended": if_ended}) > 0

    def list_ended_shares(self, *, limit: int = 100) -> Sequence[Share]:
        query = f"SELECT {_SHARE} FROM share WHERE ends_at <= now() ORDER BY ends_at, share_id LIMIT %(limit)s"
        return [_share(row) for row in self._database.rows(query, {"limit": limit})]

    def find_rights(self, object_ids: Collection[str], principals: Collection[str]) -> Mapping[str, Right]:
        rows = self._database.rows(
            f"""
            SELECT object_id, max(rank) AS rank FROM share
            WHERE object_id = ANY(%(object_ids)s) AND grantee IN ({_GRANTEES}) AND {_OPEN} GROUP BY object_id
            """,
            {"object_ids": sorted(object_ids), "principals": sorted(principals)},
            by_keys=True,
        )
        return {row["object_id"]: Right(row["rank"]) for row in rows}

    def find_allowances(self, object_id: str, principals: Collection[str]) -> Sequence[Mapping[str, Any]]:
        rows = self._database.rows(
            f"""
            SELECT allowance FROM share
            WHERE object_id = %(object_id)s AND grantee IN ({_GRANTEES}) AND {_OPEN} AND rank >= {int(Right.USE)}
            """,
            {"object_id": object_id, "principals": sorted(principals)},
            by_keys=True,
        )
        return [row["allowance"] for row in rows]

    def get_principals(self, identity_id: str, *, groups_since: dt.datetime) -> frozenset[str]:
        query = """
            SELECT principal FROM person, unnest(principals) AS principal
            WHERE identity_id = %(identity_id)s AND (seen_at >= %(groups_since)s OR principal NOT LIKE 'group %%')
        """
        parameters = {"identity_id": identity_id, "groups_since": groups_since}
        rows = self._database.rows(query, parameters, by_keys=True)
        return frozenset({f"identity {identity_id}", *(row["principal"] for row in rows)})

    def find_objects(self, principals: Collection[str], *, limit: int = 1000) -> Sequence[SharedObject]:
        rows = self._database.rows(_FIND_OBJECTS, {"principals": sorted(principals), "limit": limit})
        return [SharedObject(_share(row), name=row.pop("name"), owner_id=row.pop("owner_id")) for row in rows]

    def list_shares_with(self, grantees: Collection[str]) -> Sequence[Share]:
        query = f"SELECT {_SHARE} FROM share WHERE grantee IN ({_GRANTEES}) ORDER BY object_id, share_id"
        return [_share(row) for row in self._database.rows(query, {"principals": sorted(grantees)})]

    def put_person(self, identity_id: str, principals: Collection[str]) -> frozenset[str]:
        rows = self._database.rows(_PUT_PERSON, {"identity_id": identity_id, "principals": sorted(principals)})
        return frozenset(row["principal"] for row in rows)

    # teams

    def add_team(self, team: Team) -> None:
        self._database.run(
            """
            INSERT INTO team (team_id, owner_id, name, created_at)
            VALUES (%(team_id)s, %(owner_id)s, %(name)s, %(created_at)s)
            """,
            vars(team),
        )

    def get_team(self, team_id: str) -> Team | None:
        query = "SELECT team_id, owner_id, name, created_at FROM team WHERE team_id = %(team_id)s"
        rows = self._database.rows(query, {"team_id": team_id})
        return Team(**rows[0]) if rows else None

    def list_teams(self, owner_id: str, principals: Collection[str], *, limit: int = 1000) -> Sequence[Team]:
        query = """
            SELECT team_id, owner_id, name, created_at FROM team WHERE owner_id = %(owner_id)s
                OR team_id IN (SELECT team_id FROM team_member WHERE member = ANY(%(principals)s))
            ORDER BY owner_id <> %(owner_id)s, name, team_id LIMIT %(limit)s
        """
        values = {"owner_id": owner_id, "principals": sorted(principals), "limit": limit}
        return [Team(**row) for row in self._database.rows(query, values)]

    def delete_team(self, team_id: str) -> bool:
        query = """
            WITH shares AS (DELETE FROM share WHERE grantee = 'team ' || %(team_id)s)
            DELETE FROM team WHERE team_id = %(team_id)s
        """
        return self._database.run(query, {"team_id": team_id}) > 0

    def put_member(self, member: TeamMember) -> None:
        with self._database.connection() as connection:
            found = connection.execute("SELECT FROM team WHERE team_id = %(team_id)s FOR SHARE", vars(member))
            if found.fetchone() is None:
                raise NotFound(f"There is no team {member.team_id}.")
            connection.execute(
                """
                INSERT INTO team_member (team_id, member, added_at) VALUES (%(team_id)s, %(member)s, %(added_at)s)
                ON CONFLICT DO NOTHING
                """,
                vars(member),
            )

    def list_members(self, team_id: str, *, limit: int = 1000) -> Sequence[TeamMember]:
        query = """
            SELECT team_id, member, added_at FROM team_member WHERE team_id = %(team_id)s
            ORDER BY member LIMIT %(limit)s
        """
        return [TeamMember(**row) for row in self._database.rows(query, {"team_id": team_id, "limit": limit})]

    def delete_member(self, team_id: str, member: str) -> bool:
        query = "DELETE FROM team_member WHERE team_id = %(team_id)s AND member = %(member)s"
        return self._database.run(query, {"team_id": team_id, "member": member}) > 0


def _share(row: Mapping[str, Any]) -> Share:
    return Share(
        row["share_id"],
        ObjectKind(row["kind"]),
        row["object_id"],
        row["grantee"],
        Right(row["right"]),
        row["granted_by"],
        row["granted_at"],
        row["ends_at"],
        row["note"],
        row["allowance"],
    )
