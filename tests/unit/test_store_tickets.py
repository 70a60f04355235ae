from __future__ import annotations

import jwt
import pytest

from farcall_common.errors import ConfigurationError, Unauthenticated
from farcall_common.store import PeerKey, PeerKind, Ticket, Tickets

KEY = "k" * 32
PEER = PeerKey("z85{}[]", PeerKind.AGENT, "e1")


def test_ticket_round_trips() -> None:
    ticket = Tickets(KEY).issue(PEER, expires_at=1000)
    assert Tickets(KEY).verify(ticket, now=999) == Ticket(PEER, 1000)


def test_a_ticket_expires_by_the_callers_clock() -> None:
    ticket = Tickets(KEY).issue(PEER, expires_at=1000)
    with pytest.raises(Unauthenticated, match="expired 5 s ago"):
        Tickets(KEY).verify(ticket, now=1005)


@pytest.mark.parametrize(
    "forged",
    [
        "",
        "not.a.ticket",
        Tickets("x" * 32).issue(PEER, expires_at=1000),
        jwt.encode({"kind": "agent", "sub": "e1", "key": "k", "exp": 1000}, "", algorithm="none"),
        jwt.encode({"kind": "agent", "sub": "e1", "exp": 1000}, KEY, algorithm="HS256"),
        jwt.encode({"kind": "king", "sub": "e1", "key": "k", "exp": 1000}, KEY, algorithm="HS256"),
        jwt.encode({"kind": "agent", "sub": "e1", "key": "k", "exp": 1000}, KEY * 2, algorithm="HS512"),
        jwt.encode({"kind": "agent", "sub": "e1", "key": "k", "exp": 1000}, "y" * 32, headers={"jwk": {"k": "y"}}),
        Tickets(KEY).issue(PEER, expires_at=1000) + ".x",
        Tickets(KEY).issue(PEER, expires_at=1000).rpartition(".")[0] + ".",
        "\ud800.\ud800.\ud800",
        "." * 100_000,
    ],
)
def test_foreign_ticket_is_refused(forged: str) -> None:
    with pytest.raises(Unauthenticated, match="not valid"):
        Tickets(KEY).verify(forged, now=0)


def test_a_damaged_ticket_is_refused() -> None:
    head, body, signature = Tickets(KEY).issue(PEER, expires_at=1000).split(".")
    with pytest.raises(Unauthenticated):
        Tickets(KEY).verify(f"{head}.{body[:-2]}AA.{signature}", now=0)


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        Tickets("short")
