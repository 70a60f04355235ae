"""Tokens and service accounts in PostgreSQL."""

# ruff: noqa: S608 - statements are put together from the constants in this file, never from values

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from farcall_common.store.audit_postgres import PostgresPort
from farcall_common.store.model import ApiToken, ServiceAccount
from farcall_common.store.postgres import PAYER

#: Columns by name: a later release may have added some.
_COLUMNS: Final = ", ".join(field.name for field in dataclasses.fields(ApiToken))
_ACCOUNT: Final = ", ".join(field.name for field in dataclasses.fields(ServiceAccount))


class PostgresTokens(PostgresPort):
    """:class:`~farcall_common.store.ports.Tokens` on psycopg 3."""

    def add_token(self, token: ApiToken) -> None:
        self._database.run(
            """
            WITH forgotten AS (
                DELETE FROM api_token WHERE owner_id = %(owner_id)s
                    AND least(expires_at, revoked_at) < %(created_at)s - interval '30 days'
            )
            INSERT INTO api_token (token_id, identity_id, owner_id, name, scopes, endpoints, functions, created_at,
                               expires_at)
            VALUES (%(token_id)s, %(identity_id)s, %(owner_id)s, %(name)s, %(scopes)s, %(endpoints)s, %(functions)s,
                    %(created_at)s, %(expires_at)s)
            """,
            {
                **vars(token),
                "scopes": list(token.scopes),
                "endpoints": None if token.endpoints is None else list(token.endpoints),
                "functions": None if token.functions is None else list(token.functions),
            },
        )

    def get_token(self, token_id: str) -> ApiToken | None:
        rows = self._database.rows(f"SELECT {_COLUMNS} FROM api_token WHERE token_id = %(id)s", {"id": token_id})
        return msgspec.convert(rows[0], ApiToken) if rows else None

    def list_tokens(self, owner_ids: Collection[str], *, limit: int = 1000) -> Sequence[ApiToken]:
        query = f"""
            SELECT {_COLUMNS} FROM api_token WHERE owner_id = ANY(%(ids)s)
            ORDER BY created_at DESC, token_id DESC LIMIT %(limit)s
        """
        rows = self._database.rows(query, {"ids": sorted(owner_ids), "limit": limit})
        return [msgspec.convert(row, ApiToken) for row in rows]

    def revoke_token(self, token_id: str, *, at: dt.datetime) -> bool:
        query = "UPDATE api_token SET revoked_at = %(at)s WHERE token_id = %(id)s AND revoked_at IS NULL"
        return self._database.run(query, {"id": token_id, "at": at}) > 0

    def note_token_use(self, token_id: str, *, at: dt.datetime) -> None:
        query = "UPDATE api_token SET last_used_at = %(at)s WHERE token_id = %(id)s"
        self._database.run(query, {"id": token_id, "at": at})

    # service accounts

    def add_account(self, account: ServiceAccount) -> None:
        self._database.run(
            """
            INSERT INTO service_account (account_id, owner_id, name, created_at)
            VALUES (%(account_id)s, %(owner_id)s, %(name)s, %(created_at)s)
            """,
            vars(account),
        )

    def get_account(self, account_id: str) -> ServiceAccount | None:
        query = f"SELECT {_ACCOUNT} FROM service_account WHERE account_id = %(id)s AND deleted_at IS NULL"
        rows = self._database.rows(query, {"id": account_id})
        return msgspec.convert(rows[0], ServiceAccount) if rows else None

    def list_accounts(self, owner_ids: Collection[str], *, limit: int = 1000) -> Sequence[ServiceAccount]:
        query = f"""
            SELECT {_ACCOUNT} FROM service_account WHERE owner_id = ANY(%(ids)s) AND deleted_at IS NULL
            ORDER BY name LIMIT %(limit)s
        """
        rows = self._database.rows(query, {"ids": sorted(owner_ids), "limit": limit})
        return [msgspec.convert(row, ServiceAccount) for row in rows]

    def quota_group(self, identity_id: str) -> Sequence[str]:
        query = f"""
            WITH payer AS (SELECT {PAYER} AS id)
            SELECT id FROM payer
            UNION ALL SELECT account_id FROM service_account WHERE owner_id = (SELECT id FROM payer)
        """
        return [row["id"] for row in self._database.rows(query, {"owner_id": identity_id})]

    def delete_account(self, account_id: str) -> bool:
        deleted = self._database.rows(
            """
            WITH tokens AS (DELETE FROM api_token WHERE identity_id = %(id)s)
            UPDATE service_account SET deleted_at = now(), name = account_id
            WHERE account_id = %(id)s AND deleted_at IS NULL RETURNING account_id
            """,
            {"id": account_id},
        )
        return bool(deleted)
