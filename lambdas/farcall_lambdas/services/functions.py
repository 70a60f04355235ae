"""Registering, showing and forgetting functions. Their bodies are opaque."""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Callable, Sequence

from farcall_common.errors import InvalidRequest, PayloadTooLarge
from farcall_common.store.model import Function
from farcall_common.store.ports import Records
from farcall_common.wire.ids import new_id
from farcall_lambdas.identity import Identity
from farcall_lambdas.models.functions import RegisterFunction
from farcall_lambdas.services.access import Access
from farcall_lambdas.services.limits import check_quota
from farcall_lambdas.services.memo import MEMOIZE
from farcall_lambdas.settings import ApiSettings

__all__ = ["FunctionService"]


class FunctionService:
    """Functions of the caller, and those that others let the caller run."""

    def __init__(self, records: Records, access: Access, settings: ApiSettings, *, clock: Callable[[], float]) -> None:
        self._records = records
        self._access = access
        self._settings = settings
        self._clock = clock

    def register(self, identity: Identity, wanted: RegisterFunction) -> Function:
        """Store a function for good under a new id.

        :raises InvalidRequest: for sharing that could not be enforced.
        :raises PayloadTooLarge: for a body over the payload limit.
        :raises QuotaExceeded: for one function too many.
        """
        if wanted.group or wanted.ha_endpoint_id:
            raise InvalidRequest(
                "A function cannot be shared with a group or bound to a high-assurance endpoint here.",
                hint="Leave out group and ha_endpoint_id; make the function public, or grant it to identities.",
            )
        code = wanted.function_code if wanted.serialized else _packed_source(wanted.function_name, wanted.function_code)
        body = code.encode()
        if len(body) > self._settings.max_payload_bytes:
            raise PayloadTooLarge(
                f"The function has {len(body)} bytes; {self._settings.max_payload_bytes} are allowed.",
                hint="Import big data inside the function instead of closing over it.",
            )
        limit = self._settings.max_functions
        check_quota("functions", self._records.count_functions(identity.identity_id, limit=limit), limit)
        function = Function(
            function_id=new_id(),
            owner_id=identity.identity_id,
            name=wanted.function_name,
            body=body,
            body_hash=hashlib.sha256(body).hexdigest(),
            description=wanted.description,
            public=wanted.public,
            metadata={**(wanted.meta or {}), **({MEMOIZE: True} if wanted.memoize else {})},
            created_at=dt.datetime.fromtimestamp(self._clock(), dt.UTC),
        )
        self._records.add_function(function)
        return function

    def get(self, identity: Identity, function_id: str) -> Function:
        """A function that the caller may run."""
        return self._access.function(identity, function_id)

    def search(self, identity: Identity, *, search: str, limit: int) -> Sequence[Function]:
        """The caller's own functions, newest first."""
        return self._records.list_functions(identity.identity_id, search=search, limit=limit)

    def delete(self, identity: Identity, function_id: str) -> None:
        """Forget a function of the caller."""
        self._access.own_function(identity, function_id)
        self._records.delete_function(function_id)


def _packed_source(name: str, source: str) -> str:
    """Source text as the packed buffer that Globus Compute makes of it: strategy ``st``, then ``name:source``."""
    buffer = f"st\n{name}:{source}"
    return f"{len(buffer)}\n{buffer}"
