"""Tokens and service accounts of the fake cloud: recorded, and accepted until they are revoked."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

from farcall_common.errors import Conflict, NotFound

Json = dict[str, Any]

_EXPIRES_IN_S: Final = 90 * 86_400


class Tokens:
    """Tokens with their routes. Their scopes and limits are not enforced."""

    def __init__(self, *, owner_id: str) -> None:
        self._owner_id = owner_id
        self._tokens: dict[str, Json] = {}
        self._secrets: dict[str, str] = {}
        self._accounts: dict[str, Json] = {}

    @property
    def routes(self) -> Sequence[tuple[str, str, Callable[..., Any]]]:
        """Method, pattern of the path, and handler."""
        return (
            ("POST", "/v3/tokens", self._create_token),
            ("GET", "/v3/tokens", lambda _: {"tokens": list(reversed(self._tokens.values()))}),
            ("DELETE", "/v3/tokens/([^/]+)", self._revoke_token),
            ("POST", "/v3/accounts", self._create_account),
            ("GET", "/v3/accounts", lambda _: {"accounts": sorted(self._accounts.values(), key=_name)}),
            ("DELETE", "/v3/accounts/([^/]+)", self._delete_account),
        )

    def accepts(self, secret: str) -> bool:
        """Whether a bearer token was made here, and is not revoked."""
        token = self._tokens.get(self._secrets.get(secret, ""))
        return token is not None and "revoked_at" not in token

    def _create_token(self, body: Json) -> Json:
        account_id = body.get("account_id")
        if account_id is not None and account_id not in self._accounts:
            raise NotFound(f"there is no service account {account_id}")
        token_id, now = str(uuid.uuid4()), time.time()
        limits = {name: body[name] for name in ("endpoints", "functions") if body.get(name) is not None}
        self._tokens[token_id] = {
            "token_id": token_id,
            "name": body["name"],
            "identity_id": account_id or self._owner_id,
            "scopes": sorted(body["scopes"]),
            "created_at": now,
            "expires_at": now + (body.get("expires_in_s") or _EXPIRES_IN_S),
            **limits,
        }
        secret = f"farcall-token.{uuid.uuid4().hex}.signature"
        self._secrets[secret] = token_id
        return self._tokens[token_id] | {"token": secret}

    def _revoke_token(self, _: Json, token_id: str) -> Json:
        if token_id not in self._tokens:
            raise NotFound(f"there is no token {token_id}")
        self._tokens[token_id].setdefault("revoked_at", time.time())
        return {"result": 302}

    def _create_account(self, body: Json) -> Json:
        if body["name"] in map(_name, self._accounts.values()):
            raise Conflict(f"there is a service account {body['name']} already")
        account_id = str(uuid.uuid4())
        self._accounts[account_id] = {
            "account_id": account_id,
            "name": body["name"],
            "owner_id": self._owner_id,
            "created_at": time.time(),
        }
        return self._accounts[account_id]

    def _delete_account(self, _: Json, account_id: str) -> Json:
        if self._accounts.pop(account_id, None) is None:
            raise NotFound(f"there is no service account {account_id}")
        self._tokens = {id_: each for id_, each in self._tokens.items() if each["identity_id"] != account_id}
        return {"result": 302}


def _name(account: Json) -> str:
    return str(account["name"])
