"""Admission of peers: compares the protocol version, ticket and ids with the peer's CURVE key."""

from __future__ import annotations

from typing import Protocol

from farcall_common import wire
from farcall_common.errors import (
    EndpointMismatch,
    EndpointTakenOver,
    FarcallError,
    ProtocolError,
    SpoolOutdated,
    TicketInvalid,
    VersionUnsupported,
)
from farcall_common.store.model import PeerKey
from farcall_common.store.tickets import Ticket
from farcall_common.wire import is_uuid
from farcall_forwarder.core.policy import Instant
from farcall_forwarder.core.results import MAX_ATTEMPTS


class TicketReader(Protocol):
    """Reads tickets; :class:`farcall_common.store.tickets.Tickets` does."""

    def verify(self, ticket: str, *, now: float) -> Ticket:
        """The ticket's content. Raises Unauthenticated."""


def check_opening(
    opening: wire.Hello | wire.OpenStream, peer: PeerKey, *, tickets: TicketReader, now: Instant
) -> Ticket:
    """Check the first message of a session against the owner of the peer's CURVE key. Returns its ticket.

    :raises FarcallError: with the reason for a refusal.
    """
    if wire.PROTOCOL_VERSION not in opening.protocol_versions:
        raise VersionUnsupported(f"this forwarder has version {wire.PROTOCOL_VERSION} of the protocol")
    try:
        ticket = tickets.verify(opening.ticket, now=now.epoch)
    except FarcallError as error:
        raise TicketInvalid(error.record.message, hint=error.hint) from error
    if ticket.peer != peer:
        raise TicketInvalid("the ticket belongs to another key or endpoint")
    if isinstance(opening, wire.Hello):
        _check_hello(opening, peer)
    return ticket


def _check_hello(hello: wire.Hello, peer: PeerKey) -> None:
    if hello.endpoint_id != peer.subject:
        raise EndpointMismatch(f"the key of this connection does not belong to endpoint {hello.endpoint_id}")
    ids = (hello.instance_id, hello.spool_id, *(held.task_id for held in hello.held))
    if not all(map(is_uuid, ids)) or any(held.attempt > MAX_ATTEMPTS for held in hello.held):
        raise ProtocolError("a Hello with ids that are not UUIDs, or with invalid attempts")


def taken_over(endpoint_id: str) -> EndpointTakenOver:
    """The refusal that the former process of a restarted agent receives."""
    return EndpointTakenOver(f"an agent that was started later, with the same spool, serves endpoint {endpoint_id} now")


def outdated(endpoint_id: str) -> SpoolOutdated:
    """The refusal that an agent with an old copy of a spool receives."""
    return SpoolOutdated(
        f"the spool is an old copy: endpoint {endpoint_id} has started tasks since then that may not run twice"
    )
