"""Functions and containers in PostgreSQL."""

# ruff: noqa: S608 - statements are put together from the constants in this file, never from values

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec
import psycopg

from farcall_common.errors import Conflict, FunctionUnknown
from farcall_common.store.audit_postgres import PostgresPort
from farcall_common.store.model import SIGNATURE, Container, Function, FunctionAlias, FunctionBody
from farcall_common.store.postgres import to_json

_FUNCTION: Final = """
    SELECT function_id, owner_id, name, body, body_hash, version, description, public, metadata, f.created_at
    FROM function f JOIN LATERAL (
        SELECT version, body, body_hash, metadata FROM function_version v
        WHERE v.function_id = f.function_id ORDER BY version DESC LIMIT 1
    ) newest ON true
"""
#: Without its body.
NEWEST_FUNCTION: Final = _FUNCTION.replace("name, body,", "name, ''::bytea AS body,")
_VERSION: Final = """
    SELECT f.function_id, f.owner_id, f.name, v.body, v.body_hash, v.version, f.description, f.public, v.metadata,
        v.created_at
    FROM function f JOIN function_version v USING (function_id)
"""
#: Without its body.
VERSION_WITHOUT_BODY: Final = _VERSION.replace("v.body,", "''::bytea AS body,")
_ALIAS: Final = "SELECT owner_id, name, function_id, version FROM function_alias WHERE owner_id = %(owner_id)s"

#: Columns by name: a later release may have added some.
_CONTAINER: Final = f"SELECT {', '.join(field.name for field in dataclasses.fields(Container))} FROM container"


