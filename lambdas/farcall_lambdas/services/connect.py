"""Connections of agents and clients: live forwarders, their keys, and the ticket."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import Any, Final

from farcall_common.errors import (
    Conflict,
    Forbidden,
    ForwarderWaking,
    NoForwarder,
    RateLimited,
    Unauthenticated,
    Unavailable,
)
from farcall_common.store.model import AuditEntry, ForwarderInfo, PeerKey, PeerKind, Right
from farcall_common.worker_share import WorkerShare
from farcall_lambdas.fleet import Fleet
from farcall_lambdas.identity import Identity
from farcall_lambdas.models.endpoints import RUNTIME, Connect
from farcall_lambdas.services.base import Context, Service
from farcall_lambdas.services.endpoints import end_sessions

#: Forwarders in an answer: enough to survive the loss of two.
MAX_FORWARDERS: Final = 3
RETRY_AFTER_S: Final = 2.0
#: How long the result stream of a caller with a token is open at once.
_TOKEN_TICKET_S: Final = 300.0
_KEEP_KEY: Final = "Use one key for one agent or client, also when it connects again."
#: How long to wait for forwarders that wake: Fargate needs half a minute to a minute.
WAKING_RETRY_AFTER_S: Final = 10.0
#: How long a wake waits for Spot capacity, which may be missing for hours.
SPOT_WAIT_S: Final = 300.0
#: A request so long after the last one begins another wake.
_WAKE_ENDS_S: Final = 60.0


@dataclasses.dataclass(frozen=True)
class Admitted:
    """Forwarders to try in order, and the ticket. ``expires_at`` in epoch seconds; ``owner_id``: of an endpoint."""

    forwarders: Sequence[ForwarderInfo]
    ticket: str
    expires_at: float
    owner_id: str = ""


class ConnectService(Service):
    """Admits agents and clients to forwarders. Forwarders of a ``fleet`` may sleep; a request for one wakes them."""

    def __init__(self, context: Context, fleet: Fleet | None) -> None:
        super().__init__(context)
        self._fleet = fleet
        #: When the wake under way began, and when ECS was last told. Each process of the API has its own.
        self._waking_since = self._woken_at = -math.inf
        self._is_on_demand = False

    def connect(self, identity: Identity, endpoint_id: str, wanted: Connect) -> Admitted:
        """Admit the agent of an endpoint of the caller, with this CURVE key.

        :raises Forbidden: if the endpoint is another user's, or the key belongs to another endpoint.
        :raises Unauthenticated: if the caller has a credential that the endpoint does not have any more.
        :raises NoForwarder: if none is alive.
        """
        endpoint = self._access.endpoint(identity, endpoint_id, Right.OWN)
        if identity.endpoint_id and (identity.endpoint_id, identity.credential_id) != (
            endpoint_id,
            endpoint.credential_id,
        ):
            raise Unauthenticated(
                "The endpoint's credential was revoked or replaced.",
                hint="Start the endpoint with its owner's login: it gets a new one.",
            )
        peer = PeerKey(wanted.public_key, PeerKind.AGENT, endpoint_id)
        key_owner = self._stores.endpoints.find_endpoints_by_key([wanted.public_key]).get(wanted.public_key)
        if key_owner not in (None, endpoint_id):
            raise Forbidden(
                "This key belongs to another endpoint.",
                hint="Make a new key pair: endpoints cannot share one.",
            )
        self._check_key(identity, peer)
        runtime: dict[str, Any] = {"python_version": wanted.python_version, "packages": wanted.packages}
        if wanted.serializers is not None:
            runtime["serializers"] = sorted(wanted.serializers)
        if wanted.platform:
            runtime["platform"] = wanted.platform
        if wanted.containers:
            runtime["containers"] = sorted(set(wanted.containers))
        if wanted.sealing is not None:
            runtime["sealing"] = wanted.sealing.model_dump()
        changes: dict[str, object] = {}
        if any(runtime.values()) and endpoint.metadata.get(RUNTIME) != runtime:
            changes["metadata"] = {**endpoint.metadata, RUNTIME: runtime}
        share = WorkerShare() if wanted.worker_share is None else WorkerShare(**wanted.worker_share.model_dump())
        if share != endpoint.worker_share:
            changes["worker_share"] = share
        if changes:
            # Only these fields: its owner may be changing or deleting the endpoint at this moment.
            self._stores.endpoints.change_endpoint(endpoint_id, changes)
        if key_owner is None:
            done = self._entry(
                identity,
                "endpoint.key",
                endpoint_id,
                owner_id=endpoint.owner_id,
                public_key=wanted.public_key,
            )
            self._add_key(endpoint_id, wanted.public_key, done)
        return dataclasses.replace(self._admit(peer), owner_id=endpoint.owner_id)

    def stream(self, identity: Identity, public_key: str) -> Admitted:
        """Admit a client of the caller to its result stream.

        :raises Forbidden: if the key belongs to an endpoint.
        :raises NoForwarder: if no forwarder is alive.
        """
        if self._stores.endpoints.find_endpoints_by_key([public_key]).get(public_key) is not None:
            raise Forbidden("This key belongs to an endpoint.", hint="Make a new key pair for the result stream.")
        peer = PeerKey(public_key, PeerKind.CLIENT, identity.identity_id)
        self._check_key(identity, peer)
        # Its session ends with the ticket, and a token may be revoked.
        return self._admit(peer, most_s=_TOKEN_TICKET_S if identity.token_id else math.inf)

    def _add_key(self, endpoint_id: str, public_key: str, done: AuditEntry) -> None:
        """:raises Forbidden: if it was revoked, or another endpoint has got it."""
        try:
            endpoints = self._stores.endpoints.audited(done)
            former = endpoints.add_endpoint_key(endpoint_id, public_key, at=self._now())
        except Conflict as error:
            raise Forbidden(
                "This key was revoked, or belongs to another endpoint.",
                hint="Make a new key pair: move curve.secret out of the endpoint's directory and start it.",
            ) from error
        if former:
            end_sessions(self._stores, endpoint_id, former)

    def _check_key(self, identity: Identity, peer: PeerKey) -> None:
        """Each key is kept while its ticket is valid: new keys of an identity are limited.

        :raises Forbidden: if the key belongs to another peer.
        :raises RateLimited: for too many new keys.
        """
        try:
            known = self._stores.queue.find_peers([peer.public_key]).get(peer.public_key)
            if known == peer:
                return
            taken = self._stores.queue.take_tokens(
                f"keys:{identity.rate_key}",
                1,
                rate_per_s=self._settings.key_rate_per_s,
                burst=self._settings.key_burst,
            )
        except Unavailable:
            return  # Then no forwarder is known either.
        if known is not None:
            raise _foreign_key()
        if not taken.tokens:
            raise RateLimited("You made too many new keys.", hint=_KEEP_KEY, retry_after_s=taken.wait_s)

    def _admit(self, peer: PeerKey, *, most_s: float = math.inf) -> Admitted:
        now = self._clock()
        forwarders = rank(self._stores.queue.forwarders(), peer.subject)
        if not forwarders:
            self._wake(now)
            raise NoForwarder("No forwarder is running.", retry_after_s=RETRY_AFTER_S)
        ttl_s = min(self._settings.ticket_ttl_s, most_s)
        if not self._stores.queue.admit(peer, ttl_s=ttl_s):
            raise _foreign_key()  # another user has got it since it was checked
        ticket = self._stores.tickets.issue(peer, expires_at=now + ttl_s)
        return Admitted(forwarders[:MAX_FORWARDERS], ticket, now + ttl_s)

    def _wake(self, now: float) -> None:
        """Wake the forwarders if they can sleep, once while they start, and after some minutes without Spot capacity.

        :raises ForwarderWaking: when they are starting.
        :raises Unavailable: if they cannot be started.
        """
        if self._fleet is None:
            return
        if now - self._woken_at >= WAKING_RETRY_AFTER_S:
            if now - self._woken_at > _WAKE_ENDS_S:
                self._waking_since, self._is_on_demand = now, False
            on_demand = not self._is_on_demand and now - self._waking_since >= SPOT_WAIT_S
            self._fleet.wake(on_demand=on_demand)
            self._is_on_demand |= on_demand
            self._woken_at = now
        raise ForwarderWaking("The forwarder was idle and is starting.", retry_after_s=WAKING_RETRY_AFTER_S)


def _foreign_key() -> Forbidden:
    return Forbidden("This key belongs to another user.", hint="Make a new key pair.")


def rank(forwarders: Sequence[ForwarderInfo], subject: str) -> Sequence[ForwarderInfo]:
    """Rendezvous hashing (Thaler and Ravishankar, 1998): every request for a subject gets the same order, and the loss
    of one forwarder moves only its subjects."""

    def weight(forwarder: ForwarderInfo) -> bytes:
        return hashlib.sha256(f"{forwarder.forwarder_id} {subject}".encode()).digest()

    return sorted(forwarders, key=weight, reverse=True)
