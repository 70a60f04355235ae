"""Fake tokens and service accounts, in memory."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Collection, Sequence

from farcall_common.errors import Conflict
from farcall_common.store.model import ApiToken, ServiceAccount
from tests.support.stores.actions import FakeActions


class FakeTokens(FakeActions):
    """:class:`~farcall_common.store.ports.Tokens` in memory; a part of FakeDatabase."""

    def __init__(self) -> None:
        super().__init__()
        self._tokens: dict[str, ApiToken] = {}
        self._accounts: dict[str, ServiceAccount] = {}
        self._payers: dict[str, str] = {}  # of deleted accounts, too

    def add_token(self, token: ApiToken) -> None:
        with self._call():
            oldest = token.created_at - dt.timedelta(days=30)
            for each in self.list_tokens([token.owner_id]):
                if min(each.expires_at, each.revoked_at or each.expires_at) < oldest:
                    del self._tokens[each.token_id]
            self._tokens[token.token_id] = token

    def get_token(self, token_id: str) -> ApiToken | None:
        with self._call():
            return self._tokens.get(token_id)

    def list_tokens(self, owner_ids: Collection[str], *, limit: int = 1000) -> Sequence[ApiToken]:
        with self._call():
            found = [each for each in self._tokens.values() if each.owner_id in owner_ids]
            return sorted(found, key=lambda each: (each.created_at, each.token_id), reverse=True)[:limit]

    def revoke_token(self, token_id: str, *, at: dt.datetime) -> bool:
        with self._call():
            token = self._tokens.get(token_id)
            if token is None or token.revoked_at is not None:
                return False
            self._tokens[token_id] = dataclasses.replace(token, revoked_at=at)
            return True

    def note_token_use(self, token_id: str, *, at: dt.datetime) -> None:
        with self._call():
            if token := self._tokens.get(token_id):
                self._tokens[token_id] = dataclasses.replace(token, last_used_at=at)

    def add_account(self, account: ServiceAccount) -> None:
        with self._call():
            if any((each.owner_id, each.name) == (account.owner_id, account.name) for each in self._accounts.values()):
                raise Conflict(f"there is a service account {account.name} already")
            self._accounts[account.account_id] = account
            self._payers[account.account_id] = account.owner_id

    def quota_group(self, identity_id: str) -> Sequence[str]:
        with self._call():
            payer = self._payers.get(identity_id, identity_id)
            return [payer, *(each for each, owner_id in self._payers.items() if owner_id == payer)]

    def get_account(self, account_id: str) -> ServiceAccount | None:
        with self._call():
            return self._accounts.get(account_id)

    def list_accounts(self, owner_ids: Collection[str], *, limit: int = 1000) -> Sequence[ServiceAccount]:
        with self._call():
            found = [each for each in self._accounts.values() if each.owner_id in owner_ids]
            return sorted(found, key=lambda each: each.name)[:limit]

    def delete_account(self, account_id: str) -> bool:
        with self._call():
            self._tokens = {id_: each for id_, each in self._tokens.items() if each.identity_id != account_id}
            return self._accounts.pop(account_id, None) is not None