class PostgresFunctions(PostgresPort):
    """:class:`~farcall_common.store.ports.Functions` on psycopg 3."""

    def add_function(self, function: Function) -> None:
        row = {**vars(function), "metadata": to_json(function.metadata)}
        with self._database.connection() as connection, connection.transaction():
            owned = connection.execute(
                """
                INSERT INTO function (function_id, owner_id, name, description, public, created_at)
                VALUES (%(function_id)s, %(owner_id)s, %(name)s, %(description)s, %(public)s,
                        coalesce(%(created_at)s, now()))
                ON CONFLICT (function_id) DO UPDATE
                    SET name = excluded.name, description = excluded.description, public = excluded.public
                    WHERE function.owner_id = excluded.owner_id
                """,
                row,
            )
            if owned.rowcount == 0:
                raise Conflict(f"function {function.function_id} belongs to someone else")
            connection.execute(
                """
                INSERT INTO function_version (function_id, version, body, body_hash, metadata, created_at)
                VALUES (%(function_id)s, %(version)s, %(body)s, %(body_hash)s, %(metadata)s,
                        coalesce(%(created_at)s, now()))
                """,
                row,
            )

    def get_functions(self, function_ids: Sequence[str], *, with_bodies: bool = True) -> Mapping[str, Function]:
        query = _FUNCTION if with_bodies else NEWEST_FUNCTION
        rows = self._database.rows(f"{query} WHERE function_id = ANY(%(ids)s)", {"ids": list(function_ids)})
        return {row["function_id"]: Function(**row) for row in rows}

    def update_function(self, function: Function) -> None:
        self._database.run(
            """
            UPDATE function SET name = %(name)s, description = %(description)s, public = %(public)s
            WHERE function_id = %(function_id)s
            """,
            {name: getattr(function, name) for name in ("function_id", "name", "description", "public")},
        )

    def get_version(self, function_id: str, version: int, *, with_body: bool = True) -> Function | None:
        query = _VERSION if with_body else VERSION_WITHOUT_BODY
        rows = self._database.rows(
            f"{query} WHERE f.function_id = %(id)s AND v.version = %(version)s",
            {"id": function_id, "version": version},
            by_keys=True,
        )
        return Function(**rows[0]) if rows else None

    def get_bodies(self, wanted: Collection[tuple[str, str]]) -> Mapping[str, Mapping[str, FunctionBody]]:
        rows = self._database.rows(
            """
            SELECT DISTINCT ON (function_id, body_hash) function_id, body_hash, name, body,
                coalesce(metadata ->> %(signature)s, '') AS signature
            FROM unnest(%(ids)s::text[], %(hashes)s::text[]) AS wanted (function_id, body_hash)
                JOIN function_version USING (function_id, body_hash) JOIN function USING (function_id)
            ORDER BY function_id, body_hash, version DESC
            """,
            {
                "ids": [function_id for function_id, _ in wanted],
                "hashes": [body_hash for _, body_hash in wanted],
                "signature": SIGNATURE,
            },
        )
        found: dict[str, dict[str, FunctionBody]] = {}
        for row in rows:
            body = FunctionBody(row["name"], row["body"], row["signature"])
            found.setdefault(row["function_id"], {})[row["body_hash"]] = body
        return found

    def list_versions(self, function_id: str, *, limit: int = 100) -> Sequence[Function]:
        rows = self._database.rows(
            f"{VERSION_WITHOUT_BODY} WHERE f.function_id = %(id)s ORDER BY v.version DESC LIMIT %(limit)s",
            {"id": function_id, "limit": limit},
        )
        return [Function(**row) for row in rows]

    def list_functions(self, owner_id: str, *, search: str = "", limit: int = 100) -> Sequence[Function]:
        rows = self._database.rows(
            f"""{NEWEST_FUNCTION}
            WHERE owner_id = %(owner_id)s
                AND strpos(lower(concat_ws(E'\\n', name, description)), lower(%(search)s)) > 0
            ORDER BY f.created_at DESC, function_id DESC LIMIT %(limit)s
            """,
            {"owner_id": owner_id, "search": search, "limit": limit},
        )
        return [Function(**row) for row in rows]

    def count_functions(self, owner_id: str, *, limit: int) -> int:
        return self._database.count("function JOIN function_version USING (function_id)", owner_id, limit)

    def delete_function(self, function_id: str) -> bool:
        query = """
            WITH shares AS (DELETE FROM share WHERE object_id = %(id)s)
            DELETE FROM function WHERE function_id = %(id)s
        """
        return self._database.run(query, {"id": function_id}) > 0

    def put_alias(self, alias: FunctionAlias) -> None:
        with self._database.connection() as connection:
            try:
                connection.execute(
                    """
                    INSERT INTO function_alias (owner_id, name, function_id, version)
                    VALUES (%(owner_id)s, %(name)s, %(function_id)s, %(version)s)
                    ON CONFLICT (owner_id, name)
                        DO UPDATE SET function_id = excluded.function_id, version = excluded.version
                    """,
                    vars(alias),
                )
            except psycopg.errors.ForeignKeyViolation as error:
                raise FunctionUnknown(f"there is no function {alias.function_id}") from error

    def get_alias(self, owner_id: str, name: str) -> FunctionAlias | None:
        rows = self._database.rows(f"{_ALIAS} AND name = %(name)s", {"owner_id": owner_id, "name": name})
        return FunctionAlias(**rows[0]) if rows else None

    def list_aliases(self, owner_id: str) -> Sequence[FunctionAlias]:
        rows = self._database.rows(f"{_ALIAS} ORDER BY name", {"owner_id": owner_id})
        return [FunctionAlias(**row) for row in rows]

    def delete_alias(self, owner_id: str, name: str) -> bool:
        query = "DELETE FROM function_alias WHERE owner_id = %(owner_id)s AND name = %(name)s"
        return self._database.run(query, {"owner_id": owner_id, "name": name}) > 0

    # containers

    def add_container(self, container: Container) -> None:
        self._database.run(
            """
            INSERT INTO container (container_id, owner_id, name, technology, image, description, created_at,
                                   requirements, preload)
            VALUES (%(container_id)s, %(owner_id)s, %(name)s, %(technology)s, %(image)s, %(description)s,
                    coalesce(%(created_at)s, now()), %(requirements)s, %(preload)s)
            """,
            {
                **vars(container),
                "requirements": list(container.requirements),
                "preload": None if container.preload is None else list(container.preload),
            },
        )

    def get_container(self, container_id: str) -> Container | None:
        return self._container("container_id = %(id)s", {"id": container_id})

    def find_container(self, owner_id: str, name: str) -> Container | None:
        return self._container("owner_id = %(owner_id)s AND name = %(name)s", {"owner_id": owner_id, "name": name})

    def list_containers(self, owner_id: str, *, limit: int = 100) -> Sequence[Container]:
        rows = self._database.rows(
            f"""
            {_CONTAINER} WHERE owner_id = %(owner_id)s
            ORDER BY created_at DESC, container_id DESC LIMIT %(limit)s
            """,
            {"owner_id": owner_id, "limit": limit},
        )
        return [msgspec.convert(row, Container) for row in rows]

    def count_containers(self, owner_id: str, *, limit: int) -> int:
        return self._database.count("container", owner_id, limit)

    def delete_container(self, container_id: str) -> bool:
        return self._database.run("DELETE FROM container WHERE container_id = %(id)s", {"id": container_id}) > 0

    def _container(self, condition: str, parameters: Mapping[str, Any]) -> Container | None:
        rows = self._database.rows(f"{_CONTAINER} WHERE {condition}", parameters)
        return msgspec.convert(rows[0], Container) if rows else None
